"""Several pickers over a hub and over a real Redis server: one view of the fleet, whatever of it dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from helpers import turns_until
from options.peers.carriers import CARRIERS, MAKE, Carrier, Server, needs_server
from options.pick.rig import Rig, rig
from options.pick.test_faults import BESIDE, beside

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.types import Request
from hetlb.cli.main import main
from hetlb.cli.serving_options import OPTIONS
from hetlb.options.peers import share
from hetlb.options.peers.sharing import Sharing, transport_of
from hetlb.options.pick.pick_service import PickService
from hetlb.tools.sim.integrity import check_scheduler


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest, tmp_path: Path) -> Carrier:
    """What carries the messages of peers."""
    return MAKE[request.param](tmp_path)


class Pair:
    """Two pickers of one fleet, the first of them behind the rig's Envoy."""

    def __init__(self, made: Rig, server: Carrier, pickers: list[PickService]) -> None:
        self.made, self.server, self.pickers = made, server, pickers

    @property
    def booked(self) -> list[int]:
        """Requests at the engines, as each picker has them."""
        return [sum(each.in_flight for each in p.scheduler.instances) for p in self.pickers]

    async def linked(self) -> None:
        """Wait until both know of each other."""
        await turns_until(
            lambda: all(p.sharing is not None and len(p.sharing.view.peers) == 1 for p in self.pickers)
        )


@contextlib.asynccontextmanager
async def pair(folder: Path, server: Carrier, silent_s: float = 1.0) -> AsyncIterator[Pair]:
    await server.start()
    shared = {"url": server.url, "silent_s": silent_s}
    try:
        # Engines' figures are read seldom: what a picker knows of the other's requests is from the other.
        tables = {"shared": shared, "policy": {"name": "hetlb"}, "scrape": {"interval_s": 60}}
        async with rig(folder, **tables) as made:
            path = folder / "second.yaml"
            path.write_text(yaml.safe_dump(made.fleet(**{**tables, "pick": {"port": 0}})))
            second = PickService(load_fleet(path), OPTIONS)
            share(second)
            await second.start()
            try:
                yield Pair(made, server, [made.picker, second])
            finally:
                await second.stop(0.0)
    finally:
        await server.kill()


pytestmark = pytest.mark.envoy


async def test_each_books_what_the_other_books_and_gives_it_back(tmp_path: Path, carrier: Carrier) -> None:
    # A pause of a busy machine is no death here: leases of the dead teach nothing.
    async with pair(tmp_path, carrier, silent_s=30.0) as both:
        await both.linked()
        made = both.made
        for engine in made.engines:
            engine.released.clear()
        # As many as two engines get before their speed is known: none waits.
        sent = [asyncio.create_task(made.ask(stream=True)) for _ in range(6)]
        await turns_until(lambda: both.booked == [6, 6])
        ledgers = [
            {each.name: (each.in_flight, each.work_ns, each.kv_tokens) for each in p.scheduler.instances}
            for p in both.pickers
        ]
        assert ledgers[0] == ledgers[1]
        for engine in made.engines:
            engine.released.set()
        assert {(await each).status for each in sent} == {200}
        await turns_until(lambda: both.booked == [0, 0])
        # What the answers taught, both know.
        predicted = [p.scheduler.predictor.predict(Request(1, "m", 1)) for p in both.pickers]
        assert predicted[0] == predicted[1]
        for picker in both.pickers:
            check_scheduler(picker.scheduler)


async def test_a_picker_that_dies_takes_its_leases_along_and_one_that_comes_learns_all(
    tmp_path: Path, carrier: Carrier
) -> None:
    async with pair(tmp_path, carrier) as both:
        await both.linked()
        made = both.made
        for engine in made.engines:
            engine.released.clear()
        sent = [asyncio.create_task(made.ask(stream=True)) for _ in range(6)]
        await turns_until(lambda: both.booked == [6, 6])
        first = both.pickers[0].sharing
        assert first is not None
        first.connected = False
        await first.close()  # as if it were killed: not a word more from the first
        await turns_until(lambda: both.booked[1] == 0)
        # One that comes now hears all there is.
        transport = transport_of(both.server.url, first._table.group, first._table.silent_s)
        restarted = made.picker.sharing = Sharing(
            first._table, transport, made.picker.scheduler, made.picker.scheduling.carry_out, "ab"
        )
        made.picker.scheduling.view = restarted.view
        restarted.start()
        await turns_until(lambda: both.booked[1] == 6)
        for engine in made.engines:
            engine.released.set()
        assert {(await each).status for each in sent} == {200}
        await turns_until(lambda: both.booked == [0, 0])


async def test_without_the_server_pickers_go_on_and_find_each_other_again(
    tmp_path: Path, carrier: Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path, carrier) as both:
        await both.linked()
        made = both.made
        await both.server.kill()
        await turns_until(
            lambda: not any(p.sharing and (p.sharing.connected or p.sharing.view.peers) for p in both.pickers)
        )
        assert any("goes on with its own view" in record.getMessage() for record in caplog.records)
        replies = await asyncio.gather(*(made.ask() for _ in range(20)))
        assert {reply.status for reply in replies} == {200}
        await both.server.start()
        await both.linked()
        for engine in made.engines:
            engine.released.clear()
        sent = [asyncio.create_task(made.ask()) for _ in range(4)]
        await turns_until(lambda: both.booked == [4, 4])
        for engine in made.engines:
            engine.released.set()
        assert {(await each).status for each in sent} == {200}
        await turns_until(lambda: both.booked == [0, 0])


async def test_the_server_dies_and_comes_back_beside_streams(tmp_path: Path, carrier: Carrier) -> None:
    async with pair(tmp_path, carrier) as both:
        await both.linked()
        made = both.made
        async with beside(made):
            await turns_until(lambda: both.booked == [BESIDE, BESIDE])
            await both.server.kill()
            await turns_until(lambda: both.booked == [BESIDE, 0])
            replies = await asyncio.gather(*(made.ask() for _ in range(20)))
            assert {reply.status for reply in replies} == {200}
            await both.server.start()
            await turns_until(lambda: both.booked == [BESIDE, BESIDE])
        await turns_until(lambda: both.booked == [0, 0])
        assert made.outcomes == ["ok"] * (BESIDE + 20)
        check_scheduler(both.pickers[1].scheduler)


async def test_peers_forget_a_picker_that_stops_at_once(
    tmp_path: Path, carrier: Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    # Silence would take longer than the test may.
    async with pair(tmp_path, carrier, silent_s=60.0) as both:
        await both.linked()
        await both.pickers[1].stop(0.0)
        first = both.pickers[0].sharing
        assert first is not None
        await turns_until(lambda: first.peers == 0)
        assert not any("is gone, and its leases with it" in each.getMessage() for each in caplog.records)


@needs_server
async def test_a_server_that_hangs_holds_up_no_stop(tmp_path: Path) -> None:
    server = Server()
    async with pair(tmp_path, server, silent_s=60.0) as both:
        await both.linked()
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        sharing = both.pickers[1].sharing
        assert sharing is not None
        async with asyncio.timeout(30.0):
            await sharing.close()
        server.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ("{group: a}", "shared.url: expected an address, but the key is missing"),
        ("{url: 'http://a'}", "shared.url: expected redis://, rediss://, unix:// or hub: at its beginning"),
        ("{url: 'redis://:secret'}", "shared.url: expected an address like redis://host:6379/0"),
        ("{url_env: HETLB_NOT_SET}", "shared.url_env: expected the name of a variable that is set"),
    ],
)
def test_a_picker_says_what_of_the_table_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared: str, message: str
) -> None:
    file = tmp_path / "fleet.yaml"
    models = "models:\n  - {name: m, instances: [{url: 'http://a:1'}]}\n"
    file.write_text(f"version: 1\nshared: {shared}\n{models}")
    assert main(["pick", "--config", str(file), "--check"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
