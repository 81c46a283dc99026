"""Rows K: hand-overs of KV blocks from a prefill instance (i0) to decode instances that go wrong."""

from __future__ import annotations

import json
from typing import Any

from faults.cases import PATIENCE_S, case
from faults.client import body_of, request
from faults.engine import ERROR_EVENT, MODES, Visit, mode
from faults.rig import Rig
from faults.upstream_cases import QUIET, whole
from proxy.upstreams import SSE_HEAD, chunk, plain

from hetlb.options.split.transfers import MAX_MISSED_TRANSFERS

#: A lease so short that a case can wait for it, and longer than a prompt takes on a busy machine.
SHORT = {"connector": "nixl", "lease_s": 3.0}
LONG = {"connector": "nixl", "lease_s": 60.0}


#: What engines answer to requests of the proxy's own.
PAIR = ("pair", "pair", "pair")


def is_prefill(visit: Visit) -> bool:
    """True for the leg that asks for one token and for the parameters of the fetch."""
    return b'"do_remote_decode":true' in visit.body


def fetches(visit: Visit) -> bool:
    """True for the leg that is to fetch."""
    return b'"do_remote_prefill": true' in visit.body


async def prefilled(visit: Visit, params: dict[str, Any] | None) -> None:
    answer = {"choices": [{"index": 0, "text": "?"}], "kv_transfer_params": params}
    await visit.send(plain(json.dumps(answer).encode()))


@mode("pair")
async def pair(visit: Visit) -> None:
    """Both legs as a well engine answers them; a request to be refused is."""
    if is_prefill(visit):
        await prefilled(visit, {"do_remote_prefill": True, "remote_request_id": visit.id})
    elif b'"max_tokens":1073741824' in visit.body:
        await visit.send(plain(b'{"error":{"message":"too many tokens"}}', b"400 Bad Request"))
    else:
        await MODES["ok"](visit)


@mode("pair-never-fetches")
async def never_fetches(visit: Visit) -> None:
    """A decode leg waits for ever, as where the prefill instance is stopped."""
    if fetches(visit):
        await visit.send(SSE_HEAD)
        await visit.until_left()
    else:
        await pair(visit)


@mode("pair-load-fails")
async def load_fails(visit: Visit) -> None:
    """A decode leg ends with an error event before its first token (`kv_load_failure_policy: fail`)."""
    if fetches(visit):
        await visit.send(SSE_HEAD + chunk(ERROR_EVENT) + b"0\r\n\r\n")
    else:
        await pair(visit)


@mode("pair-decode-dies")
async def decode_dies(visit: Visit) -> None:
    """A decode leg is dropped without an answer."""
    if fetches(visit):
        visit.close()
    else:
        await pair(visit)


@mode("pair-no-params")
async def no_params(visit: Visit) -> None:
    """The connector is off: nothing to fetch."""
    if is_prefill(visit):
        await prefilled(visit, None)
    else:
        await pair(visit)


@mode("pair-prefill-dies")
async def prefill_dies(visit: Visit) -> None:
    """A prefill leg is dropped without an answer."""
    if is_prefill(visit):
        visit.close()
    else:
        await pair(visit)


@mode("pair-prefill-500")
async def prefill_500(visit: Visit) -> None:
    """A prefill leg is answered with 500."""
    if is_prefill(visit):
        await visit.send(plain(b'{"error":{"message":"no"}}', b"500 Internal Server Error"))
    else:
        await pair(visit)


@mode("pair-hangs")
async def hangs(visit: Visit) -> None:
    """A prefill leg is never answered."""
    if is_prefill(visit):
        await visit.until_left()
    else:
        await pair(visit)


async def all_up(rig: Rig) -> None:
    """Wait until both roles are there: a suspect instance is no part of a pair."""
    rig.may_run[""] = 99  # requests of the proxy's own, which have no id
    for number in range(len(rig.engines)):
        await rig.becomes(f"i{number}", health="up")


async def good(rig: Rig, mode: str, runs: int, *, stream: bool = True) -> None:
    """Check that a request that meets `mode` is answered whole, in `runs` runs."""
    if not rig.first_bytes:
        await all_up(rig)
    answer = await rig.ask(mode, runs=runs, stream=stream)
    if stream:
        whole(answer)
    else:
        assert (answer.status, answer.end) == (200, "clean"), answer.body
    assert (answer.label, rig.runs(answer.label)) == (answer.label, runs)  # type: ignore[attr-defined]


@case("K0", "well", engines=2, outcomes={"ok": 6}, modes=PAIR, kv_transfer=LONG, scrape=QUIET)
async def all_well(rig: Rig) -> None:
    for stream in (True, False) * 3:
        await good(rig, "pair", 2, stream=stream)


@case("K1", "never-fetched", engines=2, outcomes={"ok": 2}, modes=PAIR, kv_transfer=SHORT, scrape=QUIET)
async def not_in_time(rig: Rig) -> None:
    for _ in range(2):
        await good(rig, "pair-never-fetches", 3)
    assert await rig.health("i0") == await rig.health("i1") == "up"


@case("K2", "load-fails", engines=2, outcomes={"ok": 12}, modes=PAIR, kv_transfer=LONG, scrape=QUIET)
async def transfer_fails(rig: Rig) -> None:
    for number in range(12):  # then the pair rests, and one engine gets the whole request
        await good(rig, "pair-load-fails", 3 if number < MAX_MISSED_TRANSFERS else 1)
    assert await rig.health("i0") == await rig.health("i1") == "up"


@case("K3", "decode-refuses", engines=3, outcomes={"ok": 3}, modes=PAIR, kv_transfer=LONG, scrape=QUIET)
async def decode_refuses(rig: Rig) -> None:
    await all_up(rig)
    await rig.engines[1].stop()
    for _ in range(3):
        label = rig.label()
        answer = await rig.ask("pair", runs=4, label=label)
        whole(answer)
        assert answer.header("x-hetlb-instance") == "i2"
    assert await rig.health("i1") == "ejected"


@case("K4", "decode-dies", engines=3, outcomes={"ok": 1}, modes=PAIR, kv_transfer=LONG, scrape=QUIET)
async def decode_drops(rig: Rig) -> None:
    await good(rig, "pair-decode-dies", 3)


@case("K5", "no-params", engines=2, outcomes={"ok": 4}, modes=PAIR, kv_transfer=LONG, scrape=QUIET)
async def params_lost(rig: Rig) -> None:
    for stream in (True, False) * 2:
        await good(rig, "pair-no-params", 2, stream=stream)


@case("K6", "prefill-dies", engines=2, outcomes={"ok": 1}, modes=PAIR, kv_transfer=LONG, scrape=QUIET)
async def prefill_drops(rig: Rig) -> None:
    await good(rig, "pair-prefill-dies", 2)


@case("K6", "prefill-500", engines=2, outcomes={"ok": 2}, modes=PAIR, kv_transfer=LONG, scrape=QUIET)
async def prefill_errs(rig: Rig) -> None:
    for _ in range(2):
        await good(rig, "pair-prefill-500", 2)


@case("K6", "prefill-refuses", engines=2, outcomes={"ok": 2}, modes=PAIR, kv_transfer=LONG, scrape=QUIET)
async def prefill_is_gone(rig: Rig) -> None:
    await all_up(rig)
    await rig.engine.stop()
    for _ in range(2):
        whole(await rig.ask("pair"))
    assert await rig.health("i0") == "ejected"


@case(
    "K6",
    "prefill-hangs",
    engines=2,
    outcomes={"ok": 1},
    modes=PAIR,
    kv_transfer=LONG,
    proxy={"first_byte_timeout_s": PATIENCE_S},
)
async def prefill_hangs(rig: Rig) -> None:
    await good(rig, "pair-hangs", 2)


@case(
    "K7",
    "leaves-while-it-is-read",
    engines=2,
    outcomes={"client_gone": 1},
    modes=PAIR,
    kv_transfer=LONG,
    scrape=QUIET,
)
async def leaves_in_prefill(rig: Rig) -> None:
    await _leaves(rig, "pair-hangs", engine=0)


@case(
    "K7",
    "leaves-while-it-is-fetched",
    engines=2,
    outcomes={"client_gone": 1},
    modes=PAIR,
    kv_transfer=LONG,
    scrape=QUIET,
)
async def leaves_in_fetch(rig: Rig) -> None:
    await _leaves(rig, "pair-never-fetches", engine=1)


async def _leaves(rig: Rig, mode: str, engine: int) -> None:
    """The client leaves once an engine has its request, and the engine notices."""
    await all_up(rig)
    label = rig.label()
    rig.may_run[label] = 2
    for each in rig.engines:
        each.modes[label] = mode
    async with rig.client() as client:
        client.send(request(label, body_of(label)))
        visit = await rig.engines[engine].visit_of(label)
    await rig.engines[engine].until(visit.left.is_set)
    rig.first_bytes[label] = visit.started_at + 1e9
