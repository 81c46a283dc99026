"""What the gate says when it refuses, where its limits lie to the byte, and what it reads of the rest."""

from __future__ import annotations

import pytest

from hetlb.balancer.http import http1
from hetlb.balancer.http.http1 import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_KNOWN_HEAD_BYTES,
    MAX_LINE_BYTES,
    ChunkedDecoder,
    GateError,
    KnownHeads,
    RequestHead,
    ResponseHead,
    head_end,
    parse_request_head,
    parse_response_head,
)


def asked(*lines: bytes, first: bytes = b"POST /v1/completions HTTP/1.1", host: bytes = b"Host: h") -> bytes:
    """A request head of these header lines."""
    return b"\r\n".join([first, *([host] if host else []), *lines]) + b"\r\n\r\n"


def answered(*lines: bytes, first: bytes = b"HTTP/1.1 200 OK") -> bytes:
    """A response head of these header lines."""
    return b"\r\n".join([first, *lines]) + b"\r\n\r\n"


def refusal(head: bytes) -> tuple[int, str]:
    """Status and sentence with which a request head is refused."""
    with pytest.raises(GateError) as caught:
        parse_request_head(head)
    assert str(caught.value) == caught.value.message
    return caught.value.status, caught.value.message


LINE_END = "The head has a line that does not end in CR LF."
FOLDED = "Folded header lines are not accepted."
MALFORMED = "The request head is malformed."
REQUEST_LINE = "The request line must be METHOD PATH HTTP/1.1 (or HTTP/1.0)."
TARGET = "The request target must be a path."
NOT_ASCII = "The head has bytes that are not ASCII, or in a value neither UTF-8 nor Latin-1."
NOTHING = "There is nothing at this path."
HOST = "Exactly one valid Host header is expected."
LENGTH = "Exactly one valid Content-Length header is expected."
ENCODING = "The only Transfer-Encoding accepted is chunked, in HTTP/1.1."
ENCODED = "Encoded request bodies are not accepted."
METHOD = "This method is not supported."

REFUSED = {
    "a bare line feed": (asked(b"X: a\nY: b"), 400, LINE_END),
    "a bare carriage return": (asked(b"X: a\rY: b"), 400, LINE_END),
    "folded by a blank": (asked(b"X: a\r\n b"), 400, FOLDED),
    "folded by a tab": (asked(b"X: a\r\n\tb"), 400, FOLDED),
    "a NUL": (asked(b"X: a\0b"), 400, "The head has a NUL byte."),
    "no request line": (asked(first=b"POST  /v1 HTTP/1.1"), 400, REQUEST_LINE),
    "a name that is not ASCII": (
        asked("X\u00e9: a".encode()), 400, NOT_ASCII,
    ),
    "a name that is not UTF-8": (asked(b"X\xe9: a"), 400, NOT_ASCII),
    "a value with a control character": (asked(b"X: \x85"), 400, NOT_ASCII),
    "a value of binary data": (asked(b"X: \xff"), 400, NOT_ASCII),
    "a query that is not ASCII": (asked(first="GET /v1/models?\u00e9 HTTP/1.1".encode()), 400, REQUEST_LINE),
    "an encoded path": (asked(first=b"GET /v1%2Fmodels/m HTTP/1.1"), 404, NOTHING),
    "a path of a model that is no code": (asked(first=b"GET /v1/models/a%2 HTTP/1.1"), 404, NOTHING),
    "a path of a model with dots": (asked(first=b"GET /v1/models/../%41 HTTP/1.1"), 404, NOTHING),
    "a header without colon": (asked(b"X y"), 400, MALFORMED),
    "an unused method": (asked(first=b"LOCK /v1 HTTP/1.1"), 405, METHOD),
    "a tunnel": (asked(first=b"CONNECT h:80 HTTP/1.1"), 400, METHOD),
    "a target with a scheme": (asked(first=b"GET http://h/v1 HTTP/1.1"), 400, TARGET),
    "a path with dots": (asked(first=b"GET /v1/../x HTTP/1.1"), 404, NOTHING),
    "two hosts": (asked(b"Host: h"), 400, HOST),
    "a host with a path": (asked(host=b"Host: h/v1"), 400, HOST),
    "a port that is too large": (asked(host=b"Host: h:65536"), 400, HOST),
    "a port behind an address": (asked(host=b"Host: [::1]:65536"), 400, HOST),
    "no host": (asked(host=b""), 400, "A Host header is expected."),
    "two lengths": (asked(b"Content-Length: 5", b"Content-Length: 5"), 400, MALFORMED),
    "a length with a zero in front": (asked(b"Content-Length: 05"), 400, LENGTH),
    "another encoding": (asked(b"Transfer-Encoding: gzip, chunked"), 400, ENCODING),
    "chunks in HTTP/1.0": (
        asked(b"Transfer-Encoding: chunked", first=b"POST /v1 HTTP/1.0"), 400, ENCODING,
    ),
    "an encoded body": (asked(b"Content-Encoding: gzip"), 415, ENCODED),
    "an encoded body, in capitals": (asked(b"CONTENT-ENCODING: BR"), 415, ENCODED),
    "one header too many": (
        asked(*(b"x-%d: y" % n for n in range(MAX_HEADERS))), 431, f"More than {MAX_HEADERS} headers.",
    ),
    "one byte too many in a line": (
        asked(b"x: " + b"y" * (MAX_LINE_BYTES - 2)), 431,
        f"A line of the head is longer than {MAX_LINE_BYTES} bytes.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("head", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_has_its_status_and_one_sentence(head: bytes, status: int, message: str) -> None:
    assert refusal(head) == (status, message)


def test_length_and_chunks_exclude_each_other_even_if_the_parser_let_both_pass() -> None:
    status, _ = refusal(asked(b"Content-Length: 5", b"Transfer-Encoding: chunked"))
    assert status == 400


@pytest.mark.parametrize("extra", [b"", b"x: y"])
def test_limits_are_what_is_still_let_in(extra: bytes) -> None:
    """As many headers and as long a line as may be; a head of many short lines beyond one line's limit."""
    most = asked(*(b"x-%d: y" % n for n in range(MAX_HEADERS - 1)))
    assert len(parse_request_head(most)[0].headers) == MAX_HEADERS
    longest = asked(b"x: " + b"y" * (MAX_LINE_BYTES - 3), *([extra] if extra else []))
    assert len(longest) > MAX_LINE_BYTES
    assert len(parse_request_head(longest)[0].fields[b"x"]) == MAX_LINE_BYTES - 3
    spread = asked(*(b"x-%d: " % n + b"y" * 1000 for n in range(20)))
    assert len(parse_request_head(spread)[0].headers) == 21


def test_a_head_at_its_limit_is_found_and_one_byte_more_is_not() -> None:
    whole = b"x" * MAX_HEAD_BYTES + b"\r\n\r\n"
    assert head_end(whole) == len(whole)
    for large in (b"x" + whole, whole[:-4] + b"x" * 5):
        with pytest.raises(GateError, match=r"^The request head is too large\.$") as caught:
            head_end(large)
        assert caught.value.status == 431
    assert head_end(b"x" * MAX_HEAD_BYTES) == 0
    assert head_end(b"abc\r\n\r\n", 3) == 7
    assert head_end(b"\r\n\r\nrest") == 4
    assert head_end(b"a\r\n\r\nb\r\n\r\n") == 5


@pytest.mark.parametrize(
    "value",
    [b"M\xc3\xbcller", b"M\xfcller", b"\xe9", "\u65e5\u672c".encode(), b"\xc2\xa0", b"\xf0\x9f\x99\x82"],
)
def test_values_of_headers_may_have_bytes_that_are_not_ascii(value: bytes) -> None:
    """RFC 9110, 5.5 (obs-text). Headers that frame a message may not."""
    head, _ = parse_request_head(asked(b"X-User: " + value))
    assert head.fields[b"x-user"] == value
    for name in (b"Transfer-Encoding: chunked", b"Content-Length: 5", b"Host: h"):
        with pytest.raises(GateError):
            parse_request_head(asked(name + value))


def test_the_name_of_a_model_may_be_encoded() -> None:
    path = "/v1/models/org%2Fm-7B"
    assert parse_request_head(asked(first=f"GET {path} HTTP/1.1".encode()))[0].path == path


def test_an_empty_head_is_of_no_request() -> None:
    head = RequestHead()
    assert (head.method, head.path, head.query, head.headers, head.fields) == (b"", "", b"", [], {})
    assert (head.content_type, head.expects, head.forwarded) == (b"", None, {})
    assert (head.http11, head.keep_alive, head.chunked) == (True, True, False)
    answer = ResponseHead()
    assert (answer.status, answer.reason, answer.headers, answer.fields) == (0, b"", [], {})
    assert (answer.keep_alive, answer.chunked, answer.forwarded) == (True, False, None)


def test_everything_of_a_request_is_read() -> None:
    head, length = parse_request_head(
        asked(
            b"Content-Type: Application/JSON",
            b"Content-Length: 12",
            b"Expect: 100-Continue",
            b"Content-Encoding: Identity",
            b"X-Twice: first",
            b"X-Twice: second",
            first=b"POST /v1/chat?a=b?c HTTP/1.1",
        )
    )
    assert (head.method, head.path, head.query, length) == (b"POST", "/v1/chat", b"a=b?c", 12)
    assert (head.content_type, head.expects) == (b"application/json", b"100-continue")
    assert (head.http11, head.keep_alive, head.chunked) == (True, True, False)
    assert head.fields[b"x-twice"] == b"first"
    assert (b"x-twice", b"second") in head.headers
    assert head.forwarded == {}


def test_what_is_not_said_is_not_read() -> None:
    head, length = parse_request_head(asked(b"Transfer-Encoding: Chunked"))
    assert (head.content_type, head.expects, head.query, length) == (b"", None, b"", None)
    assert head.chunked
    bare, length = parse_request_head(asked(first=b"GET / HTTP/1.0", host=b""))
    assert (bare.http11, bare.keep_alive, bare.chunked) == (False, False, False)
    assert length is None


@pytest.mark.parametrize(
    ("first", "connection", "keeps"),
    [
        (b"GET / HTTP/1.1", (b"close", b"x-other"), False),
        (b"GET / HTTP/1.1", (b"x-other", b"Close"), False),
        (b"GET / HTTP/1.1", (b"closed",), True),
        (b"GET / HTTP/1.0", (b"x-other", b"Keep-Alive"), True),
        (b"GET / HTTP/1.0", (b"keep-alive", b"x-other"), True),
        (b"GET / HTTP/1.0", (b"x-other",), False),
    ],
)
def test_every_connection_header_counts(first: bytes, connection: tuple[bytes, ...], keeps: bool) -> None:
    head, _ = parse_request_head(asked(*(b"Connection: " + each for each in connection), first=first))
    assert head.keep_alive is keeps


@pytest.mark.parametrize("host", [b"h:65535", b"[::1]:65535", b"[::1]", b"h:0"])
def test_a_host_may_have_any_port_there_is(host: bytes) -> None:
    assert parse_request_head(asked(host=b"Host: " + host))[0].fields[b"host"] == host


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (answered(b"X: a\nY: b"), LINE_END),
        (answered(first=b"HTTP/2 200 OK"), "The engine does not speak HTTP/1."),
        (answered(first=b"HTTP/1.1 101 Switching"), "The head of the engine's answer is malformed."),
        (answered(b"X y"), "The head of the engine's answer is malformed."),
        (answered(first=b"HTTP/1.1 600 X"), "The engine's answer has no valid status."),
        (answered(first=b"HTTP/1.1 099 X"), "The engine's answer has no valid status."),
        (answered(b"Content-Length: 05"), "The engine's Content-Length is ambiguous."),
        (answered(b"Transfer-Encoding: gzip"), "The engine's Transfer-Encoding is not plain chunked."),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(head: bytes, message: str) -> None:
    with pytest.raises(GateError) as caught:
        parse_response_head(head, b"POST")
    assert (caught.value.status, caught.value.message) == (502, message)


def test_an_answer_with_both_framings_is_a_502() -> None:
    with pytest.raises(GateError) as caught:
        parse_response_head(answered(b"Content-Length: 5", b"Transfer-Encoding: chunked"), b"POST")
    assert caught.value.status == 502


def test_everything_of_an_answer_is_read() -> None:
    head, length = parse_response_head(
        answered(b"Content-Length: 7", b"X-A: 1", b"X-A: 2", first=b"HTTP/1.1 404 Not Found"), b"POST"
    )
    assert (head.status, head.reason, length) == (404, b"Not Found", 7)
    assert (head.chunked, head.keep_alive) == (False, True)
    assert head.fields == {b"content-length": b"7", b"x-a": b"1"}
    assert len(head.headers) == 3
    unsized, length = parse_response_head(answered(), b"POST")
    assert (unsized.chunked, length) == (False, None)


@pytest.mark.parametrize("status", [100, 199, 204, 304])
def test_these_have_no_body_whatever_they_say(status: int) -> None:
    lines = () if status < 200 or status == 204 else (b"Transfer-Encoding: chunked",)
    head, length = parse_response_head(answered(*lines, first=b"HTTP/1.1 %d X" % status), b"POST")
    assert (head.status, head.chunked, length) == (status, False, 0)


@pytest.mark.parametrize("status", [200, 305, 303, 599])
def test_these_have_one(status: int) -> None:
    head, length = parse_response_head(answered(first=b"HTTP/1.1 %d X" % status), b"POST")
    assert (head.status, length) == (status, None)


def test_the_answer_to_a_head_request_has_no_body_though_it_says_so() -> None:
    chunked, length = parse_response_head(answered(b"Transfer-Encoding: chunked"), b"HEAD")
    assert (chunked.chunked, length) == (False, 0)
    assert parse_response_head(answered(b"Content-Length: 5"), b"HEAD")[1] == 0


@pytest.mark.parametrize(
    ("first", "said", "keeps"),
    [
        (b"HTTP/1.1 200 OK", (), True),
        (b"HTTP/1.1 200 OK", (b"Close",), False),
        (b"HTTP/1.1 200 OK", (b"x-other",), True),
        (b"HTTP/1.0 200 OK", (), False),
        (b"HTTP/1.0 200 OK", (b"x-other",), False),
        (b"HTTP/1.0 200 OK", (b"Keep-Alive",), True),
        (b"HTTP/1.0 200 OK", (b"Keep-Alive", b"close"), False),
    ],
)
def test_an_engine_says_whether_it_may_be_asked_again(
    first: bytes, said: tuple[bytes, ...], keeps: bool
) -> None:
    head, _ = parse_response_head(answered(*(b"Connection: " + each for each in said), first=first), b"POST")
    assert head.keep_alive is keeps


def test_only_heads_of_a_bearable_length_are_remembered() -> None:
    seen: list[bytes] = []

    def parse(raw: bytes) -> tuple[RequestHead, int | None]:
        seen.append(raw)
        return http1.parse_request_head(raw)

    known = KnownHeads(parse)
    for line in (b"X-Length: none", b"Content-Length: 5"):
        short = asked(line)
        longest = asked(line, b"Pad: " + b"x" * (MAX_KNOWN_HEAD_BYTES - len(short) - len(b"Pad: \r\n")))
        assert len(longest) == MAX_KNOWN_HEAD_BYTES
        longer = longest.replace(b"Pad: ", b"Pad: x")
        for raw in (longest, longest, longer, longer):
            known.find(raw)
        assert seen == [longest, longer, longer]
        seen.clear()


def test_a_length_is_cut_out_only_where_it_is_a_plain_number_of_a_length() -> None:
    """Fifteen digits are one like any other; behind a name that only ends alike the whole is compared."""
    seen: list[bytes] = []

    def parse(raw: bytes) -> tuple[RequestHead, int | None]:
        seen.append(raw)
        return http1.parse_request_head(raw)

    known = KnownHeads(parse)
    for digits in (b"1" * 15, b"2" * 15):
        assert known.find(asked(b"Content-Length: " + digits))[1] == int(digits)
    assert len(seen) == 1
    for digits in (b"1" * 16, b"2" * 16):  # taken whole
        assert known.find(asked(b"Content-Length: " + digits))[1] == int(digits)
    assert len(seen) == 3
    for value in (b"5", b"6"):
        head, length = known.find(asked(b"X-Content-Length: " + value))
        assert (head.fields[b"x-content-length"], length) == (value, None)
    # The first that looks so is no length; the one that is differs.
    for value in (b"5", b"6"):
        raw = asked(b"X-Length: 7", b"Content-Length: " + value)
        assert known.find(raw)[1] == int(value)


# --- chunks ---


def test_a_decoder_begins_between_two_chunks() -> None:
    decoder = ChunkedDecoder()
    assert (decoder.done, decoder.between, decoder.surplus) == (False, True, b"")
    assert decoder.feed(b"") == b""
    assert (decoder.done, decoder.between, decoder.surplus) == (False, True, b"")
    assert decoder.feed(b"1\r\n") == b""
    assert not decoder.between
    assert decoder.feed(b"x\r") == b"x"
    assert not decoder.between
    assert decoder.feed(b"\n") == b""
    assert decoder.between
    assert decoder.feed(b"0\r\n\r\nmore") == b""
    assert (decoder.done, decoder.surplus) == (True, b"more")


@pytest.mark.parametrize("size", [b"10", b"1f", b"A0", b"0100", b"fFf"])
def test_sizes_are_hexadecimal(size: bytes) -> None:
    data = b"x" * int(size, 16)
    decoder = ChunkedDecoder()
    assert decoder.feed(size + b"\r\n" + data + b"\r\n0\r\n\r\n") == data
    assert decoder.done


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"5;a\r\n", "A chunk size is malformed or has extensions."),
        (b"\r\n", "A chunk size is malformed or has extensions."),
        (b"0" * 17 + b"5\r\n", "A chunk size is malformed."),
        (b"0" * 19, "A chunk size is malformed."),
        (b"5\n", "A chunk line does not end in CR LF."),
        (b"1\r\nxy", "A chunk does not end where it should, or has trailers."),
        (b"0\r\nX: y\r\n", "A chunk does not end where it should, or has trailers."),
    ],
)
def test_what_is_wrong_with_a_chunk_is_said(data: bytes, message: str) -> None:
    with pytest.raises(GateError) as caught:
        ChunkedDecoder().feed(data)
    assert (caught.value.status, caught.value.message) == (400, message)


def test_the_longest_size_line_is_read_whole_and_cut() -> None:
    line = b"0" * 14 + b"5\r\n"  # fifteen digits are the most
    for cut in range(len(line) + 1):
        decoder = ChunkedDecoder()
        assert decoder.feed(line[:cut]) + decoder.feed(line[cut:] + b"hello\r\n") == b"hello"
