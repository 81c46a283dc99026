"""Several pickers over a hub and over a real Redis server: one view of the fleet, whatever of it dies."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import yaml
from helpers import HANG_S, MODEL, free_port, make_scheduler, request, spec, turns_until
from hypothesis import given
from hypothesis import strategies as st
from options.pick.rig import Rig, rig
from options.pick.test_faults import BESIDE, beside

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.journal import Booked
from hetlb.balancer.core.types import Outcome, Request
from hetlb.cli.main import main
from hetlb.options.lease_wire import WireBegun, WireBooked, WireChange, WireEnded
from hetlb.options.pick.pick_service import PickService
from hetlb.options.shared_view.hub import Hub
from hetlb.options.shared_view.shared_table import SharedTable
from hetlb.options.shared_view.sharing import Sharing
from hetlb.tools.sim.integrity import check_scheduler

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(SERVER is None, reason="needs valkey-server or redis-server")

numbers = st.integers(0, 1 << 31)
requests = st.builds(
    Request,
    st.just(0),
    st.text(max_size=5),
    numbers,
    st.none() | st.integers(1, 1 << 31),
    st.integers(100, 1 << 31),
    numbers,
    st.booleans(),
    samples=st.integers(1, 100),
    streamed=st.booleans(),
    tenant=st.none() | st.text(max_size=5),
    prefix_keys=st.lists(st.tuples(st.text(max_size=5), st.none() | numbers)).map(tuple),
)
changes = (
    st.builds(
        Booked, numbers, st.text(), requests, numbers, st.floats(0, 1e6), st.floats(0, 1e6), st.booleans()
    )
    | st.builds(WireBegun, numbers)
    | st.builds(WireEnded, numbers, st.sampled_from(Outcome), numbers, st.none() | numbers)
)


@given(changes)
def test_the_short_form_holds_all_that_a_peer_needs(change: Booked | WireBegun | WireEnded) -> None:
    wire = WireBooked.of(change) if isinstance(change, Booked) else change
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=WireChange)
    assert read == wire
    if isinstance(read, WireBooked):
        assert read.change(read.request.request()) == change


class Server:
    """A Redis or Valkey server on a port of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        assert SERVER is not None
        self.process = await asyncio.create_subprocess_exec(
            SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        async with asyncio.timeout(HANG_S):
            while not await self.answers():
                await asyncio.sleep(0.01)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def answers(self) -> bool:
        """True if it takes connections."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class HubServer:
    """A hub, in place of a server."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "hub.sock"
        self._hub: Hub | None = None

    @property
    def url(self) -> str:
        return f"hub:{self._path}"

    async def start(self) -> None:
        if self._path.is_dir():
            self._path.rmdir()
        self._hub = Hub()
        await self._hub.start(self._path)

    async def kill(self) -> None:
        """End the hub; the path stays another's, so that no peer is the next one."""
        assert self._hub is not None
        await self._hub.close()
        self._path.unlink()
        self._path.mkdir()


Carrier = Server | HubServer
MAKE: dict[str, Callable[[Path], Carrier]] = {"hub": HubServer, "redis": lambda folder: Server()}


@pytest.fixture(params=["hub", pytest.param("redis", marks=needs_server)])
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
            second = PickService(load_fleet(path))
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


async def test_what_changes_is_said_once_and_at_once(carrier: Carrier) -> None:
    """No heartbeat comes within this test, and a question is no gap in what its process says."""
    async with contextlib.AsyncExitStack() as stack:
        server = carrier
        stack.push_async_callback(server.kill)
        await server.start()
        schedulers = [make_scheduler([spec("a")], "hetlb") for _ in range(2)]
        both = []
        for scheduler in schedulers:
            table = SharedTable(url=server.url, silent_s=60.0)
            each = Sharing(table, server.url, scheduler, lambda _: None, f"{len(both)}")
            stack.push_async_callback(each.close)
            each.start()
            both.append(each)
        await turns_until(lambda: all(len(each.view.peers) == 1 for each in both))
        before = [each.sent for each in both]
        now = asyncio.get_running_loop().time()
        for number in range(1, 9):
            schedulers[number % 2].on_arrival(request(number), now)
            await turns_until(
                lambda told=number: [s.instances[0].in_flight for s in schedulers] == [told] * 2
            )
        # Four changes of each, and an answer to what the other asked when it came.
        assert all(each.sent <= count + 5 for each, count in zip(both, before, strict=True))
        # One that has to wait is told as well, though nothing was booked.
        assert not schedulers[1].placement.elsewhere
        both[0].view.on_arrival(request(9, prompt=9_900), now)
        await turns_until(lambda: schedulers[1].placement.elsewhere.keys() == {MODEL})


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
        restarted = made.picker.sharing = Sharing(
            first._table, both.server.url, made.picker.scheduler, made.picker.scheduling.carry_out, "ab"
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


async def test_the_first_peer_is_the_hub_and_the_next_one_when_it_is_gone(tmp_path: Path) -> None:
    url, made = f"hub:{tmp_path / 'peers.sock'}", []
    async with contextlib.AsyncExitStack() as stack:
        for number in range(3):
            table = SharedTable(url=url, silent_s=60.0)
            each = Sharing(table, url, make_scheduler([spec("a")]), lambda _: None, f"{number}")
            stack.push_async_callback(each.close)
            each.start()
            made.append(each)
        await turns_until(lambda: all(each.peers == 2 for each in made))
        [first] = [each for each in made if each._transport._hub is not None]  # type: ignore[attr-defined]
        await first.close()
        left = [each for each in made if each is not first]
        await turns_until(lambda: all(each.peers == 1 and each.connected for each in left))


async def test_a_file_at_the_path_of_a_hub_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(OSError, match="in use"):
        await Hub().start(path)
    assert path.read_text() == "mine"


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


def test_a_proxy_that_is_to_share_is_told_what_to_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.yaml"
    models = "models:\n  - {name: m, instances: [{url: 'http://a:1'}]}\n"
    file.write_text(f"version: 1\nshared: {{url: 'hub:/x'}}\n{models}")
    assert main(["serve", "--config", str(file), "--check"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "shared: this key was removed for `hetlb serve`; use `--workers N`" in line
