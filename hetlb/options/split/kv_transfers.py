"""KV transfers: one vLLM instance prefills the prompt of a request, another one decodes its answer.

The prefill leg asks for one token with `kv_transfer_params`. The parameters in its answer are copied
unchanged into the body of the decode leg (NIXL). With Mooncake both legs are sent at once, with an engine id
from the bootstrap server of the prefill instance. A prefill instance keeps the KV blocks for `lease_s`: KV
fetched later belongs to another prompt, and the answer is wrong with status 200. So the first token must come
before the lease can have ended, by our clock, or one instance gets the whole request. The scheduler learns
from the decode engine's counters if a prompt was fetched or computed anew (`FetchChecks` in `transfers.py`).
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.rejections import DROPPED
from hetlb.balancer.core.resend_budget import Resends
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import Command, Connector, Hold, KvLink, Lease, Outcome, Role
from hetlb.balancer.engines.upstream import EngineConnection, SideCall
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange import exchange_states as states
from hetlb.balancer.exchange.attempt import ANSWER, Attempt, Owed
from hetlb.balancer.exchange.driver import Driver, Splits
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.engine_answer import EngineAnswer
from hetlb.balancer.exchange.exchange import EngineRequest, Exchange
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.balancer.exchange.plain_attempt import PLAIN, Handling, Plain
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import ResponseHead
from hetlb.balancer.http.openai_body import with_field
from hetlb.balancer.http.sse import SseWatcher
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.errors import NOT_JSON
from hetlb.options.split.hand_overs import HandOvers
from hetlb.options.split.prefill_answer import BootstrapEntry, PrefillFields, TransferFields
from hetlb.options.split.transfers import FetchChecks

logger = logging.getLogger("hetlb.kv")

#: Unused share of a lease: the clocks of engine and proxy start at different times.
_MARGIN_SHARE: Final = 0.1
_LEAST_MARGIN_S: Final = 0.5
#: Maximum time of a decode leg, as a multiple of the expected one. If the prefill instance hangs, the decode
#: instance never answers.
_PATIENCE_FACTOR: Final = 5.0
#: Least maximum time of a decode leg in seconds: the first contact of two engines takes about 5 s on RDMA.
_LEAST_PATIENCE_S: Final = 10.0
_ASK: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
#: Part of the names of transfers: no other process has it.
_PROCESS: Final = secrets.token_hex(8).encode("ascii")
#: Kinds of requests that can be split.
_SPLIT_KINDS: Final = (Kind.COMPLETION, Kind.CHAT, Kind.RESPONSES, Kind.MESSAGES)
#: Fields of a body left out of a prefill leg. They make no difference to the KV cache of its prompt, or they
#: could end the leg without keeping its blocks.
_NOT_PREFILLED: Final = (
    "stream", "stream_options", "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs",
    "max_completion_tokens",
)  # fmt: skip
#: Fields that a body may not hold: a decode instance that did not prefill the prompt cannot answer it.
_WHOLE_ONLY: Final = (
    b'"prompt_logprobs"', b'"echo"', b'"use_beam_search"', b'"prompt_embeds"', b'"return_token_ids"',
    b'"prompt_token_ids"',
)  # fmt: skip
#: More tokens than any engine takes: a request that asks for them is refused before it runs.
_TOO_MANY_TOKENS: Final = 1 << 30
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_answer = msgspec.json.Decoder(PrefillFields)
_transfer = msgspec.json.Decoder(TransferFields)
_bootstrap = msgspec.json.Decoder(dict[str, BootstrapEntry])


class TransferState(StrEnum):
    """State of a transfer: which legs are under way."""

    ASKING = "bootstrap"
    PREFILL = "prefill"
    BOTH = "both"
    DECODE = "decode"
    OVER = "over"


_UNDER_WAY: Final = (TransferState.ASKING, TransferState.PREFILL, TransferState.BOTH, TransferState.DECODE)
BOTH_SENT: Final = Transition("the engine's id is known", (TransferState.ASKING,), TransferState.BOTH)
PREFILL_ENDED: Final = Transition(
    "the prefill leg ended well", (TransferState.PREFILL, TransferState.BOTH), TransferState.DECODE
)
LEFT: Final = Transition("the first token, or a failure", _UNDER_WAY, TransferState.OVER)


class DecodeLeg(Handling):
    """Handling of the decode leg until its first token: then it is a plain attempt."""

    __slots__ = ("_split",)

    def __init__(self, split: Split) -> None:
        super().__init__(keeps=True)
        self._split = split

    def request(self, attempt: Plain, connection: EngineConnection) -> tuple[bytes, bytes]:
        return self._split.decode_request(connection)

    def begins(self, attempt: Plain, answer: EngineAnswer, payload: bytes, whole: bool) -> bytes | None:
        return self._split.decode_begins(answer, payload, whole)

    def lost(self, attempt: Plain, end: End, otherwise: Callable[[], None]) -> None:
        self._split.decode_failed(end)


class Split(Attempt):
    """A request in two legs, from the dispatch of the prefill to the first token of the decode; plain then.

    `lease` is the running leg's. `_body` is the body of the decode leg. `_pushed`: the prefill instance sends
    the blocks by itself, and keeps unfetched blocks until the lease ends. `_runs`: the decode leg was sent
    and has not ended.
    """

    __slots__ = (
        "_body", "_call", "_concurrent", "_decode", "_hold", "_kept", "_kept_whole", "_leg", "_link",
        "_params", "_prefill", "_pushed", "_query", "_runs", "_splits", "_until", "driver", "exchange",
        "lease", "state",
    )  # fmt: skip

    def __init__(self, splits: KvTransfers, driver: Driver, exchange: Exchange, lease: Lease) -> None:
        super().__init__(exchange.record.method)
        assert lease.decode is not None, f"{lease!r} is no prefill leg"
        self.driver = driver
        self.exchange = exchange
        self.lease = lease
        self._splits = splits
        self._link = splits.link(lease)
        #: True if both legs are sent at the same time.
        self._concurrent = self._link.connector is Connector.MOONCAKE
        self._prefill, self._decode = lease, lease.decode
        #: Attempt of the decode leg. It takes the place of this one once the leg has begun.
        self._leg = Plain(driver, exchange, lease.decode, DecodeLeg(self))
        self.state = TransferState.ASKING if self._concurrent else TransferState.PREFILL
        self._body = exchange.outgoing.body
        self._call: SideCall | None = None
        self._query: SideCall | None = None
        self._hold: Hold | None = None
        #: Parameters of the decode leg, once known.
        self._params: bytes | None = None
        #: Time after which the first token is of no use.
        self._until = math.inf
        self._pushed = self._runs = False
        #: Bytes of the decode leg's answer until it may go on, and whether they are all of it.
        self._kept, self._kept_whole = b"", False

    # --- the prefill leg ---

    def begin(self) -> None:
        """Send the prefill leg. If the connector has a bootstrap server, wait for the engine id from it."""
        exchange, driver, lease = self.exchange, self.driver, self._prefill
        now = exchange.record.dispatched_at = lease.dispatched_at
        exchange.enter(states.PREFILL_DISPATCHED, now)
        params = _ASK
        if self._concurrent:
            params = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"%b"}' % self._name()
        body = _prefill_body(exchange.record.kind, self._body, params)
        pool = driver.pools.of(lease)
        head = b"%bx-request-id: %b\r\n" % (self._leg.head_lines(pool), exchange.outgoing.label)
        self._call = SideCall(
            pool, head, body, self._prefilled, self._prefill_failed,
            lambda: driver.scheduling.fleet.serves(lease), exchange.fault,
        )  # fmt: skip
        if self.state is TransferState.PREFILL:
            self._call.send()
            return
        if self._link.bootstrap is None:
            self._query_failed(ends.NOT_HANDED_OVER, "its bootstrap server is not known")
            return
        query = driver.pools.beside(self._link.bootstrap)
        self._query = SideCall(
            query, query.head(b"GET /query"), b"", self._queried, self._query_failed, on_fault=exchange.fault
        )
        self._query.send()

    def _name(self) -> bytes:
        return b"xfer-%b-%d" % (_PROCESS, self._prefill.id)

    def _queried(self, head: ResponseHead, body: bytes) -> None:
        """Send both legs: the bootstrap server told the id of the prefill engine."""
        query, self._query = self._query, None
        try:
            entry = _bootstrap.decode(body)["0"] if head.status == 200 else None
        except (*NOT_JSON, KeyError):
            entry = None
        if entry is None or query is None or self._call is None:
            self._query_failed(ends.NOT_HANDED_OVER, "its bootstrap server does not name the engine")
            return
        self._params = msgspec.json.encode(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_bootstrap_addr": query.pool.origin,
                "remote_engine_id": entry.engine_id,
                "transfer_id": self._name().decode("ascii"),
            }
        )
        self._body = with_field(self._body, b"kv_transfer_params", self._params)
        self.state = BOTH_SENT.take(self.state)
        self._call.send()
        self._leg.send(fresh=True)

    def _query_failed(self, end: End, detail: str) -> None:
        self._query = None
        self._unsplit(ends.NOT_HANDED_OVER, "no_bootstrap")

    def _prefill_failed(self, end: End, detail: str) -> None:
        self._call = None
        if end is ends.NOT_ACCEPTED or end is ends.LOOP:
            self._whole().try_again(end)
        elif end is ends.LOCAL:
            self._whole().engine_failed(end, detail)
        else:
            self._unsplit(end if end is ends.MOVED else ends.DROPPED, "prefill_failed")

    def _whole(self) -> Plain:
        """Stop both legs. Return the attempt of the prefill lease, which is a plain one from now on."""
        self.leave()
        attempt = self.exchange.attempt = Plain(self.driver, self.exchange, self._prefill)
        return attempt

    def _prefilled(self, head: ResponseHead, body: bytes) -> None:
        self._call = None
        exchange = self.exchange
        record = exchange.record
        if head.status != 200:
            self._prefill_refused(head, body)
            return
        if self._link.connector is Connector.NIXL:
            try:
                answer = _answer.decode(body)
                params = bytes(answer.kv_transfer_params)
                self._pushed = params != b"" and _transfer.decode(params).transfer_mode == "push"
            except NOT_JSON:
                params = b""
            if not params.startswith(b"{"):
                self._unsplit(ends.NOT_HANDED_OVER, "no_params")
                return
            self._params = params
            self._body = with_field(self._body, b"kv_transfer_params", params)
            if self._pushed and record.kind is Kind.RESPONSES and answer.id:
                # Blocks go to the request of the same id, which vLLM takes from the body of a response alone.
                self._body = with_field(self._body, b"request_id", msgspec.json.encode(answer.id))
        self.state = PREFILL_ENDED.take(self.state)
        record.lease, record.prefill_instance = None, self._prefill.instance
        exchange.enter(states.PREFILLED, exchange.now())
        self._splits.prefilled(self._prefill)

    def _prefill_refused(self, head: ResponseHead, body: bytes) -> None:
        """Pass on an error of the prefill instance, unless its engine is broken."""
        if head.status >= 500 and b"retry-after" not in head.fields:
            self._unsplit(ends.SERVER_ERROR, "prefill_error")
            return
        exchange, attempt = self.exchange, self._whole()
        exchange.enter(states.PREFILL_REFUSED, exchange.now())
        attempt.engine_head(head, len(body))
        if exchange.attempt is attempt and exchange.phase is Phase.SENT:  # no other instance has room for it
            attempt.engine_end(body)

    # --- the decode leg ---

    def takes(self, lease: Lease) -> bool:
        """Send the decode leg, or let it go on; for another lease it is given up."""
        exchange, leg = self.exchange, self._leg
        if lease is not self._decode:
            self.leave()
            return False
        # The prefill instance keeps the KV from now on.
        record = exchange.record
        record.lease = self.lease = lease
        self._hold = lease.hold
        now = lease.dispatched_at
        begun_at = self._prefill.dispatched_at
        read_at = begun_at if self.driver.sweeper.stalled_since(begun_at) else now
        lease_s = self._link.lease_s
        self._until = min(
            read_at + lease_s - max(_LEAST_MARGIN_S, _MARGIN_SHARE * lease_s),
            now + max(_LEAST_PATIENCE_S, _PATIENCE_FACTOR * lease.forecast_end_s),
        )
        if leg.engine is None and leg.answer is None:
            exchange.enter(states.DISPATCHED, now)
            if not self._concurrent:
                # Its parameters may be used once: an idle connection that turned out to be closed would
                # leave open whether they were.
                leg.send(fresh=True)
        else:
            exchange.enter(states.DECODE_UNDER_WAY, now)
            kept, self._kept = self._kept, b""
            if self._kept_whole:
                leg.engine_end(kept)
            elif kept:
                leg.engine_body(kept)
        return True

    def decode_request(self, connection: EngineConnection) -> tuple[bytes, bytes]:
        """Return head and body of the decode leg: it runs from now on."""
        self._runs = True
        return self._leg.head_lines(connection.pool), self._body

    def decode_begins(self, answer: EngineAnswer, payload: bytes, whole: bool) -> bytes | None:
        """Keep the answer until its first token, or an error of the request's own."""
        self._kept += payload
        self._kept_whole = whole
        self._runs = self._runs and not whole
        return self._kept if self._may_begin(answer) else None

    def _may_begin(self, answer: EngineAnswer) -> bool:
        """Return True once the buffered answer of the decode leg can go to the client; the split is over."""
        status = answer.head.status
        if self.exchange.now() > self._until:
            self._late()
            return False
        if status >= 500:
            self._unsplit(ends.NOT_HANDED_OVER, "decode_error")
            return False
        if self.state is not TransferState.DECODE:  # the prefill leg has not answered yet
            return False
        if answer.stream is not None:
            watcher = SseWatcher(False)
            watcher.feed(self._kept)
            if watcher.failed and not watcher.events:
                if not watcher.refused:
                    self._unsplit(ends.NOT_HANDED_OVER, "decode_error")
                    return False
            elif not watcher.events and not watcher.done and not self._kept_whole:
                return False
        self.state = LEFT.take(self.state)
        self.exchange.attempt, self._leg.handling = self._leg, PLAIN
        if status < 400:
            if not self._splits.checks(self._decode, self._hold):
                self._splits.ended()
        elif self._hold is not None and not self._pushed:
            self._splits.released(self._hold)  # vLLM releases them when it refuses the request
        return True

    def decode_failed(self, end: End) -> None:
        """Send the whole request to one instance, since the decode leg is lost."""
        self._runs = False
        if self.state is not TransferState.DECODE:
            self._unsplit(ends.NOT_HANDED_OVER, "decode_failed")
        elif end in ends.NOTHING_SENT:
            self._splits.ended("decode_failed")
            self._leg.try_again(end)
        else:
            self.exchange.dropped = DROPPED
            self._unsplit(ends.DROPPED, "decode_failed")

    # --- the end ---

    @property
    def may_be_taken(self) -> bool:
        return False

    @property
    def owes(self) -> Owed:
        return ANSWER

    def pause(self, paused: bool) -> None:
        self._leg.pause(paused)

    def head(self) -> bytes:
        return self._leg.head()

    def sweep(self, now: float, table: ProxyTable) -> None:
        """End legs that exceed their time."""
        if now > self._until:
            self._late()
        elif self.exchange.phase is not Phase.PREFILLING:
            self._leg.sweep(now, table)
        elif now - self.exchange.since > table.first_byte_timeout_s:
            if self._call is not None:
                self._call.abort()
            self._prefill_failed(ends.SILENT, "it did not answer in time")

    def _late(self) -> None:
        if self._leg.engine is not None:
            # What it may have fetched too late is of another prompt, and is in its prefix cache by now.
            _salt(self.exchange.outgoing)
        self._unsplit(ends.NOT_HANDED_OVER, "late")

    def _unsplit(self, end: End, why: str) -> None:
        """Send the whole request to one instance. `end` is the end of the running leg."""
        self.exchange.back_to_queue(states.RETRIED)
        self._splits.unsplit(self.lease, end.told, why)

    def leave(self) -> None:
        """Stop both legs."""
        self._leg.leave()
        if self.state is TransferState.OVER:
            return
        self.state = LEFT.take(self.state)
        for call in (self._call, self._query):
            if call is not None:
                call.abort()
        self._call = self._query = None
        hold = self._hold
        if hold is None or hold.ended or self._pushed:
            return
        if self._runs:
            # The decode engine says so to the other as soon as it notices.
            self._splits.released(hold)
        elif self._params is not None:
            self._splits.release(hold, self.exchange.record.request.model, self._params)

    def fault(self, error: Exception) -> None:
        self.exchange.fault(error)


class KvTransfers(Splits):
    """KV transfers of one process and its scheduler, and the calls to release kept blocks."""

    __slots__ = ("_carry_out", "_driver", "_releases", "_resends", "_scheduler", "_told", "_totals")

    def __init__(
        self, driver: Driver, scheduler: Scheduler, carry_out: Callable[[list[Command]], None]
    ) -> None:
        self._driver = driver
        self._scheduler = scheduler
        self._totals = driver.counted
        self._carry_out = carry_out
        #: Requests of the proxy's own to engines.
        self._releases: set[SideCall] = set()
        #: Budget of them, by the incarnation that is asked.
        self._resends: dict[int, Resends] = {}
        #: Pairs that were logged as failing, and how often.
        self._told: dict[tuple[str, str], int] = {}

    @property
    def _checks(self) -> FetchChecks:
        """Verdicts on transfers."""
        hand_overs = self._scheduler.placement.splits
        assert isinstance(hand_overs, HandOvers), "expected an instance with kv_transfer"
        return hand_overs.transfers.checks

    def may_split(self, kind: Kind, path: str, body: bytes) -> bool:
        return (
            kind in _SPLIT_KINDS and path.startswith("/v1/") and not any(key in body for key in _WHOLE_ONLY)
        )

    def attempt(self, exchange: Exchange, lease: Lease, gives_ids: bool, max_model_len: int) -> Split:
        return Split(self, self._driver, exchange, lease)

    def link(self, lease: Lease) -> KvLink:
        link = self._scheduler.ledger.leased[lease.id].spec.kv_transfer
        assert link is not None, f"{lease.instance} takes part in no KV transfer"
        return link

    def prefilled(self, lease: Lease) -> None:
        self._totals.instances[lease.instance].ended(Outcome.OK.value)
        self._carry_out(self._scheduler.on_prefilled(lease, self._driver.now()))

    def unsplit(self, lease: Lease, outcome: Outcome, why: str) -> None:
        """Send the whole request to one instance: a transfer failed."""
        self._totals.kv_transferred(why)
        self._totals.tried_again(lease.instance, outcome)
        self._carry_out(self._scheduler.on_unsplit(lease, outcome, self._driver.now()))

    def ended(self, result: str = "done") -> None:
        self._totals.kv_transferred(result)

    def checks(self, lease: Lease, hold: Hold | None) -> bool:
        """Return True if the counters of the decode engine will show whether a prompt was fetched."""
        if hold is None or hold.ended or hold.sent_tokens <= 0:
            return False
        target = self._scheduler.ledger.leased.get(lease.id)
        return target is not None and self._checks.checks(target)

    def judged(self) -> None:
        """Count the verdicts of the scheduler, and log pairs that are no longer split."""
        checks = self._checks
        for result, count in checks.take_results().items():
            self._totals.kv_transferred(result, count)
        if not checks.restrained:
            return
        for record in checks.resting(self._driver.now()):
            if self._told.get(record.names) != record.rests:
                self._told[record.names] = record.rests
                source, target = record.names
                text = "KV caches of prompts read at %s do not reach %s: such requests are not split"
                tell(logger, Event.TRANSFERS_FAIL, text, source, target, instance=target, source=source)

    def released(self, hold: Hold) -> None:
        self._carry_out(self._scheduler.on_hold_released(hold, self._driver.now()))

    def release(self, hold: Hold, model: str, params: bytes) -> None:
        """Free a prompt at its prefill instance: send a decode instance a request that it will refuse."""
        body = msgspec.json.encode(
            {
                "model": model,
                "prompt": [1],
                "max_tokens": _TOO_MANY_TOKENS,
                "kv_transfer_params": msgspec.Raw(params),
            }
        )
        able = [
            each
            for each in self._scheduler.instances
            if each.routable
            and each.name != hold.instance
            and each.spec.role is not Role.PREFILL
            and each.spec.kv_transfer is not None
            and model in each.models
        ]
        able.sort(key=lambda each: each.name != hold.target)
        self._release_by(able, hold, body)

    def _release_by(self, able: list[Instance], hold: Hold, body: bytes) -> None:
        """Ask one instance after the other. If none can, the prompt is kept until its lease ends."""
        now = self._driver.now()
        budgets = self._resends
        if len(budgets) > len(self._scheduler.instances):
            live = {each.incarnation for each in self._scheduler.instances}
            budgets = self._resends = {name: each for name, each in budgets.items() if name in live}
        while able and not budgets.setdefault(able[0].incarnation, Resends()).take(now):
            able = able[1:]
        if not able or hold.ended:
            return
        asked, *others = able
        budget = budgets[asked.incarnation]

        def done(answer: ResponseHead, _: bytes) -> None:
            self._releases.discard(call)
            if answer.status == 400:
                budget.answered()
                self.released(hold)

        def failed(end: End, detail: str) -> None:
            self._releases.discard(call)
            self._release_by(others, hold, body)

        pool = self._driver.pools.open(asked.incarnation, asked.name, asked.spec.url)
        head = pool.head(b"POST /v1/completions", b"content-type: application/json\r\n")
        call = SideCall(pool, head, body, done, failed)
        self._releases.add(call)
        call.send()

    def stop(self) -> None:
        for call in self._releases:
            call.abort()


def _prefill_body(kind: Kind, body: bytes, params: bytes) -> bytes:
    """Return the body of a prefill leg: the client's, but for one token of output and no stream."""
    fields = _raw_fields.decode(body)
    for name in _NOT_PREFILLED:
        fields.pop(name, None)
    fields["max_output_tokens" if kind is Kind.RESPONSES else "max_tokens"] = msgspec.Raw(b"1")
    if kind is Kind.RESPONSES:
        fields["store"] = msgspec.Raw(b"false")
    elif kind is not Kind.MESSAGES:
        fields["ignore_eos"] = msgspec.Raw(b"true")
    fields["kv_transfer_params"] = msgspec.Raw(params)
    return msgspec.json.encode(fields)


def _salt(outgoing: EngineRequest) -> None:
    """Add a salt to a request, so that engines use no cached blocks.

    A request with a cache salt of its own keeps it.
    """
    if b'"cache_salt"' not in outgoing.body:
        salt = b'"hetlb-%b"' % secrets.token_hex(8).encode("ascii")
        outgoing.body = with_field(outgoing.body, b"cache_salt", salt)
