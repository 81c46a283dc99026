"""`hetlb stage`: a worker that holds some layers of a model, or the coordinator in front of such workers."""

from __future__ import annotations

import argparse
import logging
import os
import re
import ssl
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetlb.addresses import is_loopback
from hetlb.cli.flags import COUNT, PORT, declare
from hetlb.cli.signals import run_listener, stop_event
from hetlb.errors import ConfigError, InputError, visible
from hetlb.files import read_text, readable_name
from hetlb.inputs.urls import bracketed

if TYPE_CHECKING:
    from hetlb.tools.stage.checkpoint import ModelConfig
    from hetlb.tools.stage.runner import Runner
    from hetlb.tools.stage.stages_file import StageGroup
    from hetlb.tools.stage.torch_runner import TorchRunner
    from hetlb.tools.stage.worker import StageWorker

#: KV cache on CPU by default.
_CPU_KV_BYTES = 1 << 30
#: Share of a GPU's memory for weights and KV cache there.
_GPU_SHARE = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hetlb stage`, under vLLM's names if vLLM has them."""
    add = declare(parser)
    add("--coordinate", "be the OpenAI server in front of the workers of this file", "FILE", Path)
    add("--check", "with --coordinate: validate the file and exit", action="store_true")
    add("--event-log", "with --coordinate: record every network and path", "FILE", Path)
    add("--model", "folder with config.json and safetensors", "FOLDER", Path)
    add("--layers", "layers A to B-1, counted from 0", "A:B")
    add("--host", "address to listen on (default 127.0.0.1)", default="127.0.0.1")
    add("--port", "port to listen on (default 9100; 0 picks a free one)", "PORT", PORT, 9100)
    kinds = ("auto", "bfloat16", "float16", "float32")
    dtype = "type of weights, KV cache and activations (auto: as in config.json)"
    add("--dtype", dtype, default="auto", choices=kinds)
    add(
        "--kv-cache-memory-bytes",
        "bytes of the KV cache (default 1 GiB on CPU, 0.9 of a GPU less weights)",
        "BYTES",
        COUNT,
    )
    add("--block-size", "tokens of a KV block (default 16)", "TOKENS", COUNT, 16)
    add("--max-num-batched-tokens", "most tokens of a batch (default 2048)", "N", COUNT, 2048)
    add("--max-num-seqs", "most requests of a batch (default 256)", "N", COUNT, 256)
    key = "file of the workers' shared key, or with --coordinate of the clients' key; needed beyond loopback"
    add("--key-file", key, "FILE", Path)
    add("--ssl-certfile", "certificate; turns plain connections off", "FILE", Path)
    add("--ssl-keyfile", "key of the certificate", "FILE", Path)
    add("--ssl-ca-certs", "authorities of the other stages' certificates", "FILE", Path)
    times = "least times of batches on one GPU, to rehearse it (layer_times of PLACE.yaml)"
    add("--layer-times", times, "CSV", Path)


def run(args: argparse.Namespace) -> int:
    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        raise InputError("--ssl-keyfile: expected it together with --ssl-certfile")
    if args.coordinate is not None:
        return _coordinate(args)
    first, end = _check(args)
    worker = _make_worker(args, first, end)
    status = run_listener(_serve(worker, args), args.host, args.port)
    if worker.hung:
        if status:
            print("hetlb stage: a batch did not end in time", file=sys.stderr, flush=True)
        os._exit(status)  # its thread would keep the process
    return status


def _check(args: argparse.Namespace) -> tuple[int, int]:
    """Validate the flags of a worker and return its layers."""
    if args.model is None or args.layers is None:
        raise InputError("expected --model FOLDER and --layers A:B, or --coordinate FILE")
    for flag in ("check", "event_log"):
        if getattr(args, flag):
            raise InputError(f"--{flag.replace('_', '-')}: expected --coordinate with it")
    found = re.fullmatch(r"(\d{1,5}):(\d{1,5})", args.layers, re.ASCII)
    if found is None or int(found[1]) >= int(found[2]):
        raise InputError(f"--layers: expected A:B with A below B, got {args.layers!r}")
    if args.key_file is None and not is_loopback(args.host):
        raise InputError(f"--key-file: expected a shared key to listen on {args.host}, got none")
    return int(found[1]), int(found[2])


def _make_worker(args: argparse.Namespace, first: int, end: int) -> StageWorker:
    """Load the layers, make the KV cache, measure. Raises `InputError`."""
    import torch

    from hetlb.tools.stage.batching import StageBlocks
    from hetlb.tools.stage.checkpoint import load_config
    from hetlb.tools.stage.runner import measure
    from hetlb.tools.stage.stage_channel import read_key
    from hetlb.tools.stage.stage_messages import Welcome
    from hetlb.tools.stage.torch_runner import DTYPES, TorchRunner
    from hetlb.tools.stage.worker import StageWorker

    key, server_tls, peer_tls = read_key(args.key_file), *_tls(args)
    config = load_config(args.model)
    if end > config.layers:
        raise InputError(
            f"--layers: expected layers of 0:{config.layers} ({args.model}), got {args.layers!r}"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.dtype if args.dtype == "auto" else args.dtype
    if dtype not in DTYPES:
        raise InputError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r} from {args.model}")
    loaded = TorchRunner(
        args.model, config, first, end, dtype=dtype, device=device, block_size=args.block_size
    )
    pool = StageBlocks(_kv_blocks(args, config, loaded, device), args.block_size)
    loaded.allocate(pool.blocks)
    runner: Runner = _paced(args, loaded)
    prompts, decodes = measure(
        runner,
        pool,
        first,
        end,
        layers=config.layers,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_positions=config.max_positions,
    )
    welcome = Welcome(
        model=config.fingerprint,
        dtype=dtype,
        first=first,
        end=end,
        kv_token_layers=pool.token_layers,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prompt_times=prompts,
        decode_times=decodes,
    )
    return StageWorker(runner, pool, welcome, key=key, server_tls=server_tls, peer_tls=peer_tls)


def _kv_blocks(args: argparse.Namespace, config: ModelConfig, loaded: TorchRunner, device: str) -> int:
    """Return the blocks of one layer each that fit into the memory for the KV cache."""
    size = args.kv_cache_memory_bytes
    if size is None:
        size = loaded.free_bytes(_GPU_SHARE) if device != "cpu" else _CPU_KV_BYTES
    blocks = int(size // (config.kv_bytes(loaded.itemsize) * args.block_size))
    if blocks < 1:
        raise InputError(
            f"--kv-cache-memory-bytes: expected memory for {args.block_size} tokens of a layer, got {size}"
        )
    return blocks


def _paced(args: argparse.Namespace, loaded: Runner) -> Runner:
    if args.layer_times is None:
        return loaded
    from hetlb.tools.plan.placement.place_files import read_layer_times
    from hetlb.tools.stage.runner import PacedRunner

    kinds = read_layer_times(args.layer_times)
    if len(kinds) > 1:
        raise InputError(f"--layer-times: expected rows of one gpu_type, got {', '.join(kinds)}")
    return PacedRunner(loaded, *next(iter(kinds.values())))


def _tls(args: argparse.Namespace) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Return the TLS contexts of this listener and of connections to other stages."""
    try:
        server = None
        if args.ssl_certfile is not None:
            server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            # One file may hold both.
            private = args.ssl_keyfile or args.ssl_certfile
            with readable_name(args.ssl_certfile) as chain, readable_name(private) as key:
                server.load_cert_chain(chain, key)
        peer = None
        if args.ssl_ca_certs is not None:
            with readable_name(args.ssl_ca_certs) as name:
                peer = ssl.create_default_context(cafile=name)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"--ssl-certfile, --ssl-keyfile, --ssl-ca-certs: expected PEM files: {error}"
        ) from error
    return server, peer


def _coordinate(args: argparse.Namespace) -> int:
    """Serve the model that the workers of a file hold. Raises `InputError`."""
    from hetlb.tools.stage.stages_file import check_filled_in, load_stages

    for flag in ("model", "layers"):
        if getattr(args, flag) is not None:
            raise InputError(f"--{flag}: expected --coordinate FILE or a worker's flags, got both")
    group = load_stages(args.coordinate)
    check_filled_in(group)
    if args.key_file is None and not is_loopback(args.host):
        raise InputError(f"--key-file: expected the key of clients to listen on {args.host}, got none")
    api_key = "" if args.key_file is None else _secret(args.key_file)
    if args.check:
        print(visible(f"{group.path} is valid: {len(group.workers)} workers (not contacted)"))
        return 0
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    return run_listener(_serve_coordinator(group, api_key, args), args.host, args.port)


def _secret(path: Path) -> str:
    """Return the text of a file without white space around it. Raises `ConfigError`."""
    text = read_text(path, ConfigError).strip()
    if not text or not text.isascii():
        raise ConfigError(f"{path}: expected a key of ASCII characters")
    return text


async def _serve_coordinator(group: StageGroup, api_key: str, args: argparse.Namespace) -> int:
    from hetlb.tools.stage.openai_api import Coordination
    from hetlb.tools.stage.stages_file import load_stages

    server_tls, _ = _tls(args)
    made = Coordination(group, load_stages, event_log=args.event_log, api_key=api_key, tls=server_tls)
    await made.run(args.host, args.port, stop_event(), lambda port: _say_ready("coordinator", args, port))
    return 0


def _say_ready(what: str, args: argparse.Namespace, port: int) -> None:
    scheme = "http" if args.ssl_certfile is None else "https"
    print(visible(f"hetlb {what} ready on {scheme}://{bracketed(args.host)}:{port}"), flush=True)


async def _serve(worker: StageWorker, args: argparse.Namespace) -> int:
    from hetlb.tools.stage.worker import serve

    stop = stop_event()

    ready = partial(_say_ready, "stage", args)
    return 0 if await serve(worker, args.host, args.port, stop, ready) else 1
