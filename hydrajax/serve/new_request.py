"""Check the fields of a request against a served model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hydrajax.decoding.constraints import GrammarLike
from hydrajax.decoding.keywords import make_request, processor_fields
from hydrajax.decoding.processors import MinTokens
from hydrajax.errors import HydrajaxError
from hydrajax.sequences import growing_text
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.requests import Submission
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
) -> Submission:
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
        sampling: parameters of the server's rule and of logits processors; None for their defaults.

    Raises:
        HydrajaxError: for a field that no answer can follow.
    """
    if len(ids) >= pool.context:
        raise HydrajaxError(f"prompt: got {len(ids)} tokens, expected fewer than the model's context of {pool.context}")
    limit = min(max_new_tokens, pool.context)
    fields = {"max_new_tokens": limit, "stop": stop, "seed": seed, "number": number, "ignore_eos": ignore_eos}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    request = make_request(pool.sizes.rule, fields=fields, **getattr(pool.program.rule, "SERVED", {}) | sampling)
    if min_tokens > max_new_tokens:
        raise HydrajaxError(f"min_tokens: got {min_tokens}, expected at most max_tokens, {max_new_tokens}")
    eos_ids = pool.program.eos_ids
    if min_tokens and eos_ids:
        request = request.replace(processors=(*request.processors, MinTokens(min_tokens, eos_ids)))
    if not pool.sizes.penalties and any(processor.counts_tokens for processor in request.processors):
        counting = (name for name, kind in processor_fields().items() if kind.counts_tokens and name in sampling)
        name = next(counting, "min_tokens")
        raise HydrajaxError(f"{name}: this server has no penalties; start it without --no-penalties")
    constraint, model, tokenizer = None, pool.executor.model, pool.executor.tokenizer
    if grammar is not None:
        for name, value in (("ignore_eos", ignore_eos), ("min_tokens", min_tokens)):
            if value:
                raise HydrajaxError(f"{name}: got {shown(value)} with a grammar, which decides where the answer ends")
        if not pool.follows_grammars:
            raise HydrajaxError("grammar: got one, expected none: this server's draft has devices of its own")
        pool.begin_constrained(len(ids))  # meanwhile the parser is made, which takes seconds for the first grammar
        constraint = grammar.start(tokenizer, model.config.vocab_size, eos_ids)
    request.check(model.config.vocab_size)
    growing_text(tokenizer, stop)  # refuses unusable stop strings
    greedy = getattr(request.rule, "temperature", None) == 0
    request = request.replace(seed=None) if greedy else request.with_seed()
    return Submission(np.asarray(ids, np.int32), request, constraint, remembered)
