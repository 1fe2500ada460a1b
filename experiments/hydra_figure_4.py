"""Tokens per step and text likelihood of typical acceptance over threshold and temperature (hydra figure 4).

In addition to the paper's sweep (ε at temperature 0.7, α = √ε) there is one over the temperature, with exact sampling
for comparison. Typical acceptance changes the distribution of the text; greedy decoding and exact sampling do not.
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
