"""Decode with transformers in float32 for cpu_peers.py (see `peer_answering`)."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from peer_answering import answer_requests, random_ids
from transformers import AutoModelForCausalLM


def model_of(path: str):
    path = Path(path)
    folder, file = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file).eval()
    model.generation_config.eos_token_id = None
    return model


def load(settings):
    torch.set_num_threads(settings["threads"])
    base, more = model_of(settings["model"]), {}
    if settings["draft"] == "prompt lookup":
        more = {"prompt_lookup_num_tokens": 5}
    elif settings["draft"]:
        more = {"assistant_model": model_of(settings["draft"])}

    @torch.inference_mode()
    def decode(prompt, new_tokens):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = base.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **more
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def time_rows(rows, context, steps):
        ids = torch.tensor([random_ids(context + rows, settings["vocabulary"])])
        cache = base(ids[:, :context]).past_key_values
        began = time.perf_counter()
        for _ in range(steps):
            base(ids[:, context:], past_key_values=cache)
            cache.crop(-rows)
        return (time.perf_counter() - began) * 1e3 / steps

    return decode, time_rows


if __name__ == "__main__":
    answer_requests(load)
