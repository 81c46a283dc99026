"""What an answer of a source costs: the servers that changed, and one fact for all that came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetlb.config.urls import Origin, origin
from hetlb.core.types import InstanceSpec
from hetlb.proxy.discovery.members import Members
from hetlb.proxy.discovery.source import Found


class CountingRoster:
    """A roster that counts what members ask of it."""

    def __init__(self) -> None:
        self.there: dict[str, InstanceSpec] = {}
        self.at: dict[Origin, str] = {}
        self.looks = 0
        self.joined: list[int] = []
        self.left: list[int] = []
        self.members = Members(self)

    def spec(self, name: str) -> InstanceSpec | None:
        self.looks += 1
        return self.there.get(name)

    def name_at(self, place: Origin) -> str | None:
        self.looks += 1
        return self.at.get(place)

    def spec_of(self, found: Found) -> InstanceSpec:
        self.looks += 1
        return InstanceSpec(found.name, found.model, found.url, weight=found.weight)

    def join(self, specs: Sequence[InstanceSpec]) -> None:
        self.joined.append(len(specs))
        for spec in specs:
            self.there[spec.name] = spec
            self.at[origin(spec.url)] = spec.name

    def leave(self, names: Sequence[str]) -> None:
        self.left.append(len(names))
        for name in names:
            self.members.gone(name)
            del self.at[origin(self.there.pop(name).url)]

    def update(self, spec: InstanceSpec) -> None:
        self.there[spec.name] = spec

    def cost(self, source: str, servers: Sequence[Found]) -> int:
        self.looks = 0
        self.members.found(source, servers)
        return self.looks


def servers(count: int) -> list[Found]:
    return [Found(f"s{n}", f"http://10.0.{n >> 8}.{n & 255}:8000", "m") for n in range(count)]


def test_an_answer_costs_what_changed_in_it() -> None:
    costs = []
    for count in (1000, 2000, 4000):
        roster = CountingRoster()
        given = servers(count)
        first = roster.cost("dns", given)
        assert roster.joined == [count]
        same, equal = roster.cost("dns", list(given)), roster.cost("dns", servers(count))
        given[7] = replace(given[7], url="http://10.9.9.9:8000")
        moved = roster.cost("dns", given)
        heavier = roster.cost("dns", [replace(given[0], weight=2.0), *given[1:]])
        gone = roster.cost("dns", given[1:])
        assert roster.joined == [count, 1]
        assert roster.left == [1, 1]
        roster.cost("dns", [])
        assert roster.left[-1] == count - 1
        costs.append((first / count, same, equal, moved, heavier, gone))
    assert costs[0] == costs[1] == costs[2]
    assert costs[0][1:3] == (0, 0)


def test_a_server_that_could_not_come_does_so_when_its_place_is_free() -> None:
    roster = CountingRoster()
    roster.cost("one", [Found("a", "http://10.0.0.1:80", "m")])
    roster.cost("two", [Found("a", "http://10.0.0.2:80", "m"), Found("b", "http://10.0.0.1:80", "m")])
    assert set(roster.there) == {"a"}
    roster.cost("one", [])
    assert {name: spec.url for name, spec in roster.there.items()} == {
        "a": "http://10.0.0.2:80", "b": "http://10.0.0.1:80",
    }  # fmt: skip
    roster.leave(["b"])  # by an operator: the next answer has it again
    roster.cost("two", [Found("a", "http://10.0.0.2:80", "m"), Found("b", "http://10.0.0.1:80", "m")])
    assert set(roster.there) == {"a", "b"}
