"""What checks annotations in the tests (tests/conftest.py): beartype, to which an integer is a float, as in PEP 484."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
