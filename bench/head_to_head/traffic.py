"""The loads: what is asked, when, and how its lengths stay unknown to the routers.

Rows, arrivals and lengths come from the seed alone: within a round every router gets the same plan. Prompts
are text and new in every run, so that no engine knows them from a run before.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleets import HERE
from peers import MODEL

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from generated_traffic import Lengths, shared_prompts

from hetlb.loadtest.bodies import COMPLETIONS, MadePrompts, Prompt
from hetlb.loadtest.runs import LoadSpec
from hetlb.workload.arrivals import PlannedRequest, Waves
from hetlb.workload.schedules import Load
from hetlb.workload.traces import Row, read_trace

#: One `max_tokens` for all, far above every answer.
MAX_TOKENS = 256
#: The id of the end of the text in the tokenizer of the tiny models of tests/vllm.
_END_OF_TEXT = 1
_TRACE = HERE.parents[1] / "hetlb" / "demo" / "trace.csv"


def chat_lengths(count: int, rng: random.Random) -> list[Row]:
    """ShareGPT's mix of lengths, scaled down: that of `hetlb demo`."""
    rows = read_trace(_TRACE)
    return [rows[i % len(rows)] for i in range(count)]


def agents(count: int, rng: random.Random) -> list[Row]:
    """Short questions after one of 24 system prompts of 240 tokens: more than a small cache holds."""
    return shared_prompts(
        count, rng, prompts=24, prefix_tokens=240,
        question=Lengths(32, 0.5, 8, 96), answer=Lengths(16, 0.5, 2, 43),
    )  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """One load: `load` is its rate as a share of what the engines reach alone, None is all at once.

    Waves have that rate on average over their `seconds`.
    """

    name: str
    title: str
    rows: Callable[[int, random.Random], list[Row]]
    load: float | None
    seconds: float = 10.0
    waves: Waves | None = None

    def rate_and_count(self, capacity_rps: float, at_once: int) -> tuple[float, int]:
        """Requests per second while they come, and how many."""
        if self.load is None:
            return math.inf, at_once
        mean = self.load * capacity_rps
        share_on = 1.0 if self.waves is None else self.waves.on_s / (self.waves.on_s + self.waves.off_s)
        return mean / share_on, round(mean * self.seconds)


TRAFFIC = {
    each.name: each
    for each in (
        Traffic("once", "all at once", chat_lengths, None),
        Traffic("80", "80 % load", chat_lengths, 0.8),
        Traffic(
            "waves",
            "waves: 1.5 s of traffic, 3 s of none, 60 % on average",
            chat_lengths,
            0.6,
            13.5,
            Waves(1.5, 3.0),
        ),
        Traffic("shared", "shared prompts, 80 % load", agents, 0.8),
        Traffic("half", "50 % load", chat_lengths, 0.5),
    )
}


class HiddenLengths:
    """`POST /v1/completions`, streamed, behind one `max_tokens`: no router reads how long an answer will be.

    An emulated engine is told in `vllm_xargs`; a real one by `min_tokens` and a bias towards the end.
    """

    def __init__(self, prompt: Prompt, *, real: bool) -> None:
        self._prompt = prompt
        self._real = real

    def path(self, planned: PlannedRequest) -> str:
        """`/v1/completions`."""
        return COMPLETIONS

    def streams(self, planned: PlannedRequest) -> bool:
        """True: every answer."""
        return True

    def headers(self, planned: PlannedRequest) -> Mapping[str, str]:
        """None."""
        return {}

    def body(self, planned: PlannedRequest) -> bytes:
        """The JSON of one request."""
        output = planned.answer_tokens
        document: dict[str, object] = {
            "model": MODEL,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        if self._real:
            document |= {"min_tokens": max(0, output - 1), "logit_bias": {str(_END_OF_TEXT): 100}}
        else:
            document["vllm_xargs"] = {"output_tokens": output}
        return b'%b,"prompt":%b}' % (json.dumps(document).encode()[:-1], self._prompt(planned))


@dataclass(frozen=True)
class Spec(LoadSpec):
    """Settings of one run; `real`: the engines are vLLM servers, not emulated."""

    real: bool = False

    def bodies(self, load: Load, label: str) -> HiddenLengths:  # type: ignore[override]
        """The requests of one run; `label` is its own."""
        return HiddenLengths(MadePrompts(load.rows, f"{self.salt}/{label}", text=True), real=self.real)
