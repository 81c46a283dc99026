"""Authenticated connections between coordinator and stage, or stage and stage: WebSockets of aiohttp.

Frames arrive whole and in order, or the connection ends. A route comes from a coordinator, so the addresses
in it are checked when they are connected to.

Both sides prove a shared key before anything else is accepted, by two HTTP requests. The connecting side
names its session and a fresh nonce, and gets 401 with the stage's nonce and its proof. Then it asks for the
WebSocket with its own proof. A proof is an HMAC-SHA256 over both nonces; the key itself never travels, and a
nonce is good for one connection. What follows is not encrypted: TLS does that. Without a key the proofs are
made with an empty one. A web page can send none of these headers with a WebSocket, and one that names its
origin is refused.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import secrets
import socket
import ssl
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import aiohttp
from aiohttp import web

from hetlb.addresses import is_loopback, is_special
from hetlb.errors import ConfigError
from hetlb.files import content
from hetlb.tasks import end, ended
from hetlb.tools.stage.stage_messages import MAX_FRAME_BYTES, PATH, StageProtocolError, Welcome, decode
from hetlb.turns import Share

NONCE_BYTES: Final = 32
LEAST_KEY_BYTES: Final = 16
#: Maximum number of open challenges of a stage; beyond it the oldest is void.
_MAX_CHALLENGES: Final = 1024

_SESSION: Final = "x-hetlb-session"
_NONCE: Final = "x-hetlb-nonce"
_STAGE_NONCE: Final = "x-hetlb-stage-nonce"
_PROOF: Final = "x-hetlb-proof"

Headers = Mapping[str, str]


class NotProven(Exception):
    """A request without a proof of the key."""


def new_nonce() -> bytes:
    """Random bytes for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def stage_proof(key: bytes, client_nonce: bytes, stage_nonce: bytes) -> bytes:
    """Return the proof of the side that accepts connections."""
    return _mac(key, b"hetlb stage 2 accepts", client_nonce, stage_nonce)


def client_proof(key: bytes, client_nonce: bytes, stage_nonce: bytes, session: int) -> bytes:
    """Return the proof of the side that connects; it covers the session."""
    return _mac(key, b"hetlb stage 2 connects", client_nonce, stage_nonce, session.to_bytes(8, "big"))


def _mac(key: bytes, *parts: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, text, "sha256")


# --- the side that connects ---


def hello(session: int, nonce: bytes) -> dict[str, str]:
    """Return the headers of the first request."""
    return {_SESSION: str(session), _NONCE: nonce.hex()}


def challenge(headers: Headers) -> tuple[bytes, bytes] | None:
    """Return the stage's nonce and proof; None if the answer is no challenge."""
    nonce, proof = _bytes(headers, _STAGE_NONCE), _bytes(headers, _PROOF)
    return (nonce, proof) if nonce and proof else None


def proof_headers(stage_nonce: bytes, proof: bytes) -> dict[str, str]:
    """Return the headers of the second request, besides the first one's."""
    return {_STAGE_NONCE: stage_nonce.hex(), _PROOF: proof.hex()}


def _bytes(headers: Headers, name: str) -> bytes:
    """Return a header of 32 bytes in hexadecimal; b"" if it is not that."""
    try:
        value = bytes.fromhex(headers.get(name, ""))
    except ValueError:
        return b""
    return value if len(value) == NONCE_BYTES else b""


# --- the side that accepts ---


class Challenges:
    """Challenges of a stage that wait for their proof."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._open: OrderedDict[bytes, None] = OrderedDict()

    def issue(self, headers: Headers) -> dict[str, str]:
        """Return the headers of the answer to a first request. Raises `NotProven` if it is none."""
        if not (client_nonce := _bytes(headers, _NONCE)):
            raise NotProven("expected a greeting of this version")
        nonce = new_nonce()
        self._open[nonce] = None
        if len(self._open) > _MAX_CHALLENGES:
            self._open.popitem(last=False)
        return proof_headers(nonce, stage_proof(self._key, client_nonce, nonce))

    def session(self, headers: Headers) -> int | None:
        """Return the session of a second request, None if it has no proof yet. Raises `NotProven`."""
        if "origin" in headers:
            raise NotProven("expected no web page")
        if _PROOF not in headers:
            return None
        text, nonce = headers.get(_SESSION, ""), _bytes(headers, _STAGE_NONCE)
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 1 << 32):
            raise NotProven("expected a session")
        issued = self._open.pop(nonce, self) is None
        expected = client_proof(self._key, _bytes(headers, _NONCE), nonce, int(text))
        if not issued or not hmac.compare_digest(_bytes(headers, _PROOF), expected):
            raise NotProven("expected a proof of the key")
        return int(text)


def read_key(path: Path | None) -> bytes:
    """Return the shared key of a file, stripped; empty without a file. Raises `ConfigError`."""
    if path is None:
        return b""
    try:
        key = content(path).strip()
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable key file: {error.strerror}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(f"{path}: expected a key of at least {LEAST_KEY_BYTES} bytes, got {len(key)}")
    return key


#: Seconds to connect and to prove the key.
CONNECT_S: Final = 5.0
#: Seconds between a coordinator's pings. A stage that answers none within half of it is lost; so is a
#: coordinator that sends none for three times as long. Between stages there are none: one that is behind does
#: not read.
HEARTBEAT_S: Final = 10.0
SILENCE_S: Final = 3.0 * HEARTBEAT_S


class ChannelError(Exception):
    """A failed connection attempt; the message gives the reason."""


_Socket: TypeAlias = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


class StageChannel:
    """Frames to and from one peer, once it is open. Sending never blocks: `pending_bytes` are queued."""

    def __init__(self) -> None:
        self._socket: _Socket | None = None
        self._frames: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._left = asyncio.Event()
        self.pending_bytes = 0
        #: Called when everything has left.
        self.drained: Callable[[], None] | None = None
        self._sender: asyncio.Task[None] | None = None

    def open(self, socket: _Socket) -> None:
        """Use a connection: send the queued frames."""
        self._socket = socket
        self._sender = asyncio.create_task(self._send(socket))

    def send(self, frame: bytes) -> None:
        """Queue a frame."""
        self._frames.append(frame)
        self.pending_bytes += len(frame)
        self._left.clear()
        self._wake.set()

    async def flush(self) -> None:
        """Wait until everything has left."""
        if self.pending_bytes:
            await self._left.wait()

    async def _send(self, socket: _Socket) -> None:
        try:
            while True:
                while self._frames:
                    frame = self._frames.popleft()
                    await socket.send_bytes(frame)
                    self.pending_bytes -= len(frame)
                self._left.set()
                if self.drained is not None:
                    self.drained()
                self._wake.clear()
                await self._wake.wait()
        except (ConnectionError, aiohttp.ClientError):
            pass  # the reader of the connection sees its end

    async def frames(self, silence_s: float | None = None) -> AsyncIterator[bytes]:
        """Yield frames until the connection ends or stays silent for `silence_s`."""
        assert self._socket is not None, "expected an open channel"
        share = Share()
        while True:
            await share.spent()
            try:
                message = await self._socket.receive(timeout=silence_s)
            except TimeoutError:
                return
            if message.type is not aiohttp.WSMsgType.BINARY:
                return
            yield message.data

    async def close(self) -> None:
        """End the connection."""
        if self._sender is not None and self._socket is not None:
            end(self._sender)
            await self._socket.close()


async def connect(
    http: aiohttp.ClientSession,
    url: str,
    key: bytes,
    session: int,
    tls: ssl.SSLContext | None,
    channel: StageChannel | None = None,
) -> tuple[StageChannel, Welcome]:
    """Connect to a stage, by a channel that may have frames already; `session` is 0 for a stage.

    Raises `ChannelError`.
    """
    channel = channel or StageChannel()
    try:
        async with asyncio.timeout(CONNECT_S):
            proof = await _prove(http, url, key, session, tls)
            opened = await http.ws_connect(
                url + PATH,
                headers=proof,
                heartbeat=HEARTBEAT_S if session else None,
                max_msg_size=MAX_FRAME_BYTES,
                ssl=tls or True,
            )
            try:
                welcome = await _welcome(opened)
            except BaseException:
                await opened.close()
                raise
            channel.open(opened)
            return channel, welcome
    except TimeoutError as error:
        raise ChannelError(f"{url}: no answer within {CONNECT_S:g} s") from error
    except (OSError, aiohttp.ClientError, ChannelError) as error:
        raise ChannelError(f"{url}: {error}") from error


async def _prove(
    http: aiohttp.ClientSession, url: str, key: bytes, session: int, tls: ssl.SSLContext | None
) -> dict[str, str]:
    """Return the headers that prove the key, once the stage has proved it. Raises `ChannelError`."""
    nonce = new_nonce()
    headers = hello(session, nonce)
    async with http.get(url + PATH, headers=headers, ssl=tls or True, allow_redirects=False) as response:
        found = challenge(response.headers)
    if found is None:
        raise ChannelError("expected a challenge: another version of hetlb?")
    stage_nonce, proof = found
    if not hmac.compare_digest(proof, stage_proof(key, nonce, stage_nonce)):
        raise ChannelError("it has another key")
    return headers | proof_headers(stage_nonce, client_proof(key, nonce, stage_nonce, session))


async def _welcome(socket: aiohttp.ClientWebSocketResponse) -> Welcome:
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.BINARY:
        raise ChannelError("expected its description, the connection ended")
    try:
        welcome = decode(message.data)[0]
    except StageProtocolError as error:
        raise ChannelError(str(error)) from error
    if not isinstance(welcome, Welcome):
        raise ChannelError("expected its description: another version of hetlb?")
    return welcome


def check_peer(address: str, *, loopback: bool) -> None:
    """Raise `OSError` unless a stage may connect there. `loopback`: to this machine alone."""
    if is_special(address) or (loopback and not is_loopback(address)):
        expected = "an address of this machine (there is no key)" if loopback else "an address of a machine"
        raise OSError(errno.EACCES, f"expected {expected}, got {address}")


class Peers:
    """Connections to other stages, made when first needed."""

    def __init__(
        self,
        key: bytes,
        tls: ssl.SSLContext | None,
        lost: Callable[[str, str], None],
        drained: Callable[[], None],
    ) -> None:
        """`lost(url, reason)` is called when a connection ends; its queued frames are dropped."""
        self._key, self._tls = key, tls
        self._lost, self._drained = lost, drained
        self._http: aiohttp.ClientSession | None = None
        self._channels: dict[str, StageChannel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, url: str, frame: bytes) -> None:
        """Queue a frame for a stage."""
        channel = self._channels.get(url)
        if channel is None:
            if self._http is None:
                connector = aiohttp.TCPConnector(socket_factory=self._socket)
                self._http = aiohttp.ClientSession(connector=connector)
            channel = self._channels[url] = StageChannel()
            channel.drained = self._drained
            task = asyncio.create_task(self._run(url, channel, self._http))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        channel.send(frame)

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        """Create a socket for a stage's resolved address. Raises `OSError`."""
        family, kind, protocol, _, place = address
        check_peer(place[0], loopback=not self._key)
        return socket.socket(family, kind, protocol)

    def pending_bytes(self, url: str) -> int:
        """Return the bytes queued for a stage."""
        channel = self._channels.get(url)
        return 0 if channel is None else channel.pending_bytes

    async def _run(self, url: str, channel: StageChannel, http: aiohttp.ClientSession) -> None:
        reason = f"{url}: the connection ended"
        try:
            await connect(http, url, self._key, 0, self._tls, channel)
            try:
                async for _ in channel.frames():
                    break  # a stage has nothing to say to another one
            finally:
                await channel.close()
        except ChannelError as error:
            reason = str(error)
        del self._channels[url]
        self._lost(url, reason)

    async def close(self) -> None:
        """End all connections."""
        await ended(*self._tasks)
        if self._http is not None:
            await self._http.close()
