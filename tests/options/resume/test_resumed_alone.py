"""A request whose answer may go on, and that raises, ends alone."""

from __future__ import annotations

import pytest
from proxy.one_alone import RUNS, Double, Scenario, check, doubled, moves
from proxy.test_proxying import Start

from hetlb.balancer.exchange import exchange
from hetlb.options.resume import continuation, progress, resumed

pytestmark = pytest.mark.skipif(
    exchange.__file__.endswith(".so"), reason="methods of compiled classes cannot be replaced"
)
#: Classes of which a method raises while the poisoned request is at work.
PARTS = (
    exchange.Exchange, resumed.Resumed, resumed.Resumable, continuation.Continuation, continuation.KeptStream,
    progress.Progress,
)  # fmt: skip


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    return doubled(monkeypatch, PARTS)


@pytest.mark.parametrize(
    ("scenario", "engine"),
    [*RUNS, (moves, "well")],
    ids=lambda each: getattr(each, "__name__", each),
)
@pytest.mark.parametrize("times", [1, 1000])
async def test_a_method_that_raises_ends_its_own_request(
    scenario: Scenario,
    engine: str,
    times: int,
    start: Start,
    double: Double,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await check(scenario, engine, times, start, double, caplog, resume="ids")
