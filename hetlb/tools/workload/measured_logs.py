"""Results of load tests and logs of real servers: each request's lengths, arrival and times.

A file with too little is one `TraceError` line naming what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.errors import TraceError
from hetlb.tools.workload.record_file import RecordFile, open_records, say
from hetlb.tools.workload.rows import UNSHARED, PromptContent, block_tokens, contents_of
from hetlb.tools.workload.trace_formats import BENCH, LOG_TITLES, Recognised, recognised, summary_of

#: Least requests of a log that say something.
LEAST_REQUESTS = 10


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request that ended well. Times in seconds; `queue_s` is None if the log does not say.

    `arrival_s` is when the server got it; `content` is known if the log is a trace.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    queue_s: float | None = None
    instance: str = ""
    content: PromptContent = UNSHARED

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 for answers of one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Log:
    """The requests of a log in order of arrival; `failed` did not end well; `setup` is an event log's own."""

    kind: str
    requests: tuple[LoggedRequest, ...]
    failed: int = 0
    setup: SchedulerSetup | None = None
    #: Requests of a warm-up, which are none of the load.
    warm_ups: int = 0


def read_log(path: Path) -> Log:
    """Read a log of any supported kind. Raises `TraceError`.

    What a file of another program was taken for goes to stderr.
    """
    file = open_records(path)
    if not file.begin:
        raise TraceError(f"{path}: expected the log of a server, got an empty file")
    found = recognised(file, log=True)
    if found is None or not found.reading.kind:
        raise TraceError(f"{path}: {_why_no_log(file, found)}")
    reading = found.reading
    requests = [
        LoggedRequest(
            row.arrival_s or 0.0,
            row.input_tokens,
            row.output_tokens,
            times.ttft_s,
            times.e2e_s,
            times.queue_s,
            times.instance,
        )
        for row, times in zip(reading.rows, reading.times, strict=True)
    ]
    if len(requests) < LEAST_REQUESTS:
        raise TraceError(
            f"{path}: {found.title}: expected at least {LEAST_REQUESTS} requests that ended well, "
            f"got {len(requests)}"
        )
    if all(each.ttft_s >= each.e2e_s for each in requests):
        raise TraceError(f"{path}: expected times to the first token, got whole answers only (not streamed)")
    order = sorted(range(len(requests)), key=lambda index: requests[index].arrival_s)
    first_s = requests[order[0]].arrival_s
    # The prompt of a conversation depends on the turns before.
    contents = [UNSHARED] * len(order)
    if reading.kind == "csv":
        contents = contents_of([reading.rows[index] for index in order], block_tokens(reading.rows))
    shifted = tuple(
        replace(requests[index], arrival_s=requests[index].arrival_s - first_s, content=content)
        for index, content in zip(order, contents, strict=True)
    )
    if reading.kind not in ("csv", "events"):
        left_out = "".join(f", {each} left out" for each in reading.left_out)
        say(
            path,
            f"read as {found.title}: {len(shifted):,} requests over {shifted[-1].arrival_s:,.0f} s{left_out}",
        )
    return Log(reading.kind, shifted, reading.failed, reading.setup, reading.warm_ups)


def _why_no_log(file: RecordFile, found: Recognised | None) -> str:
    """Return the kind of a file other than a log, and the supported kinds."""
    known = f"hetlb reads: {'; '.join(LOG_TITLES)}"
    if (summary := summary_of(file)) is not None:
        return summary
    if file.shape == "text" and ("Received request" in file.begin or "vllm" in file.begin[:4096].lower()):
        return (
            "expected token counts and first-token times, which a server's text log does not hold; "
            f"take the document of {BENCH}"
        )
    if found is not None:
        return f"expected measured requests, got {found.title} without ttft_s and e2e_s; {known}"
    return f"expected measured requests, got {file.described}; {known}"
