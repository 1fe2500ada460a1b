"""The entry of ``python -m hydrajax.train``; the command itself is `hydrajax.cli.train`."""

import sys

from hydrajax.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
