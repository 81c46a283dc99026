"""SIGTERM under load: streams that end within the grace period end whole, the rest are told, the exit is 0.

Shows: for each round how many streams were under way at the signal, how they ended, and when the process did.
Half of the streams last at most until the grace period is over, the others much longer; requests
that come between the signal and the closing of the listener (5 s, readiness says no) are served too; the
time of the exit counts from the signal. A last round has only streams that end: the process does not wait
for the rest of its grace.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from typing import Any

from common import MODEL, Answer, Promise, ask, report, serving, stream_body, until
from engine import Engine

#: How long readiness says no before the listener closes; what the exit may take beyond the grace.
LAG_S, SLACK_S = 5.0, 2.0
INTERVAL_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=100, help="under way at the signal (default 100)")
    parser.add_argument("--grace-s", type=float, default=8.0, help="(default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="with long streams (default 3)")


async def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    rounds = [await _round(args, long=True) for _ in range(args.rounds)]
    rounds.append(await _round(args, long=False))
    promises: list[Promise] = []
    for number, each in enumerate(rounds, 1):
        within = LAG_S + args.grace_s + SLACK_S if each["long"] else each["last_stream_s"] + SLACK_S
        said = "readiness lag + grace + 2 s" if each["long"] else "last stream + 2 s"
        promises += [
            Promise(
                f"round {number}: cut, of {each['short']} that end within the grace", "0",
                str(each["short_cut"]), each["short_cut"] == 0,
            ),
            Promise(
                f"round {number}: of {each['long']} longer ones not told by an error event and no end",
                "0", str(each["long_untold"]), each["long_untold"] == 0,
            ),
            Promise(
                f"round {number}: not served, of {each['late']} that came in the readiness lag", "0",
                str(each["late_bad"]), each["late_bad"] == 0,
            ),
            Promise(
                f"round {number}: exit status and time", f"0 within {within:.1f} s ({said})",
                f"{each['status']} after {each['exit_s']:.2f} s",
                each["status"] == 0 and each["exit_s"] <= within,
            ),
            Promise(
                f"round {number}: errors in the log", "0", str(each["errors"]), each["errors"] == 0
            ),
        ]  # fmt: skip
    return report("terminate", promises, {"grace_s": args.grace_s, "rounds": rounds}, args.recorded)


async def _round(args: argparse.Namespace, *, long: bool) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    count = args.streams // 2
    # Spread over what is left from the signal to shortly before the end of the grace.
    most_s = LAG_S + args.grace_s - 1.0 if long else LAG_S
    async with Engine(MODEL, INTERVAL_S) as engine:
        fleet = {
            "proxy": {"shutdown_grace_s": args.grace_s},
            "models": [{"name": MODEL, "instances": [{"name": "engine", "url": engine.url}]}],
        }
        async with serving(fleet) as proxy:
            shorts = [
                asyncio.create_task(
                    ask(proxy.port, f"short-{n}", stream_body(MODEL, _tokens(1 + (most_s - 1) * n / count)))
                )
                for n in range(count)
            ]
            longs = [
                asyncio.create_task(ask(proxy.port, f"long-{n}", stream_body(MODEL, _tokens(600))))
                for n in range(count if long else 0)
            ]

            async def all_there() -> bool:
                return engine.under_way == len(shorts) + len(longs)

            await until(all_there, "stream of each client")
            signalled = loop.time()
            proxy.signal(signal.SIGTERM)
            end = asyncio.create_task(proxy.ended(LAG_S + args.grace_s + 20))
            late: list[asyncio.Task[Answer]] = []
            while loop.time() < signalled + LAG_S - 1.0:
                late.append(
                    asyncio.create_task(
                        ask(proxy.port, f"late-{len(late)}", stream_body(MODEL, _tokens(0.5)))
                    )
                )
                await asyncio.sleep(0.1)
            status = await end
            exit_s = loop.time() - signalled
            answers = await asyncio.gather(*shorts, *longs, *late)
            errors = proxy.log_lines("Traceback", "ERROR")
    short, rest = answers[: len(shorts)], answers[len(shorts) :]
    told = [each.error and not each.done and not each.framed for each in rest[: len(longs)]]
    print(f"exit {status} after {exit_s:.2f} s, {len(answers)} streams", flush=True)
    return {
        "short": len(short),
        "short_cut": sum(not each.whole for each in short),
        "last_stream_s": round(max(each.ended_at for each in (*short, *rest[len(longs) :])) - signalled, 3),
        "long": len(longs),
        "long_untold": told.count(False),
        "late": len(late),
        "late_bad": sum(not each.whole for each in rest[len(longs) :]),
        "status": status,
        "exit_s": round(exit_s, 3),
        "errors": len(errors),
    }


def _tokens(seconds: float) -> int:
    return max(1, round(seconds / INTERVAL_S))
