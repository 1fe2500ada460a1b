"""Decode with CTranslate2 for cpu_peers.py (see `peer_answering`). It has no speculative decoding."""

from __future__ import annotations

import json
import time
from pathlib import Path

import ctranslate2
from peer_answering import answer_requests, random_ids


def load(settings):
    generator = ctranslate2.Generator(
        settings["model"], "cpu", compute_type=settings["kind"], inter_threads=1, intra_threads=settings["threads"]
    )
    words = json.loads((Path(settings["model"]) / "vocabulary.json").read_text(encoding="utf-8"))

    def generate(prompts, new_tokens):
        found = generator.generate_batch(
            [[words[token] for token in prompt] for prompt in prompts],
            max_length=new_tokens,
            include_prompt_in_result=False,
            return_end_token=True,
            sampling_topk=1,
        )
        return [one.sequences_ids[0] for one in found]

    def decode(prompt, new_tokens):
        tokens = []
        while len(tokens) < new_tokens:  # it ends at EOS
            tokens += generate([[*prompt, *tokens]], new_tokens - len(tokens))[0]
        return tokens

    def time_rows(rows, context, steps):
        """Time a batch of sequences: tokens of one sequence cannot be added to its cache together."""
        prompts = [random_ids(context - steps, settings["vocabulary"])] * rows
        seconds = []
        for new_tokens in (1, 1 + steps):
            began = time.perf_counter()
            lengths = {len(tokens) for tokens in generate(prompts, new_tokens)}
            seconds.append(time.perf_counter() - began)
        return (seconds[1] - seconds[0]) * 1e3 / steps if lengths == {1 + steps} else None

    return decode, time_rows


if __name__ == "__main__":
    answer_requests(load)
