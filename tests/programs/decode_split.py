"""Decode with base and draft on separate devices; report tokens, hits, rounds and the transferred bytes.

Arguments: the folder of ``settings.json`` and for ``answer.json``; the base; the draft; the cases
``rule/batch/tree[/fan-out]``, joined by commas.
"""

import json
from pathlib import Path

import jax
import numpy as np

import hydrajax
from helpers.programs import answer
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.state import Params
from hydrajax.sharding import Placement, last_devices

RULES = {
    "greedy": hydrajax.Greedy(),
    "exact": hydrajax.ExactSampling(0.7),
    "rejection": hydrajax.RejectionSampling(0.7),
    "block": hydrajax.BlockVerification(0.7),
}


def crossings(executor, arguments, key) -> dict[str, list[int]]:
    """Return the bytes that are transferred between the two sides in a round."""
    crossed = {}

    def watch(name, given):
        if name in ("hand over", "tell"):
            crossed[name] = [x.nbytes for x in jax.tree.leaves(given)]

    executor.recorded(*arguments, key, watch=watch)
    return crossed


def answer_of(case: str, settings: dict, m) -> dict:
    """Decode one case; with the setting ``compare`` also in one program on the same devices."""
    base_home, _ = m.placement.homes()
    limits = np.array(settings["limits"], np.int32)
    rule, rows, tree, *numbers = case.split("/")
    fan_out = tuple(int(number) for number in numbers[0].split("-")) if numbers else None
    prompt, lengths = right_padded(settings["prompts"][: int(rows)], 16)
    arguments, key = (prompt, lengths), jax.random.key(3)
    logprobs = 3 if settings["compare"] else None
    processors = [hydrajax.Penalties(presence_penalty=0.3)] if settings["compare"] else []
    request = hydrajax.Request(RULES[rule], processors, max_new_tokens=settings["new"])
    program = m.program(request, tree=tree, eos_ids=(settings["eos"],), logprobs=logprobs)
    executor = hydrajax.make_executor(m, program, request, fan_out=fan_out)
    out, record = executor.recorded(*arguments, key, limits[: int(rows)])
    answer = {
        "log-probabilities": [x.tolist() for x in jax.tree.leaves((out.logprobs, out.top))],
        "tokens": out.tokens.tolist(),
        "accept_lengths": out.accept_lengths.tolist(),
        "hits": record.hits,
        "rounds": record.rounds,
        "crossings": crossings(executor, arguments, key),
    }
    if settings["compare"]:
        plain = hydrajax.make_decode_fn(
            m.model, m.drafter, tree, RULES[rule], processors=processors, max_new_tokens=settings["new"],
            eos_ids=program.eos_ids, logprobs=logprobs,
        )  # fmt: skip
        on_base = Params(m.params.base, jax.device_put(m.params.draft, base_home))
        out = plain(on_base, *arguments, rng=key, limits=limits[: int(rows)])
        answer["in one program"] = [out.tokens.tolist(), out.accept_lengths.tolist()]
        answer["log-probabilities in one program"] = [x.tolist() for x in jax.tree.leaves((out.logprobs, out.top))]
        out = executor.decode(*jax.device_put(arguments, base_home), key, limits[: int(rows)])
        answer["beside the base"] = out.tokens.tolist()
    return answer


def main(folder: Path, base: str, draft: str, cases: str) -> dict:
    settings = json.loads((folder / "settings.json").read_text())
    m = hydrajax.load(base, draft, placement=Placement(draft=last_devices(settings["draft_devices"])))
    found = {"homes": [sorted(device.id for device in home.device_set) for home in m.placement.homes()]}
    for case in filter(None, cases.split(",")):
        found[case] = answer_of(case, settings, m)
    if settings["generate"]:
        texts = [[2, 3, 4], [9, 9]]
        one = hydrajax.load(base, draft)
        for name, some in (("split", m), ("together", one)):
            answers = some.generate(texts, tree="chain-2", max_new_tokens=9, batch_size=2)
            pieces = list(some.generate(texts[:1], tree="chain-2", max_new_tokens=9, rule="exact", seed=4))
            found[name] = [answer.output_ids for answer in answers + pieces]
    return found


if __name__ == "__main__":
    answer(main)
