"""What goes from one process to another comes there as it was."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from helpers import FAST, request, spec

from hetlb.balancer.core.evidence.table import HealthParams
from hetlb.balancer.core.facts import Probed, ProbeResult
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Candidate, Capacity
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.records import RequestResult
from hetlb.tools.workload.rows import Row


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
        PlannedRequest(1, 0.5, Row(None, 2, 3)),
        PolicyParams(),
        Probed("a", ProbeResult.OK),
        QueueLimits(),
        RequestResult(1.0, 2, 3, 4.0, 5.0),
        request(1),
        spec("a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_the_same_on_the_other_side(value: Any) -> None:
    assert facts(pickle.loads(pickle.dumps(value))) == facts(value)
