"""Rollouts and GRPO of google-tunix, in an environment of its own: ``pip install 'hydrajax[tunix]' pytest scipy``."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

pytest.importorskip("tunix", reason="requires hydrajax[tunix]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

with warnings.catch_warnings(action="ignore"):  # tunix imports names that jax deprecates
    import qwix
    from scipy.stats import chisquare
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common
    from tunix.rl import rl_cluster as cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from hydrajax.errors import HydrajaxError
    from hydrajax.integrations.tunix import HydrajaxRollout

SIZES = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
CONFIG = qwen2.ModelConfig(**SIZES, vocab_size=128, rope_theta=10_000, norm_eps=1e-5)
GREEDY = RolloutConfig(
    max_tokens_to_generate=20, temperature=0.0, top_p=None, max_prompt_length=8, kv_cache_size=64, return_logprobs=True
)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.7, top_p=1.0)
PROMPTS = ["hello", "ab", "hello", "x = 1"]


class Letters:
    def encode(self, text, **_):
        return [3 + ord(letter) % 120 for letter in text]

    def decode(self, ids, **_):
        return "".join(chr(i) for i in ids)

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


TOKENIZER = TokenizerAdapter(Letters())


def policy(seed=0, scale=2.0):
    model = qwen2.Qwen2(CONFIG, rngs=nnx.Rngs(seed))
    nnx.update(model, jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, nnx.state(model, nnx.Param)))
    return model


def vanilla(model):
    return VanillaRollout(model, TOKENIZER, CacheConfig(64, 2, 2, 8))


def assert_same(ours, theirs):
    assert [ids.tolist() for ids in ours.tokens] == [ids.tolist() for ids in theirs.tokens]
    assert ours.text == theirs.text
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens)
    for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_greedy_rollouts_are_tunix_own_and_follow_the_trainer():
    model = policy()
    ours, theirs = HydrajaxRollout(model, TOKENIZER, None, GREEDY, batch_size=2), vanilla(model)
    first = ours.generate(PROMPTS, GREEDY)
    assert_same(first, theirs.generate(PROMPTS, GREEDY))
    assert ours.tokens_per_step > 1
    nnx.update(model, nnx.state(policy(1), nnx.Param))  # as a trainer on the same devices does
    second = ours.generate(PROMPTS, GREEDY)
    assert first.text != second.text
    assert_same(second, vanilla(model).generate(PROMPTS, GREEDY))
    with pytest.raises(HydrajaxError, match=r"^kv_cache_size: got 64, expected at least 106$"):
        ours.generate(PROMPTS, dataclasses.replace(GREEDY, max_tokens_to_generate=100))
    with pytest.raises(HydrajaxError, match=r"^prompts: got none, expected at least one$"):
        ours.generate([], GREEDY)
    ends = dataclasses.replace(GREEDY, eos_tokens=[int(second.tokens[0][3])])
    assert_same(ours.generate(PROMPTS, ends), vanilla(model).generate(PROMPTS, ends))


@pytest.mark.parametrize("draft", ["lookup+corpus", "none"])
def test_log_probabilities_are_the_policys(draft):
    model = policy()
    rollout = HydrajaxRollout(model, TOKENIZER, None, SAMPLED, draft=draft)
    found = rollout.generate(PROMPTS, SAMPLED)
    assert [a.tolist() for a in found.tokens] != [a.tolist() for a in rollout.generate(PROMPTS, SAMPLED).tokens]
    seeded = dataclasses.replace(SAMPLED, seed=jax.random.PRNGKey(3))
    one, two = rollout.generate(PROMPTS, seeded), rollout.generate(PROMPTS, seeded)
    assert one.text == two.text
    completions = np.zeros((len(PROMPTS), 20), np.int32)
    for row, ids in zip(completions, found.tokens, strict=True):
        row[: len(ids)] = ids
    given = jnp.asarray(found.left_padded_prompt_tokens), jnp.asarray(completions)
    graph, state = nnx.split(model)
    theirs = common.compute_per_token_logps(graph, state, *given, pad_id=0, eos_id=2, temperature=0.7)
    ours = rollout.get_per_token_logps(*given)
    for row, logprobs in enumerate(found.logprobs):
        np.testing.assert_allclose(logprobs, ours[row, : len(logprobs)], atol=1e-5)
        np.testing.assert_allclose(logprobs, theirs[row, : len(logprobs)], atol=1e-5)


def test_first_tokens_have_the_policys_distribution():
    model, prompt = policy(), "hello"
    rollout = HydrajaxRollout(model, TOKENIZER, None, SAMPLED, batch_size=100)
    few = dataclasses.replace(SAMPLED, max_tokens_to_generate=2, eos_tokens=[127])
    seen = [ids[0] for _ in range(20) for ids in rollout.generate([prompt] * 100, few).tokens if len(ids)]
    ids = jnp.asarray([[1, *Letters().encode(prompt)]])
    mask = jnp.tril(jnp.ones((1, ids.shape[1], ids.shape[1]), bool))
    logits, _ = model(ids, jnp.arange(ids.shape[1])[None], None, mask)
    p = np.array(jax.nn.softmax(logits[0, -1] / 0.7), np.float64)
    p = np.delete(p, 127) / np.delete(p, 127).sum()
    counts, often = np.bincount(seen, minlength=127), p * len(seen) > 5
    expected = np.append(p[often], p[~often].sum()) * len(seen)
    assert chisquare(np.append(counts[often], counts[~often].sum()), expected).pvalue > 1e-3


def test_low_rank_weights():
    model, tokens = policy(), jnp.zeros((1, 4), jnp.int32)
    given = tokens, jnp.arange(4)[None], None, jnp.tril(jnp.ones((1, 4, 4), bool))
    rule = qwix.LoraProvider(module_path=".*(q_proj|o_proj|gate_proj).*", rank=4, alpha=8.0)
    model = qwix.apply_lora_to_model(model, rule, *given, rngs=nnx.Rngs(1))
    with pytest.raises(HydrajaxError, match=r"lora_alpha: got none for weights of rank 4"):
        HydrajaxRollout(model, TOKENIZER, None, GREEDY)
    rollout = HydrajaxRollout(model, TOKENIZER, None, GREEDY, lora_alpha=8.0)
    keys = iter(jax.random.split(jax.random.key(0), 99))
    drawn = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape) / 4, nnx.state(model, nnx.LoRAParam))
    nnx.update(model, drawn)
    changed = rollout.generate(PROMPTS, GREEDY)
    assert_same(changed, vanilla(model).generate(PROMPTS, GREEDY))


def test_a_module_that_computes_something_else_is_refused():
    config = dataclasses.replace(qwen3.ModelConfig(**SIZES, vocab_size=128, rope_theta=10_000, norm_eps=1e-5))
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    HydrajaxRollout(model, TOKENIZER, None, GREEDY)
    fields = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "rope_theta": 10.0}
    with pytest.raises(HydrajaxError, match=r"^config: got NoneType, expected a LlamaConfig"):
        HydrajaxRollout(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), TOKENIZER, None, GREEDY)
    with pytest.raises(HydrajaxError, match=r"config: log-probabilities are up to .* from those of Qwen3"):
        HydrajaxRollout(model, TOKENIZER, None, GREEDY, config=fields)


def grpo(engine, steps, actor_devices=1, rollout_devices=None):
    """Return the mean reward of each step: the share of odd characters."""
    devices = np.array(jax.devices())
    actor = Mesh(devices[:actor_devices].reshape(-1, 1), ("fsdp", "tp"))
    other = actor if rollout_devices is None else Mesh(devices[rollout_devices].reshape(-1, 2), ("fsdp", "tp"))
    roles = cluster.Role
    config = cluster.ClusterConfig(
        role_to_mesh={roles.ACTOR: actor, roles.REFERENCE: actor, roles.ROLLOUT: other},
        rollout_engine=engine,
        training_config=cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(2e-2), eval_every_n_steps=10**6, max_steps=steps, mini_batch_size=4
        ),
        rollout_config=dataclasses.replace(SAMPLED, temperature=1.0),
    )
    found = cluster.RLCluster(
        actor=policy(0, 0.1), reference=policy(0, 0.1), tokenizer=TOKENIZER, cluster_config=config
    )
    rewards = []

    def share_of_odd(prompts, completions, **_):
        shares = [np.mean([ord(x) % 2 for x in text] or [0]) for text in completions]
        rewards.append(np.mean(shares))
        return shares

    learner = GRPOLearner(found, GRPOConfig(num_generations=8, beta=0.0), share_of_odd)
    learner.train([{"prompts": np.array(PROMPTS)}] * steps)
    return np.array(rewards)


def test_grpo_learns_with_both_engines():
    ours, theirs = grpo(functools.partial(HydrajaxRollout, batch_size=16), 12), grpo("vanilla", 12)
    print(ours, theirs)
    for rewards in (ours, theirs):
        assert rewards[-3:].mean() > rewards[:3].mean() + 0.1
