"""`hetlb engine`: runs an emulated vLLM server until it is told to stop."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetlb.balancer.config.profile_file import load_profile
from hetlb.cli.flags import COUNT, FINITE, PORT, declare, whole
from hetlb.cli.signals import run_listener, stop_event
from hetlb.tools.emulator import EmulatedEngine
from hetlb.tools.emulator.kv_transfer import KvSettings

#: Engines of one server: far more than a machine has.
MOST_ENGINES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    add("--profile", "latency profile that times the engine", "P.yaml", Path, required=True)
    add("--host", "address to listen on (default 127.0.0.1)", default="127.0.0.1")
    add("--port", "port to listen on (default 8000; 0 picks a free one)", "PORT", PORT, 8000)
    names = "names of the model in the API (default: model.name of the profile)"
    add("--served-model-name", names, "NAME", default=[], nargs="+", action="extend")
    longest = "longest prompt + output (default: engine.max_model_len of the profile, else the KV tokens)"
    add("--max-model-len", longest, "TOKENS", COUNT)
    engines = "engines of the profile behind this port, as vllm serve --data-parallel-size N (default 1)"
    add("--data-parallel-size", engines, "N", whole(1, MOST_ENGINES), 1)
    add("--time-scale", "factor on every duration: 0.1 is ten times faster (default 1)", "X", FINITE, 1.0)
    prefixes = "share KV blocks between prompts with a common prefix (default: off)"
    add("--enable-prefix-caching", prefixes, action="store_true")
    transfer = "transfer KV blocks as this connector of vLLM does (default: none)"
    add("--kv-transfer", transfer, choices=("nixl", "nixl-push", "mooncake"))
    sleep = "with /sleep and /wake_up, as a server in development mode; each takes so long (default: without)"
    add("--wake-s", sleep, "SECONDS", FINITE)


def run(args: argparse.Namespace) -> int:
    engine = EmulatedEngine(
        load_profile(args.profile),
        args.host,
        args.port,
        served_model_names=args.served_model_name,
        max_model_len=args.max_model_len,
        time_scale=args.time_scale,
        data_parallel_size=args.data_parallel_size,
        where=str(args.profile),
        kv=_kv_settings(args),
        prefix_caching=args.enable_prefix_caching,
        wake_s=args.wake_s,
    )
    run_listener(_serve(engine), args.host, args.port)
    return 0


def _kv_settings(args: argparse.Namespace) -> KvSettings | None:
    """Return the KV connector of the flags, None without one. Prompts that it cannot fetch are computed."""
    if not args.kv_transfer:
        return None
    return KvSettings(args.kv_transfer, policy="recompute")


async def _serve(engine: EmulatedEngine) -> None:
    stop = stop_event()
    async with engine:
        print(f"hetlb engine ready on {engine.url}", flush=True)
        await stop.wait()
