"""Requests whose prompt one vLLM instance reads and whose answer another one decodes: both legs of them.

The prefill leg asks for one token with `kv_transfer_params`; those of its answer go on, as they are, in the
body of the decode leg (NIXL). With Mooncake both legs are sent at once, with an engine id from the bootstrap
server of the prefill instance. Shared storage needs no parameters.

A prefill instance keeps the KV blocks for `lease_s` and then gives them to others: KV that is fetched later
is that of another prompt, and the answer is wrong with status 200. So the first token must come before the
lease can have ended, by the clock of this process; else the answer is dropped and one instance gets the whole
request.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from hetlb.core.types import Connector, Hold, KvTransfer, Lease
from hetlb.proxy.ends import End
from hetlb.proxy.http.endpoints import Kind
from hetlb.proxy.http.http1 import ResponseHead
from hetlb.proxy.http.openai_fields import BootstrapEntry, PrefillFields, TransferFields
from hetlb.proxy.http.sse import SseWatcher
from hetlb.proxy.upstream import EngineConnection, EnginePool

#: Answers of prefill legs and bootstrap servers beyond this are none.
_MAX_ANSWER_BYTES: Final = 4 << 20
#: Of a lease, what is left unused: the clocks of the engine and of this process start at different times.
_MARGIN_SHARE: Final = 0.1
_LEAST_MARGIN_S: Final = 0.5
#: A decode leg whose prefill instance hangs never answers: it may take so many times what is expected...
_PATIENCE: Final = 5.0
#: ...and so many seconds at least: the first contact of two engines takes about 5 s on RDMA.
_LEAST_PATIENCE_S: Final = 10.0
#: More tokens than any engine takes: a request that asks for them is refused before it runs.
_TOO_MANY_TOKENS: Final = 1 << 30

_ASK: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
#: Kinds whose requests can be split.
SPLIT_KINDS: Final = (Kind.COMPLETION, Kind.CHAT, Kind.RESPONSES, Kind.MESSAGES)
#: Fields of a body that a prefill leg does not have: they make no difference to the KV cache of its prompt,
#: or could end it in a way in which its blocks are not kept.
_NOT_PREFILLED: Final = (
    "stream", "stream_options", "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs",
    "max_completion_tokens",
)  # fmt: skip
#: Fields that a body may not hold: a decode instance that does not read the prompt itself cannot answer it.
_WHOLE_ONLY: Final = (
    b'"prompt_logprobs"', b'"echo"', b'"use_beam_search"', b'"prompt_embeds"', b'"return_token_ids"',
    b'"prompt_token_ids"',
)  # fmt: skip
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_answer = msgspec.json.Decoder(PrefillFields)
_transfer = msgspec.json.Decoder(TransferFields)
_bootstrap = msgspec.json.Decoder(dict[str, BootstrapEntry])


def may_split(kind: Kind, path: str, body: bytes) -> bool:
    """True if a request with one prompt and one sequence can be split."""
    return kind in SPLIT_KINDS and path.startswith("/v1/") and not any(key in body for key in _WHOLE_ONLY)


def prefill_body(kind: Kind, body: bytes, params: bytes | None) -> bytes:
    """The body of a prefill leg: that of the client, but for one token of output and no stream."""
    fields = _raw_fields.decode(body)
    for name in _NOT_PREFILLED:
        fields.pop(name, None)
    fields["max_output_tokens" if kind is Kind.RESPONSES else "max_tokens"] = msgspec.Raw(b"1")
    if kind is Kind.RESPONSES:
        fields["store"] = msgspec.Raw(b"false")
    elif kind is not Kind.MESSAGES:
        fields["ignore_eos"] = msgspec.Raw(b"true")
    if params is not None:
        fields["kv_transfer_params"] = msgspec.Raw(params)
    return msgspec.json.encode(fields)


def with_field(body: bytes, name: bytes, value: bytes) -> bytes:
    """A JSON object with one more field at its end."""
    end = body.rfind(b"}")
    return b'%b,"%b":%b%b' % (body[:end], name, value, body[end:])


class SideCall:
    """A request of the proxy's own to an engine, and its whole answer, of bounded size.

    `lines` makes its head from the engine's own header lines, without `content-length` and the empty line.
    """

    __slots__ = (
        "_body", "_connection", "_done", "_failed", "_fresh", "_head", "_lines", "_over", "_pool",
        "_received", "_serves", "method", "plain",
    )  # fmt: skip

    def __init__(
        self,
        pool: EnginePool,
        method: bytes,
        lines: Callable[[bytes, bool], bytes],
        body: bytes,
        done: Callable[[ResponseHead, bytes], None],
        failed: Callable[[End | None, str], None],
        serves: Callable[[], bool] = lambda: True,
    ) -> None:
        self.method = method
        self.plain = True
        self._pool = pool
        self._lines = lines
        self._body = body
        self._done = done
        self._failed = failed
        self._serves = serves
        self._connection: EngineConnection | None = None
        self._head: ResponseHead | None = None
        self._received = bytearray()
        self._fresh = self._over = False

    def send(self) -> None:
        """Send it."""
        self._pool.send(self)

    def abort(self) -> None:
        """Have the engine stop working for it. No outcome is reported."""
        self._over = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        else:
            self._pool.cancel(self)

    def engine_connected(self, connection: EngineConnection, own_headers: bytes, passthrough: bool) -> None:
        """Write the request."""
        self._connection = connection
        length = b"" if self.method == b"GET" else b"content-length: %d\r\n" % len(self._body)
        connection.send(b"%b%b\r\n" % (self._lines(own_headers, passthrough), length), [self._body])

    def engine_identified(self) -> None:
        """After a reconnect it was looked at what the engine serves."""
        if self._serves():
            self._pool.send(self)
        else:
            self.engine_failed(None, "another model is served there")

    def engine_lost_idle(self) -> None:
        """A reused connection was closed before it answered: once more on a fresh one."""
        self._connection = None
        if self._fresh:
            self.engine_failed(None, "the engine closed the connection")
        else:
            self._fresh = True
            self._pool.send(self, fresh=True)

    def engine_head(self, head: ResponseHead, length: int | None) -> None:
        """The answer begins."""
        self._head = head

    def engine_events(self, chunks: bytes) -> bool:
        """Nothing of it is passed on as it stands."""
        return False

    def engine_body(self, payload: bytes) -> None:
        """More of the answer."""
        self._received += payload
        if len(self._received) > _MAX_ANSWER_BYTES and not self._over:
            self.abort()
            self._failed(None, "its answer is too long")

    def engine_end(self, payload: bytes) -> None:
        """The answer is whole."""
        self._connection = None
        if self._over:
            return
        self._over = True
        assert self._head is not None, "expected a head before the end"
        self._done(self._head, bytes(self._received) + payload)

    def engine_failed(self, end: End | None, detail: str) -> None:
        """The engine, or this machine, failed."""
        self._connection = None
        if not self._over:
            self._over = True
            self._failed(end, detail)


class SplitExchange(Protocol):
    """Interface of the request that a hand-over is for."""

    def prefilled(self) -> None: ...
    def prefill_refused(self, head: ResponseHead, body: bytes) -> None: ...
    def prefill_failed(self, end: End | None, detail: str) -> None: ...
    def handover_failed(self, why: str) -> None: ...
    def prefill_lines(self, own_headers: bytes, passthrough: bool) -> bytes: ...
    def send_decode(self) -> None: ...


class HandOver:
    """The two legs of one request, from the dispatch of the prefill to the first token of the decode.

    `params` are those of the decode leg, once known, and `body` is its body. After `until`, in seconds, its
    first token is of no use. `pushed`: the prefill instance sends the blocks by itself, and keeps those that
    are not asked for until the lease ends.
    """

    __slots__ = (
        "_call", "_connector", "_exchange", "_kind", "_link", "_original", "_pending", "_pending_end",
        "_query", "body", "decode", "hold", "lease", "params", "pushed", "read", "sent", "until",
    )  # fmt: skip

    def __init__(
        self, exchange: SplitExchange, kind: Kind, lease: Lease, link: KvTransfer, body: bytes
    ) -> None:
        assert lease.decode is not None, f"{lease!r} is no prefill leg"
        self._exchange = exchange
        self._kind = kind
        self._link = link
        self._connector = link.connector
        self._original = body
        self._call: SideCall | None = None
        self._query: SideCall | None = None
        self.lease = lease
        self.decode = lease.decode
        self.hold: Hold | None = None
        self.params: bytes | None = None
        self.body = body
        self.until = float("inf")
        #: True if the prompt has been read; whether the decode leg was sent without waiting for that.
        self.read = self.sent = self.pushed = False
        self._pending: bytes = b""
        self._pending_end = False

    # --- the prefill leg ---

    def begin(self, pool: EnginePool, serves: Callable[[], bool], query: EnginePool | None) -> None:
        """Send the prefill leg; `query` is the bootstrap server to ask first, if its protocol has one."""
        params: bytes | None = _ASK
        if self._connector is Connector.SHARED_STORAGE:
            params = None
        elif self._connector is Connector.MOONCAKE:
            params = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"%b"}' % self._name()
        body = prefill_body(self._kind, self._original, params)
        self._call = SideCall(
            pool, b"POST", self._exchange.prefill_lines, body, self._answered, self._prefill_failed, serves
        )
        if self._connector is not Connector.MOONCAKE:
            self._call.send()
            return
        if query is None:
            self._query_failed(None, "its bootstrap server is not known")
            return

        def lines(own_headers: bytes, passthrough: bool) -> bytes:
            return b"GET /query HTTP/1.1\r\n%b" % own_headers

        self._query = SideCall(query, b"GET", lines, b"", self._queried, self._query_failed)
        self._query.send()

    def _name(self) -> bytes:
        return b"xfer-%b-%d" % (_PROCESS, self.lease.id)

    def _queried(self, head: ResponseHead, body: bytes) -> None:
        """The bootstrap server told the id of the prefill engine: send both legs."""
        query, self._query = self._query, None
        try:
            entry = _bootstrap.decode(body)["0"] if head.status == 200 else None
        except (msgspec.DecodeError, KeyError, UnicodeDecodeError):
            entry = None
        if entry is None or query is None or self._call is None:
            self._query_failed(None, "its bootstrap server does not tell the engine")
            return
        self.params = msgspec.json.encode(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_bootstrap_addr": query._pool.origin,
                "remote_engine_id": entry.engine_id,
                "transfer_id": self._name().decode("ascii"),
            }
        )
        self.body = with_field(self._original, b"kv_transfer_params", self.params)
        self._call.send()
        self._exchange.send_decode()

    def _query_failed(self, end: End | None, detail: str) -> None:
        self._query = None
        self._exchange.handover_failed("no_bootstrap")

    def _prefill_failed(self, end: End | None, detail: str) -> None:
        self._call = None
        self._exchange.prefill_failed(end, detail)

    def _answered(self, head: ResponseHead, body: bytes) -> None:
        """The prefill instance has answered."""
        self._call = None
        if head.status != 200:
            self._exchange.prefill_refused(head, body)
            return
        if self._connector is Connector.NIXL:
            try:
                answer = _answer.decode(body)
                params = bytes(answer.kv_transfer_params)
                self.pushed = params != b"" and _transfer.decode(params).transfer_mode == "push"
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                params = b""
            if not params.startswith(b"{"):
                self._exchange.handover_failed("no_params")
                return
            self.params = params
            self.body = with_field(self._original, b"kv_transfer_params", params)
            if self.pushed and self._kind is Kind.RESPONSES and answer.id:
                # Blocks go to the request of the same id, which vLLM takes from the body of a response alone.
                self.body = with_field(self.body, b"request_id", msgspec.json.encode(answer.id))
        self.read = True
        self._exchange.prefilled()

    # --- the decode leg ---

    def begin_decode(self, now: float, read_at: float, expected_s: float) -> None:
        """The decode leg is sent now. The lease on the KV blocks began at `read_at` or later."""
        if self._link.holds:
            lease_s = self._link.lease_s
            self.until = min(
                read_at + lease_s - max(_LEAST_MARGIN_S, _MARGIN_SHARE * lease_s),
                now + max(_LEAST_PATIENCE_S, _PATIENCE * expected_s),
            )

    def first(
        self, payload: bytes, now: float, status: int, stream: bool, whole: bool
    ) -> tuple[bytes, bool, str]:
        """The first bytes of the decode leg's answer, whether they may go on, and the reason if they are of
        no use.

        ("", False, "") where it takes more to tell.
        """
        payload, self._pending = self._pending + payload, b""
        if now > self.until:
            return b"", False, "late"
        if status >= 500:
            return b"", False, "decode_error"
        if not self.read:  # the prefill leg has not answered yet
            self._pending, self._pending_end = payload, whole
            return b"", False, ""
        if stream and status == 200:
            watcher = SseWatcher(False)
            watcher.feed(payload)
            if watcher.failed and not watcher.events:
                if not watcher.refused:
                    return b"", False, "decode_error"
            elif not watcher.events and not watcher.done and not whole:
                self._pending = payload
                return b"", False, ""
        return payload, True, ""

    def take_pending(self) -> tuple[bytes, bool]:
        """Bytes of the decode leg's answer that came before the prefill leg's, and whether they were all."""
        pending, whole = self._pending, self._pending_end
        self._pending, self._pending_end = b"", False
        return pending, whole

    def cancel(self) -> None:
        """Stop the prefill leg."""
        for call in (self._call, self._query):
            if call is not None:
                call.abort()
        self._call = self._query = None

    def release_body(self, model: str) -> bytes | None:
        """A request that a decode instance refuses before it runs: vLLM then has the KV blocks released."""
        if self.params is None or not self.read or self.pushed:
            return None
        return msgspec.json.encode(
            {
                "model": model,
                "prompt": [1],
                "max_tokens": _TOO_MANY_TOKENS,
                "kv_transfer_params": msgspec.Raw(self.params),
            }
        )


_PROCESS: Final = secrets.token_hex(8).encode("ascii")


def fresh_salt() -> bytes:
    """A `cache_salt` as JSON that no other request has: nothing cached before is used."""
    return b'"hetlb-%b"' % secrets.token_hex(8).encode("ascii")
