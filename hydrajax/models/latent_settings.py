"""The settings of latent attention (MLA)."""

from dataclasses import dataclass

from hydrajax.errors import HydrajaxError

LATENT_NORM_EPS = 1e-6  # of the norms of latents and of queries, whatever rms_norm_eps is (transformers)


@dataclass(frozen=True)
class Latent:
    """Latent attention (`hydrajax.models.latent_attention`; DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        rank: Features of a token's latent, from which all heads have their keys and values.
        nope_dim: Features of a head's queries and keys without rotary embedding.
        rope_dim: Features with one; the key's are shared by all heads.
        value_dim: Features of a head's values.
        query_rank: Features of the latent of the queries; None for queries straight from the input.
        interleaved: Files have rotated features in pairs (i, i + 1), not (i, i + rope_dim / 2).
        mscale: YaRN's ``mscale_all_dim``, whose square the scores' scale has; 0 for none.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    interleaved: bool = True
    mscale: float = 0.0

    def __post_init__(self):
        for name in ("rank", "nope_dim", "rope_dim", "value_dim", "query_rank"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise HydrajaxError(f"latent attention: {name}: got {size}, expected at least 1")
        if self.rope_dim % 2:
            raise HydrajaxError(f"latent attention: rope_dim: got {self.rope_dim}, expected an even number")

    @property
    def key_dim(self) -> int:
        """Features of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def kept_dim(self) -> int:
        """Features that the cache keeps of a token."""
        return self.rank + self.rope_dim
