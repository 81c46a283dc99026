"""The fault matrix itself: every row, what is promised there, and how much of it is run here.

`MATRIX.md` holds exactly this table (a test compares; `python tests/faults/matrix.py` prints
it), and every row has a case in this folder. Where only a part can be run, `reduced` says which and why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One fault: what the client sees, what the scheduler and the instance's state make of it."""

    fault: str
    client: str
    state: str
    #: What of it is not run as it stands, and why.
    reduced: str = ""


ROWS = {
    "U1": Row("refuses connections", "success elsewhere", "ejected at the first refusal"),
    "U2": Row(
        "answers no SYN",
        "success elsewhere after the connect timeout",
        "ejected; later requests do not wait",
        "the black hole is a listener whose backlog is full: the kernel drops the SYN, as a firewall does",
    ),
    "U3": Row("accepts, never answers", "504, not to be retried", "counts as load; in doubt after three"),
    "U4": Row(
        "closes or resets without an answer",
        "success at one other, else 502",
        "a failure; none where an idle connection had gone stale",
    ),
    "U5": Row("500", "success at one other, else the 500", "a failure, if another one answers"),
    "U6": Row(
        "400, 404, 413, 422", "success at another, else verbatim", "its kind of request goes elsewhere"
    ),
    "U7": Row(
        "429 or 503",
        "with Retry-After: another, two runs in all; without: verbatim",
        "ranked last for a while",
    ),
    "U8": Row(
        "junk, HTTP/0.9, half a head, 101",
        "success at one other, else 502",
        "a failure; the connection is not used again",
    ),
    "U9": Row("a head that drips, or is too large", "504, 502", "bounded"),
    "U10": Row("1xx before the answer", "the answer", "none"),
    "U11": Row(
        "dies in the middle of a stream", "what came, an error event, no end", "a failure; never run again"
    ),
    "U12": Row(
        "more or fewer bytes than its length says",
        "cut visibly, with `resume: ids` once more elsewhere; surplus dropped",
        "the connection goes",
    ),
    "U13": Row("a body without length is cut", "an error event, no end", "a failure"),
    "U14": Row(
        "bad chunks, trailers, two framings",
        "502 before the first byte, then an error event",
        "the connection goes",
    ),
    "U15": Row(
        "stalls in the middle of a stream",
        "an error event after the idle timeout",
        "a failure; its other streams go on",
    ),
    "U16": Row("huge chunks, tiny chunks, endless lines, a slow wire", "passes", "none"),
    "U17": Row("an error event", "passes unchanged", "counted as broken"),
    "U18": Row("an encoded body", "passes raw", "none"),
    "U19": Row("a redirect", "502", "never followed"),
    "K0": Row("none: read at one instance, answered by another", "the answer", "none"),
    "K1": Row(
        "KV blocks are not fetched before their lease ends",
        "the answer of one instance; never KV that may be another's",
        "none; what is held is on the ledger until it is fetched, released or expired",
    ),
    "K2": Row("the transfer fails before the first token", "the answer of one instance", "none"),
    "K3": Row("the decode instance refuses connections", "the answer of another", "ejected at once"),
    "K4": Row("the decode instance drops the request", "the answer of another", "a failure"),
    "K5": Row("the prefill instance gives nothing to fetch", "the answer of one instance", "counted"),
    "K6": Row(
        "the prefill instance refuses, drops, hangs or answers 500",
        "the answer of one instance",
        "a failure, as with a whole request",
    ),
    "K7": Row("the client leaves while its prompt is read or fetched", "", "both engines stop; no failure"),
    "W1": Row("the client of a WebSocket session leaves", "", "the engine's connection closes; no failure"),
    "W2": Row(
        "the engine of a session leaves, or says nothing",
        "its connection closes; after the idle timeout too",
        "a failure if it was reset",
    ),
    "W3": Row(
        "the engine refuses an upgrade; a 101 that answers no handshake", "its answer; 502", "none; a failure"
    ),
    "W4": Row(
        "the client of a session does not read", "cut after the write timeout", "the engine is held back"
    ),
    "M1": Row("/metrics is nonsense", "nothing", "discarded; the last good figure is kept; counted"),
    "M2": Row("/metrics hangs", "nothing", "one probe at a time; own ledger instead"),
    "M3": Row("/metrics says idle, falsely", "nothing", "own counts are a floor"),
    "M4": Row("/health flaps", "no error", "stays up; the ledger is exact"),
    "M5": Row(
        "green probes, failing answers; and the reverse",
        "at most five errors",
        "ejected, and not back by green probes alone",
    ),
    "M6": Row("/health times out while tokens flow", "nothing", "stays in"),
    "M7": Row(
        "comes back empty, or as another model",
        "nothing of the old model goes there",
        "a slow start; what it had cached is forgotten",
    ),
    "M8": Row("all restart together", "waits, then in order of arrival; 503 after the limit", "drains"),
    "M9": Row(
        "two names for one address; a new address", "no error", "refused with a line; a new incarnation"
    ),
    "C1": Row("leaves before the first byte", "", "the engine's connection closes; no failure"),
    "C2": Row("leaves in the middle of a stream", "", "two more chunks at most"),
    "C3": Row("closes its sending side", "taken for gone", "as C1 and C2"),
    "C4": Row("does not read", "cut after the write timeout", "no other client is affected"),
    "C5": Row(
        "slow heads, slow bodies, silence",
        "408, or closed",
        "the service goes on",
        "200 connections; that they are closed in time is checked, not how much each costs",
    ),
    "C6": Row(
        "idle connections beyond the limit",
        "the oldest is closed",
        "active ones are not",
        "300 connections at a limit of 120: descriptors of the test are few",
    ),
    "C7": Row(
        "Expect", "100 only where the body is wanted; else the answer, 417", "no body is read for a refusal"
    ),
    "C8": Row("pipelines", "in order, one at a time", "one in flight"),
    "J1": Row("no JSON object, no UTF-8", "400", "nothing is dispatched"),
    "J2": Row("depth without end", "400, 413", "nothing is dispatched"),
    "J3": Row(
        "numbers that are none", "400; of a repeated key the last, as vLLM reads it", "nothing unchecked"
    ),
    "J4": Row("limits that are absurd", "400", "never more than one instance has is booked"),
    "J5": Row("huge lists, huge names", "400, 404, or the engine's answer", "none"),
    "J6": Row("too large, encoded, or not as long as it says", "413, 415, 400", "closed"),
    "J7": Row("a stream though none was asked for, and the reverse", "by the answer's own type", "none"),
    "P1": Row("two lengths, odd lengths, odd encodings, odd chunks", "400, closed", "nothing is dispatched"),
    "P2": Row("trailers, bare LF, folded lines, NUL, too much", "400, 431, closed", "nothing is dispatched"),
    "P3": Row("no Host, two, a bad one", "400, closed", "the engine gets its own"),
    "P4": Row("absolute targets, CONNECT, *", "400, closed", "nothing is dispatched"),
    "P5": Row("paths that lead elsewhere", "404", "nothing is dispatched"),
    "P6": Row("names that forge headers and log lines", "made anew, or 400, 404", "escaped"),
    "P7": Row("hop-by-hop headers", "answered", "stripped; never the length"),
    "P8": Row("HTTP/1.0, TLS, HTTP/2", "a stream that ends by closing; 400", "none"),
    "O1": Row(
        "a fleet file that is wrong; a busy instance removed", "nothing", "the last good one stays; it drains"
    ),
    "O2": Row("reloads under load", "no error", "nothing is left of them", "20 here, 1000 in the soak"),
    "O3": Row(
        "SIGTERM, twice, SIGINT, SIGHUP, SIGPIPE, SIGUSR1",
        "what is in flight ends, or an error event",
        "exit status 0",
    ),
    "O4": Row("killed and started again", "visibly cut", "serves again at once; the engine stops working"),
    "O5": Row("no descriptors left", "established streams go on", "no instance is ejected"),
    "O6": Row(
        "no such name",
        "503",
        "no instance is ejected",
        "ENOBUFS and used-up ports are left out: they would harm the machine; O5 takes the same way",
    ),
    "O7": Row(
        "the wall clock jumps; the process is stopped",
        "no spurious 504",
        "no instance is ejected",
        "the jump needs libfaketime, and is skipped without it; stopped for 2 s",
    ),
    "O8": Row(
        "the disk is full; the log is not read",
        "nothing",
        "logging never blocks",
        "/dev/full stands for the disk",
    ),
    "O9": Row("names made up by clients", "404", "no new series"),
    "L1": Row("all down", "503 with Retry-After", "none"),
    "L2": Row(
        "more than the queue takes",
        "429 with Retry-After",
        "within its bounds, and over at once",
        "the bounds by count and bytes; goodput under overload is a bench",
    ),
    "L3": Row("fails at once", "at most five errors", "looks no less loaded for it"),
    "L4": Row("three in ten leave", "", "all zero afterwards", "200 here, ten minutes in the soak"),
    "L5": Row("the fastest of four dies", "nothing that had not begun is lost", "the others take over"),
    "L6": Row("clients that come again", "Retry-After is spread; all are served", "none"),
}


def table(cases: Iterable[tuple[str, str | None]]) -> list[str]:
    """The table as it stands in the docs, from (row, what is not done yet) of every case."""
    counts: dict[str, int] = {}
    missing: dict[str, dict[str, None]] = {}
    for row, known in cases:
        counts[row] = counts.get(row, 0) + 1
        if known:
            missing.setdefault(row, {})[known] = None
    lines = ["| row | fault | the client sees | the fleet's state | cases |", "|---|---|---|---|---|"]
    for name, row in ROWS.items():
        notes = [f"not yet: {text}" for text in missing.get(name, ())] + (
            [row.reduced] if row.reduced else []
        )
        state = "; ".join((row.state, *(f"*{note}*" for note in notes)))
        lines.append(f"| {name} | {row.fault} | {row.client} | {state} | {counts.get(name, 0)} |")
    return lines


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from faults.everything import CASES

    print("\n".join(table((each.row, each.known) for each in CASES)))
