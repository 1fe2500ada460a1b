"""Decode functions: from the prompt to the last token in one jitted pure function on static shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax import ops
from hydrajax.decoding.decode_loop import run_steps
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.inputs import settled_inputs
from hydrajax.decoding.inside import check_types, frozen
from hydrajax.decoding.logprobs import TopTokens
from hydrajax.decoding.program import Program
from hydrajax.decoding.request import Request, SamplingParams
from hydrajax.decoding.state import DecodeState, OutputState, Params, ParamsCheck
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel
from hydrajax.sharding import mesh_of, on_mesh


class DecodeResult(NamedTuple):
    """The generated tokens of a batch.

    Attributes:
        tokens: int32 ``[B, max_new_tokens]`` generated ids, -1 beyond each sequence's length. EOS, if met, is the last.
        lengths: int32 ``[B]`` generated tokens.
        accept_lengths: int32 ``[B, max_new_tokens]`` draft tokens emitted by each step (root not counted), -1 beyond
            the sequence's steps; ``accept_lengths + 1`` sums to ``lengths``. Tokens cut off by EOS or by the limit do
            not count as accepted.
        steps: int32 ``[B]`` decode steps: base forward passes after the prefill.
        logprobs: float32 ``[B, max_new_tokens]`` natural log-probability of each token in the base's own distribution
            given all tokens before it, without processors, temperature and truncation, for any rule (vLLM's default). 0
            beyond each sequence's length; None if not requested.
        top: The K most likely tokens at each position, most likely first, with their log-probabilities: int32 ``ids``
            and float32 ``logprobs`` ``[B, max_new_tokens, K]``, -1 and 0 beyond each sequence's length; None if not
            requested.
    """

    tokens: Int[Array, "B max_new"]
    lengths: Int[Array, " B"]
    accept_lengths: Int[Array, "B max_new"]
    steps: Int[Array, " B"]
    logprobs: Float[Array, "B max_new"] | None = None
    top: TopTokens | None = None

    def ids(self) -> list[list[int]]:
        """Return each sequence's generated token ids without padding."""
        rows = zip(np.asarray(self.tokens), np.asarray(self.lengths), strict=True)
        return [tokens[:length].tolist() for tokens, length in rows]

    def tokens_per_step(self) -> float:
        """Return the mean number of tokens per step over all sequences (τ in the papers)."""
        return float(jnp.sum(self.lengths) / jnp.maximum(jnp.sum(self.steps), 1))


def result_of(output: OutputState) -> DecodeResult:
    """Cut the loop's buffers to the emitted tokens."""
    max_new = output.accept_lengths.shape[1] - 1
    valid = jnp.arange(max_new) < output.lengths[:, None]
    tokens = jnp.where(valid, output.tokens[:, :max_new], -1)
    result = DecodeResult(tokens, output.lengths, output.accept_lengths[:, :max_new], output.steps)
    if output.logprobs is None:
        return result
    chosen, top = jax.tree.map(lambda x: x[:, :max_new], output.logprobs)
    if top is not None:
        there = valid[:, :, None]
        top = TopTokens(jnp.where(there, top.ids, -1), jnp.where(there, top.logprobs, 0.0))
    return result._replace(logprobs=jnp.where(valid, chosen, 0.0), top=top)


@runtime_checkable
class DecodeFn(Protocol):
    """A function that decodes a batch of prompts, the result of `hydrajax.make_decode_fn`.

    The function is pure, compiles once per (B, bucket) and may be called inside `jax.jit` and JAX's other
    transformations (docs/inside_other_programs.md). A sequence's output does not depend on the rest of the batch. It
    ends at the first EOS id, after ``max_new_tokens``, or when prompt and output fill the context. ``prefill``,
    ``decode_step`` and ``result`` are the same function in parts, for a loop of your own.

    Attributes:
        engine: drives single steps: ``prefill``, ``propose``, ``verify``, ``accept``, ``commit``, ``observe`` and
            ``decode_step``.
        program: the compiled configuration.
        request: the default of the arguments after ``lengths``.
        jitted: the jitted program.
    """

    engine: Engine
    program: Program
    request: Request
    jitted: Callable[..., DecodeResult]

    def __call__(
        self,
        params: Params,
        prompt: Any,
        lengths: Any = None,
        rng: Any = None,
        limits: Any = None,
        rule: Any = None,
        processors: Any = None,
    ) -> DecodeResult:
        """Decode a batch of prompts with one compiled program.

        Args:
            params: `Params(base, draft)`.
            prompt: int32 ``[B, P]``, right-padded. P is padded (`hydrajax.decoding.prompt_batch.bucket`), so prompts of
                similar lengths share a program.
            lengths: int32 ``[B]`` prompt lengths; P by default.
            rng: a `jax.random.key`, or one per sequence ``[B]``; required by rules that sample. A sequence's draws
                depend only on its key; a single key is folded with the sequence's number.
            limits: int32 ``[B]`` maximum number of tokens; by default (and at most) ``max_new_tokens``.
            rule: the program's kind of rule with other parameters, or a list with one per sequence. Other values do not
                recompile, unless one has an effect that had none before.
            processors: replace the request's; one list for all sequences or one list each.

        Returns:
            The result, a `DecodeResult`.

        Raises:
            HydrajaxError: For parameters of another model, draft or dtype, and for an invalid prompt (outside a trace).
        """
        ...

    def prefill(self, params: Params, prompt: Any, lengths: Any = None, *arguments: Any, **named: Any) -> DecodeState:
        """Prefill a batch of prompts, with the arguments of the whole function. Nothing is emitted yet.

        ``output`` of the result (`OutputState`) has the ``tokens``, ``lengths`` and ``done`` of each sequence.
        """
        ...

    def decode_step(self, params: Params, state: DecodeState) -> DecodeState:
        """Emit between 1 and K+1 tokens for every unfinished sequence; other sequences keep their output.

        ``state`` is kept, which copies the KV cache. ``jax.jit(decode_fn.decode_step, donate_argnums=1)`` and JAX's
        loops update it in place.
        """
        ...

    def result(self, state: DecodeState) -> DecodeResult:
        """Return the tokens that were emitted so far."""
        ...


def make_decode_fn(model: BaseModel, program: Program, request: Request | None = None) -> DecodeFn:
    """Build a decode function, ``decode_fn(params, prompt, lengths=None, rng=None, ...)``: see `DecodeFn`.

    Args:
        model: The base model.
        program: What is compiled.
        request: The default of calls without a request; None for `Program.request`.

    Returns:
        The function.

    Raises:
        HydrajaxError: If base, program and request do not fit each other.
    """
    request = request or program.request()
    refuse_grammar(program.grammars or request.grammar)
    program.check(model.config)
    request.check(model.config.vocab_size)
    engine, config = Engine(model, program), model.config
    check = ParamsCheck(model, program.drafter)

    def call(programs, params, settle):
        with jax.enable_x64(False):
            check(params)
            arguments = settle()
            check_types((params, arguments))
            outermost, inner = programs
            called_in_jit = isinstance(jnp.zeros(()), jax.core.Tracer)
            if called_in_jit:
                return inner(params, *arguments)
            with on_mesh(mesh_of(params)):
                return outermost(params, *arguments)

    def of_prompts(programs):
        def decode_fn(params, prompt, lengths=None, rng=None, limits=None, rule=None, processors=None):
            given = program, config, prompt, lengths, rng, limits, rule, processors, request
            return call(programs, params, lambda: settled_inputs(*given))

        return decode_fn

    whole, step = decode_programs(engine), program_pair(engine, engine.decode_step)
    decode_fn = of_prompts(whole)
    decode_fn.prefill = of_prompts(program_pair(engine, engine.prefill))
    decode_fn.decode_step = lambda params, state: call(step, params, lambda: (state,))
    decode_fn.result = lambda state: result_of(state.output)
    for name in ("prefill", "decode_step", "result"):
        getattr(decode_fn, name).__doc__ = getattr(DecodeFn, name).__doc__
    decode_fn.__qualname__, decode_fn.__doc__ = "decode_fn", DecodeFn.__call__.__doc__
    decode_fn.engine, decode_fn.program, decode_fn.request = engine, program, request
    decode_fn.jitted, _ = whole
    return cast(DecodeFn, decode_fn)


def refuse_grammar(grammar: object) -> None:
    """Raise `HydrajaxError` for a grammar, which one program cannot follow: its parser runs on the host."""
    if grammar:
        raise HydrajaxError("grammar: got one, expected none here: use m.generate(..., grammar=...) or SteppedExecutor")


def decode_programs(engine: Engine) -> tuple[Callable[..., DecodeResult], Callable[..., DecodeResult]]:
    """Return `program_pair` of ``decode(params, prompt, lengths, sampling)``."""

    def run(params: Params, prompt, lengths, sampling: SamplingParams) -> DecodeResult:
        return result_of(run_steps(engine, params, engine.prefill(params, prompt, lengths, sampling)).output)

    return program_pair(engine, run)


def program_pair(engine: Engine, run: Callable) -> tuple[Callable, Callable]:
    """Return the jitted ``run(params, ...)``, and the variant to call inside another program; without gradients."""

    def without_gradient(*arguments):
        return run(*frozen(arguments, engine.program.logprobs is not None))

    options = ops.compiler_options()
    outermost = jax.jit(without_gradient, compiler_options=options)
    # JAX takes options of an outermost function only.
    return outermost, jax.jit(without_gradient) if options else outermost
