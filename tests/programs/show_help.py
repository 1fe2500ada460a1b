"""Run `hydrajax --help`, and print at exit the slow packages that were imported."""

import atexit
import sys

from hydrajax.cli import main

if __name__ == "__main__":
    atexit.register(lambda: print({"torch", "transformers", "argcomplete"} & set(sys.modules)))
    main(["--help"])
