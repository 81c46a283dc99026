"""What an answer of a source costs: the servers that changed, and one fact for all that came."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers import make_scheduler, request, spec
from msgspec.structs import replace

from hetlb.balancer.core import fleet_state
from hetlb.balancer.core.facts import CapacityLearned, InstanceAdded, ModelsLearned, Probed, ProbeResult
from hetlb.balancer.core.ready import ReadyInstances
from hetlb.balancer.core.types import Capacity, InstanceSpec
from hetlb.balancer.fleet.members import LEAVES_AT, TURN_INSTANCES, Members
from hetlb.balancer.fleet.source import Found
from hetlb.inputs.urls import Origin, origin


class CountingRoster:
    """A roster that counts what members ask of it."""

    def __init__(self) -> None:
        self.there: dict[str, InstanceSpec] = {}
        self.at: dict[Origin, str] = {}
        self.source_of: dict[str, str] = {}
        self.looks = 0
        self.joined: list[int] = []
        self.left: list[int] = []
        self.notices: list[tuple[str, bool]] = []
        self.members = Members(self)

    def spec(self, name: str) -> InstanceSpec | None:
        self.looks += 1
        return self.there.get(name)

    def name_at(self, place: Origin) -> str | None:
        self.looks += 1
        return self.at.get(place)

    def resolve(self, found: Found, model: str) -> InstanceSpec:
        self.looks += 1
        return InstanceSpec(found.name, model, found.url, weight=found.weight)

    def join(self, specs: Sequence[InstanceSpec]) -> None:
        self.joined.append(len(specs))
        for each in specs:
            self.there[each.name] = each
            self.at[origin(each.url)] = each.name

    def notice(self, name: str, deadline_s: float | None) -> None:
        self.notices.append((name, deadline_s is not None))

    def leave(self, names: Sequence[str]) -> None:
        self.left.append(len(names))
        for name in names:
            self.members.gone(name)
            del self.at[origin(self.there.pop(name).url)]

    def update(self, spec: InstanceSpec) -> None:
        self.there[spec.name] = spec

    async def cost(self, source: str, servers: Sequence[Found]) -> int:
        self.looks = 0
        self.members.found(source, servers)
        await self.members.settled()
        return self.looks


def found(name: str, url: str) -> Found:
    return Found(name=name, url=url, model="m")


def servers(count: int) -> list[Found]:
    return [found(f"s{n}", f"http://10.0.{n >> 8}.{n & 255}:8000") for n in range(count)]


async def test_an_answer_costs_what_changed_in_it() -> None:
    costs = []
    for count in (1000, 2000, 4000):
        roster = CountingRoster()
        given = servers(count)
        first = await roster.cost("dns", given)
        assert sum(roster.joined) == count
        assert max(roster.joined) <= TURN_INSTANCES
        same, equal = await roster.cost("dns", list(given)), await roster.cost("dns", servers(count))
        given[7] = replace(given[7], url="http://10.9.9.9:8000")
        moved = await roster.cost("dns", given)
        heavier = await roster.cost("dns", [replace(given[0], weight=2.0), *given[1:]])
        gone = await roster.cost("dns", given[1:])
        assert (sum(roster.joined), roster.joined[-1]) == (count + 1, 1)
        assert roster.left == [1, 1]
        await roster.cost("dns", [])
        assert (sum(roster.left), max(roster.left)) == (count + 1, TURN_INSTANCES)
        costs.append((first / count, same, equal, moved, heavier, gone))
    assert costs[0] == costs[1] == costs[2]
    assert costs[0][1:3] == (0, 0)


async def test_a_server_that_could_not_come_does_so_when_its_place_is_free() -> None:
    roster = CountingRoster()
    await roster.cost("one", [found("a", "http://10.0.0.1:80")])
    await roster.cost("two", [found("a", "http://10.0.0.2:80"), found("b", "http://10.0.0.1:80")])
    assert set(roster.there) == {"a"}
    await roster.cost("one", [])
    assert {name: spec.url for name, spec in roster.there.items()} == {
        "a": "http://10.0.0.2:80", "b": "http://10.0.0.1:80",
    }  # fmt: skip
    roster.leave(["b"])  # by an operator: the next answer has it again
    await roster.cost("two", [found("a", "http://10.0.0.2:80"), found("b", "http://10.0.0.1:80")])
    assert set(roster.there) == {"a", "b"}


@pytest.mark.parametrize("result", ProbeResult)
def test_what_many_engines_say_is_worked_out_once(
    monkeypatch: pytest.MonkeyPatch, result: ProbeResult
) -> None:
    """Which of them take requests is computed when a request comes, not at every fact of each."""
    computed = 0

    class Counted(ReadyInstances):
        def __init__(self, *args: object) -> None:
            nonlocal computed
            computed += 1
            super().__init__(*args)  # type: ignore[arg-type]

    scheduler = make_scheduler([spec("s0")])
    monkeypatch.setattr(fleet_state, "ReadyInstances", Counted)
    names = [f"s{number}" for number in range(1, 1000)]
    scheduler.on_instance(InstanceAdded(spec(names[0]), tuple(map(spec, names[1:]))), 0.0)
    for name in names:
        scheduler.on_instance(ModelsLearned(name, ("m",)), 0.0)
        scheduler.on_instance(CapacityLearned(name, Capacity(max_model_len=4096)), 0.0)
        scheduler.on_instance(Probed(name, result), 0.0)
    assert computed <= 1
    assert scheduler.on_arrival(request(1), 1.0)
    assert computed <= 2


def test_a_label_gives_notice_once_and_takes_it_back(caplog: pytest.LogCaptureFixture) -> None:
    roster = CountingRoster()
    stays, leaves = (found(name, f"http://{name}:8000") for name in ("stays", "leaves"))

    def labelled(text: str) -> list[Found]:
        return [stays, replace(leaves, labels={LEAVES_AT: text})]

    roster.members.found("file", [stays, leaves])
    assert roster.notices == []
    for _ in range(2):
        roster.members.found("file", labelled("1795471731"))
    assert roster.notices == [("leaves", True)]
    roster.members.found("file", labelled("soon"))
    assert (len(roster.notices), "expected seconds since 1970, got 'soon'" in caplog.text) == (1, True)
    roster.members.found("file", [stays, leaves])
    assert roster.notices[1:] == [("leaves", False)]
