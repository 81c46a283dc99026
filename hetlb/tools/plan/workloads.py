"""Types of requests: stated, or clusters of a trace by prompt and answer length.

Clusters are found by k-means (k-means++ starts, Lloyd's steps) on the logarithms of both lengths, as a
request of twice the length is as different at 100 tokens as at 1,000.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import scipy
from numpy.typing import NDArray

from hetlb.tools.workload.trace_formats import read_trace

#: Requests of a type that a throughput is measured on.
SAMPLE_REQUESTS = 200
_STARTS = 4
_STEPS = 50
#: Rows of a trace that a plan is made from; of more, every n-th is taken.
_MOST_ROWS = 20_000


def trace_rows(path: Path) -> list[tuple[int, int]]:
    """Return the prompt and output tokens of a trace's requests, at least 1 of each, evenly thinned out."""
    every = [(row.input_tokens, max(1, row.output_tokens)) for row in read_trace(path)]
    return every[:: max(1, math.ceil(len(every) / _MOST_ROWS))]


@dataclass(frozen=True)
class RequestType:
    """A type of request: its share among the requests of all models, and sample lengths in trace order.

    `rows`: (prompt tokens, output tokens), at least one where lengths are needed.
    """

    name: str
    model: str
    share: float
    rows: tuple[tuple[int, int], ...] = ()

    @property
    def input_tokens(self) -> float:
        return sum(row[0] for row in self.rows) / len(self.rows)

    @property
    def output_tokens(self) -> float:
        return sum(row[1] for row in self.rows) / len(self.rows)

    @property
    def longest_tokens(self) -> int:
        return max(prompt + output for prompt, output in self.rows)


@dataclass(frozen=True, slots=True)
class Clustering:
    """Types found in a trace, and the quality of the division.

    `explained`: share of the variance of the logarithms of both lengths that lies between the types. Errors
    are mean relative distances of a request's length from its type's mean.
    """

    types: tuple[RequestType, ...]
    explained: float
    input_error: float
    output_error: float


def cluster(rows: Sequence[tuple[int, int]], count: int, model: str, seed: int = 0) -> Clustering:
    """Return at most `count` types of the requests of a trace, the largest share first."""
    lengths = np.array(rows, dtype=float)
    points = np.log(lengths)
    labels = _best_labels(points, min(count, len(np.unique(points, axis=0))), seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    types = []
    means, centres = np.zeros_like(lengths), np.zeros_like(points)
    for own in members:
        means[own], centres[own] = lengths[own].mean(axis=0), points[own].mean(axis=0)
        chosen = own[np.linspace(0, len(own) - 1, min(SAMPLE_REQUESTS, len(own))).astype(int)]
        sample = tuple((int(lengths[i][0]), int(lengths[i][1])) for i in chosen)
        types.append(RequestType("", model, len(own) / len(rows), sample))
    types.sort(key=lambda each: -each.share)
    named = tuple(replace(each, name=f"w{n + 1}") for n, each in enumerate(types))
    errors = (np.abs(lengths - means) / means).mean(axis=0)
    within, total = (float(((points - of) ** 2).sum()) for of in (centres, points.mean(axis=0)))
    explained = 1.0 - within / total if total > 0 else 1.0
    return Clustering(named, explained, float(errors[0]), float(errors[1]))


def _best_labels(points: NDArray[np.float64], count: int, seed: int) -> NDArray[np.int32]:
    """Return the labels of the tightest of several clusterings."""
    best, least = np.zeros(len(points), dtype=np.int32), math.inf
    for start in range(_STARTS):
        rng = np.random.default_rng((seed, start))
        with warnings.catch_warnings():  # of fewer clusters than were asked for
            warnings.filterwarnings("ignore", message=".*clusters is empty")
            centres, labels = scipy.cluster.vq.kmeans2(points, count, iter=_STEPS, minit="++", seed=rng)
        spread = float(((points - centres[labels]) ** 2).sum())
        if spread < least:
            best, least = labels, spread
    return best
