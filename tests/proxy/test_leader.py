"""Leadership by a Lease, against a server that keeps one as coordination.k8s.io/v1 says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from proxy.conftest import turns_until
from proxy.discovery.conftest import serving

from hetlb.config.discovery import LeaseTable
from hetlb.errors import ConfigError
from hetlb.proxy.leader import Leader

PATH = "/apis/coordination.k8s.io/v1/namespaces/prod/leases"


class Leases:
    """Leases by name; one is written with the version that it has, or it is a conflict."""

    def __init__(self) -> None:
        self.version = 10
        self.kept: dict[str, dict[str, Any]] = {}
        self.writes: list[int] = []
        #: Called before a write is looked at: what others do meanwhile.
        self.before_write: Callable[[], None] = lambda: None
        self.failing = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == "Bearer secret"
        assert request.path.startswith(PATH)
        if self.failing:
            return web.json_response({"kind": "Status", "code": self.failing}, status=self.failing)
        name = request.path.removeprefix(PATH).strip("/")
        if request.method == "GET":
            lease = self.kept.get(name)
            return web.json_response(lease or {"kind": "Status", "code": 404}, status=200 if lease else 404)
        self.before_write()
        body = await request.json()
        assert body["kind"] == "Lease"
        name = body["metadata"]["name"]
        stored = self.kept.get(name)
        if request.method == "POST":
            status = 409 if stored else 201
        else:
            assert stored is not None
            version = stored["metadata"]["resourceVersion"]
            status = 200 if body["metadata"]["resourceVersion"] == version else 409
        self.writes.append(status)
        if status != 409:
            self.put(name, body)
        return web.json_response({"kind": "Status"} if status == 409 else self.kept[name], status=status)

    def put(self, name: str, lease: dict[str, Any], **spec: Any) -> None:
        self.version += 1
        metadata = {**lease.get("metadata", {}), "name": name, "resourceVersion": str(self.version)}
        self.kept[name] = {**lease, "metadata": metadata, "spec": {**lease.get("spec", {}), **spec}}

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.kept["pick"]["spec"]
        return spec


class Candidate:
    """A leader whose looks are made one by one, with a clock of its own."""

    def __init__(self, leader: Leader, now: float) -> None:
        self.leader, self.now = leader, now

    async def look(self, seconds: float = 0.0) -> bool:
        self.now += seconds
        try:
            await self.leader._look(self.now)
        finally:
            await self.leader._disconnect()
        return self.leader.leads


@asynccontextmanager
async def leases(tmp_path: Path) -> AsyncIterator[tuple[Leases, Callable[..., Leader]]]:
    (tmp_path / "token").write_text("secret")
    server = Leases()
    async with serving(server.handle) as url:

        def make(name: str, duration_s: int = 50) -> Leader:
            table = LeaseTable(
                name="pick", namespace="prod", api_server=url, token_file="token", duration_s=duration_s
            )
            return Leader(table, tmp_path, name, "shared.lease")

        yield server, make


async def test_one_of_two_gets_the_lease_and_the_other_waits_for_its_end(tmp_path: Path) -> None:
    async with leases(tmp_path) as (server, make):
        # Their clocks have nothing to do with each other, nor with the times in the lease.
        first, second = Candidate(make("a"), 100.0), Candidate(make("b"), 9e6)
        assert await first.look()
        assert (server.spec["holderIdentity"], server.spec["leaseDurationSeconds"]) == ("a", 50)
        for _ in range(10):
            assert not await second.look(20.0)
            assert await first.look(20.0)
        assert first.leader.epoch == 1
        # The first is silent: fifty seconds by the second's clock since it last saw a change.
        for _ in range(3):
            assert not await second.look(20.0)
        assert not await second.look(10.0)
        assert await second.look(1.0)
        assert second.leader.epoch == server.spec["leaseTransitions"] == 2
        assert server.spec["holderIdentity"] == "b"
        # The first comes back, and hears of it by its next look.
        assert not await first.look(200.0)
        assert await second.look()


async def test_of_two_that_take_at_once_one_has_a_conflict(tmp_path: Path) -> None:
    async with leases(tmp_path) as (server, make):
        a, b = Candidate(make("a"), 0.0), Candidate(make("b"), 0.0)
        theirs = {
            "kind": "Lease",
            "metadata": {"name": "pick", "resourceVersion": "1"},
            "spec": {"holderIdentity": "c", "leaseDurationSeconds": 5},
        }

        def make_it_first() -> None:
            server.before_write = lambda: None
            server.kept["pick"] = theirs

        server.before_write = make_it_first
        assert not await a.look()  # another made it between the look and the write
        assert server.writes == [409]

        def steal() -> None:
            server.before_write = lambda: None
            server.put("pick", server.kept["pick"], holderIdentity="b")

        assert not await a.look(1.0)
        server.before_write = steal
        assert not await a.look(9.0)
        assert server.writes == [409, 409]
        assert await b.look()
        assert server.spec["holderIdentity"] == "b"


async def test_a_renewal_that_conflicts_is_looked_at_again(tmp_path: Path) -> None:
    async with leases(tmp_path) as (server, make):
        a = Candidate(make("a"), 0.0)
        assert await a.look()

        def annotate() -> None:
            server.before_write = lambda: None
            server.put("pick", server.kept["pick"], note="by an operator")

        server.before_write = annotate
        assert await a.look(1.0)  # the lease is still its own
        assert server.writes == [201, 409]
        assert await a.look(1.0)
        assert server.writes == [201, 409, 200]
        assert server.spec["note"] == "by an operator"  # what others wrote stays

        def lose() -> None:
            server.put("pick", server.kept["pick"], holderIdentity="b", leaseTransitions=7)

        lose()
        assert not await a.look(1.0)
        assert await a.look(90.0)
        assert a.leader.epoch == 8


async def test_a_leader_goes_on_without_the_server_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with leases(tmp_path) as (server, make):
        leader = make("a", 6)
        leader.start()
        await turns_until(lambda: leader.leads)
        server.failing = 500
        await turns_until(lambda: "answers 500: this process leads on" in caplog.text)
        assert leader.leads
        server.failing = 0
        writes = len(server.writes)
        await turns_until(lambda: len(server.writes) > writes)
        assert caplog.text.count("leads on") == 1
        # One that ends gives the lease back: the next need not wait.
        await leader.close()
        assert (server.spec["holderIdentity"], leader.leads) == ("", False)
        other = Candidate(make("b"), 0.0)
        assert await other.look()


@pytest.mark.parametrize("document", [[], {"spec": 3, "metadata": {}}, {"spec": {}}, "x"])
async def test_what_is_no_lease_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, document: Any
) -> None:
    async with leases(tmp_path) as (server, make):
        server.kept["pick"] = document or {"x": 1}
        leader = make("a", 1)
        leader.start()
        await turns_until(lambda: "expected a Lease" in caplog.text)
        assert not leader.leads
        await leader.close()


def test_outside_of_a_cluster_the_server_is_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"^shared\.lease\.api_server: expected a URL"):
        Leader(LeaseTable(name="pick"), tmp_path, "a", "shared.lease")
