"""Attacks on text that goes on in a kept cache, up to the context's last token, and that ends at stop strings."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from attacks.commands import base, text
from attacks.drafted import Case, check_bookkeeping, check_row, has_reference
from attacks.registry import Fell, Place, attack

import hydrajax
from hydrajax.decoding.decode import make_engine, result_of
from hydrajax.decoding.loop import Bursts
from hydrajax.decoding.prompts import right_padded
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.decoding.step import Engine
from hydrajax.text.tokenizer import decode_text

TURNS, WIDEST = 8, 8  # of a text, and tokens of what is added in each
TEXTS = 12  # that are stopped, of one program


@attack("drafted decoding goes on", count=40)
def goes_on(place: Place) -> int:
    """Answers and more text, perhaps in pieces or from an earlier place on: each answer is that of the whole text."""
    random = place.random
    case = Case.drawn(random)
    while not has_reference(case.rule):
        case = Case.drawn(random)
    config, rows = case.alone.config, np.arange(case.batch)
    engine = make_engine(
        case.alone.model, case.drafter, case.tree, case.rule, max_new_tokens=config.max_positions, eos_ids=case.eos_ids
    )
    bursts, feed = Bursts(engine), jax.jit(engine.feed)
    case, params = case._replace(max_new=config.max_positions), case.params(random)
    texts, state = case.prompts(random, random.choice((16, config.max_positions))), None
    for turn in range(TURNS):
        keys, rule = jax.random.split(jax.random.key(random.randrange(2**31)), case.batch), case.rules(random)
        limits = np.array([random.choice((0, 1, 5, 999)) for _ in rows], np.int32)
        if state is not None:
            found = more_text(case, engine, texts, state, feed, params, random)
            if found is None:
                break
            texts, state, more, counts = found
        whole, clear = case.alone.continued(params.base, texts, keys, rule)
        given = case.helped(params, whole, random)
        if state is None:
            prompt, lengths = right_padded(texts, config.max_positions)
            state = bursts.start(given, prompt, lengths, keys, rule, limits)
        else:
            state = bursts.extend(given, state, more, counts, keys, rule, limits)
        done = np.zeros(case.batch, bool)
        while not done.all():
            state, now = bursts.advance(given, state, np.zeros(case.batch, bool), random.choice((1, 2, 50)))
            done = now.done
        out = jax.device_get(result_of(state.output))
        check_bookkeeping(case, out, texts, limits)
        for row, ids in enumerate(out.ids()):
            check_row(case, ids, texts[row], whole[row], int(clear[row]), int(limits[row]), f"turn {turn}: ")
        texts = [before + ids for before, ids in zip(texts, out.ids(), strict=True)]
    return (turn + 1) * case.batch


def more_text(case: Case, engine: Engine, texts: list, state: DecodeState, feed: Callable, params: Params, random):
    """What each row goes on with: ``texts`` with it, the state before its last piece, and this for `Engine.extend`.

    A row without room for it goes back first, and so may any. What a penalty has counted is not given back by that:
    where the rule has some, None is returned when there is no more room.
    """
    config, counted = case.alone.config, state.output.seen is not None
    width, pieces = random.choice((1, WIDEST)), 1 if counted else random.choice((1, 1, 2))
    room = config.max_positions - pieces * width  # all rows write as many slots, which must be there
    back = [min(len(ids), room) if counted or random.random() < 0.7 else random.randint(1, room) for ids in texts]
    back = [min(length, len(ids)) for length, ids in zip(back, texts, strict=True)]
    if [len(ids) for ids in texts] != back:
        if counted:
            return None
        state = engine.rewind(state, np.array(back, np.int32))
        texts = [ids[:length] for ids, length in zip(texts, back, strict=True)]
    for piece in range(pieces):
        new = [[random.randrange(config.vocab_size) for _ in range(random.randint(1, width))] for _ in texts]
        more, counts = right_padded(new, width)
        texts = [before + ids for before, ids in zip(texts, new, strict=True)]
        if piece < pieces - 1:
            following = np.array([random.randrange(config.vocab_size) for _ in texts], np.int32)
            unknown = np.zeros((case.batch, config.max_positions), np.int32)
            state = feed(case.helped(params, unknown, random), state, more, counts, following)
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
    loaded = place.once("stopped", lambda folder: hydrajax.load(base(place), "lookup", dtype="float32"))
    tree = hydrajax.TreeTopology.from_choices([[0], [0, 0], [1], [0, 0, 0]])

    def decode(ids):
        return decode_text(loaded.tokenizer, ids)

    for _ in range(TEXTS):
        prompts = [text(random.randrange(10**6), random.randint(1, 6)) for _ in range(3)]
        whole = list(hydrajax.generate(loaded, prompts, tree=tree, max_new_tokens=40, batch_size=3))
        said = random.choice(whole).text
        at = [random.randrange(len(said)) for _ in range(random.randint(1, 4))]
        stop = [piece for start in at if (piece := said[start : start + random.randint(1, 5)])]
        wanted = [cut(decode, each.output_ids, stop) for each in whole]
        found = list(hydrajax.generate(loaded, prompts, tree=tree, max_new_tokens=40, stop=stop, batch_size=3))
        streams = [hydrajax.stream(loaded, prompt, tree=tree, max_new_tokens=40, stop=stop) for prompt in prompts]
        for number, (one, streamed) in enumerate(zip(found, streams, strict=True)):
            pieces = "".join(streamed)
            for how, result in (("in a batch", one), ("streamed", streamed.result)):
                if (result.text, len(result.output_ids)) != wanted[number]:
                    told = f"{result.text!r} of {len(result.output_ids)} ids, wanted {wanted[number]}"
                    raise Fell(f"stop {stop} {how}: {told}")
            if pieces != wanted[number][0]:
                raise Fell(f"stop {stop}: the pieces are {pieces!r}, wanted {wanted[number][0]!r}")
    return 3 * TEXTS
