import pytest

from hydrajax.models.base_model import BoundBase


@pytest.fixture(scope="session")
def base(tiny_model) -> BoundBase:
    return BoundBase(*tiny_model)
