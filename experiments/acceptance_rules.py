"""How many tokens a step emits under each rule: exact sampling, typical acceptance, greedy (hydra figure 4, left half).

    python experiments/acceptance_rules.py --output experiments/results/acceptance_rules.json

On held-out files of the shipped model, one tree for all. Two sweeps: over the temperature, with typical acceptance at
ε = 0.1; and over ε at temperature 0.7, with α = √ε. Beside the JSON comes a picture, FILE.png. Only exact sampling and
greedy decoding leave the base's distribution alone: what typical acceptance gains it pays for in another text.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from rich.progress import track
from shipped_tau import held_out_prompts

from hydrajax import assets
from hydrajax.checkpoints.draft import load_draft
from hydrajax.checkpoints.llama_hf import eos_ids, load_llama
from hydrajax.decoding.acceptance import ExactSampling, Greedy, Typical
from hydrajax.decoding.decode import make_decode_fn
from hydrajax.decoding.step import Params
from hydrajax.files import WholeFile
from hydrajax.trees import presets

TEMPERATURES = (0.2, 0.5, 0.7, 1.0, 1.5)
EPSILONS = (0.05, 0.1, 0.15, 0.2, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=str(assets.base()))
    parser.add_argument("--heads", nargs="+", default=[str(assets.path(name)) for name in assets.DRAFTERS])
    parser.add_argument("--held-out", default=str(assets.FOLDER / "ABOUT.json"), help="JSON with a list 'held_out'")
    parser.add_argument("--tree", default="mc_sim_7b_63")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the picture is beside it")
    args = parser.parse_args()

    model, base_params = load_llama(args.base)
    prompts, tree, ends = held_out_prompts(args), presets.by_name(args.tree), eos_ids(args.base)
    rules = {("greedy", None): Greedy()}
    rules |= {("exact, temperature", t): ExactSampling(t) for t in TEMPERATURES}
    rules |= {("typical, temperature", t): Typical(0.1, temperature=t) for t in TEMPERATURES}
    rules |= {("typical, epsilon", e): Typical(e, temperature=0.7) for e in EPSILONS}

    report = {
        "tree": args.tree, "prompts": len(prompts), "prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens,
        "machine": platform.processor() or platform.machine(), "jax": jax.__version__, "drafters": {},
    }  # fmt: skip
    for directory in args.heads:
        drafter, params = load_draft(directory, model.config)
        found: dict[str, list] = {}
        for (name, value), rule in track(rules.items(), Path(directory).name):
            decode = make_decode_fn(model, drafter, tree, rule, max_new_tokens=args.new_tokens, eos_ids=ends)
            out = decode(Params(base_params, params), prompts, rng=jax.random.key(0))
            found.setdefault(name, []).append([value, out.tokens_per_step()])
        report["drafters"][Path(directory).name] = found
    table(report)
    with WholeFile(args.output, "--output") as file:
        file.write_text(json.dumps(report, indent=1) + "\n")
    picture(report, args.output.with_suffix(".png"))


def table(report: dict) -> None:
    for name, found in report["drafters"].items():
        print(f"{name}: greedy {found['greedy'][0][1]:.2f}")
        for rule, pairs in found.items():
            if rule != "greedy":
                print(f"  {rule:22}" + "".join(f"{value:>6g}: {tau:.2f}" for value, tau in pairs))


def picture(report: dict, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), sharey=True, layout="constrained")
    for i, (name, found) in enumerate(report["drafters"].items()):
        color = f"C{i}"
        left.plot(*np.array(found["exact, temperature"]).T, "o-", color=color, label=f"{name}, exact sampling")
        left.plot(*np.array(found["typical, temperature"]).T, "s--", color=color, label=f"{name}, typical ε 0.1")
        right.plot(*np.array(found["typical, epsilon"]).T, "s--", color=color, label=f"{name}, typical")
        exact = dict(map(tuple, found["exact, temperature"]))[0.7]
        right.axhline(exact, color=color, linewidth=1, label=f"{name}, exact sampling")
        for axes in (left, right):
            axes.axhline(found["greedy"][0][1], color=color, linewidth=1, linestyle=":", label=f"{name}, greedy")
    left.set(xlabel="temperature", ylabel="tokens_per_step (τ)")
    right.set(xlabel="posterior threshold ε, at temperature 0.7, α = √ε")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
