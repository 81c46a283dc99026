"""`hetlb profile`: makes a latency profile from measured points, shows one, compares two, lists a library.

The file is written only when the fit succeeded, whole or not at all; a fit past 10 % mean or
30 % largest held-out error is warned of on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from hetlb.cli import profile_live
from hetlb.cli.flags import FINITE, add_json, declare, real, whole
from hetlb.cli.profile_corrected import write_corrected
from hetlb.config.profile_file import (
    EngineInfo,
    Hardware,
    HostTime,
    ModelInfo,
    Profile,
    ProfileSource,
    load_profile,
)
from hetlb.errors import InputError, ProfileError
from hetlb.profiler.aiconfigurator import Layout, query
from hetlb.profiler.fit import FitResult, Point, PrefillForm, StepKind, fit, shown_tile
from hetlb.profiler.plot import write_plot
from hetlb.profiler.shown import (
    comparison,
    differences,
    errors_table,
    listing,
    listing_table,
    print_comparison,
    print_profile,
)
from hetlb.profiler.sources import (
    ASSUMED_TILE,
    Roofline,
    assumed_host,
    complete,
    make_profile,
    read_csv,
    write_profile,
)

_SOURCES = "csv:FILE, log:FILE, proxy:URL, aiconfigurator or roofline"
#: All-reduces below this say more of a machine's wiring than of its GPUs.
_SLOW_ALL_REDUCE_BYTES_S = 8e9
#: Tokens of a step, at most: drafts are shorter.
_MOST_TOKENS_PER_STEP = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb profile`, and its verbs `show`, `compare` and `list`."""
    parser.usage = (
        "hetlb profile --url URL --out P.yaml [flags]\n"
        "       hetlb profile --from csv:FILE|aiconfigurator|roofline --out P.yaml [flags]\n"
        "       hetlb profile --from log:FILE|proxy:URL --start P.yaml --out P.yaml [flags]\n"
        "       hetlb profile show P.yaml | compare A.yaml B.yaml | list FOLDER"
    )
    add, switch = declare(parser), parser.add_argument
    switch("verb", nargs="?", choices=("show", "compare", "list"), help="action on existing profiles")
    files = "files to show or compare, folder to list"
    switch("files", nargs="*", type=Path, metavar="P.yaml", help=files)
    switch("--from", dest="source", metavar="SOURCE", help=_SOURCES)
    add("--out", "profile to write", "P.yaml", Path)
    add("--name", "name of the profile (default: system, model and degree)")
    add("--system", "GPU; selects the rows of a CSV")
    add("--model", "model; selects the rows of a CSV, or one of several served")
    add("--tp", "tensor-parallel degree (aiconfigurator: several, 1,2,4,8)", "N")
    forms = "form of prefill (default: the least held-out error)"
    switch("--form", choices=tuple(PrefillForm), help=forms)
    add("--plot", "picture of measured and fitted times", "P.png", Path)
    add("--licence", "licence of the data")
    add("--kv-cache-tokens", "tokens that the KV cache holds", "N", whole(1))
    add("--max-num-seqs", "most sequences of a batch", "N", whole(1))
    add("--kv-bytes-per-token", "KV cache per token, over all GPUs", "N", whole(1))
    add("--memory-bytes", "memory of one GPU", "N", whole(1))
    add("--block-size", "tokens of a KV block", "N", whole(1))
    add(
        "--tile", "tokens of a tile of dense kernels (default: what the points show, else 128)", "N", whole(1)
    )
    drafts = "tokens of a decode step with speculative decoding (default: by the server's metrics, else 1)"
    span = real(f"a number from 1 to {_MOST_TOKENS_PER_STEP}", lambda x: 1 <= x <= _MOST_TOKENS_PER_STEP)
    add("--tokens-per-step", drafts, "X", span)
    scheduling = "asynchronous scheduling (default: as vLLM of that version)"
    switch("--async-scheduling", action=argparse.BooleanOptionalAction, help=scheduling)
    profile_live.add_arguments(parser)
    add = declare(parser.add_argument_group("from a log or a running proxy"))
    add("--server", "instance of the proxy (--from proxy:URL)", "NAME")
    add("--start", "profile to correct (--from log:, proxy:)", "P.yaml", Path)
    add("--hash-block-size", "tokens of a block of the log's hash_ids (default 512)", "N", whole(1), 512)
    _add_estimates(parser)
    add_json(parser)


def _add_estimates(parser: argparse.ArgumentParser) -> None:
    add = declare(parser.add_argument_group("roofline (marked unmeasured)"))
    add("--peak-flops", "FLOP/s of one GPU at this precision", "F", FINITE)
    add("--bandwidth", "memory bytes/s of one GPU", "B", FINITE)
    add("--parameters", "parameters of the model", "P", FINITE)
    add("--bytes-per-parameter", "bytes of a weight (default 2)", "B", FINITE, 2.0)
    group = parser.add_argument_group("without a server")
    add = declare(group)
    host = "host time of every iteration; 0 where the points hold it (default: roofline 2, else assumed)"
    add("--overhead-ms", host, "MS", real("milliseconds from 0", lambda value: 0 <= value < math.inf))
    ranks = "data-parallel ranks of a server; the profile is of one (aiconfigurator)"
    add("--data-parallel", ranks, "N", whole(1), 1)
    experts = "whole experts on each GPU (aiconfigurator)"
    group.add_argument("--expert-parallel", action="store_true", help=experts)
    add("--scale", "factor on all times (aiconfigurator)", "X", FINITE, 1.0)


def run(args: argparse.Namespace) -> int:
    """Make, show, compare or list."""
    if args.verb is not None:
        return _about_files(args)
    if (args.source is None) == (args.url is None) or args.out is None:
        raise InputError("expected one of --url and --from with --out P.yaml, or show or compare")
    if (args.data_parallel > 1 or args.expert_parallel) and args.source != "aiconfigurator":
        raise InputError("--data-parallel, --expert-parallel: expected --from aiconfigurator")
    degrees = _degrees(args)
    _make_folder(args.out)
    kind, _, file = (args.source or "").partition(":")
    if kind in ("log", "proxy") and file:
        return write_corrected(args, kind, file)
    if args.url is not None:
        live = profile_live.measure(args)
        written = [_finish(args, args.out, _from_live(args, live, degrees[0]))]
        live.file.remove()
    elif kind == "csv" and file:
        written = [_finish(args, args.out, _from_csv(args, Path(file), degrees[0]))]
    elif args.source == "roofline":
        written = [_finish(args, args.out, _from_roofline(args, degrees[0]))]
    elif args.source == "aiconfigurator":
        several = len(degrees) > 1
        outs = [args.out.with_stem(f"{args.out.stem}-tp{n}") if several else args.out for n in degrees]
        pairs = zip(outs, degrees, strict=True)
        written = [_finish(args, out, _from_aiconfigurator(args, degree or 1)) for out, degree in pairs]
    else:
        raise InputError(f"--from: expected {_SOURCES}, got {args.source!r}")
    if args.json:
        print(json.dumps(written[0] if len(written) == 1 else written))
    return 0


def _about_files(args: argparse.Namespace) -> int:
    needed = {"show": 1, "compare": 2}.get(args.verb, len(args.files) or 1)
    if len(args.files) != needed or args.source or args.url or args.out:
        what = "folders or profile files" if args.verb == "list" else f"{needed} profile file(s)"
        raise InputError(f"{args.verb}: expected {what} and no --url, --from or --out")
    if args.verb == "list":
        rows = listing(args.files)
        if args.json:
            print(json.dumps({"profiles": rows}))
        else:
            Console().print(listing_table(rows))
        return 0
    profiles = [load_profile(path) for path in args.files]
    if args.verb == "show":
        if args.json:
            print(msgspec.json.encode(profiles[0]).decode())
        else:
            print_profile(profiles[0])
        return 0
    for difference in differences(*profiles):
        print(f"warning: different {difference}", file=sys.stderr)
    document = comparison(*profiles)
    if args.json:
        print(json.dumps(document))
    else:
        print_comparison(document)
    return 0


def _make_folder(out: Path) -> None:
    """Create the folder of the profile: before the work, not after it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"{error.filename}: {error.strerror}"
        raise InputError(f"--out: expected a folder that can be written: {where}") from error


def _degrees(args: argparse.Namespace) -> list[int | None]:
    """The degrees of `--tp`; several only where a source can tell them apart."""
    if args.tp is None:
        return [None]
    parts = args.tp.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InputError(f"--tp: expected a whole number from 1, got {args.tp!r}")
    if len(parts) > 1 and args.source != "aiconfigurator":
        raise InputError(f"--tp: expected one degree, got {args.tp} (several: --from aiconfigurator)")
    return [int(part) for part in parts]


#: A profile, the points that it was fitted to and the fit.
_Made = tuple[Profile, tuple[Point, ...], FitResult]


def _finish(args: argparse.Namespace, out: Path, made: _Made) -> dict[str, Any]:
    """Warn, draw, write and tell; returns what `--json` prints of it."""
    profile, points, result = made
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.plot is not None:
        plot = args.plot if out == args.out else args.plot.with_stem(out.stem)
        write_plot(plot, profile.name, points, result, profile.engine.max_num_batched_tokens)
    write_profile(out, profile)
    if not args.json:
        console = Console()
        console.print(errors_table(profile))
        for line in profile.assumed:
            console.print(f"assumed {line}", markup=False, highlight=False)
        console.print(f"written to {out}", highlight=False)
    document = json.loads(msgspec.json.encode(profile))
    return {"out": str(out), "profile": document, "warnings": list(result.warnings)}


# --- sources ----------------------------------------------------------------------------------------------


def _from_live(args: argparse.Namespace, live: profile_live.LiveResult, degree: int | None) -> _Made:
    facts, capacity = live.facts, live.facts.capacity
    drafts: tuple[str, ...] = ()
    if live.tokens_per_step is not None and args.tokens_per_step is None:
        drafts = (
            f"engine.tokens_per_step: {live.tokens_per_step:.2f}, as with the made prompts of the sweep; "
            "--tokens-per-step states that of your traffic",
        )
    engine = _engine(
        args,
        degree,
        version=facts.version,
        kv_cache_tokens=capacity.kv_cache_tokens,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=capacity.max_model_len,
        enable_prefix_caching=facts.prefix_cache if facts.counts else None,
        tokens_per_step=live.tokens_per_step,
    )
    source = ProfileSource(kind="live", name=args.url)
    profile, points, result = _make(
        args, live.points, source, engine, args.system, facts.model,
        host=HostTime(), tile=None, assumed=drafts, where=str(live.file.path),
    )  # fmt: skip
    host = HostTime(request_s=live.request_s(result.latency))
    return msgspec.structs.replace(profile, host=host), points, result


def _from_csv(args: argparse.Namespace, path: Path, tp: int | None) -> _Made:
    chosen = read_csv(path, system=args.system, model=args.model, tp=tp)
    degree = chosen.tensor_parallel_size or tp
    engine = _engine(args, degree, name=chosen.backend or "vllm", version=chosen.backend_version)
    source = ProfileSource(kind="csv", name=path.name, system=chosen.system, licence=args.licence)
    return _make(
        args, chosen.points, source, engine, chosen.system, chosen.model, where=str(path), name=path.stem
    )


def _from_aiconfigurator(args: argparse.Namespace, degree: int) -> _Made:
    for flag in ("system", "model"):
        if getattr(args, flag) is None:
            raise InputError(f"--{flag}: expected a name with --from aiconfigurator, got none")
    layout = Layout(degree, args.data_parallel, args.expert_parallel)
    found = query(args.model, args.system, layout, scale=args.scale)
    assumed: list[str] = []
    if layout.dp > 1:
        assumed.append(
            f"data parallel: all {layout.dp} ranks alike busy; a step of one waits for the slowest"
        )
    if found.all_reduce_bytes_s is not None and found.all_reduce_bytes_s < _SLOW_ALL_REDUCE_BYTES_S:
        assumed.append(
            f"all-reduce: {found.all_reduce_bytes_s / 1e9:.1f} GB/s, of one badly wired machine, not of the "
            "GPU (PCIe 4.0 x16 gives about 20 GB/s); nccl-tests measures yours"
        )
    if found.kv_cache_tokens is None and args.kv_cache_tokens is None:
        print(f"warning: --tp {degree}: the model does not fit; no KV cache is stated", file=sys.stderr)
    note = "kernel tables measured on the GPU, composed; they hold no host time"
    engine = _engine(
        args,
        degree,
        version=found.vllm_version,
        data_parallel_size=layout.dp if layout.dp > 1 else None,
        enable_expert_parallel=True if layout.expert_parallel else None,
        kv_cache_tokens=found.kv_cache_tokens,
        max_num_seqs=found.max_num_seqs,
        max_num_batched_tokens=found.max_num_batched_tokens,
    )
    source = ProfileSource(
        kind="aiconfigurator",
        name=f"aiconfigurator-core {found.version}",
        system=args.system,
        licence="Apache-2.0",
        attribution="NVIDIA",
        note=note if args.scale == 1.0 else f"{note}; times {args.scale:g}",
    )
    profile, points, result = _make(
        args, found.points, source, engine, args.system, args.model,
        split_blocks=found.split_blocks, assumed=tuple(assumed),
    )  # fmt: skip
    hardware = Hardware(
        gpu=args.system,
        gpus=degree * layout.dp,
        memory_bytes=args.memory_bytes or found.memory_bytes,
        all_reduce_bytes_s=found.all_reduce_bytes_s,
    )
    kv_bytes = args.kv_bytes_per_token or found.kv_bytes_per_token
    model = ModelInfo(name=args.model, kv_bytes_per_token=kv_bytes)
    return msgspec.structs.replace(profile, hardware=hardware, model=model), points, result


def _from_roofline(args: argparse.Namespace, tp: int | None) -> _Made:
    for flag in ("peak_flops", "bandwidth", "parameters", "kv_bytes_per_token"):
        if getattr(args, flag) is None:
            raise InputError(f"--{flag.replace('_', '-')}: expected a value with --from roofline, got none")
    overhead_ms = 2.0 if args.overhead_ms is None else args.overhead_ms
    roofline = Roofline(
        peak_flops=args.peak_flops,
        bandwidth_bytes_s=args.bandwidth,
        parameters=args.parameters,
        bytes_per_parameter=args.bytes_per_parameter,
        kv_bytes_per_token=args.kv_bytes_per_token,
        tensor_parallel_size=tp or 1,
        step_overhead_s=overhead_ms / 1e3,
    )
    note = (
        f"estimated, not measured: {args.peak_flops:g} FLOP/s at {roofline.flops_efficiency:g}, "
        f"{args.bandwidth:g} bytes/s at {roofline.bandwidth_efficiency:g}, {overhead_ms:g} ms a step; "
        "the errors are of the fit to this estimate"
    )
    source = ProfileSource(kind="roofline", measured=False, system=args.system, note=note)
    return _make(
        args, tuple(roofline.points()), source, _engine(args, tp or 1), args.system, args.model,
        host=HostTime(), name="roofline",
    )  # fmt: skip


def _engine(args: argparse.Namespace, degree: int | None, **found: Any) -> EngineInfo:
    """The engine as it was found, but for what flags state."""
    flags = ("kv_cache_tokens", "max_num_seqs", "max_num_batched_tokens", "block_size", "tokens_per_step")
    stated = {flag: value for flag in flags if (value := getattr(args, flag)) is not None}
    return EngineInfo(tensor_parallel_size=degree, async_scheduling=args.async_scheduling, **found | stated)


def _make(
    args: argparse.Namespace,
    points: tuple[Point, ...],
    source: ProfileSource,
    engine: EngineInfo,
    system: str | None,
    model: str | None,
    *,
    host: HostTime | None = None,
    tile: int | None = ASSUMED_TILE,
    split_blocks: float | None = None,
    assumed: tuple[str, ...] = (),
    where: str = "",
    name: str = "",
) -> _Made:
    """Fit the points, completed by assumptions. Raises `ProfileError` naming `where` they are from.

    `host` is None where the points hold no host time; `tile` is assumed where they show none; `name` is the
    profile's where nothing else names it.
    """
    asynchronous = engine.schedules_asynchronously(system)
    if host is None:
        stated = args.overhead_ms is not None
        host = HostTime(iteration_s=args.overhead_ms / 1e3) if stated else assumed_host(asynchronous)
    prefill = [point for point in points if point.phase is StepKind.PREFILL]
    form = PrefillForm(args.form) if args.form is not None else None
    tile = args.tile or (None if shown_tile(prefill) else tile)
    try:
        result = fit(points, form=form, tile=tile)
    except (ProfileError, RuntimeError, ValueError) as error:
        lead = "" if isinstance(error, ProfileError) else "expected points that a model can be fitted to: "
        raise ProfileError(f"{where}: {lead}{error}" if where else f"{lead}{error}") from error
    if args.tile is not None:
        result = replace(result, tile=args.tile)
    result, more = complete(result, points, host, asynchronous, split_blocks)
    degree = engine.tensor_parallel_size
    parts = (system, model, None if degree is None else f"tp{degree}")
    made = "-".join(part for part in parts if part).lower().replace("/", "-")
    gpus = degree or 1
    profile = make_profile(
        args.name or made or name,
        points,
        result,
        source=source,
        hardware=Hardware(gpu=system, gpus=gpus, memory_bytes=args.memory_bytes) if system else None,
        model=ModelInfo(name=model, kv_bytes_per_token=args.kv_bytes_per_token) if model else None,
        engine=engine,
        host=host,
        assumed=(*more, *assumed),
    )
    return profile, points, result
