"""Whatever happens in whatever order: nothing is lost, nothing is answered twice, the ledger adds up."""

from __future__ import annotations

import random

import pytest
from helpers import examples, make_scheduler, request, spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetlb.balancer.core.facts import (
    AdminStateSet,
    EngineSample,
    InstanceAdded,
    InstanceRemoved,
    ModelsLearned,
    Probed,
    ProbeResult,
)
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.predictor import make_predictor
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import (
    AdminState,
    Command,
    Connector,
    Dispatch,
    Health,
    HealthChanged,
    Hold,
    InstanceSpec,
    KvLink,
    Lease,
    Outcome,
    PassOn,
    Reject,
    Role,
)
from hetlb.options.peers.lease_wire import booked
from hetlb.tools.sim.integrity import check_scheduler

NAMES = ("a", "b", "c")
ENDS = (
    Outcome.OK, Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_REFUSED, Outcome.UPSTREAM_BUSY,
    Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE,
    Outcome.BROKEN_STREAM, Outcome.CLIENT_GONE, Outcome.LOCAL_FAULT, Outcome.SHUTDOWN,
)  # fmt: skip
LIMITS = QueueLimits(max_requests=5, max_bytes=1000, timeout_s=60, no_instance_timeout_s=10)


class SchedulerMachine(RuleBasedStateMachine):
    """A driver that does everything a driver may do, with a clock of its own."""

    policy = "paper"
    #: Of the instances, in their order; with other roles than both, or several of these, requests are split.
    roles: tuple[Role, ...] = ()
    connector = Connector.NIXL

    @initialize(predictor=st.sampled_from(("normal", "online", "empirical")), seed=st.integers(0, 5))
    def start(self, predictor: str, seed: int) -> None:
        self.now = 0.0
        self.predictor, self.seed = predictor, seed
        self.scheduler = self.make([self.spec_of(i) for i in range(len(NAMES))], self.policy)
        self.next_id = 1
        self.waiting: set[int] = set()
        self.leases: dict[int, Lease] = {}
        self.answered: set[int] = set()

    def spec_of(self, i: int) -> InstanceSpec:
        more = {"role": self.roles[i], "kv_transfer": KvLink(self.connector, 20.0)} if self.roles else {}
        return spec(NAMES[i], slower=1.0 + i, kv=2000 * (i + 1), **more)

    def make(self, specs: list[InstanceSpec], policy: str) -> Scheduler:
        predictor, seed = self.predictor, self.seed
        return make_scheduler(
            specs,
            policy,
            predictor=make_predictor(
                predictor, rng=random.Random(seed), lengths=LengthDistribution([5, 50, 500])
            ),
            limits=LIMITS,
            seed=seed,
            # Every second run has a plan, in which some instances are worth nothing.
            params=PolicyParams(worth=tuple((name, i % 3) for i, name in enumerate(NAMES)))
            if seed % 2
            else None,
            now=self.now,
        )

    def carry_out(self, commands: list[Command], pending: int | None = None) -> None:
        """Do what the scheduler says; `pending` is the request whose fate these commands must tell."""
        told: set[int] = set()
        for command in commands:
            if isinstance(command, HealthChanged):
                continue
            assert isinstance(command, Dispatch | Reject)
            request_id = command.request_id
            assert request_id in self.waiting or request_id == pending
            assert request_id not in told, "two commands for one request"
            assert request_id not in self.answered
            told.add(request_id)
            self.waiting.discard(request_id)
            if isinstance(command, Reject):
                self.answered.add(request_id)
                continue
            lease = command.lease
            assert lease.request.id == request_id
            instance = next(i for i in self.scheduler.instances if i.name == lease.instance)
            assert instance.incarnation == lease.incarnation
            assert instance.admin is AdminState.READY
            assert instance.evidence.health.state is not Health.EJECTED
            assert lease.id not in self.leases
            assert lease.request.id not in {other.request.id for other in self.leases.values()}
            if not self.roles:  # every instance of the model is shown once, in file order
                pool = [each.name for each in self.scheduler.fleet.ready[lease.request.model].instances]
                assert [each.instance for each in command.candidates] == pool
            self.leases[lease.id] = lease
        if pending is not None and pending not in told:
            self.waiting.add(pending)

    @rule(
        prompt=st.integers(1, 7000),
        max_tokens=st.one_of(st.none(), st.integers(1, 3000)),
        sequences=st.integers(1, 4),
        exact=st.booleans(),
        body=st.integers(0, 400),
        generates=st.booleans(),
        model=st.sampled_from(("m", "m", "m", "lora", "nobody")),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from((None, "x", "y")),
        splittable=st.booleans(),
        streamed=st.booleans(),
    )
    def arrive(
        self,
        prompt: int,
        max_tokens: int | None,
        sequences: int,
        exact: bool,
        body: int,
        generates: bool,
        model: str,
        priority: int,
        tenant: str | None,
        splittable: bool,
        streamed: bool,
    ) -> None:
        request_id, self.next_id = self.next_id, self.next_id + 1
        arriving = request(
            request_id, prompt=prompt, max_tokens=max_tokens, sequences=sequences, exact=exact,
            body_bytes=body, generates=generates, model=model, priority=priority, tenant=tenant,
            splittable=splittable and generates and sequences == 1, streamed=streamed,
        )  # fmt: skip
        self.carry_out(self.scheduler.on_arrival(arriving, self.now), request_id)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
        lease.output_tokens += 1
        self.carry_out(self.scheduler.on_first_token(lease, self.now))

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(ENDS),
        retry=st.booleans(),
        tokens=st.integers(0, 900),
    )
    def end(self, data: st.DataObject, outcome: Outcome, retry: bool, tokens: int) -> None:
        lease = self.leases.pop(data.draw(st.sampled_from(sorted(self.leases))))
        lease.output_tokens = tokens
        commands = self.scheduler.on_lease_ended(lease, outcome, self.now, retry=retry)
        undecided = retry and outcome in (Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE)
        if not undecided:
            self.answered.add(lease.request.id)
        self.carry_out(commands, lease.request.id if undecided else None)

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        status=st.sampled_from((400, 404, 413, 429, 500, 503)),
        retry_after_s=st.one_of(st.none(), st.floats(-1, 0), st.floats(1, 100)),
    )
    def refuse(self, data: st.DataObject, status: int, retry_after_s: float | None) -> None:
        lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
        commands = self.scheduler.on_refused(lease, status, retry_after_s, self.now)
        if commands == [PassOn(lease.request.id, lease)]:
            assert not lease.ended
            return
        self.gone_elsewhere(lease, commands)

    def gone_elsewhere(self, lease: Lease, commands: list[Command]) -> None:
        del self.leases[lease.id]
        assert lease.ended
        first = commands[0]
        assert isinstance(first, Dispatch)
        assert (first.request_id, first.lease.instance != lease.instance) == (lease.request.id, True)
        self.carry_out(commands, lease.request.id)

    @rule(emitting=st.sets(st.sampled_from(NAMES)), by_counters=st.booleans())
    def sweep(self, emitting: set[str], by_counters: bool) -> None:
        """Tokens came of some instances alone; requests of which nothing came go elsewhere."""
        tokens_at = dict.fromkeys(emitting, self.now)
        self.carry_out(self.scheduler.on_sweep(tokens_at, self.now, by_counters=by_counters))
        for lease in self.scheduler.failover.stranded(self.now):
            if not lease.ended and (commands := self.scheduler.on_stranded(lease, self.now)):
                self.gone_elsewhere(lease, commands)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def client_leaves_the_queue(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.discard(request_id)
        self.answered.add(request_id)
        self.carry_out(self.scheduler.on_cancelled(request_id, self.now))

    @rule(name=st.sampled_from(NAMES), state=st.sampled_from(tuple(AdminState)))
    def administer(self, name: str, state: AdminState) -> None:
        self.carry_out(self.scheduler.on_instance(AdminStateSet(name, state), self.now))

    @rule(name=st.sampled_from(NAMES), deadline_s=st.floats(0, 5))
    def give_notice(self, name: str, deadline_s: float) -> None:
        change = AdminStateSet(name, AdminState.READY, deadline_s)
        self.carry_out(self.scheduler.on_instance(change, self.now))

    @rule(name=st.sampled_from(NAMES), result=st.sampled_from(tuple(ProbeResult)))
    def probe(self, name: str, result: ProbeResult) -> None:
        self.carry_out(self.scheduler.on_instance(Probed(name, result), self.now))

    @rule(name=st.sampled_from(NAMES), models=st.sampled_from((("m",), ("m", "lora"), ("x",))))
    def serve(self, name: str, models: tuple[str, ...]) -> None:
        self.carry_out(self.scheduler.on_instance(ModelsLearned(name, models), self.now))

    @rule(
        name=st.sampled_from(NAMES),
        running=st.one_of(st.none(), st.integers(0, 8)),
        usage=st.one_of(st.none(), st.floats(0, 1)),
    )
    def scrape(self, name: str, running: int | None, usage: float | None) -> None:
        waiting = None if running is None else 0
        sample = EngineSample(running=running, waiting=waiting, kv_usage=usage)
        self.carry_out(self.scheduler.on_scrape(name, sample, self.now))

    @rule(name=st.sampled_from(NAMES), come_back=st.booleans())
    def replace(self, name: str, come_back: bool) -> None:
        self.carry_out(self.scheduler.on_instance(InstanceRemoved(name), self.now))
        if come_back or not self.scheduler.instances:
            added = spec(name) if not self.roles else self.spec_of(NAMES.index(name))
            self.carry_out(self.scheduler.on_instance(InstanceAdded(added), self.now))

    def split_legs(self) -> list[int]:
        """Leases of prefill legs whose requests can be handed over."""
        return sorted(id for id, lease in self.leases.items() if lease.decode is not None)

    @precondition(lambda self: self.split_legs())
    @rule(data=st.data())
    def prefilled(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.sampled_from(self.split_legs())))
        commands = self.scheduler.on_prefilled(lease, self.now)
        assert lease.ended
        self.carry_out(commands, lease.request.id)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), outcome=st.sampled_from((*ENDS, Outcome.OK)))
    def hand_over_fails(self, data: st.DataObject, outcome: Outcome) -> None:
        legs = [each for each in self.leases.values() if each.decode is not None or each.hold is not None]
        if not legs:
            return
        lease = data.draw(st.sampled_from(sorted(legs, key=lambda each: each.id)))
        if outcome is Outcome.OK and lease.decode is None:
            outcome = Outcome.CLIENT_GONE
        del self.leases[lease.id]
        commands = self.scheduler.on_unsplit(lease, outcome, self.now)
        assert lease.ended
        again = [each for each in commands if isinstance(each, Dispatch)]
        assert all(each.lease.decode is None for each in again if each.request_id == lease.request.id)
        self.carry_out(commands, lease.request.id)

    def held(self) -> list[Hold]:
        """Prompts that are held between two legs."""
        splits = self.scheduler.placement.splits if hasattr(self, "scheduler") else None
        return splits.holds if splits is not None else []

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def release_hold(self, data: st.DataObject) -> None:
        holds = {hold.id: hold for hold in self.held()}
        hold = holds[data.draw(st.sampled_from(sorted(holds)))]
        self.carry_out(self.scheduler.on_hold_released(hold, self.now))
        assert hold.ended

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.scheduler.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.carry_out(self.scheduler.on_tick(self.now))

    @rule(name=st.sampled_from(sorted(POLICIES)))
    def switch(self, name: str) -> None:
        self.carry_out(self.scheduler.set_policy(name, self.now))

    @precondition(lambda self: not self.roles)  # leases of split requests are not restored
    @rule()
    def restart(self) -> None:
        """Another scheduler begins: it hears of the live leases, then of the requests that wait."""
        old = self.scheduler
        self.scheduler = self.make([each.spec for each in old.instances], old.placement.policy_name)
        leases, self.leases = self.leases, {}
        for lease in leases.values():
            live = booked(lease, self.now)
            if old.ledger.leased[lease.id].removed:  # its end means nothing to the other scheduler
                self.answered.add(lease.request.id)
                continue
            restored = self.scheduler.restore(live, self.now)
            assert restored is not None
            self.leases[restored.id] = restored
        for before, after in zip(old.instances, self.scheduler.instances, strict=True):
            for each in (before, after):  # prompts whose time is over count as read at the next look
                each.seen(self.now)
            for figure in ("work_ns", "kv_tokens", "prompt_tokens", "pending_prompt_tokens", "sequences"):
                assert getattr(after, figure) == getattr(before, figure)
        for entry in old.queue:
            self.waiting.remove(entry.request.id)
            self.carry_out(self.scheduler.on_arrival(entry.request, self.now), entry.request.id)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        check_scheduler(self.scheduler)
        booked = len(self.leases) + sum(
            each.decode is not None and each.decode.incoming for each in self.leases.values()
        )
        assert self.scheduler.in_flight == booked
        assert {entry.request.id for entry in self.scheduler.queue} == self.waiting
        assert len(self.waiting) <= 5
        assert self.scheduler.queue.bytes <= 1000
        leased = {lease.request.id for lease in self.leases.values()}
        everyone = leased | self.waiting | self.answered
        assert everyone == set(range(1, self.next_id)), "a request was lost"
        assert not leased & self.answered
        assert not self.waiting & self.answered

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for lease in list(self.leases.values()):
            del self.leases[lease.id]
            self.answered.add(lease.request.id)
            self.carry_out(self.scheduler.on_lease_ended(lease, Outcome.CLIENT_GONE, self.now))
        while self.waiting or self.leases:
            self.now += 100.0
            for lease in list(self.leases.values()):
                del self.leases[lease.id]
                self.answered.add(lease.request.id)
                self.carry_out(self.scheduler.on_lease_ended(lease, Outcome.OK, self.now))
            self.carry_out(self.scheduler.on_tick(self.now))
        self.now += 100.0  # beyond the lease of whatever was not fetched
        self.carry_out(self.scheduler.on_tick(self.now))
        for instance in self.scheduler.instances:
            assert (instance.work_ns, instance.kv_tokens, instance.in_flight) == (0, 0, 0)
        self.adds_up()


def _run(machine: type[SchedulerMachine]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples(15), stateful_step_count=40,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_invariants_hold_under_every_policy(policy: str) -> None:
    _run(type(f"Machine_{policy}", (SchedulerMachine,), {"policy": policy}))


@pytest.mark.parametrize(
    "roles",
    [
        (Role.BOTH, Role.BOTH, Role.BOTH),
        (Role.PREFILL, Role.DECODE, Role.BOTH),
        (Role.PREFILL, Role.DECODE, Role.DECODE),
    ],
    ids=lambda roles: "-".join(roles),
)
@pytest.mark.parametrize(("policy", "connector"), [("hetlb", "nixl"), ("rr", "mooncake"), ("paper", "nixl")])
def test_invariants_hold_where_requests_are_split(
    policy: str, connector: str, roles: tuple[Role, ...]
) -> None:
    _run(
        type(
            "Machine_split",
            (SchedulerMachine,),
            {"policy": policy, "roles": roles, "connector": Connector(connector)},
        )
    )
