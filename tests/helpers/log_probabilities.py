"""Reference log-probabilities from a full pass of the base and NumPy."""

import numpy as np

from hydrajax.bench.uncached_forward import all_logits


def of_whole_text(model, base, prompt: list[int], output: list[int]) -> np.ndarray:
    """Return the log softmax at each output position in float64, ``[T, V]``."""
    text = np.array([*prompt, *output], np.int32)
    logits = all_logits(model, base, text).astype(np.float64)[len(prompt) - 1 : -1]
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def check_top(log_p: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
    """Check that tokens ``[T, k]`` are the likeliest; nearly equal ones can be in either order."""
    top = ids.shape[-1]
    np.testing.assert_allclose(logprobs, -np.sort(-log_p, axis=-1)[:, :top], atol=1e-4)
    np.testing.assert_allclose(logprobs, np.take_along_axis(log_p, ids, axis=-1), atol=1e-4)
    assert all(len(set(place)) == top for place in ids.tolist())


def check_answer(model, base, answer, top: int) -> None:
    """Return a `Generation` with this number of alternatives per token."""
    log_p = of_whole_text(model, base, answer.prompt_ids, answer.output_ids)
    assert len(answer.logprobs) == len(answer.top_logprobs) == answer.new_tokens
    np.testing.assert_allclose(answer.logprobs, log_p[np.arange(answer.new_tokens), answer.output_ids], atol=1e-4)
    found = np.array(answer.top_logprobs)
    assert found.shape == (answer.new_tokens, top, 2)
    check_top(log_p, found[..., 0].astype(int), found[..., 1])
