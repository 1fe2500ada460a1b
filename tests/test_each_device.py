"""Our kernels, ranks and lookups on each device of a mesh, and the collectives of a decode step compiled for it."""

import pytest

from helpers.programs import asked_parameters


@pytest.fixture(scope="module")
def found(request, tmp_path_factory, on_eight_devices) -> dict:
    kinds = sorted(asked_parameters(request, "kind") - {None})
    flags = "--xla_backend_optimization_level=0"
    return on_eight_devices(tmp_path_factory.mktemp("each"), "each_device", *kinds, flags=flags)


def test_operations_on_a_mesh(found):
    """Results are those of NumPy or of one device, also where the mesh does not divide heads, rows or vocabulary."""
    assert found["ranked"] == [True] * 4  # as a stable sort, also if a device has fewer tokens than are wanted
    assert found["looked_up"] == found["only_rows_divided"] == [True] * 3
    assert found["by_tokens"]["shard"] == [2, 4, 32]  # tokens between products: 4 of 16 on each device of 2 x 4
    assert len(found["by_tokens"]["gaps"]) == 4  # values and gradients
    assert max(found["by_tokens"]["gaps"]) < 1e-5
    assert len(found["attended"]) == 4  # masks of one tree and of one per row, windows
    assert max(found["attended"].values()) < 1e-5
    assert found["appended"] == [True] * 3
    assert len(found["multiplied"]) == 2  # with weights of few bits
    assert all(found["multiplied"].values()), found["multiplied"]


@pytest.mark.parametrize(
    ("kind", "reduced", "gathered"),
    [
        # Two sums for the layer, one for the embedding; the best token.
        pytest.param("none", 2 + 1, 1, marks=pytest.mark.slow),
        # All blocks together, and the ranks of three heads.
        pytest.param("medusa", 2 + 1, 1 + 1 + 3, marks=pytest.mark.slow),
        # A prefix layer, embeddings after each level, four blocks for each head.
        ("hydra++", 2 + 1 + 2 + 3, 1 + 3 * (4 + 1)),
    ],
)
def test_collectives_of_a_step(found, kind, reduced, gathered):
    """No other ones: no weight, cache or logits travel."""
    assert found["compiled"][kind]["collectives"] == {"all-reduce": reduced, "all-gather": gathered}
    assert found["compiled"][kind]["copies"] == 0


def test_cpu_kernels_run_on_each_device(found):
    """The layer and the prefix layer, each with a quarter of four key-value heads."""
    kernels = found["compiled"]["hydra++"]["kernels"]
    if not kernels:
        pytest.skip("built without the package's CPU kernels")
    assert kernels == {"attend": 2, "append_rows": 2, "add_norm": 3 + 3}
    assert found["compiled"]["hydra++"]["cache"].startswith("1x1x")


@pytest.mark.slow
def test_gpu_and_tpu_kernels_on_each_device(tmp_path, on_eight_devices):
    """Interpreted, on a mesh of 2 x 2: the tokens and accepted lengths of one device."""
    found = on_eight_devices(tmp_path, "device_kernels_on_a_mesh")
    assert found.pop("devices") == 8
    assert found.keys() == {f"{platform}, {draft}" for platform in ("gpu", "tpu") for draft in ("lookup", "hydra++")}
    for name, (one, several) in found.items():
        assert one == several, name
