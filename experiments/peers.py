"""Compare greedy speculative decoding here and in other programs: one base, one device, one interleaved run.

    python experiments/peers.py --json experiments/results/peers.json
    python experiments/peers.py --base DIR --draft HEADS --draft lookup --assistant SMALLER_BASE --prompts FILE.jsonl
    python experiments/peers.py --base smollm2 --questions mt_bench_question.jsonl --json FILE.json

The default is the shipped model with all its drafts on held-out code. Each draft decodes with the fastest of a few
small trees, chosen on six of the prompts. All continue after EOS, for equal work. Needs the extra `test`.

If the base is a GGUF file, transformers needs `accelerate`, and llama.cpp (package `xllamacpp`) and OpenVINO
(`openvino-genai`) run too where they are installed. They keep the file's low-bit types. transformers and hydrajax widen
the weights to float32; with `--quantize` hydrajax decodes in low-bit types too. Such tokens may differ from those in
float32, so they are compared with those of the same program without a draft.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from side_by_side import side_by_side
from transformers import AutoModelForCausalLM

import hydrajax
from hydrajax import assets
from hydrajax.autotune.fastest import choose
from hydrajax.cli.options import prompts_from
from hydrajax.formats.draft_registry import title_of
from hydrajax.formats.known_bases import KNOWN_BASES, known_base_file
from hydrajax.machine import machine
from hydrajax.models.quantized import QUANTIZED
from hydrajax.questions.held_out import held_out_files, held_out_prompts
from hydrajax.questions.sets import read_questions
from hydrajax.text.templates import make_encoder
from hydrajax.trees import presets

SMALLEST = "chain-2"
PROGRAMS = {  # the package that must be installed, and our script that runs it
    "llama.cpp": ("xllamacpp", "llama_cpp_peer.py"),
    "OpenVINO": ("openvino_genai", "openvino_peer.py"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", help="Hugging Face directory (default: the shipped base)")
    parser.add_argument("--draft", action="append", help="draft, repeatable (default: lookup and all shipped drafts)")
    parser.add_argument(
        "--quantize", action="append", choices=QUANTIZED, help="also decode with these weights, repeatable"
    )
    parser.add_argument("--assistant", help="draft model for transformers (default: the shipped one for its base)")
    parser.add_argument("--prompts", help="file of prompts (default: held-out code)")
    parser.add_argument(
        "--questions", help="question set; its first turns in the chat template, spread over the categories"
    )
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument(
        "--prompt-tokens", type=int, default=64, help="tokens of held-out prompts (default %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all cores)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    jax.config.update("jax_platforms", "cpu")

    plain = hydrajax.load(args.base or assets.base())
    prompts = list(read_prompts(args, plain))
    gguf = gguf_of(args.base)
    runs = with_transformers(args, gguf) | with_programs(args, gguf) | with_hydrajax(args, plain, prompts, "hydrajax")
    for name in args.quantize or []:
        quantized = hydrajax.load(args.base or assets.base(), quantize=name)
        runs |= with_hydrajax(args, quantized, prompts, f"hydrajax {name}")
    for_all = {name: lambda run=run: [run(prompt) for prompt in prompts] for name, run in runs.items()}
    outputs, seconds = side_by_side(for_all, args.repeats)
    tokens = len(prompts) * args.max_new_tokens
    first = next(iter(runs))
    table = Table("decoder", "tokens/s", f"against {first}", "same ids", "as")
    results = []
    for name in runs:
        program = name.split(",")[0]
        like = first if program == "hydrajax" else next(one for one in runs if one.startswith(f"{program},"))
        same = sum(np.array_equal(ours, theirs) for ours, theirs in zip(outputs[name], outputs[like], strict=True))
        rate, ratio = tokens / seconds[name], seconds[first] / seconds[name]
        results.append(
            {"name": name, "tokens_per_second": rate, "ratio": ratio, "same": same, "same_as": like}
            | {"prompts": len(prompts)}
        )
        table.add_row(name, f"{rate:.0f}", f"{ratio:.2f}x", f"{same} of {len(prompts)}", like)
    print(f"{len(prompts)} prompts, {args.max_new_tokens} new tokens each, median of {args.repeats} rounds")
    Console().print(table)
    if args.json:
        arguments = vars(args) | {"json": str(args.json)}
        args.json.write_text(
            json.dumps({"machine": machine(), "arguments": arguments, "results": results}, indent=1) + "\n"
        )
    return 0


def read_prompts(args, loaded):
    if args.questions:
        ask = make_encoder(loaded.tokenizer, "auto").prompt
        questions = read_questions(args.questions)
        spread = questions[:: max(1, len(questions) // args.count)][: args.count]
        return [np.array(ask([{"role": "user", "content": one.turns[0]}]), np.int32) for one in spread]
    if args.prompts:
        return prompts_from(args.prompts, loaded, args.count)
    files = held_out_files()
    found = islice(held_out_prompts(files, loaded.tokenizer, args.prompt_tokens), args.count)
    return [np.array(prompt.ids, np.int32) for prompt in found]


def gguf_of(base: str | None) -> Path | None:
    """Return the base's GGUF file, if it is one."""
    if base in KNOWN_BASES:
        return known_base_file(base, "base")
    return Path(base) if base and base.endswith(".gguf") else None


def with_transformers(args, gguf: Path | None) -> dict:
    """Return transformers' decoders by name: functions from prompt ids to continuation ids."""
    folder, file = (gguf.parent, {"gguf_file": gguf.name}) if gguf else (args.base or assets.base(), {})
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file).eval()
    settings = {"greedy": {}, "prompt lookup": {"prompt_lookup_num_tokens": 5}}
    smaller = args.assistant or (None if args.base else assets.path("draft_model"))
    if smaller:
        assistant = AutoModelForCausalLM.from_pretrained(smaller, dtype=torch.float32).eval()
        settings["assisted"] = {"assistant_model": assistant}
    for model in (base, *(one["assistant_model"] for one in settings.values() if "assistant_model" in one)):
        model.generation_config.eos_token_id = None

    def decoder(more):
        def run(prompt):
            ids = torch.from_numpy(prompt[None]).long()
            mask = torch.ones_like(ids)
            with torch.inference_mode():
                out = base.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=args.max_new_tokens,
                    pad_token_id=0,
                    **more,
                )
            return out[0, len(prompt) :].numpy()

        return run

    return {f"transformers, {name}": decoder(more) for name, more in settings.items()}


def with_programs(args, gguf: Path | None) -> dict:
    """Return decoders of the programs that read the base's GGUF file and are installed, by name."""
    found = {}
    for title, (package, script) in PROGRAMS.items():
        if gguf is not None and importlib.util.find_spec(package):
            command = [
                sys.executable,
                Path(__file__).with_name(script),
                gguf,
                str(args.threads),
                str(args.max_new_tokens),
            ]
            found |= {
                f"{title}, greedy": in_process(command),
                f"{title}, prompt lookup": in_process([*command, "lookup"]),
            }
    return found


def in_process(command: list):
    """Return the decoder of a process that reads and writes lines of token ids."""
    peer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )

    def run(prompt):
        print(json.dumps(prompt.tolist()), file=peer.stdin, flush=True)
        return np.array(json.loads(peer.stdout.readline()))

    return run


def with_hydrajax(args, plain, prompts, name: str) -> dict:
    """Return this package's decoders by name, which begins with this one."""
    wanted = hydrajax.DecodeSpec(max_new_tokens=args.max_new_tokens)
    plain_spec = plain.spec(wanted, tree="root", eos_ids=())
    executors = {f"{name}, autoregressive": hydrajax.make_executor(plain, plain_spec)}
    for draft in args.draft or ["lookup", *assets.drafts_of(args.base or "shipped")]:
        m = plain.with_draft(draft)
        executor = hydrajax.make_executor(m, m.spec(wanted, tree="root", eos_ids=()))
        choice = choose(executor, prompts, 1, m.draft_directory)
        tree_name = SMALLEST if choice.tree is None else choice.name  # None: no tree is faster
        tree = choice.tree or presets.by_name(SMALLEST)
        executors[f"{name}, {title_of(m.drafter)}, {tree_name}"] = executor.with_spec(tree=tree)
    return {title: partial(decoded, executor) for title, executor in executors.items()}


def decoded(executor, prompt: np.ndarray) -> np.ndarray:
    return np.asarray(executor.decode(prompt[None]).tokens[0])


if __name__ == "__main__":
    sys.exit(main())
