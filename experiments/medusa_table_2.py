"""Ways to train Medusa heads: on a frozen base, together with it, and together without care (medusa table 2).

All on the same text in as many steps, four heads with lm heads of their own, decoded with the released tree. A joint
run changes its base: a row's speed-up is over its own. The quick setting is enough to run, not to rank.
"""

import argparse
import json
import sys
from pathlib import Path

import ablation
import common

JOINT = ablation.OWN_TEXT.with_name("medusa2_shipped.yaml")
MEDUSA_1 = ("draft.heads=medusa", *ablation.TEXT, "objective.head_decay=0.8")
# Table 2's "direct fine-tuning": both from the first step, at one learning rate, on the text, with equal weights.
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
        if config == JOINT:  # the heads alone for a quarter of the steps, then λ0 rises for another
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


REMARK = "bits_per_byte: of held-out text under the row's base; _before: under the base that all began with"


def bits_per_byte(output: Path) -> dict[str, float]:
    """As the run last evaluated its base; nothing where the base was frozen."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    return {name: last[name] for name in ("bits_per_byte", "bits_per_byte_before") if name in last}


def add_arguments(parser) -> None:
    parser.add_argument("--runs", default="runs/medusa_table_2", help="where they are trained (default %(default)s)")
    ablation.add_choice(parser, "--variants", VARIANTS)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
