"""Self-distillation: let the base write the text that its draft heads then learn from.

Draft heads guess what the base is about to say, so the base's own continuations are closer to their task than the text
that the base was trained on (medusa 2.3.2). Greedy continuations are what greedy decoding will meet; sampled ones have
more variety. The command is `hydrajax.cli.distill`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.decoding.decode import make_autoregressive_fn
from hydrajax.decoding.state import Params
from hydrajax.errors import HydrajaxError
from hydrajax.train.data.rows import Document


def cut_prompts(documents: Sequence[Document], count: int, length: int, seed: int) -> np.ndarray:
    """Cut ``count`` prompts of ``length`` tokens out of the documents; int32 ``[count, length]``.

    Every place at which a whole prompt fits is equally likely, so longer documents are cut more often. Raises
    `HydrajaxError` where no document is long enough.
    """
    long_enough = [ids for ids, _ in documents if len(ids) >= length]
    if not long_enough:
        raise HydrajaxError(f"prompt_tokens: no document has {length} tokens")
    random = np.random.default_rng(seed)
    weights = np.array([len(ids) - length + 1 for ids in long_enough], float)
    chosen = random.choice(len(long_enough), size=count, p=weights / weights.sum())
    starts = random.integers(0, weights[chosen].astype(int))
    return np.stack([long_enough[i][start : start + length] for i, start in zip(chosen, starts, strict=True)])


def continuations(
    model, base_params, prompts: np.ndarray, temperatures: np.ndarray, new_tokens: int, eos_ids, batch: int, seed: int
) -> Iterator[tuple[int, dict]]:
    """Decode every prompt and yield ``(index, {"prompt_ids", "output_ids", "temperature"})``, a record of the file.

    prompts:      int32 ``[count, length]``.
    temperatures: float ``[count]``; 0 decodes greedily. Prompts of one temperature are decoded together, ``batch`` at a
                  time, so the records come in the order of the temperatures and not of the prompts.
    """
    for temperature in np.unique(temperatures):
        rule = ExactSampling(float(temperature)) if temperature else Greedy()
        decode = make_autoregressive_fn(model, rule, max_new_tokens=new_tokens, eos_ids=eos_ids)
        indices = np.flatnonzero(temperatures == temperature)
        for start in range(0, len(indices), batch):
            chosen = indices[start : start + batch]
            filled = np.resize(chosen, batch)  # one compiled shape; the repeats are not used
            out = jax.device_get(
                decode(Params(base_params, {}), prompts[filled], rng=jax.random.fold_in(jax.random.key(seed), start))
            )
            for row, index in enumerate(chosen):
                output = out.tokens[row, : out.lengths[row]].tolist()
                record = {"prompt_ids": prompts[index].tolist(), "output_ids": output}
                yield int(index), record | {"temperature": float(temperature)}
