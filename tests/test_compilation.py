"""The compilation cache on disk: where it is, what leaves it alone, and that `load` turns it on."""

import os
import subprocess
from pathlib import Path

import jax
import pytest

from helpers.programs import command
from hydrajax.compilation import use_compilation_cache

LIMIT = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def untold():
    """JAX as it is where nobody has told it a folder."""
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", LIMIT)}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("untold")
def test_the_folder_and_the_limit(monkeypatch, tmp_path):
    """A folder and a limit that JAX was told stay; else short programs are kept too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(LIMIT.upper(), "3")
    jax.config.update(LIMIT, 7)
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "hydrajax" / "xla")
    assert getattr(jax.config, LIMIT) == 7
    monkeypatch.delenv(LIMIT.upper())
    for folder in ("elsewhere", ""):
        jax.config.update("jax_compilation_cache_dir", folder)
        use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == folder
    jax.config.update("jax_compilation_cache_dir", None)
    use_compilation_cache()
    assert getattr(jax.config, LIMIT) == 0.1


@pytest.mark.usefixtures("untold")
def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.quick("default")
@pytest.mark.parametrize(
    ("environment", "kept"),
    [
        ({}, "xdg/hydrajax/xla"),
        ({"JAX_COMPILATION_CACHE_DIR": "mine"}, "mine"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, None),
    ],
    ids=["default", "own folder", "off"],
)
def test_loading_turns_it_on(tiny_checkpoint, tmp_path, environment, kept):
    inherited = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    everything = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    subprocess.run(
        command("compile_after_load", tiny_checkpoint),
        env=inherited | everything | environment,
        cwd=tmp_path,
        check=True,
        timeout=300,
    )
    folders = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("jit_*")}
    assert folders == ({kept} if kept else set())


@pytest.mark.quick("2-1")
@pytest.mark.parametrize(("devices", "kept"), [(1, 2), (2, 1)])
def test_what_is_split_over_cpu_devices_is_not_kept(tmp_path, devices, kept):
    """Read back, its all-reduces would wait for each other."""
    environment = {"JAX_COMPILATION_CACHE_DIR": "mine", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    subprocess.run(
        command("compile_for_devices", devices), env=os.environ | environment, cwd=tmp_path, check=True, timeout=300
    )
    assert len(list(tmp_path.glob("mine/jit_*-cache"))) == kept
