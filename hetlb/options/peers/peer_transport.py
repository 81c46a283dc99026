"""Carrier of peers' messages: `hub` carries them on this machine, `redis_transport` between machines.

Either passes each message on to all peers, the sender included, in order, or the connection is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

Receive: TypeAlias = Callable[[bytes], None]


class PeerTransport(Protocol):
    """Carrier of messages. `lost`: one was not carried. `by_peer`: its server is in the process of a peer."""

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
