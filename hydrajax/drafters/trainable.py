"""The interface between training and drafters, beyond `hydrajax.drafters.drafter.Drafter`."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.clusters import ChosenLogits
from hydrajax.drafters.drafter import Drafter, DraftParams
from hydrajax.drafters.settings import Settings
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.arrays import Array, DType
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.init import abstract_base
from hydrajax.models.llama_config import LlamaConfig


@runtime_checkable
class Trainable(Drafter, Protocol):
    """A drafter with parameters, as training uses it: a frozen dataclass.

    How its loss is computed depends on the kind: `TeacherForced` heads, or blocks (`hydrajax.drafters.block`).

    Attributes:
        Settings: The class of the user's choices in training.
        dtype: Dtype of the computation, a field.
        vocabulary: The tokens that the heads can propose; None for all.
    """

    Settings: ClassVar[type[Settings]]

    @property
    def dtype(self) -> DType: ...

    @classmethod
    def for_base(
        cls, base: LlamaConfig, dtype: DType, settings: Any = None, target_counts: Int[np.ndarray, " V"] | None = None
    ) -> Trainable:
        """Return the drafter for a base of this shape.

        Args:
            settings: An instance of ``Settings``; None for its defaults.
            target_counts: See `hydrajax.drafters.settings.vocabulary_of`.

        Raises:
            HydrajaxError: For settings that do not fit the base.
        """

    @property
    def vocabulary(self) -> Vocabulary | None: ...

    def reaching(self, depth: int) -> Trainable:
        """Return the same drafter with at least ``depth`` heads, at most `DrafterSpec.depth`."""

    def trained_on(self, found: Drafter) -> Trainable:
        """Return the drafter for continuing the training of ``found``, which was read from files.

        Properties that files do not hold, such as dropout, come from this drafter. Raises `HydrajaxError` if the two
        compute different functions.
        """

    def init_boxed(self, rng: Array, base: BoundBase) -> Any:
        """Return fresh parameters with their logical axes (`flax.core.meta` boxes, `hydrajax.sharding`)."""


@runtime_checkable
class TeacherForced(Trainable, Protocol):
    """Draft heads that training runs at every position of a text.

    Head k < `DrafterSpec.num_draft_heads` predicts token t + 2 + k at position t.
    """

    def teacher_hidden(
        self,
        params: DraftParams,
        aux_hidden_states: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        base: BoundBase,
        rng: Array | None = None,
        positions: Int[Array, "B T"] | None = None,
        mask: Bool[Array, "B 1 1 T T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], ...]:
        """Return what the lm head of each draft head reads: the first half of the training forward pass.

        Args:
            rng: Key of the dropout, applied everywhere except at the lm head; None for none.
            positions: Positions inside each packed document; None if a row is one document. Only drafters with
                attention need ``positions`` and ``mask``, which are given together.
            mask: ``mask[b, 0, 0, i, j]`` is true if token i sees token j.
        """

    def head_logits(
        self, params: DraftParams, k: int, hidden: Float[Array, "*rows D"], base: BoundBase, rng: Array | None = None
    ) -> Float[Array, "*rows V_"] | ChosenLogits:
        """Return float32 logits of head k over its vocabulary, from any rows of ``teacher_hidden(...)[k]``: the second
        half.

        With an ``rng`` key, the dropout before the lm head is applied.
        """


def abstract_draft(drafter: Drafter, model: BaseModel):
    """Return boxed `ShapeDtypeStruct` leaves: shapes, dtypes and logical axes of the drafter, without allocation.

    A drafter that is not `Trainable` has no axes, so its leaves are not boxed and its parameters are replicated.
    """
    init = getattr(drafter, "init_boxed", drafter.init)
    return jax.eval_shape(lambda base: init(jax.random.key(0), BoundBase(model, base)), nn.unbox(abstract_base(model)))
