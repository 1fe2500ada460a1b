"""Per-layer embeddings: every layer reads an embedding of its own of each token (Gemma 4, Gemma 3n).

For the token x with the embedding e = E(x) as the first layer reads it, layer l reads

    (norm(P e width**-0.5)_l + T(x)_l p**0.5) / sqrt(2)

where the table T and the product P have p features for each layer. The table is as large as many models (2.3 of the 5.1
billion parameters of Gemma 4 E2B), but a token reads one row.
"""

import flax.linen as nn
from jaxtyping import Float, Int

from hydrajax.models.arrays import Array, DType
from hydrajax.models.layers import RMSNorm, scaled
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import declare_embedding, declare_kernel, embedded, project


class PerLayerEmbedding(nn.Module):
    """The embeddings of a model's layers (`LlamaConfig.per_layer_width`).

    Attributes:
        quantize: As in `hydrajax.models.llama.Llama`.
    """

    config: LlamaConfig
    dtype: DType
    quantize: str | None = None

    adapter = None  # not a field: `declare_kernel` reads it

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"], embeddings: Float[Array, "B T D"]) -> Float[Array, "B T L p"]:
        """Return the embeddings that the L layers read.

        Args:
            embeddings: Theirs as the first layer reads them.
        """
        c = self.config
        features = c.n_layers * c.per_layer_width
        own = embedded(declare_embedding(self, c.per_layer_vocab, features, quantize=True), tokens, self.dtype)
        kernel = declare_kernel(self, "projection", (c.width, features), ("width", None))
        projected = scaled(project(embeddings, kernel), c.width**-0.5)
        own, projected = (x.reshape(*tokens.shape, c.n_layers, c.per_layer_width) for x in (own, projected))
        normed = RMSNorm(c.norm_eps, self.dtype, c.norm_offset, name="norm")(projected)
        return scaled(normed + scaled(own, c.per_layer_width**0.5), 2**-0.5)
