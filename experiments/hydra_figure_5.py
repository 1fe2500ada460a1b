"""Training objectives of Hydra heads: text or teacher loss, with and without noise (hydra figure 5).

``--quick`` trains each for a minute, which tests the script but does not rank the objectives.
"""

import sys

import ablation
import common

NOISE = ("objective.noise_alpha=75",)  # hydra A.1
VARIANTS = {
    "text": ablation.TEXT,
    "text, noise": (*ablation.TEXT, *NOISE),
    "teacher": ablation.TEACHER,
    "teacher, noise": (*ablation.TEACHER, *NOISE),
}


def run(args) -> None:
    rows = ablation.compare(args, VARIANTS)
    common.write(args, "speed", "hydra figure 5", "training objectives of Hydra heads, released tree", rows)


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, ablation.FULL, ablation.QUICK, ablation.add_arguments))
