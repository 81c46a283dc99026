"""Messages of other processes that are none: counted and skipped, and the next good one is taken."""

from __future__ import annotations

import asyncio
import math
import tracemalloc
from typing import Any

import msgspec
import pytest
from helpers import make_scheduler, request, spec
from options.peers.fuzzed import TARGETS

from hetlb.balancer.clients.api_keys import LimitsTable
from hetlb.balancer.clients.key_limits import Limiter
from hetlb.balancer.config.fleet_tables import SharedTable
from hetlb.balancer.core.ledger import Booked
from hetlb.balancer.core.types import Outcome
from hetlb.build import compiled
from hetlb.options.peers import peer_messages, shared_view, sharing
from hetlb.options.peers.lease_wire import PART_BYTES, PART_CHANGES, WireBooked, WireChange, WireEnded
from hetlb.options.peers.peer_messages import MAX_MESSAGE_BYTES, VERSION
from hetlb.options.peers.redis_transport import RedisTransport
from hetlb.options.peers.shared_view import SOME
from hetlb.options.peers.sharing import Sharing
from hetlb.tools.sim.integrity import check_scheduler
from hetlb.turns import Turns

NAME, OWN = "ab12", "cd34"


def shared() -> Sharing:
    """A view of one process, whose server is not there."""
    transport = RedisTransport("redis://127.0.0.1:1", "hetlb:leases", 1.0)
    return Sharing(SharedTable(), transport, make_scheduler([spec("a")]), lambda _: None, OWN)


def message(changes: Any, kind: Any = 1, **other: Any) -> bytes:
    fields = {
        "version": VERSION,
        "name": NAME,
        "kind": kind,
        "sequence": 1,
        "sent_at": 0.0,
        "changes": changes,
    }
    return msgspec.msgpack.encode([*(fields | other).values()])


def lease(**other: Any) -> list[Any]:
    """A lease as it goes over the wire, with other fields."""
    wire = WireBooked.of(Booked(1, "a", request(1), 10**9, 20.0, 0.5))
    fields = msgspec.structs.asdict(wire) | {name: value for name, value in other.items() if name != "facts"}
    facts = msgspec.structs.asdict(fields["request"]) | other.get("facts", {})
    return [0, *[list(facts.values()) if name == "request" else value for name, value in fields.items()]]


ODD: dict[str, Any] = {
    "no MessagePack": b"\xc1\xff",
    "text": "a text, as a client of the server may have asked for",
    "another version": message([], version=1),
    "a list for a name": message([], name=["x"]),
    "a map for a kind": message([], kind={}),
    "an unknown kind": message([], kind=9),
    "a sequence that is no number": message([], sequence="x"),
    "a number that has no end": message([], sequence=1 << 63),
    "a time of text": message([], sent_at="now"),
    "another's message under its own name": message([], name=OWN, sent_at="now"),
    "an unknown change": message([[7, 1]]),
    "a change that is none": message([3]),
    "a change beside an unknown one that is none": message([[99], [1, -(1 << 63)]]),
    "an unknown change of another version": message([[99]], version=1 << 40),
    "an instance that is a list": message([lease(instance=["a"])]),
    "negative work": message([lease(work_ns=-1)]),
    "an age without end": message([lease(age_s=math.inf)]),
    "an age that is no number": message([lease(age_s=math.nan)]),
    "a length that is no number": message([lease(predicted_output=math.nan)]),
    "fewer than no sequences": message([lease(facts={"sequences": -1})]),
    "no tokens at most": message([lease(facts={"max_tokens": 0})]),
    "no samples": message([lease(facts={"samples": 0})]),
    "more samples than sequences": message([lease(facts={"samples": 5})]),
    "a prompt without end": message([lease(facts={"prompt_tokens": 1 << 62})]),
    "a negative prompt": message([lease(facts={"prompt_tokens": -5})]),
    "a key that is a number": message([lease(facts={"prefix_keys": [[1, 2]]})]),
    "an outcome of nothing": message([[2, 1, "unheard of", 0, None]]),
    "sizes of text": message([[3, {"m": "x"}]]),
    "a name without end": message([[3, {"m" * 5000: 1}]]),
    "an id of a response without end": message([[8, "x" * 300, "a", "m", None]]),
    "too many changes": message([[1, 1]] * (PART_CHANGES + 1)),
    "too many bytes": message([lease(facts={"prefix_keys": [["x" * 1000, None]] * 4000})]),
}


@pytest.mark.parametrize("name", ODD)
async def test_a_process_hears_on_after_an_odd_message(name: str) -> None:
    view = shared()
    try:
        view._receive(ODD[name])
        assert (view.rejected, view.view.peer_leases) == (1, 0)
        view._receive(message([lease()]))
        assert (view.received, view.view.peer_leases) == (1, 1)
        view._receive(message([[2, 1, "ok", 3, None]], kind=0, sequence=2))
        assert view.view.peer_leases == 0
    finally:
        await view.close()


async def test_what_a_later_release_adds_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """During a rolling update one replica sends kinds of changes and fields that the other does not know."""
    view = shared()
    later = [[99, "x", {}], [*lease(), "more"], [2**40]]
    view._receive(message(later, more=1))
    assert (view.rejected, view.received, view.view.peer_leases) == (0, 1, 1)
    view._receive(message([[99], [2, 1, "ok", 3, None, False, "more"]], kind=0, sequence=2))
    assert (view.rejected, view.view.peer_leases) == (0, 0)
    await view.close()


async def test_a_peer_of_another_version_is_named_and_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    view = shared()
    view._receive(message([lease()], version=VERSION + 1))
    assert (view.rejected, view.peers, view.view.peer_leases) == (1, 0, 0)
    assert f"expected version {VERSION}, got {VERSION + 1}" in caplog.text
    view._receive(message([lease()]))
    assert view.view.peer_leases == 1
    await view.close()


async def test_odd_messages_without_end_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    view = shared()
    for _ in range(500):
        for odd in ODD.values():
            view._receive(odd)
        await asyncio.sleep(0)
    assert view.rejected == 500 * len(ODD)
    assert len(caplog.records) <= 2
    await view.close()


async def test_questions_without_end_are_answered_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that holds is told again at most four times a second, however many ask."""
    one = shared()
    sent: list[bytes] = []
    monkeypatch.setattr(one._transport, "send", sent.append)
    for number in range(1000):
        one._receive(message([], kind=2, sequence=number))
    await asyncio.sleep(0)
    assert len(sent) == 2, "its own question to one that it does not know, and one answer"
    await one.close()


@pytest.mark.parametrize("how", ["leave", "silent", "state", "state of another"])
async def test_however_much_a_peer_held_it_ends_in_turns(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a peer with 262,144 leases the loop stood for 2.6 s."""
    monkeypatch.setattr(Turns, "over", lambda self, end: True)  # the shortest turns that there are
    one, many = shared(), 40 * SOME
    for at in range(0, many, PART_CHANGES):
        changes = [[*lease()[:1], n, *lease()[2:]] for n in range(at, at + PART_CHANGES)]
        one._receive(message(changes, kind=0 if at else 1, sequence=at))
        one._next[NAME] = at + PART_CHANGES
    assert one.view.peer_leases == many
    if how == "silent":
        one._forget(NAME, 0.0)
    elif how == "leave":
        one._receive(message([], kind=3, sequence=many))
    else:
        one._receive(message([[3, {}, 0, 0, {}]], kind=1, sequence=many))
        if how == "state of another":
            one._receive(message([[3, {}, 0, 0, {}]], kind=1, name="ef"))
    left, turn = one.view.peer_leases, 0
    assert left >= many - 2 * SOME, "each message ends some"
    while left:
        await asyncio.sleep(0)
        turn += 1
        assert left - one.view.peer_leases <= SOME, "in one turn of the loop"
        left = one.view.peer_leases
    assert turn >= 38
    check_scheduler(one.view._scheduler)
    await one.close()


async def test_what_is_believed_of_one_peer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_MOST_TICKETS", 100)
    most = shared_view.MOST_LEASES if compiled() else 100
    monkeypatch.setattr(shared_view, "MOST_LEASES", most)
    one = shared()
    limiter = Limiter(LimitsTable(), "k")
    one.share_keys(lambda key: limiter)
    for sequence in range(4):
        numbers = range(64 * sequence, 64 * sequence + 64)
        changes = [[*lease()[:1], n, *lease()[2:]] for n in numbers]
        changes += [[6, n, "k", 1, True] for n in numbers]
        one._receive(message(changes, kind=0 if sequence else 1, sequence=sequence))
    assert (one.view.peer_leases, limiter._in_flight) == (min(most, 256), 100)
    ends = [[2, n, "ok", 3, None] for n in range(256)]
    one._receive(message(ends, kind=0, sequence=4))
    assert (one.view.peer_leases, one.rejected) == (0, 0), "later news of it is heard"
    check_scheduler(one.view._scheduler)
    await one.close()


async def test_words_of_peers_that_leave_without_end_cost_a_few_messages_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An own farewell (of an earlier connection, or forged) let a process send all its state, each time."""
    one = shared()
    sent: list[bytes] = []
    monkeypatch.setattr(one._transport, "send", sent.append)
    one._receive(message([lease()]))
    for number in range(500):
        one._receive(message([], kind=3, name=OWN, sequence=number))
        one._receive(message([], kind=3, sequence=number))
        one._receive(message([lease()], kind=0, sequence=2 * number))
        one._transport.lost = True
        await asyncio.sleep(0)
    assert len(sent) <= 4, "its state, a question, and both as of a new connection"
    assert one.peers == 1, "the second farewell within a second is not believed: silence tells"
    await one.close()


async def test_a_farewell_that_is_not_believed_leaves_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    one = shared()
    one._receive(message([lease()]))
    one._receive(message([], kind=3, sequence=2))
    assert (one.peers, one.view.peer_leases) == (0, 0)
    one._receive(message([lease()]))
    one._receive(message([[2, 1, "ok", 3, None]], kind=3, sequence=2))
    assert (one.peers, one.view.peer_leases) == (1, 0)
    one._left_at[NAME] -= 1.0
    one._receive(message([], kind=3, sequence=3))
    assert one.peers == 0
    await one.close()


async def test_peers_are_bounded() -> None:
    one = shared()
    for number in range(sharing._MOST_PEERS + 10):
        one._receive(message([lease()], name=f"{number:x}"))
    assert (one.peers, one.rejected) == (sharing._MOST_PEERS, 10)
    assert one.view.peer_leases == sharing._MOST_PEERS
    await one.close()


def test_the_limits_hold_what_a_scheduler_may_say() -> None:
    """A lease of the largest request that passes, and one whose process has restored it."""
    largest = request(1 << 61, prompt=1 << 31)
    lease = Booked(1 << 61, "i" * 200, largest, 1 << 53, 1e9, 1e9, True)
    wire: list[WireChange] = [
        WireBooked.of(lease),
        WireEnded(1 << 61, Outcome.BROKEN_STREAM, 1 << 40, 1 << 31),
    ]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=list[WireChange])
    assert read == wire
    assert isinstance(read[0], WireBooked)
    assert read[0].change(largest) == lease


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "state",
            marks=pytest.mark.skipif(compiled(), reason="a compiled view's method cannot be replaced"),
        ),
        "changes",
    ],
)
async def test_many_leases_come_in_parts_that_mean_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = shared(), shared()
    sent: list[bytes] = []
    monkeypatch.setattr(one._transport, "send", sent.append)
    one.name = "ef56"
    numbers = range(3 * PART_CHANGES)
    leases: list[WireChange] = [
        WireBooked.of(Booked(n, "a", request(n, prompt=1), 1, 1.0, 0.0)) for n in numbers
    ]
    if kind == "state":
        one.view.live = lambda now: leases  # type: ignore[method-assign, assignment]
        one._send_state()
    else:
        one._send(0, leases)
    assert len(sent) == 3
    for each in [message([], name="ef56", sequence=0), *sent]:
        assert len(each) <= PART_BYTES
        other._receive(each)
    assert (other.rejected, other.view.peer_leases) == (0, len(leases))
    for each in (one, other):
        await each.close()


@pytest.mark.parametrize("change", [[1, 1], [2, 1, "ok", 0, None], [3, {str(n): 1 for n in range(4000)}]])
@pytest.mark.parametrize("keys", [0, 4096])
def test_a_message_takes_a_bounded_amount_of_memory(change: list[Any], keys: int) -> None:
    """Whatever comes in `MAX_MESSAGE_BYTES`: what is kept of it, and what was while it was read."""
    if keys:
        change = lease(facts={"prefix_keys": [["", None]] * keys})
    size = len(msgspec.msgpack.encode(change))
    data = message([change] * min(PART_CHANGES, MAX_MESSAGE_BYTES // size))
    tracemalloc.start()
    try:
        peer_messages.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_the_fuzz_target_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Sharing, data: bytes) -> None:
        raise TypeError("unhashable")

    monkeypatch.setattr(Sharing, "_receive", broken)
    with pytest.raises(TypeError):
        TARGETS["shared"](message([]))
