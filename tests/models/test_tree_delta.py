"""The tree form of the gated delta rule in docs/hybrids.md, which no model here uses yet, against transformers."""

from __future__ import annotations

import numpy as np
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from helpers.tree_tools import random_tree

KEY, VALUE = 8, 6


def test_one_solve_under_the_ancestor_mask_gives_the_outputs_and_states_of_every_path():
    tree = random_tree(1, 24, depth=4, widest=5)
    n_nodes, parents = tree.size, tree.parents
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((n_nodes, KEY)) for _ in range(2))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    v, start = random.standard_normal((n_nodes, VALUE)), random.standard_normal((VALUE, KEY))
    beta, g = random.uniform(0, 1, n_nodes), -random.uniform(0, 3, n_nodes)

    above = np.zeros((n_nodes, n_nodes), bool)  # proper ancestors
    for node in range(1, n_nodes):
        above[node] = above[parents[node]]
        above[node, parents[node]] = True
    path = above | np.eye(n_nodes, dtype=bool)
    decay = path @ g  # log of the product of the decays from the root to each node
    between = np.exp(np.where(path, decay[:, None] - decay[None], -np.inf))
    lower = beta[:, None] * np.where(above, between, 0) * (k @ k.T)
    written = np.linalg.solve(np.eye(n_nodes) + lower, beta[:, None] * (v - np.exp(decay)[:, None] * (k @ start.T)))
    scale = KEY**-0.5
    outputs = scale * (np.exp(decay)[:, None] * (q @ start.T) + (between * (q @ k.T)) @ written)

    # No path has more than 5 nodes, so the inverse is a short product of powers.
    square = lower @ lower
    inverse = (np.eye(n_nodes) - lower) @ (np.eye(n_nodes) + square) @ (np.eye(n_nodes) + square @ square)
    np.testing.assert_allclose(inverse @ (np.eye(n_nodes) + lower), np.eye(n_nodes), atol=1e-12)

    for node in range(n_nodes):
        nodes = np.flatnonzero(path[node])
        state = np.exp(decay[node]) * start + (written * between[node][:, None]).T @ k
        arrays = [torch.tensor(x[nodes])[None, :, None] for x in (q, k, v, g, beta)]
        expected, last = torch_recurrent_gated_delta_rule(
            *arrays, initial_state=torch.tensor(start.T)[None, None], output_final_state=True
        )
        # transformers computes in float32
        np.testing.assert_allclose(outputs[node], expected[0, -1, 0], atol=1e-5)
        np.testing.assert_allclose(state.T, last[0, 0], atol=1e-5)
