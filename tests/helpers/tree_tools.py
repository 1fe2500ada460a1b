"""Random trees, and the leaf paths of the released code."""

import numpy as np

from hydrajax.trees.static_tree import TreeTopology


def random_tree(seed: int, n_choices: int, depth: int, widest: int) -> TreeTopology:
    """Return a prefix-closed tree with random ranks, most of which skip some."""
    random = np.random.default_rng(seed)
    known = {()}
    for _ in range(n_choices):
        shallow = sorted(path for path in known if len(path) < depth)
        known.add((*shallow[random.integers(len(shallow))], int(random.integers(widest))))
    return TreeTopology.from_choices(known - {()})


def leaf_paths(tree: TreeTopology) -> np.ndarray:
    """Return int32 ``[leaves, K+1]``: root-to-leaf nodes padded with -1, deepest and last leaf first (released)."""
    node_of = {(): 0} | {path: node for node, path in enumerate(tree.choices, start=1)}
    inner = {path[:-1] for path in tree.choices}
    leaves = [path for path in reversed(((), *tree.choices)) if path not in inner]
    lines = [[node_of[leaf[:length]] for length in range(len(leaf) + 1)] for leaf in leaves]
    return np.array([line + [-1] * (tree.depth + 1 - len(line)) for line in lines], np.int32)


def typical_walk(rule, parents: np.ndarray, p: np.ndarray, tokens: np.ndarray) -> list[int]:
    """Return the nodes that `Typical` accepts, as the released code does: of all root-to-leaf paths the longest, then
    the likeliest, then the first.

    Args:
        rule: the rule, without cuts.
        parents: ``[N]``; -1 for the root and for nodes that belong to no tree.
        p: the base's distribution after each node, ``[N, V]``.
        tokens: ``[N]``; -1 for a node without a guess.
    """
    entropy = -(p * np.log(p + 1e-5)).sum(axis=-1)
    alpha = rule.epsilon**0.5 if rule.alpha is None else rule.alpha
    threshold = np.minimum(rule.epsilon, alpha * np.exp(-entropy))
    best, best_key = [0], (0, 0.0)
    for leaf in reversed([node for node in range(len(parents)) if node not in parents]):
        line = [leaf]
        while parents[line[0]] >= 0:
            line.insert(0, int(parents[line[0]]))
        path, log_p = [0], 0.0
        for node in line[1:] if line[0] == 0 else ():
            likelihood = p[path[-1], tokens[node]] if tokens[node] >= 0 else 0.0
            if not likelihood > threshold[path[-1]]:
                break
            path, log_p = [*path, node], log_p + np.log(likelihood)
        key = (len(path) - 1, log_p)
        if key[0] > best_key[0] or (key[0] == best_key[0] > 0 and key[1] > best_key[1] + 1e-6):
            best, best_key = path, key
    return best
