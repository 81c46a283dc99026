"""Two proxies of one fleet with one view, over a hub and over Redis or Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from pick.test_sharing import Carrier, Server, carrier, needs_server
from proxy.conftest import turns_until
from proxy.services import Engine, PatientService, Running, document, said, serving
from proxy.upstreams import plain

from hetlb.cli.main import main
from hetlb.config.fleet import load_fleet

__all__ = ["carrier"]  # a fixture


@contextlib.asynccontextmanager
async def pair(
    folder: Path, server: Carrier, engines: list[Engine], *, silent_s: float = 1.0
) -> AsyncIterator[tuple[Carrier, list[Running]]]:
    """Two proxies over these engines that know of each other."""
    await server.start()
    shared = {"url": server.url, "silent_s": silent_s}
    fleet = document(*engines, shared=shared, policy={"name": "hetlb"}, scrape={"interval_s": 60})
    try:
        async with serving(folder, fleet) as first, aiohttp.ClientSession() as session:
            service = PatientService(load_fleet(first.path))
            await service.start()
            try:
                both = [first, Running(service, first.path, session)]
                await turns_until(lambda: [peers(each) for each in both] == [1, 1])
                yield server, both
                for running in both:
                    await running.settled()
            finally:
                await service.stop(0.0)
            # Messages of the second may come late, and may lack an end: its leases go with it.
            await turns_until(lambda: booked([first]) == [0])
    finally:
        await server.kill()


def peers(running: Running) -> int:
    sharing = running.service.sharing
    assert sharing is not None
    return len(sharing.view.peers)


def connected(running: Running) -> bool:
    sharing = running.service.sharing
    assert sharing is not None
    return sharing.connected


def booked(both: list[Running]) -> list[int]:
    return [sum(each.in_flight for each in running.scheduler.instances) for running in both]


async def test_each_proxy_books_what_the_other_books(tmp_path: Path, carrier: Carrier) -> None:
    # A pause of a busy machine is no death here.
    async with (
        Engine() as one,
        Engine() as two,
        pair(tmp_path, carrier, [one, two], silent_s=30.0) as (_, both),
    ):
        one.hold()
        two.hold()
        sent = []
        for n in range(6):  # as many as two engines get before their speed is known: none waits
            sent.append(asyncio.create_task(both[n % 2].ask()))
            await turns_until(lambda at_least=n + 1: booked(both) == [at_least, at_least])
        ledgers = [
            {each.name: (each.in_flight, each.work_ns, each.kv_tokens) for each in p.scheduler.instances}
            for p in both
        ]
        assert ledgers[0] == ledgers[1]
        metrics = (await both[0].admin("GET", "/metrics")).body.decode()
        assert "hetlb_shared_connected 1" in metrics
        assert "hetlb_shared_peer_leases 3" in metrics
        one.released.set()
        two.released.set()
        assert {(await each).status for each in sent} == {200}
        await turns_until(lambda: booked(both) == [0, 0])


async def test_a_request_that_an_engine_turns_away_is_booked_where_it_went(
    tmp_path: Path, carrier: Carrier
) -> None:
    busy = plain(b'{"error":"busy"}', b"503 Service Unavailable").replace(
        b"\r\n\r\n", b"\r\nretry-after: 5\r\n\r\n", 1
    )
    async with Engine(busy) as one, Engine() as two, pair(tmp_path, carrier, [one, two]) as (_, both):
        replies = await asyncio.gather(*(both[n % 2].ask() for n in range(6)))
        assert {reply.status for reply in replies} <= {200, 503}
        await turns_until(lambda: booked(both) == [0, 0])
        assert two.asked
        for running in both:
            running.scheduler.check_integrity()


async def test_peers_forget_a_proxy_that_stops_at_once(
    tmp_path: Path, carrier: Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    # Silence would take longer than the test may.
    async with Engine() as one, pair(tmp_path, carrier, [one], silent_s=60.0) as (_, both):
        one.hold()
        sent = asyncio.create_task(both[1].ask())
        await turns_until(lambda: booked(both) == [1, 1])
        await both[1].service.stop(0.0)
        await turns_until(lambda: booked(both[:1]) == [0] and peers(both[0]) == 0)
        assert (await sent).status == 503
        one.released.set()
        assert not said(caplog.records, "is gone, and its leases with it")
        both[0].scheduler.check_integrity()


@needs_server
async def test_a_server_that_hangs_holds_up_no_stop(tmp_path: Path) -> None:
    server = Server()
    async with Engine() as one, pair(tmp_path, server, [one], silent_s=60.0) as (_, both):
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        sharing = both[1].service.sharing
        assert sharing is not None
        async with asyncio.timeout(30.0):
            await sharing.close()
        server.process.send_signal(signal.SIGCONT)


async def test_without_the_server_each_serves_and_says_so_in_one_line(
    tmp_path: Path, carrier: Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine() as one, pair(tmp_path, carrier, [one]) as (server, both):
        await server.kill()
        await turns_until(lambda: not any(connected(each) or peers(each) for each in both))
        assert {(await each.ask()).status for each in both for _ in range(3)} == {200}
        assert len(said(caplog.records, "goes on with its own view")) >= 2
        metrics = (await both[0].admin("GET", "/metrics")).body.decode()
        assert "hetlb_shared_connected 0" in metrics
        assert "hetlb_shared_peers 0" in metrics
        await server.start()
        await turns_until(lambda: [peers(each) for each in both] == [1, 1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workers", "2"), "proxy.workers: expected 1 with shared:, got 2"),
        (("--replace",), "--replace: expected a fleet without shared:, whose other proxies serve meanwhile"),
    ],
)
def test_what_proxies_cannot_share_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    shared = "{url: 'redis://a'}"
    file = tmp_path / "fleet.yaml"
    file.write_text(
        f"version: 1\nshared: {shared}\nmodels:\n  - {{name: m, instances: [{{url: 'http://a:1'}}]}}\n"
    )
    assert main(["serve", "--config", str(file), "--check", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ("{group: a}", "shared.url: expected an address, but the key is missing"),
        ("{url: 'http://a'}", "shared.url: expected redis://, rediss://, unix:// or hub: at its beginning"),
    ],
)
def test_a_picker_says_what_of_the_table_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared: str, message: str
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        f"version: 1\nshared: {shared}\nmodels:\n  - {{name: m, instances: [{{url: 'http://a:1'}}]}}\n"
    )
    assert main(["pick", "--config", str(file), "--check"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
