"""Host time of an idle server, measured for a profile without host time in its points."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.engines.host_probe import PROMPT_TOKENS, HostProbe
from hetlb.tools.profiler.client import EngineClient, ServerFacts, distinct_prompts
from hetlb.tools.profiler.sweep import BusyError, settled


async def probe_host(
    client: EngineClient,
    facts: ServerFacts,
    latency: LatencyModel,
    rng: random.Random,
    clock: Callable[[], float] = time.monotonic,
) -> LatencyModel:
    """Return a latency model with the host time that an idle server adds, in place of the assumed one.

    Raises `BusyError` if others use the server, `ServerFailed` if it does not answer.
    """
    if not await settled(client, facts):
        raise BusyError("the server is busy with the work of others: its host time cannot be measured")
    probe = HostProbe(latency, facts.capacity.max_model_len)
    while tokens := probe.next_tokens():
        began = clock()
        (times,) = await client.complete(distinct_prompts(rng, 1, PROMPT_TOKENS), tokens)
        probe.answered(times.first_s - began, times.step_s(times.first_s, times.last_s), clock() - began)
    return probe.found()
