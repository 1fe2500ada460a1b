"""A tiny model that many requests are put to, in one batcher for all tests."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from lab import CONFIG, VOCAB, WIDTH, shared_lab

from hydrajax.api import Loaded
from hydrajax.decoding.state import Params
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.models.llama import Llama

CONTEXT = 96


@pytest.fixture(scope="session")
def served():
    """Hydra++ on the tests' tiny base, with a longer context and one id that ends a text."""
    lab, config = shared_lab(), CONFIG.replace(max_positions=CONTEXT)
    drafter = WithPrefix(HydraHeads(4, WIDTH, VOCAB, n_layers=2), config)
    params = Params(lab.base(0), lab.draft("hydra++", 0))
    return Loaded(Llama(config, jnp.dtype("float32")), drafter, params, eos_ids=(VOCAB - 1,))
