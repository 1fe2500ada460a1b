"""Types of arguments that annotations share."""

import jax
import numpy as np

# What functions of arrays take: arrays on a device, tracers of them, and NumPy arrays of the host.
Array = jax.Array | np.ndarray
# A dtype, or the scalar type that stands for one, such as `jax.numpy.bfloat16`.
DType = np.dtype | type
