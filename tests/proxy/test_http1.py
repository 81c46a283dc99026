"""The gate: what is ambiguous is rejected, in both directions, and framing is exact at every byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.http.http1 import (
    MAX_HEAD_BYTES,
    MAX_KNOWN_HEAD_BYTES,
    MAX_KNOWN_HEADS,
    ChunkedDecoder,
    GateError,
    KnownHeads,
    head_end,
    parse_request_head,
    parse_response_head,
)


def head(*lines: str | bytes, first: str = "POST /v1/completions HTTP/1.1", host: str | None = "h") -> bytes:
    raw = [first.encode("latin-1")] + ([b"Host: " + host.encode("latin-1")] if host is not None else [])
    raw += [line if isinstance(line, bytes) else line.encode("latin-1") for line in lines]
    return b"\r\n".join(raw) + b"\r\n\r\n"


ACCEPTED = [
    head(),
    head("Content-Length: 0"),
    head("Content-Length: 17"),
    head("content-length:5"),
    head("Content-Length: \t5"),
    head("Transfer-Encoding: chunked"),
    head("Transfer-Encoding: CHUNKED"),
    head("X:"),
    head('X: a: b, c="d"'),
    head(host="h:1"),
    head(host="h:65535"),
    head(host="127.0.0.1:80"),
    head(host="[::1]:80"),
    head(host="a-b.c_d"),
    head(first="GET /v1/models?x=%00//../ HTTP/1.1"),
    head(first="GET / HTTP/1.0"),
    head(first="GET / HTTP/1.0", host=None),
    head("Upgrade: websocket", "Connection: Upgrade"),
    head(*(f"x-{i}: y" for i in range(62))),
    head("X: " + "y" * 16000),
]

REJECTED: list[tuple[int, bytes]] = [
    # P1: lengths
    (400, head("Content-Length: 5", "Transfer-Encoding: chunked")),
    (400, head("Transfer-Encoding: chunked", "Content-Length: 5")),
    *((400, head("Content-Length: 5", f"Content-Length: {n}")) for n in ("5", "6", "")),
    *(
        (400, head(f"Content-Length: {value}"))
        for value in (
            "5, 5", "5,5", "5 5", "+5", "-5", "0x5", "5_0", "", " ", "05", "00", "010", "5.0", "1e3", "five",
            "5;", "5 ", "99999999999999999999", "18446744073709551617", "\xb2", "5\x0b", "\x0c5", "5\x00",
        )
    ),
    # P1: encodings
    *(
        (400, head(f"Transfer-Encoding: {value}"))
        for value in (
            ",chunked", "chunked,", "chunked, chunked", "gzip, chunked", "chunked, gzip", "gzip", "identity",
            "chunked, identity", "xchunked", "chunkedx", "chunk", '"chunked"', "chunked;q=1", "chunked\x0b",
            "\x0bchunked", "chunked\x00", "cow", "", "chun ked", "\xa0chunked",
        )
    ),
    (400, head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked")),
    (400, head("Transfer-Encoding: chunked", "Transfer-Encoding: identity")),
    (400, head("Transfer-Encoding : chunked")),
    (400, head("Transfer-Encoding\t: chunked")),
    (400, head(" Transfer-Encoding: chunked")),
    (400, head("Transfer-Encoding:", " chunked")),
    (400, head("X: y\n Transfer-Encoding: chunked")),
    (400, head("Transfer-Encoding: chunked", first="POST / HTTP/1.0")),
    # P2: bytes
    *(
        (400, head(line))
        for line in (
            "X : y", "X\t: y", ": y", "X", "X y", "X: a\rb", "X: a\nb", "X: a\x00b", "X: a\x01b", "X: a\x7fb",
            "X: a\x1bb", "X\x00: y", "X\xff: y", "X: \xff", "X: a", "(x): y", "x@: y", "x,y: z", "x/y: z",
        )
        if line != "X: a"
    ),
    (400, head("X: a", " folded")),
    (400, head("X: a", "\tfolded")),
    (400, head().replace(b"\r\n", b"\n")),
    (400, head("X: y").replace(b"X: y\r\n", b"X: y\n")),
    (400, head("X: y").replace(b"X: y\r\n", b"X: y\r")),
    (400, head("X: y").replace(b"X: y\r\n", b"X: y\r\r\n")),
    # P3: hosts
    (400, head(host=None)),
    (400, head("Host: h")),
    (400, head("Host: other")),
    (400, head("hOsT: other")),
    *(
        (400, head(host=value))
        for value in (
            "", " ", "a b", "a@b", "x/v1/models?", "localhost/v1/models?", "a,b", "a:b", "a:", ":80",
            "a:80:80",
            "a:999999", "a:65536", "http://a", "[::1", "::1", "a#b", "a?b", "a\\b", "a%00", "\xe9", "a\tb",
        )
    ),
    # P4: targets
    *(
        (400, head(first=f"{line} HTTP/1.1"))
        for line in (
            "GET http://a/v1/models", "GET http://a:80@evil/v", "GET a:80", "CONNECT a:80", "OPTIONS *",
            "GET *",
            "GET v1/models", "GET ?x", "GET", "GET ", "GET  /", "GET /  ", "GET / x", "GET /\ta",
            "GET /a\x7f",
            "GET /\xe9", "GET /\x00", " GET /", "get /", "G@T /", "GE\x00T /",
        )
    ),
    # P5: paths
    *(
        (404, head(first=f"GET {path} HTTP/1.1"))
        for path in (
            "/v1/../admin", "/..", "/.", "/./v1", "/v1/.", "/%2e%2e/a", "/%2E/a", "/v1%2fmodels",
            "//v1/models",
            "/v1//models", "/v1\\models", "/v1/models;x", "/%00", "/%61dmin", "/v1/models#a", "/v1/%6dodels",
            "/v1/models%", "/a/../../b",
        )
    ),
    # P8: versions
    *(
        (400, head(first=f"GET / {version}"))
        for version in (
            "HTTP/2.0", "HTTP/0.9", "HTTP/1.2", "HTTP/1", "HTTP/11", "HTTP/1.10", "HTTP/01.1", "http/1.1",
            "HTTP/1.1 ", "HTTP /1.1", "HTTP/-1.1", "HTTPS/1.1", "ICY/1.1", "",
        )
    ),
    (400, b"PRI * HTTP/2.0\r\n\r\n"),
    # methods that nothing here answers
    *((405, head(first=f"{method} / HTTP/1.1")) for method in ("TRACE", "PROPFIND", "LOCK", "M-SEARCH")
      if method != "M-SEARCH"),
    # sizes
    (431, head(*(f"x-{i}: y" for i in range(64)))),
    (431, head("X: " + "y" * 16400)),
    (431, head(first="GET /" + "y" * 16400 + " HTTP/1.1")),
]  # fmt: skip


def test_the_corpus_is_large_enough() -> None:
    assert len(ACCEPTED) + len(REJECTED) >= 120


@pytest.mark.parametrize("raw", ACCEPTED, ids=lambda raw: repr(raw[:60]))
def test_accepted(raw: bytes) -> None:
    assert head_end(raw) == len(raw)
    parse_request_head(raw)


@pytest.mark.parametrize(
    ("status", "raw"), REJECTED, ids=lambda v: repr(v[:70]) if isinstance(v, bytes) else v
)
def test_rejected(status: int, raw: bytes) -> None:
    with pytest.raises(GateError) as caught:
        parse_request_head(raw)
    assert caught.value.status == status, caught.value.message


def test_a_head_is_whole_only_with_its_last_byte() -> None:
    raw = head("X: y")
    assert [head_end(raw[:n]) for n in range(len(raw))] == [0] * len(raw)
    assert head_end(raw + b"body") == len(raw)
    with pytest.raises(GateError) as caught:
        head_end(b"x" * (MAX_HEAD_BYTES + 1))
    assert caught.value.status == 431


@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [("1.1", None, True), ("1.1", "close", False), ("1.1", "Foo, CLOSE", False), ("1.1", "keep-alive", True),
     ("1.0", None, False), ("1.0", "Keep-Alive", True), ("1.0", "close", False)],
)  # fmt: skip
def test_keep_alive(version: str, connection: str | None, kept: bool) -> None:
    lines = [] if connection is None else [f"Connection: {connection}"]
    assert parse_request_head(head(*lines, first=f"GET / HTTP/{version}"))[0].keep_alive is kept


def answer(*lines: str, first: str = "HTTP/1.1 200 OK") -> bytes:
    return "\r\n".join([first, *lines, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    "raw",
    [
        answer("Content-Length: 3", "Transfer-Encoding: chunked"),
        answer("Content-Length: 3", "Content-Length: 3"),
        answer("Content-Length: 3", "Content-Length: 4"),
        answer("Content-Length: 3, 3"),
        answer("Content-Length: +3"),
        answer("Content-Length: 03"),
        answer("Content-Length: -1"),
        answer("Transfer-Encoding: gzip, chunked"),
        answer("Transfer-Encoding: ,chunked"),
        answer("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        answer("Transfer-Encoding: chunked", first="HTTP/1.0 200 OK"),
        answer(first="HTTP/2.0 200 OK"),
        answer(first="HTTP/1.1 99 Low"),
        answer(first="HTTP/1.1 999 High"),
        answer(first="HTTP/1.1 2x0 OK"),
        answer(first="ICY 200 OK"),
        answer(first="+OK"),
        answer(first="HTTP/1.1"),
        answer("X : y"),
        answer("X: a\x00b"),
        answer("X: a", " folded"),
        answer(*(f"x-{i}: y" for i in range(70))),
        answer().replace(b"\r\n", b"\n") + b"\r\n\r\n",
    ],
    ids=lambda raw: repr(raw[:60]),
)
def test_ambiguous_answers_are_a_502(raw: bytes) -> None:
    with pytest.raises(GateError) as caught:
        parse_response_head(raw, b"POST")
    assert caught.value.status == 502


def test_framing_of_answers() -> None:
    assert parse_response_head(answer("Content-Length: 3"), b"POST")[1] == 3
    assert parse_response_head(answer("Content-Length: 3"), b"HEAD")[1] == 0
    assert parse_response_head(answer(first="HTTP/1.1 204 No Content"), b"POST")[1] == 0
    assert parse_response_head(answer("Transfer-Encoding: chunked"), b"POST")[0].chunked
    bare, length = parse_response_head(answer(), b"POST")
    assert (length, bare.chunked, bare.keep_alive) == (None, False, True)
    assert not parse_response_head(answer("Connection: Close"), b"POST")[0].keep_alive
    assert not parse_response_head(answer(first="HTTP/1.0 200 OK"), b"POST")[0].keep_alive


CHUNKED = b"5\r\nhello\r\n1\r\n \r\nA\r\n0123456789\r\n0\r\n\r\n"


def test_chunks_cut_at_every_pair_of_places() -> None:
    for first in range(len(CHUNKED)):
        for second in range(first, len(CHUNKED)):
            decoder = ChunkedDecoder()
            pieces = [CHUNKED[:first], CHUNKED[first:second], CHUNKED[second:] + b"surplus"]
            assert b"".join(map(decoder.feed, pieces)) == b"hello 0123456789"
            assert decoder.done
            assert decoder.surplus == b"surplus"


@pytest.mark.parametrize(
    "raw",
    [b"5;a=b\r\nhello\r\n", b"5 \r\nhello\r\n", b" 5\r\nhello\r\n", b"+5\r\nhello\r\n", b"0x5\r\nhello\r\n",
     b"5\nhello\r\n", b"5\r\nhello\n", b"5\r\nhelloo\r\n", b"5\r\nhell\r\n\r\n", b"\r\n", b"g\r\n", b"-1\r\n",
     b"fffffffffffffffff\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\n\n",
     b"5\r\nhello\r\n;\r\n", b"5_0\r\n", b"5\r\r\nhello\r\n", b"1" * 64],
)  # fmt: skip
def test_bad_chunks_are_rejected_however_they_are_cut(raw: bytes) -> None:
    with pytest.raises(GateError):
        ChunkedDecoder().feed(raw)
    decoder = ChunkedDecoder()
    with pytest.raises(GateError):  # noqa: PT012 - which byte gives it away differs
        for byte in raw:
            decoder.feed(bytes([byte]))


def test_many_one_byte_chunks_are_linear() -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n") == b"x" * 100_000
    assert decoder.done


def test_a_known_head_is_found_with_the_length_of_the_new_one() -> None:
    heads = KnownHeads(parse_request_head)
    first, length = heads.find(head("Content-Length: 5"))
    assert length == 5
    again, length = heads.find(head("Content-Length: 1234"))
    assert (again is first, length) == (True, 1234)
    other, length = heads.find(head())
    assert length is None
    assert heads.find(head())[0] is other
    assert heads.find(head("content-length: 1234"))[0] is not first


#: Values of a length: what is right once must not let pass what is wrong.
LENGTHS = [
    "5",
    "0",
    "12",
    "",
    "05",
    "+5",
    "5 ",
    " 5",
    "5,5",
    "0x5",
    "1_0",
    "-1",
    "9" * 15,
    "9" * 16,
    "9" * 17,
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Content-Length: ", "content-length: ", "Content-Length:", "X-Length: "]),
            st.sampled_from(LENGTHS),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_known_heads_say_what_parsing_each_says(asked: list[tuple[str, str, bool]]) -> None:
    heads = KnownHeads(parse_request_head)
    for name, value, twice in asked:
        raw = head(f"{name}{value}", *(["Content-Length: 7"] if twice else []))
        try:
            expected: Any = parse_request_head(raw)
        except GateError as error:
            with pytest.raises(GateError) as refused:
                heads.find(raw)
            assert refused.value.status == error.status  # noqa: PT017 - both have to raise
            continue
        found, length = heads.find(raw)
        assert (found.chunked, length) == (expected[0].chunked, expected[1])


def test_an_answer_without_a_body_is_known_as_such() -> None:
    heads = KnownHeads(lambda raw: parse_response_head(raw, b"POST"))
    for length in ("0", "5", "0", "7"):
        assert heads.find(answer(f"Content-Length: {length}", first="HTTP/1.1 204 No Content"))[1] == 0
    for length in (5, 0, 7, 5):
        assert heads.find(answer(f"Content-Length: {length}"))[1] == length


def test_known_heads_are_forgotten_when_they_are_too_many() -> None:
    heads = KnownHeads(parse_request_head)
    for number in range(3 * MAX_KNOWN_HEADS):
        heads.find(head(f"X-Request-Id: {number}"))
        assert len(heads._whole) <= MAX_KNOWN_HEADS
    heads.find(head("X-Long: " + "x" * MAX_KNOWN_HEAD_BYTES))
    assert all(len(raw) <= MAX_KNOWN_HEAD_BYTES for raw in heads._whole)
