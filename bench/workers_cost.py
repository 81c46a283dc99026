"""What sharing the ledger costs the scheduler: CPU of one request, alone and with another worker.

`python bench/workers_cost.py [--instances 2] [--policy hetlb] [--rounds 5]` gives schedulers 20,000 requests,
each with its arrival, its first token and its end, without sockets: one scheduler without a ledger, one with
a ledger that nobody else writes to, and two that take turns, so that each finds what the other has written.
A turn is one request, or eight, as after a wake-up with one socket ready or with eight. Prints microseconds
per request, medians over the rounds. The interpreter it is run with decides which build is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Sequence

from hetlb.build import compiled
from hetlb.core.fellows import SharedScheduler
from hetlb.core.latency import LatencyModel
from hetlb.core.ledger import Cells
from hetlb.core.policies import POLICIES
from hetlb.core.scheduler import Scheduler
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import Capacity, Dispatch, Health, InstanceSpec, Lease, Outcome, Request
from hetlb.workers.ledger import Memory, Row

REQUESTS = 20_000
#: Requests open at a time, over all schedulers.
OPEN = 32
_ENGINE = LatencyModel(k1=1e-4, k2=1e-3, k3=0.0, k4=1e-2, k5=5e-8, k6=6e-5, k7=0.0, k8=1.3e-2)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="hetlb")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    capacity = Capacity(kv_cache_tokens=160_000, kv_tokens_per_request=32_768, max_num_seqs=256)
    names = [f"i{number}" for number in range(args.instances)]
    setup = SchedulerSetup(
        tuple(InstanceSpec(name, "m", latency=_ENGINE, capacity=capacity) for name in names),
        args.policy,
        initial_health=Health.UP,
    )
    cells = {name: number for number, name in enumerate(names)}
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for turn in (1, 8):
            found.setdefault(("no ledger", turn), []).append(_cost([Scheduler(setup)], turn))
            for number in (1, 2):
                memory = Memory(number, args.instances + 1)
                sharing = [
                    SharedScheduler(
                        setup,
                        ledger=Row(memory, row),
                        cells=Cells(dict(cells), {"m": args.instances}),
                        tell=lambda evidence: None,
                    )
                    for row in range(number)
                ]
                found.setdefault((f"ledger of {number}", turn), []).append(_cost(sharing, turn))
                sharing.clear()
                memory.close()
    print(f"{'compiled' if compiled() else 'interpreted'}, {args.policy}, {args.instances} instances")
    for (name, turn), values in sorted(found.items(), key=lambda item: item[0][1]):
        rounds = " ".join(f"{value:.2f}" for value in values)
        print(f"{name:12s} {turn} a turn: {statistics.median(values):6.2f} us a request ({rounds})")
    return 0


def _cost(schedulers: Sequence[Scheduler], turn: int) -> float:
    """Microseconds of CPU per request."""
    requests = [Request(id=number, model="m", prompt_tokens=70, max_tokens=64) for number in range(REQUESTS)]
    leases: list[deque[Lease]] = [deque() for _ in schedulers]
    begun, now = 0, 1.0
    started = time.process_time()
    while begun < REQUESTS:
        for scheduler, mine in zip(schedulers, leases, strict=True):
            for _ in range(min(turn, len(mine))):
                lease = mine.popleft()
                lease.output_tokens = 60
                scheduler.on_first_token(lease, now)
                scheduler.on_lease_ended(lease, Outcome.OK, now)
            while len(mine) < OPEN // len(schedulers) and begun < REQUESTS:
                now += 3e-5
                for command in scheduler.on_arrival(requests[begun], now):
                    assert isinstance(command, Dispatch), f"expected a dispatch, got {command}"
                    mine.append(command.lease)
                begun += 1
    return (time.process_time() - started) / REQUESTS * 1e6


if __name__ == "__main__":
    raise SystemExit(main())
