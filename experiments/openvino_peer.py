"""Decode with OpenVINO GenAI for cpu_peers.py (see `peer_answering`).

OpenVINO reads a GGUF file itself and keeps its low-bit types. It computes in float32 where the type is float32; all
other settings are its defaults on this CPU.
"""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai
from peer_answering import answer_requests, random_ids


def load(settings):
    lookup = settings["draft"] == "prompt lookup"
    more = {"prompt_lookup": True} if lookup else {}
    if settings["float32"]:
        more |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = openvino_genai.LLMPipeline(settings["model"], "CPU", INFERENCE_NUM_THREADS=settings["threads"], **more)
    wanted = openvino_genai.GenerationConfig()
    wanted.ignore_eos, wanted.do_sample = True, False
    if lookup:
        wanted.num_assistant_tokens, wanted.max_ngram_size = 5, 3  # the numbers of OpenVINO's own example

    def generate(prompt, new_tokens):
        wanted.max_new_tokens = new_tokens
        return pipeline.generate(openvino.Tensor(np.array([prompt])), wanted)

    def time_rows(rows, context, steps):
        if rows > 1:
            return None  # its pipeline decodes single sequences token by token
        return generate(random_ids(context - steps, settings["vocabulary"]), steps).perf_metrics.get_tpot().mean

    return lambda prompt, new_tokens: generate(prompt, new_tokens).tokens[0], time_rows


if __name__ == "__main__":
    answer_requests(load)
