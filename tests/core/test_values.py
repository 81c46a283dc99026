"""What goes from one process to another comes there as it was."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from helpers import FAST, request, spec

from hetlb.core.admission import QueueLimits
from hetlb.core.health import HealthParams
from hetlb.core.policies import PolicyParams
from hetlb.core.predictor import LengthDistribution
from hetlb.core.records import RequestRecord
from hetlb.core.speed import Mark
from hetlb.core.types import Candidate, Capacity, Lease, Probed, ProbeResult
from hetlb.workload.arrivals import PlannedRequest


def lease() -> Lease:
    made = Lease(
        3,
        request(1),
        "a",
        2,
        work_ns=5,
        kv_tokens=6,
        prompt_tokens=7,
        predicted_output=8.5,
        dispatched_at=9.5,
    )
    made.first_token_at, made.mark, made.output_tokens, made.ended = 10.5, Mark(1.0, 2.0, 3, 4), 11, True
    return made


def facts(value: Any) -> Any:
    """All that can be read of it."""
    names = [name for name in dir(value) if not name.startswith("__") and not callable(getattr(value, name))]
    return {name: getattr(value, name) for name in names}


@pytest.mark.parametrize(
    "value",
    [
        FAST,
        Candidate("a", 1.5, terms={"own_s": 1.0}),
        Capacity(1, 2),
        HealthParams(),
        LengthDistribution([3, 1, 2]),
        PlannedRequest(1, 0.5, 2, 3),
        PolicyParams(),
        Probed("a", ProbeResult.OK),
        QueueLimits(),
        RequestRecord(1.0, 2, 3, 4.0, 5.0),
        lease(),
        request(1),
        spec("a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_the_same_on_the_other_side(value: Any) -> None:
    assert facts(pickle.loads(pickle.dumps(value))) == facts(value)
