"""Engines that leave after a notice: errors, and tokens that were generated twice.

Shows: four emulated engines carry 80 % of the requests that they have slots for; every few seconds one of
them is given a notice (`PUT /v1/fleet/instances/NAME/notice`), is killed at its deadline and comes back.
Answers take about as long as the deadline, 3 s or what `--deadline` says: the engines' time goes with it, and
so does the length of a run, half a minute with 3 s and five minutes with 30. Exit status 1 unless all answers
are whole and at most 5 % of the tokens were generated twice, by the engines' own counts.

`.venv/bin/python bench/faults/notices.py [--requests 400] [--deadline 30] [--workers 2] [--save FILE]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from lost_engines import CLIENTS, PROFILE, Engine, clients, fleet_file, serve, undisturbed

ENGINES, SLOTS, LOAD = 4, 8, 0.8
#: Shares of a notice's seconds: between two notices, and until the engine is there again.
BETWEEN, AWAY = 0.67, 0.33
_GENERATED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


async def generated(session: aiohttp.ClientSession, engine: Engine) -> int:
    """Tokens that an engine has generated in this life."""
    async with session.get(f"{engine.url}/metrics") as reply:
        return sum(int(float(each)) for each in _GENERATED.findall(await reply.text()))


async def leave(
    engines: list[Engine],
    admin: str,
    deadline_s: float,
    rng: random.Random,
    counts: dict[str, int],
    over: asyncio.Event,
) -> None:
    """Give notice to one engine after the other, kill it at its deadline, and have it back."""
    async with aiohttp.ClientSession() as session:

        async def put(number: int, left_s: float | None) -> None:
            path = f"{admin}/v1/fleet/instances/i{number}/notice"
            async with session.put(path, json={"deadline_s": left_s}) as reply:
                assert reply.status == 200, await reply.text()

        while not over.is_set():
            await asyncio.sleep(BETWEEN * deadline_s)
            number = rng.randrange(len(engines))
            engine = engines[number]
            await put(number, deadline_s)
            await asyncio.sleep(deadline_s - 0.1)
            counts["generated"] += await generated(session, engine)
            counts["notices"] += 1
            engine.send(signal.SIGKILL)
            await engine.gone()
            await asyncio.sleep(AWAY * deadline_s)
            await engine.start()
            await put(number, None)
        for engine in engines:
            counts["generated"] += await generated(session, engine)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    rng, counts = random.Random(args.seed), {"generated": 0, "notices": 0}
    async with contextlib.AsyncExitStack() as stack:
        profile = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "profile.yaml"
        profile.write_text(PROFILE.read_text().replace("max_num_seqs: 32", f"max_num_seqs: {SLOTS}"))
        engines = [Engine(profile, "--time-scale", str(args.deadline)) for _ in range(ENGINES)]
        whole = Engine(PROFILE)
        for engine in [whole, *engines]:
            stack.callback(engine.end)
            await engine.start()
        asked = await undisturbed(whole.url, rng, args.requests, "m", at_once=CLIENTS, real=False)
        urls = [each.url for each in engines]
        # The slots of three engines are fewer than the clients: some wait for an answer to end.
        timeouts = args.deadline / 3.0, args.deadline * 7.0
        path, url = stack.enter_context(fleet_file(urls, args.workers, "m", *timeouts))
        process = serve(path)
        stack.callback(process.kill)
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        admin = f"http://127.0.0.1:{json.loads(path.read_text())['admin']['port']}"
        over = asyncio.Event()
        leaving = asyncio.create_task(leave(engines, admin, args.deadline, rng, counts, over))
        got = await clients(url, asked, round(LOAD * ENGINES * SLOTS))
        over.set()
        await leaving
        async with aiohttp.ClientSession() as session, session.get(f"{admin}/metrics") as reply:
            page = (await reply.text()).splitlines()
    errors = [answer.error for _, answer in got if answer.error]
    wrong = sum(each.whole[:3] != answer[:3] for each, answer in got)
    needed = sum(each.tokens for each in asked)
    return {
        "requests": len(got),
        "errors": len(errors),
        "other": wrong - len(errors),
        "notices": counts["notices"],
        "deadline_s": args.deadline,
        "tokens": needed,
        "generated_twice": round(counts["generated"] / needed - 1.0, 4),
        "first_errors": errors[:3],
        "resumed": [line for line in page if line.startswith("hetlb_requests_resumed_total{")],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Engines leave after a notice.")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--deadline", type=float, default=3.0, help="seconds of a notice")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "default"
    result = asyncio.run(run(args))
    print(json.dumps(result, indent=1))
    if args.save is not None:
        args.save.write_text(json.dumps({"command": sys.argv[1:], **result}, indent=1) + "\n")
    return 0 if not result["errors"] and not result["other"] and result["generated_twice"] <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
