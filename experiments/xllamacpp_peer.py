"""Decode with llama.cpp's server, by the package xllamacpp, for cpu_peers.py (see `peer_answering`)."""

from __future__ import annotations

import xllamacpp
from peer_answering import answer_requests

DRAFTED = 5  # tokens, as in our chain-5


def load(settings):
    kinds = xllamacpp.common_speculative_type
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = settings["model"], settings["context"], 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    if settings["float32"]:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if settings["draft"] == "prompt lookup":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    elif settings["draft"]:
        draft = params.speculative.draft
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft.mparams.path, draft.n_max = settings["draft"], DRAFTED
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = settings["threads"]
    server = xllamacpp.Server(params)
    asked = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False, "verbose": True, "return_tokens": True}

    def decode(prompt, new_tokens):
        answer = server.handle_completions(asked | {"prompt": prompt, "n_predict": new_tokens})
        return answer["__verbose"]["tokens"]

    return decode, None


if __name__ == "__main__":
    answer_requests(load)
