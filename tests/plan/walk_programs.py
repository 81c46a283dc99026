"""Programs that stand for a plan's commands in a walk: `vllm serve` and `hetlb stage`.

`vllm` is the emulated engine with the flags that were printed, `hetlb stage` a worker of the toy model; all
other commands of `hetlb` are its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path


def vllm() -> None:
    """`vllm serve MODEL ...`, every flag of which has to be one that plans print."""
    parser = argparse.ArgumentParser(prog="vllm serve", allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--port", required=True)
    parser.add_argument("--max-model-len")
    parser.add_argument("--kv-transfer-config", type=json.loads)
    for flag in (
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "data-parallel-size",
        "max-num-seqs",
        "max-num-batched-tokens",
    ):
        parser.add_argument(f"--{flag}", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    assert sys.argv[1] == "serve"
    args = parser.parse_args(sys.argv[2:])
    words = ["--profile", os.environ["WALK_PROFILE"], "--port", args.port, "--time-scale", "0.01"]
    words += ["--served-model-name", args.model]
    if args.max_model_len not in (None, "auto"):
        words += ["--max-model-len", args.max_model_len]
    if args.kv_transfer_config:
        assert args.kv_transfer_config["kv_connector"] == "NixlConnector"
        words += ["--kv-transfer", "nixl"]
    os.execv(sys.executable, [sys.executable, "-m", "hetlb", "engine", *words])


def hetlb() -> None:
    """A worker of `hetlb stage` with the toy model, anything else with hetlb."""
    if sys.argv[1] != "stage" or "--coordinate" in sys.argv:
        os.execv(sys.executable, [sys.executable, "-m", "hetlb", *sys.argv[1:]])
    from stage.toy import make_worker

    from hetlb.cli.main import build_parser
    from hetlb.tools.stage.stage_channel import read_key

    args = build_parser("stage").parse_args(sys.argv[1:])
    first, end = map(int, args.layers.split(":"))

    async def serve() -> None:
        worker, _, _ = make_worker(args.model, first, end, key=read_key(args.key_file))
        await worker.start(args.host, args.port)
        print("ready", flush=True)
        await worker.run()

    asyncio.run(serve())


def install(folder: Path) -> None:
    """Write both as programs into a folder of the PATH."""
    folder.mkdir()
    for name in ("vllm", "hetlb"):
        program = folder / name
        program.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path[:0] = {[str(Path(__file__).parents[1])]!r}\n"
            f"from plan.walk_programs import {name}\n{name}()\n"
        )
        program.chmod(0o755)
