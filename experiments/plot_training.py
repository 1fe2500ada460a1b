"""Plot the training curves of one or more runs.

    python experiments/plot_training.py experiments/results/shipped/*.jsonl --output curves.png

Reads the ``metrics.jsonl`` of `hydrajax.train`. A curve is named by its file's stem or its run's directory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.train.metrics import FILE, read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="metrics.jsonl files, or directories of runs")
    parser.add_argument("--output", type=Path, required=True, help="PNG file to write")
    args = parser.parse_args()
    runs = {}
    for path in args.runs:
        lines = read_metrics(path / FILE if path.is_dir() else path)
        if not lines:
            raise HydrajaxError(f"runs: got {path} without metrics, expected a run of hydrajax train")
        runs[path.name if path.is_dir() else path.stem] = lines

    # Bases have bits per byte, heads tokens per step: panels without data are left out.
    wanted = [
        ("train", "loss", "training loss (nats, summed over heads)"),
        ("eval", "bits_per_byte", "held-out bits per byte"),
        ("eval", "tokens_per_step", "held-out tokens_per_step (τ), simulated"),
        ("eval", "top1", "held-out top-1 accuracy, mean over heads"),
    ]
    panels = [panel for panel in wanted if any(curve(lines, *panel[:2])[0] for lines in runs.values())]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), squeeze=False, layout="constrained")
    for axis, (kind, field, title) in zip(axes[0], panels, strict=True):
        for index, (name, lines) in enumerate(runs.items()):
            steps, values = curve(lines, kind, field)
            if steps:
                axis.plot(steps, values, label=name, color=f"C{index}", linewidth=1.2)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(args.output, dpi=110)
    print(args.output)


def curve(lines: list[dict], kind: str, field: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], float(np.mean(line[field]))) for line in lines if line["kind"] == kind and field in line]
    return [step for step, _ in points], [value for _, value in points]


if __name__ == "__main__":
    main()
