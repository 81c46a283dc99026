"""Host time of an idle server from a few lone requests: which to send, and how to read their times.

Tables of kernels leave out what the host adds to every iteration and to every request. One sequence decoding
alone shows the first: its step against the model's. The first tokens of short prompts show the second. A
server may also be faster than its tables: then its decode steps are.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Final

from hetlb.balancer.core.latency import LatencyModel, corrected

#: Prompt tokens of every request, output tokens of one with timed steps.
PROMPT_TOKENS: Final = 32
_OUTPUT_TOKENS: Final = 200
#: Timed requests, while they fit the time; the least step counts, as nothing makes one shorter.
_REQUESTS: Final = 3
#: Lone short prompts with timed first tokens.
_FIRST_TOKENS: Final = 5
#: Seconds of the whole probe.
BUDGET_S: Final = 10.0
#: Least relative error of the tables' step times that counts: the tables are no better.
_FASTER_SHARE: Final = 0.03


class HostProbe:
    """Requests that show the host time of a server; `longest` is its context limit."""

    def __init__(self, latency: LatencyModel, longest: int | None) -> None:
        self._latency = latency
        room = (longest or 1 << 20) - PROMPT_TOKENS
        self._output = max(2, min(_OUTPUT_TOKENS, room))
        self._sent = 0
        self._spent_s = 0.0
        self._over = False
        self._steps: list[float] = []
        self._firsts: list[float] = []

    def next_tokens(self) -> int:
        """Return the output tokens of the next request, 0 after the last one."""
        if not self._over and self._sent <= _REQUESTS:
            return self._output
        return 1 if len(self._firsts) < _FIRST_TOKENS else 0

    def answered(self, first_s: float, step_s: float | None, seconds: float) -> None:
        """Take in times of an answer: to its first token, of a later step (None: no such step), in all."""
        self._spent_s += seconds
        if self.next_tokens() == 1:
            self._firsts.append(first_s)
            return
        if step_s is not None and self._sent:  # the first warms up
            self._steps.append(step_s)
            self._over = self._spent_s + seconds > BUDGET_S
        self._sent += 1

    def found(self) -> LatencyModel:
        """Return the latency model with the host time that was measured in place of the assumed one."""
        return with_host_time(
            self._latency, PROMPT_TOKENS, self._output, min(self._steps), median(self._firsts)
        )


def with_host_time(
    latency: LatencyModel, prompt_tokens: float, output_tokens: float, step_s: float, first_s: float
) -> LatencyModel:
    """Return a latency model with the host time of a server in place of the assumed one.

    `step_s` is the mean of its steps over such a lone answer, `first_s` the time to the first token. One
    sequence does not show what each of many adds: that stays as it is assumed, or less if the host does not
    even take so long for one.
    """
    tables = replace(latency, host_s=0.0, host_sequence_s=0.0, request_s=0.0)
    table_s = tables.step_s(1.0, prompt_tokens + output_tokens / 2.0)
    added_s = step_s - table_s
    if added_s < -_FASTER_SHARE * table_s:
        tables = corrected(tables, host_s=added_s)
    added_s = max(0.0, added_s)
    assumed_s = latency.host_s + latency.host_sequence_s
    sequence_s = latency.host_sequence_s * min(1.0, added_s / assumed_s) if assumed_s > 0.0 else 0.0
    request_s = first_s - tables.prefill_s(prompt_tokens) - added_s
    return replace(
        tables,
        host_s=added_s - sequence_s,
        host_sequence_s=sequence_s,
        request_s=max(0.0, request_s),
    )
