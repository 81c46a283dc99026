"""Host time of an idle server, for a profile whose points hold none: a few requests, ten seconds at most.

Tables of kernels leave out what the host adds to every iteration and to every request. One sequence decoding
alone shows the first: its step against the profile's. Short prompts show the second.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median

from hetlb.balancer.config.profile_file import HostTime
from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.profiler.client import EngineClient, ServerFacts, distinct_prompts
from hetlb.tools.profiler.sources import assumed_host
from hetlb.tools.profiler.sweep import BusyError, settled

#: Prompt and output tokens of a request whose steps are timed.
_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 200
#: Timed requests, while they fit the time; the least step counts, as nothing makes one shorter.
_REQUESTS = 3
#: Lone short prompts whose first tokens are timed.
_FIRST_TOKENS = 5
#: Seconds for all of it.
BUDGET_S = 10.0


async def probe_host(
    client: EngineClient,
    facts: ServerFacts,
    latency: LatencyModel,
    asynchronous: bool | None,
    rng: random.Random,
    clock: Callable[[], float] = time.monotonic,
) -> HostTime:
    """Return the host time that an idle server adds to a latency model without any.

    `latency` must hold no host time. The time of each sequence in an iteration, which one sequence does not
    show, is the assumed one in the measured proportion. Raises `BusyError` if others use the server,
    `ServerFailed` if it does not answer.
    """
    if not await settled(client, facts):
        raise BusyError("the server is busy with the work of others: its host time cannot be measured")
    room = (facts.capacity.max_model_len or 1 << 20) - _PROMPT_TOKENS
    output = max(2, min(_OUTPUT_TOKENS, room))
    deadline = clock() + BUDGET_S
    steps: list[float] = []
    for number in range(1 + _REQUESTS):  # the first warms up
        began = clock()
        (times,) = await client.complete(distinct_prompts(rng, 1, _PROMPT_TOKENS), output)
        step_s = times.step_s(times.first_s, times.last_s)
        if step_s is not None and number:
            steps.append(step_s)
        if steps and 2.0 * clock() - began > deadline:
            break
    added_s = max(0.0, min(steps, default=0.0) - latency.step_s(1.0, _PROMPT_TOKENS + output / 2.0))
    assumed = assumed_host(asynchronous)
    share = added_s / (assumed.iteration_s + assumed.sequence_s)
    firsts = []
    for _ in range(_FIRST_TOKENS):
        began = clock()
        (times,) = await client.complete(distinct_prompts(rng, 1, _PROMPT_TOKENS), 1)
        firsts.append(times.first_s - began)
    return HostTime(
        iteration_s=share * assumed.iteration_s,
        sequence_s=share * assumed.sequence_s,
        request_s=max(0.0, median(firsts) - latency.prefill_s(_PROMPT_TOKENS) - added_s),
    )
