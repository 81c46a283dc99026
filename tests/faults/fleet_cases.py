"""Rows O and L that a proxy suffers inside one process: reloads, load, and a fleet that shrinks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

from faults.cases import case
from faults.checker import fleet, metrics, until
from faults.client import Client, body_of, request
from faults.rig import Rig
from faults.upstream_cases import QUIET, refused, whole

TOTAL = "hetlb_requests_total"


@case("O1", "bad-file", outcomes={"ok": 5}, errors=True)
async def files_that_are_wrong(rig: Rig) -> None:
    good = rig.path.read_text()
    twice = good.replace("name: bg0", "name: i0")
    assert twice != good
    for text in ("models: [", twice, good.replace("version: 1", "version: 9"), "version: 1\nmodels: []\n"):
        rig.path.write_text(text)
        status, told = await rig.reload()
        assert status == 400, (text[:60], told)
        whole(await rig.ask())
    rig.path.unlink()
    assert (await rig.reload())[0] == 400
    whole(await rig.ask())
    rig.path.write_text(good)
    assert (await rig.reload())[0] == 200


@case("O1", "busy-instance-removed", engines=2, outcomes={"ok": 3})
async def removed_while_it_answers(rig: Rig) -> None:
    rig.engine.pace_s, rig.engine.length = 0.02, 20
    label = rig.label()
    async with rig.client() as client:
        client.send(request(label, body_of(label)))
        answer = await client.first_token()
        document = rig.document()
        removed = document["models"][0]["instances"].pop(0)
        rig.write(document)
        assert (await rig.reload())[0] == 200
        for _ in range(2):
            later = await rig.ask()
            whole(later)
            assert later.header("x-hetlb-instance") == "i1"
        assert (await client.rest(answer)).done
        assert answer.tokens(label) == 20
    document["models"][0]["instances"].insert(0, removed)
    rig.write(document)
    assert (await rig.reload())[0] == 200
    await rig.becomes("i0", health="up")


@case("O2", "many-reloads", engines=2, outcomes={"ok": 60})
async def reloads_under_load(rig: Rig) -> None:
    """The soak does a thousand and looks at the memory; here every one of them meets requests."""
    document = rig.document()
    instances = document["models"][0]["instances"]
    for turn in range(20):
        document["models"][0]["instances"] = instances[: 1 + turn % 2]
        rig.write(document)
        asked = asyncio.gather(*(rig.ask() for _ in range(3)))
        assert (await rig.reload())[0] == 200
        for answer in await asked:
            whole(answer)
    assert [i["name"] for i in (await fleet(rig.admin_port))["models"][0]["instances"]] == ["i0", "i1"]


@case("O6", "no-such-name", engines=1, scrape=QUIET, queue={"no_instance_timeout_s": 0})
async def a_name_that_does_not_resolve(rig: Rig) -> None:
    document = rig.document()
    document["models"].append(
        {"name": "lost", "instances": [{"name": "l0", "url": "http://lost.invalid:80"}]}
    )
    rig.write(document)
    assert (await rig.reload())[0] == 200
    answer = await rig.ask(model="lost")
    assert answer.status == 503
    assert answer.header("x-should-retry") == "true"
    assert await rig.health("l0") == "ejected"
    document["models"].pop()
    rig.write(document)
    assert (await rig.reload())[0] == 200


@case("O9", "labels", outcomes={"bad_request": 300, "ok": 1})
async def labels_that_clients_make_up(rig: Rig) -> None:
    whole(await rig.ask())
    refused(await rig.ask(model="warm-up"), 404, retry=False)

    async def series() -> set[tuple[str, str]]:
        """Return series without the streams in the background and without causes, which are a table's."""
        found = await metrics(rig.admin_port)
        return {key for key in found if '"bg' not in key[1] and key[0] != "hetlb_cause"}

    before = await series()
    async with rig.client() as client:
        for number in range(299):
            client.send(request(f"l{number}", body_of("x", model=f"made-up-{number}")))
            assert (await client.answer()).status == 404
    assert await series() == before


@case("L1", "all-down", engines=2, outcomes={"no_instance": 5}, queue={"no_instance_timeout_s": 0})
async def everybody_is_down(rig: Rig) -> None:
    for engine in rig.engines:
        await engine.stop()
    for name in ("i0", "i1"):
        await rig.becomes(name, health="ejected")
    for _ in range(5):
        answer = await rig.ask()
        refused(answer, 503, retry=True)
        assert int(answer.header("retry-after") or 0) >= 1


def overload(name: str, limits: dict[str, Any], fit: int, sent: int) -> None:
    @case("L2", name, outcomes={"ok": fit + 1, "rejected_full": sent - fit}, queue=limits)
    async def more_than_the_queue_takes(rig: Rig) -> None:
        await rig.set_state("i0", "drain")
        async with contextlib.AsyncExitStack() as stack:
            waiting: list[tuple[str, Client]] = []
            for label in [f"w{number:03}" for number in range(fit)]:
                client = await stack.enter_async_context(rig.client())
                # Without a stream the body goes on as it came, so that its bytes are known.
                client.send(request(label, body_of(label, stream=False)))
                waiting.append((label, client))
                await rig.queued(len(waiting))
            for number in range(sent - fit):
                label = f"x{number:03}"
                answer = await rig.raw(request(label, body_of(label, stream=False)))
                refused(answer, 429, retry=True)
                assert 1 <= int(answer.header("retry-after") or 0) <= 60
            queue = (await fleet(rig.admin_port))["queue"]
            assert queue["requests"] == fit
            assert queue["bytes"] <= limits.get("max_bytes", 1 << 30)
            await rig.set_state("i0", "ready")
            for _, client in waiting:
                assert (await client.answer()).status == 200
        whole(await rig.ask())  # and nothing of it lasts


overload("by-count", {"max_requests": 10}, 10, 100)
overload("by-bytes", {"max_bytes": 10 * len(body_of("w000", stream=False))}, 10, 40)


@case("L3", "fails-fast", engines=2, policy={"name": "least-requests"}, modes=("junk",))
async def who_fails_fast_is_out(rig: Rig) -> None:
    rig.engines[1].pace_s = 0.005
    errors = 0
    for _ in range(25):
        errors += sum(answer.status != 200 for answer in await rig.ask_many(2, runs=2))
    assert errors <= 5, f"{errors} of 50 went to an instance that fails at once"


@case(
    "L3",
    "no-magnet",
    engines=2,
    policy={"name": "least-requests"},
    modes=("junk",),
)
async def who_fails_fast_is_no_magnet(rig: Rig) -> None:
    rig.engines[1].mode = "held"
    asked = asyncio.gather(*(rig.ask(runs=2) for _ in range(24)))

    async def all_there() -> bool:
        return len(rig.engines[1].visits) >= 13

    await until(all_there, lambda: "not every request came to an engine")
    rig.engines[1].released.set()
    errors = sum(answer.status != 200 for answer in await asked)
    assert errors <= 5, f"{errors} of 24 went to an instance that fails at once"


@case("L4", "cut-at-random", engines=2, uncounted=True)
async def three_in_ten_leave(rig: Rig) -> None:
    rng = random.Random(3)
    for engine in rig.engines:
        engine.pace_s = 0.002

    async def one(number: int) -> None:
        label = f"q{number}"
        async with rig.client() as client:
            client.send(request(label, body_of(label, stream=rng.random() < 0.7)))
            if rng.random() < 0.3:
                with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                    async with asyncio.timeout(rng.random() * 0.01):
                        await client.answer()
                client.leave()
            else:
                assert (await client.answer()).end == "clean"
                rig.first_bytes[label] = asyncio.get_running_loop().time()

    for turn in range(4):
        await asyncio.gather(*(one(turn * 50 + n) for n in range(50)))
    # A client that left before it was heard made no request: the sum is between the ones who stayed and all.
    stayed = len(rig.first_bytes)

    async def counted() -> bool:
        page = await metrics(rig.admin_port)
        gone = sum(
            value for (name, labels), value in page.items() if "client_gone" in labels and name == TOTAL
        )
        heard = len({visit.id for engine in rig.engines for visit in engine.visits})
        return stayed <= heard <= 200 and gone <= 200 - stayed

    await until(counted, lambda: "more clients left than were cut")
    assert stayed > 100


@case(
    "L5",
    "the-fast-one-dies",
    engines=4,
    outcomes={"ok": 60},
    scrape=QUIET,
)
async def the_fast_one_dies(rig: Rig) -> None:
    """Sixty wait for their first byte at the one that dies: none of them may be lost."""
    for name in ("i1", "i2", "i3"):
        await rig.set_state(name, "drain")
    rig.engine.mode = "held"
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for label in [rig.label() for _ in range(60)]:
            rig.may_run[label] = 2
            clients[label] = await stack.enter_async_context(rig.client())
            clients[label].send(request(label, body_of(label)))
        await rig.engine.visit(60)
        for name in ("i1", "i2", "i3"):
            await rig.set_state(name, "ready")
        await rig.engine.stop()
        answers = [await client.answer() for client in clients.values()]
    lost = [answer.status for answer in answers if not answer.done]
    assert not lost, f"{len(lost)} of 60 were lost"


@case("L5", "few-wait-there", engines=4, outcomes={"ok": 3}, scrape=QUIET)
async def few_wait_where_one_dies(rig: Rig) -> None:
    for name in ("i1", "i2", "i3"):
        await rig.set_state(name, "drain")
    rig.engine.mode = "held"
    asked = [asyncio.create_task(rig.ask(runs=2)) for _ in range(3)]
    await rig.engine.visit(3)
    for name in ("i1", "i2", "i3"):
        await rig.set_state(name, "ready")
    await rig.engine.stop()
    for answer in await asyncio.gather(*asked):
        whole(answer)


@case("L6", "retry-storm", uncounted=True, queue={"max_requests": 1})
async def sdks_come_again(rig: Rig) -> None:
    import openai  # a second, which every process would spend on finding the tests

    await rig.ask_many(40)  # how long to stay away is told by how many ended lately
    await rig.set_state("i0", "drain")
    first = asyncio.create_task(rig.ask())
    await rig.queued(1)
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{rig.port}/v1", api_key="none", max_retries=20)
    async with client:
        asked = [asyncio.create_task(client.completions.create(model="m", prompt=f"secret-{n}"))
                 for n in range(8)]  # fmt: skip

        async def all_refused() -> bool:
            labels = 'outcome="rejected_full",phase="queue"'
            return await rig.metric("hetlb_requests_total", labels) >= 8  # the first may have come again

        await until(all_refused, lambda: "expected eight refusals")
        await rig.set_state("i0", "ready")
        for completion in await asyncio.gather(*asked):
            assert completion.choices[0].text
    whole(await first)
    stayed = await rig.metric("hetlb_requests_total", 'outcome="ok",phase="answer"')
    assert stayed >= 49  # and the streams in the background
