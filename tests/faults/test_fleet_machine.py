"""The fault matrix as one state machine over the scheduler, with a clock of its own: engines that are in
some way unwell, clients that come and go, operators who drain, remove and reload, in whatever order.

`tests/core/test_scheduler_properties.py` reports ends at random; here every end follows from what is wrong
with the engine, so that more can be said: how often a request may have been run, that no healthy instance
is ejected, and that a recovered fleet serves every request and has empty ledgers.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers import examples, make_scheduler, request, spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hetlb.balancer.core.facts import AdminStateSet, InstanceAdded, InstanceRemoved, Probed, ProbeResult
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import (
    AdminState,
    Dispatch,
    Health,
    HealthChanged,
    Lease,
    Outcome,
    Reject,
    RejectReason,
)
from hetlb.tools.sim.integrity import check_scheduler

NAMES = ("a", "b", "c")
LIMITS = QueueLimits(max_requests=6, max_bytes=2000, timeout_s=60, no_instance_timeout_s=10)
FIRST_BYTE_S, IDLE_S = 30.0, 15.0
#: What is wrong with an engine (rows U1, U3, U4, U5, U6, U7, U8, U11 and M5).
WELL, REFUSES, SILENT, DROPS, BREAKS, JUNK, ERRORS, REFUSALS, BUSY = (
    "well", "refuses", "silent", "drops", "breaks", "junk", "errors", "refusals", "busy",
)  # fmt: skip
#: What a health probe finds: most engines that fail requests say that they are well.
PROBES = {REFUSES: ProbeResult.REFUSED, SILENT: ProbeResult.FAILED}
#: Evidence against an engine; client errors are none, and who is busy is not unwell.
UNWELL = {REFUSES, SILENT, DROPS, BREAKS, JUNK, ERRORS}
#: A recovered fleet has every instance back within this: the longest ejection and a few probes.
RECOVERY_S = 100


class FleetMachine(RuleBasedStateMachine):
    """A driver whose engines are the ones of the matrix."""

    policy = "hetlb"

    @initialize(seed=st.integers(0, 9))
    def start(self, seed: int) -> None:
        self.now = 0.0
        self.scheduler = make_scheduler(
            [spec(name, slower=1.0 + i, kv=4000 * (i + 1)) for i, name in enumerate(NAMES)],
            self.policy,
            limits=LIMITS,
            seed=seed,
        )
        self.faults = dict.fromkeys(NAMES, WELL)
        #: Who had something wrong since it was added.
        self.tainted: set[str] = set()
        self.ready = set(NAMES)
        self.next_id = 1
        self.waiting: set[int] = set()
        self.leases: dict[int, Lease] = {}
        #: What each lease met when it was dispatched: a process that is replaced takes its fate along.
        self.met: dict[int, str] = {}
        self.begun: dict[int, float] = {}
        #: The terminal outcome of each request, and how often an engine may have run it.
        self.ended: dict[int, str] = {}
        self.runs: dict[int, int] = {}

    # --- what the driver does ---

    def carry_out(self, commands: list[Any], undecided: int | None = None) -> None:
        """Do as told. `undecided`: the request whose fate these commands tell; without one it waits."""
        for command in commands:
            if isinstance(command, HealthChanged):
                live = next((i for i in self.scheduler.instances if i.name == command.instance), None)
                # What is said of an incarnation that is gone is a test of its own, below.
                if live is not None and live.evidence.health.state is command.health is not Health.UP:
                    assert live.name in self.tainted, f"never unwell: {live.name}: {command.reason}"
            elif isinstance(command, Dispatch):
                lease, fault = command.lease, self.faults[command.lease.instance]
                assert lease.instance in self.ready
                self.waiting.discard(lease.request.id)
                self.leases[lease.id], self.met[lease.id] = lease, fault
                self.begun[lease.id] = self.now
                if lease.request.id == undecided:
                    undecided = None
            else:
                assert isinstance(command, Reject), command
                if command.reason is RejectReason.NO_INSTANCE:
                    assert not self.ready - self.tainted, "rejected though an instance is ready"
                if command.request_id == undecided:
                    undecided = None
                self.finish(command.request_id, command.reason.value)
        if undecided is not None:
            self.waiting.add(undecided)

    def finish(self, request_id: int, outcome: str) -> None:
        """A request has its one terminal outcome."""
        assert request_id not in self.ended, f"request {request_id} ended twice"
        self.waiting.discard(request_id)
        self.ended[request_id] = outcome

    def end(self, lease: Lease, outcome: Outcome, *, retry: bool = False) -> None:
        """A lease ends."""
        del self.leases[lease.id], self.met[lease.id], self.begun[lease.id]
        request_id = lease.request.id
        if outcome is not Outcome.CONNECT_FAILED:
            self.runs[request_id] = self.runs.get(request_id, 0) + 1
        if not retry:
            self.finish(request_id, outcome.value)
        commands = self.scheduler.on_lease_ended(lease, outcome, self.now, retry=retry)
        self.carry_out(commands, request_id if retry else None)

    def first_byte(self, lease: Lease) -> None:
        """An answer begins."""
        lease.output_tokens = 1
        self.begun[lease.id] = self.now
        self.carry_out(self.scheduler.on_first_token(lease, self.now))

    def proceed(self, lease: Lease) -> None:
        """Let a lease meet what its engine has in store."""
        fault, begun = self.met[lease.id], lease.output_tokens > 0
        if fault == REFUSES and not begun:
            self.end(lease, Outcome.CONNECT_FAILED, retry=True)
        elif fault in (REFUSES, DROPS) and not begun:
            self.end(lease, Outcome.NO_RESPONSE, retry=True)
        elif fault in (REFUSES, DROPS):
            self.end(lease, Outcome.BROKEN_STREAM)
        elif fault == SILENT:
            waited_s = self.now - self.begun[lease.id]
            if waited_s > (IDLE_S if begun else FIRST_BYTE_S):
                self.end(lease, Outcome.BROKEN_STREAM if begun else Outcome.NO_RESPONSE)
        elif fault == JUNK and not begun:
            self.end(lease, Outcome.NO_RESPONSE)
        elif fault in (ERRORS, REFUSALS) and not begun:
            self.end(lease, Outcome.UPSTREAM_ERROR if fault == ERRORS else Outcome.UPSTREAM_REFUSED)
        elif fault == BUSY and not begun:
            self.turned_away(lease)
        elif not begun:
            self.first_byte(lease)
        elif fault in (BREAKS, JUNK, ERRORS):
            self.end(lease, Outcome.BROKEN_STREAM)
        else:
            lease.output_tokens = 5
            self.end(lease, Outcome.OK)

    def turned_away(self, lease: Lease) -> None:
        """The engine says when to come again: another takes it, or the client is told."""
        commands = self.scheduler.on_refused(lease, 503, 5.0, self.now)
        if not any(isinstance(each, Dispatch) and each.request_id == lease.request.id for each in commands):
            self.end(lease, Outcome.UPSTREAM_ERROR)
            return
        request_id = lease.request.id
        del self.leases[lease.id], self.met[lease.id], self.begun[lease.id]
        self.runs[request_id] = self.runs.get(request_id, 0) + 1
        self.carry_out(commands, request_id)

    def probe_all(self) -> None:
        """One round of probes."""
        for instance in self.scheduler.instances:
            result = PROBES.get(self.faults[instance.name], ProbeResult.OK)
            self.carry_out(self.scheduler.on_instance(Probed(instance.name, result), self.now))

    def spend(self, seconds: float) -> None:
        """Let time pass, with probes every second and ticks when they are due."""
        ends = self.now + seconds
        while self.now < ends:
            self.now = min(ends, self.now + 1.0)
            self.probe_all()
            deadline = self.scheduler.next_deadline()
            if deadline is not None and deadline <= self.now:
                self.carry_out(self.scheduler.on_tick(self.now))

    # --- what happens ---

    @rule(
        count=st.integers(1, 4),
        prompt=st.integers(1, 2000),
        body=st.integers(0, 400),
        tenant=st.sampled_from((None, "x", "y")),
        priority=st.integers(-1, 1),
    )
    def arrive(self, count: int, prompt: int, body: int, tenant: str | None, priority: int) -> None:
        for _ in range(count):
            request_id, self.next_id = self.next_id, self.next_id + 1
            arriving = request(request_id, prompt=prompt, body_bytes=body, tenant=tenant, priority=priority)
            self.carry_out(self.scheduler.on_arrival(arriving, self.now), request_id)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(1, 6))
    def engines_answer(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.leases))):
            self.proceed(self.leases[data.draw(st.sampled_from(sorted(self.leases)))])
            if not self.leases:
                return

    @rule(name=st.sampled_from(NAMES), fault=st.sampled_from((WELL, *sorted(UNWELL), REFUSALS, BUSY)))
    def spoil(self, name: str, fault: str) -> None:
        """From now on an engine is like this; what it is answering it answers as it began, unless it dies."""
        self.faults[name] = fault
        if fault in UNWELL:
            self.tainted.add(name)
        if fault == REFUSES:
            for lease in self.leases.values():
                if lease.instance == name:
                    self.met[lease.id] = DROPS

    @precondition(lambda self: self.leases or self.waiting)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        leased = {lease.request.id: lease for lease in self.leases.values()}
        request_id = data.draw(st.sampled_from(sorted(leased.keys() | self.waiting)))
        if request_id in leased:
            self.end(leased[request_id], Outcome.CLIENT_GONE)
        else:
            self.finish(request_id, Outcome.CLIENT_GONE.value)
            self.carry_out(self.scheduler.on_cancelled(request_id, self.now))

    @rule(name=st.sampled_from(NAMES), state=st.sampled_from(tuple(AdminState)))
    def administer(self, name: str, state: AdminState) -> None:
        (self.ready.add if state is AdminState.READY else self.ready.discard)(name)
        self.carry_out(self.scheduler.on_instance(AdminStateSet(name, state), self.now))

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1))
    def replaced(self, names: set[str]) -> None:
        """A reload, or a flap: gone and back in one turn, a new incarnation, with leases on the old one."""
        for name in sorted(names):
            self.ready.discard(name)
            self.carry_out(self.scheduler.on_instance(InstanceRemoved(name), self.now))
            self.ready.add(name)
            self.tainted.discard(name)
            if self.faults[name] in UNWELL:
                self.tainted.add(name)
            self.carry_out(self.scheduler.on_instance(InstanceAdded(spec(name)), self.now))

    @rule(seconds=st.floats(0.1, 40))
    def time_passes(self, seconds: float) -> None:
        self.spend(seconds)

    # --- what must hold ---

    @invariant()
    def owes_nothing_else(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        check_scheduler(self.scheduler)
        assert self.scheduler.in_flight == len(self.leases)
        assert {entry.request.id for entry in self.scheduler.queue} == self.waiting
        assert len(self.waiting) <= 6
        assert self.scheduler.queue.bytes <= 2000
        leased = {lease.request.id for lease in self.leases.values()}
        assert len(leased) == len(self.leases), "a request is in two places"
        assert not leased & self.waiting
        assert leased | self.waiting | self.ended.keys() == set(range(1, self.next_id)), "a request was lost"
        assert not (leased | self.waiting) & self.ended.keys()
        worst = max(self.runs.values(), default=0)
        assert worst <= 2, f"a request was run {worst} times"
        for instance in self.scheduler.instances:
            assert instance.in_flight >= 0
            if instance.name not in self.tainted:
                assert instance.evidence.health.state is not Health.EJECTED

    def teardown(self) -> None:
        """All instances recover: all requests are served, all instances are back, all ledgers are empty."""
        if not hasattr(self, "scheduler"):
            return
        for name in NAMES:
            self.administer(name, AdminState.READY)
            self.faults[name] = WELL
        for lease_id in self.met:
            self.met[lease_id] = WELL
        for _ in range(RECOVERY_S):
            for lease in list(self.leases.values()):
                self.proceed(lease)
            self.spend(1.0)
        while self.leases:
            for lease in list(self.leases.values()):
                self.proceed(lease)
        assert not self.waiting
        self.owes_nothing_else()
        for instance in self.scheduler.instances:
            assert (instance.work_ns, instance.kv_tokens, instance.in_flight) == (0, 0, 0)
            assert instance.evidence.health.state is Health.UP, (
                f"{instance.name}: {instance.evidence.health.reason}"
            )
        self.arrive(count=1, prompt=10, body=1, tenant=None, priority=0)
        assert self.leases, "a fleet that is well and idle does not take a request"
        for lease in list(self.leases.values()):
            self.end(lease, Outcome.OK)


def test_what_became_of_a_removed_instance_is_no_news_of_its_namesake() -> None:
    scheduler = make_scheduler([spec("a")], "rr")
    (command,) = scheduler.on_arrival(request(1), 0.0)
    assert isinstance(command, Dispatch)
    scheduler.on_instance(InstanceRemoved("a"), 1.0)
    scheduler.on_instance(InstanceAdded(spec("a")), 1.0)
    commands = scheduler.on_lease_ended(command.lease, Outcome.CONNECT_FAILED, 2.0, retry=False)
    assert not [each for each in commands if isinstance(each, HealthChanged)]


@pytest.mark.parametrize("policy", ["hetlb", "rr", "least-requests", "paper"])
def test_the_matrix_in_any_order(policy: str) -> None:
    machine = type(f"Fleet_{policy.replace('-', '_')}", (FleetMachine,), {"policy": policy})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples(40), stateful_step_count=40,
        ),
    )  # fmt: skip
