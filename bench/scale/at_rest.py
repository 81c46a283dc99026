"""CPU of a decision in fleets at rest: `python bench/scale/at_rest.py --instances 2,16,64,256,1000`.

Short requests come one after the other, four at a time, to instances without a profile. Of batches of 100 the
least is printed for `on_arrival`, and for first token and end together, in microseconds.
"""

from __future__ import annotations

import argparse
import time

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Dispatch, Health, InstanceSpec, Lease, Outcome, Request

BATCH = 100
AT_ONCE = 4
GAP_S = 0.0003


def run(count: int, batches: int) -> tuple[float, float]:
    """Return seconds of an arrival, and of an end."""
    setup = SchedulerSetup(
        specs=tuple(InstanceSpec(f"i{n}", "m") for n in range(count)),
        policy="hetlb",
        params=PolicyParams(),
        limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
        predictor="online",
        seed=0,
        lengths=None,
        initial_health=Health.UP,
    )
    scheduler, now, leases = Scheduler(setup), 1000.0, list[Lease]()
    least = [float("inf"), float("inf")]
    for batch in range(batches):
        took = [0.0, 0.0]
        for number in range(BATCH):
            now += GAP_S
            request = Request(batch * BATCH + number, "m", 7, max_tokens=1, streamed=False)
            began = time.thread_time()
            [command] = scheduler.on_arrival(request, now)
            took[0] += time.thread_time() - began
            assert isinstance(command, Dispatch)
            leases.append(command.lease)
            if len(leases) > AT_ONCE:
                lease = leases.pop(0)
                began = time.thread_time()
                scheduler.on_first_token(lease, now)
                lease.output_tokens = 1
                scheduler.on_lease_ended(lease, Outcome.OK, now)
                took[1] += time.thread_time() - began
        least = [min(pair) for pair in zip(least, took, strict=True)]
    return least[0] / BATCH, least[1] / BATCH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", default="2,16,64,256,1000")
    parser.add_argument("--batches", type=int, default=16)
    args = parser.parse_args()
    for count in map(int, args.instances.split(",")):
        arrival_s, end_s = run(count, args.batches)
        print(
            f"{count:5} instances: arrival {1e6 * arrival_s:.1f} us, first token and end {1e6 * end_s:.1f} us"
        )


if __name__ == "__main__":
    main()
