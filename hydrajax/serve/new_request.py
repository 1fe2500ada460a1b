"""Check the fields of a request against a served model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hydrajax.decoding.constraints import GrammarLike
from hydrajax.decoding.forbidden import TokenIds, forbidding
from hydrajax.decoding.keywords import make_request, processor_fields
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.sequences import growing_text
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.requests import Submission


def new_request(
    pool: ExecutorPool,
    ids: np.ndarray,
    *,
    max_new_tokens: int = 256,
    min_tokens: int = 0,
    bad_words: Sequence[TokenIds] = (),
    remembered: bool = True,
    grammar: GrammarLike | None = None,
    **given: Any,
) -> Submission:
    """Return a request for the model of a pool.

    Args:
        pool: the executors of the model.
        ids: token ids of the prompt, int32 ``[P]``.
        max_new_tokens: limit; beyond the context it means the rest of the context.
        min_tokens: as in `hydrajax.decoding.forbidden.forbidding`.
        bad_words: strings that the answer does not contain, its ``words``.
        remembered: add the answer to the draft's corpus, if it has one.
        grammar: the texts that may be generated.
        given: other fields of `Request`, without a seed of which one is drawn if the rule samples; parameters of the
            server's rule and of logits processors, None for their defaults.

    Raises:
        HydrajaxError: for a field that no answer can follow.
    """
    if len(ids) >= pool.context:
        raise HydrajaxError(f"prompt: got {len(ids)} tokens, expected fewer than the model's context of {pool.context}")
    limit = min(max_new_tokens, pool.context)
    fields = {each.name: given.pop(each.name) for each in dataclasses.fields(Request) if each.name in given}
    fields |= {"max_new_tokens": limit, "grammar": grammar}
    sampling = {name: value for name, value in given.items() if value is not None}
    request = make_request(pool.sizes.rule, fields=fields, **getattr(pool.program.rule, "SERVED", {}) | sampling)
    eos_ids, model, tokenizer = pool.program.eos_ids, pool.executor.model, pool.executor.tokenizer
    request = forbidding(request, eos_ids, bad_words, min_tokens)
    if not pool.sizes.penalties and any(processor.counts_tokens for processor in request.processors):
        counting = (name for name, kind in processor_fields().items() if kind.counts_tokens and name in sampling)
        name = next(counting, "min_tokens")
        raise HydrajaxError(f"{name}: this server has no penalties; start it without --no-penalties")
    constraint = None
    if request.grammar is not None:
        if not pool.follows_grammars:
            field, found = ("bad_words", "several tokens") if grammar is None else ("grammar", "one")
            raise HydrajaxError(f"{field}: got {found}, expected none: this server's draft has devices of its own")
        pool.begin_constrained(len(ids))  # meanwhile the parser is made, which takes seconds for the first grammar
        constraint = request.grammar.start(tokenizer, model.config.vocab_size, eos_ids)
        request = request.replace(grammar=None)
    request.check(model.config.vocab_size)
    growing_text(tokenizer, request)  # refuses unusable stop strings
    greedy = getattr(request.rule, "temperature", None) == 0
    request = request.replace(seed=None) if greedy else request.with_seed()
    return Submission(np.asarray(ids, np.int32), request, constraint, remembered)
