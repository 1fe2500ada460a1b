"""``python -m hydrajax`` is the ``hydrajax`` program."""
# PYTHON_ARGCOMPLETE_OK

import sys

from hydrajax.cli import main

sys.exit(main())
