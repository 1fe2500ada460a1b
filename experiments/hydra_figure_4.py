"""tokens_per_step and text under typical acceptance, over the posterior threshold and the temperature (hydra figure 4).

Beside the paper's sweep (ε at temperature 0.7, α = √ε) one over the temperature, with exact sampling: only that and
greedy decoding leave the base's distribution alone. What typical acceptance gains it pays for in another text.
"""

import sys

import common
import typical

FULL = {"count": 32, "prompt_tokens": 64, "new_tokens": 64}
QUICK = {"count": 16, "new_tokens": 32}
EPSILONS = (0.05, 0.1, 0.15, 0.2, 0.25)
TEMPERATURES = (0.2, 0.5, 0.7, 1.0, 1.5)


def run(args) -> None:
    rules = typical.fixed_rules(0.7) + typical.over_epsilon(EPSILONS, 0.7) + typical.over_temperature(TEMPERATURES)
    rows = typical.sweep(common.Setup(args), rules)
    common.write(args, "acceptance", "hydra figure 4", "acceptance rules", rows, [typical.REMARK])


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
