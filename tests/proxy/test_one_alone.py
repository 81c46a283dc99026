"""One exchange hurts only itself: whatever raises in it, its client gets an end and all others are served."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import turns_until
from proxy.one_alone import RUNS, Double, Scenario, Scene, check, doubled, nothing_escapes, read_all
from proxy.test_proxying import Start
from proxy.upstreams import DONE, LAST, STREAM, Upstream

from hetlb.balancer.clients import client_response
from hetlb.balancer.core.facts import AdminStateSet, CapacityLearned
from hetlb.balancer.core.policies.base import Policy
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import AdminState, Capacity
from hetlb.balancer.exchange import engine_answer, exchange, plain_attempt
from hetlb.balancer.exchange import streamed_answer as streamed

pytestmark = pytest.mark.skipif(
    exchange.__file__.endswith(".so"), reason="methods of compiled classes cannot be replaced"
)
#: Classes of which a method raises while the poisoned request is at work.
PARTS = (
    exchange.Exchange, plain_attempt.Plain, plain_attempt.Handling, client_response.ClientResponse,
    engine_answer.EngineAnswer, exchange.EngineRequest, streamed.StreamedAnswer,
)  # fmt: skip


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    return doubled(monkeypatch, PARTS)


@pytest.mark.parametrize(("scenario", "engine"), RUNS, ids=lambda each: getattr(each, "__name__", each))
@pytest.mark.parametrize("times", [1, 1000])
async def test_a_method_that_raises_ends_its_own_request(
    scenario: Scenario,
    engine: str,
    times: int,
    start: Start,
    double: Double,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await check(scenario, engine, times, start, double, caplog)


# --- policies ---


class Broken(Policy):
    """Raises, or chooses what cannot be booked, for requests of some lengths."""

    name = "broken"

    def __init__(self, inner: Policy, how: str) -> None:
        super().__init__(inner.params, inner._rng)
        self.inner, self.how = inner, how

    def choose(self, ctx: Any, instances: Any) -> Any:
        found = self.inner.choose(ctx, instances)
        if ctx.request.max_tokens != 13 or self.how == "committed":
            return found
        if self.how == "raises":
            raise KeyError("no such thing")
        if self.how == "index":
            found.index = len(instances)
        elif self.how == "forecast":
            found.forecast = None
        elif self.how == "nan":
            found.work_s = float("nan")
        else:
            found.work_s = float("inf")
        return found

    def committed(self, ctx: Any, chosen: Any, instances: Any) -> None:
        if ctx.request.max_tokens == 13 and self.how == "committed":
            raise KeyError("no such thing")


@pytest.mark.parametrize("how", ["raises", "index", "nan", "inf", "forecast", "committed"])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_policy_that_raises_for_some_requests_hurts_no_other(
    how: str, waits: bool, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with Upstream(STREAM) as one:
        proxy = await start(one.url, limits=QueueLimits(max_requests=100))
        placement = proxy.scheduler.placement
        placement.use(Broken(placement.policy, how))
        proxy.scheduling.change(CapacityLearned("i0", Capacity(max_num_seqs=4)))
        scene = Scene(proxy)
        if waits:
            proxy.scheduling.change(AdminStateSet("i0", AdminState.DRAIN))
        answers = []
        for number in range(12):
            poisoned = number % 3 == 1
            reader, _ = await scene.ask(f"r{number}", max_tokens=13 if poisoned else 9)
            answers.append((poisoned, reader))
        if waits:
            await turns_until(lambda: len(proxy.scheduler.queue) == 12)
            proxy.scheduling.change(AdminStateSet("i0", AdminState.READY))
        with nothing_escapes():
            for poisoned, reader in answers:
                got = await read_all(reader)
                if poisoned and how != "committed":
                    assert got.startswith(b"HTTP/1.1 500 "), got
                    assert b'"policy_failed"' in got
                else:
                    assert got.endswith(DONE + b"\r\n" + LAST)
        lines = [each.getMessage() for each in caplog.records if "policy at request" in each.getMessage()]
        assert len(lines) == 4
        assert all("\n" not in each for each in lines)
        await proxy.settled()
        for writer in scene.closing:
            writer.close()
