"""Slices of parameters: joined like whole ones, and read alone where devices share a model."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.programs import asked_parameters
from helpers.released import refusal
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.families.family_layout import base_layout
from hydrajax.formats.hydra_format import FILES as HYDRA_FILES
from hydrajax.formats.tensors import SafetensorFiles, save_safetensors
from hydrajax.models.layout import Parameter, read, shapes
from hydrajax.models.llama_config import LlamaConfig

CONFIG = LlamaConfig(24, 8, 20, n_layers=1, n_heads=6, n_kv_heads=2, head_dim=4, qkv_bias=True, qk_norm=True)
NAMES = [
    *("llama", "qkv_bias", "qk_norm", "tied", "undivided"),
    *("hydra", "prefix", "medusa", "eagle", "speculators", "nextn", "peagle", "dflash", "deepspec", "native"),
]
QUICK = ("llama", "prefix")
MESHES = ("model8", "data2_model4")


class Arrays(dict):
    """Tensors in memory, as files offer them."""

    view = dict.__getitem__


def parameters(layout) -> dict[str, Parameter]:
    """Our parameters of random tensors, by path, before they are read."""
    random = np.random.default_rng(0)
    found = {}

    def put(path, parameter):
        found["/".join(path)] = parameter
        return {}

    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes(layout).items()}
    read(layout, Arrays(tensors), put)
    return found


@pytest.mark.parametrize(
    "layout",
    [base_layout(CONFIG), HYDRA_FILES.formats[0].layout(HydraHeads(2, 8, 24, n_layers=2), {})],
    ids=["base", "hydra"],
)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_every_slice_is_that_of_the_whole(layout, dtype):
    """Along every axis and along all at once, also the axes that no mesh divides."""
    for name, parameter in parameters(layout).items():
        whole = np.asarray(parameter, dtype)
        assert whole.shape == parameter.shape
        assert whole.size == parameter.size
        cuts = [(slice(None), slice(0, max(1, n // 2)), slice(n // 2, n)) for n in whole.shape]
        for index in itertools.product(*cuts):
            found = parameter.astype(dtype)[index]
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, whole[index], err_msg=f"{name} {index}")


def test_rows_stay_in_the_order_of_the_file():
    """So that they are copied as they lie there; transposing numbers one by one is up to the device."""
    both = Parameter((np.zeros((1, 6, 8)), np.zeros((1, 6, 8))), order=(2, 0, 1))
    assert both.shape == (8, 2, 6)
    assert both[()].strides == (8, 8 * 6 * 8, 8 * 8)


@pytest.mark.parametrize("left", [0, 4, 300])
def test_a_file_that_was_truncated_after_it_was_opened(tmp_path, left):
    path = tmp_path / "model.safetensors"
    save_safetensors(path, {"a": np.ones((64, 64), np.float32), "b": np.ones((64, 64), np.float32)})
    files = SafetensorFiles([path], "base")
    with path.open("r+b") as file:
        file.truncate(left)
    refusal(lambda: files.view("b"), "base: cannot read tensor 'b': ")
    path.unlink()
    refusal(lambda: SafetensorFiles([path], "base"), "base: no such file")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory, on_eight_devices) -> dict:
    names = asked_parameters(request, "name") & set(NAMES)
    return on_eight_devices(tmp_path_factory.mktemp("slices"), "load_on_meshes", *sorted(names))


@pytest.mark.quick(*(f"{name}-{mesh}" for name in QUICK for mesh in MESHES))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NAMES)
def test_each_device_has_its_slices_and_no_more_is_read(found, name, mesh):
    """Every different slice is read once, though two devices hold it where the mesh has a data axis."""
    case = found[f"{name} {mesh}"]
    assert case["divided"]
    assert case["equal"]
    assert case["copied"] == (0 if name == "native" else case["needed"])


def test_draft_models(found):
    sharded, copied = found["draft_model"], found["copied_draft_model"]
    assert sharded["equal"]
    assert copied["equal"]
    assert (sharded["divided"], copied["divided"]) == (True, False)
    assert sharded["copied"] == sharded["needed"] == copied["copied"] == copied["needed"]


def test_converted_and_torch_files(found):
    assert found["as_bfloat16"]["equal"]
    assert found["bin"]["equal"]
    assert found["bin"]["divided"]


def test_a_truncated_file(found):
    assert found["truncated"].startswith("base: ")
    assert "model.safetensors is damaged" in found["truncated"]
    assert "\n" not in found["truncated"]
