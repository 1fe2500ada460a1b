"""Training losses: next token for a base; text, base distribution and hidden states for draft heads.

All are float32, in nats, over positions whose *target* counts. Draft head k at position t predicts token t + 2 + k (the
base t + 1), so in a sequence of T tokens it has targets up to t = T - 3 - k. Logits exist for a chunk of positions and
one head at a time (`hydrajax.train.chunks`), never as ``[heads, B, T, V]``.

Heads with a reduced vocabulary learn the base's distribution over its tokens. A position has a loss of 0 if the base's
most likely token (for the text: the token itself) is outside, as in the released EAGLE-3 code.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.settings import one_of
from hydrajax.drafters.trainable import TeacherForced
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.packed_forward import chunk_width, into_chunks, row_layout
from hydrajax.ops.sharded import by_feature, replicate_features
from hydrajax.train.acceptance_losses import LOSSES, POSITION_WEIGHTS, d_pace_weights, teacher_loss
from hydrajax.train.chunks import sum_over_chunks

IGNORED = -100  # label without a target, as in transformers and the released training code


@dataclass(frozen=True)
class Objective:
    """The loss of draft heads: Σ_k λ_k (lm_weight · CE + teacher_weight · teacher CE + reconstruction_weight · L1).

    `hydrajax.train.block_loss` describes the loss of drafts of one pass.

    Attributes:
        lm_weight: of the cross entropy with the text.
        teacher_weight: of ``loss`` between the base's and the draft's distributions (hydra 3.1, "teacher loss").
        loss: ``cross_entropy``, ``tv``, ``lk`` or ``lk_hybrid``, see `hydrajax.train.acceptance_losses.teacher_loss`.
        lk_eta: η of ``lk_hybrid``; 3 in its paper.
        teacher_temperature: the temperature of the base's distribution. Below 1, drafts learn what is accepted in
            greedy decoding and at low temperatures.
        reconstruction_weight: of the smooth L1 distance between the input of a head's lm head and the base's hidden
            state that predicts the same token (released Hydra code).
        distance_weight, confidence_weight: of drafts of one pass (`hydrajax.train.block_loss`).
        head_decay: λ_k = head_decay^k; 1 in Hydra (docs/design.md 4), 0.8 in Medusa-1 (medusa 2.2.1) and for the
            successive guesses of EAGLE-3 (its released code).
        position_weights: ``decay``, λ_k as above, or ``d_pace``, weights from the draft's probabilities of the text's
            tokens (`hydrajax.train.acceptance_losses.d_pace_weights`). Heads then compute their logits twice.
        d_pace_alpha: smoothing of these probabilities; 0.5 in the paper.
        noise_alpha: α of the input noise U(-1, 1) · α / sqrt(length · D), an ablation of hydra (75 there).
        feature_noise: a of the input noise U(-a, a) · 512 / length; 0.1 in the released EAGLE code.
        chunk_tokens: positions of a batch whose logits of one head exist at once. Affects memory only.
    """

    lm_weight: float = 0.0
    teacher_weight: float = 1.0
    loss: str = "cross_entropy"
    lk_eta: float = 3.0
    teacher_temperature: float = 1.0
    reconstruction_weight: float = 0.0
    distance_weight: float = 0.0
    confidence_weight: float = 0.0
    head_decay: float = 1.0
    position_weights: str = "decay"
    d_pace_alpha: float = 0.5
    noise_alpha: float = 0.0
    feature_noise: float = 0.0
    chunk_tokens: int = 2048

    def __post_init__(self):
        one_of("objective.loss", self.loss, LOSSES)
        one_of("objective.position_weights", self.position_weights, POSITION_WEIGHTS)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                continue
            if not 0 <= value < float("inf"):  # refuses NaN too
                raise HydrajaxError(f"objective.{field.name}: got {value}, expected a finite number of at least 0")
        if not self.teacher_temperature:
            raise HydrajaxError("objective.teacher_temperature: got 0, expected a positive number")
        if not 0 < self.d_pace_alpha <= 1:
            raise HydrajaxError(f"objective.d_pace_alpha: got {self.d_pace_alpha}, expected more than 0, at most 1")
        if self.chunk_tokens < 1:
            raise HydrajaxError(f"objective.chunk_tokens: got {self.chunk_tokens}, expected at least 1")
        if not self.lm_weight + self.teacher_weight + self.reconstruction_weight + self.distance_weight:
            raise HydrajaxError(
                "objective: set at least one of lm_weight, teacher_weight, reconstruction_weight and distance_weight"
            )

    @property
    def decay(self) -> float:
        """The base of λ_k: 1 if D-PACE's weights replace them."""
        return self.head_decay if self.position_weights == "decay" else 1.0

    def teacher(self, logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """Return the distribution p that ``loss`` compares with, from the base's logits."""
        sharpened = logits if self.teacher_temperature == 1 else logits / self.teacher_temperature
        return jax.nn.softmax(sharpened, axis=-1)


class HeadCounts(NamedTuple):
    """Targets per head, float32 ``[K]``: tokens to predict, and hidden states to reconstruct."""

    tokens: Float[Array, " K"]
    hidden: Float[Array, " K"]


class LanguageLoss(NamedTuple):
    """Float32 sums over all targets.

    Attributes:
        similarity: with a teacher, ``acceptance``, the probability that it accepts a token of the model at temperature
            1, Σ min(p, q) (Leviathan et al. 2023, theorem 3.5), and ``agreement``, 1 if both argmaxes are equal.
    """

    nats: Float[Array, ""]
    n_targets: Float[Array, ""]
    similarity: dict[str, Float[Array, ""]]


class HeadMetrics(NamedTuple):
    """Means over each head's targets, float32 ``[K]``. Metrics that the objective does not compute are NaN.

    Attributes:
        top1: fraction of targets where the head's best token is the text's (ties count).
        agreement: fraction of targets where the head's best token is the base's.
    """

    lm: Float[Array, " K"]
    teacher: Float[Array, " K"]
    reconstruction: Float[Array, " K"]
    top1: Float[Array, " K"]
    agreement: Float[Array, " K"]


def targets(
    labels: Int[Array, "B T"], shift: int | Array, segments: Int[Array, "B T"] | None = None
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Return the token ``shift`` positions after each position, and a mask of those that are targets.

    With ``segments`` (packed documents, 0 for padding), a target is in the position's own segment.
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
    """Compute a model's next-token loss from its post-norm hidden states.

    Differentiable in ``base_params`` (its lm head) and ``hidden``.

    Args:
        frozen: the model's other parameters, if ``base_params`` are not all.
        teacher: a model with the same vocabulary and its hidden states. The loss is then KL(teacher ‖ model).
        rng: for the model's adapter, see `BoundBase`.
    """
    teacher_base, teacher_hidden = (None, None) if teacher is None else teacher

    def prepare(shared, index):
        *given, rng = shared
        return *given, None if rng is None else jax.random.fold_in(rng, index)

    def chunk_loss(params, hidden, rows, shared):
        ((tokens, counts), teacher_hidden), (frozen, teacher_params, key) = rows, shared
        logits = BoundBase(model, frozen | params, key).logits(hidden)
        if teacher_base is None:
            nats, similarity = jax.nn.logsumexp(logits, axis=-1) - _chosen(logits, tokens, counts), {}
        else:
            teachers = BoundBase(teacher_base.model, teacher_params).logits(teacher_hidden)
            log_p, log_q = jax.nn.log_softmax(teachers, axis=-1), jax.nn.log_softmax(logits, axis=-1)
            nats = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
            similarity = {
                "acceptance": jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1),
                "agreement": (jnp.argmax(teachers, axis=-1) == jnp.argmax(logits, axis=-1)).astype(jnp.float32),
            }
        return _sum(nats, counts), jax.tree.map(lambda each: _sum(each, counts), similarity)

    width, wanted = chunk_width(chunk_tokens, labels.shape), targets(labels, 1, segments)
    chunks = into_chunks(((hidden,), ((wanted, teacher_hidden),)), width)
    shared = dict(frozen or {}), None if teacher_base is None else teacher_base.params, rng
    total, (similarity,) = sum_over_chunks([chunk_loss], prepare, base_params, *chunks, shared)
    return LanguageLoss(total, jnp.sum(wanted[1], dtype=jnp.float32), similarity)


def head_counts(labels: Int[Array, "B T"], segments: Int[Array, "B T"] | None, num_draft_heads: int) -> HeadCounts:
    """Return the divisors of the means in `draft_loss`, at least 1."""

    def count(shift):
        return jnp.maximum(jnp.sum(targets(labels, shift, segments)[1], dtype=jnp.float32), 1)

    by_shift = jnp.stack([count(shift) for shift in range(1, num_draft_heads + 2)])
    return HeadCounts(tokens=by_shift[1:], hidden=by_shift[:-1])


def draft_loss(
    objective: Objective,
    drafter: TeacherForced,
    draft_params: Any,
    aux_hidden_states: Float[Array, "B T nD"],
    hidden: Float[Array, "B T D"],
    batch: Mapping[str, Array],
    base: BoundBase,
    rng: Array | None = None,
    counts: HeadCounts | None = None,
) -> tuple[Float[Array, ""], HeadMetrics]:
    """Compute the loss of draft heads on a base by teacher forcing, and its metrics per head.

    Args:
        aux_hidden_states: what the drafter reads.
        hidden: the base's post-norm hidden states, the teacher. They get no gradient.
        batch: int32 ``[B, T]`` ``tokens``, ``labels`` (or `IGNORED`) and, if packed, ``segments`` (0 for padding).
            Attention and targets stay within a document. ``best``, the base's most likely token after each position, is
            computed if it is missing.
        base: embeddings and lm head for the drafter.
        rng: for noise and the drafter's dropout. None: without these.
        counts: `head_counts` of the whole batch if this is a micro-batch. Losses, metrics and gradients of all
            micro-batches then add up to the batch's.
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
    weights = objective.decay ** jnp.arange(num_draft_heads, dtype=jnp.float32)

    loss = jnp.zeros(())
    missing = jnp.full(num_draft_heads, jnp.nan)
    reconstruction = missing
    if objective.reconstruction_weight:
        gaps = [_reconstruction(read[k], hidden, labels, segments, k) for k in range(num_draft_heads)]
        reconstruction = jnp.stack(gaps) / counts.hidden
        loss = loss + objective.reconstruction_weight * jnp.sum(weights * reconstruction)

    sums = [None] * 4
    if objective.lm_weight or objective.teacher_weight:
        scale = weights / counts.tokens
        token_loss, sums = _token_losses(
            objective, drafter, draft_params, read, hidden, batch.get("best"), labels, segments, base, logits_key, scale
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
    """Return U(-1, 1) · (``noise_alpha`` / sqrt(length · D) + ``feature_noise`` · 512 / length), shaped as ``like``.

    ``length`` is that of a position's document; without packing, up to its last target.
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

    The base predicts token t + 2 + k at position t + 1 + k. A position counts if the token at t + 1 + k is a target,
    as in the released code.
    """
    _, counts = targets(labels, k + 1, segments)
    gap = read.astype(jnp.float32) - jnp.roll(hidden, -(k + 1), axis=1).astype(jnp.float32)
    size = jnp.abs(gap)
    smooth = jnp.where(size < 1, 0.5 * gap * gap, size - 0.5)
    return _sum(jnp.mean(smooth, axis=-1), counts)


def _chosen(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"], counts) -> Float[Array, "*rows"]:
    """The logit of each target, and of token 0 where there is no target."""
    return jnp.take_along_axis(logits, jnp.where(counts, tokens, 0)[..., None], axis=-1)[..., 0]


def _sum(values: Array, counts: Bool[Array, "*rows"]) -> Float[Array, ""]:
    return jnp.sum(values, where=counts, dtype=jnp.float32)


class _Shared(NamedTuple):
    """Inputs of all heads for one chunk of positions.

    ``probs`` (over the draft vocabulary V') and ``best`` are the base's, at the chunk and K - 1 further positions.
    ``best`` is the index in V' of the base's most likely token of all, -1 if it is not in V'. ``weights`` are those of
    D-PACE, of all heads.
    """

    rng: Array | None
    scale: Float[Array, " K"]
    base_params: Any
    probs: Float[Array, "B halo V_"] | None
    best: Int[Array, "B halo"] | None
    weights: Float[Array, "B width K"] | None


def _token_losses(objective: Objective, drafter, draft_params, read, hidden, best, labels, segments, base, rng, scale):
    """``(Σ_k scale_k (lm_weight Σ CE + teacher_weight Σ teacher CE), sums of lm, teacher, top1 and agreement [4 K])``.

    Each chunk computes the base's distribution once, then one head after the other.
    """
    num_draft_heads, vocabulary = len(read), drafter.vocabulary
    width = chunk_width(objective.chunk_tokens, labels.shape)

    def in_vocabulary(tokens):
        """The indices of tokens in the draft vocabulary, -1 for others."""
        return tokens if vocabulary is None else vocabulary.places_of(tokens, base.config.vocab_size)

    def logits_of(params, k, read, base_params, rng):
        key = None if rng is None else jax.random.fold_in(rng, k)
        return drafter.head_logits(params, k, read, BoundBase(base.model, base_params), key)

    def of_text(logits, tokens, counts):
        """The logits of the text's tokens, those of all tokens together, and which targets are in the vocabulary."""
        tokens = in_vocabulary(tokens)
        counts = counts & (tokens >= 0)
        return _chosen(logits, tokens, counts), jax.nn.logsumexp(logits, axis=-1), counts

    def position_weights(heads, base_params, rng):
        """D-PACE's weights of a chunk from the parameters and the chunk's rows of all heads."""
        params, read, rows = heads
        found = [of_text(logits_of(params, k, read[k], base_params, rng), *rows[k]) for k in range(num_draft_heads)]
        chosen, log_z, counts = (jnp.stack(x, axis=-1) for x in zip(*found, strict=True))
        return d_pace_weights(jnp.exp(chosen - log_z), counts, objective.d_pace_alpha)

    def prepare(frozen, index):
        hidden, best, base_params, rng, scale, heads = frozen
        rng = None if rng is None else jax.random.fold_in(rng, index)
        weights = None
        if heads is not None:
            params, *chunks = heads
            chunk = jax.tree.map(lambda x: x[index], chunks)
            weights = position_weights((params, *chunk), base_params, rng)
        if not objective.teacher_weight:
            return _Shared(rng, scale, base_params, None, None, weights)
        # Head k at position t has its teacher at t + 1 + k.
        halo = replicate_features(
            jax.lax.dynamic_slice_in_dim(hidden, index * width + 1, width + num_draft_heads - 1, axis=1)
        )
        bound = BoundBase(base.model, base_params)
        if best is not None and vocabulary is not None:  # the matmul has V' outputs instead of V
            draftable = bound.logits(halo, vocabulary.tokens)
            halo_best = jax.lax.dynamic_slice_in_dim(best, index * width + 1, width + num_draft_heads - 1, axis=1)
        else:
            logits = bound.logits(halo)
            draftable = logits if vocabulary is None else logits[..., vocabulary.tokens]
            halo_best = jnp.argmax(logits, axis=-1)
        return _Shared(rng, scale, base_params, objective.teacher(draftable), in_vocabulary(halo_best), weights)

    def head(k):
        def chunk_loss(params, read, rows, shared: _Shared):
            tokens, counts = rows
            logits = logits_of(params, k, read, shared.base_params, shared.rng)
            best = jnp.max(logits, axis=-1)
            chosen, log_z, lm_counts = of_text(logits, tokens, counts)
            weight = 1.0 if shared.weights is None else shared.weights[..., k]
            nats, teacher, agreement = log_z - chosen, None, None
            lm = _sum(nats, lm_counts)
            loss = objective.lm_weight * _sum(weight * nats, lm_counts) if objective.lm_weight else jnp.zeros(())
            if shared.probs is not None:
                probs, top = (jax.lax.slice_in_dim(x, k, k + width, axis=1) for x in (shared.probs, shared.best))
                taught = counts & (top >= 0)
                if objective.loss == "cross_entropy":  # without an array of log-probabilities
                    nats = log_z - jnp.sum(probs * logits, axis=-1)
                else:
                    nats = teacher_loss(objective.loss, objective.lk_eta, logits - log_z[..., None], probs)
                teacher = _sum(nats, taught)
                loss = loss + objective.teacher_weight * _sum(weight * nats, taught)
                agreement = _sum(_chosen(logits, top, taught) == best, taught)
            return shared.scale[k] * loss, [lm, teacher, _sum(chosen == best, lm_counts), agreement]

        return chunk_loss

    per_head = tuple(targets(labels, k + 2, segments) for k in range(num_draft_heads))
    read, rows = into_chunks((tuple(read), per_head), width)
    padding = len(rows[0][0]) * width + num_draft_heads - labels.shape[1]
    hidden = jnp.pad(by_feature(hidden), ((0, 0), (0, padding), (0, 0)))
    best = None if best is None else jnp.pad(best, ((0, 0), (0, padding)))
    heads = (draft_params, read, rows) if objective.position_weights == "d_pace" else None
    frozen = hidden, best, base.params, rng, scale, heads
    loss, sums = sum_over_chunks([head(k) for k in range(num_draft_heads)], prepare, draft_params, read, rows, frozen)
    return loss, [None if x[0] is None else jnp.stack(x) for x in zip(*sums, strict=True)]
