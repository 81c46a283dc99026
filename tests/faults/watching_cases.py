"""Rows M: what probes and scrapes tell, and how little of it can do harm."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from faults.cases import case
from faults.checker import until
from faults.client import Client, body_of, get, request
from faults.engine import METRICS, FaultEngine
from faults.rig import Rig
from faults.upstream_cases import refused, whole
from helpers import HANG_S

from hetlb.balancer.core.evidence.table import FALL_PROBES

GOOD = METRICS % (1, 0.25)


async def scraped(engine: FaultEngine, more: int = 2) -> None:
    """Wait for that many further scrapes to have been answered."""
    wanted = engine.scrapes + more + 1
    await engine.until(lambda: engine.scrapes >= wanted)


def absurd(name: str, page: bytes, *, invalid: bool, again: bool = True) -> None:
    """A page that says nothing; `again`: it is read again in the next rounds."""

    @case("M1", name, outcomes={"ok": 2})
    async def nonsense_is_discarded(rig: Rig) -> None:
        rig.engine.metrics = GOOD
        await rig.becomes("i0", kv_reported=0.25)
        rig.engine.metrics = page
        whole(await rig.ask())
        if again:
            await scraped(rig.engine)
        assert (await rig.instance("i0"))["kv_reported"] in (0.25, None)  # the last good one, or none
        assert await rig.health("i0") == "up"
        told = await rig.metric("hetlb_instance_invalid_samples_total", 'server="i0"')
        assert (told > 0) is invalid
        whole(await rig.ask())


for value in ("NaN", "-1", "+Inf", "1e400", "seven"):
    absurd(f"usage-{value}", GOOD.replace(b"0.25", value.encode()), invalid=True)
absurd(
    "running-negative",
    GOOD.replace(b"vllm:kv_cache_usage_perc 0.25\n", b"").replace(b"running 1", b"running -1"),
    invalid=True,
)
absurd("duplicate", GOOD + GOOD, invalid=False)
absurd("missing-names", b"python_gc_objects_collected_total 1\n", invalid=False)
absurd("html", b"<!doctype html><html><body>502</body></html>", invalid=False)
absurd("wrong-type", b'{"vllm:kv_cache_usage_perc": 0.9}', invalid=False)
absurd("huge", b"vllm:kv_cache_usage_perc 0.9\n" * 200_000, invalid=False, again=False)
absurd("binary", bytes(range(256)) * 40, invalid=False)


@case(
    "M1",
    "last-good-is-kept",
    outcomes={"ok": 1},
)
async def the_last_good_figure_is_kept(rig: Rig) -> None:
    rig.engine.metrics = GOOD
    await rig.becomes("i0", kv_reported=0.25)
    rig.engine.metrics = GOOD.replace(b"0.25", b"NaN")
    whole(await rig.ask())
    await scraped(rig.engine)
    assert (await rig.instance("i0"))["kv_reported"] == 0.25


@case("M2", "hangs", outcomes={"ok": 3}, scrape={"timeout_s": 0.1})
async def metrics_hang(rig: Rig) -> None:
    rig.engine.metrics = None
    await scraped(rig.engine)
    for _ in range(3):
        whole(await rig.ask())
    assert rig.engine.most_scraping == 1
    await rig.becomes("i0", health="up")  # probes have as short a limit


@case("M3", "lies-idle", engines=2, outcomes={"ok": 20}, policy={"name": "least-kv"})
async def a_full_engine_says_it_is_idle(rig: Rig) -> None:
    liar, honest = rig.engines
    liar.mode = honest.mode = "held"
    honest.metrics = METRICS % (0, 0)
    labels = [rig.label() for _ in range(20)]
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for label in labels:
            clients[label] = await stack.enter_async_context(rig.client())
            clients[label].send(request(label, body_of(label)))
        await liar.until(lambda: len(liar.visits) + len(honest.visits) == 20)
        assert len(liar.visits) <= 12
        for engine in (liar, honest):
            engine.released.set()
        for client in clients.values():
            assert (await client.answer()).done


@case("M4", "flaps", engines=2, outcomes={"ok": 12})
async def health_flaps(rig: Rig) -> None:
    rig.engine.health = "flap"
    for _ in range(4):  # probes of an engine that answers are 2 s apart
        for answer in await rig.ask_many(3):
            whole(answer)
        await rig.engine.probed(1)
        assert await rig.health("i0") == "up"


@case("M5", "green-but-failing", engines=2, policy={"name": "least-requests"}, modes=("junk",))
async def probes_are_green_and_answers_fail(rig: Rig) -> None:
    for _ in range(30):
        whole(await rig.ask(runs=2))
    before = len(rig.engine.visits)
    await rig.engine.probed(6)
    for answer in await rig.ask_many(6, runs=2):  # a trial is due by then
        assert answer.status == 200  # probes that were green all the time are no news
    # The crowd's requests are trials, too.
    assert len(rig.engine.visits) <= before + 4


@case("M5", "red-but-answering", engines=2, outcomes={"ok": 20})
async def probes_are_red_and_answers_are_well(rig: Rig) -> None:
    rig.engine.health = "503"
    for _ in range(20):
        whole(await rig.ask())


@case(
    "M6",
    "busy",
    engines=2,
    outcomes={"ok": 1},
    scrape={"timeout_s": 0.5},
)
async def probes_time_out_while_tokens_flow(rig: Rig) -> None:
    rig.engine.pace_s, rig.engine.length = 0.02, 1 << 30
    label = rig.label()
    async with rig.client() as client:
        client.send(request(label, body_of(label)))
        answer = await client.first_token()
        await rig.engine.visit(1)
        rig.engine.health = "stall"
        await rig.engine.probed(FALL_PROBES + 2)
        assert await rig.health("i0") == "up"
        rig.engine.length = 0  # enough
        assert (await client.rest(answer)).done


async def restarted(rig: Rig, engine: FaultEngine, name: str, **changes: Any) -> None:
    """Kill an engine and bring it back as something else."""
    await engine.stop()
    await rig.becomes(name, health="ejected")
    for key, value in changes.items():
        setattr(engine, key, value)
    await engine.start()
    await rig.becomes(name, health="up")


@case("M7", "other-model", engines=2, outcomes={"ok": 10, "bad_request": 1})
async def comes_back_as_another(rig: Rig) -> None:
    await restarted(rig, rig.engine, "i0", served="other")
    whole(await rig.ask(model="other"))
    for _ in range(9):
        answer = await rig.ask()
        whole(answer)
        assert answer.header("x-hetlb-instance") == "i1"
    refused(await rig.ask(model="nobody"), 404, retry=False)


@case(
    "M7",
    "empty-cache",
    engines=2,
    outcomes={"ok": 20},
    policy={"name": "least-requests"},
    health={"slow_start_s": 600.0},  # however long the twenty take to come
)
async def comes_back_slowly(rig: Rig) -> None:
    await restarted(rig, rig.engine, "i0")
    for engine in rig.engines:
        engine.mode = "held"
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for label in [rig.label() for _ in range(20)]:
            clients.append(await stack.enter_async_context(rig.client()))
            clients[-1].send(request(label, body_of(label)))

        async def all_there() -> bool:
            return sum(len(engine.visits) for engine in rig.engines) == 20

        await until(all_there, lambda: "not every request came to an engine")
        share = len(rig.engine.visits)
        for engine in rig.engines:
            engine.released.set()
        for client in clients:
            assert (await client.answer()).done
    assert share <= 5, f"{share} of 20 went to the instance that had just come back"


@case("M8", "all-restart", engines=2, outcomes={"ok": 12}, queue={"no_instance_timeout_s": HANG_S})
async def all_restart(rig: Rig) -> None:
    for engine in rig.engines:
        await engine.stop()
    for name in ("i0", "i1"):
        await rig.becomes(name, health="ejected")
    labels = [rig.label() for _ in range(12)]
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for number, label in enumerate(labels):
            clients[label] = await stack.enter_async_context(rig.client())
            clients[label].send(request(label, body_of(label)))
            await rig.queued(number + 1)
        for engine in rig.engines:
            await engine.start()
        for label in labels:
            answer = await clients[label].answer()
            assert (answer.done, answer.tokens(label)) == (True, 4)
    decided = json.loads((await get(rig.admin_port, "/v1/decisions?last=1000"))[1])["decisions"]
    order = [each["request_id"] for each in decided if each["model"] == "m"]
    assert len(order) == 12
    assert order == sorted(order), "the longest waiting come first"


@case("M8", "none-comes-back", engines=2, outcomes={"no_instance": 4}, queue={"no_instance_timeout_s": 0.2})
async def all_stay_away(rig: Rig) -> None:
    for engine in rig.engines:
        await engine.stop()
    for name in ("i0", "i1"):
        await rig.becomes(name, health="ejected")
    for answer in await rig.ask_many(4):
        refused(answer, 503, retry=True)
        assert int(answer.header("retry-after") or 0) >= 1


@case("M9", "new-address", outcomes={"ok": 4})
async def same_name_new_address(rig: Rig) -> None:
    async with FaultEngine() as other:
        whole(await rig.ask())
        document = rig.document()
        document["models"][0]["instances"][0]["url"] = other.url
        rig.write(document)
        status, text = await rig.reload()
        assert status == 200, text
        for _ in range(3):
            whole(await rig.ask())
        assert (len(rig.engine.visits), len(other.visits)) == (1, 3)
        # Probes keep a connection to it: back to where it was before it goes.
        document["models"][0]["instances"][0]["url"] = rig.engine.url
        rig.write(document)
        assert (await rig.reload())[0] == 200


@case(
    "M9",
    "two-names",
    outcomes={"ok": 4},
    errors=True,
)
async def two_names_one_address(rig: Rig) -> None:
    document = rig.document()
    document["models"][0]["instances"].append({"name": "twin", "url": rig.engine.url})
    rig.write(document)
    status, text = await rig.reload()
    try:
        for answer in await rig.ask_many(4):
            whole(answer)
        assert status != 200, text
        assert b"an address used once" in text
    finally:
        document["models"][0]["instances"].pop()
        rig.write(document)
        await rig.reload()
