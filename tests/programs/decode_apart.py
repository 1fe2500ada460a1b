"""Decode with base and draft on devices of their own; report tokens, hits, rounds and what crosses between the two.

Arguments: the folder of ``settings.json`` and of the ``answer.json`` that is written; the base; the draft; the cases,
``rule/rows/tree[/fan-out]`` joined by commas.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import hydrajax
from hydrajax.decoding.prompts import right_padded
from hydrajax.decoding.state import Params
from hydrajax.ssd.decode import homes

RULES = {
    "greedy": hydrajax.Greedy(),
    "exact": hydrajax.ExactSampling(0.7),
    "rejection": hydrajax.RejectionSampling(0.7),
}


def crossings(fn, params, arguments, key) -> dict[str, list[int]]:
    """Return the bytes of what is handed from one side to the other in a round."""
    crossed = {}

    def watch(name, given):
        if name in ("hand over", "tell"):
            crossed[name] = [x.nbytes for x in jax.tree.leaves(given)]

    fn.recorded(params, *arguments, key, watch=watch)
    return crossed


def answer_of(case: str, settings: dict, m) -> dict:
    """Decode one case; with the setting ``compare`` also in one program, with the draft beside the base."""
    beside = Params(m.params.base, jax.device_put(m.params.draft, homes(m.params)[0]))
    limits, eos = np.array(settings["limits"], np.int32), (settings["eos"],)
    rule, rows, tree, *numbers = case.split("/")
    fan_out = [int(number) for number in numbers[0].split("-")] if numbers else None
    prompt, lengths = right_padded(settings["prompts"][: int(rows)], 16)
    arguments, key = (prompt, lengths), jax.random.key(3)
    shared = {"rule": RULES[rule], "max_new_tokens": settings["new"], "eos_ids": eos}
    shared["top_logprobs"] = 3 if settings["compare"] else 0
    fn = hydrajax.make_decode_fn(m, tree=tree, fan_out=fan_out, **shared)
    out, record = fn.recorded(m.params, *arguments, key, limits=limits[: int(rows)])
    answer = {
        "log-probabilities": [x.tolist() for x in jax.tree.leaves((out.logprobs, out.top))],
        "tokens": out.tokens.tolist(),
        "accept_lengths": out.accept_lengths.tolist(),
        "hits": record.hits,
        "rounds": record.rounds,
        "crossings": crossings(fn, m.params, arguments, key),
    }
    if settings["compare"]:
        plain = hydrajax.make_decode_fn(m.model, m.drafter, tree, **shared)
        out = plain(beside, *arguments, rng=key, limits=limits[: int(rows)])
        answer["in one program"] = [out.tokens.tolist(), out.accept_lengths.tolist()]
        answer["log-probabilities in one program"] = [x.tolist() for x in jax.tree.leaves((out.logprobs, out.top))]
        beside_base = jax.device_put(arguments, homes(m.params)[0])
        answer["beside the base"] = fn(m.params, *beside_base, key, limits=limits[: int(rows)]).tokens.tolist()
    return answer


def main(folder: Path, base: str, draft: str, cases: str) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    found = {"devices": jax.device_count()}
    m = hydrajax.load(base, draft, draft_devices=settings["draft_devices"])
    found["homes"] = [sorted(device.id for device in home.device_set) for home in homes(m.params)]
    for case in filter(None, cases.split(",")):
        found[case] = answer_of(case, settings, m)
    if settings["generate"]:
        texts = [[2, 3, 4], [9, 9]]
        one = hydrajax.load(base, draft)
        for name, some in (("apart", m), ("together", one)):
            answers = some.generate(texts, tree="chain-2", max_new_tokens=9, batch_size=2)
            pieces = list(some.generate(texts[:1], tree="chain-2", max_new_tokens=9, rule="exact", seed=4))
            found[name] = [answer.output_ids for answer in answers + pieces]
    (folder / "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
