"""Recurrences over the tokens of a text and over the nodes of a tree: the same sums along different paths.

A head's state S ``[d_v, d_k]`` takes in a token t as S_t = α_t S_{t-1} + u_t k_tᵀ, and the token reads it as
o_t = S_t q_t. Unrolled along the path of a node i, where γ_i is the product of α from the path's first token to i,

    S_i = γ_i S_0 + Σ_{j ≤ i} (γ_i / γ_j) u_j k_jᵀ        o_i = γ_i S_0 q_i + Σ_{j ≤ i} (γ_i / γ_j) (k_j·q_i) u_j

with j ≤ i for the tokens on that path. So the outputs of all nodes follow from S_0 and a mask of ancestors, without a
state per node, and the state after an accepted path is one more sum (docs/hybrids.md). A chunk of a text is one path.

In Mamba-2 (arXiv 2405.21060) u_t is the token's own. In the gated delta rule (arXiv 2412.06464) it is what the state
lacks, u_t = β_t (v_t - α_t S_{t-1} k_t), so all u solve one unit triangular system, as parents precede children.

Shapes: B sequences, G heads of queries and keys, r value heads for each of these, T tokens. All is float32: states are
sums over whole texts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax import ops
from hydrajax.models.arrays import Array
from hydrajax.models.attention import Causal, Documents, Mask
from hydrajax.models.recurrent_cache import PathNodes, RecurrentCache

CHUNK = 64  # tokens of a text whose outputs are computed at once
FIRST_BLOCK = 8  # rows of a triangular system that are solved by powers
PRECISION = jax.lax.Precision.HIGHEST  # also on devices that round a matmul's inputs by default


class Text(NamedTuple):
    """The order of right-padded texts.

    Attributes:
        positions: ``[B, T]``, consecutive. A token at position 0 begins anew: it reads no earlier state or input.
        lengths: ``[B]`` tokens of each text; what follows changes no state. None for all.
    """

    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"] | None

    def real(self) -> Bool[Array, "B T"] | None:
        """Return whether each token belongs to the text; None for all."""
        n_tokens = self.positions.shape[1]
        return None if self.lengths is None else jnp.arange(n_tokens) < self.lengths[:, None]


class Nodes(NamedTuple):
    """The order of a tree's nodes, in which parents precede children.

    Attributes:
        on_path: ``[T, T]`` or ``[B, T, T]``: node j is on the path to node i, i included.
    """

    on_path: Bool[Array, "*B T T"] | Bool[np.ndarray, "T T"]


Order = Text | Nodes


class Tokens(NamedTuple):
    """The inputs of a recurrence for each token.

    Attributes:
        queries, keys: ``[B, G, T, d_k]``.
        values: ``[B, G, r, T, d_v]``: v of the delta rule, or what is written.
        log_decay: ``[B, G, r, T]`` log α.
        beta: ``[B, G, r, T]`` strengths of the delta rule; None to write the values as they are.
    """

    queries: Float[Array, "B G T k"]
    keys: Float[Array, "B G T k"]
    values: Float[Array, "B G r T v"]
    log_decay: Float[Array, "B G r T"]
    beta: Float[Array, "B G r T"] | None = None


def order_of(mask: Mask, positions: Int[Array, "B T"]) -> Order:
    """Return the order of a block of tokens from the mask by which they attend to each other."""
    if isinstance(mask, Documents):
        return Text(positions, None)
    if isinstance(mask, Causal):
        return Text(positions, mask.lengths)
    return Nodes(mask[:, 0, 0] if mask.ndim == 5 else mask)


def run(tokens: Tokens, order: Order, state: Float[Array, "B h v k"]) -> tuple[Array, tuple]:
    """Return the outputs ``[B, G, r, T, d_v]``, and what `RecurrentCache.after` requires of these tokens: the state
    after a text, or keys, writes and decays of nodes.
    """
    if isinstance(order, Nodes):
        batch, _, n_tokens, width = tokens.keys.shape
        decay = _by_head(jnp.exp(tokens.log_decay))
        if kernel := ops.here().path_kernel(n_tokens, width):
            parents = jnp.broadcast_to(_ancestors(order.on_path, 1), (batch, n_tokens))
            beta = None if tokens.beta is None else _by_head(tokens.beta)
            values = _by_head(tokens.values)
            outputs, written = kernel.walk(state, tokens.keys, tokens.queries, values, decay, beta, parents)
            return outputs.reshape(tokens.values.shape), (tokens.keys, written, decay)
        outputs, written, _ = _along_paths(tokens, order.on_path, None, state)
        return outputs, (tokens.keys, _by_head(written), decay)
    outputs, state = _over_text(tokens, order, state)
    return outputs, (state,)


def convolve(
    inputs: Float[Array, "B G T C"], earlier: Float[Array, "B G K1 C"], weights: Float[Array, "G C K"], order: Order
) -> Float[Array, "B G T C"]:
    """Return the causal convolution of each channel over a token and its K - 1 predecessors on its path.

    ``earlier`` are the inputs of the last tokens before all of these. Sums are float32.
    """
    n_tokens, kernel = inputs.shape[2], weights.shape[-1]
    both = jnp.concatenate([earlier.astype(inputs.dtype), inputs], axis=2).astype(jnp.float32)
    total = None
    for back in range(kernel):
        if isinstance(order, Text):
            tap = both[:, :, kernel - 1 - back : kernel - 1 - back + n_tokens]
            tap = jnp.where((order.positions >= back)[:, None, :, None], tap, 0) if back else tap
        else:
            tap = _taken(both, kernel - 1 + _ancestors(order.on_path, back))
        term = tap * weights[:, None, :, kernel - 1 - back].astype(jnp.float32)
        total = term if total is None else total + term
    return total.astype(inputs.dtype)


def stored(
    inputs: Float[Array, "B G T C"], past: RecurrentCache, order: Order, kept: tuple = ()
) -> RecurrentCache | PathNodes:
    """Return what `RecurrentCache.after` takes: the cache after a text, or what is kept of nodes.

    Args:
        kept: The second result of `run`.
    """
    if isinstance(order, Nodes):
        return PathNodes(inputs, *kept)
    n_kept = past.inputs.shape[2]
    there = order.positions[:, :1] + np.arange(-n_kept, 0) >= 0  # the others are of a text that was cut to nothing
    earlier = jnp.where(there[:, None, :, None], past.inputs, 0)
    both = jnp.concatenate([earlier, inputs.astype(earlier.dtype)], axis=2)
    if order.lengths is None:
        return RecurrentCache(both[:, :, both.shape[2] - n_kept :], *kept)
    return RecurrentCache(_taken(both, order.lengths[:, None] + jnp.arange(n_kept)), *kept)


def square_sum(x: Float[Array, "*rows n"]) -> Float[Array, "*rows 1"]:
    """Return the sum of squares, added in halves: XLA's own order differs between one row and several."""
    x = x * x
    while x.shape[-1] % 2 == 0:
        x = sum(jnp.split(x, 2, axis=-1))
    return functools.reduce(jnp.add, jnp.split(x, x.shape[-1], axis=-1))


def _taken(x: Float[Array, "B G T C"], index: Int[Array, "*B R"]) -> Float[Array, "B G R C"]:
    """Return some tokens of each sequence, or the same of all."""
    return x[:, :, index] if index.ndim == 1 else jnp.take_along_axis(x, index[:, None, :, None], axis=2)


def _ancestors(on_path, back: int) -> Int[Array, "*B T"]:
    """Return the node that many steps above each; above the root -1, -2 and so on."""
    xp = np if isinstance(on_path, np.ndarray) else jnp
    depth = on_path.sum(-1) - 1
    found = on_path & (depth[..., None, :] == depth[..., :, None] - back)
    return xp.where(depth >= back, xp.argmax(found, axis=-1), depth - back)


def heads_of(x: Float[Array, "B G T rv"], per_key: int) -> Float[Array, "B G r T v"]:
    """Return the value heads of each key head on an axis of their own."""
    return jnp.moveaxis(x.reshape(*x.shape[:3], per_key, -1), 3, 2)


def _by_head(x: Float[Array, "B G r *rest"]) -> Float[Array, "B h *rest"]:
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _along_paths(tokens: Tokens, on_path, sees_state, state: Float[Array, "B h v k"]):
    """Return outputs and writes of tokens under a mask of paths; and by what the last token has multiplied the state
    and each write.

    Args:
        on_path: ``[T, T]`` or ``[B, T, T]``.
        sees_state: bool ``[B, T]`` whether a token's path begins at ``state``; None for all.
        state: S_0.
    """
    queries, keys, values, log_decay, beta = tokens
    batch, groups, per_key, n_tokens, value_dim = values.shape
    path = on_path if on_path.ndim == 2 else on_path[:, None, None]
    above = path & ~np.eye(n_tokens, dtype=bool)
    # log (γ_i / γ_j) as the sum over the nodes below j on the path to i: as a difference of long sums it would lose
    # digits, and off the path it would overflow.
    below = jnp.where(path, log_decay[..., None, :], 0.0)
    between = _product(below, above.astype(np.float32))
    between = jnp.where(path, jnp.exp(jnp.where(path, between, 0.0)), 0.0)
    gamma = jnp.exp(jnp.sum(below, axis=-1))
    if sees_state is not None:
        gamma = jnp.where(sees_state[:, None, None], gamma, 0.0)
    state = state.reshape(batch, groups, per_key, value_dim, -1)
    # One product reads the state once.
    both = queries if beta is None else jnp.concatenate([queries, keys], axis=2)
    read = jnp.einsum("bgtk,bgrvk->bgrtv", both, state, precision=PRECISION)
    written = values
    if beta is not None:
        similar = jnp.einsum("bgik,bgjk->bgij", keys, keys, precision=PRECISION)[:, :, None]
        lacking = beta[..., None] * (values - gamma[..., None] * read[..., n_tokens:, :])
        written = lacking if n_tokens == 1 else _solved(beta[..., None] * between * similar, lacking)
    scores = between * jnp.einsum("bgik,bgjk->bgij", queries, keys, precision=PRECISION)[:, :, None]
    outputs = gamma[..., None] * read[..., :n_tokens, :]
    outputs += jnp.einsum("bgrij,bgrjv->bgriv", scores, written, precision=PRECISION)
    return outputs, written, (gamma[..., -1], between[..., -1, :])


def _solved(lower: Float[Array, "*B T T"], right: Float[Array, "*B T v"]) -> Float[Array, "*B T v"]:
    """Solve ``(I + L) u = right``, where L is the part of ``lower`` below the diagonal.

    The inverse comes from those of ever larger blocks on the diagonal: the one of [[A, 0], [C, B]] has -B⁻¹ C A⁻¹ below
    A⁻¹ and B⁻¹. Substitution would be as accurate, but a GPU leaves its graph for it, and a TPU takes a step per row.
    The first blocks take (I - L)(I + L²)(I + L⁴), whose powers would lose digits in larger ones.
    """
    n_tokens = right.shape[-2]
    place = np.arange(n_tokens)

    def within(size: int) -> Bool[np.ndarray, "T T"]:
        return place[:, None] // size == place // size

    # Written once: XLA would compute it again in each of its readers.
    lower = jax.lax.optimization_barrier(jnp.tril(lower, -1))
    power, terms = jnp.where(within(FIRST_BLOCK), lower, 0.0), 2
    inverse = np.eye(n_tokens, dtype=np.float32) - power
    while terms < min(n_tokens, FIRST_BLOCK):
        power = _product(power, power)
        inverse, terms = inverse + _product(inverse, power), 2 * terms
    size = FIRST_BLOCK
    while size < n_tokens:
        corners = jnp.where(within(2 * size) & ~within(size), lower, 0.0)
        inverse, size = inverse - _product(_product(inverse, corners), inverse), 2 * size
    return _product(inverse, right)


def _product(a: Float[Array, "... n k"], b: Float[Array, "... k m"]) -> Float[Array, "... n m"]:
    return jnp.matmul(a, b, precision=PRECISION)


def _over_text(tokens: Tokens, order: Text, state: Float[Array, "B h v k"]):
    """Return the outputs of a text and the state after it, chunk by chunk."""
    n_tokens, real = order.positions.shape[1], order.real()
    if real is not None:  # decay by 1 and write nothing
        inside = real[:, None, None]
        log_decay = jnp.where(inside, tokens.log_decay, 0.0)
        beta = None if tokens.beta is None else jnp.where(inside, tokens.beta, 0.0)
        values = tokens.values if tokens.beta is not None else jnp.where(inside[..., None], tokens.values, 0.0)
        tokens = tokens._replace(values=values, log_decay=log_decay, beta=beta)
    if n_tokens <= CHUNK:
        return _chunk(tokens, order.positions, state)
    n_chunks = -(-n_tokens // CHUNK)
    padding = n_chunks * CHUNK - n_tokens
    following = order.positions[:, -1:] + 1 + jnp.arange(padding)
    positions = jnp.concatenate([order.positions, following], axis=1).reshape(-1, n_chunks, CHUNK)

    def in_chunks(x: Array | None, axis: int) -> Array | None:
        if x is None:
            return None
        x = jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], n_chunks, CHUNK, *x.shape[axis + 1 :]), axis, 0)

    chunks = Tokens(*(in_chunks(x, axis) for x, axis in zip(tokens, (2, 2, 3, 3, 3), strict=True)))

    def step(state, inputs):
        outputs, state = _chunk(*inputs, state)
        return state, outputs

    state, outputs = jax.lax.scan(step, state, (chunks, jnp.moveaxis(positions, 1, 0)))
    outputs = jnp.moveaxis(outputs, 0, 3)
    return outputs.reshape(*outputs.shape[:3], -1, outputs.shape[-1])[:, :, :, :n_tokens], state


def _chunk(tokens: Tokens, positions: Int[Array, "B T"], state: Float[Array, "B h v k"]):
    """Return the outputs of consecutive tokens and the state after them."""
    place = jnp.arange(positions.shape[1])
    began = place - positions  # the place of the token at position 0
    on_path = (place[:, None] >= place) & (place >= began[..., None])
    outputs, written, (kept, weights) = _along_paths(tokens, on_path, began < 0, state)
    return outputs, RecurrentCache.folded(state, tokens.keys, *map(_by_head, (written, weights, kept)))
