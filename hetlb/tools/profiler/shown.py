"""Latency profiles as documents and tables: one shown, two compared, several listed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import msgspec
from rich.table import Table

from hetlb.balancer.config.gpus import GPUS
from hetlb.balancer.config.profile_file import HostTime, Profile, load_profile
from hetlb.errors import InputError, visible
from hetlb.tools.plots import line_style, new_figure, save_figure, tidy
from hetlb.tools.profiler.fit import FitResult, seconds_of
from hetlb.tools.profiler.grid import Point, StepKind
from hetlb.tools.tables import Console, table

#: Prompt tokens of the mixed steps shown and compared.
_MIXED_PROMPT_TOKENS = 512
#: Kind of step, batch and length of the times shown and compared.
_SIZES = (
    *((StepKind.PREFILL, batch, length) for batch in (1, 4, 16) for length in (128, 1024, 4096)),
    *((StepKind.DECODE, batch, length) for batch in (1, 16, 128) for length in (256, 1024, 4096)),
    *((StepKind.MIXED, batch, 1024) for batch in (1, 16, 128)),
)


def errors_table(profile: Profile) -> Table:
    """Return the held-out errors of each phase, in the form that was taken and in the paper's."""
    rows = []
    for phase in ("prefill", "prefill_paper", "decode", "decode_paper", "mixed"):
        if (error := getattr(profile.fit, phase, None)) is not None:
            worst = ", ".join(f"{key} {size}" for key, size in (error.worst or {}).items()) or "-"
            figures = (f"{x:.1%}" for x in (error.mean_error, error.p95_error, error.max_error))
            sure = "-" if error.uncertainty is None else f"{error.uncertainty:.1%}"
            rows.append((phase.partition("_")[0], error.form, *figures, str(error.points), worst, sure))
    columns = ("phase", "form", ">mean", ">p95", ">max", ">points", ">worst at", ">±")
    found = table(profile.name, columns, rows)
    found.caption = "relative errors on points held out of the fit; ±: the largest standard error of a point"
    return found


def print_profile(profile: Profile) -> None:
    console = Console(highlight=False)
    console.print(visible(profile.name), style="bold")
    for key in ("hardware", "model", "engine", "source"):
        if (part := getattr(profile, key)) is not None:
            values = {k: v for k, v in msgspec.to_builtins(part).items() if v is not None}
            console.print(f"{key}: " + ", ".join(f"{k} {v}" for k, v in values.items()))
    if profile.source is not None and not profile.source.measured:
        console.print("unmeasured: an estimate that no hardware has confirmed", style="bold yellow")
    for line in (*(f"assumed: {each}" for each in profile.assumed), *(f"lacks {x}" for x in profile.lacks)):
        console.print(line)
    for section in (profile.prefill, profile.decode):
        console.print("  ".join(f"{k} = {v:.4g}" for k, v in msgspec.to_builtins(section).items()))
    if (fit := profile.fit) is not None:
        figures = f"mean {fit.mean_error:.1%}, p95 {fit.p95_error:.1%}, max {fit.max_error:.1%}"
        whole = f"errors: {figures}; {fit.points} points"
        console.print(errors_table(profile) if fit.prefill is not None else whole)
    times = [
        (kind.value, str(b), str(n), f"{1e3 * _seconds(profile, kind, b, n):.4g}") for kind, b, n in _SIZES
    ]
    console.print(table("predicted times", ("phase", ">batch", ">length", ">ms"), times))


def _seconds(profile: Profile, kind: StepKind, batch: int, length: int) -> float:
    latency, prompt = profile.latency, _MIXED_PROMPT_TOKENS
    if kind is StepKind.PREFILL:
        return latency.prefill_s(length, batch)
    if kind is StepKind.DECODE:
        return latency.step_s(batch, batch * length)
    return latency.mixed_step_s(prompt, 1.0, prompt, batch, batch * length)


def _origin(profile: Profile) -> str:
    """Return the source of a profile in a word or two."""
    source = profile.source
    if source is None:
        return "not stated"
    return source.kind if source.measured else f"{source.kind}, unmeasured"


# --- several ----------------------------------------------------------------------------------------------


def listing(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each profile of files and folders. Raises `InputError` if there is none."""
    files = [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    if not files:
        raise InputError(f"list: expected profiles in {', '.join(map(str, paths))}, got none")
    rows = []
    for file in files:
        profile = load_profile(file)
        source, hardware, engine = profile.source, profile.hardware, profile.engine
        rows.append(
            {
                "file": str(file),
                "gpu": hardware and hardware.gpu,
                "model": profile.model and profile.model.name,
                "tensor_parallel_size": engine.tensor_parallel_size,
                "origin": _origin(profile),
                "basis": source and source.basis,
                "all_reduce_bytes_s": hardware and hardware.all_reduce_bytes_s,
                "measured": source and source.measured,
                "engine": " ".join(filter(None, (engine.name, engine.version))),
                "mean_error": profile.fit and profile.fit.mean_error,
                "licence": source and source.licence,
            }
        )
    return rows


def listing_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = [
        (
            Path(row["file"]).name,
            row["basis"] or "-",
            row["engine"] or "-",
            "-" if row["mean_error"] is None else f"{row['mean_error']:.1%}",
            f"{rate / 1e9:.1f} GB/s" if (rate := row["all_reduce_bytes_s"]) else "-",
            row["licence"] or "-",
        )
        for row in rows
    ]
    found = table(None, ("file", "basis", "engine", ">mean error", ">all-reduce", "licence"), cells)
    found.columns[0].no_wrap = True
    return found


def gpu_table() -> Table:
    """Return the table of GPUs: peaks of data sheets, and the shares that kernels reach."""
    cells = [
        (
            each.name,
            *(
                f"{flops / 1e12:.0f}" if flops else "-"
                for flops in (each.bf16_flops, each.fp8_flops, each.fp4_flops)
            ),
            f"{each.bandwidth_bytes_s / 1e9:.0f}",
            f"{each.memory_bytes / (1 << 30):.0f}",
            f"{each.all_reduce_bytes_s / 1e9:g}",
            "/".join(f"{100 * share:.0f}" for share in each.shares),
            "tables" if each.measured else "usual",
        )
        for each in GPUS.values()
    ]
    title = "Dense TFLOP/s by weight format, GB/s of memory and link, % reached of products/attention/memory"
    columns = ("GPU", ">bf16", ">fp8", ">fp4", ">GB/s", ">GiB", ">link", "%", "by")
    return table(title, columns, cells)


# --- two --------------------------------------------------------------------------------------------------


def differences(a: Profile, b: Profile) -> list[str]:
    """Return the differing facts of two profiles (GPU, model, ...), if both state them."""
    facts = [
        ("models", a.model and a.model.name, b.model and b.model.name),
        ("GPUs", a.hardware and a.hardware.gpu, b.hardware and b.hardware.gpu),
        ("degrees", a.engine.tensor_parallel_size, b.engine.tensor_parallel_size),
        ("versions", a.engine.version, b.engine.version),
    ]
    return [f"{what}: {one} and {other}" for what, one, other in facts if one and other and one != other]


def comparison(a: Profile, b: Profile) -> dict[str, Any]:
    """Return times of two profiles side by side, and what the second takes of the first by phase."""
    points = [
        {"phase": kind.value, "batch": batch, "length": length,
         "a_s": _seconds(a, kind, batch, length), "b_s": _seconds(b, kind, batch, length)}
        for kind, batch, length in _SIZES
    ]  # fmt: skip
    summary = {}
    for kind in StepKind:
        ratios = [each["b_s"] / each["a_s"] for each in points if each["phase"] == kind.value]  # type: ignore[operator]
        summary[kind.value] = {
            "mean_ratio": geometric_mean(ratios), "least_ratio": min(ratios), "most_ratio": max(ratios),
        }  # fmt: skip
    origins = {"a_origin": _origin(a), "b_origin": _origin(b)}
    host = {
        f"{name}_host": msgspec.to_builtins(each.host or HostTime()) for name, each in (("a", a), ("b", b))
    }
    return {"a": a.name, "b": b.name, **origins, "points": points, "summary": summary, **host}


def print_comparison(found: Mapping[str, Any]) -> None:
    rows = []
    for each in found["points"]:
        a_s, b_s = each["a_s"], each["b_s"]
        faster = f"A {b_s / a_s:.2f}x" if a_s < b_s else f"B {a_s / b_s:.2f}x" if b_s < a_s else "equal"
        sizes = (each["phase"], str(each["batch"]), str(each["length"]))
        rows.append((*sizes, f"{a_s * 1e3:.4g}", f"{b_s * 1e3:.4g}", faster))
    title = f"A = {found['a']} ({found['a_origin']}), B = {found['b']} ({found['b_origin']})"
    console = Console()
    console.print(table(title, ("phase", ">batch", ">length", ">A ms", ">B ms", "faster"), rows))
    hosts = (
        f"{name} {1e3 * host['iteration_s']:.3g} ms an iteration, {1e3 * host['sequence_s']:.3g} a sequence, "
        f"{1e3 * host['request_s']:.3g} a request"
        for name, host in (("A", found["a_host"]), ("B", found["b_host"]))
    )
    console.print(f"host: {'; '.join(hosts)} (mixed steps have a prompt of {_MIXED_PROMPT_TOKENS} tokens)")
    for phase, each in found["summary"].items():
        console.print(
            f"{phase}: B takes {each['mean_ratio']:.2f} x the time of A in the mean "
            f"({each['least_ratio']:.2f} to {each['most_ratio']:.2f})",
            soft_wrap=True,
        )


def write_plot(
    path: Path,
    name: str,
    points: Sequence[Point],
    result: FitResult,
    max_num_batched_tokens: int | None = None,
) -> None:
    """Draw to `path`; its suffix is the format. Raises `InputError`.

    `max_num_batched_tokens` is where the engine splits a prefill into several passes (None: nowhere).
    """
    figure = new_figure(11, 7)
    axes = figure.subplots(2, 2, height_ratios=(3, 1.3), sharex="col")
    phases = ((StepKind.PREFILL, "prompt tokens"), (StepKind.DECODE, "cached tokens"))
    for column, (phase, tokens) in enumerate(phases):
        fitted, top, bottom = result.forms[phase], axes[0][column], axes[1][column]
        of_phase = [p for p in points if p.phase is phase]
        measured = sorted({p.length for p in of_phase})
        low, high = measured[0], measured[-1]
        lengths = [low * (high / low) ** (step / 60) for step in range(61)]
        for index, batch in enumerate(sorted({p.batch for p in of_phase})):
            look = line_style(index)
            group = [p for p in of_phase if p.batch == batch]
            at = [p.length for p in group]
            passes = [_passes(phase, batch * n, max_num_batched_tokens) for n in lengths]
            curve = [seconds_of(fitted, batch, n, k) * 1e3 for n, k in zip(lengths, passes, strict=True)]
            top.plot(lengths, curve, **look)
            seconds = [p.seconds * 1e3 for p in group]
            top.plot(at, seconds, "o", color=look["color"], markersize=4.5, label=f"batch {batch}")
            residuals = [100 * (seconds_of(fitted, batch, p.length, p.passes) / p.seconds - 1) for p in group]
            bottom.plot(at, residuals, "o-", color=look["color"], markersize=3, linewidth=0.7)
        of = result.reports[phase]
        figures = f"mean {of.mean_error:.1%}, p95 {of.p95_error:.1%}, max {of.max_error:.1%}"
        top.set_title(f"{phase} ({of.form}): held-out error {figures}", fontsize=10)
        top.set(xscale="log", yscale="log", ylabel="ms" if column == 0 else "ms a step")
        top.legend(fontsize=7, ncols=3, loc="upper left")
        bottom.set(ylabel="fitted / measured - 1, %", xlabel=tokens)
        bottom.axhline(0, color="0.4", linewidth=0.8)
        bottom.set_xticks(measured, [str(n) for n in measured])
        bottom.minorticks_off()
        tidy(top)
        tidy(bottom)
    figure.suptitle(f"{name}: points measured, lines fitted")
    save_figure(figure, path)


def _passes(phase: StepKind, tokens: float, max_num_batched_tokens: int | None) -> int:
    if phase is StepKind.DECODE or max_num_batched_tokens is None:
        return 1
    return math.ceil(tokens / max_num_batched_tokens)
