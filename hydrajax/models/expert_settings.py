"""The settings of a mixture of experts."""

from dataclasses import dataclass

from hydrajax.errors import HydrajaxError, not_allowed

# Kinds of `Experts.scores` and of `Experts.block`.
SCORES = ("softmax", "sigmoid")
BLOCKS = ("mlp", "block_sparse_moe")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of a layer's MLP (`hydrajax.models.experts`).

    Attributes:
        per_token: Number of experts that each token passes through.
        shared_width: Width of an MLP that every token passes through as well; 0 for none.
        shared_gate: The shared MLP's output is multiplied by the sigmoid of a product with its input (Qwen 2 MoE).
        scores: Of the router: ``"softmax"`` over all experts or ``"sigmoid"`` of each (DeepSeek-V3, GLM-4).
        normalized: The weights of a token's experts are divided by their sum.
        choice_bias: A bias per expert is added to the scores that choose, not to the weights (DeepSeek-V3, GLM-4).
        groups: Number of groups of consecutive experts.
        chosen_groups: Experts are chosen from this number of groups, those whose best scores have the largest sum.
        best_of_group: Number of these scores (1 in DeepSeek-V2).
        scale: Multiplies the weights.
        with_mlp: The layer has its MLP too, and the sum of both. The router reads the residual stream through a norm
            of its own, its logits are multiplied by ``width ** -0.5`` and each expert's weight by a number (Gemma 4).
        tiny: Added to the sum of the weights before they are divided by it.
        biases: Router and experts have biases (gpt-oss); the router's takes part in its scores.
        swiglu: Alpha and limit of ``gate * sigmoid(alpha * gate) * (up + 1)``, where the gate is at most the limit and
            up lies within it on both sides (gpt-oss); None for the layer's activation.
        block: Name of the layer's MLP in files.
    """

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    scores: str = "softmax"
    normalized: bool = False
    choice_bias: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    block: str = "mlp"
    tiny: float = 1e-20
    biases: bool = False
    swiglu: tuple[float, float] | None = None
    with_mlp: bool = False
    best_of_group: int = 2

    def __post_init__(self):
        for name in ("count", "per_token", "width", "groups", "chosen_groups"):
            if getattr(self, name) < 1:
                raise HydrajaxError(f"experts: {name}: got {getattr(self, name)}, expected at least 1")
        if self.shared_width < 0:
            raise HydrajaxError(f"experts: shared_width: got {self.shared_width}, expected 0 or more")
        if self.chosen_groups > self.groups:
            raise HydrajaxError(f"experts: chosen_groups: got {self.chosen_groups}, expected at most {self.groups}")
        if self.count % self.groups or (self.groups > 1 and self.count < self.best_of_group * self.groups):
            raise HydrajaxError(f"experts: groups: got {self.groups}, expected equal parts of {self.count} experts")
        if self.per_token > (allowed := self.count // self.groups * self.chosen_groups):
            raise HydrajaxError(f"experts: per_token: got {self.per_token}, expected at most {allowed}")
        if self.swiglu is not None and not self.swiglu[1] > 0:
            raise HydrajaxError(f"experts: swiglu_limit: got {self.swiglu[1]}, expected a positive number")
        for name, known in (("scores", SCORES), ("block", BLOCKS)):
            if getattr(self, name) not in known:
                raise not_allowed(f"experts: {name}", getattr(self, name), known)
