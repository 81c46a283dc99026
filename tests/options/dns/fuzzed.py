"""Answers of a name server, as a fuzzer and the tests of growth give them."""

from __future__ import annotations

import contextlib
import struct
from typing import Any, Literal

import dns.exception
import dns.message
from dns.nameserver import Nameserver
from fuzz.costs import Make, Reader

from hetlb.balancer.config.fleet_tables import DnsTable
from hetlb.balancer.fleet.source import SourceFailedError
from hetlb.options.dns.dns_names import DnsSource

_A, _SRV = 1, 33
_NAME = b"\x07engines\x04test\x00"
#: A pointer to the name of the question.
_OWNER = b"\xc0\x0c"


class _Answers(Nameserver):
    """A server that says the same bytes to each question, after the id of it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def query(self, request: Any, *args: Any, **more: Any) -> Any:
        answer = dns.message.from_wire(struct.pack("!H", request.id) + self._data)
        if not request.is_response(answer):
            raise dns.exception.FormError
        return answer

    def is_always_max_size(self) -> bool:
        return True

    def __str__(self) -> str:
        return "a name server"

    answer_nameserver = __str__

    def answer_port(self) -> int:
        return 53


def _ask(data: bytes, kind: Literal["A", "SRV"]) -> None:
    source = DnsSource(DnsTable(name="engines.test", type=kind, model="m", servers=("127.0.0.1",)))
    source._resolver.nameservers = [_Answers(data)]
    with contextlib.suppress(SourceFailedError):
        for found in source._ask()[0]:
            assert found.url.startswith("http://")


def addresses(data: bytes) -> None:
    """An answer to a question for addresses: servers, or an error that fails the source alone."""
    _ask(data, "A")


def services(data: bytes) -> None:
    """The same to a question for SRV records."""
    _ask(data, "SRV")


def dns_answer(data: bytes) -> None:
    """Both."""
    addresses(data)
    services(data)


def answer(kind: int, owner: bytes, value: bytes, name: bytes) -> Make:
    """An answer of as many such records; each has its number behind `value`, and `name` behind that."""

    def make(size: int) -> bytes:
        count = max(1, (size - 32) // (len(owner + value + name) + 12))
        records = (
            owner
            + struct.pack("!HHIH", kind, 1, 1, len(value + name) + 2)
            + value
            + struct.pack("!H", number)
            + name
            for number in range(1, count + 1)
        )
        head = struct.pack("!HHHHH", 0x8180, 1, count, 0, 0) + _NAME + struct.pack("!HH", kind, 1)
        return head + b"".join(records)

    return make


TARGETS = {"dns": dns_answer}
_LONG = b"".join(b"\x3f" + bytes([letter]) * 63 for letter in b"abc") + b"\x00"
_SERVICE = b"\x00\x00\x00\x01"
#: name -> (reader, input of a size, the smaller size). An answer has at most 64 KiB.
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "addresses of a name server": (addresses, answer(_A, _OWNER, b"\x7f\x00", b""), 31 << 10),
    "services of a name server": (services, answer(_SRV, _OWNER, _SERVICE, b"\x01h\x00"), 31 << 10),
    "long names of a name server": (services, answer(_SRV, _OWNER, _SERVICE, _LONG), 31 << 10),
    "names of a name server in full": (services, answer(_SRV, _NAME, _SERVICE, _OWNER), 31 << 10),
    # Each name begins at the one before it: refused after a few.
    "pointers of a name server": (services, answer(_SRV, _OWNER, _SERVICE, b"\xc0\x22"), 31 << 10),
}
