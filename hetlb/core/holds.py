"""Prompts that prefill instances keep for decode instances, and how long their transfers took."""

from __future__ import annotations

from collections.abc import Iterable

from mypy_extensions import mypyc_attr

from hetlb.core.instance import Instance
from hetlb.core.transfer import TransferTimes
from hetlb.core.types import Hold, Lease, LeaseId


@mypyc_attr(acyclic=True)
class Holds:
    """Holds of all instances, by the lease of their prefill; each counts in the ledger of its instance."""

    __slots__ = ("_kept", "transfers")

    def __init__(self) -> None:
        self._kept: dict[LeaseId, tuple[Instance, Hold]] = {}
        self.transfers = TransferTimes()

    @property
    def count(self) -> int:
        """Holds that have not ended."""
        return len(self._kept)

    def all(self) -> list[Hold]:
        """Those that have not ended. To be read, not written."""
        return [hold for _, hold in self._kept.values()]

    def keep(self, source: Instance, hold: Hold) -> None:
        """An instance keeps a prompt from now on."""
        source.hold(hold)
        self._kept[hold.id] = source, hold

    def let_go(self, hold: Hold) -> None:
        """A prompt was fetched, released or has expired."""
        source, _ = self._kept.pop(hold.id)
        source.let_go(hold)

    def let_go_expired(self, now: float) -> None:
        """Drop holds whose instances no longer keep the prompt."""
        for hold in self.all():
            if hold.expires_at <= now:
                self.let_go(hold)

    def fetched(self, hold: Hold, lease: Lease, target: Instance, now: float) -> None:
        """The first token of a decode leg came: its blocks were fetched."""
        source, _ = self._kept[hold.id]
        self.let_go(hold)
        link = target.spec.kv_transfer
        if link is not None and hold.sent_tokens > 0:
            seconds = max(0.0, now - lease.dispatched_at - hold.expected_s)
            self.transfers.observe(source, target, link, hold.sent_tokens, seconds, now)

    def check_integrity(self, instances: Iterable[Instance]) -> None:
        """Assert that every hold is kept by one instance, and that none keeps another."""
        for hold_id, (source, hold) in self._kept.items():
            assert source.holds.get(hold_id) is hold, f"hold {hold_id} is not kept by {source.name}"
        kept = {id(source): source for source, _ in self._kept.values()}
        kept.update({id(instance): instance for instance in instances})
        assert sum(len(instance.holds) for instance in kept.values()) == len(self._kept)
