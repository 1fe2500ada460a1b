"""The entry of ``python -m hydrajax.train.distill``; the command itself is `hydrajax.cli.distill`."""

import sys

from hydrajax.cli.distill import main

if __name__ == "__main__":
    sys.exit(main())
