"""Turns on the event loop: endless readers hold up no other, and go on in their order."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from hetlb.turns import Share, Turns, turns


async def test_endless_readers_hold_up_neither_timers_nor_each_other() -> None:
    queue = turns()
    handled = dict.fromkeys(["callback", "one", "two"], 0)

    def go_on() -> None:
        end = queue.begin()
        while not queue.over(end):
            handled["callback"] += 1
        queue.later(go_on)

    async def read(name: str) -> None:
        share = Share()
        while True:  # a socket with a message at any time: nothing here ever waits for one
            await share.spent()
            handled[name] += 1

    queue.later(go_on)
    readers = [asyncio.create_task(read(name)) for name in ("one", "two")]
    loop = asyncio.get_running_loop()
    for _ in range(10):
        timer = loop.create_future()
        loop.call_later(0.0, timer.set_result, None)
        await timer
        before = dict(handled)
        while any(handled[name] == before[name] for name in handled):
            await asyncio.sleep(0)
    for each in readers:
        each.cancel()
    await asyncio.gather(*readers, return_exceptions=True)


async def test_readers_go_on_in_the_order_in_which_they_asked() -> None:
    queue = Turns(asyncio.get_running_loop())
    order: list[int] = []

    async def ask(number: int) -> None:
        await queue.next()
        order.append(number)

    asked = []
    for number in range(0, 20, 2):
        asked.append(asyncio.create_task(ask(number)))
        await asyncio.sleep(0)
        queue.later(lambda number=number: order.append(number + 1))  # type: ignore[misc]
    await asyncio.gather(*asked)
    await queue.next()
    assert sorted(order) == list(range(20))
    assert [number for number in order if number % 2] == list(range(1, 20, 2))
    assert [number for number in order if not number % 2] == list(range(0, 20, 2))


async def test_one_coroutine_goes_on_in_each_iteration() -> None:
    queue = Turns(asyncio.get_running_loop())
    order: list[int] = []

    async def ask(number: int) -> None:
        await queue.next()
        order.append(number)

    asked = [asyncio.create_task(ask(number)) for number in range(5)]
    seen = []
    while len(order) < 5:
        seen.append(len(order))
        await asyncio.sleep(0)
    assert all(later - now <= 1 for now, later in itertools.pairwise(seen)), seen
    await asyncio.gather(*asked)


async def test_an_error_and_a_reader_that_left_hold_up_no_other() -> None:
    loop = asyncio.get_running_loop()
    queue, errors = Turns(loop), []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def fail() -> None:
        raise ValueError("a fault of one reader")

    left = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    left.cancel()
    queue.later(fail)
    await queue.next()
    assert [str(each) for each in errors] == ["a fault of one reader"]
    with pytest.raises(asyncio.CancelledError):
        await left


def test_a_loop_has_one_queue_and_leaves_none_behind() -> None:
    async def two() -> tuple[Turns, Turns]:
        return turns(), turns(asyncio.get_running_loop())

    one, other = asyncio.run(two())
    assert one is other
    assert asyncio.run(two())[0] is not one
