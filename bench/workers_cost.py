"""Cost of peers: CPU of a request in its own process and in each peer, without HTTP.

`python bench/workers_cost.py [--instances 2] [--policy hetlb] [--rounds 5]` gives a scheduler 10,000
requests, each with its arrival, its first token and its end: alone, with a peer that is told, and at the peer
that books them. Each turn of the event loop has `--turn` requests. Prints microseconds of CPU per request,
medians over the rounds. The interpreter it is run with decides which build is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, Health, InstanceSpec, Lease, Outcome, Request
from hetlb.build import compiled
from hetlb.options.peers import peer_messages
from hetlb.options.peers.lease_wire import parts
from hetlb.options.peers.shared_view import SharedView

REQUESTS = 10_000
OUTSTANDING = 8
_ENGINE = LatencyModel(k1=1e-4, k2=1e-3, k3=0.0, k4=1e-2, k5=5e-8, k6=6e-5, k7=0.0, k8=1.3e-2)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="hetlb")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", type=int, default=1, help="requests in one turn of the event loop")
    args = parser.parse_args()
    capacity = Capacity(kv_cache_tokens=160_000, kv_tokens_per_request=32_768, max_num_seqs=256)
    names = [f"i{number}" for number in range(args.instances)]
    setup = SchedulerSetup(
        tuple(InstanceSpec(name, "m", latency=_ENGINE, capacity=capacity) for name in names),
        args.policy,
        initial_health=Health.UP,
    )
    found = [_run(setup, args.turn) for _ in range(args.rounds)]
    alone, told, peer = [statistics.median(values) for values in zip(*found, strict=True)]
    print(f"{'compiled' if compiled() else 'interpreted'}, {args.policy}, {args.instances} instances")
    print(f"alone {alone:.1f} us, told to peers {told:.1f} us, at each peer {peer:.1f} us")
    return 0


def _run(setup: SchedulerSetup, turn: int) -> tuple[float, float, float]:
    alone = _serve(Scheduler(setup), None, turn, [])
    scheduler = Scheduler(setup)
    messages: list[bytes] = []
    told = _serve(scheduler, SharedView(scheduler, 1), turn, messages)
    peer = SharedView(Scheduler(setup), 2)
    peer.receive("1", (), 0.0)
    now, began = 1.0, time.process_time()
    for data in messages:
        now += 3e-5 * turn
        peer.receive("1", peer_messages.decode(data).changes, now)  # type: ignore[arg-type]
    booked = time.process_time() - began
    return tuple(seconds / REQUESTS * 1e6 for seconds in (alone, told, booked))  # type: ignore[return-value]


def _serve(scheduler: Scheduler, view: SharedView | None, turn: int, messages: list[bytes]) -> float:
    """Return the CPU seconds of all requests; what peers are told goes to `messages`."""
    leases, now, began = deque[Lease](), 1.0, time.process_time()
    for number in range(REQUESTS):
        if len(leases) >= OUTSTANDING:
            lease = leases.popleft()
            lease.output_tokens = 60
            scheduler.on_first_token(lease, now)
            scheduler.on_lease_ended(lease, Outcome.OK, now)
        now += 3e-5
        request = Request(id=number, model="m", prompt_tokens=70, max_tokens=64)
        arrived = scheduler.on_arrival if view is None else view.on_arrival
        (command,) = arrived(request, now)
        assert isinstance(command, Dispatch), f"expected a dispatch, got {command}"
        leases.append(command.lease)
        if view is not None and number % turn == turn - 1:
            kind = peer_messages.CHANGES
            messages += [
                peer_messages.message("1", kind, number, now, each) for each in parts(view.take(now))
            ]
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
