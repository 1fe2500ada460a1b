"""Tokens per step of the rules that keep the base's distribution, and the most that any such rule can have.

    python experiments/ceilings.py --base smollm2 --draft hydra++ --draft dspark --prompts mt_bench_question.jsonl
    python experiments/ceilings.py --draft hydra++ --draft draft-model

A step emits a root and accepts a path x_1 .. x_d of the tree. Let A(x_1 .. x_d) be the probability that this path or a
longer one that begins with it is accepted. Two facts limit A for any rule that keeps the base's distribution P: an
accepted path was drawn, so A(x_1 .. x_d) <= Pr[x_1 .. x_d in the tree]; and a text that has left the accepted path
continues as the base does, so A(x_1 .. x_d) <= A(x_1 .. x_d-1) P(x_d | x_1 .. x_d-1). Hence

    A(x_1 .. x_d) <= P(x_1 .. x_d) min over i <= d of min(1, Pr[x_1 .. x_i in the tree] / P(x_1 .. x_i)),

and the mean of the last factor over the base's own text, summed over d, bounds the expected number of accepted tokens.
A chain reaches the bound by block verification (Sun et al. 2024, arXiv 2403.10444), a tree of the draft's most likely
tokens by exact sampling. For drawn trees with siblings no rule reaches it in general.

Steps begin where they would under a rule that reaches the bound. The bound is also computed for the texts that the
rules have generated, whose distribution is the base's: a rule's share of it has a smaller error than either number.
Trees are searched on other prompts at temperature 0.7 and are the same for all rules and temperatures. At temperature
0, q is at temperature 1 (`hydrajax.RejectionSampling`), and each rule accepts the drawn tokens that are the base's.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

import common
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

import hydrajax
from hydrajax import assets
from hydrajax.bench.trees import search
from hydrajax.bench.trees.simulation import accepted_lengths
from hydrajax.cli.prompt_files import read_prompts
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.drafters.block import BlockDrafter
from hydrajax.drafters.clusters import over_all
from hydrajax.drafters.ranks import ranks_among
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import row_layout, run_base
from hydrajax.text.answers import Generation
from hydrajax.trees import TreeTopology, presets

FULL = {"count": 20, "every": 4, "new_tokens": 48, "prompt_tokens": 64, "sizes": [4, 8, 16, 32, 64], "measured": [16]}
QUICK = {"count": 2, "every": 1, "new_tokens": 16, "sizes": [4, 8], "measured": [4]}
REMARKS = ["low and high: 95% bootstrap intervals over prompts"]
REMARKS += ["share: of best_drawn, the most with drawn tokens, computed for the text that the rule has generated"]
BATCH, SEARCHED_AT, LONGEST = 8, 0.7, 128  # LONGEST: tokens of a prompt; longer ones are left out
DEEPEST = 6  # levels of the trees, for drafts without a limit of their own
LIKELY = 64  # tokens whose arrival is exact in `draw_chances`
TIMES = np.arange(-16, 80, 0.75)  # logarithms


# --- the bound --------------------------------------------------------------------------------------------------------


def draw_chances(
    log_q: Float[jax.Array, "*rows V"], wanted: Int[jax.Array, " *rows"], ranks: int
) -> Float[jax.Array, "*rows R"]:
    """Return the probabilities that the first, second ... draw without replacement from q is the wanted token.

    Draws without replacement come in the order of independent exponential clocks with rates q (Gumbel-top-k): draw r is
    the token if r other clocks ring before its own. The integral over its own clock is a sum over `TIMES`. The count of
    the `LIKELY` most likely other tokens is exact, that of all other tokens together is taken as Poisson.

    Args:
        log_q: normalised log-probabilities, -inf for tokens that cannot be drawn.
        wanted: a negative one is never drawn.
    """
    own = jnp.take_along_axis(log_q, jnp.maximum(wanted, 0)[..., None], axis=-1)[..., 0]
    own = jnp.where(wanted >= 0, own, -jnp.inf)
    others = jnp.where(jnp.arange(log_q.shape[-1]) == wanted[..., None], -jnp.inf, log_q)
    likely, places = jax.lax.top_k(others, min(LIKELY, others.shape[-1]))
    rest = jax.nn.logsumexp(jnp.put_along_axis(others, places, -jnp.inf, axis=-1, inplace=False), axis=-1)
    expected = jnp.exp(rest[..., None] + TIMES)  # other clocks that have rung, [*rows, times]
    order = jnp.arange(ranks)
    poisson = order * jnp.log(expected[..., None]) - jax.lax.lgamma(order + 1.0) - expected[..., None]
    counts = jnp.where(expected[..., None] > 0, jnp.exp(poisson), (order == 0) * 1.0)

    def add(counts, log_rate):
        rung = -jnp.expm1(-jnp.exp(log_rate[..., None] + TIMES))[..., None]
        one_more = jnp.pad(counts[..., :-1], [(0, 0)] * (counts.ndim - 1) + [(1, 0)])
        return counts * (1 - rung) + one_more * rung, None

    counts = jax.lax.scan(add, counts, jnp.moveaxis(likely, -1, 0))[0]
    clock = own[..., None] + TIMES
    density = jnp.exp(clock - jnp.exp(clock)) * (TIMES[1] - TIMES[0])
    return jnp.einsum("...t,...tr->...r", density, counts)


def in_tree(chances: Float[np.ndarray, "*rows K R"], tree: TreeTopology) -> Float[np.ndarray, "*rows depth"]:
    """Return the probabilities that a drawn tree contains the text's next token, the next two ...

    Siblings differ, so the nodes of one depth contain a path in events that exclude each other.

    Args:
        chances: ``[k, r]``, the probability that draw r after the text's first k tokens is the next one.
    """
    of_node, found = [np.ones(chances.shape[:-2])], np.zeros((*chances.shape[:-2], tree.depth))
    for parent, choice in zip(tree.parents[1:], tree.choices, strict=True):
        of_node.append(of_node[parent] * chances[..., len(choice) - 1, choice[-1]])
        found[..., len(choice) - 1] += of_node[-1]
    return found


def accepted_shares(
    log_p: Float[np.ndarray, "*rows depth"], drawn: Float[np.ndarray, "*rows depth"]
) -> Float[np.ndarray, "*rows depth"]:
    """Return the bound on the probabilities that the text's next token, the next two ... are accepted."""
    ratio = drawn / np.exp(np.cumsum(log_p, axis=-1))
    return np.minimum.accumulate(np.minimum(ratio, 1), axis=-1)


def expected_steps(shares: Float[np.ndarray, "n depth"]) -> float:
    """Return the expected number of steps for n tokens, if a step may begin at each with these `accepted_shares`."""
    n = len(shares)
    begins = np.zeros(n + 1)
    begins[0] = 1
    for at in range(n):
        kept = np.concatenate([[1], shares[at, : n - at - 1], [0]])  # nothing is accepted beyond the end
        ends = kept[:-1] - kept[1:]
        begins[at + 1 : at + 1 + len(ends)] += begins[at] * ends
    return float(begins[:n].sum())


# --- distributions along the base's own text --------------------------------------------------------------------------


class Along:
    """Distributions of a base and a draft at all places of texts where a step can begin, from one pass.

    Attributes of row b and its n-th new token, the root of a step:
        ranks: int ``[K, B, n]`` as in `hydrajax.drafters.ranks`.
        log_p: ``[B, n, K]`` the base's log-probabilities of the K tokens after the root.
        chances: ``[B, n, K, R]``, see `draw_chances`.
    """

    def __init__(self, m: hydrajax.LanguageModel, depth: int, widest: int):
        self.m, self.depth, self.widest = m, depth, widest
        self._jitted = jax.jit(self._pass, static_argnames="n")

    def __call__(
        self, texts: Sequence[Generation], temperature: float, draft_temperature: float | None = None
    ) -> Along:
        width, n = max(len(text.prompt_ids) for text in texts), max(text.new_tokens for text in texts)
        rows, _ = right_padded([text.prompt_ids + text.output_ids for text in texts], width + n + self.depth + 1)
        starts, found = np.array([len(text.prompt_ids) for text in texts]), []
        temperatures = np.array([temperature, draft_temperature or temperature or 1], np.float32)
        for at in range(0, len(texts), BATCH):
            part = [np.resize(x[at : at + BATCH], (BATCH, *x.shape[1:])) for x in (rows, starts)]
            found.append(jax.device_get(self._jitted(self.m.params, *part, temperatures, n=n)))
        ranks, log_p, chances = (np.concatenate(x)[: len(texts)] for x in zip(*found, strict=True))
        self.ranks, self.log_p, self.chances = np.moveaxis(ranks, -1, 0), log_p.astype(float), chances.astype(float)
        return self

    def _pass(self, params, tokens, starts, temperatures, n: int):
        temperature, draft_temperature = temperatures
        drafter, model = self.m.drafter, self.m.model
        forward = run_base(model, params.base, tokens, drafter.spec.aux_hidden_layers)
        base = BoundBase(model, params.base, block=forward.block)
        roots = starts[:, None] + jnp.arange(n)
        places = roots[:, :, None] + jnp.arange(self.depth)  # of the token before each guess
        rows = jnp.arange(len(tokens))[:, None, None]
        wanted = tokens[rows, places + 1]
        logits_of = self._draft_logits(params.draft, forward, tokens, roots, base)

        def of_row(row):
            number, places, wanted = row

            def of_depth(k):
                logits = over_all(logits_of(number, k))
                ids = wanted[:, k]
                ranks = ranks_among(logits, ids, drafter.vocabulary, base.config.vocab_size)
                if drafter.vocabulary is not None:
                    ids = drafter.vocabulary.places_of(ids, base.config.vocab_size)
                log_q = jax.nn.log_softmax(logits / draft_temperature)
                log_p = jax.nn.log_softmax(base.logits(forward.hidden[number, places[:, k]]) / temperature)
                log_p = jnp.take_along_axis(log_p, wanted[:, k, None], axis=-1)[:, 0]
                return ranks, jnp.where(temperature > 0, log_p, 0), draw_chances(log_q, ids, self.widest)

            return [jnp.stack(x, axis=1) for x in zip(*map(of_depth, range(self.depth)), strict=True)]

        return jax.lax.map(of_row, (jnp.arange(len(tokens)), places, wanted))

    def _draft_logits(self, params, forward, tokens, roots, base):
        """Return a function from a row and a level to the draft's logits after the row's tokens up to that level."""
        drafter, depth = self.m.drafter, self.depth
        if drafter.spec.has_distribution:
            hidden = run_base(drafter.model, params, tokens).hidden
            return lambda row, k: drafter.logits(params, hidden[row, roots[row] + k])
        if isinstance(drafter, BlockDrafter):
            text = drafter.read(params, forward.aux_hidden_states, tokens, None, base)
            hidden = drafter.blocks_after(params, text, roots, base)
            known = tokens[jnp.arange(len(tokens))[:, None, None], roots[:, :, None] + jnp.arange(drafter.depth)]
            return lambda row, k: drafter.block_logits(params, hidden[row], known[row], base)[:, k]
        positions, mask = row_layout(tokens)
        read = drafter.teacher_hidden(params, forward.aux_hidden_states, tokens, base, None, positions, mask)
        hidden = jnp.stack(read[:depth])
        return lambda row, k: drafter.head_logits(params, k, hidden[k, row, roots[row] - 1], base)


# --- the table --------------------------------------------------------------------------------------------------------


def with_interval(name: str, above: np.ndarray, below: np.ndarray) -> dict[str, float]:
    """Return a ratio of sums over prompts, and its 95% bootstrap interval."""
    drawn = np.random.default_rng(0).integers(0, len(above), (2000, len(above)))
    low, high = np.quantile(above[drawn].sum(axis=1) / below[drawn].sum(axis=1), (0.025, 0.975))
    return {name: float(above.sum() / below.sum()), f"{name}_low": float(low), f"{name}_high": float(high)}


def computed(along: Along, texts: Sequence[Generation], tree: TreeTopology) -> dict[str, np.ndarray]:
    """Return the fewest steps of each text with the draft's most likely tokens in the tree, and with drawn ones."""
    held = accepted_lengths(tree, along.ranks)[..., None] > np.arange(tree.depth)
    drawn = accepted_shares(along.log_p[..., : tree.depth], in_tree(along.chances, tree))
    shares = {"best_likely": held.astype(float), "best_drawn": drawn}
    return {
        name: np.array([expected_steps(row[: text.new_tokens]) for row, text in zip(found, texts, strict=True)])
        for name, found in shares.items()
    }


def run(args: argparse.Namespace) -> None:
    base = hydrajax.load(args.base or assets.base(), dtype=args.dtype, quantize="none")
    measured, others = prompts_of(args, base)
    decode = {"max_new_tokens": args.new_tokens, "batch_size": BATCH, "seed": 1}

    @functools.cache
    def texts(temperature: float, search: bool = False) -> Sequence[Generation]:
        """Return the base's own text, without a draft."""
        prompts = others if search else measured
        return base.generate(prompts, tree="root", rule="exact", temperature=temperature, **decode)

    def measure(name: str) -> None:
        m = base.with_draft(name)
        depth = min(m.drafter.spec.depth, DEEPEST)
        found = texts(SEARCHED_AT, search=True)
        trees = trees_of(Along(m, depth, 1)(found, SEARCHED_AT), found, args.sizes, depth)
        along = Along(m, depth, max(tree.max_rank for tree in trees.values()) + 1)

        def bounds(temperature: float) -> list[dict]:
            found = texts(temperature)
            along(found, temperature)
            tokens = np.array([text.new_tokens for text in found])
            rows = []
            for tree in trees.values():
                steps = computed(along, found, tree)
                ratios = (with_interval(name, tokens, each) for name, each in steps.items())
                rows.append({key: value for ratio in ratios for key, value in ratio.items()})
            return rows

        def decoded(tree: TreeTopology, rule: str, temperature: float) -> list[dict]:
            found = m.generate(measured, tree=tree, rule=rule, temperature=temperature, **decode)
            tokens, steps = np.array([(text.new_tokens, text.steps) for text in found]).T
            fewest = computed(along(found, temperature), found, tree)["best_drawn"]
            return [with_interval(rule, tokens, steps) | with_interval(f"{rule}_share", fewest, steps)]

        for temperature in args.temperatures:
            key = f"{name}, temperature {temperature:g}"
            line.update(f"{key}: the most of any rule")
            most = args.parts.rows(key, functools.partial(bounds, temperature))
            for (label, tree), found in zip(trees.items(), most, strict=True):
                row = {"draft": name, "temperature": temperature, "tree": label, "nodes": tree.size}
                for rule in args.rules if label.startswith("chain") or tree.size in args.measured else []:
                    if temperature or rule == "exact":  # at temperature 0 all rules accept what was drawn
                        line.update(f"{key}, {label}: {rule}")
                        rule_of = functools.partial(decoded, tree, rule, temperature)
                        row |= args.parts.rows(f"{key}, {label}, {rule}", rule_of)[0]
                rows.append(row | found)
                print(shown(rows[-1], args.rules), flush=True)

    rows: list[dict] = []
    columns = ["draft", "T", "tree", "nodes", *args.rules, "most, likely tokens", "most, drawn tokens"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with common.CONSOLE.status("") as line:
        for name in args.draft:
            line.update(f"{name}: searching trees")
            measure(name)
    args.settings |= {"rules": args.rules, "temperatures": args.temperatures}
    title = f"tokens per step of rules, and the most of any rule, {args.base or 'the bundled model'}"
    common.write(args, "ceilings", "", title, rows, REMARKS)


def prompts_of(args: argparse.Namespace, base: hydrajax.LanguageModel) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts that are measured and others, on which trees are searched."""
    if not args.prompts:
        ids = [x.tolist() for x in common.held_out_chunks(base.tokenizer, 2 * args.count, args.prompt_tokens)]
        return ids[: args.count], ids[args.count :]
    ids = [x.tolist() for x in base.ids_of_prompts(read_prompts(args.prompts)) if len(x) <= LONGEST]
    measured, others = ids[:: args.every], ids[args.every // 2 :: args.every]
    return measured[: args.count], others[: args.count]


def trees_of(along: Along, texts: Sequence[Generation], sizes: Sequence[int], depth: int) -> dict[str, TreeTopology]:
    """Return a chain, and the trees of these sizes that are best if each head is right as often as on these texts."""
    ends = [max(text.new_tokens - depth - 1, 0) for text in texts]
    ranks = np.concatenate([along.ranks[:, row, :end] for row, end in enumerate(ends)], axis=1)
    right = -np.sort(-search.accuracies(ranks), axis=1)  # siblings of a drawn tree skip no rank
    found = search.independent(right, max(sizes))
    return {f"chain-{depth}": presets.chain(depth)} | {f"T_{n}": found.tree(n) for n in sizes if n <= found.largest}


def shown(row: dict, rules: Sequence[str]) -> str:
    """Return a row of the table in Markdown."""

    def cell(name: str) -> str:
        if name not in row:
            return ""
        share = f", {row[f'{name}_share']:.0%}" if f"{name}_share" in row else ""
        return f"{row[name]:.2f} ({row[f'{name}_low']:.2f}-{row[f'{name}_high']:.2f}){share}"

    first = [row["draft"], f"{row['temperature']:g}", row["tree"], str(row["nodes"])]
    return f"| {' | '.join([*first, *map(cell, [*rules, 'best_likely', 'best_drawn'])])} |"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rules", nargs="+", default=["exact", "rejection", "traversal"], metavar="RULE", help="default: %(default)s"
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0, 0.3, 0.7, 1], metavar="T")


if __name__ == "__main__":
    sys.exit(common.program(__doc__, run, FULL, QUICK, add_arguments))
