"""Real stages against their own simulation, and paths chosen per request against fixed pipelines.

    python bench/stages/run.py --scheduler hetlb [--seconds 20] [--out FILE]

Four `hetlb stage` processes hold overlapping layers of a 12-layer model (a 0:7, b 0:6, c 5:12, d 6:12); b, d
take 2.5 times as long for a layer (`--layer-times`: far above what the small model needs, so that a busy
machine changes little). `hetlb serve` is in front; a client keeps a fixed number of streams open. The
simulation gets the profiles that the same workers measured of themselves at start (from the event log) and
the same load. Needs .venv-vllm (torch, transformers; `make test-vllm` makes it).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "vllm"))

import stages as real  # noqa: E402

from hetlb.balancer.core.length_samples import LengthDistribution, SamplePredictor  # noqa: E402
from hetlb.tools.paths.path_scheduler import PathScheduler, dispatches  # noqa: E402
from hetlb.tools.paths.stages import StageNetwork  # noqa: E402
from hetlb.tools.sim.pipelines import FEED_DELAY_S, OfflineLoad, PipelineSimulation  # noqa: E402

WARM_UP_S = 10.0
SEED = 7


def lengths() -> Iterator[tuple[int, int]]:
    """Prompt and output tokens of each request, the same for the client and the simulation."""
    rng = random.Random(SEED)
    while True:
        yield rng.randint(8, 64), rng.randint(20, 60)


async def load(url: str, concurrency: int, seconds: float) -> dict[str, Any]:
    """Keep `concurrency` streams open; tokens that came in the measured window."""
    asked, rng = lengths(), random.Random(SEED)
    begin = time.monotonic() + WARM_UP_S
    end = begin + seconds
    tokens = 0
    waits: list[float] = []

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def stream(delay_s: float) -> None:
            nonlocal tokens
            await asyncio.sleep(delay_s)
            while time.monotonic() < end:
                prompt, output = next(asked)
                body = {
                    "model": "m", "prompt": [rng.randrange(4, 2048) for _ in range(prompt)], "stream": True,
                    "max_tokens": output, "temperature": 0, "ignore_eos": True,
                }  # fmt: skip
                last = time.monotonic()
                async with http.post(f"{url}/v1/completions", json=body) as reply:
                    reply.raise_for_status()
                    async for line in reply.content:
                        if line.startswith(b"data: {"):
                            now = time.monotonic()
                            if begin <= now < end:
                                tokens += 1
                                waits.append(now - last)
                            last = now
                await asyncio.sleep(FEED_DELAY_S)

        streams = [asyncio.create_task(stream(i * FEED_DELAY_S)) for i in range(concurrency)]
        await asyncio.sleep(end - time.monotonic())
        for each in streams:
            each.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    waits.sort()
    return {"decode_tokens_per_s": tokens / seconds, "median_gap_s": waits[len(waits) // 2]}


def simulate(network: StageNetwork, scheduler: str, concurrency: int, seconds: float) -> dict[str, Any]:
    """The same load on the same profiles in virtual time."""
    outputs = LengthDistribution(output for _, output in itertools.islice(lengths(), 1000))
    paths = PathScheduler(network, SamplePredictor(outputs, capped=True), policy=scheduler)
    run = PipelineSimulation(network, paths, lengths(), frames=True)
    result = run.run_offline(
        OfflineLoad(initial=concurrency, constant=True), warm_up_s=WARM_UP_S, measured_s=seconds
    )
    return {"decode_tokens_per_s": result.decode_tokens_per_s, "busy": result.busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scheduler", default="hetlb")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, help="a JSON file; results of other schedulers in it are kept")
    args = parser.parse_args()
    models = real.make_models()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        kinds = {"a": "fast", "b": "slow", "c": "fast", "d": "slow"}
        times = {kind: str(real.write_times(where / f"{kind}.csv", kind)) for kind in ("fast", "slow")}
        flags = {name: ("--layer-times", times[kind]) for name, kind in kinds.items()}
        with real.rig(models / "llama", where, scheduler=args.scheduler, flags=flags, apart=True) as rig:
            measured = asyncio.run(load(rig.url, args.concurrency, args.seconds))
            rig.wait_idle()
            with rig.events.open() as lines:
                paths = [(network, hops) for _, network, hops in dispatches(lines)]
    network = paths[-1][0]
    used: dict[str, int] = {}
    for _, hops in paths:
        name = "-".join(hop.stage for hop in hops)
        used[name] = used.get(name, 0) + 1
    simulated = simulate(network, args.scheduler, args.concurrency, args.seconds)
    result = {
        "concurrency": args.concurrency,
        "seconds": args.seconds,
        "measured": measured,
        "simulated": simulated,
        "ratio": measured["decode_tokens_per_s"] / simulated["decode_tokens_per_s"],
        "paths": used,
        "profiles": {
            stage.name: {
                "layers": [stage.first, stage.end],
                "prompt_ms": curve(stage.prompt),
                "decode_ms": curve(stage.decode),
            }
            for stage in network.stages
        },
    }
    print(json.dumps({args.scheduler: result}, indent=1))
    if args.out is not None:
        kept = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(json.dumps({**kept, args.scheduler: result}, indent=1) + "\n")


def curve(values: Any) -> list[list[float]]:
    return [[x, round(1000 * y, 3)] for x, y in zip(values.xs, values.ys, strict=True)]


if __name__ == "__main__":
    main()
