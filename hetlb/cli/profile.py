"""`hetlb profile`: creates latency profiles, shows, compares and lists them."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from hetlb.balancer.config.profile_file import Profile, load_profile
from hetlb.balancer.config.profile_writer import with_host, write_profile
from hetlb.balancer.config.urls import check_url
from hetlb.balancer.core.latency import LatencyModel
from hetlb.cli import profile_live
from hetlb.cli.flags import COUNT, FINITE, add_json, changed, declare, print_document, real, secret
from hetlb.cli.profile_corrected import write_corrected
from hetlb.errors import InputError
from hetlb.tools.models.degrees import refusal
from hetlb.tools.models.facts import stated_facts
from hetlb.tools.models.model_file import load_facts
from hetlb.tools.profiler import shown
from hetlb.tools.profiler.aiconfigurator import Layout, query
from hetlb.tools.profiler.client import EngineClient
from hetlb.tools.profiler.fit import PrefillForm
from hetlb.tools.profiler.plot import write_plot
from hetlb.tools.profiler.probe import probe_host
from hetlb.tools.profiler.sources import (
    Measurements,
    Roofline,
    assumed_launch,
    profile_of,
    read_csv,
)

_SOURCES = "csv:FILE, log:FILE, aiconfigurator or roofline"
#: Upper bound of tokens per decode step with speculative decoding.
_MOST_TOKENS_PER_STEP = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hetlb profile`, and its verbs `show`, `compare` and `list`."""
    parser.usage = (
        "hetlb profile --url URL --out P.yaml [flags]\n"
        "       hetlb profile --from csv:FILE|aiconfigurator|roofline --out P.yaml [flags]\n"
        "       hetlb profile --from log:FILE --start P.yaml --out P.yaml [flags]\n"
        "       hetlb profile show P.yaml | compare A.yaml B.yaml | list FOLDER"
    )
    add = declare(parser)
    add("verb", "action on existing profiles", nargs="?", choices=("show", "compare", "list"))
    add("files", "files to show or compare, folder to list", "P.yaml", Path, nargs="*")
    add("--from", _SOURCES, "SOURCE", dest="source")
    add("--out", "profile to write", "P.yaml", Path)
    add("--name", "name of the profile (default: system, model and degree)")
    add("--system", "GPU; selects the rows of a CSV")
    add("--model", "model; selects the rows of a CSV, or one of several served")
    add("--tp", "tensor-parallel degree (aiconfigurator: several, 1,2,4,8)", "N")
    add("--form", "form of prefill (default: the least held-out error)", choices=tuple(PrefillForm))
    add("--plot", "picture of measured and fitted times", "P.png", Path)
    add("--licence", "licence of the data")
    add("--kv-cache-tokens", "tokens that the KV cache holds", "N", COUNT)
    add("--max-num-seqs", "most sequences of a batch", "N", COUNT)
    add("--kv-bytes-per-token", "KV cache per token, over all GPUs", "N", COUNT)
    add("--memory-bytes", "memory of one GPU", "N", COUNT)
    add("--block-size", "tokens of a KV block", "N", COUNT)
    add("--tile", "tokens of a tile of dense kernels (default: what the points show, else 128)", "N", COUNT)
    drafts = "tokens of a decode step with speculative decoding (default: by the server's metrics, else 1)"
    span = real(f"a number from 1 to {_MOST_TOKENS_PER_STEP}", lambda x: 1 <= x <= _MOST_TOKENS_PER_STEP)
    add("--tokens-per-step", drafts, "X", span)
    scheduling = "asynchronous scheduling (default: as vLLM of that version)"
    add("--async-scheduling", scheduling, action=argparse.BooleanOptionalAction)
    profile_live.add_arguments(parser)
    add = declare(parser.add_argument_group("from a log"))
    add("--start", "profile to correct", "P.yaml", Path)
    _add_estimates(parser)
    add_json(parser)


def _add_estimates(parser: argparse.ArgumentParser) -> None:
    add = declare(parser.add_argument_group("roofline (marked unmeasured)"))
    add("--peak-flops", "FLOP/s of one GPU at this precision", "F", FINITE)
    add("--bandwidth", "memory bytes/s of one GPU", "B", FINITE)
    add("--parameters", "parameters of the model", "P", FINITE)
    config = "config.json of the model, in place of its parameters and cache; with csv for launch times"
    add("--model-config", config, "F", Path)
    add = declare(parser.add_argument_group("without a server"))
    host = "host time of every iteration; 0 where the points hold it (default: roofline 2, else assumed)"
    add("--probe", "idle server whose host time is measured for points that hold none (10 s)", "URL")
    add("--overhead-ms", host, "MS", real("milliseconds from 0", lambda value: 0 <= value < math.inf))
    ranks = "data-parallel ranks of a server; the profile is of one (aiconfigurator)"
    add("--data-parallel", ranks, "N", COUNT, 1)
    add("--expert-parallel", "whole experts on each GPU (aiconfigurator)", action="store_true")
    add("--scale", "factor on all times (aiconfigurator)", "X", FINITE, 1.0)


def run(args: argparse.Namespace) -> int:
    if args.verb is not None:
        return _about_files(args)
    if (args.source is None) == (args.url is None) or args.out is None:
        raise InputError("expected one of --url and --from with --out P.yaml, or show or compare")
    if (args.data_parallel > 1 or args.expert_parallel) and args.source != "aiconfigurator":
        raise InputError("--data-parallel, --expert-parallel: expected --from aiconfigurator")
    if args.probe is not None and (args.source or "log:").partition(":")[0] not in ("csv", "aiconfigurator"):
        raise InputError(
            "--probe: expected --from csv:FILE or aiconfigurator, whose points hold no host time"
        )
    degrees = _degrees(args)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)  # before the measurement
    except OSError as error:
        where = f"{error.filename}: {error.strerror}"
        raise InputError(f"--out: expected a folder that can be written: {where}") from error
    kind, _, file = (args.source or "").partition(":")
    if kind == "log" and file:
        return write_corrected(args, Path(file))
    if args.url is not None:
        found, samples = profile_live.measure(args, degrees[0])
        written = [_finish(args, args.out, found)]
        samples.remove()
    elif kind == "csv" and file:
        rows = {"system": args.system, "model": args.model, "tp": degrees[0], "licence": args.licence}
        points = read_csv(Path(file), **rows)
        if args.model_config is not None:
            points = replace(points, launch=assumed_launch(load_facts(args.model_config, args.model)))
        written = [_finish(args, args.out, points)]
    elif args.source == "roofline":
        written = [_finish(args, args.out, _from_roofline(args, degrees[0] or 1))]
    elif args.source == "aiconfigurator":
        several = len(degrees) > 1
        outs = [args.out.with_stem(f"{args.out.stem}-tp{n}") if several else args.out for n in degrees]
        pairs = zip(outs, degrees, strict=True)
        written = [_finish(args, out, _from_aiconfigurator(args, degree or 1)) for out, degree in pairs]
    else:
        raise InputError(f"--from: expected {_SOURCES}, got {args.source!r}")
    return print_document(args, written[0] if len(written) == 1 else written, lambda: None)


def _about_files(args: argparse.Namespace) -> int:
    needed = {"show": 1, "compare": 2}.get(args.verb, len(args.files) or 1)
    if len(args.files) != needed or args.source or args.url or args.out:
        what = "folders or profile files" if args.verb == "list" else f"{needed} profile file(s)"
        raise InputError(f"{args.verb}: expected {what} and no --url, --from or --out")
    if args.verb == "list":
        rows = shown.listing(args.files)
        return print_document(args, {"profiles": rows}, lambda: Console().print(shown.listing_table(rows)))
    profiles = [load_profile(path) for path in args.files]
    if args.verb == "show":
        document = msgspec.to_builtins(profiles[0])
        return print_document(args, document, lambda: shown.print_profile(profiles[0]))
    for difference in shown.differences(*profiles):
        print(f"warning: different {difference}", file=sys.stderr)
    compared = shown.comparison(*profiles)
    return print_document(args, compared, lambda: shown.print_comparison(compared))


def _degrees(args: argparse.Namespace) -> list[int | None]:
    """Degrees of `--tp`; several only with aiconfigurator. Raises `InputError`."""
    if args.tp is None:
        return [None]
    parts = args.tp.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InputError(f"--tp: expected a whole number from 1, got {args.tp!r}")
    if len(parts) > 1 and args.source != "aiconfigurator":
        raise InputError(f"--tp: expected one degree, got {args.tp} (several: --from aiconfigurator)")
    return [int(part) for part in parts]


def _finish(args: argparse.Namespace, out: Path, source: Measurements) -> dict[str, Any]:
    """Fit, plot, write and report one profile; returns its entry for `--json`."""
    found = _with_flags(args, source)
    if args.probe is not None and found.host is not None:
        raise InputError("--probe: expected points without host time (csv, aiconfigurator)")
    profile, result = profile_of(
        found,
        name=args.name,
        form=None if args.form is None else PrefillForm(args.form),
        tile=args.tile,
        iteration_s=None if args.overhead_ms is None else args.overhead_ms / 1e3,
    )
    if args.probe is not None:
        profile = _probed(args, profile)
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.plot is not None:
        plot = args.plot if out == args.out else args.plot.with_stem(out.stem)
        write_plot(plot, profile.name, found.points, result, profile.engine.max_num_batched_tokens)
    write_profile(out, profile)
    if not args.json:
        console = Console()
        console.print(shown.errors_table(profile))
        for line in profile.assumed:
            console.print(f"assumed {line}", markup=False, highlight=False)
        console.print(f"written to {out}", highlight=False)
    return {"out": str(out), "profile": msgspec.to_builtins(profile), "warnings": list(result.warnings)}


def _probed(args: argparse.Namespace, profile: Profile) -> Profile:
    """Return a profile with the host time of the server of `--probe`."""
    url = check_url(args.probe, "--probe")
    key = args.api_key_env and secret("--api-key-env", args.api_key_env)

    async def probe() -> LatencyModel:
        async with EngineClient(url, key) as client:
            return await probe_host(client, await client.facts(None), profile.latency, random.Random())

    return with_host(profile, asyncio.run(probe()))


def _with_flags(args: argparse.Namespace, found: Measurements) -> Measurements:
    """Override what a source knows with flags."""
    hardware, model = found.hardware, found.model
    if hardware is not None:
        hardware = changed(hardware, memory_bytes=args.memory_bytes)
    if model is not None:
        model = changed(model, kv_bytes_per_token=args.kv_bytes_per_token)
    flags = (
        *("kv_cache_tokens", "max_num_seqs", "max_num_batched_tokens", "block_size", "tokens_per_step"),
        "async_scheduling",
    )
    engine = changed(found.engine, **{flag: getattr(args, flag) for flag in flags})
    return replace(found, engine=engine, hardware=hardware, model=model)


def _from_aiconfigurator(args: argparse.Namespace, degree: int) -> Measurements:
    for flag in ("system", "model"):
        if getattr(args, flag) is None:
            raise InputError(f"--{flag}: expected a name with --from aiconfigurator, got none")
    layout = Layout(degree, args.data_parallel, args.expert_parallel)
    limits = {name: getattr(args, name) for name in ("max_num_batched_tokens", "max_num_seqs")}
    found = query(args.model, args.system, layout, scale=args.scale, **limits)
    if found.engine.kv_cache_tokens is None and args.kv_cache_tokens is None:
        why = next(
            (line for line in found.assumed if line.startswith("no KV cache")), "the model does not fit"
        )
        print(f"warning: --tp {degree}: {why}; no KV cache is stated", file=sys.stderr)
    return found


def _from_roofline(args: argparse.Namespace, degree: int) -> Measurements:
    sizes = () if args.model_config is not None else ("parameters", "kv_bytes_per_token")
    for flag in ("peak_flops", "bandwidth", *sizes):
        if getattr(args, flag) is None:
            raise InputError(f"--{flag.replace('_', '-')}: expected a value with --from roofline, got none")
    if args.model_config is not None:
        facts = load_facts(args.model_config, args.model)
        if (why := refusal(facts.shape, degree)) if facts.shape is not None else "":
            raise InputError(f"--tp: expected a degree that vLLM takes, got {degree}: {why}")
    else:
        facts = stated_facts(args.model or "", args.parameters, args.kv_bytes_per_token)
    overhead_ms = 2.0 if args.overhead_ms is None else args.overhead_ms
    roofline = Roofline(
        peak_flops=args.peak_flops,
        bandwidth_bytes_s=args.bandwidth,
        model=facts,
        tensor_parallel_size=degree,
        step_overhead_s=overhead_ms / 1e3,
    )
    return roofline.measurements(args.system, args.model)
