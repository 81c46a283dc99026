"""`hetlb profile`: makes a latency profile from measured points, shows one, compares two.

Promise: the file is written only when the fit succeeded, whole or not at all; a fit past 10 % mean or
30 % largest held-out error is warned of on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from hetlb.config import EngineInfo, Hardware, ModelInfo, Profile, Source, load_profile
from hetlb.errors import InputError, ProfileError
from hetlb.profiler.fit import FitResult, Form, Phase, Point, fit
from hetlb.profiler.plot import write_plot
from hetlb.profiler.sources import Roofline, make_profile, profile_text, read_csv

#: The sizes at which `show` and `compare` print times.
_SIZES = {
    Phase.PREFILL: [(b, n) for b in (1, 4, 16) for n in (128, 1024, 4096)],
    Phase.DECODE: [(b, n) for b in (1, 16, 128) for n in (256, 1024, 4096)],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb profile`, and its verbs `show` and `compare`."""
    parser.usage = (
        "hetlb profile --from csv:FILE|roofline --out P.yaml [flags]\n"
        "       hetlb profile show P.yaml | compare A.yaml B.yaml"
    )
    parser.add_argument("verb", nargs="?", choices=("show", "compare"), help="instead of making one")
    parser.add_argument("files", nargs="*", type=Path, metavar="P.yaml", help="what to show or compare")
    parser.add_argument("--from", dest="source", metavar="SOURCE", help="csv:FILE or roofline")
    parser.add_argument("--out", type=Path, metavar="P.yaml", help="where the profile goes")
    parser.add_argument("--name", help="the profile's name (default: system, model and degree)")
    parser.add_argument("--system", help="csv: the rows of this system; roofline: the GPU's name")
    parser.add_argument("--model", help="csv: the rows of this model; roofline: the model's name")
    parser.add_argument("--tp", type=int, metavar="N", help="tensor-parallel degree")
    parser.add_argument("--form", choices=tuple(Form), help="of prefill (default: by held-out error)")
    parser.add_argument("--weights", choices=("relative", "absolute"), default="relative")
    parser.add_argument("--plot", type=Path, metavar="P.png", help="measured against fitted")
    parser.add_argument("--licence", help="of the data, kept in the file")
    parser.add_argument("--attribution", help="whom the data is from, kept in the file")
    parser.add_argument("--kv-cache-tokens", type=int, metavar="N", help="capacity, kept in the file")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="capacity, kept in the file")
    parser.add_argument("--kv-bytes-per-token", type=int, metavar="N", help="of the model, over all GPUs")
    parser.add_argument("--memory-bytes", type=int, metavar="N", help="of one GPU")
    roofline = parser.add_argument_group("roofline (marked unmeasured)")
    roofline.add_argument("--peak-flops", type=float, metavar="F", help="FLOP/s of one GPU at this precision")
    roofline.add_argument("--bandwidth", type=float, metavar="B", help="memory bytes/s of one GPU")
    roofline.add_argument("--parameters", type=float, metavar="P", help="of the model")
    roofline.add_argument("--bytes-per-parameter", type=float, default=2.0, metavar="B")
    roofline.add_argument("--flops-efficiency", type=float, default=0.5, metavar="SHARE")
    roofline.add_argument("--bandwidth-efficiency", type=float, default=0.7, metavar="SHARE")
    roofline.add_argument("--overhead-ms", type=float, default=2.0, metavar="MS", help="of every step")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Make, show or compare."""
    if args.verb is not None:
        needed = 1 if args.verb == "show" else 2
        if len(args.files) != needed or args.source or args.out:
            raise InputError(f"{args.verb}: expected {needed} profile file(s) and no --from or --out")
        profiles = [load_profile(path) for path in args.files]
        if args.verb == "show":
            return _show(profiles[0], args.json)
        return _compare(profiles[0], profiles[1], args.json)
    if args.source is None or args.out is None:
        raise InputError("expected --from csv:FILE or --from roofline with --out P.yaml, or show or compare")
    for flag in ("tp", "kv_cache_tokens", "max_num_seqs", "kv_bytes_per_token", "memory_bytes"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise InputError(f"--{flag.replace('_', '-')}: expected a whole number from 1, got {value}")
    kind, _, file = args.source.partition(":")
    if kind == "csv" and file:
        profile, points, result = _from_csv(args, Path(file))
    elif args.source == "roofline":
        profile, points, result = _from_roofline(args)
    else:
        raise InputError(f"--from: expected csv:FILE or roofline, got {args.source!r}")
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.plot is not None:
        write_plot(args.plot, profile.name, points, result)
    _write_whole(args.out, profile_text(profile))
    if args.json:
        document = json.loads(msgspec.json.encode(profile))
        print(json.dumps({"out": str(args.out), "profile": document, "warnings": list(result.warnings)}))
    else:
        console = Console()
        console.print(_errors_table(profile))
        console.print(f"written to {args.out}", highlight=False)
    return 0


def _from_csv(args: argparse.Namespace, path: Path) -> tuple[Profile, tuple[Point, ...], FitResult]:
    chosen = read_csv(path, system=args.system, model=args.model, tp=args.tp)
    try:
        result = _fit(args, chosen.points)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
    degree = chosen.tensor_parallel_size or args.tp
    profile = make_profile(
        args.name or _default_name(chosen.system, chosen.model, degree) or path.stem,
        chosen.points,
        result,
        source=Source(
            kind="csv",
            name=path.name,
            system=chosen.system,
            licence=args.licence,
            attribution=args.attribution,
        ),
        **_descriptions(args, chosen.system, chosen.model, degree, chosen.backend, chosen.backend_version),
    )
    return profile, chosen.points, result


def _from_roofline(args: argparse.Namespace) -> tuple[Profile, tuple[Point, ...], FitResult]:
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
    if not (math.isfinite(args.overhead_ms) and args.overhead_ms >= 0):
        raise InputError(f"--overhead-ms: expected milliseconds from 0, got {args.overhead_ms}")
    degree = args.tp or 1
    roofline = Roofline(
        peak_flops=args.peak_flops,
        bandwidth_bytes_s=args.bandwidth,
        parameters=args.parameters,
        bytes_per_parameter=args.bytes_per_parameter,
        kv_bytes_per_token=args.kv_bytes_per_token,
        tensor_parallel_size=degree,
        flops_efficiency=args.flops_efficiency,
        bandwidth_efficiency=args.bandwidth_efficiency,
        step_overhead_s=args.overhead_ms / 1e3,
    )
    points = tuple(roofline.points())
    result = _fit(args, points)
    note = (
        f"estimated, not measured: {args.peak_flops:g} FLOP/s at {args.flops_efficiency:g}, "
        f"{args.bandwidth:g} bytes/s at {args.bandwidth_efficiency:g}, {args.overhead_ms:g} ms a step; "
        "the errors are of the fit to this estimate"
    )
    profile = make_profile(
        args.name or _default_name(args.system, args.model, degree) or "roofline",
        points,
        result,
        source=Source(kind="roofline", measured=False, system=args.system, note=note),
        **_descriptions(args, args.system, args.model, degree, None, None),
    )
    return profile, points, result


def _fit(args: argparse.Namespace, points: tuple[Point, ...]) -> FitResult:
    form = Form(args.form) if args.form is not None else None
    try:
        return fit(points, form=form, relative=args.weights == "relative")
    except (RuntimeError, ValueError) as error:
        raise ProfileError(f"expected points that a model can be fitted to: {error}") from error


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
        "model": ModelInfo(name=model, kv_bytes_per_token=args.kv_bytes_per_token) if model else None,
        "engine": EngineInfo(
            name=backend or "vllm",
            version=version,
            tensor_parallel_size=degree,
            kv_cache_tokens=args.kv_cache_tokens,
            max_num_seqs=args.max_num_seqs,
        ),
    }


def _write_whole(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ProfileError(f"{path}: expected a place to write to: {error.strerror}") from error


def _errors_table(profile: Profile) -> Table:
    table = Table(title=profile.name, title_justify="left")
    for column in ("phase", "form", "mean", "p95", "max", "points", "worst at"):
        table.add_column(column, justify="left" if column in ("phase", "form") else "right")
    report = profile.fit
    phases = () if report is None else ("prefill", "prefill_paper", "decode")
    for phase in phases:
        error = getattr(report, phase)
        if error is not None:
            worst = f"batch {error.worst['batch']}, length {error.worst['length']}" if error.worst else "-"
            figures = (f"{x:.1%}" for x in (error.mean_error, error.p95_error, error.max_error))
            table.add_row(phase.partition("_")[0], error.form, *figures, str(error.points), worst)
    table.caption = "relative errors on points held out of the fit"
    return table


def _seconds(profile: Profile, phase: Phase, batch: int, length: int) -> float:
    latency = profile.latency
    if phase is Phase.DECODE:
        return latency.decode_step_s(batch, length)
    if latency.better_prefill is not None:
        return latency.better_prefill.prefill_s(batch, length)
    return latency.prefill_s(batch, length)


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


def _compare(a: Profile, b: Profile, as_json: bool) -> int:
    rows = [
        {
            "phase": phase.value,
            "batch": batch,
            "length": length,
            "a_s": _seconds(a, phase, batch, length),
            "b_s": _seconds(b, phase, batch, length),
        }
        for phase, sizes in _SIZES.items()
        for batch, length in sizes
    ]
    if a.model and b.model and a.model.name != b.model.name:
        print(f"warning: different models: {a.model.name} and {b.model.name}", file=sys.stderr)
    if a.engine.version and b.engine.version and a.engine.version != b.engine.version:
        print(f"warning: different versions: {a.engine.version} and {b.engine.version}", file=sys.stderr)
    if as_json:
        print(json.dumps({"a": a.name, "b": b.name, "points": rows}))
        return 0
    table = Table(title=f"A = {a.name}, B = {b.name}", title_justify="left")
    for column in ("phase", "batch", "length", "A ms", "B ms", "faster"):
        table.add_column(column, justify="left" if column in ("phase", "faster") else "right")
    for row in rows:
        a_s, b_s = float(str(row["a_s"])), float(str(row["b_s"]))
        faster = f"A {b_s / a_s:.2f}x" if a_s < b_s else f"B {a_s / b_s:.2f}x"
        sizes = (str(row["phase"]), str(row["batch"]), str(row["length"]))
        table.add_row(*sizes, f"{a_s * 1e3:.4g}", f"{b_s * 1e3:.4g}", faster if a_s != b_s else "equal")
    Console().print(table)
    return 0
