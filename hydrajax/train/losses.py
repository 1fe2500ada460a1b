"""Training objectives: next token for a base; for draft heads the text, the base's distribution, its hidden states.

All are float32, in nats, over the positions whose *target* counts. Draft head k at position t answers for token
t + 2 + k (the base's own head for t + 1), so in a row of T tokens it has targets up to t = T - 3 - k. Logits exist for
a few positions and one head at a time (`hydrajax.train.chunks`), never as ``[heads, B, T, V]``.

Heads of a reduced vocabulary learn the base's distribution over the tokens that they know. Where the base's best token
(for the text: the token itself) is none of these, nothing is learnt, as in the released EAGLE-3 code, and the means
count a loss of 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.drafter import Trainable
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.packed_forward import chunk_width, into_chunks, row_layout
from hydrajax.train.chunks import sum_over_chunks

IGNORED = -100  # a label that is no target, as in transformers and the released training code


@dataclass(frozen=True)
class Objective:
    """What draft heads minimise: Σ_k λ_k (lm_weight · CE + teacher_weight · teacher CE + reconstruction_weight · L1).

    lm_weight:             cross entropy against the text.
    teacher_weight:        cross entropy against the base's own distribution (hydra 3.1, "teacher loss").
    reconstruction_weight: smooth L1 between the input of a head's lm head and the base's hidden state from which the
                           base predicts the same token (released Hydra code).
    head_decay:            λ_k = head_decay^k; 1 in Hydra (docs/design.md 4), 0.8 in Medusa-1 (medusa 2.2.1) and for
                           the guesses of EAGLE-3, one after the other (its released code).
    noise_alpha:           α of the input noise U(-1, 1) · α / sqrt(length · D), an ablation of hydra (75 there).
    feature_noise:         a of the input noise U(-a, a) · 512 / length, 0.1 in the released EAGLE code.
    chunk_tokens:          positions, over all rows, whose logits of one head exist at once. It changes the memory and
                           nothing else.
    """

    lm_weight: float = 0.0
    teacher_weight: float = 1.0
    reconstruction_weight: float = 0.0
    head_decay: float = 1.0
    noise_alpha: float = 0.0
    feature_noise: float = 0.0
    chunk_tokens: int = 2048

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):  # so that NaN is refused too
                raise HydrajaxError(f"objective.{field.name}: must be at least 0 and finite, found {value}")
        if self.chunk_tokens < 1:
            raise HydrajaxError(f"objective.chunk_tokens: must be at least 1, found {self.chunk_tokens}")
        if not self.lm_weight + self.teacher_weight + self.reconstruction_weight:
            raise HydrajaxError(
                "objective: one of lm_weight, teacher_weight and reconstruction_weight must be positive, found 0, 0, 0"
            )


class HeadCounts(NamedTuple):
    """How many targets each head has, float32 ``[K]``: tokens to predict, and hidden states to reconstruct."""

    tokens: Float[Array, " K"]
    hidden: Float[Array, " K"]


class LanguageLoss(NamedTuple):
    """Sums over all targets, float32: nats, how many targets there are, and with a teacher how like it the base is.

    likeness: ``acceptance``, of a token that the base draws, if the teacher verifies it at temperature 1: the overlap
        Σ min(p, q) (Leviathan et al. 2023, theorem 3.5), and ``agreement``, whether both have the same best token.
    """

    nats: Float[Array, ""]
    n_targets: Float[Array, ""]
    likeness: dict[str, Float[Array, ""]]


class HeadMetrics(NamedTuple):
    """Means over each head's targets, float32 ``[K]``.

    lm and teacher are cross entropies, reconstruction a smooth L1, top1 how often the head's best token is the text's
    and agreement how often it is the base's (a tie for the best counts). What needs something the objective does not
    is NaN: teacher and agreement where ``teacher_weight`` is 0, lm and top1 where ``lm_weight`` is too, reconstruction
    where its weight is 0.
    """

    lm: Float[Array, " K"]
    teacher: Float[Array, " K"]
    reconstruction: Float[Array, " K"]
    top1: Float[Array, " K"]
    agreement: Float[Array, " K"]


def targets(
    labels: Int[Array, "B T"], shift: int | Array, segments: Int[Array, "B T"] | None = None
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """The token ``shift`` places on from each position, and whether there is one that counts.

    With ``segments`` (documents packed in a row, 0 for padding) only one of the position's own segment does.
    """
    ahead = jnp.roll(labels, -shift, axis=1)
    inside = jnp.arange(labels.shape[1]) < labels.shape[1] - shift  # the rest has wrapped around
    counts = inside & (ahead != IGNORED)
    if segments is not None:
        counts &= (segments != 0) & (jnp.roll(segments, -shift, axis=1) == segments)
    return ahead, counts


def language_model_loss(
    model: BaseModel,
    base_params: Any,
    hidden: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
    chunk_tokens: int = 2048,
    *,
    frozen: Mapping[str, Any] | None = None,
    teacher: tuple[BoundBase, Float[Array, "B T Dt"]] | None = None,
    rng: Array | None = None,
) -> LanguageLoss:
    """The base's own next-token loss from its post-norm hidden states.

    Differentiable in ``base_params`` (its lm head) and ``hidden``.

    frozen: the rest of the parameters, where ``base_params`` are only those that learn.
    teacher: another model of the same tokens and its hidden states; KL(teacher ‖ base) at every target then takes the
        place of the text's token.
    rng: of the base's adapter, see `BoundBase`.
    """
    taught_by, taught_from = (None, None) if teacher is None else teacher

    def prepare(shared, index):
        *given, rng = shared
        return *given, None if rng is None else jax.random.fold_in(rng, index)

    def chunk_loss(params, hidden, rows, shared):
        ((tokens, counts), taught_from), (frozen, teacher_params, key) = rows, shared
        logits = BoundBase(model, frozen | params, key).logits(hidden)
        if taught_by is None:
            nats, likeness = jax.nn.logsumexp(logits, axis=-1) - _chosen(logits, tokens, counts), {}
        else:
            teachers = BoundBase(taught_by.model, teacher_params).logits(taught_from)
            log_p, log_q = jax.nn.log_softmax(teachers, axis=-1), jax.nn.log_softmax(logits, axis=-1)
            nats = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
            likeness = {
                "acceptance": jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1),
                "agreement": (jnp.argmax(teachers, axis=-1) == jnp.argmax(logits, axis=-1)).astype(jnp.float32),
            }
        return _where_counted(counts, nats), jax.tree.map(lambda each: _where_counted(counts, each), likeness)

    width, wanted = chunk_width(chunk_tokens, labels.shape), targets(labels, 1, segments)
    chunks = into_chunks(((hidden,), ((wanted, taught_from),)), width)
    shared = dict(frozen or {}), None if taught_by is None else taught_by.params, rng
    total, (likeness,) = sum_over_chunks([chunk_loss], prepare, base_params, *chunks, shared)
    return LanguageLoss(total, jnp.sum(wanted[1], dtype=jnp.float32), likeness)


def _where_counted(counts: Bool[Array, "*rows"], each: Float[Array, "*rows"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(counts, each, 0.0))


def head_counts(labels: Int[Array, "B T"], segments: Int[Array, "B T"] | None, num_draft_heads: int) -> HeadCounts:
    """What the means of `draft_loss` are divided by, at least 1. They depend on the batch alone."""

    def count(shift):
        return jnp.maximum(jnp.sum(targets(labels, shift, segments)[1], dtype=jnp.float32), 1)

    by_shift = jnp.stack([count(shift) for shift in range(1, num_draft_heads + 2)])
    return HeadCounts(tokens=by_shift[1:], hidden=by_shift[:-1])


def draft_loss(
    objective: Objective,
    drafter: Trainable,
    draft_params: Any,
    aux_hidden_states: Float[Array, "B T nD"],
    hidden: Float[Array, "B T D"],
    batch: Mapping[str, Array],
    base: BoundBase,
    rng: Array | None = None,
    counts: HeadCounts | None = None,
) -> tuple[Float[Array, ""], HeadMetrics]:
    """The loss of draft heads on a base, and its parts head by head.

    features: what the drafter reads; hidden: the base's post-norm output, the teacher. No gradient reaches the teacher.
    batch:    ``tokens`` and ``labels`` (`IGNORED` where a token is no target), int32 ``[B, T]``, and, where several
              documents share a row, ``segments`` (0 is padding): no head looks or answers across documents.
    rng:      switches on noise and the drafter's dropout.
    counts:   `head_counts` of a larger batch of which this is a part: the losses, metrics and gradients of all parts
              then add up to the whole batch's, exactly.
    """
    tokens, labels, segments = batch["tokens"], batch["labels"], batch.get("segments")
    num_draft_heads = drafter.spec.num_draft_heads
    if counts is None:
        counts = head_counts(labels, segments, num_draft_heads)
    noise_key, hidden_key, logits_key = (None,) * 3 if rng is None else jax.random.split(rng, 3)
    if (objective.noise_alpha or objective.feature_noise) and noise_key is not None:
        aux_hidden_states = aux_hidden_states + input_noise(noise_key, objective, labels, segments, aux_hidden_states)
    positions, mask = row_layout(tokens, segments)
    hidden = jax.lax.stop_gradient(hidden)
    read = drafter.teacher_hidden(draft_params, aux_hidden_states, tokens, base, hidden_key, positions, mask)
    weights = objective.head_decay ** jnp.arange(num_draft_heads, dtype=jnp.float32)

    loss = jnp.zeros(())
    missing = jnp.full(num_draft_heads, jnp.nan)
    reconstruction = missing
    if objective.reconstruction_weight:
        reconstruction = jnp.stack(
            [_reconstruction(read[k], hidden, labels, segments, k) for k in range(num_draft_heads)]
        )
        reconstruction = reconstruction / counts.hidden
        loss = loss + objective.reconstruction_weight * jnp.sum(weights * reconstruction)

    sums = [None] * 4
    if objective.lm_weight or objective.teacher_weight:
        scale = weights / counts.tokens
        token_loss, sums = _token_losses(
            objective, drafter, draft_params, read, hidden, labels, segments, base, logits_key, scale
        )
        loss = loss + token_loss
    lm, teacher, top1, agreement = (missing if x is None else x / counts.tokens for x in sums)
    return loss, jax.lax.stop_gradient(HeadMetrics(lm, teacher, reconstruction, top1, agreement))


def input_noise(
    rng: Array,
    objective: Objective,
    labels: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None,
    like: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """U(-1, 1) · (``noise_alpha`` / sqrt(length · D) + ``feature_noise`` · 512 / length), shaped as ``like``.

    length: of each position's document; in rows of one document up to the last target, as beyond it nothing is trained.
    """
    steps = 1 + jnp.arange(labels.shape[1])
    if segments is None:
        length = jnp.max(jnp.where(labels != IGNORED, steps, 1), axis=1, keepdims=True)
    else:
        length = jnp.sum(segments[:, :, None] == segments[:, None, :], axis=-1)
    largest = objective.noise_alpha / jnp.sqrt(length * like.shape[-1]) + objective.feature_noise * 512 / length
    noise = jax.random.uniform(rng, like.shape, minval=-1.0, maxval=1.0)
    return (noise * largest[..., None]).astype(like.dtype)


def _reconstruction(read, hidden, labels, segments, k: int) -> Float[Array, ""]:
    """Sum over targets of the smooth L1 distance (mean over features) between head k's and the base's hidden state.

    The base speaks of token t + 2 + k at position t + 1 + k; it counts where the *token there* is a target, as in the
    released code.
    """
    _, counts = targets(labels, k + 1, segments)
    gap = read.astype(jnp.float32) - jnp.roll(hidden, -(k + 1), axis=1).astype(jnp.float32)
    size = jnp.abs(gap)
    smooth = jnp.where(size < 1, 0.5 * gap * gap, size - 0.5)
    return jnp.sum(jnp.where(counts, jnp.mean(smooth, axis=-1), 0.0))


def _chosen(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"], counts) -> Float[Array, "*rows"]:
    """The logit of each target; of token 0 where there is none."""
    return jnp.take_along_axis(logits, jnp.where(counts, tokens, 0)[..., None], axis=-1)[..., 0]


def _sum(values: Array, counts: Bool[Array, "*rows"]) -> Float[Array, ""]:
    return jnp.sum(values, where=counts, dtype=jnp.float32)


class _Shared(NamedTuple):
    """What all heads read at one chunk of positions; ``probs`` and ``best`` are the base's there and K - 1 further.

    V' tokens are those that the heads know. ``best`` is the place among them of the base's best of all tokens, -1 where
    they do not know it.
    """

    rng: Array | None
    scale: Float[Array, " K"]
    base_params: Any
    probs: Float[Array, "B halo V_"] | None
    best: Int[Array, "B halo"] | None


def _token_losses(objective: Objective, drafter, draft_params, read, hidden, labels, segments, base, rng, scale):
    """``(Σ_k scale_k (lm_weight Σ CE + teacher_weight Σ teacher CE), sums of lm, teacher, top1 and agreement [4 K])``.

    One pass over chunks of positions: the base's distribution once, then one head after the other.
    """
    num_draft_heads, vocabulary = len(read), drafter.vocabulary
    width = chunk_width(objective.chunk_tokens, labels.shape)

    def known(tokens):
        """Their places among the tokens that the heads know."""
        return tokens if vocabulary is None else vocabulary.places_of(tokens, base.config.vocab_size)

    def prepare(frozen, index):
        hidden, base_params, rng, scale = frozen
        rng = None if rng is None else jax.random.fold_in(rng, index)
        if not objective.teacher_weight:
            return _Shared(rng, scale, base_params, None, None)
        # Head k at position t has its teacher at t + 1 + k.
        halo = jax.lax.dynamic_slice_in_dim(hidden, index * width + 1, width + num_draft_heads - 1, axis=1)
        logits = BoundBase(base.model, base_params).logits(halo)
        sayable = logits if vocabulary is None else logits[..., vocabulary.tokens]
        best = known(jnp.argmax(logits, axis=-1))
        return _Shared(rng, scale, base_params, jax.nn.softmax(sayable, axis=-1), best)

    def head(k):
        def chunk_loss(params, read, rows, shared: _Shared):
            tokens, counts = rows
            key = None if shared.rng is None else jax.random.fold_in(shared.rng, k)
            logits = drafter.head_logits(params, k, read, BoundBase(base.model, shared.base_params), key)
            log_z, best = jax.nn.logsumexp(logits, axis=-1), jnp.max(logits, axis=-1)
            tokens = known(tokens)
            sayable = counts & (tokens >= 0)
            chosen = _chosen(logits, tokens, sayable)
            lm, teacher, agreement = _sum(log_z - chosen, sayable), None, None
            loss = objective.lm_weight * lm if objective.lm_weight else jnp.zeros(())
            if shared.probs is not None:
                probs, top = (jax.lax.slice_in_dim(x, k, k + width, axis=1) for x in (shared.probs, shared.best))
                taught = counts & (top >= 0)
                teacher = _sum(log_z - jnp.sum(probs * logits, axis=-1), taught)
                loss = loss + objective.teacher_weight * teacher
                agreement = _sum(_chosen(logits, top, taught) == best, taught)
            return shared.scale[k] * loss, [lm, teacher, _sum(chosen == best, sayable), agreement]

        return chunk_loss

    per_head = tuple(targets(labels, k + 2, segments) for k in range(num_draft_heads))
    read, rows = into_chunks((tuple(read), per_head), width)
    padding = len(rows[0][0]) * width + num_draft_heads - labels.shape[1]
    frozen = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))), base.params, rng, scale
    loss, sums = sum_over_chunks([head(k) for k in range(num_draft_heads)], prepare, draft_params, read, rows, frozen)
    return loss, [None if x[0] is None else jnp.stack(x) for x in zip(*sums, strict=True)]
