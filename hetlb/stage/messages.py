"""Messages between coordinator and stages, and their frames.

A frame is one binary WebSocket message: 4 bytes with the length of the header (big endian), the header
(msgpack), the payload. Only `Passes` have a payload: the rows of all passes in order. A row is a token id
(int32, little endian) for a pass that enters at layer 0, an activation in the model's dtype elsewhere.

Lease ids are 64 bits and unique among coordinators: the upper half is the coordinator's session.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import msgspec

VERSION: Final = 1
#: Path of the WebSocket.
PATH: Final = "/v1/stage"
#: Largest frame that is read, and payload bytes up to which passes share a frame.
MAX_FRAME_BYTES: Final = 64 << 20
SPLIT_BYTES: Final = 16 << 20

_LENGTH = struct.Struct(">I")


class Sampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Choice of the next token, as vLLM's parameters of the same names.

    `stop` are token ids that are banned for the first `min_tokens` tokens. `history` holds the prompt where
    penalties need it; `prompt_tokens` its length, wherever the pass begins.
    """

    prompt_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    history: tuple[int, ...] = ()

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
            and not self.logit_bias
            and self.min_tokens == 0
            and self.logprobs < 0
        )


class RouteHop(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a route: its address and the layers [first, end) that it computes."""

    url: str
    first: int
    end: int


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """Route and sampling of a lease; travels with its first pass."""

    route: tuple[RouteHop, ...]
    sampling: Sampling


class Pass(msgspec.Struct, array_like=True):
    """`count` consecutive tokens of a lease from `position`, for hop number `hop` of its route.

    `last` is set on the end of a prompt and on every token of an answer: the last stage then samples.
    """

    lease: int
    hop: int
    position: int
    count: int
    last: bool
    opening: Opening | None = None


class Passes(msgspec.Struct, tag="passes", array_like=True):
    """Work for a stage; the rows are the payload."""

    passes: list[Pass]


class Close(msgspec.Struct, tag="close", array_like=True):
    """The leases ended: their KV is free, what is under way for them is void."""

    leases: list[int]


class Token(msgspec.Struct, array_like=True):
    """A sampled token. `logprobs` holds (token id, log probability), the sampled token first."""

    lease: int
    position: int
    token: int
    logprobs: list[tuple[int, float]] | None = None


class Tokens(msgspec.Struct, tag="tokens", array_like=True):
    """Tokens that came out of the last stage."""

    tokens: list[Token]


class Lost(msgspec.Struct, tag="lost", array_like=True):
    """A stage gave leases up: it had no KV block left (`preempted`), or could not reach the next stage."""

    leases: list[int]
    preempted: bool
    reason: str


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """First message of the connecting side. `session` is 0 for a stage."""

    version: int
    session: int
    nonce: bytes


class Challenge(msgspec.Struct, tag="challenge", array_like=True):
    """Answer to `Hello`: the stage proves that it has the key."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, tag="proof", array_like=True):
    """The connecting side proves that it has the key."""

    proof: bytes


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The connection stands. Describes the stage; times are (tokens or requests, seconds of one layer)."""

    model: str
    dtype: str
    first: int
    end: int
    kv_token_layers: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prompt_times: list[tuple[float, float]]
    decode_times: list[tuple[float, float]]


Message: TypeAlias = Passes | Close | Tokens | Lost | Hello | Challenge | Proof | Welcome

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class ProtocolError(Exception):
    """A frame that cannot be read."""


def encode(message: Message, *rows: bytes | memoryview) -> bytes:
    """One frame."""
    header = _encoder.encode(message)
    return b"".join((_LENGTH.pack(len(header)), header, *rows))


def decode(frame: bytes) -> tuple[Message, memoryview]:
    """The message and its payload, which shares the frame's memory. Raises `ProtocolError`."""
    if len(frame) < _LENGTH.size:
        raise ProtocolError(f"expected a header, got {len(frame)} bytes")
    end = _LENGTH.size + _LENGTH.unpack_from(frame)[0]
    if end > len(frame):
        raise ProtocolError(f"expected {end} bytes of header, got {len(frame)}")
    view = memoryview(frame)
    try:
        return _decoder.decode(view[_LENGTH.size : end]), view[end:]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"expected a message: {error}") from error
