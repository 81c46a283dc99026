"""The queue of one of several processes that serve: its bounds and its fairness are those of all together.

Promise: of a tenant that waits in several of them every one knows the same tag, whoever serves it, and what
it holds in all of them counts for its share. What one process writes stays right when another dies.

Every process writes entries into its row of the ledger and reads everybody's. Of a tenant at a priority of a
model: the tag it was given last, and whether it waits there. The largest of its tags is its tag. Of a
priority: the virtual time, and the largest tag ever given, which is where virtual time begins again once
nobody waits anywhere. Of a tenant: requests and bytes that it holds. Two processes that serve one tenant
within the same microseconds may count one of the two requests only.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetlb.core.admission import Fair, Flow, Lane, Queue, Share, moved_on
from hetlb.core.ledger import Ledger, key_of
from hetlb.core.types import Request

__all__ = ["SharedFair", "SharedQueue"]


class SharedFair(Fair):
    """The flows of one priority of a model in this process, with the tags of all. `anew`: nobody waits."""

    __slots__ = ("_key", "_ledger", "_name", "_told")

    def __init__(self, ledger: Ledger, model: str, priority: int, *, anew: bool) -> None:
        super().__init__()
        self._ledger = ledger
        self._name = f"{model}\0{priority}"
        self._key = key_of("time", self._name)
        times = ledger.entries(self._key)
        largest = max([each[1] for each in times], default=0)
        self.virtual = largest if anew else max([each[0] for each in times], default=0)
        #: The virtual time and the largest tag, as told last.
        self._told = self.virtual, largest

    def _begun(self, tenant: str | None, weight: float) -> Flow:
        key = self._key_of(tenant)
        flow = Flow(tenant, self._tag(key), weight, key)
        self._ledger.put(key, flow.tag, 1)
        return flow

    def _key_of(self, tenant: str | None) -> int:
        return key_of("nobody", self._name) if tenant is None else key_of("tag", self._name, tenant)

    def _tag(self, key: int) -> int:
        """The start tag of a tenant that does not wait here: it joins its own where it waits elsewhere."""
        last, waits = 0, False
        for tag, waits_there in self._ledger.entries(key):
            last = max(last, tag)
            waits = waits or waits_there != 0
        if waits:
            return last
        for time, _ in self._ledger.entries(self._key):
            self.virtual = max(self.virtual, time)
        return max(self.virtual, last)

    def turn(self) -> Flow:
        """Whose turn it is, by what all have served."""
        while True:
            flow = super().turn()
            if not self._catch_up(flow):
                return flow

    def _catch_up(self, flow: Flow) -> bool:
        """Take over what others served of a tenant that waits here."""
        tag = flow.tag
        for theirs, _ in self._ledger.entries(flow.key):
            tag = max(tag, theirs)
        if tag == flow.tag:
            return False
        flow.tag = tag
        self._line_up(flow)
        return True

    def served(self, tenant: str | None, size: float, weight: float) -> None:
        """A request of a tenant was served, from its flow here or past it."""
        flow = self.flows.get(tenant)
        if flow is None:
            key = self._key_of(tenant)
            tag = moved_on(self._tag(key), size, weight)
            self._ledger.put(key, tag, 0)
        else:
            self._catch_up(flow)
            super().served(tenant, size, weight)
            tag = flow.tag
            self._ledger.put(flow.key, tag, 1)
        told = self.virtual, max(tag, self._told[1])
        if told != self._told:
            self._told = told
            self._ledger.put(self._key, told[0], told[1])

    def emptied(self, flow: Flow) -> None:
        """Nothing of a flow waits here any more."""
        del self.flows[flow.tenant]
        self._ledger.put(flow.key, flow.tag, 0)


class SharedQueue(Queue):
    """A queue whose bounds and whose turns hold for those of all fellows together."""

    __slots__ = ("_ledger", "_models", "elsewhere", "elsewhere_bytes")

    def __init__(self, queue: Queue, ledger: Ledger, models: Mapping[str, int]) -> None:
        super().__init__(queue.limits)
        self._ledger = ledger
        self._models = models
        #: Requests, and bytes of them, that wait in other processes.
        self.elsewhere = self.elsewhere_bytes = 0

    def _within(self, requests: int, held_bytes: int, request: Request) -> bool:
        return super()._within(requests + self.elsewhere, held_bytes + self.elsewhere_bytes, request)

    def waiting(self, model: str) -> int:
        """The sizes of all that wait for a model, here and elsewhere."""
        own = super().waiting(model)
        cell = self._models.get(model) if self.elsewhere else None
        return own if cell is None else own + sum(each[1] for _, each in self._ledger.cells(cell))

    def _waits_elsewhere(self, model: str) -> bool:
        cell = self._models.get(model)
        return cell is not None and any(each[2] for _, each in self._ledger.cells(cell))

    def passed(self, request: Request, size: float) -> None:
        """A request was served without having waited; it counts where others wait, here or elsewhere."""
        model, priority = request.model, request.priority
        if self._lanes.get((model, request.pinned, False), {}).get(priority) is not None:
            super().passed(request, size)
        elif request.pinned is None and self._waits_elsewhere(model):
            fair = SharedFair(self._ledger, model, priority, anew=False)
            fair.served(request.tenant, size, self._weight(request.tenant))

    def held_by(self, tenant: str | None) -> tuple[int, int]:
        """How many requests and bytes a tenant holds, here and elsewhere."""
        share = self._shares.get(tenant)
        requests = held_bytes = 0
        for theirs, their_bytes in self._ledger.entries(_held_key(tenant) if share is None else share.key):
            requests += theirs
            held_bytes += their_bytes
        return requests, held_bytes

    def _new_fair(self, lane: Lane, priority: int) -> Fair:
        model, pinned, again = lane
        if pinned is not None or again or model not in self._models:
            return Fair()  # nobody else could place these
        return SharedFair(self._ledger, model, priority, anew=not self._waits_elsewhere(model))

    def _new_share(self, tenant: str | None) -> Share:
        return Share(_held_key(tenant))

    def _holds_now(self, share: Share) -> None:
        self._ledger.put(share.key, share.requests, share.bytes)


def _held_key(tenant: str | None) -> int:
    return key_of("nobody holds") if tenant is None else key_of("holds", tenant)
