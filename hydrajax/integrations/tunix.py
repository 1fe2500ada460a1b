"""Rollouts of tunix' reinforcement learning by hydrajax: speculative, with the policy's own distribution.

The engine of a cluster is a class, ``ClusterConfig(rollout_engine=HydrajaxRollout, ...)``, or one with settings,
``functools.partial(HydrajaxRollout, draft="lookup", batch_size=32)``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, Int
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from hydrajax.decoding.prompt_batch import bucket, right_padded
from hydrajax.decoding.scoring import token_logprobs
from hydrajax.errors import HydrajaxError
from hydrajax.integrations.heads import HeadsInLoop
from hydrajax.integrations.params import arrays_by_path, from_params
from hydrajax.models.arrays import Array

CHECKED = 8  # tokens on which our logits are compared with the module's
TOLERANCE = {2: 0.1, 4: 5e-3}  # of the largest difference to the largest logit, by bytes of a number


class HydrajaxRollout(BaseRollout):
    """A rollout engine of tunix.

    A sample has the policy's distribution whatever the draft, the tree and the batch. The default draft needs no
    training and does not age: it looks up the end of a text in the text itself and in earlier samples.

    Attributes:
        language_model: the policy with its draft.
        tokens_per_step: of the last `generate`.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        *,
        draft: Any = "lookup+corpus",
        tree: Any = None,
        batch_size: int = 64,
        config: Any = None,
        lora_alpha: float | None = None,
        corpus: int | None = None,
    ):
        """Read the policy's parameters.

        Args:
            rollout_actor: a model of `tunix.models`, or MaxText's adapter of one of its own.
            tokenizer: tunix' adapter of a tokenizer.
            mesh: of the rollouts.
            rollout_config: its ``kv_cache_size`` is the context.
            draft: as in `hydrajax.load`.
            tree: as in `hydrajax.LanguageModel`.
            batch_size: sequences that are decoded together; others wait for a free row.
            config: of the model, as in `hydrajax.from_params`, if that of ``rollout_actor`` is not enough.
            lora_alpha: as in `hydrajax.from_params`.
            corpus: as in `hydrajax.load`.

        Raises:
            HydrajaxError: as `hydrajax.from_params`, and if the logits are not those of the model.
        """
        self._actor, self._tokenizer, self._tree, self._batch_size = rollout_actor, tokenizer, tree, batch_size
        self._seeds, self._temperature, self.tokens_per_step = itertools.count(), 1.0, float("nan")
        self._heads: tuple[HeadsInLoop, int] | None = None
        self._calls = 0
        arrays, policy = arrays_by_path(rollout_actor), getattr(rollout_actor, "base", rollout_actor)
        self.language_model = from_params(
            getattr(policy, "config", None) if config is None else config,
            arrays,
            "tunix" if policy is rollout_actor else "maxtext",
            draft=draft,
            eos_ids=[tokenizer.eos_id()],
            mesh=mesh,
            max_positions=rollout_config.kv_cache_size if rollout_config else None,
            lora_alpha=lora_alpha,
            corpus=corpus,
        )
        self.language_model.tempered_logprobs = True
        trained = arrays_by_path(nnx.state(rollout_actor, nnx.LoRAParam)).keys() or arrays.keys()
        self._frozen = {name: x for name, x in arrays.items() if name not in trained}
        self._check()
        # On the trainer's own devices tunix sends no weights, as its engine reads the module's. On others it sends
        # them if `model` is another module.
        devices = next(iter(arrays.values())).devices()
        self._model = rollout_actor if mesh is None or devices == set(mesh.devices.flat) else nnx.Module()
        self._seen = _references(arrays)

    def refresh_heads(self, every: int = 1, learning_rate: float = 1e-4, batch_size: int = 8) -> None:
        """Train the draft's heads on the samples after every N-th `generate`, so that they follow the policy.

        Args:
            every: N.
            learning_rate: of AdamW.
            batch_size: texts of a step; each sample is read once.

        Raises:
            HydrajaxError: for a draft without heads.
        """
        self._heads = HeadsInLoop(self.language_model, learning_rate, batch_size), every

    def generate(self, prompts: Sequence[str], rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        """Sample a completion of each prompt.

        Log-probabilities are those at the sampling temperature, without top-k and top-p, as tunix' sampler reports
        them. As there, the EOS token is not part of a completion. Without a seed each call draws new samples.

        Args:
            prompts: texts; equal ones are prefilled once.

        Raises:
            HydrajaxError: for no prompts, and for prompts and completions that do not fit into the context.
        """
        if not prompts:
            raise HydrajaxError("prompts: got none, expected at least one")
        self._refresh()
        c, m = rollout_config, self.language_model
        rows = [self._ids(prompt) for prompt in prompts]
        if (room := max(map(len, rows)) + c.max_tokens_to_generate) > m.config.max_positions:
            raise HydrajaxError(f"kv_cache_size: got {m.config.max_positions}, expected at least {room}")
        m.eos_ids = eos_ids = tuple(c.eos_tokens or [self.eos_id()])
        self._temperature = c.temperature or 1.0
        sampling: dict[str, Any] = {"temperature": c.temperature}
        if c.temperature:
            sampling |= {"top_p": 1.0 if c.top_p is None else c.top_p, "top_k": c.top_k if (c.top_k or 0) > 0 else None}
        done = m.generate(
            rows,
            tree=self._tree,
            batch_size=self._batch_size,
            max_new_tokens=c.max_tokens_to_generate,
            logprobs=True if c.return_logprobs else None,
            seed=self._seed(c.seed),
            rule="exact" if c.temperature else None,
            **sampling,
        )
        self.tokens_per_step = sum(one.new_tokens for one in done) / max(sum(one.steps for one in done), 1)
        if self._heads is not None:
            heads, every = self._heads
            self._calls += 1
            if self._calls % every == 0:
                heads.train([np.array(one.prompt_ids + one.output_ids, np.int32) for one in done], self._calls)
        kept = [len(one.output_ids) - (one.output_ids[-1:] != [] and one.output_ids[-1] in eos_ids) for one in done]
        tokens = [np.array(one.output_ids[:n], np.int32) for one, n in zip(done, kept, strict=True)]
        width = max(map(len, rows))
        width = c.max_prompt_length if (c.max_prompt_length or 0) >= width else 1 << (width - 1).bit_length()
        return RolloutOutput(
            text=[self._tokenizer.decode(ids.tolist()) for ids in tokens],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=np.array([[self.pad_id()] * (width - len(row)) + row for row in rows], np.int32),
            logprobs=[np.array(one.logprobs[:n]) for one, n in zip(done, kept, strict=True)]
            if c.return_logprobs
            else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float[Array, "B C"]:
        """Return the log-probability of each token of the completions, float32.

        They are those at the temperature of the last `generate`, as the trainer computes them, so that the ratio of
        both is 1 before an update.

        Args:
            prompt_tokens: left-padded.
            completion_tokens: right-padded.
        """
        self._refresh()
        given = np.concatenate([np.asarray(prompt_tokens), np.asarray(completion_tokens)], axis=1)
        rows = [row[row != self.pad_id()] for row in given]
        m = self.language_model
        packed, _ = right_padded(rows, bucket(max(map(len, rows)), m.config.max_positions))
        found = np.asarray(token_logprobs(m.model, m.params.base, packed, self._temperature))
        out = np.zeros(given.shape, np.float32)
        out[given != self.pad_id()] = np.concatenate([row[: len(ids)] for row, ids in zip(found, rows, strict=True)])
        return jnp.asarray(out[:, prompt_tokens.shape[1] :])

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Use new weights of the policy, all of them or the low-rank ones. Nothing is compiled; the corpus stays."""
        self.language_model.update_params(self._frozen | arrays_by_path(params))

    def pad_id(self) -> int:
        """Return the id of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the id that ends a text."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Return tunix' module, on the trainer's devices; on others a module without weights."""
        return self._model

    def _refresh(self) -> None:
        """Read the module's weights again if the trainer has replaced them."""
        if self._model is self._actor:
            arrays = arrays_by_path(self._actor)
            if any(self._seen[name]() is not x for name, x in arrays.items()):
                self.language_model.update_params(arrays)
                self._seen = _references(arrays)

    def _ids(self, prompt: str) -> list[int]:
        """Return the ids of a prompt, as tunix' sampler encodes it."""
        bos = self._tokenizer.bos_id()
        return list(map(int, self._tokenizer.dedup_bos_ids(([bos] if bos else []) + self._tokenizer.encode(prompt))))

    def _seed(self, seed: Any) -> int:
        """Return a seed of an integer or a random key; by default another one for each call."""
        if seed is None:
            return next(self._seeds)
        return int(np.asarray(jax.random.key_data(seed)).reshape(-1)[-1]) if hasattr(seed, "dtype") else int(seed)

    def _check(self) -> None:
        """Raise `HydrajaxError` unless our logits are those of tunix' module."""
        m, ids = self.language_model, np.arange(CHECKED, dtype=np.int32)[None] % self.language_model.config.vocab_size
        mask = np.tril(np.ones((1, CHECKED, CHECKED), bool))
        theirs, _ = self._actor(jnp.asarray(ids), jnp.arange(CHECKED)[None], None, jnp.asarray(mask))
        theirs = np.asarray(jax.nn.log_softmax(theirs.astype(jnp.float32)))[0]
        ours = np.asarray(token_logprobs(m.model, m.params.base, ids))[0, 1:]
        apart = np.abs(ours - theirs[np.arange(CHECKED - 1), ids[0, 1:]]).max() / max(1.0, np.abs(ours).max())
        if not apart <= TOLERANCE.get(m.model.dtype.itemsize, 5e-3):
            name = type(self._actor).__name__
            raise HydrajaxError(
                f"config: log-probabilities are up to {apart:.1e} from those of {name}, pass another one"
            )


def _references(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return references that do not keep old weights alive."""
    return {name: weakref.ref(x) for name, x in arrays.items()}
