"""Lines of a watch of Kubernetes and pages of a list, as a fuzzer and the tests of growth give them."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx2
import msgspec
from fuzz.costs import Make, Reader, many
from lightkube import ApiError
from lightkube.core import decoders

from hetlb.balancer.config.fleet_tables import KubernetesTable
from hetlb.balancer.fleet.source import Found
from hetlb.options.kubernetes.kubernetes import PODS, Item, servers_of

_TABLE = KubernetesTable(selector="app=vllm", port="http")
_REFUSED = (msgspec.MsgspecError, TypeError, ValueError, httpx2.HTTPError, RecursionError)


def _read(line: bytes) -> list[Found]:
    event = decoders.decode_watch_event(line.decode())
    if event.type == "ERROR":
        raise ApiError(status=decoders.decode_status(event.object))
    each: Any = decoders.decode_object(event.object, PODS)
    return servers_of(msgspec.convert(dict(each), Item), [8000], _TABLE)


def watch(data: bytes) -> None:
    """Lines of a watch: servers, or an error that fails the source alone."""
    for line in data.split(b"\n"):
        with contextlib.suppress(*_REFUSED):
            for found in _read(line):
                assert found.url.startswith("http://")


def line(before: bytes, unit: bytes, after: bytes) -> Make:
    return many(unit, b'{"type":"ADDED","object":{"metadata":' + before, after + b"}}")


TARGETS = {"watch": watch}
PREFIXES: tuple[tuple[Reader, bytes], ...] = ((watch, b'{"type":"ADDED","object":{"metadata":{"labels":{'),)
#: name -> (reader, input of a size, the smaller size).
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "a line of a watch": (watch, line(b'{"name":"', b"x", b'"}'), 256 << 10),
    "quotes in a line of a watch": (watch, line(b'{"name":"', b'\\\\"', b'"}'), 128 << 10),
    "labels of a line of a watch": (watch, line(b'{"labels":{', b'"a":"",', b'"a":""}}'), 64 << 10),
    "lists in a line of a watch": (watch, line(b'{"x":[', b"[],", b"1]}"), 64 << 10),
    "blanks in a line of a watch": (watch, line(b"", b" ", b"{}"), 256 << 10),
    "short lines of a watch": (watch, many(b"{}\n"), 16 << 10),
}  # fmt: skip
