"""A real vLLM whose engine core stands still for 20 s: requests lost, and when its share is back.

    python bench/faults/real_stop.py

Two vLLM servers on CPU (tests/vllm/pair.py), `hetlb serve` with their profiles, 5 requests/s. SIGSTOP and
SIGCONT go to the engine core of the fast one alone: its HTTP server lives. Needs `.venv-vllm`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import pair as real

RATE, STOP_S = 5.0, 20.0


def cores_of(pid: int) -> list[int]:
    """Return the children of a server: its engine core among them."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


async def ask(http: httpx.AsyncClient, url: str, number: int) -> tuple[float, str, bool]:
    """Send one stream; return its begin, its instance and whether it ended well."""
    prompt = random.Random(number).choices(range(1000, 2000), k=24)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 32, "ignore_eos": True, "stream": True}
    began = time.monotonic()
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body, timeout=20.0) as answer:
            text = (await answer.aread()).decode()
            well = answer.status_code == 200 and text.rstrip().endswith("[DONE]") and '"error"' not in text
            return began, answer.headers.get("x-hetlb-instance", ""), well
    except httpx.HTTPError:
        return began, "", False


async def run(proxy: real.Proxy, cores: list[int]) -> None:
    """Load for 15 s, stop the core, let it go on, load for a minute more."""
    rng = random.Random(1)
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=500)) as http:
        tasks: list[asyncio.Task[Any]] = []
        begun, stopped, went_on, named = time.monotonic(), 0.0, 0.0, 0.0
        while (passed := time.monotonic() - begun) < 15.0 + STOP_S + 45.0:
            tasks.append(asyncio.create_task(ask(http, proxy.url, len(tasks))))
            if passed > 15.0 and not stopped:
                stopped = time.monotonic()
                for pid in cores:
                    os.kill(pid, signal.SIGSTOP)
            if stopped and not named:
                status = await proxy.admin_json("GET", "/v1/status")
                if any(each["cause"] == "stalled" for each in status["causes"]):
                    named = time.monotonic() - stopped
            if stopped and not went_on and time.monotonic() - stopped > STOP_S:
                went_on = time.monotonic()
                for pid in cores:
                    os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(rng.expovariate(RATE))
        answers = await asyncio.gather(*tasks)

    def share(since: float, until: float) -> float:
        part = [each for each in answers if since <= each[0] < until]
        return round(sum("fast" in each[1] for each in part) / max(1, len(part)), 2)

    during = [each for each in answers if stopped <= each[0] < went_on]
    result = {
        "requests": len(answers),
        "lost": sum(not each[2] for each in answers),
        "requests_while_stopped": len(during),
        "lost_while_stopped": sum(not each[2] for each in during),
        "named_after_s": round(named, 1),
        "share_before": share(begun, stopped),
        "share_0_to_15_s_after": share(went_on, went_on + 15.0),
        "share_15_to_45_s_after": share(went_on + 15.0, went_on + 60.0),
    }
    print(json.dumps(result, indent=1))


def main() -> None:
    """Start the pair and hetlb, and run."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder, real.pair(Path(folder)) as servers:
        fast = next(each for each in servers if each.name == real.FAST)
        with real.proxy(servers, Path(folder) / "hetlb") as proxy:
            asyncio.run(run(proxy, cores_of(fast.process.pid)))


if __name__ == "__main__":
    main()
