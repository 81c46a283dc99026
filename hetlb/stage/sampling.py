"""Choice of the next token from the logits of one position, with vLLM's parameters in vLLM's order.

Log probabilities are those of the raw logits. Then: bias, ban of stop tokens (`min_tokens`), penalties,
temperature, min_p, top_k, top_p. A choice depends on logits, parameters and position alone (one Philox stream
per seed and position): a request that is replayed elsewhere goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetlb.stage.messages import Sampling

Logits = npt.NDArray[np.float32]


def choose(
    logits: Logits, sampling: Sampling, output: Sequence[int], position: int
) -> tuple[int, list[tuple[int, float]] | None]:
    """The token, and (token, log probability) of it and the most likely ones where they are asked for.

    `logits` has shape (vocabulary,) and is not changed; `output` holds the tokens of the answer so far, of
    which those behind `sampling.history` are not part; `position` is that of the token before.
    """
    scores = logits.astype(np.float64)
    if not sampling.plain:
        _adjust(scores, sampling, output, position)
    if sampling.greedy:
        token = int(np.argmax(scores))
    else:
        token = _draw(scores / sampling.temperature, sampling, position)
    return token, _log_probabilities(logits, token, sampling.logprobs)


def _adjust(
    scores: npt.NDArray[np.float64], sampling: Sampling, output: Sequence[int], position: int
) -> None:
    """Apply bias, ban and penalties in place."""
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    if position + 1 - sampling.prompt_tokens < sampling.min_tokens:
        scores[list(sampling.stop)] = -np.inf
    if not sampling.penalises:
        return
    prompt = sampling.history[: sampling.prompt_tokens]
    answer = np.array([*sampling.history[sampling.prompt_tokens :], *output], dtype=np.int64)
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((np.array(prompt, dtype=np.int64), answer)))
        old = scores[seen]
        scores[seen] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    tokens, counts = np.unique(answer, return_counts=True)
    scores[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _draw(scores: npt.NDArray[np.float64], sampling: Sampling, position: int) -> int:
    """A token from softmax(scores), cut by min_p, top_k and top_p."""
    kept = np.arange(len(scores))
    if sampling.min_p > 0.0:
        kept = kept[scores >= scores.max() + np.log(sampling.min_p)]
    if 0 < sampling.top_k < len(kept):
        kept = kept[np.argpartition(-scores[kept], sampling.top_k - 1)[: sampling.top_k]]
    chances = np.exp(scores[kept] - scores[kept].max())
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
    return int(
        kept[
            np.searchsorted(np.cumsum(chances), rng.random() * chances.sum(), side="right").clip(
                max=len(kept) - 1
            )
        ]
    )


def _log_probabilities(logits: Logits, token: int, count: int) -> list[tuple[int, float]] | None:
    if count < 0:
        return None
    shifted = logits.astype(np.float64) - float(logits.max())
    total = float(np.log(np.exp(shifted).sum()))
    likely = np.argsort(-shifted, kind="stable")[:count].tolist()
    return [(each, float(shifted[each]) - total) for each in (token, *likely)]
