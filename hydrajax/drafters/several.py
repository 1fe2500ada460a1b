"""Several drafts in one tree: a drafter's tree, chains from the text, and chains from past outputs.

Each proposes nodes with an estimate of their acceptance, and a step verifies the most likely ones of all
(`hydrajax.drafters.merging`). Where a text repeats, most nodes are one long chain; where it is new, they are the
drafter's. `with_lookup` keeps the drafter's tree whole and adds lookup's chain as one more branch
(`hydrajax.drafters.branch`): a step accepts at least as much as the drafter alone, and as lookup alone with a chain of
as many nodes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Int

from hydrajax.drafters.branch import with_branch
from hydrajax.drafters.chains import Chains, Source, by_rank, joined
from hydrajax.drafters.corpus_search import CorpusSearch
from hydrajax.drafters.drafter import CORPUS, Drafter, DrafterSpec, Proposal, SeesAcceptedOnly
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.merging import merged
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.trees import presets
from hydrajax.trees.dynamic import DynamicTree, with_estimates

MOST_NODES, LOOKUP_NODES = 999, 5
DEPTH = 32  # tokens that past text proposes at most
DEFAULT_TREE = "best-9"


@dataclass(frozen=True)
class FromText(SeesAcceptedOnly):
    """Chains alone: the corpus, with or without lookup, without a trained draft. It draws nothing.

    A static tree takes its ranks from the order of the chains, the longest expected one first. A dynamic tree takes the
    nodes with the highest estimates.

    Attributes:
        sources: Where chains come from.
    """

    sources: tuple[Source, ...] = (CorpusSearch(),)

    @property
    def spec(self) -> DrafterSpec:
        return DrafterSpec(DEPTH, DEFAULT_TREE, supports_dynamic_tree=True, remembers=remember(self.sources))

    def title(self, of: Callable[[Drafter], str]) -> str:
        """Return the display name."""
        return names_of(self.sources).capitalize()

    def init(self, rng, base):
        return {}  # `hydrajax.load` adds the corpus

    def init_state(self, batch, slots):
        return tuple(source.init_state(batch, slots) for source in self.sources)

    def advance(self, params, state, *text):
        return tuple(source.advance(params, own, *text) for source, own in zip(self.sources, state, strict=True))

    def rewind(self, state, lengths):
        return tuple(source.rewind(own, lengths) for source, own in zip(self.sources, state, strict=True))

    def chains(self, params: Any, state: Any, root: Int[Array, " B"], depth: int) -> Chains:
        """Return the chains of all sources."""
        found = (source.chains(params, own, root, depth) for source, own in zip(self.sources, state, strict=True))
        return joined(list(found))

    def propose(self, params, state, root, tree, base, draw=None):
        alone = Proposal(root[:, None], presets.root().topology)
        if not tree.depth:
            return alone
        chains = self.chains(params, state, root, tree.depth)
        if isinstance(tree, DynamicTree):
            return merged(alone, chains, tree.size, tree.depth)
        order = jnp.argsort(-chains.expected(), axis=1, stable=True)
        tokens = jnp.take_along_axis(chains.tokens, order[:, :, None], axis=1)
        return by_rank(root, tokens[:, None], tokens[:, None, :, 0] >= 0, tree)

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        raise HydrajaxError("draft: got a corpus, expected a draft whose guesses depend on the text alone")


class States(NamedTuple):
    """The wrapped drafter's state, and those of the sources."""

    drafter: Any
    sources: Any


@dataclass(frozen=True)
class Several:
    """``drafter``'s tree and the chains of ``sources`` in one tree of the nodes with the highest estimates.

    The drafter fills its own tree; a dynamic one is grown to the size of the result. Of its nodes and the chains', the
    N + L most likely are verified. The drafter reads accepted tokens as it reads a prompt because its nodes have other
    numbers in the result. For heads this makes no difference; a draft model runs the accepted tokens once more.

    If the drafter draws its candidates, none of them may be left out for being unlikely, because rejection sampling
    relies on q (`hydrajax.drafters.growing`). Then, and with ``keeps_tree``, its tree stays whole, and the chain with
    the most expected tokens is one branch of L nodes; L = 0 means no branch. The branch's own nodes are given, last
    among their siblings (`RejectionSampling`). Whether such a node exists depends on the text and on earlier draws, all
    of which have been judged by then, so the output keeps the base's distribution.

    Attributes:
        drafter: The drafter of the tree.
        sources: Where chains come from.
        branch_nodes: L, the number of nodes in addition to those of the requested tree. With 0 the chains compete for
            the tree's own nodes, at the cost of a step with the drafter alone. A branch holds the L tokens after the
            last node that it shares with the tree.
        keeps_tree: Never replace nodes of the drafter's tree. The source is lookup, and its best match is the branch.

    Raises:
        HydrajaxError: For a number of nodes out of range.
    """

    drafter: Drafter
    sources: tuple[Source, ...] = (PromptLookup(), CorpusSearch())
    branch_nodes: int = 8
    keeps_tree: bool = False

    def __post_init__(self):
        if not 0 <= self.branch_nodes <= MOST_NODES:
            raise HydrajaxError(
                f"draft: got {self.branch_nodes} nodes for lookup and corpus, expected 0 to {MOST_NODES}"
            )

    @cached_property
    def text(self) -> FromText:
        """The sources."""
        return FromText(self.sources)

    @cached_property
    def spec(self) -> DrafterSpec:
        """The drafter's spec with L more nodes: accepted tokens are prefilled, it needs the base, and it is not
        trained.
        """
        return replace(
            self.drafter.spec, branch_nodes=self.branch_nodes, independent=False, has_distribution=False,
            num_draft_heads=0, remembers=remember(self.sources), chooses_nodes=not self.keeps_tree,
        )  # fmt: skip

    def title(self, of: Callable[[Drafter], str]) -> str:
        """Return the display name; ``of`` returns the drafter's."""
        return f"{of(self.drafter)} with {names_of(self.sources)}"

    def init(self, rng, base):
        return self.drafter.init(rng, base)

    def init_state(self, batch, slots):
        return States(self.drafter.init_state(batch, slots), self.text.init_state(batch, slots))

    def begin(self, params, state, *text):
        return States(
            self.drafter.begin(_own(params), state.drafter, *text), self.text.advance(params, state.sources, *text)
        )

    def rewind(self, state, lengths):
        return States(self.drafter.rewind(state.drafter, lengths), self.text.rewind(state.sources, lengths))

    def propose(self, params, state, root, tree, base, draw=None):
        depth, keeps_tree = tree.depth + self.branch_nodes, self.keeps_tree or draw is not None
        alone = not depth or (keeps_tree and not self.branch_nodes)
        asked = tree if keeps_tree or alone else with_estimates(tree, self.branch_nodes)
        proposal = self.drafter.propose(_own(params), state.drafter, root, asked, base, draw)
        if alone:
            return proposal
        if self.keeps_tree:
            chain = self.sources[0].best_chain(state.sources[0], root, depth)
            return with_branch(proposal, chain, self.branch_nodes)
        chains = self.text.chains(params, state.sources, root, depth)
        if keeps_tree:
            return with_branch(proposal, chains.best(), self.branch_nodes)
        return merged(proposal, chains, tree.size + self.branch_nodes, depth)

    def observe(self, params, state, proposal, outcome, base):
        return self.begin(params, state, *outcome.as_text(), base)

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        """Return the drafter's ranks: other nodes need none of its tree."""
        return self.drafter.ranks(_own(params), aux_hidden_states, batch, base, chunk_tokens, depth)


SOURCES: dict[str, Source] = {"lookup": PromptLookup(), "corpus": CorpusSearch()}


def with_lookup(drafter: Drafter, nodes: int = LOOKUP_NODES) -> Several:
    """Return the drafter with lookup's chain as one more branch of ``nodes`` nodes; its tree stays as it is."""
    return Several(drafter, (PromptLookup(),), nodes, keeps_tree=True)


def _own(params: Any) -> Any:
    """Return a draft's parameters without the corpus."""
    return {name: value for name, value in params.items() if name != CORPUS}


def names_of(sources: Iterable[Source]) -> str:
    """Return the names of sources, joined by "and"."""
    return " and ".join(name for name, source in SOURCES.items() if source in sources)


def remember(sources: Iterable[Source]) -> bool:
    """Return whether one of the sources is a corpus."""
    return any(isinstance(source, CorpusSearch) for source in sources)


KIND = DrafterKind("Corpus", FromText, about="n-grams of past outputs")
