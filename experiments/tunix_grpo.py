"""Train a policy by tunix' GRPO with rollouts by hydrajax: reward, tokens per step and rollout time of every update.

    python experiments/tunix_grpo.py [--draft lookup+corpus --tree chain-4 --refresh 1] [--updates 100] [--output FILE]

The toy task is to write digits: the reward is the share of a sample's characters that are digits. ``--draft tunix`` is
tunix' own sampler. Requires the extra ``tunix``.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix_rollouts import policy_of, prompts_of

import hydrajax
from hydrajax.integrations.tunix import HydrajaxRollout
from hydrajax.machine import machine

PROMPTS = 8  # of which an update has half


def train(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each update."""
    m = hydrajax.load(given.base, dtype="float32")
    texts, rows = prompts_of(m, None, PROMPTS), []
    mesh, roles = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")), rl_cluster.Role
    engine: Any = "vanilla"
    if given.draft != "tunix":
        engine = functools.partial(HydrajaxRollout, draft=given.draft, tree=given.tree)
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(given.learning_rate),
        eval_every_n_steps=10**9,
        max_steps=given.updates,
        mini_batch_size=PROMPTS // 2,
    )
    rollouts = RolloutConfig(
        max_tokens_to_generate=given.max_new_tokens,
        temperature=given.temperature,
        max_prompt_length=16,
        kv_cache_size=256,
    )
    cluster = rl_cluster.RLCluster(
        actor=policy_of(m),
        reference=policy_of(m),
        tokenizer=m.tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
            rollout_engine=engine,
            training_config=training,
            rollout_config=rollouts,
        ),
    )
    if given.refresh:
        cluster.rollout.refresh_heads(every=given.refresh, learning_rate=3e-4)
    generate, seconds = cluster.rollout.generate, []

    def timed(*args, **settings):
        began = time.perf_counter()
        found = generate(*args, **settings)
        seconds.append(time.perf_counter() - began)
        return found

    def share_of_digits(prompts, completions, **_):
        shares = [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]
        tau = getattr(cluster.rollout, "tokens_per_step", 1.0)
        rows.append({"reward": float(np.mean(shares)), "tokens_per_step": tau, "seconds": seconds[-1]})
        reward = rows[-1]["reward"]
        print(f"update {len(rows):3}: reward {reward:.3f}, τ {tau:.2f}, rollout {seconds[-1]:.1f} s", flush=True)
        return shares

    cluster.rollout.generate = timed
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=given.samples, beta=0.01), share_of_digits)
    half = PROMPTS // 2
    learner.train([{"prompts": np.array(texts[:half] if i % 2 else texts[half:])} for i in range(given.updates)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="shipped")
    parser.add_argument("--draft", default="lookup+corpus")
    parser.add_argument("--tree", help="default: by the number of sequences")
    parser.add_argument("--refresh", type=int, default=0, help="train the draft's heads after every N-th rollout")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--output")
    given = parser.parse_args()
    rows = train(given)
    if given.output:
        found = {"machine": machine(), "settings": vars(given), "rows": rows}
        Path(given.output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
