"""Instances that may read a prompt for another."""

from __future__ import annotations

import pytest
from core.test_ready import busy, fleet, linked, names, ready
from helpers import request

from hetlb.balancer.core.types import Role
from hetlb.options.split.hand_overs import Parts


@pytest.mark.parametrize(
    ("roles", "parts", "mixed"),
    [
        ("p d", "pd", False),
        ("p d b", "pdb", False),
        ("p p", "", True),
        ("d d", "", True),
        ("b b", "bb", True),
        ("p b", "pb", False),
        ("d b", "db", False),
        ("b", "", True),
    ],
)
def test_parts_go_to_instances_with_a_role(roles: str, parts: str, mixed: bool) -> None:
    of = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    kinds = roles.split()
    _, filtered = fleet(*(linked(f"{kind}{n}", of[kind]) for n, kind in enumerate(kinds)))
    assert "".join(each.name[0] for each in Parts(filtered).instances) == parts
    assert Parts(filtered).mixed is mixed


def test_without_a_link_none_is_split() -> None:
    _, filtered = fleet(linked("p", Role.PREFILL, link=None), linked("d", Role.DECODE))
    assert (Parts(filtered).instances, names(filtered.able)) == ([], "d")


def test_parts_fit_had_it_not_and_are_not_restrained() -> None:
    scheduler, filtered = fleet(
        linked("p", Role.PREFILL, kv=1000),
        linked("q", Role.PREFILL, kv=3000),
        linked("d", Role.DECODE, kv=3000),
        linked("e", Role.DECODE, kv=2000),
    )

    def parts(
        prompt: int = 100, tried: list[str] | None = None, now: float = 0.0, ceiling: int | None = None
    ) -> str:
        return names(Parts(ready(scheduler, now)).fitting(request(1, prompt=prompt), tried, now, ceiling))

    whole = Parts(filtered)
    assert whole.fitting(request(1), None, 0.0, None) is whole.instances
    assert (parts(950), parts(951), parts(1951), parts(3000)) == ("pqde", "qde", "qd", "")
    assert (parts(tried=["p"]), parts(tried=["p", "q"]), parts(tried=[])) == ("qde", "", "pqde")
    assert (parts(ceiling=2), parts(ceiling=1), parts(ceiling=3)) == ("pe", "", "pqde")
    busy(scheduler, "d", 5.0)
    assert (parts(now=1.0), parts(now=5.0)) == ("pqe", "pqde")
