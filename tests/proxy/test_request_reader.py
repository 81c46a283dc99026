"""Requests from bytes: wherever reads are cut, the same heads and bodies come out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.http.http1 import GateError, parse_request_head
from hetlb.balancer.http.request_reader import RequestReader

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\n"
BODIES = st.one_of(st.binary(max_size=40), st.integers(0, 20_000).map(lambda size: b"x" * size))


def sized(body: bytes) -> tuple[bytes, bytes]:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body), body


def chunked(body: bytes) -> tuple[bytes, bytes]:
    pieces = [body[at : at + 7000] for at in range(0, len(body), 7000)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n", chunks + b"0\r\n\r\n"


def found_in(reads: list[bytes]) -> list[tuple[bytes, bytes]]:
    """The heads and bodies of all requests, read as a connection does."""
    reader, head, found = RequestReader(), b"", []
    for data in reads:
        reader.feed(data)
        while True:
            if not head:
                head = reader.find_head()
                if not head:
                    break
                parsed, length = parse_request_head(head)
                reader.begin_body(length, parsed.chunked, 1 << 20)
            if reader.read_body():
                found.append((head, reader.body()))
                head = b""
            elif not reader.unread:
                break
    assert not reader.unread
    assert reader.held == 0
    return found


@given(st.lists(st.tuples(BODIES, st.booleans()), max_size=4), st.lists(st.integers(0, 90_000), max_size=12))
def test_wherever_reads_are_cut_the_requests_are_the_same(
    bodies: list[tuple[bytes, bool]], cuts: list[int]
) -> None:
    sent = [chunked(body) if in_chunks else sized(body) for body, in_chunks in bodies]
    whole = b"\r\n".join(head + body for head, body in sent)  # an empty line between two is ignored
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    expected = [(head, body) for (head, _), (body, _) in zip(sent, bodies, strict=True)]
    assert found_in([whole[start:end] for start, end in pairwise(places)]) == expected


def test_a_body_beyond_its_limit_is_refused_before_it_comes_or_as_it_comes() -> None:
    reader = RequestReader()
    with pytest.raises(GateError, match="larger than 10 bytes"):
        reader.begin_body(11, False, 10)
    reader.begin_body(None, True, 10)
    reader.feed(b"6\r\nabcdef\r\n")
    assert not reader.read_body()
    assert reader.held == 6
    reader.feed(b"6\r\nabcdef\r\n")
    with pytest.raises(GateError, match="too large"):
        reader.read_body()
