"""`hetlb engine`: runs an emulated vLLM server until it is told to stop.

One line on stdout once it accepts requests; Ctrl-C or SIGTERM ends it at once with status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import uvloop

from hetlb.cli.flags import FINITE, PORT, declare, whole
from hetlb.cli.signals import stop_event
from hetlb.config.profile_file import load_profile
from hetlb.core.latency import IterationRule
from hetlb.emulator import EmulatedEngine
from hetlb.emulator.kv_transfer import KvSettings

#: Engines of one server: far more than a machine has.
MOST_ENGINES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb engine`."""
    add = declare(parser)
    add("--profile", "latency profile that times the engine", "P.yaml", Path, required=True)
    add("--host", "address to listen on (default 127.0.0.1)", default="127.0.0.1")
    add("--port", "port to listen on (default 8000; 0 picks a free one)", "PORT", PORT, 8000)
    names = "names of the model in the API (default: model.name of the profile)"
    add("--served-model-name", names, "NAME", default=[], nargs="+", action="extend")
    longest = "longest prompt + output (default: engine.max_model_len of the profile, else the KV tokens)"
    add("--max-model-len", longest, "TOKENS", int)
    engines = "engines of the profile behind this port, as vllm serve --data-parallel-size N (default 1)"
    add("--data-parallel-size", engines, "N", whole(1, MOST_ENGINES, "a number"), 1)
    add("--time-scale", "factor on every duration: 0.1 is ten times faster (default 1)", "X", FINITE, 1.0)
    prefixes = "share KV blocks between prompts with a common prefix (default: off)"
    add("--enable-prefix-caching", prefixes, action="store_true")
    transfer = "transfer KV blocks as this connector of vLLM does (default: none)"
    add("--kv-transfer", transfer, choices=("nixl", "nixl-push", "mooncake", "shared-storage"))
    add("--kv-bandwidth", "bytes per second of a fetch (default 5e9)", "B", FINITE, 5e9)
    add("--kv-folder", "folder of the blocks (--kv-transfer shared-storage)", "DIR", Path)
    rule = "time of a mixed iteration: weights read once (token, default), or both summed (sum)"
    add(
        "--iteration", rule, default=IterationRule.TOKEN.value, choices=[each.value for each in IterationRule]
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    engine = EmulatedEngine(
        load_profile(args.profile),
        args.host,
        args.port,
        served_model_names=args.served_model_name,
        max_model_len=args.max_model_len,
        time_scale=args.time_scale,
        iteration=IterationRule(args.iteration),
        data_parallel_size=args.data_parallel_size,
        where=str(args.profile),
        kv=None
        if args.kv_transfer is None
        else KvSettings(args.kv_transfer, bandwidth_bytes_per_s=args.kv_bandwidth, folder=args.kv_folder),
        prefix_caching=args.enable_prefix_caching,
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(engine))
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"hetlb engine: cannot listen on {args.host}:{args.port}: {reason}", file=sys.stderr)
        return 1
    return 0


async def _serve(engine: EmulatedEngine) -> None:
    stop = stop_event()
    async with engine:
        print(f"hetlb engine ready on {engine.url}", flush=True)
        await stop.wait()
