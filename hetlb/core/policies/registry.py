"""All policies by the names of the fleet file."""

from __future__ import annotations

import random

from hetlb.core.policies.base import Policy, PolicyParams
from hetlb.core.policies.baselines import (
    LeastKv,
    LeastRequests,
    Paper,
    PaperMemory,
    PeakEwmaChoice,
    PowerOfTwoChoices,
    PrefixMatch,
    Random,
    RoundRobin,
    SessionAffinity,
    Single,
    SmoothWeightedRoundRobin,
)
from hetlb.core.policies.hetlb import Hetlb
from hetlb.core.policies.planned import Planned

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        RoundRobin,
        SmoothWeightedRoundRobin,
        Random,
        LeastRequests,
        PowerOfTwoChoices,
        LeastKv,
        PeakEwmaChoice,
        Single,
        PrefixMatch,
        SessionAffinity,
        Paper,
        PaperMemory,
        Hetlb,
        Planned,
    )
}


def make_policy(name: str, params: PolicyParams, rng: random.Random) -> Policy:
    """The policy called `name`. Raises `KeyError` for an unknown name."""
    return POLICIES[name](params, rng)
