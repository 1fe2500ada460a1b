"""NumPy float64 reimplementations of the draft heads and the prefix layer.

Written from docs/design.md 3 and 4, one vector at a time: no batching over rows, levels or heads.
"""

from collections.abc import Iterable

import jax
import numpy as np

from hydrajax.amphista.heads import AmphistaHeads
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.models.base_model import BoundBase
from hydrajax.trees.static_tree import TreeTopology


def to_float64(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def silu(x):
    return x / (1 + np.exp(-x))


class HeadsInNumPy:
    """Logits of one Medusa or Hydra head for one position, with or without a prefix layer."""

    def __init__(self, drafter, params, base: BoundBase):
        self.drafter, self.params = drafter, to_float64(params)
        self.embedding = np.asarray(base.params["embedding"], np.float64)
        self.base_kernel = np.asarray(base.head_kernel(), np.float64)

    def logits(self, k: int, text: tuple[np.ndarray, list[int]], path: list[int]) -> np.ndarray:
        """Return the logits of head k.

        Args:
            text: what the draft reads of the base, ``[T, n * D]``, and the tokens after the first T - 1 positions.
            path: the k + 1 tokens from the root.
        """
        assert len(path) == k + 1
        x, plain, heads = text[0][-1], self.drafter.n_layers, self.params
        if self.drafter.prefix is not None:
            x, heads = self.refined(text[0]), heads["heads"]
        head = heads[f"head_{k}"]
        if isinstance(self.drafter, HydraHeads):  # depends on the tokens proposed before
            read, block = np.concatenate([x, *(self.embedding[token] for token in path)]), head["conditioned"]
            parts = [block[name] for name in ("shared_kernel", "path_kernel") if name in block]
            w, r = np.moveaxis(np.concatenate(parts), 1, 0)
            w_bias, r_bias = block["bias"]
            x = read @ r + r_bias + silu(read @ w + w_bias)
            plain -= 1
        for i in range(plain):
            block = head["blocks_0" if self.drafter.share_blocks else f"blocks_{i}"]
            x = x + silu(x @ block["kernel"] + block["bias"])
        return x @ head["lm_kernel"] + head.get("lm_bias", 0.0)

    def refined(self, hidden: np.ndarray) -> np.ndarray:
        """Return the prefix layer's last output over the text ``[T, D]`` from position 0."""
        prefix, params = self.drafter.prefix, self.params["prefix"]
        rows = decoder_layer_in_numpy(prefix.config, params["layer"], hidden, causal=True, window=prefix.window)
        return rms_norm(rows[-1], params["norm"]["scale"], prefix.config.norm_eps)

    def check_proposal(self, tree: TreeTopology, text, root: int, candidates: np.ndarray) -> None:
        """Check that every node has the token of its rank given its ancestors.

        Logits are compared, so tokens within float32 rounding can be in either order.
        """
        assert candidates[0] == root
        token_of = {(): root} | dict(zip(tree.choices, candidates[1:].tolist(), strict=True))
        for path in tree.choices:
            ancestors = [token_of[path[:length]] for length in range(len(path))]
            logits = self.logits(len(path) - 1, text, ancestors)
            best_first = np.sort(logits)[::-1]
            np.testing.assert_allclose(logits[token_of[path]], best_first[path[-1]], atol=2e-4, rtol=0)
            siblings = [token for other, token in token_of.items() if other and other[:-1] == path[:-1]]
            assert len(set(siblings)) == len(siblings)

    def check_grown(self, text, tokens: np.ndarray, parents: np.ndarray) -> int:
        """Check that the children of every node of a dynamic tree are the best tokens after its path, in order.

        Returns the depth of the tree.
        """
        paths = [[int(tokens[0])]]
        for node in range(1, len(tokens)):
            paths.append([*paths[parents[node]], int(tokens[node])])
        for node, path in enumerate(paths):
            children = tokens[parents == node]
            if len(children):
                logits = self.logits(len(path) - 1, text, path)
                np.testing.assert_allclose(logits[children], np.sort(logits)[::-1][: len(children)], atol=2e-4, rtol=0)
                assert len(set(children.tolist())) == len(children)
        return max(map(len, paths)) - 1


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rotate(vector, position, theta):
    """Rotate pairs (i, i + H/2) by position / theta^(2i/H), as complex numbers."""
    half = len(vector) // 2
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag])


def attention_inputs(config, layer, read: np.ndarray, place: int | None) -> np.ndarray:
    """Return ``[kv heads, queries then key and value, H]`` of one token, rotated unless its position is None."""
    made = np.einsum("d,dgmh->gmh", read, layer["qkv"])
    if config.qk_norm:
        made[:, :-2] = rms_norm(made[:, :-2], layer["query_norm"]["scale"], config.norm_eps)
        made[:, -2] = rms_norm(made[:, -2], layer["key_norm"]["scale"], config.norm_eps)
    if place is not None:
        for group, member in np.ndindex(made.shape[0], made.shape[1] - 1):  # values are not rotated
            made[group, member] = rotate(made[group, member], place, config.rope_theta)
    return made


def after_layer(config, layer, x: np.ndarray, own: np.ndarray, seen: list[np.ndarray]) -> np.ndarray:
    """Apply a LLaMA layer to x, one head at a time. own, seen: `attention_inputs` of the token and of the tokens
    that it attends to.
    """
    n_q, heads = config.n_heads // config.n_kv_heads, []
    for head in range(config.n_heads):
        group, member = divmod(head, n_q)
        scores = np.array([own[group, member] @ other[group, n_q] for other in seen]) / np.sqrt(config.head_dim)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        heads.append(sum(w * other[group, n_q + 1] for w, other in zip(weights, seen, strict=True)))
    x = x + np.concatenate(heads) @ layer["out"]
    normed = rms_norm(x, layer["mlp_norm"]["scale"], config.norm_eps)
    gate, up = normed @ layer["gate_up"][:, 0], normed @ layer["gate_up"][:, 1]
    return x + (silu(gate) * up) @ layer["down"]


def decoder_layer_in_numpy(
    config, layer, rows: Iterable[np.ndarray], *, causal: bool, window: int | None = None
) -> list[np.ndarray]:
    """Apply a LLaMA layer to a sequence of vectors; without ``causal`` to a set, with full attention and no rotation.

    window: the number of visible vectors, including the own one; None for all.
    """
    rows, scale = list(rows), layer["attention_norm"]["scale"]
    made = [
        attention_inputs(config, layer, rms_norm(x, scale, config.norm_eps), place if causal else None)
        for place, x in enumerate(rows)
    ]
    first = [0 if window is None else max(0, place + 1 - window) for place in range(len(rows))]
    return [
        after_layer(config, layer, x, made[place], made[first[place] : place + 1] if causal else made)
        for place, x in enumerate(rows)
    ]


class EagleInNumPy(HeadsInNumPy):
    """Logits of an EAGLE draft after a sequence and a path, one position at a time and without a cache."""

    def logits(self, k, text, path):
        aux_hidden_states, following = text
        config, params, made = self.drafter.config, self.params, []
        eps, third, out = config.norm_eps, "hidden_norm" in params, None
        for place, token in enumerate([*following, *path]):
            e = self.embedding[token]
            hidden = aux_hidden_states[place] if place < len(aux_hidden_states) else out
            if third:
                x = hidden = hidden @ params["fc"] if place < len(aux_hidden_states) else hidden
                e = rms_norm(e, params["embedding_norm"]["scale"], eps)
                read = np.concatenate([e, rms_norm(hidden, params["hidden_norm"]["scale"], eps)])
            else:
                x = read = np.concatenate([e, hidden]) @ params["fc"] + params["fc_bias"]
            made.append(attention_inputs(config, params["layer"], read, place))
            out = after_layer(config, params["layer"], x, made[-1], made)
        if third:
            known = rms_norm(out, params["norm"]["scale"], eps) @ params["lm_kernel"]
        elif self.drafter.vocabulary is None:
            return out @ self.base_kernel
        else:
            known = out @ self.base_kernel[:, self.drafter.vocabulary.tokens]
        return self.drafter.lm_head.over_all_tokens(known, config.vocab_size)


class AmphistaInNumPy(HeadsInNumPy):
    """Logits of Amphista heads after a sequence, by equations 1 to 6, one position and head at a time."""

    def logits(self, k, text, path):
        aux_hidden_states, following = text
        n_heads, config, params = self.drafter.num_draft_heads, self.drafter.config, self.params
        tokens = [self.embedding[token] for token in [*following, path[0]]]
        stages, hidden = [], list(aux_hidden_states)
        for stage in range(self.drafter.adaptation_layers):
            layer = params[f"adaptation_{stage}"]
            if "fc" in layer:
                both = [np.concatenate([h, e]) for h, e in zip(hidden, tokens, strict=True)]
                hidden = [x @ layer["fc"] + layer["fc_bias"] for x in both]
            hidden = decoder_layer_in_numpy(config, layer["layer"], hidden, causal=True)
            stages.append(hidden[-1])
        aux_hidden_layers = [hidden[-1]] * n_heads
        for stage, heads in enumerate(np.array_split(range(n_heads), max(len(stages), 1))):
            for head in heads if stages else ():
                aux_hidden_layers[head] = stages[stage]
        together = []
        for head, x in enumerate(aux_hidden_layers):
            for i in range(self.drafter.n_layers):
                block = params[f"head_{head}"][f"blocks_{i}"]
                x = x + silu(x @ block["kernel"] + block["bias"])
            together.append(x)
        block = params.get("auto_embedding", {})
        if "positions" in block:
            together = [x + position for x, position in zip(together, block["positions"], strict=True)]
        for i in range(self.drafter.auto_embedding_layers):
            together = decoder_layer_in_numpy(config, block[f"layer_{i}"], together, causal=False)
        head, lm_head = params[f"head_{k}"], self.drafter.lm_head
        if lm_head.shared:
            return together[k] @ self.base_kernel + head["lm_bias"]
        kernel = head["lm_kernel"] if lm_head.rank is None else head["lm_down"] @ head["lm_up"]
        out = np.full(config.vocab_size, -np.inf)
        out[slice(None) if lm_head.vocabulary is None else lm_head.vocabulary.tokens] = together[k] @ kernel
        return out


def in_numpy(drafter, params, base: BoundBase) -> HeadsInNumPy:
    """Return the reimplementation of a drafter."""
    if isinstance(drafter, AmphistaHeads):
        return AmphistaInNumPy(drafter, params, base)
    kind = EagleInNumPy if isinstance(drafter, Eagle | Eagle3) else HeadsInNumPy
    return kind(drafter, params, base)
