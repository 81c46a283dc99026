"""All cases: importing this registers every one of them."""

from __future__ import annotations

from faults import (
    client_cases,
    fleet_cases,
    input_cases,
    process_cases,
    session_cases,
    split_cases,
    upstream_cases,
    watching_cases,
)
from faults.cases import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "client_cases",
    "fleet_cases",
    "input_cases",
    "process_cases",
    "session_cases",
    "split_cases",
    "upstream_cases",
    "watching_cases",
]
