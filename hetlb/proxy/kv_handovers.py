"""Hand-overs of KV blocks: facts for the scheduler, and requests of the proxy's own that release blocks.

One request's two legs are a `HandOver` (`handover.py`); this is what they share.
"""

from __future__ import annotations

from collections.abc import Callable

from hetlb.core.instance import Instance
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Command, Hold, KvTransfer, Lease, Outcome, Role
from hetlb.proxy.ends import End
from hetlb.proxy.engine_pools import EnginePools
from hetlb.proxy.handover import SideCall
from hetlb.proxy.http.http1 import ResponseHead
from hetlb.proxy.telemetry.counters import Totals
from hetlb.proxy.upstream import EnginePool


class KvHandOvers:
    """Hand-overs of one process, whose scheduler is in it too."""

    def __init__(
        self,
        scheduler: Scheduler,
        pools: EnginePools,
        totals: Totals,
        carry_out: Callable[[list[Command]], None],
        now: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._pools = pools
        self._totals = totals
        self._carry_out = carry_out
        self._now = now
        #: Requests of the proxy's own to engines.
        self._releases: set[SideCall] = set()

    def link(self, lease: Lease) -> KvTransfer:
        """Transfer of KV blocks from the instance of a lease."""
        link = self._scheduler.holder(lease).spec.kv_transfer
        assert link is not None, f"{lease.instance} takes part in no KV transfer"
        return link

    def bootstrap(self, lease: Lease) -> EnginePool | None:
        """Connections to the bootstrap server of a prefill instance, None where its connector has none."""
        return self._pools.bootstrap(lease.instance) if self.link(lease).concurrent else None

    def prefilled(self, lease: Lease) -> None:
        """A prefill leg ended well."""
        self._totals.instance(lease.instance).ended(Outcome.OK)
        self._carry_out(self._scheduler.on_prefilled(lease, self._now()))

    def unsplit(self, lease: Lease, outcome: Outcome, why: str) -> None:
        """A hand-over failed: the request goes to one instance as a whole."""
        self._totals.handed_over(why)
        self._totals.tried_again(lease.instance, outcome)
        self._carry_out(self._scheduler.on_unsplit(lease, outcome, self._now()))

    def ended(self, result: str = "done") -> None:
        """A hand-over has ended."""
        self._totals.handed_over(result)

    def released(self, hold: Hold) -> None:
        """A prefill instance keeps a prompt no longer."""
        self._carry_out(self._scheduler.on_hold_released(hold, self._now()))

    def release(self, hold: Hold, model: str, body: bytes) -> None:
        """Have a prefill instance keep a prompt no longer, by a request that a decode instance refuses."""
        able = [
            each
            for each in self._scheduler.instances
            if each.routable
            and each.name != hold.instance
            and each.spec.role is not Role.PREFILL
            and each.spec.kv_transfer is not None
            and each.serves(model)
        ]
        able.sort(key=lambda each: each.name != hold.target)
        self._release_by(able, hold, body)

    def _release_by(self, able: list[Instance], hold: Hold, body: bytes) -> None:
        """Ask one instance after the other; where none can, the prompt is kept until its lease ends."""
        if not able or hold.ended:
            return
        asked, *others = able

        def lines(own_headers: bytes, passthrough: bool) -> bytes:
            return b"POST /v1/completions HTTP/1.1\r\n%bcontent-type: application/json\r\n" % own_headers

        def done(head: ResponseHead, answer: bytes) -> None:
            self._releases.discard(call)
            if head.status == 400:
                self.released(hold)

        def failed(end: End | None, detail: str) -> None:
            self._releases.discard(call)
            self._release_by(others, hold, body)

        pool = self._pools.open(asked.incarnation, asked.name, asked.spec.url)
        call = SideCall(pool, b"POST", lines, body, done, failed)
        self._releases.add(call)
        call.send()

    def close(self) -> None:
        """Break off the requests of the proxy's own."""
        for call in self._releases:
            call.abort()
