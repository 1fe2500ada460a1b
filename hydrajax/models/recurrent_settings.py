"""The settings of layers that keep a state in place of keys and values."""

from dataclasses import dataclass

from hydrajax.errors import HydrajaxError


@dataclass(frozen=True)
class Recurrent:
    """Settings that all recurrent layers share.

    Attributes:
        kernel: Number of tokens that the causal convolution reads, the present one included.
    """

    kernel: int

    def __post_init__(self):
        for name, value in vars(self).items():
            if type(value) is int and value < 1:
                raise HydrajaxError(f"recurrent layer: {name}: got {value}, expected at least 1")


@dataclass(frozen=True)
class ShortConv(Recurrent):
    """A convolution with a gate before and one after it (LFM2, LFM3): its last inputs are all that is kept.

    Attributes:
        width: Channels, as many as the residual stream has.
        groups: Equal parts of the channels, which can be sharded.
        bias: The projections and the convolution have biases.
    """

    width: int
    groups: int = 1
    bias: bool = False

    state_shape = None  # no state

    def __post_init__(self):
        super().__post_init__()
        if self.width % self.groups:
            raise HydrajaxError(f"recurrent layer: groups: got {self.groups}, expected a divisor of {self.width}")

    @property
    def inputs_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's earlier inputs of the convolution: groups, tokens, channels of a group."""
        return self.groups, self.kernel - 1, self.width // self.groups


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """A gated delta rule (arXiv 2412.06464), as in Qwen3-Next and OLMo hybrid.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values and states, a multiple of ``key_heads``.
        key_dim: Features of a query or key.
        value_dim: Features of a value.
        most_beta: Largest strength of a write, 2 where eigenvalues of the transition may be negative (OLMo hybrid).
        norm_eps: Of the output's norm.
        names: The form of its tensors in files (`hydrajax.families.recurrent_layout`).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    most_beta: float = 1.0
    norm_eps: float = 1e-6
    names: str = "qwen3_next"

    def __post_init__(self):
        super().__post_init__()
        if self.value_heads % self.key_heads:
            raise HydrajaxError(
                f"recurrent layer: value_heads: got {self.value_heads}, expected a multiple of {self.key_heads}"
            )

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's state: heads, features of a value, features of a key."""
        return self.value_heads, self.value_dim, self.key_dim

    @property
    def inputs_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's earlier inputs of the convolution: heads, tokens, channels of a head."""
        return self.key_heads, self.kernel - 1, 2 * self.key_dim + self.values_per_key * self.value_dim

    @property
    def values_per_key(self) -> int:
        """Number of value heads that share a query and a key."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """A Mamba-2 layer (arXiv 2405.21060), as in Granite 4 and Nemotron-H.

    Attributes:
        groups: Number of groups of heads that share B and C.
        heads: Heads of values and states, a multiple of ``groups``.
        head_dim: Features of a head.
        state_size: Features of B and C.
        conv_bias: The convolution has a bias.
        step_limit: The least and the largest time step.
        norm_eps: Of the output's norm, over the heads of a group.
    """

    groups: int
    heads: int
    head_dim: int
    state_size: int
    conv_bias: bool = True
    step_limit: tuple[float, float] = (0.0, float("inf"))
    norm_eps: float = 1e-5

    def __post_init__(self):
        super().__post_init__()
        if self.heads % self.groups:
            raise HydrajaxError(f"recurrent layer: heads: got {self.heads}, expected a multiple of {self.groups}")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's state: heads, features of a head, features of B."""
        return self.heads, self.head_dim, self.state_size

    @property
    def inputs_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's earlier inputs of the convolution: groups, tokens, channels of a group."""
        return self.groups, self.kernel - 1, self.heads_per_group * self.head_dim + 2 * self.state_size

    @property
    def heads_per_group(self) -> int:
        """Number of heads that share B and C."""
        return self.heads // self.groups
