"""What every proxy goes through in a round.

The same work for all, in the same order; a figure's name says what it is of. Streams of the paced
scenarios begin before their window and end after it, so that a chunk's cost is a chunk's alone; a coalesced
stream's is what is left after the cost of a plain request from the same round.
"""

from __future__ import annotations

from typing import Any

#: Events of a coalesced stream; the role and the finishing event come on top.
COALESCED_CHUNKS = 64
COALESCED_EVENTS = COALESCED_CHUNKS + 2
STREAMS = (1, 32, 512)
#: The two that the goal is stated in: measured several times in each round.
HEADLINES = ("plain@32", "paced5@32")


def paced(streams: int, pace_ms: int, window_s: float) -> dict[str, Any]:
    """Streams of an event every `pace_ms`, long enough for all to begin, the window, and what comes late."""
    ramp_s = 0.3 + streams / 400
    return {
        "mode": "paced",
        "connections": streams,
        "pace_us": pace_ms * 1000,
        "window_s": window_s,
        "chunks": int((ramp_s + window_s + 0.3) * 1000 / pace_ms),
    }


def scenarios(requests: int, window_s: float, slow: bool = False) -> dict[str, dict[str, Any]]:
    """The loads by name, in the order in which they run.

    `requests` plain ones at 32 and 512 connections, fewer at one, where each waits for the last. The 512
    paced streams come first of all that is wide: what they add to memory is theirs. 512 streams at 5 ms are
    left out: 102,000 events a second are more than the generator can make and check on one core. A slow proxy
    (tens of milliseconds a request) gets a fiftieth of the requests and at most 32 streams.
    """
    count = max(200, requests // 50) if slow else requests
    found = {"plain@1": _plain(1, max(200, count // 5)), "paced20@512": paced(512, 20, window_s)}
    for streams in STREAMS:
        if streams > 1:
            found[f"plain@{streams}"] = _plain(streams, count)
        found[f"coalesced@{streams}"] = {
            "mode": "coalesced",
            "connections": streams,
            "chunks": COALESCED_CHUNKS,
            "requests": max(2 * streams, 100, count // (100 if streams == 1 else 20)),
            "warmup": max(50, streams),
        }
        for pace_ms in (5, 20):
            if streams < 512:
                found[f"paced{pace_ms}@{streams}"] = paced(streams, pace_ms, window_s)
    return {name: load for name, load in found.items() if not (slow and name.endswith("@512"))}


def half_load(requests_per_s: float, window_s: float) -> dict[str, Any]:
    """Plain requests at random times, half as many a second as the proxy took in a closed loop."""
    rate = requests_per_s / 2
    count = max(100, int(rate * window_s))
    return {
        "mode": "plain",
        "connections": 64,
        "rate": rate,
        "requests": count,
        "warmup": count // 10,
    }


def _plain(connections: int, requests: int) -> dict[str, Any]:
    return {
        "mode": "plain",
        "connections": connections,
        "requests": requests,
        "warmup": max(2 * connections, requests // 10),
    }
