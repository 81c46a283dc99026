"""Bodies of many small chunks, heads that end a connection, and the words for what only some heads have."""

from __future__ import annotations

import pytest

from hetlb.balancer.http.http1 import (
    LEAST_CHUNK_BYTES,
    ChunkedDecoder,
    GateError,
    parse_request_head,
    parse_response_head,
)

HEAD = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: h\r\n"
MOST = 10


def fed(data: bytes, most_small: int = MOST) -> ChunkedDecoder:
    """A decoder after one body, in pieces of a byte."""
    decoder = ChunkedDecoder(most_small)
    for byte in data:
        decoder.feed(bytes([byte]))
    return decoder


def chunks(count: int, size: int = 1) -> bytes:
    return (b"%x\r\n" % size + b"x" * size + b"\r\n") * count


@pytest.mark.parametrize("whole", [False, True])
def test_a_number_of_small_chunks_is_let_in_and_one_more_for_each_of_usual_size(whole: bool) -> None:
    """Tiny chunks add no allowance of their own until they are as much as one of the least size."""

    def taken(data: bytes, most_small: int = MOST) -> bool:
        try:
            if whole:
                ChunkedDecoder(most_small).feed(data)
            else:
                fed(data, most_small)
        except GateError as error:
            said.add((error.status, error.message))
            return False
        return True

    said: set[tuple[int, str]] = set()
    assert taken(chunks(MOST))
    assert not taken(chunks(MOST + 1))
    assert taken(chunks(5, LEAST_CHUNK_BYTES) + chunks(MOST))
    assert not taken(chunks(5, LEAST_CHUNK_BYTES) + chunks(MOST + 1))
    assert taken(chunks(1, 5 * LEAST_CHUNK_BYTES) + chunks(MOST + 4))
    assert not taken(chunks(1, 5 * LEAST_CHUNK_BYTES) + chunks(MOST + 5))
    assert taken(chunks(1000), 0), "without a bound there is none"
    assert said == {(400, "The body comes in too many small chunks.")}


def test_a_decoder_begins_between_chunks_and_with_nothing() -> None:
    decoder = ChunkedDecoder()
    assert (decoder.between, decoder.done, decoder.surplus) == (True, False, b"")
    assert decoder.feed(b"") == b""
    assert decoder.between is True
    assert decoder.feed(b"2\r\nab") == b"ab"
    assert (decoder.between, decoder.done) == (False, False)
    assert decoder.feed(b"\r\n0\r\n\r\nGET") == b""
    assert (decoder.done, decoder.surplus) == (True, b"GET")


def test_a_head_after_which_the_connection_ends_is_the_same_otherwise() -> None:
    head, _ = parse_request_head(
        HEAD + b"Content-Type: text/plain\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    )
    last = head.closing()
    assert (head.keep_alive, last.keep_alive) == (True, False)
    for name in (
        "method",
        "path",
        "query",
        "headers",
        "fields",
        "content_type",
        "http11",
        "chunked",
    ):
        assert getattr(last, name) == getattr(head, name)
    assert (last.method, last.path, last.query, last.expects) == (
        b"POST", "/v1/completions", head.query, b"100-continue",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["content-type", "authorization", "x-api-key", "api-key"])
def test_a_header_that_readers_could_take_differently_comes_once(name: str) -> None:
    line = name.encode() + b": a\r\n"
    assert parse_request_head(HEAD + line + b"\r\n")[0].fields[name.encode()] == b"a"
    with pytest.raises(GateError) as caught:
        parse_request_head(HEAD + line + line + b"\r\n")
    assert (caught.value.status, caught.value.message) == (400, f"More than one {name} header.")


def test_an_answer_with_control_characters_is_refused_in_words() -> None:
    with pytest.raises(GateError) as caught:
        parse_response_head(b"HTTP/1.1 200 OK\r\nX: a\x01b\r\n\r\n", b"POST")
    said = "The head of the engine's answer has control characters."
    assert (caught.value.status, caught.value.message) == (502, said)
