"""`hetlb engine`: runs an emulated vLLM server until it is told to stop.

One line on stdout once it accepts requests; Ctrl-C or SIGTERM ends it at once with status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from pathlib import Path

import uvloop

from hetlb.cli.signals import stop_event
from hetlb.config.profile_file import load_profile
from hetlb.core.latency import IterationRule
from hetlb.emulator import EmulatedEngine
from hetlb.emulator.kv_transfer import KvSettings

#: Engines of one server: far more than a machine has.
MOST_ENGINES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb engine`."""
    parser.add_argument(
        "--profile", type=Path, required=True, metavar="P.yaml", help="latency profile that times the engine"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument(
        "--port", type=_port, default=8000, help="port to listen on (default 8000; 0 picks a free one)"
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names of the model in the API (default: model.name of the profile)",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="longest prompt + output (default: engine.max_model_len of the profile, else the KV tokens)",
    )
    parser.add_argument(
        "--data-parallel-size",
        type=_count,
        default=1,
        metavar="N",
        help="engines of the profile behind this port, as vllm serve --data-parallel-size N (default 1)",
    )
    parser.add_argument(
        "--time-scale",
        type=_positive,
        default=1.0,
        metavar="X",
        help="factor on every duration: 0.1 is ten times faster (default 1)",
    )
    parser.add_argument(
        "--enable-prefix-caching",
        action="store_true",
        help="share KV blocks between prompts with a common prefix (default: off)",
    )
    _add_kv_arguments(parser)
    parser.add_argument(
        "--iteration",
        choices=[rule.value for rule in IterationRule],
        default=IterationRule.TOKEN.value,
        help="time of a mixed iteration: weights read once (token, default), or both summed (sum)",
    )


def _add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of KV transfer."""
    parser.add_argument(
        "--kv-transfer",
        choices=("nixl", "nixl-push", "mooncake", "shared-storage"),
        help="transfer KV blocks as this connector of vLLM does (default: none)",
    )
    parser.add_argument(
        "--kv-bandwidth",
        type=_positive,
        default=5e9,
        metavar="B",
        help="bytes per second of a fetch (default 5e9)",
    )
    parser.add_argument(
        "--kv-folder",
        type=Path,
        metavar="DIR",
        help="folder of the blocks (--kv-transfer shared-storage)",
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


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_ENGINES:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a number from 1 to {MOST_ENGINES}, got {text!r}")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value > 0:
        return value
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
