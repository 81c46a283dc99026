"""Makers of small fleets and requests, and a wait for what will come, shared by the tests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from hypothesis import settings

from hetlb.balancer.core.evidence.table import HealthParams
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.predictor import Predictor
from hetlb.balancer.core.queue import Queue, Queued, QueueKey, QueueLimits
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, Health, InstanceSpec, Lease, Places, Request
from hetlb.balancer.telemetry.counters import Totals
from hetlb.options.split.hand_overs import HandOvers

FAST = LatencyModel(k1=1e-4, k2=1e-3, k3=0.0, k4=1e-2, k5=5e-8, k6=6e-5, k7=0.0, k8=1.3e-2)
MODEL = "m"


def spec(name: str, *, slower: float = 1.0, kv: int | None = 10_000, **more: Any) -> InstanceSpec:
    """An instance of `MODEL` with a profile, `slower` times as slow as `FAST`."""
    capacity = more.pop("capacity", Capacity(kv_cache_tokens=kv, kv_tokens_per_request=kv, max_num_seqs=64))
    return InstanceSpec(
        name,
        more.pop("model", MODEL),
        latency=more.pop("latency", FAST.scaled(slower)),
        capacity=capacity,
        **more,
    )


def make_scheduler(
    specs: Iterable[InstanceSpec],
    policy: str = "paper",
    *,
    predictor: Predictor | None = None,
    limits: QueueLimits | None = None,
    health: Health = Health.UP,
    seed: int = 0,
    params: PolicyParams | None = None,
    health_params: HealthParams | None = None,
    now: float = 0.0,
) -> Scheduler:
    """A scheduler whose instances are up."""
    setup = SchedulerSetup(
        tuple(specs),
        policy,
        params or PolicyParams(),
        limits or QueueLimits(),
        seed=seed,
        initial_health=health,
        health=health_params or HealthParams(),
        now=now,
    )
    return Scheduler(setup, predictor=predictor, splitting=HandOvers)


def request(request_id: int, *, prompt: int = 100, max_tokens: int | None = 50, **more: Any) -> Request:
    """A request for `MODEL` with an exact prompt length, for `subset` or a canary's `side`."""
    places = Places(more.pop("subset", None), more.pop("side", None))
    return Request(
        id=request_id,
        model=more.pop("model", MODEL),
        prompt_tokens=prompt,
        longest_prompt_tokens=more.pop("longest", prompt),
        max_tokens=max_tokens,
        prompt_exact=more.pop("exact", True),
        places=places,
        **more,
    )


def dispatched(commands: Iterable[object]) -> Lease:
    """The lease of the one dispatch among the commands."""
    leases = [command.lease for command in commands if isinstance(command, Dispatch)]
    assert len(leases) == 1, f"expected one dispatch, got {leases}"
    return leases[0]


def waiting(queue: Queue, key: QueueKey, fit: int = 0) -> list[Queued]:
    """The requests of one line and fit from which the next is taken, oldest first."""
    for entry in queue.heads(key):
        if entry.flow.name.fit == fit:
            return list(entry.flow.entries.values())
    return []


def head(queue: Queue) -> Queued:
    """The next request to be served where every instance takes every request."""
    return waiting(queue, queue.keys[0])[0]


#: Profiles of runs of code that `make test` has tried on more examples.
AGAIN = ("again", "other_python")


def examples(count: int) -> int:
    """Return the number of examples of a property: not less than a search has, not more than a rerun."""
    profile = settings.get_current_profile_name()
    if profile == "search":
        return max(count, settings().max_examples)
    return min(count, settings().max_examples) if profile in AGAIN else count


def all_pairs(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few rows of values in which each value of a column meets each of every other column."""
    rows = list(itertools.product(*(range(len(each)) for each in columns)))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, found = set().union(*pairs.values()), []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        found.append(tuple(column[at] for column, at in zip(columns, best, strict=True)))
    return found


#: Seconds after which what is waited for will not come: it ends a test that has failed.
HANG_S = 100.0
#: Ports below the range that the kernel hands out, and how many of them a test process has to itself.
_FIRST_PORT, _END_PORT, _PORTS_EACH = 12_000, 32_000, 200
_own_first = _FIRST_PORT + os.getpid() * _PORTS_EACH % (_END_PORT - _FIRST_PORT)
_ports = itertools.cycle(range(_own_first, _own_first + _PORTS_EACH))


def free_port() -> int:
    """A port that nothing listens on and no other socket gets by chance, between two listeners either."""
    for port in itertools.islice(_ports, _PORTS_EACH):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"expected a free port among {_PORTS_EACH} from {_own_first}")


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    """This process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def most_file_bytes(most: int) -> Iterator[None]:
    """This process can write no file beyond `most` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


#: Turns of the loop that are given without a pause: what needs more waits for time to pass.
_TURNS = 2000


@contextlib.asynccontextmanager
async def turns_are_short() -> AsyncIterator[None]:
    """Check that no turn of the event loop takes a tenth of the CPU that all of them take meanwhile.

    Garbage is not collected meanwhile: a pause of the collector grows with what other tests have left.
    """
    gaps: list[float] = []
    over = asyncio.Event()

    async def look() -> None:
        while not over.is_set():
            before = time.thread_time()
            await asyncio.sleep(0)
            gaps.append(time.thread_time() - before)

    gc.disable()
    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        over.set()
        await looking
        gc.enable()
    assert max(gaps) < sum(gaps) / 10, f"{max(gaps):.3f} of {sum(gaps):.3f} s at once"


async def turns_until(holds: Callable[[], bool], limit_s: float = HANG_S) -> None:
    """Let the event loop turn until a condition holds; the limit only ends a test that has failed.

    After many turns there is a pause in each: other tests need the core.
    """
    turns = 0
    async with asyncio.timeout(limit_s):
        while not holds():
            turns += 1
            await asyncio.sleep(0 if turns < _TURNS else 0.002)


async def asked_until(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Ask again, with pauses, until the answer is true, and return it."""
    async with asyncio.timeout(HANG_S):
        while not (answer := await ask()):
            await asyncio.sleep(0.02)
    return answer


def outcomes(totals: Totals) -> list[str]:
    """Outcomes of the requests that ended lately."""
    found = [each.outcomes.items() for each in totals.recent.stretches.values()]
    return [name for each in found for name, count in each for _ in range(count)]
