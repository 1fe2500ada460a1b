"""Attacks on decoding with a draft, in this process: every kind in the registry must say what the base says alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attacks.bases import Alone, noise, random_config, random_tree
from attacks.registry import Fell, Place, attack
from attacks.told import told

from hydrajax.decoding.acceptance import ExactSampling, Greedy, Typical
from hydrajax.decoding.decode import DecodeResult, make_decode_fn
from hydrajax.decoding.processors import LogitBias, Penalties
from hydrajax.decoding.prompt_batch import SMALLEST_BUCKET, right_padded
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.spec import DecodeSpec, SamplingParams, sampling_params
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import KINDS, LookupAndDraft, without_weights
from hydrajax.models.base_model import BoundBase

CALLS = 12  # of what was compiled for a seed, each with other parameters, prompts, limits and numbers
DRAFTS = [*KINDS, *(f"lookup+{name}" for name, kind in KINDS.items() if not kind.about)]


def drafter_of(name: str, alone: Alone, random: random.Random) -> Drafter:
    """A drafter by its name in `DRAFTS`, with numbers of its own where a name can have some."""
    kind = KINDS[name.removeprefix("lookup+")]
    if kind.numbers and random.random() < 0.7:
        kind = without_weights("-".join([name, *(str(random.randint(2, 4)) for _ in kind.numbers)]))
    drafter = kind.build(alone.config, jnp.float32)
    return LookupAndDraft(name, random.randint(1, 6)).wrap(drafter) if name.startswith("lookup+") else drafter


def rules_of(random: random.Random, vocab_size: int, draws: bool, batch: int) -> list[dict]:
    """Rule and processors of each row of a batch: of one kind, with the same numbers given."""
    kind = random.choice(("greedy", "greedy", "greedy", "exact", "exact", "exact", "typical", "rejection"))
    cuts = random.choice(((), ("top_k",), ("top_p", "min_p")))
    penalised, biased = random.random() < 0.2, random.random() < 0.1

    def one():
        numbers = {"top_k": random.randint(1, 9), "top_p": random.uniform(0.05, 0.999), "min_p": random.random() * 0.5}
        sampling = {"temperature": random.choice((0.02, 0.7, 1.0, 3.0)), **{name: numbers[name] for name in cuts}}
        rule, processors = Greedy(), []
        if kind == "exact":
            rule = ExactSampling(**sampling)
        if kind == "rejection" and draws:
            rule = RejectionSampling(**sampling)
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
    """What is compiled for a seed."""

    alone: Alone
    name: str
    spec: DecodeSpec
    batch: int

    @classmethod
    def drawn(cls, random: random.Random, name: str | None = None) -> Case:
        alone = Alone(random_config(random))
        name = name or random.choice(DRAFTS)
        drafter, config = drafter_of(name, alone, random), alone.config
        tree = random_tree(random, drafter.spec.depth, config.vocab_size, drafter.spec.supports_dynamic_tree)
        batch = random.choice((1, 3, 4, 6))
        (row,) = rules_of(random, config.vocab_size, drafter.spec.supports_sampling, 1)
        try:
            row["rule"].check(tree)
        except HydrajaxError:
            row["rule"] = Greedy()
        many = random.sample(range(config.vocab_size), random.choice((0, 0, 1, config.vocab_size // 3)))
        most = random.choice((1, 2, 7, config.max_positions, config.max_positions + 9))
        drafter = told(drafter) if random.random() < 0.5 else drafter
        return cls(alone, name, DecodeSpec(drafter, tree, **row, max_new_tokens=most, eos_ids=many), batch)

    def with_spec(self, **changes) -> Case:
        return self._replace(spec=self.spec.replace(**changes))

    def said(self) -> str:
        tree = getattr(self.spec.tree, "name", None) or [list(path) for path in self.spec.tree.choices]
        name = f"{self.name} told" if self.is_told else self.name
        return f"{name}, {self.spec.shown_rule()}, tree {tree}, batch {self.batch}"

    @property
    def is_told(self) -> bool:
        return type(self.spec.drafter).__name__ == "Told"

    @property
    def has_reference(self) -> bool:
        """Whether the rule gives what the base alone would: the others follow what was drafted."""
        return isinstance(self.spec.rule, (Greedy, ExactSampling))

    def rows(self, random: random.Random) -> list[DecodeSpec]:
        """The spec with other numbers of rule and processors in every row."""
        vocab_size, draws = self.alone.config.vocab_size, self.spec.drafter.spec.supports_sampling

        def kind(spec: DecodeSpec):
            return jax.tree.structure(spec.rule), [type(one) for one in spec.processors]

        while True:
            found = [self.spec.replace(**row) for row in rules_of(random, vocab_size, draws, self.batch)]
            if kind(found[0]) == kind(self.spec):
                return found

    def sampling(self, specs: list[DecodeSpec], random: random.Random) -> SamplingParams:
        """These numbers, each row with a key of its own."""
        keys = jax.random.split(jax.random.key(random.randrange(2**31)), self.batch)
        return sampling_params(specs, keys, self.alone.config.vocab_size)

    def continued(self, params: Params, texts: list[list[int]], sampling: SamplingParams):
        """`Alone.continued`; greedily where the rule has no reference, for a drafter that is told some of a text."""
        if not self.has_reference:
            sampling = sampling._replace(rule=Greedy(), processors=())
        return self.alone.continued(params.base, texts, sampling)

    def params(self, random: random.Random) -> Params:
        """The base's and the drafter's own, without what one is told."""
        seed = random.randrange(2**31)
        base = noise(self.alone.shapes, seed)
        own = jax.eval_shape(
            lambda base: self.spec.drafter.init(jax.random.key(0), BoundBase(self.alone.model, base)), base
        )
        draft = noise(own["inner"] if self.is_told else own, seed + 1)
        if jax.tree.structure(draft) == jax.tree.structure(base) and random.random() < 0.5:
            draft = base  # a draft model that is its base is right in everything
        return Params(base, draft)

    def prompts(self, random: random.Random, widest: int) -> list[list[int]]:
        """As long as nobody would choose: one token, all that there is room for, one or two less."""
        lengths = [
            random.choice((1, 2, widest - 2, widest - 1, widest, *random.sample(range(1, widest), 4)))
            for _ in range(self.batch)
        ]
        return [[random.randrange(self.alone.config.vocab_size) for _ in range(n)] for n in lengths]

    def helped(self, params: Params, texts: np.ndarray, random: random.Random) -> Params:
        """With the truth, for a drafter that is told it."""
        if not self.is_told:
            return params
        right = np.random.default_rng(random.randrange(2**31)).random(texts.shape) < random.choice((0.6, 0.9, 1.0))
        return Params(params.base, {"inner": params.draft, "text": texts, "right": right})


def check_row(
    case: Case, found: list[int], prompt: list[int], text: np.ndarray, clear: int, limit: int, when: str = ""
) -> None:
    """What a row emitted against what the base says alone; beyond ``clear`` that is a draw of rounding."""
    start = len(prompt)
    wanted = text[start : min(start + min(limit, case.spec.max_new_tokens), len(text))].tolist() if limit > 0 else []
    ends = [place for place, token in enumerate(wanted) if token in case.spec.eos_ids]
    wanted = wanted[: ends[0] + 1] if ends else wanted
    if clear < start + len(wanted):
        found, wanted = found[: clear - start], wanted[: clear - start]
    if found != wanted:
        at = next(
            (n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted))
        )
        where = f"{when}a prompt of {start} of {len(text)}, limit {limit}"
        raise Fell(f"{case.said()}: {where}: token {at} of {len(wanted)} is another")


def check_bookkeeping(case: Case, out: DecodeResult, prompts: list[list[int]], limits: np.ndarray) -> None:
    """What holds for every rule: see `DecodeResult`."""
    context = case.alone.config.max_positions
    for row, prompt in enumerate(prompts):
        length, steps = int(out.lengths[row]), int(out.steps[row])
        tokens = out.tokens[row, :length].tolist()
        room = max(min(int(limits[row]), case.spec.max_new_tokens, context - len(prompt)), 0)
        ended = bool(tokens) and tokens[-1] in case.spec.eos_ids
        whole = length == room or (ended and length < room)
        kept = all(0 <= token < case.alone.config.vocab_size for token in tokens)
        kept &= not any(token in case.spec.eos_ids for token in tokens[:-1])
        rest = (out.tokens[row, length:] == -1).all() and (out.accept_lengths[row, steps:] == -1).all()
        sums = (out.accept_lengths[row, :steps] + 1).sum() == length and (out.accept_lengths[row, :steps] >= 0).all()
        if not (whole and kept and rest and sums):
            raise Fell(
                f"{case.said()}: row {row} of {length} tokens in {steps} steps with room for {room} contradicts itself"
            )


@attack("drafted decoding", count=150)
def drafted(place: Place) -> int:
    """Random bases, trees, rules, prompts, limits and ends, with every kind of draft."""
    return tried(Case.drawn(place.random), place.random, CALLS)


def tried(
    case: Case,
    random: random.Random,
    calls: int,
    placed: Callable = lambda *given: given,
    make: Callable = make_decode_fn,
) -> int:
    """Decode so many batches; how many rows that were.

    placed: puts parameters and prompts onto devices. make: makes the decode function.
    """
    config, case = case.alone.config, case.with_spec(logprobs=random.choice((None, None, None, None, 0)))
    decode_fn = make(case.alone.model, case.spec)
    biased = any(isinstance(one, LogitBias) for one in case.spec.processors)  # whose token ids cannot be traced
    if random.random() < 0.2 and make is make_decode_fn and not biased:
        decode_fn = jax.jit(decode_fn)
    widest = random.choice((SMALLEST_BUCKET, config.max_positions, config.max_positions))  # one bucket, one program
    for _ in range(calls):
        params, prompts, specs = case.params(random), case.prompts(random, widest), case.rows(random)
        sampling = case.sampling(specs, random)
        texts, clear = case.continued(params, prompts, sampling)
        limits = np.array([random.choice((0, 1, 2, 3, case.spec.max_new_tokens, 999)) for _ in prompts], np.int32)
        padded, lengths = right_padded(prompts, widest)
        padded[np.arange(widest) >= lengths[:, None]] = random.randrange(config.vocab_size)
        given, prompt = placed(case.helped(params, texts, random), padded)
        rules, processors = [spec.rule for spec in specs], [spec.processors for spec in specs]
        out = jax.device_get(decode_fn(given, prompt, lengths, sampling.rng, limits, rules, processors))
        check_bookkeeping(case, out, prompts, limits)
        for row, ids in enumerate(out.ids() if case.has_reference else ()):
            check_row(case, ids, prompts[row], texts[row], int(clear[row]), int(limits[row]))
    return calls * case.batch
