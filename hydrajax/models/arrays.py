"""Array and dtype types for annotations."""

import jax
import numpy as np

# Arrays on a device, tracers, and NumPy arrays on the host.
Array = jax.Array | np.ndarray
# A dtype, or a scalar type such as `jax.numpy.bfloat16`.
DType = np.dtype | type
