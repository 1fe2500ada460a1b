"""Training checkpoints are restored as saved after donation, damage, a full disk and kill -9."""

import signal
import subprocess
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers.full_disk import MAY_REPORT_LATE, full_disk
from helpers.programs import command
from helpers.refusals import assert_refused
from hydrajax.errors import HydrajaxError
from hydrajax.train.checkpoints import TrainCheckpoints


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def small(seed: int) -> dict:
    return {"kernel": jnp.asarray(numbers(seed, 8, 4)), "count": jnp.int32(seed)}


LARGE = {"kernel": jnp.asarray(numbers(1, 256, 64)), "count": jnp.int32(1)}


def opened(directory, keep: int = 2, higher_is_better: bool = True) -> TrainCheckpoints:
    return TrainCheckpoints(directory, keep=keep, higher_is_better=higher_is_better)


def fill(directory, *steps: int, keep: int = 3) -> Path:
    """A directory of checkpoints of ``small(step)``."""
    with opened(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, small(step), {"position": step})
    return Path(directory)


def newest(directory) -> tuple[int, list[str]]:
    """Restore, compare with what `fill` saved, and return the step and the warnings."""
    warnings: list[str] = []
    with opened(directory) as checkpoints:
        step, state, meta = checkpoints.restore(small(0), on_warning=warnings.append)
    same(state, small(step))
    assert meta == {"position": step}
    return step, warnings


def same(ours, theirs) -> None:
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert [x.dtype for x in jax.tree.leaves(ours)] == [x.dtype for x in jax.tree.leaves(theirs)]


def test_training_state(tmp_path, capfd):
    """An optimizer's named tuples, every dtype in use, a random key's data, nested meta data; nothing is printed."""
    params = {"a": {"kernel": jnp.asarray(numbers(1, 8, 4), jnp.bfloat16)}, "b": [jnp.ones(3), jnp.arange(4)]}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adamw(1e-3), {"a": True, "b": False}))
    state = (params, optimizer.init(params), jax.random.key_data(jax.random.key(3)))
    meta = {"position": [3, 17], "config": {"lr": 3e-4, "name": "é"}, "loss": 0.1}
    with opened(tmp_path / "deep" / "run") as checkpoints:
        assert (checkpoints.latest(), checkpoints.meta()) == (None, None)
        checkpoints.save(7, state, meta, 0.5, wait=True)
        assert (checkpoints.latest(), checkpoints.meta()) == (7, meta)
        abstract = jax.eval_shape(lambda: state)
        step, ours, found = checkpoints.restore(abstract)
    assert (step, found) == (7, meta)
    same(ours, state)
    assert capfd.readouterr() == ("", "")


def test_the_state_may_be_donated_at_once(tmp_path):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    with opened(tmp_path, keep=9) as checkpoints:
        for step in range(4):
            wanted = {str(i): numbers(10 * step + i, 512, 512) for i in range(6)}
            state = jax.tree.map(lambda x: jnp.asarray(x) * 1, wanted)
            checkpoints.save(step, state, {})
            for _ in range(3):
                state = overwrite(state)
            jax.block_until_ready(state)
            _, ours, _ = checkpoints.restore(wanted)
            same(ours, wanted)


def test_saves_are_written_in_the_background(tmp_path, monkeypatch):
    """While its last file is held up, `save` has returned and the checkpoint does not exist yet."""
    released = threading.Event()
    write_record = TrainCheckpoints._write_record
    monkeypatch.setattr(TrainCheckpoints, "_write_record", lambda self: released.wait(60) and write_record(self))
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, small(1), {"position": 1})
        assert checkpoints.steps() == []
        assert not (tmp_path / "1").exists()
        released.set()
        checkpoints.wait()
        assert checkpoints.steps() == [1]
    assert newest(tmp_path) == (1, [])


@pytest.mark.parametrize(
    ("metrics", "higher", "kept"),
    [
        ([5, 1, 2, 3], False, [1, 2, 3]),
        ([2, 2, 1, 1], True, [1, 2, 3]),  # the newest of equal ones
        ([1, float("nan"), None, 0], True, [0, 2, 3]),
        ([None, None, None, None], False, [2, 3]),
    ],
)
def test_newest_and_best_are_kept(tmp_path, metrics, higher, kept):
    for half in (0, 2):  # the best is remembered when the run is resumed
        with opened(tmp_path, 2, higher) as checkpoints:
            for step in range(half, half + 2):
                checkpoints.save(step, small(step), {}, metrics[step])
    with opened(tmp_path, 2, higher) as checkpoints:
        assert checkpoints.steps() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(step) for step in kept]


def test_state_of_another_configuration(tmp_path):
    """An older checkpoint is not used instead."""
    fill(tmp_path, 1)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(2, small(2), {})
        begin = "checkpoint...step 2 was saved by another configuration..."
        narrow = jnp.ones((8, 4), jnp.bfloat16)
        assert_refused(
            lambda other: checkpoints.restore(other, on_warning=pytest.fail),
            (small(0) | {"kernel": jnp.ones((8, 5))}, begin + "kernel: got float32[8, 4], expected float32[8, 5]"),
            (small(0) | {"kernel": narrow}, begin + "float32[8, 4]...bfloat16[8, 4]"),
            ({"kernel": jnp.ones((8, 4))}, begin + "count: got int32[], expected nothing"),
            (small(0) | {"more": jnp.ones(2)}, begin + "more: got nothing, expected float32[2]"),
            ((jnp.ones((8, 4)), jnp.int32(0)), begin),
        )


def test_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(opened, (tmp_path / "file", "checkpoint...cannot use directory...file"))
    with opened(tmp_path / "run") as checkpoints:
        assert_refused(checkpoints.restore, (small(0), "no checkpoint in...run"))
        checkpoints.save(1, small(1), {"position": 1})
        assert_refused(checkpoints.save, (1, small(2), {}, "checkpoint...step 1 is already saved"))
    assert newest(tmp_path / "run") == (1, [])


def harm(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 255
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["missing", "truncated", "changed"])
def test_damaged_checkpoint_is_skipped(tmp_path, how, capfd):
    """Damage to any file of the state gives one warning, and the checkpoint before it is used."""
    fill(tmp_path, 1, 2)
    files = [path for path in (tmp_path / "2" / "state").rglob("*") if path.is_file()]
    arrays = [path for path in files if path.stat().st_size >= 100]
    assert any(path.parent.name == "d" for path in arrays)
    for path in [*arrays, tmp_path / "2" / "hydrajax.json"]:
        content = path.read_bytes()
        harm(path, how)
        step, warnings = newest(tmp_path)
        assert step == 1, path
        (warning,) = warnings
        assert "\n" not in warning
        assert "step 2 is damaged" in warning
        assert path.name in warning
        path.write_bytes(content)
    harm(tmp_path / "2" / "_CHECKPOINT_METADATA", how)  # orbax's, not needed
    assert newest(tmp_path) == (2, [])
    assert capfd.readouterr() == ("", "")
    for step in (1, 2):
        harm(tmp_path / str(step) / "hydrajax.json", how)
    with opened(tmp_path) as checkpoints:
        assert_refused(checkpoints.restore, (small(0), "every checkpoint in...step 2 is damaged...hydrajax.json"))
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}  # reading changes nothing


def test_training_resumes_from_the_checkpoint_before_the_damage(tmp_path):
    """A damaged checkpoint is replaced by a new one of the same step and does not count among the newest."""
    fill(tmp_path, 1, 2, 3)
    harm(tmp_path / "2" / "hydrajax.json", "missing")
    harm(tmp_path / "3" / "state" / "_METADATA", "truncated")
    with opened(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore(small(0))[0] == 1
        assert checkpoints.latest() == 3
        checkpoints.save(2, small(2), {"position": 2}, wait=True)
        assert checkpoints.steps() == [1, 2]
    assert newest(tmp_path) == (2, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "2.damaged", "3.damaged"]


@pytest.mark.parametrize("call", ["wait", "save", "close"])
@MAY_REPORT_LATE
def test_failed_write(tmp_path, call, capfd):
    fill(tmp_path, 1, 2)
    checkpoints = opened(tmp_path)
    arguments = (4, LARGE, {}) if call == "save" else ()
    with full_disk(1024):
        checkpoints.save(3, LARGE, {}, 9.0)
        assert_refused(
            getattr(checkpoints, call), (*arguments, f"checkpoint: saving step 3...{tmp_path}...File too large")
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    if call != "close":
        assert checkpoints.restore(small(0))[0] == 2
        checkpoints.save(3, small(3), {"position": 3}, 1.0)
        checkpoints.close()
        assert newest(tmp_path)[0] == 3
    assert newest(tmp_path)[1] == []
    assert capfd.readouterr() == ("", "")


@MAY_REPORT_LATE
def test_no_space_for_any_file_or_for_the_last(tmp_path, monkeypatch):
    """Orbax then raises further errors when it is closed."""
    with full_disk(0), pytest.raises(HydrajaxError, match="saving step 1"), opened(tmp_path) as checkpoints:
        checkpoints.save(1, small(1), {}, wait=True)
    assert not list(tmp_path.iterdir())
    fill(tmp_path, 1)

    def no_space(self):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, opened(tmp_path) as checkpoints:
        patch.setattr(TrainCheckpoints, "_write_record", no_space)
        message = "saving step 2...No space left on device"
        assert_refused(lambda: checkpoints.save(2, small(2), {}, wait=True), (message,))
    assert newest(tmp_path) == (1, [])


@MAY_REPORT_LATE
def test_an_error_of_the_training_is_not_hidden_by_a_failed_save(tmp_path):
    def train():
        with full_disk(1024), opened(tmp_path) as checkpoints:
            checkpoints.save(1, LARGE, {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def test_killed_while_saving(tmp_path):
    """kill -9 after all arrays are written leaves a temporary directory, which the next start removes."""
    fill(tmp_path, 1, 2)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command("hang_while_saving", tmp_path), **pipes)
    assert process.stdout.readline() == "saving\n", process.stderr.read()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    left = {path.name for path in tmp_path.iterdir()} - {"1", "2"}
    assert len(left) == 1
    assert left.pop().startswith("3.")
    assert newest(tmp_path) == (2, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
