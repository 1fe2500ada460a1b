"""Save an array on a mesh of four devices and restore it on others. Argument: the folder of the checkpoints."""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hydrajax.train.checkpoints import TrainCheckpoints


def place(n: int, *spec) -> NamedSharding:
    mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
    return NamedSharding(mesh, P(*spec))


def main(folder: str) -> None:
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    with TrainCheckpoints(folder, keep=1, higher_is_better=True) as checkpoints:
        checkpoints.save(1, {"x": jax.device_put(x, place(4, "x"))}, {})
        for sharding in (place(2, None, "x"), place(4), place(1)):
            y = checkpoints.restore({"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)})[1]["x"]
            assert y.sharding == sharding, sharding
            assert np.array_equal(x, y), sharding
        print(len(jax.devices()), "devices")


if __name__ == "__main__":
    main(sys.argv[1])
