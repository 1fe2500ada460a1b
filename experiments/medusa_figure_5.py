"""Typical acceptance over a fine range of thresholds (medusa figure 5).

ε from 0.01 to 0.25 at temperature 0.7, α = √ε.
"""

import sys

import common
import numpy as np
import typical

FULL = {"count": 32, "prompt_tokens": 64, "new_tokens": 64, "points": 25}
QUICK = {"count": 16, "new_tokens": 32, "points": 7}


def run(args) -> None:
    epsilons = np.linspace(0.01, 0.25, args.points).round(4).tolist()
    rows = typical.sweep(common.Setup(args), typical.fixed_rules(0.7) + typical.over_epsilon(epsilons, 0.7))
    common.write(args, "acceptance", "medusa figure 5", "typical acceptance over ε", rows, [typical.REMARK])


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK))
