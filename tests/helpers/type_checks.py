"""The runtime type checker of tests/conftest.py: beartype, with integers accepted as floats (PEP 484)."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
