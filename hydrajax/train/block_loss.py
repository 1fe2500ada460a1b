"""Training losses of drafts of one pass: blocks at random anchors of each text.

Guess g of a block whose anchor is at position p predicts token p + 1 + g, whichever slot makes it. It has a target if
that token is one (`hydrajax.train.losses.IGNORED`) of the anchor's document. DeepSpec ends a block at the first token
without a target; SpecForge's loss of DFlash skips it.

A guess has the weight ``head_decay ** g``, e^(-g / γ) in the papers, with γ = 4 for blocks of 8 and 7 for blocks of 16,
or D-PACE's (`Objective.position_weights`). The loss is the weighted mean over all guesses, with D-PACE the weighted sum
over their number, in float32, of

- ``lm_weight`` · the cross entropy with the text (DFlash 3.3),
- ``teacher_weight`` · the cross entropy with the base's distribution, or another ``loss`` of
  `hydrajax.train.acceptance_losses`,
- ``distance_weight`` · Σ_v |q(v) - p(v)|, the distance of the draft's and the base's distributions (DSpark), and
- ``confidence_weight`` · the binary cross entropy of the confidence head with the acceptance rate 1 - Σ_v |q - p| / 2.

A draft can leave out guesses of some blocks (`hydrajax.drafters.block.BlockDrafter.guesses`). These blocks are random,
as the anchors come in the order of drawing.

With a reduced vocabulary, p is the base's distribution over it, as in speculators. The acceptance rate is then too high
by up to the probability of the other tokens.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.block import BlockDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import chunk_width, into_chunks
from hydrajax.train.acceptance_losses import d_pace_weights, teacher_loss
from hydrajax.train.chunks import sum_over_chunks
from hydrajax.train.losses import IGNORED, Objective

EPSILON = 1e-6  # DeepSpec's, in every mean


class Anchors(NamedTuple):
    """The blocks of a batch: int32 ``[B, A]`` positions of the anchors, and which of them are real."""

    positions: Int[Array, "B A"]
    keep: Bool[Array, "B A"]


def check_objective(objective: Objective, drafter: BlockDrafter) -> None:
    """Raise `HydrajaxError` for terms that these drafts do not have."""
    for name in ("reconstruction_weight", "noise_alpha", "feature_noise"):
        if getattr(objective, name):
            raise HydrajaxError(
                f"objective.{name}: got {getattr(objective, name)}, expected 0 for {type(drafter).__name__}"
            )
    if objective.position_weights == "d_pace" and drafter.guesses(1).shape != (1, drafter.depth):
        raise HydrajaxError("objective.position_weights: got d_pace, expected decay for drafts that leave out guesses")
    if objective.confidence_weight and drafter.confidence_head is None:
        raise HydrajaxError(
            f"objective.confidence_weight: got {objective.confidence_weight}, expected 0: the draft has no confidence "
            "head"
        )


def draw_anchors(rng: Array, labels: Int[Array, "B T"], segments: Int[Array, "B T"] | None, n_blocks: int) -> Anchors:
    """Draw anchors without replacement among the targets that are followed by a target (DeepSpec).

    Text of the same document comes before an anchor. They are in the order of drawing; those that are not real come
    last.
    """
    counts = labels != IGNORED
    may = (counts[:, :-1] & counts[:, 1:]).at[:, 0].set(False)
    if segments is not None:
        same = segments[:, :-1] == segments[:, 1:]
        may &= same & (segments[:, :-1] != 0)
        may = may.at[:, 1:].set(may[:, 1:] & same[:, :-1])
    n_drawn = min(n_blocks, may.shape[1])
    order = jnp.where(may, jax.random.uniform(rng, may.shape), -1.0)
    drawn, places = jax.lax.top_k(order, n_drawn)
    return Anchors(jnp.where(drawn >= 0, places, labels.shape[1] - 1), drawn >= 0)


class BlockTargets(NamedTuple):
    """Targets of the guesses that are computed (`hydrajax.drafters.block.BlockDrafter.guesses`).

    Attributes:
        before: int32 ``[B, N, k]`` the token before each guess, in whole blocks the anchor first.
        tokens: int32 ``[B, N, k]`` the token to predict.
        weights: float32 ``[B, N, k]`` the guess's weight; 0 without a target.
        places_before: int32 ``[B, N, k]`` positions of ``before``, where the base predicts ``tokens``.
        numbers: int32 ``[B, N, k]`` g, the number of the guess in its block.
    """

    before: Int[Array, "B N k"]
    tokens: Int[Array, "B N k"]
    weights: Float[Array, "B N k"]
    places_before: Int[Array, "B N k"]
    numbers: Int[Array, "B N k"]

    def by_number(self, values: Float[Array, "B N k"], depth: int) -> Float[Array, " K"]:
        """Return the sums of values over the targets of each guess."""
        counted = (self.weights > 0)[..., None] & (self.numbers[..., None] == jnp.arange(depth))
        return jnp.sum(values[..., None], axis=(0, 1, 2), where=counted, dtype=jnp.float32)


def block_targets(batch: Mapping[str, Array], anchors: Anchors, drafter: BlockDrafter, decay: float) -> BlockTargets:
    """Return the targets and their weights; see the module."""
    tokens, labels, segments = batch["tokens"], batch["labels"], batch.get("segments")
    guesses, length = drafter.guesses(anchors.positions.shape[1]), tokens.shape[1]
    block, number = np.divmod(np.maximum(guesses, 0), drafter.depth)
    roots = anchors.positions[:, block]
    before, places = (jnp.minimum(roots + number + ahead, length - 1) for ahead in (0, 1))

    def at(places, values):
        return jnp.take_along_axis(values[:, None], places, axis=2)

    counts = (roots + number + 1 < length) & (at(places, labels) != IGNORED) & anchors.keep[:, block] & (guesses >= 0)
    if segments is not None:
        counts &= at(places, segments) == at(roots, segments)
    if drafter.ends_at_gaps:
        counts = jnp.cumprod(counts, axis=2, dtype=jnp.int32) > 0
    wanted = at(places, tokens)
    if drafter.vocabulary is not None:
        counts &= drafter.vocabulary.places_of(wanted, drafter.config.vocab_size) >= 0
    weights = jnp.where(counts, np.float32(decay) ** number.astype(np.float32), 0.0)
    return BlockTargets(at(before, tokens), wanted, weights, before, jnp.broadcast_to(number, before.shape))


class BlockTotals(NamedTuple):
    """Divisors of the batch's means: the sum of all weights, and the number of targets of each guess, at least 1."""

    weights: Float[Array, ""]
    targets: Float[Array, " K"]


def block_totals(targets: BlockTargets, depth: int) -> BlockTotals:
    counts = targets.by_number(jnp.ones(targets.weights.shape), depth)
    return BlockTotals(jnp.sum(targets.weights) + EPSILON, jnp.maximum(counts, 1))


def block_loss(
    objective: Objective,
    drafter: BlockDrafter,
    draft_params: Any,
    aux_hidden_states: Float[Array, "B T nD"],
    hidden: Float[Array, "B T D"],
    batch: Mapping[str, Array],
    anchors: Anchors,
    base: BoundBase,
    totals: BlockTotals | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, " K"]]]:
    """Compute the loss of a draft of one pass by teacher forcing, and its means per guess.

    Logits exist for a chunk of guesses at a time.

    Args:
        hidden: The base's post-norm hidden states, the teacher.
        batch: int32 ``[B, T]`` ``tokens``, ``labels`` and, if packed, ``segments``.
        totals: `block_totals` of the whole batch if this is a micro-batch.
    """
    targets = block_targets(batch, anchors, drafter, objective.decay)
    totals = block_totals(targets, drafter.depth) if totals is None else totals
    text = drafter.read(draft_params, aux_hidden_states, batch["tokens"], batch.get("segments"), base)
    teaches = bool(objective.teacher_weight or objective.distance_weight or objective.confidence_weight)
    vocabulary, n_rows = drafter.vocabulary, len(anchors.positions)
    known = None if vocabulary is None else vocabulary.tokens

    def chunk_loss(params, read, rows, shared):
        (targets, teacher), (base_params, scale) = rows, shared
        bound, weights = BoundBase(base.model, base_params), targets.weights
        logits = drafter.block_logits(params, read, targets.before, bound)
        log_q = jax.nn.log_softmax(logits, axis=-1)
        index = targets.tokens
        if vocabulary is not None:
            index = jnp.maximum(vocabulary.places_of(index, base.config.vocab_size), 0)
        lm = -jnp.take_along_axis(log_q, index[..., None], axis=-1)[..., 0]
        sums = {"lm": lm, "top1": jnp.argmax(logits, axis=-1) == index}
        nats = objective.lm_weight * lm
        if objective.position_weights == "d_pace":
            weights = d_pace_weights(jnp.exp(-lm), weights > 0, objective.d_pace_alpha)
        if teaches:
            p = objective.teacher(bound.logits(teacher, known))
            distance = jnp.sum(jnp.abs(jnp.exp(log_q) - p), axis=-1)
            sums |= {"acceptance": 1 - distance / 2}
            nats = nats + objective.distance_weight * distance
            if objective.teacher_weight:
                sums["teacher"] = teacher_loss(objective.loss, objective.lk_eta, log_q, p)
                nats = nats + objective.teacher_weight * sums["teacher"]
            if objective.confidence_weight:
                rate = jax.lax.stop_gradient(jnp.clip(1 - distance / 2, 0, 1))
                logit = drafter.confidence_logits(params, read, targets.before)
                sums["confidence"] = jax.nn.softplus(logit) - rate * logit
                nats = nats + objective.confidence_weight * sums["confidence"]
        totals = {name: targets.by_number(x, drafter.depth) for name, x in sums.items()}
        return scale * jnp.sum(weights * nats), totals

    teacher = None
    if teaches:
        index = targets.places_before.reshape(n_rows, -1, 1)
        teacher = jnp.take_along_axis(jax.lax.stop_gradient(hidden), index, axis=1)
        teacher = teacher.reshape(*targets.places_before.shape, -1)
    shared = base.params, 1 / totals.weights
    read = drafter.hidden_of_guesses(draft_params, text, anchors.positions, base)
    width = chunk_width(objective.chunk_tokens // read.shape[2], read.shape[:2])
    read, rows = into_chunks((read, (targets, teacher)), width)
    loss, (sums,) = sum_over_chunks([chunk_loss], lambda shared, index: shared, draft_params, [read], [rows], shared)
    return loss, jax.lax.stop_gradient({name: x / totals.targets for name, x in sums.items()})
