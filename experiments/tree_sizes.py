"""Searched trees against the released one and chains, over batch sizes (hydra section 4, figures 7 to 9).

    python experiments/tree_sizes.py --output experiments/results/tree_sizes.json

For each kind of heads: calibrate on held-out prompts, grow trees of every size by simulated decoding, then decode
*other* held-out prompts with some of them, with chains and with the released 63-choice tree: all for tokens_per_step,
which the calibration predicts, and the first few, at each batch size, for time. Beside the JSON comes a picture,
FILE.png. Quick setting, some minutes on 2 cores: ``--heads .../medusa --batch-sizes 1 --repeats 3``.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from shipped_tau import held_out_prompts

from hydrajax import assets
from hydrajax.checkpoints.draft import load_draft
from hydrajax.checkpoints.llama_hf import eos_ids, load_llama
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.decode import make_decode_fn
from hydrajax.decoding.step import Params
from hydrajax.evaluation.calibration import calibrate
from hydrajax.evaluation.tree_search import measure_trees
from hydrajax.files import WholeFile
from hydrajax.trees import presets
from hydrajax.trees.search import expected_tokens_per_step, simulated

RELEASED = "mc_sim_7b_63"


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=str(assets.base()))
    parser.add_argument("--heads", nargs="+", default=[str(assets.path(name)) for name in assets.DRAFTERS])
    parser.add_argument("--held-out", default=str(assets.FOLDER / "ABOUT.json"), help="JSON with a list 'held_out'")
    parser.add_argument("--calibration", type=int, default=256, help="prompts to grow trees from")
    parser.add_argument("--prompts", type=int, default=64, help="other prompts, to measure tokens_per_step on")
    parser.add_argument("--timed", type=int, default=8, help="how many of them are timed")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sizes", type=integers, default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100])
    parser.add_argument("--batch-sizes", type=integers, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the picture is beside it")
    args = parser.parse_args()

    model, base_params = load_llama(args.base)
    ends, n_measured = eos_ids(args.base), args.prompts
    args.prompts += args.calibration  # of `held_out_prompts`
    prompts = list(held_out_prompts(args))
    measured, calibration = np.stack(prompts[:n_measured]), prompts[n_measured:]
    console = Console()
    report = {
        "calibration": len(calibration), "prompts": n_measured, "timed": args.timed,
        "new_tokens": args.new_tokens, "rounds": args.repeats,
        "machine": platform.processor() or platform.machine(), "jax": jax.__version__, "rows": [], "expected": {},
        "tokens_per_step": {},
    }  # fmt: skip
    for directory in args.heads:
        name = Path(directory).name
        drafter, draft_params = load_draft(directory, model.config)
        params = Params(base_params, draft_params)
        found = calibrate(model, drafter, params, calibration, new_tokens=args.new_tokens, eos_ids=ends)
        proposals = simulated(found.ranks, found.spans, max(args.sizes))
        report["expected"][name] = list(proposals.tokens_per_step)
        trees = {f"T_{size}": proposals.tree(size) for size in args.sizes if size <= proposals.largest}
        trees |= {f"chain-{depth}": presets.chain(depth) for depth in range(1, drafter.depth + 1)}
        trees[RELEASED] = presets.by_name(RELEASED)
        expected = {key: expected_tokens_per_step(tree, found.ranks, found.spans) for key, tree in trees.items()}
        reached = {}
        for key, tree in trees.items():
            decode = make_decode_fn(model, drafter, tree, max_new_tokens=args.new_tokens, eos_ids=ends)
            out = decode(params, measured)
            reached[key] = float(out.lengths.sum() / out.steps.sum())
        report["tokens_per_step"][name] = {key: [expected[key], reached[key]] for key in trees}
        worst = max(trees, key=lambda key: abs(reached[key] / expected[key] - 1))
        print(f"{name}: τ expected and measured differ by {reached[worst] / expected[worst] - 1:+.1%} at most, {worst}")
        for batch in args.batch_sizes:
            with console.status(f"{name}, batch {batch}") as line:
                rows = measure_trees(
                    model, drafter, params, trees, measured[: args.timed], Greedy(), batch_size=batch,
                    new_tokens=args.new_tokens, repeats=args.repeats, eos_ids=ends, on_status=line.update,
                )  # fmt: skip
            for row in rows:
                report["rows"].append({"drafter": name, "batch": batch} | row.as_dict())
            say(name, batch, rows)
    with WholeFile(args.output, "--output") as file:
        file.write_text(json.dumps(report, indent=1) + "\n")
    picture(report, args.output.with_suffix(".png"))


def say(name: str, batch: int, rows) -> None:
    def best(of):
        row = max((row for row in rows if of(row.name)), key=lambda row: row.tokens_per_second)
        return f"{row.name} {row.tokens_per_second:.0f} ({row.speedup:.2f}x, τ {row.tokens_per_step:.2f})"

    kinds = {
        "searched": lambda key: key.startswith("T_") and key != "T_1",
        "chain": lambda key: key.startswith("chain"),
        "released": lambda key: key == RELEASED,
    }
    print(f"{name}, batch {batch}: " + "; ".join(f"{kind} {best(of)}" for kind, of in kinds.items()), flush=True)


def picture(report: dict, path: Path) -> None:
    names = sorted({row["drafter"] for row in report["rows"]}, key=[row["drafter"] for row in report["rows"]].index)
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.4 * len(names), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        for i, batch in enumerate(sorted({row["batch"] for row in report["rows"]})):
            rows = [row for row in report["rows"] if (row["drafter"], row["batch"]) == (name, batch)]
            grown = [row for row in rows if row["name"].startswith("T_")]
            sizes = [row["nodes"] for row in grown]
            axis.plot(sizes, [row["tokens_per_second"] for row in grown], "o-", color=f"C{i}", label=f"batch {batch}")
            for row in rows:
                if row["name"] == RELEASED:
                    axis.plot(row["nodes"], row["tokens_per_second"], "x", color=f"C{i}")
                elif row["name"].startswith("chain"):
                    axis.plot(row["nodes"], row["tokens_per_second"], "+", color=f"C{i}")
        axis.set(title=name, xlabel="nodes", xscale="log", yscale="log")
    axes[0, 0].set_ylabel("tokens/s, all rows")
    axes[0, -1].plot([], [], "kx", label=RELEASED)
    axes[0, -1].plot([], [], "k+", label="chains")
    axes[0, -1].legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
