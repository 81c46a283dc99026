"""Messages of peers: a process sends its changes, its whole state, a question, or its end.

Fields and kinds of changes may be appended within a version: a reader ignores unknown ones. Processes of
different versions do not hear each other.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias, get_args

import msgspec

from hetlb.options.peers.lease_wire import PART_BYTES, PART_CHANGES, PeerChange

VERSION: Final = 5
#: Kinds of messages: changes, all that holds, the question for all that holds, and the last changes of a
#: process that stops.
CHANGES: Final = 0
STATE: Final = 1
ASK: Final = 2
LEAVE: Final = 3
#: Maximum bytes of a message.
MAX_MESSAGE_BYTES: Final = 2 * PART_BYTES
_LENGTH = Struct("!I")
Receive: TypeAlias = Callable[[bytes], None]


class PeerMessage(msgspec.Struct, array_like=True, frozen=True):
    """One message of a process; `sent_at` by its own clock."""

    version: Literal[5]
    name: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,32}$")]
    kind: Literal[0, 1, 2, 3]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    sent_at: float
    changes: Annotated[list[PeerChange], msgspec.Meta(max_length=PART_CHANGES)]


class PeerHead(msgspec.Struct, array_like=True, frozen=True):
    """A message without its changes."""

    version: Literal[5]
    name: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,32}$")]
    kind: int
    sequence: int
    sent_at: float


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A message of any version; its changes are not read yet."""

    version: int
    name: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,32}$")]
    kind: Literal[0, 1, 2, 3]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    sent_at: float
    changes: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=PART_CHANGES)]


class _Kind(msgspec.Struct, array_like=True, frozen=True):
    """A change of any kind."""

    tag: int


_KINDS: Final = frozenset(each.__struct_config__.tag for each in get_args(PeerChange))
_decode: Final = msgspec.msgpack.Decoder(PeerMessage).decode
_decode_envelope: Final = msgspec.msgpack.Decoder(_Envelope).decode
_decode_change: Final = msgspec.msgpack.Decoder(PeerChange).decode
_decode_kind: Final = msgspec.msgpack.Decoder(_Kind).decode
decode_head: Final = msgspec.msgpack.Decoder(PeerHead).decode
_encode: Final = msgspec.msgpack.Encoder().encode


def decode(data: bytes) -> PeerMessage:
    """Return a message, without changes of unknown kinds. Raises `DecodeError` and `ValueError`."""
    try:
        return _decode(data)
    except msgspec.ValidationError:
        found = _decode_envelope(data)
        if found.version != VERSION:
            raise ValueError(
                f"expected version {VERSION}, got {found.version}: "
                "this process does not hear the peer until both run the same version"
            ) from None
        known = [each for each in found.changes if _decode_kind(each).tag in _KINDS]
        changes = [_decode_change(each) for each in known]
        return PeerMessage(VERSION, found.name, found.kind, found.sequence, found.sent_at, changes)


def message(name: str, kind: int, sequence: int, sent_at: float, changes: list[Any]) -> bytes:
    """Return a message of the process `name`."""
    return _encode([VERSION, name, kind, sequence, sent_at, changes])


def own_start(name: str) -> bytes:
    """Return the bytes behind the first one of every message of a process."""
    return _encode([VERSION, name])[1:]


def farewell(frame: bytes | memoryview) -> bytes:
    """Return the message that the sender of another one has left. Raises `DecodeError`."""
    return message(decode_head(frame).name, LEAVE, 0, 0.0, [])


def framed(message: bytes) -> bytes:
    """Return a message with its length before it, as it goes over a hub."""
    return _LENGTH.pack(len(message)) + message


def each_frame(data: bytearray, take: Callable[[bytes], object], may_go_on: Callable[[], bool]) -> int:
    """Call `take` with the message in each whole frame while there is time; return the end of the last one.

    Raises `DecodeError` for a message of more than `MAX_MESSAGE_BYTES`.
    """
    at, end = 0, len(data)
    while end - at >= 4 and may_go_on():
        (length,) = _LENGTH.unpack_from(data, at)
        if length > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"a frame of {length} bytes")
        after = at + 4 + length
        if after > end:
            break
        take(bytes(memoryview(data)[at + 4 : after]))
        at = after
    return at


class PeerTransport(Protocol):
    """Carrier of messages: a hub on one machine, a Redis server between machines.

    It passes each message on to all peers, and now and then to the sender too, in order, or the connection is
    lost. `lost`: one was not carried. `by_peer`: its server is in the process of a peer.
    """

    lost: bool
    by_peer: bool

    async def run(self, joined: Callable[[], None], receive: Receive) -> None:
        """Hear messages until the connection is lost, which raises; `joined` is called once it is made."""

    def send(self, message: bytes) -> None:
        """Send a message to all peers."""

    def discard(self) -> None:
        """Drop the messages that wait to be sent."""

    async def flush(self) -> None:
        """Wait until all messages have left."""

    def drop(self) -> None:
        """Break the connection, which seems dead: a new one is made."""

    async def close(self) -> None:
        """End the connection."""
