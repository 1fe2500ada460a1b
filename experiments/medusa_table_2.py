"""Ways to train Medusa heads: frozen base, joint training (Medusa-2), direct fine-tuning (medusa table 2).

All train four heads with their own lm heads on the same text for the same number of steps, and decode with the released
tree. Joint training changes the base, so a row's speed-up is over its own base. ``--quick`` tests the script only.
"""

import argparse
import json
import sys
from pathlib import Path

import ablation
import common

JOINT = ablation.OWN_TEXT.with_name("medusa2_shipped.yaml")
MEDUSA_1 = ("draft.heads=medusa", *ablation.TEXT, "objective.head_decay=0.8")
# Table 2's "direct fine-tuning": base and heads from the first step, one learning rate, text loss, equal weights.
DIRECT = ("joint.distill=false", "joint.heads_weight=1", "joint.heads_lr_multiple=1")
DIRECT += ("joint.heads_alone_steps=0", "joint.rise_steps=0", "optimizer.lr=3.0e-3")
VARIANTS = {
    "Medusa-1": (ablation.OWN_TEXT, MEDUSA_1),
    "Medusa-2": (JOINT, ()),
    "Medusa-2, heads weigh more": (JOINT, ("joint.heads_weight=0.2",)),
    "direct fine-tuning": (JOINT, DIRECT),
}
FULL = ablation.FULL | {"timed": 8, "rounds": 30}
QUICK = ablation.QUICK | {"timed": 2, "rounds": 3}


def run(args) -> None:
    rows: list[dict] = []
    for name in args.variants:
        config, overrides = VARIANTS[name]
        if config == JOINT:  # a quarter of the steps trains the heads alone, during another λ0 rises
            overrides = (
                f"joint.heads_alone_steps={args.steps // 4}",
                f"joint.rise_steps={args.steps // 4}",
                *overrides,
            )
        one = argparse.Namespace(**vars(args) | {"config": str(config), "draft": []})
        ablation.train(one, {name: overrides})
        output = Path(one.draft[0]).parent
        if (output / "base").is_dir():
            one.base = str(output / "base")
        setup = common.Setup(one, [name])
        plain, row = ablation.measure(setup, {name: setup.executor(name, setup.released(name))}, one)
        row |= bits_per_byte(output)
        rows += [row] if rows else [plain, row]
    common.write(args, "speed", "medusa table 2", "ways to train Medusa heads", rows, [*ablation.MEASURED, REMARK])


REMARK = "bits_per_byte: held-out text under the row's base; _before: under the original base"


def bits_per_byte(output: Path) -> dict[str, float]:
    """Return the last evaluation of a jointly trained base; empty for a frozen one."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    return {name: last[name] for name in ("bits_per_byte", "bits_per_byte_before") if name in last}


def add_arguments(parser) -> None:
    ablation.add_run_arguments(parser, "runs/medusa_table_2")
    ablation.add_choice(parser, "--variants", VARIANTS)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
