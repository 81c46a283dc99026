"""Peers of one view, over a hub and a real Redis server: what each tells the others, and whom it believes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from helpers import HANG_S, MODEL, make_scheduler, request, spec, turns_until
from hypothesis import given
from hypothesis import strategies as st
from options.peers.carriers import CARRIERS, MAKE, Carrier
from proxy.services import Engine, PatientService, Running, document

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.fleet_tables import SharedTable
from hetlb.balancer.core.ledger import Booked
from hetlb.balancer.core.types import AdminState, Outcome, Request
from hetlb.cli.serving_options import OPTIONS
from hetlb.options.peers import peer_messages, share
from hetlb.options.peers.hub import Hub, HubError, HubTransport, check_place
from hetlb.options.peers.lease_wire import WireBegun, WireBooked, WireChange, WireEnded
from hetlb.options.peers.peer_messages import Receive
from hetlb.options.peers.sharing import Sharing, transport_of
from hetlb.tools.sim.integrity import check_scheduler

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
        assert read.change(read.request.request(0)) == change


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest, tmp_path: Path) -> Carrier:
    """What carries the messages of peers."""
    return MAKE[request.param](tmp_path)


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
            transport = transport_of(server.url, table.group, table.silent_s)
            each = Sharing(table, transport, scheduler, lambda _: None, f"{len(both)}")
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


async def test_the_first_peer_is_the_hub_and_the_next_one_when_it_is_gone(tmp_path: Path) -> None:
    url, made = f"hub:{tmp_path / 'peers.sock'}", []
    async with contextlib.AsyncExitStack() as stack:
        for number in range(3):
            table = SharedTable(url=url, silent_s=60.0)
            transport = transport_of(url, table.group, table.silent_s)
            each = Sharing(table, transport, make_scheduler([spec("a")]), lambda _: None, f"{number}")
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
    with pytest.raises(OSError, match="expected a socket"):
        await Hub().start(path)
    assert path.read_text() == "mine"


# --- two proxies ---


@contextlib.asynccontextmanager
async def two(
    folder: Path, carrier: Carrier, *engines: Engine, **tables: Any
) -> AsyncIterator[list[Running]]:
    """Two proxies of one fleet that know each other."""
    await carrier.start()
    tables = {"shared": {"url": carrier.url}, "policy": {"name": "hetlb"}, **tables}
    try:
        async with contextlib.AsyncExitStack() as stack:
            both = [
                await stack.enter_async_context(sharing_proxy(folder / name, document(*engines, **tables)))
                for name in ("one", "two")
            ]
            await linked(both)
            yield both
            for each in both:
                await each.settled()
    finally:
        await carrier.kill()


@contextlib.asynccontextmanager
async def sharing_proxy(folder: Path, fleet: dict[str, Any]) -> AsyncIterator[Running]:
    """A proxy that has peers."""
    await asyncio.to_thread(folder.mkdir)
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    service = PatientService(load_fleet(path), OPTIONS)
    share(service)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANG_S)) as session:
        try:
            await service.start()
            yield Running(service, path, session)
        finally:
            await service.stop(0.0)


async def linked(both: list[Running]) -> None:
    await turns_until(lambda: all(each.service.sharing.peers == 1 for each in both))


def booked(both: list[Running]) -> list[int]:
    return [each.scheduler.in_flight for each in both]


async def test_each_proxy_books_what_the_other_sends_and_learns_from_its_answers(
    tmp_path: Path, carrier: Carrier
) -> None:
    async with Engine() as one, Engine() as other, two(tmp_path, carrier, one, other) as both:
        one.hold()
        other.hold()
        asked = [asyncio.create_task(each.ask()) for each in both for _ in range(2)]
        await turns_until(lambda: booked(both) == [4, 4])
        ledgers = [
            {each.name: (each.in_flight, each.work_ns, each.kv_tokens) for each in p.scheduler.instances}
            for p in both
        ]
        assert ledgers[0] == ledgers[1]
        one.released.set()
        other.released.set()
        assert {(await each).status for each in asked} == {200}
        await turns_until(lambda: booked(both) == [0, 0])
        predicted = [p.scheduler.predictor.predict(Request(1, "m", 1)) for p in both]
        assert predicted[0] == predicted[1]
        for each in both:
            check_scheduler(each.scheduler)


async def test_what_an_operator_does_at_one_proxy_is_done_at_both_when_it_is_answered(
    tmp_path: Path, carrier: Carrier
) -> None:
    registration = {"registration": True, "registration_networks": ["127.0.0.0/8"]}
    async with (
        Engine() as one, Engine() as other, Engine() as third,
        two(tmp_path, carrier, one, other, admin=registration) as both,
    ):  # fmt: skip
        first, second = both
        await first.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
        assert second.instance("i0").admin is AdminState.DRAIN
        await second.admin("PUT", "/v1/policy", {"name": "rr"})
        assert first.scheduler.placement.policy_name == "rr"
        await second.admin("PUT", "/v1/fleet/instances/i1/notice", {"deadline_s": 30})
        assert first.instance("i1").leaves_at is not None
        reply = await first.admin(
            "POST", "/v1/fleet/instances", {"name": "new", "url": third.url, "model": "m"}
        )
        assert reply.status == 201
        assert "new" in second.names
        await second.admin("DELETE", "/v1/fleet/instances/new")
        assert "new" not in first.names
        for each in both:
            each.rewrite(document(one, other, third, shared={"url": carrier.url}))
        assert (await first.admin("POST", "/v1/reload")).status == 200
        assert "i2" in second.names


async def test_a_proxy_that_comes_learns_what_operators_have_done(tmp_path: Path, carrier: Carrier) -> None:
    async with Engine() as one, Engine() as other, two(tmp_path, carrier, one, other) as both:
        await both[0].admin("PUT", "/v1/fleet/instances/i0/state", {"state": "maint"})
        await both[1].admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
        await both[0].admin("PUT", "/v1/policy", {"name": "p2c"})
        fleet = document(one, other, shared={"url": carrier.url}, policy={"name": "hetlb"})
        async with sharing_proxy(tmp_path / "third", fleet) as third:
            await turns_until(lambda: third.scheduler.placement.policy_name == "p2c")
            await turns_until(lambda: third.instance("i0").admin is AdminState.DRAIN)


async def test_a_change_that_a_peer_cannot_make_is_said(
    tmp_path: Path, carrier: Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine() as one, two(tmp_path, carrier, one) as both:
        both[1].path.write_text("version: 1\nmodels: 3\n")
        assert (await both[0].admin("POST", "/v1/reload")).status == 200
        assert any(
            "a change is not in force everywhere" in each.getMessage() and "models: " in each.getMessage()
            for each in caplog.records
        )


async def test_the_bookings_of_a_proxy_that_dies_are_gone_within_its_silence(
    tmp_path: Path, carrier: Carrier
) -> None:
    async with Engine() as one, two(tmp_path, carrier, one) as both:
        one.hold()
        asked = [asyncio.create_task(both[0].ask()) for _ in range(3)]
        await turns_until(lambda: booked(both) == [3, 3])
        sharing = both[0].service.sharing
        sharing.connected = False  # it says no farewell
        await sharing.close()
        await turns_until(lambda: booked(both) == [3, 0])
        one.released.set()
        assert {(await each).status for each in asked} == {200}
        both[0].service.sharing = None
        both[0].service.scheduling.view = None


# --- who is believed ---

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
_AS_OTHER = (
    "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
    "path = sys.argv[1]; "
)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that other users can enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextlib.asynccontextmanager
async def other_user(script: str, path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run Python as another user, with a socket `s` and a path; it has said a line when this begins."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _AS_OTHER + script, str(path),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), HANG_S)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Tries(HubTransport):
    """A hub's transport that counts its tries to connect."""

    count = 0

    async def run(self, joined: Callable[[], None], receive: Receive) -> None:
        self.count += 1
        await super().run(joined, receive)

    async def two_more(self) -> None:
        before = self.count
        await turns_until(lambda: self.count >= before + 2)


def shared_over(path: Path, transport: HubTransport | None = None) -> Sharing:
    transport = transport or HubTransport(path)
    return Sharing(SharedTable(), transport, make_scheduler([spec("a")]), lambda _: None, "ab")


@needs_root
@pytest.mark.parametrize("sticky", [True, False])
async def test_a_hub_of_another_user_is_one_line_and_is_told_nothing(
    reachable: Path, caplog: pytest.LogCaptureFixture, sticky: bool
) -> None:
    os.chmod(reachable, 0o1777 if sticky else 0o777)
    path = reachable / "hub.sock"
    listens = "s.bind(path); s.listen(); print(flush=True); s.accept(); print('believed', flush=True)"
    async with other_user(listens, path) as process:
        one = shared_over(path, tries := Tries(path))
        one.start()
        expected = "belongs to another user" if sticky else "only this user or root can write to"
        await turns_until(lambda: expected in caplog.text)
        await tries.two_more()
        assert caplog.text.count("the connection is lost") == 1
        assert not one.connected
        await one.close()
        process.kill()
        assert process.stdout is not None
        assert await process.stdout.read() == b""


@needs_root
async def test_a_member_of_another_user_hears_nothing_and_is_not_heard(reachable: Path) -> None:
    path = reachable / "hub.sock"
    ours = [shared_over(path), shared_over(path)]
    ours[1].name = "cd"
    for each in ours[:1]:
        each.start()
    await turns_until(lambda: ours[0].connected)
    path.chmod(0o666)  # as if the folder and the mode were no guard
    lease = WireBooked.of(Booked(1, "a", request(1), 10**9, 20.0, 0.5))
    message = peer_messages.framed(peer_messages.message("ef", peer_messages.STATE, 1, 0.0, [lease]))
    script = (
        f"s.connect(path); s.settimeout({HANG_S})\ntry: s.send({message!r}); heard = s.recv(1)\n"
        "except OSError: heard = b''\nprint(heard == b'', flush=True)"
    )
    async with other_user(script, path):
        pass
    assert (ours[0].received, ours[0].view.peer_leases) == (0, 0)
    for each in ours:
        await each.close()


@pytest.mark.parametrize("what", ["fifo", "folder", "lock fifo", "lock link", "no folder", "open folder"])
async def test_a_place_that_cannot_be_a_hubs_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    path = tmp_path / "hub.sock"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "lock fifo":
        os.mkfifo(f"{path}.lock")
    elif what == "lock link":
        (tmp_path / "mine").write_text("mine")
        os.symlink(tmp_path / "mine", f"{path}.lock")
    elif what == "no folder":
        path = tmp_path / "none" / "hub.sock"
    else:
        os.chmod(tmp_path, 0o777)
    one = shared_over(path, tries := Tries(path))
    one.start()
    await turns_until(lambda: "the connection is lost" in caplog.text)
    await tries.two_more()
    assert caplog.text.count("the connection is lost") == 1
    assert "Traceback" not in caplog.text
    await one.close()


async def test_junk_ends_its_connection_alone(tmp_path: Path) -> None:
    path = tmp_path / "hub.sock"
    ours = [
        shared_over(path),
        Sharing(SharedTable(), HubTransport(path), make_scheduler([spec("a")]), lambda _: None, "cd"),
    ]
    for each in ours:
        each.start()
    await turns_until(lambda: all(each.peers == 1 for each in ours))
    for junk in (b"\xff" * 100, b"\0\0\0\5hello", b"GET / HTTP/1.1\r\n\r\n" * 1000, os.urandom(4096)):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(junk)
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                if writer.is_closing():
                    break
                writer.write_eof() if writer.can_write_eof() else None
        writer.close()
    _, silent = await asyncio.open_unix_connection(str(path))  # it says nothing, and reads nothing
    scheduler = ours[0].view._scheduler
    scheduler.on_arrival(request(1), asyncio.get_running_loop().time())
    await turns_until(lambda: ours[1].view.peer_leases == 1)
    assert all(each.connected for each in ours)
    silent.close()
    for each in ours:
        await each.close()


async def test_a_peer_that_does_not_follow_to_the_next_connection_is_gone(tmp_path: Path) -> None:
    """It ended with the hub, which tells of others' ends: its silence is not waited for."""
    hub, one = (
        Sharing(
            SharedTable(silent_s=60.0), HubTransport(tmp_path / "hub.sock"), make_scheduler([spec("a")]),
            lambda _: None, name,
        )
        for name in ("ab", "cd")
    )  # fmt: skip
    hub.start()
    await turns_until(lambda: hub.connected)
    one.start()
    await turns_until(lambda: one.peers == 1)
    lease = WireBooked.of(Booked(1, "a", request(1), 10**9, 20.0, 0.5))
    one._receive(peer_messages.message("ef", peer_messages.STATE, 1, 0.0, [lease]))
    assert (one.peers, one.view.peer_leases) == (2, 1)
    one._transport.drop()
    await turns_until(lambda: (one.peers, one.view.peer_leases) == (1, 0))
    assert one.connected
    for each in (one, hub):
        await each.close()


async def test_a_hub_that_hangs_is_left_alone_after_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "hub.sock"
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(path))
        hung.listen()
        one = Sharing(
            SharedTable(silent_s=0.2), HubTransport(path), make_scheduler([spec("a")]), lambda _: None, "ab"
        )
        one.start()
        await turns_until(lambda: "the connection is lost" in caplog.text)
        await one.close()


def test_the_place_of_a_hub_is_checked(tmp_path: Path) -> None:
    check_place(tmp_path / "hub.sock")
    tmp_path.chmod(0o777)
    with pytest.raises(HubError, match="expected a folder that only this user or root can write to"):
        check_place(tmp_path / "hub.sock")
    tmp_path.chmod(0o1777)
    check_place(tmp_path / "hub.sock")


async def test_a_hub_sends_a_member_few_of_its_own_messages_and_all_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message woke its sender too."""
    monkeypatch.setattr("hetlb.options.peers.hub._ECHO_S", 3600.0)
    path, own, other = tmp_path / "hub.sock", [0], [0]
    one, two = HubTransport(path), HubTransport(path)

    def count(counter: list[int]) -> Callable[[bytes], None]:
        def heard(message: bytes) -> None:
            counter[0] += 1

        return heard

    tasks = []
    for transport, counter in ((one, own), (two, other)):
        joined = asyncio.Event()
        tasks.append(asyncio.create_task(transport.run(joined.set, count(counter))))
        await joined.wait()
    for number in range(20):
        one.send(peer_messages.message("ab", peer_messages.CHANGES, number, 0.0, []))
        await turns_until(lambda number=number: other[0] > number)  # type: ignore[misc]
    assert other == [20]
    assert own == [1]
    for transport in (two, one):
        await transport.close()
    await asyncio.gather(*tasks, return_exceptions=True)
