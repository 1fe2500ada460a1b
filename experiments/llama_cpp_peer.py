"""Decode with llama.cpp, by the package llama-cpp-python, for cpu_peers.py (see `peer_answering`).

Installed from source, llama.cpp is built for this CPU. Its own functions are called, without the package's sampling.
"""

from __future__ import annotations

import time

import llama_cpp
import numpy as np
from peer_answering import answer_requests, random_ids

QUIET = llama_cpp.llama_log_callback(lambda *_: None)


def load(settings):
    llama_cpp.llama_log_set(QUIET, None)
    llama_cpp.llama_backend_init()
    size = settings["context"]
    model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = size
    params.n_threads = params.n_threads_batch = settings["threads"]
    if settings["float32"]:
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp cannot load {settings['model']}")
    memory, vocabulary = llama_cpp.llama_get_memory(context), settings["vocabulary"]
    batch = llama_cpp.llama_batch_init(size, 0, 1)

    def forward(tokens, start, outputs):
        """Read tokens at positions from ``start``, with logits of the last ``outputs``."""
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
            batch.logits[i] = i >= len(tokens) - outputs
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")

    def best():
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

    def decode(prompt, new_tokens):
        llama_cpp.llama_memory_clear(memory, True)
        forward(prompt, 0, 1)
        tokens = [best()]
        while len(tokens) < new_tokens:
            forward(tokens[-1:], len(prompt) + len(tokens) - 1, 1)
            tokens.append(best())
        return tokens

    def time_rows(rows, context, steps):
        ids = random_ids(context + rows, vocabulary)
        llama_cpp.llama_memory_clear(memory, True)
        forward(ids[:context], 0, 1)
        best()  # waits for the pass
        began = time.perf_counter()
        for _ in range(steps):
            forward(ids[context:], context, rows)
            best()
            llama_cpp.llama_memory_seq_rm(memory, 0, context, -1)
        return (time.perf_counter() - began) * 1e3 / steps

    return decode, time_rows


if __name__ == "__main__":
    answer_requests(load)
