"""Conversations of which the model writes both sides."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import real_model_dialogues as script

from hydrajax.bench.shapes import PRESETS
from hydrajax.cli import run_command
from hydrajax.errors import HydrajaxError
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama

EOS = 2
TURNS = script.Turns([1, 3, 4], [EOS, 5, 6, 7], [EOS, 8, 9])


def test_draws_follow_the_distribution():
    """Over two blocks, of which the second is not full."""
    logits = jnp.full((4000, 300), -30.0).at[:, jnp.array([3, 255, 256, 299])].set(jnp.log(jnp.array([1, 2, 3, 4.0])))
    found = np.bincount(np.asarray(jax.jit(script.draw)(jax.random.key(0), logits)), minlength=300)
    assert found.sum() == found[[3, 255, 256, 299]].sum() == 4000
    np.testing.assert_allclose(found[[3, 255, 256, 299]] / 4000, [0.1, 0.2, 0.3, 0.4], atol=0.03)


@pytest.mark.slow
def test_the_template_follows_every_message_and_greedy_rows_repeat():
    """A model with random weights ends messages by chance, so its EOS is made likely."""
    config = PRESETS["tiny"]
    model = Llama(config)
    params = jax.jit(lambda: init_base(model, jax.random.key(0)))()
    start, advance = script.make_writer(model, TURNS, EOS, batch=6)
    params["lm_head"] = params["lm_head"].at[:, EOS].multiply(40)
    nothing = script.Beginnings.of([([], script.USER)] * 6)
    writing, rows = start(params, nothing, jax.random.key(1)), []
    for _ in range(2):
        writing, tokens = advance(params, writing)
        rows.append(np.asarray(tokens))
    rows, turns = np.concatenate(rows).T, 0
    assert rows.shape == (6, 2 * script.CHUNK)
    np.testing.assert_array_equal(writing.cache.lengths, len(TURNS.opening) + 2 * script.CHUNK)
    for row in rows.tolist():
        role, at = script.USER, 0
        while EOS in row[at:]:
            at = row.index(EOS, at)
            following = (TURNS.after_user, TURNS.after_assistant)[role]
            assert following[: len(row) - at] == row[at : at + len(following)]
            role, at, turns = 1 - role, at + len(following), turns + 1
    assert turns > 12
    # The greedy rows' answers are what the base prefers, token by token.
    row = next(row for row in rows[::2].tolist() if EOS in row[:60])
    answer = row.index(EOS) + len(TURNS.after_user)
    text = jnp.array([[*TURNS.opening, *row]])

    @jax.jit
    def logits(params):
        read = model.apply({"params": params}, text, jnp.arange(text.shape[1])[None], np.tri(text.shape[1], dtype=bool))
        return model.apply({"params": params}, read.hidden[0], method="logits")

    best = np.argmax(logits(params), axis=-1)
    end = row.index(EOS, answer) if EOS in row[answer:] else len(row) - 1
    offset = len(TURNS.opening)
    assert row[answer : end + 1] == best[answer + offset - 1 : end + offset].tolist()


@pytest.mark.slow
def test_a_repeated_command_writes_the_last_batch_anew(tmp_path, monkeypatch):
    """And the earlier ones stay as they are."""
    model, tokenizer = Llama(PRESETS["tiny"]), SimpleNamespace(chat_template="some", eos_token_id=EOS)
    params = SimpleNamespace(base=jax.jit(lambda: init_base(model, jax.random.key(0)))())
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer, params=params)
    monkeypatch.setattr(script.hydrajax, "load", lambda base, dtype: loaded)
    monkeypatch.setattr(script, "turns_of", lambda tokenizer: TURNS)
    monkeypatch.setattr(script, "records", lambda turns, rows, eos: [{"output_ids": row.tolist()} for row in rows])
    file = tmp_path / "out.jsonl"
    argv = ["--output", str(file), "--length", "64", "--batch-size", "2", "--tokens", "384"]
    assert run_command("dialogues", "", script.add_arguments, script.run, argv) == 0
    whole = file.read_bytes()
    assert [json.loads(line)["batch"] for line in whole.splitlines()] == [0, 0, 1, 1, 2, 2]
    file.write_bytes(b"".join(line + b"\n" for line in whole.splitlines()[:3]) + b'{"batch": 1, "outp')
    assert run_command("dialogues", "", script.add_arguments, script.run, argv) == 0
    assert file.read_bytes() == whole


def test_conversations_begin_with_given_messages(tmp_path):
    """Whole messages, which the assistant answers, and beginnings; also wrong lines."""
    model, file = Llama(PRESETS["tiny"]), tmp_path / "begin.jsonl"
    params = jax.jit(lambda: init_base(model, jax.random.key(0)))()

    def tokenizer(text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text]}

    file.write_text('{"turns": ["ab", "c"]}\n{"begin": "xyz"}\n{"turns": ["too long for this"]}\n')
    given = script.beginnings_of(file, tokenizer, TURNS, 8)
    assert given == [([97, 98, *TURNS.after_user], 1), ([120, 121, 122], script.USER)]
    start, advance = script.make_writer(model, TURNS, EOS, batch=2, chunk=8)
    writing, rows = advance(params, start(params, script.Beginnings.of(given), jax.random.key(1)))
    for row, (ids, role), now in zip(np.asarray(rows).T, given, writing.role, strict=True):
        assert row[: len(ids)].tolist() == ids
        assert now == role or EOS in row[len(ids) :]
    for line in ('{"turns": 3}', '{"turns": [3]}', '{"begin": ""}', "{}", '{"begin": "longer than eight"}'):
        file.write_text(line + "\n")
        with pytest.raises(HydrajaxError, match="begin: "):
            script.beginnings_of(file, tokenizer, TURNS, 8)
