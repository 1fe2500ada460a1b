"""Decode with llama.cpp for peers.py, in a separate process: in one that also runs torch it is 20% slower.

    python experiments/llama_cpp_peer.py FILE.gguf THREADS NEW_TOKENS [lookup]

Each line of standard input is a JSON list of prompt ids, and each line of standard output one of continuation ids.
"""

from __future__ import annotations

import json
import sys

import xllamacpp


def main() -> None:
    path, threads, new_tokens, *lookup = sys.argv[1:]
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = path, 4096, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = int(threads)
    if lookup:
        settings.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(settings)
    asked = {"n_predict": int(new_tokens), "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    asked |= {"verbose": True, "return_tokens": True}
    for line in sys.stdin:
        answer = server.handle_completions(asked | {"prompt": json.loads(line)})
        print(json.dumps(answer["__verbose"]["tokens"]), flush=True)


if __name__ == "__main__":
    main()
