"""Messages that two parsers may read in two ways, in both directions: what HTTP smuggling is made of.

Every case is bytes and what must become of them: `refused` (ambiguous: nothing of it may pass),
or `read` (any reader of what the proxy passes on must read the same; refusing it is right too). The
names of the shapes come from PortSwigger's and http-garden's public lists, the payloads are our own.
"""

# ruff: noqa: E501 -- payloads are easier to compare on one line

from __future__ import annotations

from dataclasses import dataclass

INNER = b'{"model":"m","prompt":"x"}'
#: What a smuggled request looks like; it must never be seen as one.
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: p\r\nX-Request-Id: smuggled\r\n\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(INNER)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)


@dataclass(frozen=True)
class Case:
    """One message. `{id}` in a request is where its id goes."""

    name: str
    data: bytes
    refused: bool


def _post(
    headers: bytes,
    body: bytes,
    *,
    line: bytes = b"POST /v1/completions HTTP/1.1",
    host: bytes = b"Host: p\r\n",
) -> bytes:
    return line + b"\r\n" + host + b"X-Request-Id: {id}\r\n" + headers + b"\r\n" + body


def requests() -> list[Case]:
    """Requests as a client may send them."""
    cases: list[Case] = []

    def add(name: str, data: bytes, *, refused: bool = True) -> None:
        cases.append(Case(name, data, refused))

    add("plain", _post(LENGTH, INNER), refused=False)
    add("chunked", _post(CHUNKED, CHUNKS), refused=False)
    # Two framings, in both orders, with either one right.
    for name, length in (("short", b"5"), ("zero", b"0"), ("right", b"%d" % len(CHUNKS)), ("long", b"999")):
        line = b"Content-Length: " + length + b"\r\n"
        add(f"cl-te-{name}", _post(line + CHUNKED, CHUNKS + SMUGGLED))
        add(f"te-cl-{name}", _post(CHUNKED + line, CHUNKS + SMUGGLED))
    # Lengths.
    for value in (b"+26", b"-26", b"-0", b"0x1a", b"1a", b"2_6", b"", b"026", b"0026", b"26 26", b"26,26", b"26, 26",
                  b"26,", b",26", b"26;", b"26\x0b", b"\x0b26", b"26\x0c", b"2 6", b"1e1", b"26.0", b"'26'", b'"26"',
                  b"26\x00", b"18446744073709551642", b"99999999999999999999999", b"NaN", b"26 bytes", b"\xef\xbc\x92",
                  b"2\xa06"):  # fmt: skip
        add(f"cl-{value!r}", _post(b"Content-Length: " + value + b"\r\n", INNER + SMUGGLED))
    for name, lines in (
        ("same", LENGTH * 2), ("other", LENGTH + b"Content-Length: 0\r\n"), ("first-zero", b"Content-Length: 0\r\n" + LENGTH),
        ("case", LENGTH + LENGTH.lower()), ("three", LENGTH * 3),
    ):  # fmt: skip
        add(f"cl-twice-{name}", _post(lines, INNER + SMUGGLED))
    for name, line in (
        ("space-before-colon", b"Content-Length : 26\r\n"), ("tab-before-colon", b"Content-Length\t: 26\r\n"),
        ("no-colon", b"Content-Length 26\r\n"), ("nul", b"Content-Length\0: 26\r\n"), ("underscore", b"Content_Length: 26\r\n"),
        ("leading-space", b" Content-Length: 26\r\n"), ("prefix", b"XContent-Length: 26\r\n"),
        ("folded", b"Content-Length:\r\n 26\r\n"), ("folded-tab", b"Content-Length:\r\n\t26\r\n"),
        ("bare-lf", b"X: y\nContent-Length: 26\r\n"), ("bare-cr", b"X: y\rContent-Length: 26\r\n"),
    ):  # fmt: skip
        # An unknown name is no length: then there is no body, and what follows is no request.
        add(f"cl-name-{name}", _post(line, INNER + SMUGGLED), refused=name not in ("underscore", "prefix"))
    # Encodings: PortSwigger's permutations.
    for value in (b"xchunked", b"x chunked", b"chunked x", b"chunked,", b",chunked", b", chunked", b"chunked, identity",
                  b"identity, chunked", b"identity", b"gzip", b"gzip, chunked", b"chunked, gzip", b"chunked, chunked",
                  b"chunked;x=y", b"chunked ; x", b'"chunked"', b"'chunked'", b"chunk", b"chunkedd", b"chunked\0",
                  b"\0chunked", b"chunked\x0b", b"\x0bchunked", b"\x0cchunked", b"chunked\x0c", b"chunked\xa0", b"\xa0chunked",
                  b"\xffchunked", b"chunked\xff", b"chun\tked", b"chunked\x01", b"", b"\xc5\xbfchunked", b"chun\xe2\x84\xaaed",
                  b"chunked\x85", b"deflate", b"trailers", b"cow", b"chunked\\", b"chunked=1", b"[chunked]", b"chunked:1"):  # fmt: skip
        add(f"te-{value!r}", _post(b"Transfer-Encoding: " + value + b"\r\n" + LENGTH, CHUNKS + SMUGGLED))
        add(f"te-alone-{value!r}", _post(b"Transfer-Encoding: " + value + b"\r\n", CHUNKS + SMUGGLED))
    for value in (b"Chunked", b"CHUNKED", b"chunkeD", b" chunked", b"\tchunked", b"chunked ", b"chunked\t"):
        add(f"te-legal-{value!r}", _post(b"Transfer-Encoding:" + value + b"\r\n", CHUNKS), refused=False)
    for name, line in (
        ("space-before-colon", b"Transfer-Encoding : chunked\r\n"), ("tab-before-colon", b"Transfer-Encoding\t: chunked\r\n"),
        ("folded", b"Transfer-Encoding:\r\n chunked\r\n"), ("folded-tab", b"Transfer-Encoding:\r\n\tchunked\r\n"),
        ("folded-empty", b"Transfer-Encoding: chunked\r\n \r\n"), ("leading-space", b" Transfer-Encoding: chunked\r\n"),
        ("nul-name", b"Transfer\0Encoding: chunked\r\n"), ("no-colon", b"Transfer-Encoding chunked\r\n"),
        ("after-lf", b"X: y\nTransfer-Encoding: chunked\r\n"), ("after-cr", b"X: y\rTransfer-Encoding: chunked\r\n"),
        ("after-nul", b"X: y\0\r\nTransfer-Encoding: chunked\r\n"), ("ff-name", b"\xffTransfer-Encoding: chunked\r\n"),
        ("twice", CHUNKED * 2), ("twice-identity", b"Transfer-Encoding: identity\r\n" + CHUNKED),
        ("twice-reverse", CHUNKED + b"Transfer-Encoding: identity\r\n"), ("colon-name", b":Transfer-Encoding: chunked\r\n"),
        ("quoted-name", b'"Transfer-Encoding": chunked\r\n'), ("bracket", b"Transfer-Encoding[]: chunked\r\n"),
    ):  # fmt: skip
        add(f"te-name-{name}", _post(line + LENGTH, CHUNKS + SMUGGLED))
    for name, line in (
        ("underscore", b"Transfer_Encoding: chunked\r\n"), ("prefix", b"XTransfer-Encoding: chunked\r\n"),
        ("dash-less", b"TransferEncoding: chunked\r\n"), ("content-encoding", b"Content-Transfer-Encoding: chunked\r\n"),
    ):  # fmt: skip
        add(f"te-other-{name}", _post(line + LENGTH, INNER), refused=False)
    add("te-http10", _post(CHUNKED, CHUNKS, line=b"POST /v1/completions HTTP/1.0"))
    # Hop-by-hop: what Connection names must not take the framing away.
    for name in (b"content-length", b"transfer-encoding", b"host", b"x-request-id", b"close, content-length"):
        add(f"connection-{name!r}", _post(b"Connection: " + name + b"\r\n" + LENGTH, INNER), refused=False)
    # Chunks.
    size = b"%x" % len(INNER)
    for name, chunks in (
        ("ext", size + b";a=b\r\n" + INNER + b"\r\n0\r\n\r\n"), ("ext-lf", size + b";a\n\r\n" + INNER + b"\r\n0\r\n\r\n"),
        ("ext-spill", size + b";\n" + INNER + b"\r\n0\r\n\r\n"), ("lf", size + b"\n" + INNER + b"\n0\n\n"),
        ("cr", size + b"\r" + INNER + b"\r\n0\r\n\r\n"), ("0x", b"0x" + size + b"\r\n" + INNER + b"\r\n0\r\n\r\n"),
        ("plus", b"+" + size + b"\r\n" + INNER + b"\r\n0\r\n\r\n"), ("minus", b"-" + size + b"\r\n" + INNER + b"\r\n0\r\n\r\n"),
        ("space-before", b" " + size + b"\r\n" + INNER + b"\r\n0\r\n\r\n"),
        ("space-after", size + b" \r\n" + INNER + b"\r\n0\r\n\r\n"),
        ("tab-after", size + b"\t\r\n" + INNER + b"\r\n0\r\n\r\n"), ("empty", b"\r\n" + INNER + b"\r\n0\r\n\r\n"),
        ("underscore", b"1_a\r\n" + INNER + b"\r\n0\r\n\r\n"), ("huge", b"fffffffffffffffff\r\n" + INNER + b"\r\n0\r\n\r\n"),
        ("wraps", b"1000000000000001a\r\n" + INNER + b"\r\n0\r\n\r\n"), ("no-crlf", size + b"\r\n" + INNER + b"0\r\n\r\n"),
        ("two-bytes", size + b"\r\n" + INNER + b"XX0\r\n\r\n"), ("lf-after", size + b"\r\n" + INNER + b"\n0\r\n\r\n"),
        ("crcrlf", size + b"\r\n" + INNER + b"\r\r\n0\r\n\r\n"), ("last-ext", size + b"\r\n" + INNER + b"\r\n0;x\r\n\r\n"),
        ("trailer", size + b"\r\n" + INNER + b"\r\n0\r\nX: y\r\n\r\n"),
        ("trailer-cl", size + b"\r\n" + INNER + b"\r\n0\r\nContent-Length: 0\r\n\r\n"),
        ("trailer-te", size + b"\r\n" + INNER + b"\r\n0\r\nTransfer-Encoding: x\r\n\r\n"),
        ("trailer-host", size + b"\r\n" + INNER + b"\r\n0\r\nHost: evil\r\n\r\n"),
        ("trailer-lf", size + b"\r\n" + INNER + b"\r\n0\r\n\n"), ("last-lf", size + b"\r\n" + INNER + b"\r\n0\n\n"),
        ("last-cr", size + b"\r\n" + INNER + b"\r\n0\r\n\r\r"), ("letter", b"g\r\n" + INNER + b"\r\n0\r\n\r\n"),
        ("nul", size + b"\0\r\n" + INNER + b"\r\n0\r\n\r\n"), ("ff", b"\xff\r\n" + INNER + b"\r\n0\r\n\r\n"),
        ("quoted", b'"' + size + b'"\r\n' + INNER + b"\r\n0\r\n\r\n"), ("decimal-point", b"1a.0\r\n" + INNER + b"\r\n0\r\n\r\n"),
    ):  # fmt: skip
        add(f"chunk-{name}", _post(CHUNKED, chunks + SMUGGLED))
    for name, chunks in (
        ("upper", size.upper() + b"\r\n" + INNER + b"\r\n0\r\n\r\n"), ("zeros", b"000" + size + b"\r\n" + INNER + b"\r\n0\r\n\r\n"),
        ("double-zero", size + b"\r\n" + INNER + b"\r\n00\r\n\r\n"),
        ("many", b"".join(b"1\r\n%c\r\n" % byte for byte in INNER) + b"0\r\n\r\n"),
    ):  # fmt: skip
        add(f"chunk-legal-{name}", _post(CHUNKED, chunks), refused=False)
    # Lines and names.
    for name, line in (
        ("obs-fold", b"X: y\r\n z\r\n"), ("nul-value", b"X: y\0z\r\n"), ("cr-value", b"X: y\rz\r\n"), ("lf-line", b"X: y\n"),
        ("space-name", b"X Y: z\r\n"), ("empty-name", b": z\r\n"), ("no-colon", b"XYZ\r\n"), ("high-name", b"X\xff: z\r\n"),
        ("ctl-name", b"X\x01: z\r\n"), ("del-value", b"X: \x7f\r\n"), ("high-value", b"X: \xff\r\n"), ("ctl-value", b"X: \x01\r\n"),
        ("paren-name", b"X(Y): z\r\n"), ("at-name", b"X@Y: z\r\n"), ("slash-name", b"X/Y: z\r\n"), ("crcrlf", b"X: y\r\r\n"),
    ):  # fmt: skip
        add(f"line-{name}", _post(line + LENGTH, INNER))
    # Request lines and hosts.
    for line in (b"POST /v1/completions HTTP/1.1 ", b"POST  /v1/completions HTTP/1.1", b"POST\t/v1/completions\tHTTP/1.1",
                 b" POST /v1/completions HTTP/1.1", b"POST /v1/completions  HTTP/1.1", b"POST /v1/completions HTTP/1.2",
                 b"POST /v1/completions HTTP/2.0", b"POST /v1/completions HTTP/0.9", b"POST /v1/completions HTTP/11",
                 b"POST /v1/completions http/1.1", b"POST /v1/completions HTTP/1.1.1", b"POST /v1/completions",
                 b"POST /v1/comple tions HTTP/1.1", b"POST /v1/completions\0 HTTP/1.1", b"post /v1/completions HTTP/1.1",
                 b"P\0ST /v1/completions HTTP/1.1", b"POST http://evil/v1/completions HTTP/1.1", b"POST * HTTP/1.1",
                 b"POST v1/completions HTTP/1.1", b"POST //v1/completions HTTP/1.1", b"POST /v1/../v1/completions HTTP/1.1",
                 b"POST /v1/%63ompletions HTTP/1.1", b"POST /v1/completions# HTTP/1.1", b"POST /v1\\completions HTTP/1.1",
                 b"POST /v1/completions;x HTTP/1.1", b"POST /v1/completions\xff HTTP/1.1",
                 b"POST /v1/completions HTTP/ 1.1", b"POST /v1/completions HTTP/1.\xb9"):  # fmt: skip
        add(f"first-{line!r}", _post(LENGTH, INNER, line=line))
    for host in (b"", b"Host:\r\n", b"Host: p\r\nHost: p\r\n", b"Host: p\r\nHost: q\r\n", b"Host: a b\r\n", b"Host: a@b\r\n",
                 b"Host: x/v1/models?\r\n", b"Host: p:99999\r\n", b"Host: p:\r\n", b"Host: [::1\r\n", b"Host : p\r\n",
                 b"Host: p, q\r\n", b"Host: p\0\r\n", b"Host: \xff\r\n", b"Host: p#\r\n", b"Host:\r\n p\r\n"):  # fmt: skip
        add(f"host-{host!r}", _post(LENGTH, INNER, host=host))
    return cases


OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
DOCUMENT = b'{"choices":[]}'
#: What a smuggled response looks like to a client that is fooled.
SECOND = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nsmuggled"


def responses() -> list[Case]:
    """Answers as an engine may send them, each to a connection of its own."""
    cases: list[Case] = []

    def add(name: str, data: bytes, *, refused: bool = True) -> None:
        cases.append(Case(name, data, refused))

    length = b"content-length: %d\r\n" % len(DOCUMENT)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DOCUMENT), DOCUMENT)
    add("plain", OK + length + b"\r\n" + DOCUMENT, refused=False)
    add("chunked", OK + CHUNKED + b"\r\n" + chunks, refused=False)
    add("surplus", OK + length + b"\r\n" + DOCUMENT + SECOND, refused=False)
    add("surplus-chunked", OK + CHUNKED + b"\r\n" + chunks + SECOND, refused=False)
    add("interim", b"HTTP/1.1 100 Continue\r\n\r\n" + OK + length + b"\r\n" + DOCUMENT, refused=False)
    add("no-body-204", b"HTTP/1.1 204 No Content\r\ncontent-length: 8\r\n\r\nsmuggled", refused=False)
    add("no-body-304", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 8\r\n\r\nsmuggled")
    add(
        "interim-length",
        b"HTTP/1.1 103 Hints\r\ncontent-length: 8\r\n\r\nsmuggled" + OK + length + b"\r\n" + DOCUMENT,
    )
    for name, headers in (
        ("te-cl", CHUNKED + length), ("cl-te", length + CHUNKED), ("cl-twice", length * 2),
        ("cl-other", length + b"content-length: 3\r\n"), ("te-twice", CHUNKED * 2),
        ("te-identity", b"transfer-encoding: identity\r\n" + CHUNKED),
    ):  # fmt: skip
        add(f"two-{name}", OK + headers + b"\r\n" + chunks)
    for value in (b"+14", b"-14", b"0xe", b"014", b"14, 14", b"14,", b"", b"1e1", b"14 14", b"99999999999999999999", b"1_4",
                  b"14;", b"14\0", b"\x0b14", b'"14"', b"14.0"):  # fmt: skip
        add(f"cl-{value!r}", OK + b"content-length: " + value + b"\r\n\r\n" + DOCUMENT + SECOND)
    for value in (b"xchunked", b",chunked", b"chunked,", b"gzip, chunked", b"chunked, gzip", b"identity", b"chunked;x", b"",
                  b"chunked\0", b"\x0bchunked", b"chunked\x0b", b"chunked x", b"gzip", b'"chunked"', b"chunked, chunked"):  # fmt: skip
        add(f"te-{value!r}", OK + b"transfer-encoding: " + value + b"\r\n\r\n" + chunks + SECOND)
    for name, line in (
        ("space-before-colon", b"transfer-encoding : chunked\r\n"), ("folded", b"x: y\r\n z\r\n"), ("bare-lf", b"x: y\n"),
        ("bare-cr", b"x: y\rz\r\n"), ("nul", b"x: y\0\r\n"), ("no-colon", b"xyz\r\n"), ("empty-name", b": y\r\n"),
        ("space-name", b"x y: z\r\n"), ("tab-colon", b"content-length\t: 14\r\n"), ("lead", b" content-length: 14\r\n"),
    ):  # fmt: skip
        add(f"line-{name}", OK + line + length + b"\r\n" + DOCUMENT)
    for line in (b"HTTP/2.0 200 OK", b"HTTP/1.2 200 OK", b"HTTP/0.9 200 OK", b"http/1.1 200 OK", b"HTTP/1.1 20 OK",
                 b"HTTP/1.1 2000 OK", b"HTTP/1.1 099 OK", b"HTTP/1.1 600 OK", b"HTTP/1.1  200 OK", b" HTTP/1.1 200 OK",
                 b"HTTP/1.1 +200 OK", b"HTTP/1.1 2 00 OK", b"ICY 200 OK", b"HTTP/1.1\t200 OK", b"HTTP/1.1 200\0OK",
                 b"HTTP/1.1 abc OK"):  # fmt: skip
        add(f"first-{line!r}", line + b"\r\n" + length + b"\r\n" + DOCUMENT)
    size = b"%x" % len(DOCUMENT)
    for name, body in (
        ("ext", size + b";a=b\r\n" + DOCUMENT + b"\r\n0\r\n\r\n"), ("lf", size + b"\n" + DOCUMENT + b"\n0\n\n"),
        ("0x", b"0x" + size + b"\r\n" + DOCUMENT + b"\r\n0\r\n\r\n"), ("plus", b"+" + size + b"\r\n" + DOCUMENT + b"\r\n0\r\n\r\n"),
        ("space", size + b" \r\n" + DOCUMENT + b"\r\n0\r\n\r\n"), ("huge", b"fffffffffffffffff\r\n" + DOCUMENT),
        ("no-crlf", size + b"\r\n" + DOCUMENT + b"0\r\n\r\n"), ("two-bytes", size + b"\r\n" + DOCUMENT + b"XX0\r\n\r\n"),
        ("trailer", size + b"\r\n" + DOCUMENT + b"\r\n0\r\nX: y\r\n\r\n"),
        ("trailer-cl", size + b"\r\n" + DOCUMENT + b"\r\n0\r\ncontent-length: 3\r\n\r\n"),
        ("crcrlf", size + b"\r\n" + DOCUMENT + b"\r\r\n0\r\n\r\n"), ("letter", b"g\r\n" + DOCUMENT + b"\r\n0\r\n\r\n"),
    ):  # fmt: skip
        add(f"chunk-{name}", OK + CHUNKED + b"\r\n" + body + SECOND)
    return cases
