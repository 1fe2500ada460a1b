"""``python -m hydrajax`` is the ``hydrajax`` program."""

import sys

from hydrajax.cli import main

sys.exit(main())
