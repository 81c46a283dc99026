"""Choice of the next token from the logits of one position, with vLLM's parameters in vLLM's order.

Log probabilities come from the raw logits. Then: allowed tokens, bias, ban of stop tokens (`min_tokens`),
penalties, temperature, min_p, top_k, top_p. A choice depends on logits, parameters and position alone (one
Philox stream per seed and position): a request replayed elsewhere goes on as it would have. The
arithmetic stays finite: logits that are not, and parameters that leave no token, are `CannotSample`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetlb.tools.stage.stage_messages import LEAST_LOGPROB, Sampling

Logits = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]


class CannotSample(Exception):
    """There is no next token for these logits and parameters."""


def choose(
    logits: Logits, sampling: Sampling, output: Sequence[int], position: int
) -> tuple[int, list[tuple[int, float]] | None]:
    """Return the token, and (token, log probability) of it and the most likely ones if they are asked for.

    `logits` has shape (vocabulary,) and is not changed; `output` holds the tokens of the answer so far,
    without the tokens behind `sampling.history`; `position` is the last token's. Raises
    `CannotSample`.
    """
    if not np.isfinite(logits.max()):  # NaN if one of them is
        raise CannotSample("the model's output is not finite")
    scores = logits.astype(np.float64)
    if not sampling.plain:
        _adjust(scores, sampling, output, position)
    likely = int(np.argmax(scores))
    if scores[likely] == -np.inf:
        raise CannotSample("its parameters allow no token")
    token = likely if sampling.greedy else _draw(scores - scores[likely], sampling, position)
    return token, _log_probabilities(logits, token, sampling.logprobs)


def _ids(packed: bytes, vocabulary: int) -> npt.NDArray[np.int32]:
    """Return the token ids of a message. Raises `CannotSample`."""
    if len(packed) % 4:
        raise CannotSample("expected whole token ids")
    ids = np.frombuffer(packed, dtype="<i4")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
        raise CannotSample(f"expected token ids below {vocabulary}")
    return ids


def _adjust(scores: Scores, sampling: Sampling, output: Sequence[int], position: int) -> None:
    """Apply allowed tokens, bias, ban and penalties in place."""
    size = len(scores)
    if sampling.allowed:
        refused = np.ones(size, dtype=bool)
        refused[_ids(sampling.allowed, size)] = False
        scores[refused] = -np.inf
    biased, biases = _ids(sampling.bias_tokens, size), np.frombuffer(sampling.bias_values, dtype="<f4")
    if len(biases) != len(biased) or not np.isfinite(biases).all():
        raise CannotSample("expected a finite bias for each token")
    scores[biased] += biases
    if position + 1 - sampling.prompt_tokens < sampling.min_tokens:
        scores[_ids(sampling.stop, size)] = -np.inf
    if not sampling.penalises:
        return
    history = _ids(sampling.history, size)
    prompt = history[: sampling.prompt_tokens]
    answer = np.concatenate((history[sampling.prompt_tokens :], np.array(output, dtype=np.int32)))
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((prompt, answer)))
        old = scores[seen]
        scores[seen] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    tokens, counts = np.unique(answer, return_counts=True)
    scores[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _draw(scores: Scores, sampling: Sampling, position: int) -> int:
    """Return a token from softmax(scores / temperature), cut by min_p, top_k and top_p."""
    scores = scores / sampling.temperature
    kept = np.arange(len(scores))
    if sampling.min_p > 0.0:
        kept = kept[scores >= np.log(sampling.min_p)]
    if 0 < sampling.top_k < len(kept):
        kept = kept[np.argpartition(-scores[kept], sampling.top_k - 1)[: sampling.top_k]]
    chances = np.exp(scores[kept])
    chances /= chances.sum()
    if sampling.top_p < 1.0:
        order = np.argsort(-chances, kind="stable")
        before = np.cumsum(chances[order]) - chances[order]
        inside = order[before < sampling.top_p]
        kept, chances = kept[inside], chances[inside]
    # The same numbers for the same token whatever was cut: order by token.
    order = np.argsort(kept)
    kept, chances = kept[order], chances[order]
    rng = np.random.Generator(np.random.Philox(key=sampling.seed, counter=position))
    at = np.searchsorted(np.cumsum(chances), rng.random() * chances.sum(), side="right")
    return int(kept[min(int(at), len(kept) - 1)])


def _log_probabilities(logits: Logits, token: int, count: int) -> list[tuple[int, float]] | None:
    if count < 0:
        return None
    shifted = logits.astype(np.float64) - float(logits.max())
    total = float(np.log(np.exp(shifted).sum()))
    likely = np.argsort(-shifted, kind="stable")[:count].tolist()
    return [(each, max(LEAST_LOGPROB, float(shifted[each]) - total)) for each in (token, *likely)]
