"""Assertions that a scheduler's books balance: after a simulation or a replay; in tests, after every step."""

from __future__ import annotations

import math

from hetlb.balancer.core.fleet_state import FleetState
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.ledger import Ledger
from hetlb.balancer.core.occupancy import Occupancy
from hetlb.balancer.core.prefix_index import Tree
from hetlb.balancer.core.queue import Queue
from hetlb.balancer.core.scheduler import Scheduler

#: Fields of an `Occupancy` that its ledger decides alone.
_SEEN = (
    "empty", "running", "context", "kv_utilization", "unread", "kv_tokens", "kv_excess", "sample_at",
    "incoming", "oldest_at", "troubled",
)  # fmt: skip


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that blocks, work and requests are all accounted for."""
    ledger, queue, placement = scheduler.ledger, scheduler.queue, scheduler.placement
    known = {id(each): each for each in (*ledger.leased.values(), *scheduler.instances)}
    everyone = list(known.values())
    check_ledger(ledger, everyone)
    check_starts(scheduler.fleet)
    if placement.splits is not None:
        placement.splits.check_integrity(everyone)
    leased = {lease.request.id for lease in ledger.leases()}
    waiting = {entry.request.id for entry in queue}
    assert not leased & waiting, f"requests {leased & waiting} wait and are leased"
    check_queue(queue)
    retries = placement.retries
    assert retries.leases <= ledger.leased.keys(), "a retry outlived its lease"
    assert retries.attempts.keys() <= leased | waiting, "retry notes outlived their request"


def check_ledger(ledger: Ledger, everyone: list[Instance]) -> None:
    """Assert that each instance books its leases and nothing else."""
    for instance in everyone:
        check_instance(instance)
    assert sum(len(instance.leases) for instance in everyone) == len(ledger.leased)
    for lease_id, instance in ledger.leased.items():
        assert lease_id in instance.leases, f"lease {lease_id} is not booked on {instance.name}"
    leases = ledger.leases()
    incoming = {lease.id for lease in leases if lease.incoming}
    expected = {lease.decode.id for lease in leases if lease.decode is not None and lease.decode.incoming}
    assert incoming == expected, "a decode leg is booked without its prefill leg"


def check_queue(queue: Queue) -> None:
    """Assert that the counts of a queue match its entries."""
    flows = [list(flow.entries.values()) for flow in queue.flows]
    entries = [entry for waiting in flows for entry in waiting]
    assert sum(entry.request.body_bytes for entry in entries) == queue.bytes
    assert {entry.request.id for entry in entries} == queue.held.keys()
    assert all(flows), "an empty flow was left behind"
    assert all(queue._lines.values()), "an empty line was left behind"
    assert all(entry.request.id in entry.flow.entries for entry in entries), "an entry has a wrong flow"
    held: dict[str | None, list[int]] = {}
    for entry in entries:
        of = held.setdefault(entry.request.tenant, [0, 0])
        of[0] += 1
        of[1] += entry.request.body_bytes
    assert queue.tenants is None or held == queue.tenants.waiting


def check_tree(tree: Tree) -> None:
    """Assert that the counts of a prefix cache match its nodes."""
    nodes = tree.nodes.values()
    assert tree.used_tokens == sum(node.own for node in nodes if node.users), "tokens in use"
    assert tree.unused_tokens == sum(node.own for node in tree.unused.values()), "unused tokens"
    assert all(node.users >= 0 for node in nodes), "negative users"
    assert {node.key for node in nodes if not node.users} == tree.unused.keys(), "unused nodes"


def check_starts(fleet: FleetState) -> None:
    """Assert that the instances are listed by the start of their process."""
    starts: dict[float, list[str]] = {}
    for each in fleet.instances.values():
        if each.began is not None:
            starts.setdefault(each.began, []).append(each.name)
    found = {began: sorted([each.name for each in alike]) for began, alike in fleet.by_start.items()}
    assert found == {began: sorted(names) for began, names in starts.items()}


def check_instance(instance: Instance) -> None:
    """Assert that the bookings on an instance are the sums over its live leases."""
    leases = instance.leases.values()
    used: dict[int, int] = {}
    for lease in leases:
        node = None if lease.shared is None else lease.shared.node
        while node is not None:
            used[id(node)] = node.own
            node = node.parent
    shared = sum(used.values()) + instance.held_tokens
    assert all(instance.leases.get(each.id) is each and each.incoming for each in instance.incoming.values())
    for name in ("work_ns", "promised_tokens", "prompt_tokens"):
        booked_there = sum(getattr(lease, name) for lease in leases)
        assert getattr(instance, name) == booked_there, f"{name} of {instance.name}"
    assert instance.kv_tokens == shared + sum(lease.kv_tokens for lease in leases), instance.name
    prompts = shared + sum(lease.kv_prompt_tokens for lease in leases)
    assert instance.kv_prompt_tokens == prompts, instance.name
    unread = sum(lease.unread_tokens for lease in leases if lease.first_token_at is None)
    assert instance.pending_prompt_tokens == unread, instance.name
    assert instance.in_flight == len(instance.leases), instance.name
    assert instance.sequences == sum(lease.request.sequences for lease in leases), instance.name
    stated = sum(lease.request.sequences for lease in leases if lease.request.service.stated)
    assert instance.stated_sequences == stated, instance.name
    streams = [lease.request for lease in leases if lease.first_token_at is None and lease.request.streamed]
    assert instance.unread_sequences == sum(request.sequences for request in streams), instance.name
    groups = {lease.id: lease for lease in leases if lease.request.sequences > 1}
    assert instance.groups == groups, instance.name
    assert 0 <= instance.finished_sequences <= sum(each.request.sequences - 1 for each in groups.values())
    assert all(not lease.ended for lease in leases), instance.name
    grown = sum(lease.request.sequences * instance.steps.age(lease) for lease in leases)
    assert math.isclose(instance.steps.grown_tokens, grown, abs_tol=1e-3), instance.name
    if (kept := instance.last_occupancy) is not None:
        anew = Occupancy(instance)
        assert (kept.load.batch, id(kept.load.latency)) == (anew.load.batch, id(anew.load.latency))
        assert all(getattr(kept, name) == getattr(anew, name) for name in _SEEN), instance.name
    if instance.adapters is not None:
        names = [lease.request.model for lease in leases if lease.request.model in instance.adapters.names]
        assert instance.adapters.count() == {name: names.count(name) for name in names}, instance.name
    check_tree(instance.tree)
