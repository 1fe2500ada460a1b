"""Attacks on text that goes on in a kept cache, up to the context's last token, and that ends at stop strings."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from attacks.commands import base, text
from attacks.drafted import Case, check_bookkeeping, check_row
from attacks.registry import Fell, Place, attack

import hydrajax
from hydrajax.decoding.decode import result_of
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.processors import TokenCounts
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.text.tokenizer import decode_text

TURNS, WIDEST = 8, 8  # of a text, and tokens of what is added in each
TEXTS = 12  # that are stopped, of one program


@attack("drafted decoding goes on", count=40)
def goes_on(place: Place) -> int:
    """Answers and more text, perhaps in pieces or from an earlier place on: each answer is that of the whole text."""
    random = place.random
    case = Case.drawn(random)
    while not case.has_reference:
        case = Case.drawn(random)
    config, rows = case.alone.config, np.arange(case.batch)
    case = case.with_spec(max_new_tokens=config.max_positions)
    params = case.params(random)
    executor = FusedExecutor(case.alone.model, params, case.spec)
    texts, state = case.prompts(random, random.choice((16, config.max_positions))), None
    for turn in range(TURNS):
        limits = np.array([random.choice((0, 1, 5, 999)) for _ in rows], np.int32)
        sampling = case.sampling(case.rows(random), random)._replace(limits=limits)
        if state is not None:
            texts, state, more, counts = more_text(case, executor, texts, state, params, random)
        whole, clear = case.continued(params, texts, sampling)
        executor.params = case.helped(params, whole, random)
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
            check_row(case, ids, texts[row], whole[row], int(clear[row]), int(limits[row]), f"turn {turn}: ")
        texts = [before + ids for before, ids in zip(texts, out.ids(), strict=True)]
    return TURNS * case.batch


def more_text(case: Case, executor: Executor, texts: list, state: DecodeState, params: Params, random):
    """What each row goes on with: ``texts`` with it, the state before its last piece, and this for `Executor.extend`.

    A row without room for it goes back first, and so may any.
    """
    config, width, pieces = case.alone.config, random.choice((1, WIDEST)), random.choice((1, 1, 2))
    room = config.max_positions - pieces * width  # all rows write as many slots, which must be there
    back = [min(len(ids), room) if random.random() < 0.7 else random.randint(1, room) for ids in texts]
    back = [min(length, len(ids)) for length, ids in zip(back, texts, strict=True)]
    if [len(ids) for ids in texts] != back:
        texts, counts = [ids[:length] for ids, length in zip(texts, back, strict=True)], None
        if state.output.counts is not None:
            counts = TokenCounts.of_prompt(*right_padded(texts, config.max_positions), config.vocab_size)
        state = executor.rewind(state, np.array(back, np.int32), counts)
    for piece in range(pieces):
        new = [[random.randrange(config.vocab_size) for _ in range(random.randint(1, width))] for _ in texts]
        more, counts = right_padded(new, width)
        texts = [before + ids for before, ids in zip(texts, new, strict=True)]
        if piece < pieces - 1:
            following = np.array([random.randrange(config.vocab_size) for _ in texts], np.int32)
            executor.params = case.helped(params, np.zeros((case.batch, config.max_positions), np.int32), random)
            state = executor.feed(state, more, counts, following)
    return texts, state, more, counts


# --- stop strings -----------------------------------------------------------------------------------------------------


def cut(decode: Callable, ids: list[int], stop: list[str]) -> tuple[str, int]:
    """The definition, token by token and letter by letter: the text, and how many ids it takes."""
    for used in range(1, len(ids) + 1):
        known = decode(ids[:used])
        known = known if used == len(ids) else known.rstrip("\ufffd")  # a character that may yet become another
        for end in range(1, len(known) + 1):
            if complete := [string for string in stop if known[:end].endswith(string)]:
                return known[: end - max(map(len, complete))], used
    return decode(ids), len(ids)


@attack("stop strings", count=20)
def stop_strings(place: Place) -> int:
    """Pieces of what is said anyway, across tokens and within characters: cut alike alone, in a batch and streamed."""
    random = place.random
    m = place.once("stopped", lambda folder: hydrajax.load(base(place), "lookup", dtype="float32"))
    tree = hydrajax.TreeTopology.from_choices([[0], [0, 0], [1], [0, 0, 0]])
    settings = {"tree": tree, "max_new_tokens": 40}

    def decode(ids):
        return decode_text(m.tokenizer, ids)

    for _ in range(TEXTS):
        prompts = [text(random.randrange(10**6), random.randint(1, 6)) for _ in range(3)]
        whole = m.generate(prompts, batch_size=3, **settings)
        said = random.choice(whole).text
        at = [random.randrange(len(said)) for _ in range(random.randint(1, 4))]
        stop = [piece for start in at if (piece := said[start : start + random.randint(1, 5)])]
        wanted = [cut(decode, each.output_ids, stop) for each in whole]
        found = m.generate(prompts, stop=stop, batch_size=3, **settings)
        streams = [m.stream(prompt, stop=stop, **settings) for prompt in prompts]
        for number, (one, streamed) in enumerate(zip(found, streams, strict=True)):
            pieces = "".join(streamed)
            for how, result in (("in a batch", one), ("streamed", streamed.result)):
                if (result.text, len(result.output_ids)) != wanted[number]:
                    told = f"{result.text!r} of {len(result.output_ids)} ids, wanted {wanted[number]}"
                    raise Fell(f"stop {stop} {how}: {told}")
            if pieces != wanted[number][0]:
                raise Fell(f"stop {stop}: the pieces are {pieces!r}, wanted {wanted[number][0]!r}")
    return 3 * TEXTS
