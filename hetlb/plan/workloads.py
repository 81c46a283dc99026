"""Types of requests: stated, or clusters of a trace by prompt and answer length.

Clusters are found by k-means (k-means++ starts, Lloyd's steps) on the logarithms of both lengths, as a
request of twice the length is as different at 100 tokens as at 1,000.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2

from hetlb.workload.traces import read_trace

#: Requests of a type that a throughput is measured on.
SAMPLE = 200
_STARTS = 4
_STEPS = 50
#: Rows of a trace that a plan is made from; of more, every n-th is taken.
_MOST_ROWS = 20_000


def trace_rows(path: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of a trace's requests, at least 1 of each, evenly thinned out."""
    every = [(max(1, row.input_tokens), max(1, row.output_tokens)) for row in read_trace(path)]
    return every[:: max(1, math.ceil(len(every) / _MOST_ROWS))]


@dataclass(frozen=True)
class RequestType:
    """A type with the lengths of its requests: (prompt tokens, output tokens), as they come."""

    name: str
    model: str
    share: float
    rows: tuple[tuple[int, int], ...]

    @property
    def input_tokens(self) -> float:
        """Mean prompt tokens."""
        return sum(row[0] for row in self.rows) / len(self.rows)

    @property
    def output_tokens(self) -> float:
        """Mean output tokens."""
        return sum(row[1] for row in self.rows) / len(self.rows)

    @property
    def longest_tokens(self) -> int:
        """Prompt and output tokens of the longest request."""
        return max(prompt + output for prompt, output in self.rows)


@dataclass(frozen=True, slots=True)
class Clustering:
    """Types found in a trace, and how good they are.

    `explained`: share of the variance of the logarithms of both lengths that lies between the types (1: all
    requests of a type are alike). `prompt_error` and `output_error`: mean relative distance of a request's
    length from its type's mean.
    """

    types: tuple[RequestType, ...]
    explained: float
    prompt_error: float
    output_error: float


def cluster(rows: Sequence[tuple[int, int]], count: int, model: str, seed: int = 0) -> Clustering:
    """At most `count` types of the requests of a trace, largest share first."""
    assert rows, "expected at least one request"
    lengths = np.array([(max(1, i), max(1, o)) for i, o in rows], dtype=float)
    points = np.log(lengths)
    labels = _best_labels(points, min(count, len(np.unique(points, axis=0))), seed)
    types: list[RequestType] = []
    within = prompt_error = output_error = 0.0
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        own = lengths[members]
        within += float(((points[members] - points[members].mean(axis=0)) ** 2).sum())
        mean = own.mean(axis=0)
        errors = np.abs(own - mean).sum(axis=0) / mean
        prompt_error, output_error = prompt_error + float(errors[0]), output_error + float(errors[1])
        chosen = members[np.linspace(0, len(members) - 1, min(SAMPLE, len(members))).astype(int)]
        sample = tuple((int(lengths[i][0]), int(lengths[i][1])) for i in chosen)
        types.append(RequestType("", model, len(members) / len(rows), sample))
    types.sort(key=lambda each: -each.share)
    total = float(((points - points.mean(axis=0)) ** 2).sum())
    named = tuple(RequestType(f"w{n + 1}", each.model, each.share, each.rows) for n, each in enumerate(types))
    return Clustering(
        named,
        1.0 - within / total if total > 0 else 1.0,
        prompt_error / len(rows),
        output_error / len(rows),
    )


def _best_labels(points: NDArray[np.float64], count: int, seed: int) -> NDArray[np.int32]:
    """Labels of the tightest of several clusterings."""
    best, least = np.zeros(len(points), dtype=np.int32), math.inf
    for start in range(_STARTS):
        rng = np.random.default_rng((seed, start))
        with warnings.catch_warnings():  # of fewer clusters than were asked for
            warnings.filterwarnings("ignore", message=".*clusters is empty")
            centres, labels = kmeans2(points, count, iter=_STEPS, minit="++", seed=rng)
        spread = float(((points - centres[labels]) ** 2).sum())
        if spread < least:
            best, least = labels, spread
    return best
