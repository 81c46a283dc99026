"""The loads: what is asked, when, and how its lengths stay unknown to the routers.

Rows, arrivals and lengths come from the seed alone: within a round every router gets the same plan. Prompts
are text and new in every run, so that no engine knows them from a run before.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from fleets import Fleet
from peers import MODEL, ROOT

from hetlb.tools.loadtest.bodies import RequestBodies
from hetlb.tools.loadtest.runs import LoadSpec
from hetlb.tools.workload.arrivals import PlannedRequest, Waves
from hetlb.tools.workload.rows import Row
from hetlb.tools.workload.trace_formats import read_trace

#: Traces by name: the file in bench/data.
LENGTHS = {
    "sharegpt": "sharegpt-first-turn.csv",
    "azure": "azure-conv-sample.csv",
    "mooncake": "mooncake-conversation-sample.csv",
}
#: Prompts of 128 tokens and answers of 64 on average, what small models on CPU can take.
_SHORT = (128, 64)
#: Kinds of requests that are made of a trace: behind one system prompt of this many tokens; embeddings of
#: documents, some prompts long, which keep the requests to as many as two cores can send.
SYSTEM_PROMPT, EMBEDDINGS = "system prompt", "embeddings"
_SYSTEM_TOKENS = 2048
_DOCUMENT_PROMPTS, _MOST_DOCUMENT_TOKENS = 8, 8192
#: Requests before the first load but the fresh one, at half load, not measured: what is learnt is learnt.
WARM_UP = 60
#: One `max_tokens` for all, above every answer: of small models, of the others.
_SHORT_LIMIT, _LIMIT = 256, 2048
#: The id of the end of the text in the tokenizer of the tiny models of tests/vllm.
_END_OF_TEXT = 1


@cache
def rows_of(lengths: str) -> list[Row]:
    """All rows of a trace, or of the short lengths."""
    if lengths in LENGTHS:
        return read_trace(ROOT / "bench" / "data" / LENGTHS[lengths])
    rng = random.Random(0)

    def drawn() -> Row:
        prompt, answer = (max(4, round(rng.gauss(mean, mean / 4))) for mean in _SHORT)
        return Row(None, prompt, answer)

    return [drawn() for _ in range(1000)]


@cache
def rows_for(lengths: str, kind: str = "") -> list[Row]:
    """Return all rows of a trace as a kind of request: behind one system prompt, or embeddings."""
    rows = rows_of(lengths)
    if kind == SYSTEM_PROMPT:
        names = (f"system={_SYSTEM_TOKENS}",)
        return [replace(r, input_tokens=_SYSTEM_TOKENS + r.input_tokens, hash_ids=names) for r in rows]
    if kind == EMBEDDINGS:
        return [
            replace(
                row,
                input_tokens=min(_MOST_DOCUMENT_TOKENS, _DOCUMENT_PROMPTS * row.input_tokens),
                output_tokens=0,
                endpoint=EMBEDDINGS,
            )
            for row in rows
        ]
    return rows


def some_rows(lengths: str, kind: str, count: int, rng: random.Random) -> list[Row]:
    """Return `count` rows: of conversations, rows that follow one another, else any."""
    rows = rows_for(lengths, kind)
    if kind:
        return rng.choices(rows, k=count)
    if not rows[0].hash_ids:
        return rng.choices(rows, k=count)
    first = rng.randrange(max(1, len(rows) - count))
    return rows[first : first + count]


@dataclass(frozen=True)
class Traffic:
    """One load: `load` is its rate as a share of what the engines reach while full, None is all at once.

    Waves have that rate on average. `fresh`: the router has just started and seen nothing. `kind`: what the
    requests of a fleet become, "" if they stay as they are.
    """

    name: str
    title: str
    load: float | None
    waves: Waves | None = None
    fresh: bool = False
    kind: str = ""

    def rate_and_count(self, fleet: Fleet, full_rps: float) -> tuple[float, int]:
        """Requests per second while they come, and how many."""
        if self.fresh or (fleet.real and self.load is None):
            return math.inf, 160
        if self.load is None:
            return math.inf, round(full_rps * fleet.seconds)
        mean = self.load * full_rps
        share_on = 1.0 if self.waves is None else self.waves.on_s / (self.waves.on_s + self.waves.off_s)
        return mean / share_on, round(mean * fleet.seconds)


TRAFFIC = {
    each.name: each
    for each in (
        Traffic("first", "the first burst: 160 at once", None, fresh=True),
        Traffic("80", "80 % load", 0.8),
        Traffic("once", "all at once", None),
        Traffic("95", "95 % load", 0.95),
        Traffic("waves", "waves: 4 s of traffic, 8 s of none, 60 % on average", 0.6, Waves(4.0, 8.0)),
        Traffic("50", "50 % load", 0.5),
        Traffic("system", "one system prompt of 2,048 tokens for all: 80 % load", 0.8, kind=SYSTEM_PROMPT),
        Traffic("embed", "embeddings: 80 % load", 0.8, kind=EMBEDDINGS),
    )
}


class HiddenLengths(RequestBodies):
    """`POST /v1/completions`, streamed, behind one `max_tokens`: no router reads how long an answer will be.

    An emulated engine is told in `vllm_xargs`; a real one by `min_tokens` and a bias towards the end.
    """

    def __init__(self, plan: Sequence[PlannedRequest], salt: str, *, real: bool) -> None:
        super().__init__(MODEL, plan, salt, text=True)
        self._limit, self._real = _SHORT_LIMIT if real else _LIMIT, real

    def body(self, planned: PlannedRequest) -> bytes:
        """The JSON of one request."""
        if not planned.generates:
            return super().body(planned)
        output = planned.answer_tokens
        document: dict[str, object] = {
            "model": MODEL,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": self._limit,
        }
        if self._real:
            document |= {"min_tokens": max(0, output - 1), "logit_bias": {str(_END_OF_TEXT): 100}}
        else:
            document["vllm_xargs"] = {"output_tokens": output}
        return b'%b,"prompt":%b}' % (json.dumps(document).encode()[:-1], self.prompt(planned))


@dataclass(frozen=True)
class Spec(LoadSpec):
    """Settings of one run; `real`: the engines are vLLM servers, not emulated."""

    real: bool = False

    def bodies(self, plan: Sequence[PlannedRequest], label: str) -> HiddenLengths:
        """The requests of one run; `label` is its own."""
        return HiddenLengths(plan, f"{self.salt}/{label}", real=self.real)
