"""A tiny base with a greedy reference without a cache, and drafters that reach every accept length."""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from helpers.how import how, sampling
from helpers.noise import draft_noise, noise
from helpers.tree_tools import random_tree
from hydrajax.amphista.heads import AmphistaHeads
from hydrajax.api import make_autoregressive_fn, make_decode_fn
from hydrajax.decoding.state import Params
from hydrajax.drafters.block import BlockSettings
from hydrajax.drafters.corpus import Corpus
from hydrajax.drafters.corpus_search import CorpusSearch
from hydrajax.drafters.dflash import DFlash, JetSpec
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.drafter import CORPUS, DrafterSpec, Proposal, SeesAcceptedOnly
from hydrajax.drafters.dspark import DSpark, DSparkSettings
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.drafters.gemma4_assistant import AssistantSettings, Gemma4Assistant
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.mtp import MTP
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.peagle import PEagle, PEagleSettings
from hydrajax.drafters.several import FromText, Several, with_lookup
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.lookahead.drafter import Lookahead
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.recurrent_settings import GatedDelta, ShortConv
from hydrajax.trees import presets
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.static_tree import TreeTopology

# With this vocabulary untrained heads are often right in ten guesses at depth 1.
VOCAB, WIDTH, CONTEXT = 17, 32, 40
CONFIG = LlamaConfig(VOCAB, WIDTH, 48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=CONTEXT)
DELTA = LayerKind(None, None, None, recurrent=GatedDelta(4, key_heads=2, value_heads=4, key_dim=16, value_dim=8))
CONV = LayerKind(None, None, None, recurrent=ShortConv(4, WIDTH, groups=2))
HYBRID = CONFIG.replace(n_layers=3, layer_kinds=(LayerKind(None, CONFIG.rope_theta, None), DELTA, CONV))
ORACLE_DEPTH = 4
NEW = 24  # generated tokens in most tests

QUICK = {"xla_backend_optimization_level": 0}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


class Scripted(SeesAcceptedOnly):
    """Base class of drafters for tests: no parameters, and the number of observed tokens as state."""

    can: ClassVar[dict[str, bool]] = {}  # fields of `DrafterSpec`

    @property
    def spec(self):
        return DrafterSpec(self.depth, "root", **self.can)

    def init(self, rng, base):
        return {}

    def init_state(self, batch, slots):
        return jnp.zeros(batch, jnp.int32)

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        return state + counts  # observed tokens

    def rewind(self, state, lengths):
        return jnp.minimum(state, lengths)

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        raise NotImplementedError


@dataclass(frozen=True)
class Oracle(Scripted):
    """Propose the reference text along one path of the tree and wrong tokens elsewhere.

    ``draft_params``: ``text`` int32 ``[B, CONTEXT + 5]`` prompt and greedy continuation; ``right`` bool, same shape,
    marks positions that are guessed right; ``salt`` int32. State: observed tokens, int32 ``[B]``. The path leads to
    leaf ``(observed + salt) % leaves``, so it varies between steps and sequences.
    """

    depth: int = ORACLE_DEPTH

    def propose(self, params, state, root, tree, base, draw=None):
        path = jnp.asarray(oracle_paths(tree))[(state + params["salt"]) % len(oracle_paths(tree))]  # [B, N] bool
        positions = state[:, None] + np.array([0, *map(len, tree.choices)])
        truth = jnp.take_along_axis(params["text"], positions, axis=1)
        right = jnp.take_along_axis(params["right"], positions, axis=1)
        wrong = (truth + 1 + np.arange(tree.size) % (VOCAB - 1)) % VOCAB  # never equal to the truth
        tokens = jnp.where(path & right, truth, wrong).astype(jnp.int32).at[:, 0].set(root)
        return Proposal(tokens, tree.topology)


@functools.cache
def oracle_paths(tree: TreeTopology) -> np.ndarray:
    """Return bool ``[leaves, N]``: the nodes on the path to each leaf, from the rank paths."""
    leaves = [p for p in tree.choices if not any(q[: len(p)] == p and q != p for q in tree.choices)] or [()]
    return np.array([[True] + [leaf[: len(p)] == p for p in tree.choices] for leaf in leaves])


def oracle_accept_lengths(tree: TreeTopology, right: np.ndarray, salt: int, start: int, emitted: int) -> list[int]:
    """Return the accept lengths of the oracle after a prompt of ``start`` tokens, cut at ``emitted`` tokens."""
    depths, at, steps = [len(path) for path in tree.choices], start, []
    while at < start + emitted:
        on_path = oracle_paths(tree)[(at + salt) % len(oracle_paths(tree))][1:]
        leaf_depth = max((d for d, on in zip(depths, on_path, strict=True) if on), default=0)
        wrong_at = [d for d in range(1, leaf_depth + 1) if not right[at + d]]
        accepted = (wrong_at[0] - 1) if wrong_at else leaf_depth
        steps.append(min(accepted, start + emitted - at - 1))
        at += steps[-1] + 1
    return steps


TREES = {
    "root": presets.root(),
    "one node": TreeTopology.from_choices([[2]]),
    "chain": presets.chain(4),
    "skips ranks": TreeTopology.from_choices([[1], [1, 2], [3], [3, 0], [3, 5], [3, 0, 1]]),
    "cartesian": presets.cartesian([3, 2, 2]),
    "flat": TreeTopology.from_choices([[rank] for rank in range(10)]),
    "deep and late": TreeTopology.from_choices([[0], [1], [5], [5, 0], [5, 7], [5, 7, 1], [5, 7, 4], [5, 7, 4, 2]]),
    "random": random_tree(2, 30, depth=4, widest=9),
    "grown": DynamicTree(14, 3, 4),
}

SMALL = LlamaConfig(VOCAB, 16, 24, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, max_positions=CONTEXT)
DRAFTERS = {
    "none": NoDrafter(),
    "oracle": Oracle(),
    "medusa": MedusaHeads(4, WIDTH, VOCAB, n_layers=2),
    "hydra": HydraHeads(4, WIDTH, VOCAB),
    "hydra on layer -1": HydraHeads(3, WIDTH, VOCAB, hidden_state_offset=1),
    "hydra++": HydraHeads(4, WIDTH, VOCAB, n_layers=2).with_prefix(CONFIG),
    "amphista": AmphistaHeads(4, CONFIG),
    "eagle": Eagle.for_base(CONFIG, jnp.float32),
    "eagle3": dataclasses.replace(Eagle3.for_base(CONFIG, jnp.float32), vocabulary=Vocabulary(range(1, VOCAB, 2))),
    "mtp": MTP.for_base(CONFIG, jnp.float32),
    "mtp of mimo": MTP(CONFIG.replace(n_layers=1), embedding_first=False, before_final_norm=True),
    "gemma4 assistant": Gemma4Assistant.for_base(CONFIG, jnp.float32, AssistantSettings(width=16, layers=2)),
    "model": DraftModel(Llama(SMALL), VOCAB),
    "windowed model": DraftModel(Llama(CONFIG.replace(sliding_window=5)), VOCAB),
    "sure model": DraftModel(Llama(SMALL.replace(qkv_bias=True)), VOCAB, confidence=0.2),
    "the base": DraftModel(Llama(CONFIG), VOCAB),
}
KNOWN = Vocabulary([1, 2, 5, 7, 8, 11, 12, 13, 16])  # an index into these is another token
BLOCK = BlockSettings(n_layers=2, block_size=5, target_layers=(0, 1))
BOTH = (PromptLookup(), CorpusSearch())
# With those above, every kind of drafter and every way to combine them.
MORE = {
    "dflash": dataclasses.replace(DFlash.for_base(CONFIG, jnp.float32, BLOCK), windows=(4, 0)),
    "dflash of some tokens": dataclasses.replace(DFlash.for_base(CONFIG, jnp.float32, BLOCK), vocabulary=KNOWN),
    "jetspec": JetSpec.for_base(CONFIG, jnp.float32, BLOCK),
    "dspark": DSpark.for_base(CONFIG, jnp.float32, DSparkSettings(2, 4, (0, 1), markov_rank=5, markov="rnn")),
    "p-eagle": PEagle.for_base(CONFIG, jnp.float32, PEagleSettings(2, 5, (0, 1))),
    "hydra with the base's lm head": HydraHeads(2, WIDTH, VOCAB, small_lm_head=LmHead(shared=True, bias=True)),
    "hydra of some tokens": HydraHeads(2, WIDTH, VOCAB, small_lm_head=LmHead(bias=True, vocabulary=KNOWN)),
    "medusa of low rank": MedusaHeads(2, WIDTH, VOCAB, small_lm_head=LmHead(rank=6, vocabulary=KNOWN)),
    "lookup": PromptLookup(),
    "lookahead": Lookahead(4, 3, 3),
    "lookup with hydra++": with_lookup(DRAFTERS["hydra++"], 4),
    "lookup with model": with_lookup(DRAFTERS["model"], 3),
    "corpus": FromText(BOTH),
    "corpus with hydra": Several(DRAFTERS["hydra"], BOTH, 6),
    "corpus with eagle": Several(DRAFTERS["eagle"], BOTH, 0),
}
MORE["lookup with jetspec"] = with_lookup(MORE["jetspec"])


@dataclass
class Lab:
    """Base, reference and compiled decode functions, each created once per session."""

    model: Llama = field(default_factory=lambda: Llama(CONFIG))
    trees: dict = field(default_factory=lambda: TREES)
    drafters: dict = field(default_factory=lambda: DRAFTERS | MORE)
    vocab: int = VOCAB
    context: int = CONTEXT
    accept_lengths = staticmethod(oracle_accept_lengths)
    quick_jit = staticmethod(quick_jit)

    def __post_init__(self):
        self.base = functools.cache(self._base)
        self.draft = functools.cache(self._draft)
        self.decode_fn = functools.cache(self._decode_fn)
        self._compiled: dict = {}
        self._plain: dict = {}
        self._references: dict = {}
        positions = jnp.broadcast_to(jnp.arange(CONTEXT), (4, CONTEXT))

        @quick_jit
        def continued(params, texts, lengths):
            """Continue four texts to the end of the context; return the smallest margin of the best token.

            Every token takes a full pass without a cache.
            """

            def grow(last, carry):
                texts, least = carry
                hidden = self.model.apply({"params": params}, texts, positions, causal_mask(CONTEXT)).hidden[:, last]
                values, tokens = jax.lax.top_k(self.model.apply({"params": params}, hidden, method="logits"), 2)
                grows = lengths <= last + 1
                texts = texts.at[:, last + 1].set(jnp.where(grows, tokens[:, 0], texts[:, last + 1]))
                return texts, jnp.where(grows, jnp.minimum(least, values[:, 0] - values[:, 1]), least)

            return jax.lax.fori_loop(jnp.min(lengths) - 1, CONTEXT - 1, grow, (texts, jnp.full(4, jnp.inf)))

        self._continued = continued

    def _base(self, seed: int):
        return noise(jax.eval_shape(lambda: init_base(self.model, jax.random.key(0))), seed)

    def _draft(self, name: str, seed: int):
        if name == "the base":  # nearly, so that it is often right
            return jax.tree.map(lambda x, y: 0.98 * x + 0.02 * y, self.base(0), self.base(1 + seed))
        drafter, bound = self.drafters[name], BoundBase(self.model, self.base(0))
        params = draft_noise(drafter, bound, 100 + seed)
        return params | {CORPUS: Corpus(512)} if drafter.spec.remembers else params

    def _decode_fn(self, drafter: str, tree: str, max_new_tokens: int, eos_ids: tuple[int, ...] = ()):
        return make_decode_fn(
            self.model, self.drafters[drafter], self.trees[tree], max_new_tokens=max_new_tokens, eos_ids=eos_ids
        )

    def references(self, seed: int, prompts: list[list[int]]) -> tuple[np.ndarray, float]:
        """Continue each prompt greedily to the end of the context; also return the smallest margin.

        Every token takes a full pass of the base, without the package's cache, trees and loop.
        """
        wanted = [tuple(prompt) for prompt in prompts]
        missing = [prompt for prompt in dict.fromkeys(wanted) if (seed, prompt) not in self._references]
        for start in range(0, len(missing), 4):
            batch = missing[start : start + 4]
            texts, lengths = np.zeros((4, CONTEXT), np.int32), np.full(4, CONTEXT, np.int32)
            for row, prompt in enumerate(batch):
                texts[row, : len(prompt)], lengths[row] = prompt, len(prompt)
            texts, least = jax.device_get(self._continued(self.base(seed), texts, lengths))
            for row, prompt in enumerate(batch):
                self._references[seed, prompt] = texts[row], float(least[row])
        found = [self._references[seed, prompt] for prompt in wanted]
        return np.stack([text for text, _ in found]), min(margin for _, margin in found)

    def plainly(self, prompts: list[list[int]], rule=None, seed: int = 0, base_seed: int = 0):
        """Decode `NEW` tokens of each prompt without a draft, with one program per kind of rule.

        rule: a rule or a request, for all prompts or as a list with one per prompt.
        """
        some = how(rule[0] if isinstance(rule, list) else rule)
        kind = jax.tree.structure(some.rule), some.processors != ()
        if kind not in self._plain:
            keywords = {"processors": some.processors, "max_new_tokens": NEW}
            self._plain[kind] = make_autoregressive_fn(self.model, some.rule, **keywords)
        return self.decode(self._plain[kind], base_seed, {}, prompts, rule=rule, seed=seed)

    def expected(self, text: np.ndarray, start: int, max_new_tokens: int, eos_ids: tuple[int, ...] = ()) -> list[int]:
        """Return the expected output after the first ``start`` tokens of a reference text."""
        out = []
        for token in text[start : start + max_new_tokens].tolist():
            out.append(token)
            if token in eos_ids:
                break
        return out

    def oracle_params(self, texts: np.ndarray, right: np.ndarray | bool = True, salt: int = 0) -> dict:
        room = CONTEXT + ORACLE_DEPTH + 1
        text, flags = np.zeros((len(texts), room), np.int32), np.ones((len(texts), room), bool)
        text[:, :CONTEXT] = texts
        return {"text": text, "right": flags & right, "salt": np.int32(salt)}

    def decode(
        self,
        decode_fn,
        base_seed: int,
        draft_params,
        prompts: list[list[int]],
        *,
        rule=None,
        limits=None,
        seed: int = 0,
    ):
        """Decode prompts that are padded to the context (one bucket, so one compilation), and check the result.

        ``decode_fn`` is compiled here without LLVM's optimisation: compilation takes nearly all the time of these
        tests, and this halves it.
        """
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        padded = np.full((len(prompts), CONTEXT), VOCAB - 1, np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        limits = np.full(len(prompts), CONTEXT if limits is None else limits, np.int32)
        drawn = sampling(rule, len(prompts), VOCAB, seed, limits)
        args = Params(self.base(base_seed), draft_params), padded, lengths, drawn
        key = decode_fn, len(prompts), jax.tree.structure(drawn)
        if key not in self._compiled:
            self._compiled[key] = decode_fn.jitted.lower(*args).compile(QUICK)
        out = jax.device_get(self._compiled[key](*args))
        check_bookkeeping(out)
        return out


def watched_step(engine):
    """Return a compiled step that also returns the proposal and the outcome."""

    def step(params, state):
        proposal = engine.propose(params, state)
        forward, logits = engine.verify(params, state.target.cache, proposal)
        accepted = engine.accept(state, logits, proposal)
        state, outcome = engine.commit(state, forward, logits, proposal, accepted)
        return engine.observe(params, state, proposal, outcome), proposal, outcome

    return quick_jit(step)


def arrays(out) -> dict[str, np.ndarray]:
    """Return the fields of a result by name, without those that are None."""
    return {name: value for name, value in out._asdict().items() if value is not None}


def check_bookkeeping(out) -> None:
    """Check the invariants of `DecodeResult`."""
    for row, length in enumerate(out.lengths):
        steps = out.steps[row]
        assert (out.tokens[row, :length] >= 0).all()
        assert (out.tokens[row, length:] == -1).all()
        assert (out.accept_lengths[row, :steps] >= 0).all()
        assert (out.accept_lengths[row, steps:] == -1).all()
        assert (out.accept_lengths[row, :steps] + 1).sum() == length


@functools.cache
def shared_lab() -> Lab:
    """Return one `Lab` for all tests of a process."""
    return Lab()


class HybridLab(Lab):
    """A base with recurrent layers whose states forget slowly, so that an error stays in them."""

    def _base(self, seed: int):
        params = super()._base(seed)
        return jax.tree.map_with_path(lambda path, x: x - 3 if path[-1].key == "log_rate" else x, params)


@functools.cache
def hybrid_lab() -> HybridLab:
    """Return one `HybridLab` for all tests of a process."""
    return HybridLab(Llama(HYBRID))
