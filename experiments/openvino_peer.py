"""Decode with OpenVINO GenAI for peers.py, in a separate process, so that its threads do not meet those of torch.

    python experiments/openvino_peer.py FILE.gguf THREADS NEW_TOKENS [lookup]

Each line of standard input is a JSON list of prompt ids, and each line of standard output one of continuation ids.
OpenVINO reads the GGUF file itself and keeps its low-bit types; all other settings are its defaults on this CPU.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    path, threads, new_tokens, *lookup = sys.argv[1:]
    settings = {"prompt_lookup": True} if lookup else {}
    pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=int(threads), **settings)
    wanted = openvino_genai.GenerationConfig()
    wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = int(new_tokens), True, False
    if lookup:
        wanted.num_assistant_tokens, wanted.max_ngram_size = 5, 3  # the numbers of OpenVINO's own example
    for line in sys.stdin:
        ids = openvino.Tensor(np.array([json.loads(line)]))
        print(json.dumps(list(pipeline.generate(ids, wanted).tokens[0])), flush=True)


if __name__ == "__main__":
    main()
