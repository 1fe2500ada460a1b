"""The task ``heads``: train draft heads on a frozen base."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Int

from hydrajax.bench.trees.simulation import accepted_lengths, runs, walk
from hydrajax.drafters.block import BlockDrafter
from hydrajax.drafters.trainable import TeacherForced, Trainable, abstract_draft
from hydrajax.drafters.trained import TrainedStack
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.formats import draft_registry
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.formats.export import export_heads
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.hub import resolve
from hydrajax.formats.load import load_draft, load_own_heads
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.init import abstract_base
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import run_base
from hydrajax.sharding import distribute, jit_on, replicated, tree_shardings
from hydrajax.train.block_loss import Anchors, block_loss, block_targets, block_totals, check_objective, draw_anchors
from hydrajax.train.data.dataset import Dataset
from hydrajax.train.flops import drafter_forward_flops, forward_flops
from hydrajax.train.losses import IGNORED, HeadMetrics, Objective, draft_loss, head_counts
from hydrajax.train.run_config import DraftConfig, TrainConfig
from hydrajax.train.train_step import Batch, Loss, batch_placer
from hydrajax.trees import TreeTopology, presets
from hydrajax.trees.dynamic import static

TOP_K = 5  # head accuracies are reported for the first 1 to TOP_K guesses


def make_drafter(
    draft: DraftConfig, base: LlamaConfig, dtype, target_counts: Int[np.ndarray, " V"] | None = None
) -> Trainable:
    """Return the drafter with these settings; see `hydrajax.drafters.trainable.Trainable.for_base`."""
    return draft_registry.heads(draft.heads).for_base(base, dtype, draft.settings, target_counts)


@dataclass(frozen=True)
class HeadsLoss(Loss):
    """`draft_loss` on the frozen base; see `hydrajax.train.train_step.Loss`. ``frozen`` are the base's parameters.

    If a batch has the base's post-norm hidden states, ``hidden`` ``[B, T, D]``, and what the drafter reads, ``aux``
    if that is not the same, the base is not run.
    """

    model: BaseModel
    drafter: TeacherForced  # float32 parameters are cast to its dtype
    objective: Objective

    def totals(self, batch: Batch):
        return head_counts(batch["labels"], batch.get("segments"), self.drafter.spec.num_draft_heads)

    def __call__(self, params, frozen, batch: Batch, totals, rng, step=0):
        base, aux_hidden_states, hidden = self.run_base(frozen, batch)
        params = optax.tree.cast(params, self.model.dtype)
        loss, parts = draft_loss(
            self.objective, self.drafter, params, aux_hidden_states, hidden, batch, base, rng, totals
        )
        return loss, self.reported(parts)

    def ranks(self, params, frozen, batch: Batch, depth: int):
        """Return the ranks for `Tally`, for guesses up to ``depth`` tokens ahead."""
        base, aux_hidden_states, _ = self.run_base(frozen, batch)
        params = optax.tree.cast(params, self.model.dtype)
        return self.drafter.ranks(params, aux_hidden_states, batch, base, self.objective.chunk_tokens, depth)

    def run_base(self, frozen, batch: Batch):
        """Return ``(base, aux_hidden_states, post-norm hidden states)``."""
        if "hidden" in batch:
            hidden = batch["hidden"].astype(self.model.dtype)
            aux = batch["aux"].astype(self.model.dtype) if "aux" in batch else hidden
            return BoundBase(self.model, frozen), aux, hidden
        forward = run_base(
            self.model, frozen, batch["tokens"], self.drafter.spec.aux_hidden_layers, batch.get("segments")
        )
        base = BoundBase(self.model, frozen, block=forward.block)
        return base, forward.aux_hidden_states, forward.hidden

    def reported(self, parts: HeadMetrics) -> dict[str, Any]:
        """Return the metrics that the objective computes, by name; the others are NaN."""
        lm, teacher = self.objective.lm_weight, self.objective.teacher_weight
        weights = {"reconstruction": self.objective.reconstruction_weight, "teacher": teacher, "agreement": teacher}
        return {name: value for name, value in parts._asdict().items() if weights.get(name, lm + teacher) > 0}


@dataclass(frozen=True)
class BlocksLoss(HeadsLoss):
    """`block_loss` on the frozen base, for drafts of one pass; see `hydrajax.train.train_step.Loss`."""

    drafter: BlockDrafter

    def prepared(self, batch: Batch, rng):
        anchors = draw_anchors(rng, batch["labels"], batch.get("segments"), self.drafter.num_anchors)
        return batch | {"anchors": anchors.positions, "keep": anchors.keep}

    def totals(self, batch: Batch):
        targets = block_targets(batch, _anchors(batch), self.drafter, self.objective.decay)
        return block_totals(targets, self.drafter.depth)

    def __call__(self, params, frozen, batch: Batch, totals, rng, step=0):
        base, aux_hidden_states, hidden = self.run_base(frozen, batch)
        params = optax.tree.cast(params, self.model.dtype)
        return block_loss(
            self.objective, self.drafter, params, aux_hidden_states, hidden, batch, _anchors(batch), base, totals
        )


def _anchors(batch: Batch) -> Anchors:
    return Anchors(batch["anchors"], batch["keep"])


def make_loss(model: BaseModel, drafter: Trainable, objective: Objective) -> HeadsLoss:
    """Return the loss of a drafter's kind."""
    if isinstance(drafter, BlockDrafter):
        check_objective(objective, drafter)
        return BlocksLoss(model, drafter, objective)
    for name in ("distance_weight", "confidence_weight"):
        if value := getattr(objective, name):
            raise HydrajaxError(f"objective.{name}: got {value}, expected 0 for {type(drafter).__name__}")
    return HeadsLoss(model, cast(TeacherForced, drafter), objective)


class Tally:
    """Sums over batches of head ranks: simulated tokens per step over the targets, and accuracies per head."""

    def __init__(self, tree: TreeTopology, num_draft_heads: int, top_k: int):
        self._tree, self._top_k = tree, top_k
        self._tokens = self._steps = 0
        self._hits = np.zeros((top_k, num_draft_heads), int)
        self._counts = np.zeros(num_draft_heads, int)

    def add(
        self,
        ranks: Int[np.ndarray, "K B T"],
        labels: Int[np.ndarray, "B T"],
        segments: Int[np.ndarray, "B T"] | None = None,
    ) -> None:
        num_draft_heads, batch, length = ranks.shape
        owner = np.ones_like(labels) if segments is None else segments
        for k in range(num_draft_heads):
            shift = k + 2
            counted = (labels[:, shift:] != IGNORED) & (owner[:, shift:] == owner[:, :-shift])
            found = ranks[k, :, : length - shift][counted]
            self._counts[k] += found.size
            self._hits[:, k] += (found[None] < np.arange(1, self._top_k + 1)[:, None]).sum(axis=1)
        accepted = accepted_lengths(self._tree, ranks)
        for index in range(batch):
            for start, end in runs(labels[index] != IGNORED, owner[index]):
                self._tokens += end - start
                self._steps += len(walk(accepted[index], start, end))

    def report(self) -> dict[str, Any]:
        """Return ``tokens_per_step``, and ``top1``, ``top2``, ... as lists over heads."""
        rates = {f"top{k}": (hits / np.maximum(self._counts, 1)).tolist() for k, hits in enumerate(self._hits, start=1)}
        return {"tokens_per_step": self._tokens / max(self._steps, 1)} | rates


class HeadsTask:
    """Draft heads; see `hydrajax.train.train_loop.Task`."""

    metric, higher_is_better = "tokens_per_step", True

    def __init__(
        self, config: TrainConfig, dataset: Dataset, model: BaseModel, base_params: Any, mesh: Mesh, extras=None
    ):
        self.config, self.dataset, self.model, self.mesh = config, dataset, model, mesh
        self.extras = extras or {}
        counts = None if dataset is None else target_counts(dataset, model.config.vocab_size)
        drafter = make_drafter(config.draft, model.config, config.dtype, counts)
        self._start: Any = None  # parameters to start from
        if config.draft.init and dataset is not None:
            drafter, self._start = load_heads(drafter, config.draft.init, model.config, config.model, model)
        self.drafter, self.master = drafter, dataclasses.replace(drafter, dtype=jnp.dtype(jnp.float32))
        self.tree = tree_for(config.tree, drafter, model.config.vocab_size)
        self.loss = make_loss(model, drafter, config.objective)
        boxed_base = abstract_base(model)
        self.frozen, self.frozen_shardings = base_params, tree_shardings(mesh, boxed_base)
        boxed = abstract_draft(self.master, model)
        self.abstract_params = nn.unbox(boxed)
        self.param_shardings = tree_shardings(mesh, boxed)
        self.flops_per_token = self._flops()
        self.tokens_per_step: float | None = None  # of the last evaluation
        self._place = batch_placer(mesh)
        spec = drafter.spec
        self._depth = depth = min(max(self.tree.depth, spec.num_draft_heads), spec.depth)  # of evaluated guesses
        self._ranks = jit_on(mesh, lambda *args: self.loss.ranks(*args, depth), out_shardings=replicated(mesh))

    def _flops(self) -> float:
        """A forward pass of the base (its lm head only for the teacher), forward and backward passes of the heads."""
        length = self.config.data.length
        objective, drafter, base = self.config.objective, self.drafter, 0.0
        logits = bool(objective.teacher_weight)
        if isinstance(drafter, BlockDrafter):  # the teacher's logits are those of the blocks
            teaches = logits or objective.distance_weight or objective.confidence_weight
            guesses = drafter.guesses(min(drafter.num_anchors, length - 1)).size / length if teaches else 0
            config, logits = self.model.config, False
            base = 2 * guesses * config.width * drafter.lm_head.size(config.vocab_size)
        if "hidden" not in self.extras:
            base += forward_flops(self.model, length, logits).total
        return base + 3 * drafter_forward_flops(self.drafter, self.model, length)

    def init_params(self, rng):
        return self.init_heads(rng, self.param_shardings)

    def init_heads(self, rng, shardings):
        """Return fresh heads or, the first time, those to start from."""
        if self._start is not None:
            params, self._start = self._start, None
            return jax.tree.map(lambda x, home: distribute(np.asarray(x), home), params, shardings)
        init = jax.jit(lambda rng, base: self.master.init(rng, BoundBase(self.model, base)), out_shardings=shardings)
        return init(rng, self.frozen)

    def evaluate(self, params, batches: Iterable[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Return held-out ``tokens_per_step`` (simulated) and ``top1`` ... ``top5`` accuracies per head."""
        tally = Tally(self.tree, self._depth, TOP_K)
        for batch in batches:
            ranks = jax.device_get(self._ranks(params, self.frozen, self._place(batch)))
            tally.add(ranks, batch["labels"], batch.get("segments"))
        report = tally.report()
        self.tokens_per_step = report["tokens_per_step"]
        return report

    def note(self, metrics: dict[str, Any]) -> str:
        if "top1" not in metrics:
            return ""
        return "top1 " + " ".join(f"{x:.2f}" for x in metrics["top1"])

    def export(self, directory: Path, params) -> str:
        return f"--draft {self.export_heads(directory / 'heads', params)}"

    def export_heads(self, target: Path, params, adapter: Path | None = None) -> Path:
        """Write the heads for the base, with its adapter if one is given."""
        export_heads(
            target, self.drafter, params, base_name=str(self.config.model), dtype=jnp.dtype(self.config.dtype),
            base_fingerprint=fingerprint(resolve(self.config.model, "model"), "model", adapter), story=self._story(),
            overwrite=True,
        )  # fmt: skip
        return target

    def _story(self) -> dict[str, Any]:
        c = self.config
        length = f"{c.steps} steps" if c.epochs is None else f"{c.epochs:g} epochs"
        recipe = f"{length} of {c.batch_size} rows of {c.data.length} tokens, {c.optimizer.name}, lr {c.optimizer.lr:g}"
        story = {"data": ", ".join(Path(name).name for name in c.data.files) or "see the settings", "recipe": recipe}
        if self.tokens_per_step is not None:
            story["tokens_per_step"] = f"{self.tokens_per_step:.2f}, simulated on held-out text, tree {c.tree}"
        return story


def load_heads(
    drafter: Trainable, directory: str, base: LlamaConfig, base_name: str | None = None, model: BaseModel | None = None
) -> tuple[Trainable, Any]:
    """Return the heads in a directory as ``(drafter, float32 parameters)``, with the settings of ``drafter``.

    The directory ``mtp`` means the MTP module in the files of the base with this name. With ``model``, heads that use
    the base's lm head get a vocabulary of another size.
    """
    if DraftRef.parse(directory).is_own and base_name is not None:
        found, params = load_own_heads(resolve(base_name, "model"), base, jnp.float32)
    else:
        found, params = load_draft(directory, base, jnp.float32)
    wanted = dataclasses.replace(drafter, dtype=jnp.dtype(jnp.float32))
    known, asked = getattr(found, "vocabulary", None), wanted.vocabulary
    if model is not None and known is not None and asked is not None and len(known) != len(asked):
        found, params = with_vocabulary(found, params, asked, model)
    try:
        return dataclasses.replace(wanted.trained_on(found), dtype=drafter.dtype), params
    except HydrajaxError as error:
        raise HydrajaxError(f"draft.init: {directory}: {error}") from None


def with_vocabulary(found: Trainable, params: Any, vocabulary: Vocabulary, model: BaseModel) -> tuple[Trainable, Any]:
    """Return a draft that uses the base's lm head, and its parameters, with another vocabulary.

    Parameters of single tokens, such as the outputs of a Markov head, start at zero for new tokens.
    """
    if not found.lm_head.shared:
        raise HydrajaxError(
            f"draft.vocabulary: got {len(vocabulary)}, expected {len(found.vocabulary)} as in draft.init: the heads "
            "have an lm head of their own"
        )
    places = np.asarray(found.vocabulary.places_of(vocabulary.tokens, model.config.vocab_size))

    def of_tokens(box, values):
        names = getattr(box, "names", (None,))
        if names[-1] != "vocab" or values.shape[-1] != len(found.vocabulary):
            return values
        return jnp.where(places >= 0, values[..., np.maximum(places, 0)], 0)

    boxes = abstract_draft(found, model)
    params = jax.tree.map(of_tokens, boxes, params, is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata))
    if isinstance(found, TrainedStack):
        lm_head = dataclasses.replace(found.lm_head, vocabulary=vocabulary)
        return dataclasses.replace(found, small_lm_head=lm_head), params
    return dataclasses.replace(found, vocabulary=vocabulary), params


def target_counts(dataset: Dataset, vocab_size: int) -> Int[np.ndarray, " V"]:
    """Count how often each token id is a target in the training data."""
    labels = dataset.train.labels
    return np.bincount(labels[labels != IGNORED], minlength=vocab_size)


def tree_for(name: str, drafter: Trainable, vocab_size: int) -> TreeTopology:
    tree = static(presets.by_name(name), "simulated decoding")
    tree.check(drafter.spec.depth, vocab_size)
    return tree
