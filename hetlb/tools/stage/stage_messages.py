"""Messages between coordinator and stages, and their frames.

A frame is one binary WebSocket message: 4 bytes with the length of the header (big endian), the header
(msgpack), the payload. Only `Passes` have a payload: the rows of all passes in order. A row is a token id
(int32, little endian) for a pass that enters at layer 0, an activation in the model's dtype elsewhere.

Lease ids are 64 bits and unique among coordinators: the upper half is the coordinator's session. Every list
and number has a limit, and long lists of token ids travel packed, so that what a frame decodes to is no
larger than a frame may be.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from hetlb.errors import NOT_JSON

VERSION: Final = 2
#: Path of the WebSocket.
PATH: Final = "/v1/stage"
#: Largest frame read, and largest payload, in bytes, of passes that share a frame.
MAX_FRAME_BYTES: Final = 64 << 20
SPLIT_BYTES: Final = 16 << 20
#: Passes, tokens or leases of one message.
MOST_PASSES: Final = 1024
#: Tokens of one lease, and hops of one route.
_MOST_TOKENS: Final = 1 << 24
_MOST_HOPS: Final = 256

_LENGTH = struct.Struct(">I")

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=_MOST_TOKENS)]
_TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Layer: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 16)]
#: Token ids as int32, little endian.
_Packed: TypeAlias = Annotated[bytes, Meta(max_length=4 * _MOST_TOKENS)]
_Leases: TypeAlias = Annotated[list[int], Meta(max_length=MOST_PASSES)]
_Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e9)]
#: Least log probability, as in vLLM's server.
LEAST_LOGPROB: Final = -9999.0
_LogProb: TypeAlias = Annotated[float, Meta(ge=LEAST_LOGPROB, le=0.0)]
_Curve: TypeAlias = Annotated[list[tuple[_Seconds, _Seconds]], Meta(min_length=2, max_length=64)]


def pack(tokens: Iterable[int]) -> bytes:
    """Return token ids as bytes of a message."""
    ids = tuple(tokens)
    return struct.pack(f"<{len(ids)}i", *ids)


class Sampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Choice of the next token, as vLLM's parameters of the same names.

    `stop` holds token ids banned for the first `min_tokens` tokens, `allowed` the only ones that
    may come (empty: all). `bias_values` are float32, one for each of `bias_tokens`. `history` holds the
    prompt if penalties need it; `prompt_tokens` its length, wherever the pass begins.
    """

    prompt_tokens: _Count
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=0)] = 0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=1e-9, le=1e9)] = 1.0
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    stop: _Packed = b""
    bias_tokens: _Packed = b""
    bias_values: _Packed = b""
    allowed: _Packed = b""
    logprobs: Annotated[int, Meta(ge=-1, le=64)] = -1
    history: _Packed = b""

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken."""
        return self.temperature < 1e-5

    @property
    def penalises(self) -> bool:
        """True if earlier tokens change the choice."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def plain(self) -> bool:
        """True if the token is the largest logit and nothing else."""
        return (
            self.greedy
            and not self.penalises
            and not self.bias_tokens
            and not self.allowed
            and self.min_tokens == 0
            and self.logprobs < 0
        )


class RouteHop(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a route: its address and the layers [first, end) it computes."""

    url: Annotated[str, Meta(max_length=300)]
    first: _Layer
    end: _Layer


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """Route and sampling of a lease; travels with its first pass."""

    route: Annotated[tuple[RouteHop, ...], Meta(min_length=1, max_length=_MOST_HOPS)]
    sampling: Sampling


class Pass(msgspec.Struct, array_like=True):
    """`count` consecutive tokens of a lease from `position`, for hop number `hop` of its route.

    `last` is set on the end of a prompt and on every token of an answer: the last stage then samples.
    """

    lease: int
    hop: Annotated[int, Meta(ge=0, lt=_MOST_HOPS)]
    position: _Count
    count: Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
    last: bool
    opening: Opening | None = None


class Passes(msgspec.Struct, tag="passes", array_like=True):
    """Work for a stage; the rows are the payload."""

    passes: Annotated[list[Pass], Meta(max_length=MOST_PASSES)]


class Close(msgspec.Struct, tag="close", array_like=True):
    """Close leases: their KV is freed, passes in flight are dropped."""

    leases: _Leases


class Token(msgspec.Struct, array_like=True):
    """A sampled token. `logprobs` holds (token id, log probability), the sampled token first."""

    lease: int
    position: _Count
    token: _TokenId
    logprobs: Annotated[list[tuple[_TokenId, _LogProb]], Meta(max_length=65)] | None = None


class Tokens(msgspec.Struct, tag="tokens", array_like=True):
    """Tokens that came out of the last stage."""

    tokens: Annotated[list[Token], Meta(max_length=MOST_PASSES)]


class Cause(StrEnum):
    """Reason of a stage to give a lease up; it decides what becomes of the request.

    `KV`: there was no block left, it is replayed. `PATH`: this path cannot go on, it is replayed over another
    one. `REQUEST`: it alone cannot be computed, or its batch hung: it is answered with an error.
    """

    KV = "kv"
    PATH = "path"
    REQUEST = "request"


class Lost(msgspec.Struct, tag="lost", array_like=True):
    """Leases that a stage gave up."""

    leases: _Leases
    cause: Cause
    reason: _Text


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """First message on a connection; describes the stage. Times: (tokens or requests, seconds of a layer)."""

    model: _Text
    dtype: Annotated[str, Meta(max_length=32)]
    first: _Layer
    end: _Layer
    kv_token_layers: Annotated[int, Meta(ge=1)]
    max_num_seqs: Annotated[int, Meta(ge=1, le=1 << 31)]
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    prompt_times: _Curve
    decode_times: _Curve


Message: TypeAlias = Passes | Close | Tokens | Lost | Welcome

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class StageProtocolError(Exception):
    """A frame that cannot be read."""


def encode(message: Message, *rows: bytes | memoryview) -> bytes:
    """Return one frame."""
    header = _encoder.encode(message)
    return b"".join((_LENGTH.pack(len(header)), header, *rows))


def decode(frame: bytes) -> tuple[Message, memoryview]:
    """Return the message and its payload, which shares the frame's memory. Raises `StageProtocolError`."""
    if len(frame) < _LENGTH.size:
        raise StageProtocolError(f"expected a header, got {len(frame)} bytes")
    end = _LENGTH.size + _LENGTH.unpack_from(frame)[0]
    if end > len(frame):
        raise StageProtocolError(f"expected {end} bytes of header, got {len(frame)}")
    view = memoryview(frame)
    try:
        return _decoder.decode(view[_LENGTH.size : end]), view[end:]
    except NOT_JSON as error:
        raise StageProtocolError(f"expected a message: {error}") from error


def frames(parts: Sequence[tuple[Pass, bytes]]) -> Iterator[bytes]:
    """Yield passes with their rows as few frames; too many rows for one frame become several passes."""
    passes: list[Pass] = []
    rows: list[bytes | memoryview] = []
    size = 0
    for each, data in parts:
        for piece, part in _pieces(each, data):
            if passes and (size + len(part) > SPLIT_BYTES or len(passes) == MOST_PASSES):
                yield encode(Passes(passes), *rows)
                passes, rows, size = [], [], 0
            passes.append(piece)
            rows.append(part)
            size += len(part)
    if passes:
        yield encode(Passes(passes), *rows)


def _pieces(each: Pass, data: bytes) -> Iterator[tuple[Pass, bytes | memoryview]]:
    row = len(data) // each.count
    most = max(1, SPLIT_BYTES // max(1, row))
    if each.count <= most:
        yield each, data
        return
    view = memoryview(data)
    for at in range(0, each.count, most):
        count = min(most, each.count - at)
        last = each.last and at + count == each.count
        opening = each.opening if at == 0 else None
        yield (
            Pass(each.lease, each.hop, each.position + at, count, last, opening),
            view[at * row : (at + count) * row],
        )
