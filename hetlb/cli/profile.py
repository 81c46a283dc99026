"""`hetlb profile`: makes a latency profile from measured points, shows one, compares two, lists a library.

The file is written only when the fit succeeded, whole or not at all; a fit past 10 % mean or
30 % largest held-out error is warned of on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from hetlb.cli import profile_live
from hetlb.cli.profile_log import from_log
from hetlb.cli.profile_running import from_proxy
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
from hetlb.profiler.sources import (
    ASSUMED_TILE,
    Roofline,
    assumed_host,
    complete,
    make_profile,
    read_csv,
    write_profile,
)

#: The sizes at which `show` and `compare` print times.
_SIZES = {
    StepKind.PREFILL: [(b, n) for b in (1, 4, 16) for n in (128, 1024, 4096)],
    StepKind.DECODE: [(b, n) for b in (1, 16, 128) for n in (256, 1024, 4096)],
}

#: All-reduces below this say more of a machine's wiring than of its GPUs.
_SLOW_ALL_REDUCE_BYTES_S = 8e9
#: Drafts are shorter than this.
_MOST_TOKENS_PER_STEP = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb profile`, and its verbs `show` and `compare`."""
    parser.usage = (
        "hetlb profile --url URL --out P.yaml [flags]\n"
        "       hetlb profile --from csv:FILE|aiconfigurator|roofline --out P.yaml [flags]\n"
        "       hetlb profile --from log:FILE|proxy:URL --start P.yaml --out P.yaml [flags]\n"
        "       hetlb profile show P.yaml | compare A.yaml B.yaml | list FOLDER"
    )
    parser.add_argument(
        "verb", nargs="?", choices=("show", "compare", "list"), help="action on existing profiles"
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="P.yaml", help="files to show or compare, folder to list"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="csv:FILE, log:FILE, proxy:URL, aiconfigurator or roofline",
    )
    parser.add_argument("--out", type=Path, metavar="P.yaml", help="profile to write")
    parser.add_argument("--name", help="name of the profile (default: system, model and degree)")
    parser.add_argument("--system", help="GPU; selects the rows of a CSV")
    parser.add_argument("--model", help="model; selects the rows of a CSV, or one of several served")
    parser.add_argument("--tp", metavar="N", help="tensor-parallel degree (aiconfigurator: several, 1,2,4,8)")
    parser.add_argument(
        "--form", choices=tuple(PrefillForm), help="form of prefill (default: the least held-out error)"
    )
    parser.add_argument(
        "--weights",
        choices=("relative", "absolute"),
        default="relative",
        help="weights of the fit (default relative)",
    )
    parser.add_argument("--plot", type=Path, metavar="P.png", help="picture of measured and fitted times")
    parser.add_argument("--licence", help="licence of the data")
    parser.add_argument("--attribution", help="origin of the data")
    parser.add_argument("--kv-cache-tokens", type=int, metavar="N", help="tokens that the KV cache holds")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="most sequences of a batch")
    parser.add_argument(
        "--kv-bytes-per-token", type=int, metavar="N", help="KV cache per token, over all GPUs"
    )
    parser.add_argument("--memory-bytes", type=int, metavar="N", help="memory of one GPU")
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens of a KV block")
    parser.add_argument(
        "--tile",
        type=int,
        metavar="N",
        help="tokens of a tile of dense kernels (default: what the points show, else 128)",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=float,
        metavar="X",
        help="tokens of a decode step with speculative decoding (default: by the server's metrics, else 1)",
    )
    parser.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="asynchronous scheduling (default: as vLLM of that version)",
    )
    profile_live.add_arguments(parser)
    log = parser.add_argument_group("from a log or a running proxy")
    log.add_argument("--server", metavar="NAME", help="instance of the proxy (--from proxy:URL)")
    log.add_argument("--start", type=Path, metavar="P.yaml", help="profile to correct (--from log:, proxy:)")
    log.add_argument(
        "--hash-block-size",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a block of the log's hash_ids (default 512)",
    )
    roofline = parser.add_argument_group("roofline (marked unmeasured)")
    roofline.add_argument("--peak-flops", type=float, metavar="F", help="FLOP/s of one GPU at this precision")
    roofline.add_argument("--bandwidth", type=float, metavar="B", help="memory bytes/s of one GPU")
    roofline.add_argument("--parameters", type=float, metavar="P", help="parameters of the model")
    roofline.add_argument(
        "--bytes-per-parameter", type=float, default=2.0, metavar="B", help="bytes of a weight (default 2)"
    )
    roofline.add_argument(
        "--flops-efficiency",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of peak FLOP/s reached (default 0.5)",
    )
    roofline.add_argument(
        "--bandwidth-efficiency",
        type=float,
        default=0.7,
        metavar="SHARE",
        help="share of the bandwidth reached (default 0.7)",
    )
    estimated = parser.add_argument_group("without a server")
    estimated.add_argument(
        "--overhead-ms",
        type=float,
        metavar="MS",
        help="host time of every iteration; 0 where the points hold it (default: roofline 2, else assumed)",
    )
    estimated.add_argument(
        "--data-parallel",
        type=int,
        default=1,
        metavar="N",
        help="data-parallel ranks of a server; the profile is of one (aiconfigurator)",
    )
    estimated.add_argument(
        "--expert-parallel", action="store_true", help="whole experts on each GPU (aiconfigurator)"
    )
    estimated.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="factor on all times (aiconfigurator)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Make, show or compare."""
    if args.verb == "list":
        if not args.files or args.source or args.url or args.out:
            raise InputError("list: expected folders or profile files and no --url, --from or --out")
        return _list(args.files, args.json)
    if args.verb is not None:
        needed = 1 if args.verb == "show" else 2
        if len(args.files) != needed or args.source or args.url or args.out:
            raise InputError(f"{args.verb}: expected {needed} profile file(s) and no --url, --from or --out")
        profiles = [load_profile(path) for path in args.files]
        if args.verb == "show":
            return _show(profiles[0], args.json)
        return _compare(profiles[0], profiles[1], args.json)
    if (args.source is None) == (args.url is None) or args.out is None:
        raise InputError("expected one of --url and --from with --out P.yaml, or show or compare")
    for flag in (
        "kv_cache_tokens",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_bytes_per_token",
        "memory_bytes",
        "block_size",
        "tile",
        "data_parallel",
    ):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise InputError(f"--{flag.replace('_', '-')}: expected a whole number from 1, got {value}")
    if args.tokens_per_step is not None and not 1.0 <= args.tokens_per_step <= _MOST_TOKENS_PER_STEP:
        most, got = _MOST_TOKENS_PER_STEP, args.tokens_per_step
        raise InputError(f"--tokens-per-step: expected a number from 1 to {most}, got {got}")
    if (args.data_parallel > 1 or args.expert_parallel) and args.source != "aiconfigurator":
        raise InputError("--data-parallel, --expert-parallel: expected --from aiconfigurator")
    degrees = _degrees(args)
    _make_folder(args.out)
    kind, _, file = (args.source or "").partition(":")
    written = []
    if args.url is not None:
        live = profile_live.measure(args)
        made = _from_live(args, live, degrees[0])
        written.append(_finish(args, args.out, made))
        live.file.remove()
    elif kind == "csv" and file:
        written.append(_finish(args, args.out, _from_csv(args, Path(file), degrees[0])))
    elif kind == "log" and file:
        return from_log(args, Path(file))
    elif kind == "proxy" and file:
        return from_proxy(args, file)
    elif args.source == "aiconfigurator":
        for degree in degrees:
            out = args.out
            if len(degrees) > 1:
                out = out.with_name(f"{out.stem}-tp{degree}{out.suffix}")
            written.append(_finish(args, out, _from_aiconfigurator(args, degree or 1)))
    elif args.source == "roofline":
        written.append(_finish(args, args.out, _from_roofline(args, degrees[0])))
    else:
        raise InputError(
            f"--from: expected csv:FILE, log:FILE, proxy:URL, aiconfigurator or roofline, got {args.source!r}"
        )
    if args.json:
        print(json.dumps(written[0] if len(written) == 1 else written))
    return 0


def _make_folder(out: Path) -> None:
    """Create the folder of the profile: before the work, not after it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out: expected a folder that can be written: {error.filename}: {error.strerror}"
        ) from error


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
        plot = args.plot if out == args.out else args.plot.with_name(f"{out.stem}{args.plot.suffix}")
        write_plot(plot, profile.name, points, result, profile.engine.max_num_batched_tokens)
    write_profile(out, profile)
    if not args.json:
        console = Console()
        console.print(_errors_table(profile))
        for line in profile.assumed:
            console.print(f"assumed {line}", markup=False, highlight=False)
        console.print(f"written to {out}", highlight=False)
    document = json.loads(msgspec.json.encode(profile))
    return {"out": str(out), "profile": document, "warnings": list(result.warnings)}


def _from_live(args: argparse.Namespace, live: profile_live.LiveResult, degree: int | None) -> _Made:
    facts, capacity = live.facts, live.facts.capacity
    try:
        result, assumed = _fit(args, live.points, HostTime(), None, tile=None)
    except ProfileError as error:
        raise ProfileError(f"{live.file.path}: {error}") from error
    host = HostTime(request_s=live.request_s(result.latency))
    if live.tokens_per_step is not None and args.tokens_per_step is None:
        assumed += (
            f"engine.tokens_per_step: {live.tokens_per_step:.2f}, as with the made prompts of the sweep; "
            "--tokens-per-step states that of your traffic",
        )
    hardware = Hardware(gpu=args.system, gpus=degree or 1, memory_bytes=args.memory_bytes)
    profile = make_profile(
        args.name or _default_name(args.system, facts.model, degree),
        live.points,
        result,
        source=ProfileSource(kind="live", name=args.url),
        hardware=hardware if args.system else None,
        model=_model_info(args, facts.model),
        host=host,
        assumed=assumed,
        engine=EngineInfo(
            name="vllm",
            version=facts.version,
            tensor_parallel_size=degree,
            kv_cache_tokens=capacity.kv_cache_tokens,
            block_size=capacity.block_size,
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            max_model_len=capacity.max_model_len,
            enable_prefix_caching=facts.prefix_cache if facts.counts else None,
            tokens_per_step=args.tokens_per_step or live.tokens_per_step,
            async_scheduling=args.async_scheduling,
        ),
    )
    return profile, live.points, result


def _from_csv(args: argparse.Namespace, path: Path, tp: int | None) -> _Made:
    chosen = read_csv(path, system=args.system, model=args.model, tp=tp)
    degree = chosen.tensor_parallel_size or tp
    described = _descriptions(
        args, chosen.system, chosen.model, degree, chosen.backend, chosen.backend_version
    )
    asynchronous = described["engine"].schedules_asynchronously(chosen.system)
    host = _host(args, asynchronous)
    try:
        result, assumed = _fit(args, chosen.points, host, asynchronous)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
    profile = make_profile(
        args.name or _default_name(chosen.system, chosen.model, degree) or path.stem,
        chosen.points,
        result,
        source=ProfileSource(
            kind="csv",
            name=path.name,
            system=chosen.system,
            licence=args.licence,
            attribution=args.attribution,
        ),
        host=host,
        assumed=assumed,
        **described,
    )
    return profile, chosen.points, result


def _from_aiconfigurator(args: argparse.Namespace, degree: int) -> _Made:
    for flag in ("system", "model"):
        if getattr(args, flag) is None:
            raise InputError(f"--{flag}: expected a name with --from aiconfigurator, got none")
    if not (math.isfinite(args.scale) and args.scale > 0):
        raise InputError(f"--scale: expected a number above 0, got {args.scale}")
    layout = Layout(degree, args.data_parallel, args.expert_parallel)
    found = query(args.model, args.system, layout, scale=args.scale)
    engine = EngineInfo(
        version=found.vllm_version,
        tensor_parallel_size=degree,
        data_parallel_size=layout.dp if layout.dp > 1 else None,
        enable_expert_parallel=True if layout.expert_parallel else None,
        tokens_per_step=args.tokens_per_step,
        kv_cache_tokens=args.kv_cache_tokens or found.kv_cache_tokens,
        max_num_seqs=args.max_num_seqs or found.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or found.max_num_batched_tokens,
        async_scheduling=args.async_scheduling,
    )
    asynchronous = engine.schedules_asynchronously(args.system)
    host = _host(args, asynchronous)
    result, assumed = _fit(args, found.points, host, asynchronous, split_blocks=found.split_blocks)
    if layout.dp > 1:
        assumed += (f"data parallel: all {layout.dp} ranks alike busy; a step of one waits for the slowest",)
    if found.all_reduce_bytes_s is not None and found.all_reduce_bytes_s < _SLOW_ALL_REDUCE_BYTES_S:
        assumed += (
            f"all-reduce: {found.all_reduce_bytes_s / 1e9:.1f} GB/s, of one badly wired machine, not of the "
            "GPU (PCIe 4.0 x16 gives about 20 GB/s); nccl-tests measures yours",
        )
    if found.kv_cache_tokens is None and args.kv_cache_tokens is None:
        print(f"warning: --tp {degree}: the model does not fit; no KV cache is stated", file=sys.stderr)
    note = "kernel tables measured on the GPU, composed; they hold no host time"
    if args.scale != 1.0:
        note += f"; times {args.scale:g}"
    profile = make_profile(
        args.name or _default_name(args.system, args.model, degree),
        found.points,
        result,
        source=ProfileSource(
            kind="aiconfigurator",
            name=f"aiconfigurator-core {found.version}",
            system=args.system,
            licence="Apache-2.0",
            attribution="NVIDIA",
            note=note,
        ),
        hardware=Hardware(
            gpu=args.system,
            gpus=degree * layout.dp,
            memory_bytes=args.memory_bytes or found.memory_bytes,
            all_reduce_bytes_s=found.all_reduce_bytes_s,
        ),
        model=ModelInfo(
            name=args.model,
            kv_bytes_per_token=args.kv_bytes_per_token or found.kv_bytes_per_token,
        ),
        engine=engine,
        host=host,
        assumed=assumed,
    )
    return profile, found.points, result


def _host(args: argparse.Namespace, asynchronous: bool | None) -> HostTime:
    """The host time of points that hold none: as stated, else assumed."""
    if args.overhead_ms is None:
        return assumed_host(asynchronous)
    return HostTime(iteration_s=_overhead_ms(args, 0.0) / 1e3)


def _overhead_ms(args: argparse.Namespace, default: float) -> float:
    overhead_ms: float = default if args.overhead_ms is None else args.overhead_ms
    if not (math.isfinite(overhead_ms) and overhead_ms >= 0):
        raise InputError(f"--overhead-ms: expected milliseconds from 0, got {overhead_ms}")
    return overhead_ms


def _from_roofline(args: argparse.Namespace, tp: int | None) -> _Made:
    for flag in ("peak_flops", "bandwidth", "parameters", "kv_bytes_per_token"):
        if getattr(args, flag) is None:
            raise InputError(f"--{flag.replace('_', '-')}: expected a value with --from roofline, got none")
    for flag in ("peak_flops", "bandwidth", "parameters", "bytes_per_parameter"):
        if not (math.isfinite(getattr(args, flag)) and getattr(args, flag) > 0):
            raise InputError(
                f"--{flag.replace('_', '-')}: expected a number above 0, got {getattr(args, flag)}"
            )
    for flag in ("flops_efficiency", "bandwidth_efficiency"):
        if not 0 < getattr(args, flag) <= 1:
            raise InputError(
                f"--{flag.replace('_', '-')}: expected a share above 0 and up to 1, got {getattr(args, flag)}"
            )
    overhead_ms = _overhead_ms(args, 2.0)
    degree = tp or 1
    roofline = Roofline(
        peak_flops=args.peak_flops,
        bandwidth_bytes_s=args.bandwidth,
        parameters=args.parameters,
        bytes_per_parameter=args.bytes_per_parameter,
        kv_bytes_per_token=args.kv_bytes_per_token,
        tensor_parallel_size=degree,
        flops_efficiency=args.flops_efficiency,
        bandwidth_efficiency=args.bandwidth_efficiency,
        step_overhead_s=overhead_ms / 1e3,
    )
    points = tuple(roofline.points())
    result, assumed = _fit(args, points, HostTime(), None)
    note = (
        f"estimated, not measured: {args.peak_flops:g} FLOP/s at {args.flops_efficiency:g}, "
        f"{args.bandwidth:g} bytes/s at {args.bandwidth_efficiency:g}, {overhead_ms:g} ms a step; "
        "the errors are of the fit to this estimate"
    )
    profile = make_profile(
        args.name or _default_name(args.system, args.model, degree) or "roofline",
        points,
        result,
        source=ProfileSource(kind="roofline", measured=False, system=args.system, note=note),
        host=HostTime(),
        assumed=assumed,
        **_descriptions(args, args.system, args.model, degree, None, None),
    )
    return profile, points, result


def _fit(
    args: argparse.Namespace,
    points: tuple[Point, ...],
    host: HostTime,
    asynchronous: bool | None,
    *,
    tile: int | None = ASSUMED_TILE,
    split_blocks: float | None = None,
) -> tuple[FitResult, tuple[str, ...]]:
    """The fit, completed by assumptions; `tile` is the one assumed where the points show none."""
    form = PrefillForm(args.form) if args.form is not None else None
    prefill = [point for point in points if point.phase is StepKind.PREFILL]
    tile = args.tile or (None if shown_tile(prefill) else tile)
    try:
        result = fit(points, form=form, relative=args.weights == "relative", tile=tile)
    except (RuntimeError, ValueError) as error:
        raise ProfileError(f"expected points that a model can be fitted to: {error}") from error
    if args.tile is not None:
        result = replace(result, tile=args.tile)
    return complete(result, points, host, asynchronous, split_blocks)


def _model_info(args: argparse.Namespace, model: str | None) -> ModelInfo | None:
    if model is None:
        return None
    return ModelInfo(name=model, kv_bytes_per_token=args.kv_bytes_per_token)


def _default_name(system: str | None, model: str | None, degree: int | None) -> str:
    parts = [system, model, None if degree is None else f"tp{degree}"]
    return "-".join(part for part in parts if part).lower().replace("/", "-")


def _descriptions(
    args: argparse.Namespace,
    system: str | None,
    model: str | None,
    degree: int | None,
    backend: str | None,
    version: str | None,
) -> dict[str, Any]:
    hardware = Hardware(gpu=system, gpus=degree or 1, memory_bytes=args.memory_bytes) if system else None
    return {
        "hardware": hardware,
        "model": _model_info(args, model),
        "engine": EngineInfo(
            name=backend or "vllm",
            version=version,
            tensor_parallel_size=degree,
            kv_cache_tokens=args.kv_cache_tokens,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=args.block_size,
            tokens_per_step=args.tokens_per_step,
            async_scheduling=args.async_scheduling,
        ),
    }


def _errors_table(profile: Profile) -> Table:
    table = Table(title=profile.name, title_justify="left")
    for column in ("phase", "form", "mean", "p95", "max", "points", "worst at"):
        table.add_column(column, justify="left" if column in ("phase", "form") else "right")
    report = profile.fit
    phases = () if report is None else ("prefill", "prefill_paper", "decode", "decode_paper", "mixed")
    for phase in phases:
        error = getattr(report, phase)
        if error is not None:
            worst = ", ".join(f"{key} {size}" for key, size in (error.worst or {}).items()) or "-"
            figures = (f"{x:.1%}" for x in (error.mean_error, error.p95_error, error.max_error))
            table.add_row(phase.partition("_")[0], error.form, *figures, str(error.points), worst)
    table.caption = "relative errors on points held out of the fit"
    return table


def _seconds(profile: Profile, phase: StepKind, batch: int, length: int) -> float:
    latency = profile.latency
    if phase is StepKind.DECODE:
        return latency.step_s(batch, batch * length)
    return latency.prefill_s(length, batch)


def _show(profile: Profile, as_json: bool) -> int:
    if as_json:
        print(msgspec.json.encode(profile).decode())
        return 0
    console = Console(highlight=False)
    tables = (("hardware", profile.hardware), ("model", profile.model), ("engine", profile.engine))
    console.print(f"[bold]{profile.name}[/bold]")
    for key, part in (*tables, ("source", profile.source)):
        if part is not None:
            values = {k: v for k, v in msgspec.to_builtins(part).items() if v is not None}
            console.print(f"{key}: " + ", ".join(f"{k} {v}" for k, v in values.items()), markup=False)
    if profile.source is not None and not profile.source.measured:
        console.print("[bold yellow]unmeasured: an estimate that no hardware has confirmed[/bold yellow]")
    for line in profile.assumed:
        console.print(f"assumed: {line}", markup=False)
    for line in profile.lacks:
        console.print(f"lacks {line}", markup=False)
    for section in (profile.prefill, profile.decode):
        values = msgspec.to_builtins(section)
        console.print("  ".join(f"{k} = {v:.4g}" for k, v in values.items()))
    if profile.fit is not None and profile.fit.prefill is not None:
        console.print(_errors_table(profile))
    elif profile.fit is not None:
        f = profile.fit
        console.print(
            f"errors: mean {f.mean_error:.1%}, p95 {f.p95_error:.1%}, max {f.max_error:.1%}; "
            f"{f.points} points"
        )
    table = Table(title="predicted times", title_justify="left")
    for column in ("phase", "batch", "length", "ms"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase, sizes in _SIZES.items():
        for batch, length in sizes:
            ms = _seconds(profile, phase, batch, length) * 1e3
            table.add_row(phase.value, str(batch), str(length), f"{ms:.4g}")
    console.print(table)
    return 0


def _origin(profile: Profile) -> str:
    """Source of a profile in a word or two."""
    source = profile.source
    if source is None:
        return "not stated"
    return source.kind if source.measured else f"{source.kind}, unmeasured"


def _list(paths: Sequence[Path], as_json: bool) -> int:
    """Profiles of folders with what each rests on."""
    files = [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    if not files:
        raise InputError(f"list: expected profiles in {', '.join(map(str, paths))}, got none")
    rows = []
    for file in files:
        profile = load_profile(file)
        source, hardware, engine = profile.source, profile.hardware, profile.engine
        all_reduce = hardware.all_reduce_bytes_s if hardware else None
        rows.append(
            {
                "file": str(file),
                "gpu": hardware.gpu if hardware else None,
                "model": profile.model.name if profile.model else None,
                "tensor_parallel_size": engine.tensor_parallel_size,
                "origin": _origin(profile),
                "basis": source.basis if source else None,
                "all_reduce_bytes_s": all_reduce,
                "measured": source.measured if source else None,
                "engine": " ".join(filter(None, (engine.name, engine.version))),
                "mean_error": profile.fit.mean_error if profile.fit else None,
                "licence": source.licence if source else None,
            }
        )
    if as_json:
        print(json.dumps({"profiles": rows}))
        return 0
    table = Table()
    table.add_column("file", no_wrap=True)
    for column in ("basis", "engine", "mean error", "all-reduce", "licence"):
        table.add_column(column, justify="right" if column in ("mean error", "all-reduce") else "left")
    for row in rows:
        error = row["mean_error"]
        cells = [Path(str(row["file"])).name, row["basis"], row["engine"]]
        cells += [None if error is None else f"{error:.1%}"]
        cells += [
            None if not (rate := row["all_reduce_bytes_s"]) else f"{float(rate) / 1e9:.1f} GB/s",
            row["licence"],
        ]
        table.add_row(*("-" if cell is None else str(cell) for cell in cells))
    Console().print(table)
    return 0


def _differences(a: Profile, b: Profile) -> list[str]:
    """Respects in which two profiles are of different things, where both say."""
    facts = [
        ("models", a.model and a.model.name, b.model and b.model.name),
        ("GPUs", a.hardware and a.hardware.gpu, b.hardware and b.hardware.gpu),
        ("degrees", a.engine.tensor_parallel_size, b.engine.tensor_parallel_size),
        ("versions", a.engine.version, b.engine.version),
    ]
    return [f"{what}: {one} and {other}" for what, one, other in facts if one and other and one != other]


def _compare(a: Profile, b: Profile, as_json: bool) -> int:
    """Times of two profiles side by side, and what the second takes of the first by phase."""
    rows = [
        (phase, batch, length, _seconds(a, phase, batch, length), _seconds(b, phase, batch, length))
        for phase, sizes in _SIZES.items()
        for batch, length in sizes
    ]
    ratios = {phase.value: [b_s / a_s for each, _, _, a_s, b_s in rows if each is phase] for phase in _SIZES}
    for difference in _differences(a, b):
        print(f"warning: different {difference}", file=sys.stderr)
    summary = {
        phase: {"mean_ratio": geometric_mean(each), "least_ratio": min(each), "most_ratio": max(each)}
        for phase, each in ratios.items()
    }
    if as_json:
        points = [
            {"phase": phase.value, "batch": batch, "length": length, "a_s": a_s, "b_s": b_s}
            for phase, batch, length, a_s, b_s in rows
        ]
        sources = {"a_origin": _origin(a), "b_origin": _origin(b)}
        print(json.dumps({"a": a.name, "b": b.name, **sources, "points": points, "summary": summary}))
        return 0
    table = Table(title=f"A = {a.name} ({_origin(a)}), B = {b.name} ({_origin(b)})", title_justify="left")
    for column in ("phase", "batch", "length", "A ms", "B ms", "faster"):
        table.add_column(column, justify="left" if column in ("phase", "faster") else "right")
    for phase, batch, length, a_s, b_s in rows:
        faster = f"A {b_s / a_s:.2f}x" if a_s < b_s else f"B {a_s / b_s:.2f}x"
        sizes = (phase.value, str(batch), str(length))
        table.add_row(*sizes, f"{a_s * 1e3:.4g}", f"{b_s * 1e3:.4g}", faster if a_s != b_s else "equal")
    console = Console()
    console.print(table)
    for name, each in summary.items():
        console.print(
            f"{name}: B takes {each['mean_ratio']:.2f} x the time of A in the mean "
            f"({each['least_ratio']:.2f} to {each['most_ratio']:.2f})",
            soft_wrap=True,
        )
    return 0
