"""Decoding that continues in a cache, up to the end of the context, and decoding with stop strings."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

import hydrajax
from hydrajax.decoding.decode import result_of
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.processing import TokenCounts
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.text.tokenizer import decode_text
from tools.faults.drafts import Case, check_bookkeeping, check_sequence
from tools.faults.fixtures import base, text
from tools.faults.registry import Failure, Trial, fault

TURNS, WIDTH = 8, 8  # turns of a text, and the most tokens of a chunk
TEXTS = 12  # batches with stop strings


@fault("drafts-cached", seeds=40)
def cached(trial: Trial) -> int:
    """Turns of text and answers, in chunks and after rewinds: each answer equals that of the whole text."""
    random = trial.random
    case = Case.drawn(random)
    while not case.has_reference:
        case = Case.drawn(random)
    config, rows = case.reference.config, np.arange(case.batch)
    case = case.with_program(max_new_tokens=config.max_positions)
    params = case.params(random)
    executor = FusedExecutor(case.reference.model, params, case.program)
    texts, state = case.prompts(random, random.choice((16, config.max_positions))), None
    for turn in range(TURNS):
        limits = np.array([random.choice((0, 1, 5, 999)) for _ in rows], np.int32)
        sampling = case.sampling(case.requests(random), random)._replace(limits=limits)
        if state is not None:
            texts, state, more, counts = extend(case, executor, texts, state, params, random)
        whole, clear = case.expected(params, texts, sampling)
        executor.params = case.with_truth(params, whole, random)
        if state is None:
            state = executor.prefill(*right_padded(texts, config.max_positions), sampling)
        else:
            state = executor.extend(state, more, counts, sampling)
        done = np.zeros(case.batch, bool)
        while not done.all():
            state, now = executor.advance(state, np.zeros(case.batch, bool), random.choice((1, 2, 50)))
            done = now.done
        out = jax.device_get(result_of(state.output))
        check_bookkeeping(case, out, texts, limits)
        for row, ids in enumerate(out.ids()):
            check_sequence(case, ids, texts[row], whole[row], int(clear[row]), int(limits[row]), f"turn {turn}: ")
        texts = [before + ids for before, ids in zip(texts, out.ids(), strict=True)]
    return TURNS * case.batch


def extend(case: Case, executor: Executor, texts: list, state: DecodeState, params: Params, random):
    """Append random chunks to each text, after rewinding any that lack room and some others.

    Returns:
        The texts with them, the state before the last chunk, and this chunk with its lengths for `Executor.extend`.
    """
    config, width, n_chunks = case.reference.config, random.choice((1, WIDTH)), random.choice((1, 1, 2))
    room = config.max_positions - n_chunks * width  # all sequences write this many slots
    back = [min(len(ids), room) if random.random() < 0.7 else random.randint(1, room) for ids in texts]
    back = [min(length, len(ids)) for length, ids in zip(back, texts, strict=True)]
    if [len(ids) for ids in texts] != back:
        texts, counts = [ids[:length] for ids, length in zip(texts, back, strict=True)], None
        if state.output.counts is not None:
            counts = TokenCounts.of_prompt(*right_padded(texts, config.max_positions), config.vocab_size)
        state = executor.rewind(state, np.array(back, np.int32), counts)
    for chunk in range(n_chunks):
        new = [[random.randrange(config.vocab_size) for _ in range(random.randint(1, width))] for _ in texts]
        more, counts = right_padded(new, width)
        texts = [before + ids for before, ids in zip(texts, new, strict=True)]
        if chunk < n_chunks - 1:
            following = np.array([random.randrange(config.vocab_size) for _ in texts], np.int32)
            executor.params = case.with_truth(params, np.zeros((case.batch, config.max_positions), np.int32), random)
            state = executor.feed(state, more, counts, following)
    return texts, state, more, counts


# --- stop strings -----------------------------------------------------------------------------------------------------


def cut(decode: Callable, ids: list[int], stop: list[str]) -> tuple[str, int]:
    """The definition, token by token and character by character. Returns the text and its number of ids."""
    for used in range(1, len(ids) + 1):
        known = decode(ids[:used])
        known = known if used == len(ids) else known.rstrip("\ufffd")  # an incomplete character
        for end in range(1, len(known) + 1):
            if complete := [string for string in stop if known[:end].endswith(string)]:
                return known[: end - max(map(len, complete))], used
    return decode(ids), len(ids)


@fault("stop-strings", seeds=20)
def stop_strings(trial: Trial) -> int:
    """Stop strings across tokens and within characters: one result alone, in a batch and streamed."""
    random = trial.random
    m = trial.once("stopped", lambda folder: hydrajax.load(base(trial), "lookup", dtype="float32"))
    tree = hydrajax.TreeTopology.from_choices([[0], [0, 0], [1], [0, 0, 0]])
    settings = {"tree": tree, "max_new_tokens": 40}

    def decode(ids):
        return decode_text(m.tokenizer, ids)

    for _ in range(TEXTS):
        prompts = [text(random.randrange(10**6), random.randint(1, 6)) for _ in range(3)]
        whole = m.generate(prompts, batch_size=3, **settings)
        sample = random.choice(whole).text
        at = [random.randrange(len(sample)) for _ in range(random.randint(1, 4))]
        pieces = (sample[start : start + random.randint(1, 5)] for start in at)
        # A replaced byte is final or not by the next one, so `cut` cannot tell which token completes such a piece.
        stop = [piece for piece in pieces if piece and "\ufffd" not in piece]
        wanted = [cut(decode, each.output_ids, stop) for each in whole]
        found = m.generate(prompts, stop=stop, batch_size=3, **settings)
        streams = [m.stream(prompt, stop=stop, **settings) for prompt in prompts]
        for number, (one, streamed) in enumerate(zip(found, streams, strict=True)):
            shown = "".join(streamed)
            for how, result in (("in a batch", one), ("streamed", streamed.result)):
                if (result.text, len(result.output_ids)) != wanted[number]:
                    got = (result.text, len(result.output_ids))
                    raise Failure(f"stop {stop} {how}: got {got}, expected {wanted[number]}")
            if shown != wanted[number][0]:
                raise Failure(f"stop {stop}: streamed {shown!r}, expected {wanted[number][0]!r}")
    return 3 * TEXTS
