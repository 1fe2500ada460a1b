"""Drafted decoding against reference decoding, with every kind of draft in the registry."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.decode import DecodeResult, make_decode_fn
from hydrajax.decoding.processors import LogitBias, Penalties
from hydrajax.decoding.program import Program
from hydrajax.decoding.prompt_batch import SMALLEST_BUCKET, right_padded
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.request import Request, SamplingParams, sampling_params
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.decoding.traversal import TraversalVerification
from hydrajax.decoding.typical import Typical
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.several import with_lookup
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.base_model import BoundBase
from tools.faults.reference import Reference, noise, random_config, random_tree
from tools.faults.registry import Failure, Trial, fault

CALLS = 12  # of a compiled case, each with its own parameters, prompts, limits and sampling numbers
DRAFTS = [*KINDS, *(f"lookup+{name}" for name, kind in KINDS.items() if not kind.about)]


# --- drafters that know some of the truth -----------------------------------------------------------------------------


class OracleState(NamedTuple):
    """State of the wrapped drafter, and tokens of the text so far, int32 ``[B]``."""

    inner: object
    observed: object


def with_oracle(drafter: Drafter) -> Drafter:
    """Wrap a drafter so that its proposals contain the true continuation on the path to one node.

    Untrained drafters would otherwise have only short paths accepted. The node depends on the position. The drafter's
    own cache then belongs to other tokens, which may only make later proposals worse.

    Parameters: ``inner`` (the drafter's), ``text`` int32 ``[B, S]``, and ``right`` bool ``[B, S]``, the positions whose
    token is revealed.
    """

    class Oracle(type(drafter)):  # a subclass keeps the drafter's other abilities
        def init(self, rng, base):
            return {"inner": drafter.init(rng, base)}

        def init_state(self, batch, slots):
            return OracleState(drafter.init_state(batch, slots), jnp.zeros(batch, jnp.int32))

        def begin(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
            inner = drafter.begin(params["inner"], state.inner, aux_hidden_states, tokens, counts, bonus_token, base)
            return OracleState(inner, state.observed + counts)

        def rewind(self, state, lengths):
            return OracleState(drafter.rewind(state.inner, lengths), jnp.minimum(state.observed, lengths))

        def propose(self, params, state, root, tree, base, draw=None):
            proposal = drafter.propose(params["inner"], state.inner, root, tree, base, draw)
            if draw is not None:  # sampled tokens must stay as sampled
                return proposal
            found, n_nodes = proposal.tree, proposal.tokens.shape[1]
            node = (state.observed * 7919 + 13) % n_nodes
            on_path = found.at(found.mask, node) & (found.at(found.parents, node) >= 0)[:, None]
            depths = jnp.broadcast_to(found.depths, proposal.tokens.shape)
            at = jnp.minimum(state.observed[:, None] + depths, params["text"].shape[1] - 1)
            truth, right = (jnp.take_along_axis(params[name], at, axis=1) for name in ("text", "right"))
            tokens = jnp.where(on_path & right, truth, proposal.tokens).at[:, 0].set(root)
            return proposal._replace(tokens=tokens.astype(jnp.int32))

        def observe(self, params, state, proposal, outcome, base):
            inner = drafter.observe(params["inner"], state.inner, proposal, outcome, base)
            return OracleState(inner, state.observed + outcome.counts)

    wrapped = object.__new__(Oracle)
    wrapped.__dict__.update(vars(drafter))
    return wrapped


# --- random cases -----------------------------------------------------------------------------------------------------


def drafter_of(name: str, reference: Reference, random: random.Random) -> Drafter:
    """A drafter by its name in `DRAFTS`, with random numbers where its name takes some."""
    kind = KINDS[name.removeprefix("lookup+")]
    if kind.numbers and random.random() < 0.7:
        kind = DraftRef.parse("-".join([name, *(str(random.randint(2, 4)) for _ in kind.numbers)])).kind
    drafter = kind.build(reference.config, jnp.float32)
    return with_lookup(drafter, random.randint(1, 6)) if name.startswith("lookup+") else drafter


def rules_of(random: random.Random, vocab_size: int, draws: bool, batch: int) -> list[dict]:
    """Rule and processors of each sequence of a batch: one kind, different numbers."""
    kind = random.choice(("greedy", "greedy", "greedy", "exact", "exact", "exact", "typical", "rejection", "traversal"))
    cuts = random.choice(((), ("top_k",), ("top_p", "min_p")))
    penalised, biased = random.random() < 0.2, random.random() < 0.1

    def one():
        numbers = {"top_k": random.randint(1, 9), "top_p": random.uniform(0.05, 0.999), "min_p": random.random() * 0.5}
        sampling = {"temperature": random.choice((0.02, 0.7, 1.0, 3.0)), **{name: numbers[name] for name in cuts}}
        rule, processors = Greedy(), []
        if kind == "exact":
            rule = ExactSampling(**sampling)
        if kind in ("rejection", "traversal") and draws:
            rule = {"rejection": RejectionSampling, "traversal": TraversalVerification}[kind](**sampling)
        if kind == "typical":
            rule = Typical(temperature=sampling["temperature"])
        if penalised:
            penalties = {"repetition_penalty": random.uniform(1.01, 2), "frequency_penalty": random.uniform(0.1, 2)}
            processors.append(Penalties(**penalties))
        if biased:
            some = random.sample(range(vocab_size), random.randint(1, vocab_size))
            processors.append(LogitBias({token: random.uniform(-3, 3) for token in some}))
        return {"rule": rule, "processors": processors}

    return [one() for _ in range(batch)]


class Case(NamedTuple):
    """A base, a draft and a batch size: one compiled program."""

    reference: Reference
    name: str
    program: Program
    request: Request
    batch: int

    @classmethod
    def drawn(cls, random: random.Random, name: str | None = None) -> Case:
        reference = Reference(random_config(random))
        name = name or random.choice(DRAFTS)
        drafter, config = drafter_of(name, reference, random), reference.config
        tree = random_tree(random, drafter.spec.depth, config.vocab_size, drafter.spec.supports_dynamic_tree)
        batch = random.choice((1, 3, 4, 6))
        (row,) = rules_of(random, config.vocab_size, drafter.spec.supports_sampling, 1)
        try:
            row["rule"].check(tree)
        except HydrajaxError:
            row["rule"] = Greedy()
        ends = random.sample(range(config.vocab_size), random.choice((0, 0, 1, config.vocab_size // 3)))
        limit = random.choice((1, 2, 7, config.max_positions, config.max_positions + 9))
        drafter = with_oracle(drafter) if random.random() < 0.5 else drafter
        request = Request(**row, max_new_tokens=limit)
        return cls(reference, name, Program(drafter, tree, eos_ids=ends).serving(request), request, batch)

    def with_program(self, **changes) -> Case:
        return self._replace(program=self.program.replace(**changes))

    def description(self) -> str:
        tree = getattr(self.program.tree, "name", None) or [list(path) for path in self.program.tree.choices]
        name = f"{self.name} with oracle" if self.has_oracle else self.name
        return f"{name}, {self.request.shown_rule()}, tree {tree}, batch {self.batch}"

    @property
    def has_oracle(self) -> bool:
        return type(self.program.drafter).__name__ == "Oracle"

    @property
    def has_reference(self) -> bool:
        """True for rules whose output does not depend on the draft (not typical acceptance or rejection sampling)."""
        return isinstance(self.request.rule, (Greedy, ExactSampling))

    def requests(self, random: random.Random) -> list[Request]:
        """The request with different parameters of rule and processors for each sequence."""
        vocab_size, draws = self.reference.config.vocab_size, self.program.drafter.spec.supports_sampling

        def kind(request: Request):
            return jax.tree.structure(request.rule), [type(one) for one in request.processors]

        while True:
            found = [self.request.replace(**row) for row in rules_of(random, vocab_size, draws, self.batch)]
            if kind(found[0]) == kind(self.request):
                return found

    def sampling(self, requests: list[Request], random: random.Random) -> SamplingParams:
        """These parameters, with one key per sequence."""
        keys = jax.random.split(jax.random.key(random.randrange(2**31)), self.batch)
        return sampling_params(requests, keys, self.reference.config.vocab_size)

    def expected(self, params: Params, texts: list[list[int]], sampling: SamplingParams):
        """`Reference.decode`, greedily where the rule has no reference: an oracle needs some text."""
        if not self.has_reference:
            sampling = sampling._replace(rule=Greedy(), processors=())
        return self.reference.decode(params.base, texts, sampling)

    def params(self, random: random.Random) -> Params:
        """Random parameters of the base and the drafter, without the oracle's."""
        seed = random.randrange(2**31)
        base = noise(self.reference.shapes, seed)
        own = jax.eval_shape(
            lambda base: self.program.drafter.init(jax.random.key(0), BoundBase(self.reference.model, base)), base
        )
        draft = noise(own["inner"] if self.has_oracle else own, seed + 1)
        if jax.tree.structure(draft) == jax.tree.structure(base) and random.random() < 0.5:
            draft = base  # a draft model equal to its base is always right
        return Params(base, draft)

    def prompts(self, random: random.Random, width: int) -> list[list[int]]:
        """Prompts of extreme lengths: one token, the whole width, one or two less."""
        lengths = [
            random.choice((1, 2, width - 2, width - 1, width, *random.sample(range(1, width), 4)))
            for _ in range(self.batch)
        ]
        return [[random.randrange(self.reference.config.vocab_size) for _ in range(n)] for n in lengths]

    def with_truth(self, params: Params, texts: np.ndarray, random: random.Random) -> Params:
        """Add the text that an oracle reads."""
        if not self.has_oracle:
            return params
        right = np.random.default_rng(random.randrange(2**31)).random(texts.shape) < random.choice((0.6, 0.9, 1.0))
        return Params(params.base, {"inner": params.draft, "text": texts, "right": right})


def check_sequence(
    case: Case, found: list[int], prompt: list[int], text: np.ndarray, clear: int, limit: int, when: str = ""
) -> None:
    """Compare the output of a sequence with the reference up to its first tie, ``clear``."""
    start = len(prompt)
    wanted = text[start : min(start + min(limit, case.program.max_new_tokens), len(text))].tolist() if limit > 0 else []
    ends = [at for at, token in enumerate(wanted) if token in case.program.eos_ids]
    wanted = wanted[: ends[0] + 1] if ends else wanted
    if clear < start + len(wanted):
        found, wanted = found[: clear - start], wanted[: clear - start]
    if found != wanted:
        at = next(
            (n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted))
        )
        where = f"{when}a prompt of {start} of {len(text)}, limit {limit}"
        raise Failure(f"{case.description()}: {where}: token {at} of {len(wanted)} differs")


def check_bookkeeping(case: Case, out: DecodeResult, prompts: list[list[int]], limits: np.ndarray) -> None:
    """Check the invariants of `DecodeResult`, which hold for every rule."""
    context = case.reference.config.max_positions
    for row, prompt in enumerate(prompts):
        length, steps = int(out.lengths[row]), int(out.steps[row])
        tokens = out.tokens[row, :length].tolist()
        room = max(min(int(limits[row]), case.program.max_new_tokens, context - len(prompt)), 0)
        ended = bool(tokens) and tokens[-1] in case.program.eos_ids
        whole = length == room or (ended and length < room)
        kept = all(0 <= token < case.reference.config.vocab_size for token in tokens)
        kept &= not any(token in case.program.eos_ids for token in tokens[:-1])
        rest = (out.tokens[row, length:] == -1).all() and (out.accept_lengths[row, steps:] == -1).all()
        sums = (out.accept_lengths[row, :steps] + 1).sum() == length and (out.accept_lengths[row, :steps] >= 0).all()
        if not (whole and kept and rest and sums):
            counts = f"{length} tokens in {steps} steps with room for {room}"
            raise Failure(f"{case.description()}: sequence {row}: inconsistent counts: {counts}")


@fault("drafts", seeds=150)
def drafts(trial: Trial) -> int:
    """Random bases, drafts, trees, rules, prompts, limits and end tokens."""
    return check_case(Case.drawn(trial.random), trial.random, CALLS)


def check_case(
    case: Case,
    random: random.Random,
    calls: int,
    placed: Callable = lambda *given: given,
    make: Callable = make_decode_fn,
) -> int:
    """Decode ``calls`` batches and compare them with the reference. Returns the number of sequences.

    Args:
        placed: Puts parameters and prompts on devices.
        make: Makes the decode function.
    """
    config, case = case.reference.config, case.with_program(logprobs=random.choice((None, None, None, None, 0)))
    decode_fn = make(case.reference.model, case.program, case.request)
    biased = any(isinstance(one, LogitBias) for one in case.request.processors)  # its token ids cannot be traced
    if random.random() < 0.2 and make is make_decode_fn and not biased:
        decode_fn = jax.jit(decode_fn)
    width = random.choice((SMALLEST_BUCKET, config.max_positions, config.max_positions))  # one bucket, one program
    for _ in range(calls):
        params, prompts, requests = case.params(random), case.prompts(random, width), case.requests(random)
        sampling = case.sampling(requests, random)
        texts, clear = case.expected(params, prompts, sampling)
        limits = np.array([random.choice((0, 1, 2, 3, case.program.max_new_tokens, 999)) for _ in prompts], np.int32)
        padded, lengths = right_padded(prompts, width)
        padded[np.arange(width) >= lengths[:, None]] = random.randrange(config.vocab_size)
        given, prompt = placed(case.with_truth(params, texts, random), padded)
        rules, processors = zip(*((request.rule, request.processors) for request in requests), strict=True)
        out = jax.device_get(decode_fn(given, prompt, lengths, sampling.rng, limits, rules, processors))
        check_bookkeeping(case, out, prompts, limits)
        for row, ids in enumerate(out.ids() if case.has_reference else ()):
            check_sequence(case, ids, prompts[row], texts[row], int(clear[row]), int(limits[row]))
    return calls * case.batch
