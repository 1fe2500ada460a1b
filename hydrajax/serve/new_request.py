"""Check the fields of a request against a served model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hydrajax.decoding.constraints import GrammarLike
from hydrajax.decoding.keywords import with_keywords
from hydrajax.decoding.processors import MinTokens
from hydrajax.errors import HydrajaxError
from hydrajax.generation import growing_text, seed_for
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.requests import Request
from hydrajax.text.jsonl import shown


def new_request(
    pool: ExecutorPool,
    ids: np.ndarray,
    *,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    seed: int | None = None,
    number: int = 0,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    remembered: bool = True,
    grammar: GrammarLike | None = None,
    **sampling: Any,
) -> Request:
    """Return a request for the model of a pool.

    Args:
        pool: the executors of the model.
        ids: token ids of the prompt, int32 ``[P]``.
        max_new_tokens: limit; beyond the context it means the rest of the context.
        stop: stop strings.
        seed: sampling seed; drawn if the rule samples and none is given.
        number: index of the prompt among those with this seed.
        ignore_eos: EOS does not end the answer.
        min_tokens: forbid EOS among the first ``min_tokens`` tokens.
        remembered: add the answer to the draft's corpus, if it has one.
        grammar: the texts that may be generated.
        sampling: parameters of `ExactSampling` (temperature 0 by default) and of logits processors; None for their
            defaults.

    Raises:
        HydrajaxError: for a field that no answer can follow.
    """
    spec = pool.spec.replace(max_new_tokens=min(max_new_tokens, pool.context))
    if len(ids) >= pool.context:
        raise HydrajaxError(f"prompt: got {len(ids)} tokens, expected fewer than the model's context of {pool.context}")
    sampling["temperature"] = sampling.get("temperature") or 0.0
    spec = with_keywords(spec, "exact", **sampling)
    if min_tokens > max_new_tokens:
        raise HydrajaxError(f"min_tokens: got {min_tokens}, expected at most max_tokens, {max_new_tokens}")
    if min_tokens and spec.eos_ids:
        spec = spec.replace(processors=(*spec.processors, MinTokens(min_tokens, spec.eos_ids)))
    if not pool.sizes.penalties and any(processor.counts_tokens for processor in spec.processors):
        given = {name: value for name, value in sampling.items() if name.endswith("penalty")}
        name = next((name for name, value in given.items() if value is not None), "min_tokens")
        raise HydrajaxError(f"{name}: this server has no penalties; start it without --no-penalties")
    constraint, model, tokenizer = None, pool.executor.model, pool.executor.tokenizer
    if grammar is not None:
        for name, value in (("ignore_eos", ignore_eos), ("min_tokens", min_tokens)):
            if value:
                raise HydrajaxError(f"{name}: got {shown(value)} with a grammar, which decides where the answer ends")
        if not pool.follows_grammars:
            raise HydrajaxError("grammar: got one, expected none: this server's draft has devices of its own")
        constraint = grammar.start(tokenizer, model.config.vocab_size, spec.eos_ids)
    if ignore_eos:
        spec = spec.replace(eos_ids=())
    spec.check(model.config)
    seed = None if spec.rule.temperature == 0 else seed_for(spec.rule, seed)
    growing_text(tokenizer, stop)  # refuses unusable stop strings
    return Request(np.asarray(ids, np.int32), spec, seed, number, tuple(stop), constraint, remembered)
