"""Ablations of Amphista, Amphista-α and other heads (amphista tables 4 and 5, A.2.4).

All heads are trained on the same text for the same number of steps. ``--quick`` trains each for a minute, which tests
the script but does not rank the heads.
"""

import sys

import ablation
import common

AMPHISTA = ("draft.heads=amphista", *ablation.SHARED, *ablation.BOTH)  # its loss: amphista 3.3
EAGLES_LOSS = ("objective.lm_weight=0", "objective.teacher_weight=0.1", "objective.reconstruction_weight=1")
VARIANTS = ablation.ALIKE | {
    "Amphista": AMPHISTA,
    "Amphista, narrow": (*AMPHISTA, "draft.mlp_width=384"),  # an MLP as wide as the model, for its draft time
    "Amphista, narrow, loss of EAGLE": (*AMPHISTA, "draft.mlp_width=384", *EAGLES_LOSS),
    "Amphista, no auto-embedding": (*AMPHISTA, "draft.auto_embedding_layers=0"),
    "Amphista, no positions": (*AMPHISTA, "draft.position_encoding=false"),
    "Amphista, no adaptation": (*AMPHISTA, "draft.adaptation_layers=0"),
    "Amphista, one adaptation layer": (*AMPHISTA, "draft.adaptation_layers=1"),
    "Amphista, no sampled token": (*AMPHISTA, "draft.reads_token=false"),
    "Amphista alpha": (*AMPHISTA, "draft.auto_embedding_layers=2"),
}
FULL = ablation.FULL | {"timed": 8, "rounds": 30}
QUICK = ablation.QUICK | {"timed": 2, "rounds": 3}
REMARK = "no adaptation: the sampled token is not read either; alpha: two layers of auto-embedding"


def run(args) -> None:
    ablation.train(args, {name: VARIANTS[name] for name in args.variants})
    setup = common.Setup(args, args.variants)
    rows = ablation.measure(setup, {name: setup.executor(name, setup.released(name)) for name in args.variants}, args)
    remarks = [*ablation.MEASURED, REMARK]
    common.write(args, "speed", "amphista tables 4 and 5", "parts of Amphista, released tree", rows, remarks)


def add_arguments(parser) -> None:
    ablation.add_arguments(parser, ablation.OWN_TEXT, ablation.OWN_TEXT_RUNS)
    ablation.add_choice(parser, "--variants", VARIANTS)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
