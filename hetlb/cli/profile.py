"""`hetlb profile`: creates latency profiles, shows, compares and lists them."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hetlb.balancer.config.gpus import GPUS, gpu_named
from hetlb.balancer.config.profile_file import (
    EngineInfo,
    Hardware,
    HostTime,
    Profile,
    ProfileSource,
    load_profile,
)
from hetlb.balancer.config.profile_writer import with_host, write_profile
from hetlb.balancer.core.latency import LatencyModel
from hetlb.cli import profile_live
from hetlb.cli.flags import add_json, declare, print_document
from hetlb.errors import ConfigError, InputError, TraceError, visible
from hetlb.inputs.urls import check_url
from hetlb.inputs.yaml_file import load_yaml
from hetlb.tools.models.degrees import refused_degree
from hetlb.tools.models.model_file import load_facts, model_info
from hetlb.tools.plan.common.composition import roofline_of
from hetlb.tools.plan.common.plan_tables import Model, PlanModelTable, RooflineTable, read_model
from hetlb.tools.plots import picture_path
from hetlb.tools.profiler import shown
from hetlb.tools.profiler.aiconfigurator import Layout, query
from hetlb.tools.profiler.client import EngineClient
from hetlb.tools.profiler.shown import write_plot
from hetlb.tools.profiler.sources import (
    Measurements,
    assumed_launch,
    corrected,
    data_sheet,
    profile_of,
    read_csv,
)
from hetlb.tools.profiler.sweep import probe_host
from hetlb.tools.sim.against import errors, fit_corrections, reach, replay, varies_enough
from hetlb.tools.sim.study import engine_of
from hetlb.tools.tables import Console
from hetlb.tools.workload.measured_logs import read_log

_SOURCES = "csv:FILE, log:FILE, aiconfigurator or roofline"


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
    facts = "what the source does not know: hardware, model, engine, host, roofline"
    add("--facts", facts, "FACTS.yaml", Path)
    add("--system", "GPU; selects the rows of a CSV")
    add("--model", "model; selects the rows of a CSV, or one of several served")
    add("--tp", "tensor-parallel degree (aiconfigurator, --gpu: several, 1,2,4,8)", "N")
    add("--gpu", "GPU by name, for --from roofline; --gpus lists them", "NAME")
    add("--gpus", "print the table of GPUs", action="store_true")
    add("--config", "the model's config.json, for --from roofline --gpu", "CONFIG.json", Path)
    add("--plot", "picture of measured and fitted times", "P.png", picture_path)
    profile_live.add_arguments(parser)
    add = declare(parser.add_argument_group("without a server"))
    add("--start", "profile to correct by a log", "P.yaml", Path)
    add("--probe", "idle server; its host time is measured for points without one (10 s)", "URL")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.gpus:
        gpus = [asdict(each) for each in GPUS.values()]
        return print_document(args, {"gpus": gpus}, lambda: Console().print(shown.gpu_table()))
    if args.verb is not None:
        return _about_files(args)
    if (args.gpu is None) != (args.config is None) or (args.gpu and args.source != "roofline"):
        raise InputError("--gpu: expected --from roofline --gpu NAME --config CONFIG.json")
    if (args.source is None) == (args.url is None) or args.out is None:
        raise InputError("expected one of --url and --from with --out P.yaml, or show or compare")
    if args.probe is not None and (args.source or "log:").partition(":")[0] not in ("csv", "aiconfigurator"):
        raise InputError(
            "--probe: expected --from csv:FILE or aiconfigurator: their points hold no host time"
        )
    degrees, args.facts = _degrees(args), read_facts_file(args.facts)
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
        rows = {"system": args.system, "model": args.model, "tp": degrees[0]}
        written = [_finish(args, args.out, read_csv(Path(file), **rows))]
    elif args.source == "roofline" and args.gpu is None:
        written = [_finish(args, args.out, args.facts.estimate(degrees[0] or 1, args.system))]
    elif args.source in ("aiconfigurator", "roofline"):
        several = len(degrees) > 1
        outs = [args.out.with_stem(f"{args.out.stem}-tp{n}") if several else args.out for n in degrees]
        pairs = zip(outs, degrees, strict=True)
        points_of = _from_aiconfigurator if args.source == "aiconfigurator" else _from_data_sheet
        written = [_finish(args, out, points_of(args, degree or 1)) for out, degree in pairs]
    else:
        raise InputError(f"--from: expected {_SOURCES}, got {args.source!r}")
    return print_document(args, written[0] if len(written) == 1 else written, lambda: None)


def _about_files(args: argparse.Namespace) -> int:
    needed = {"show": 1, "compare": 2}.get(args.verb, len(args.files) or 1)
    if len(args.files) != needed or args.source or args.url or args.out:
        files = "one profile file" if needed == 1 else "two profile files"
        what = "folders or profile files" if args.verb == "list" else files
        raise InputError(f"{args.verb}: expected {what} and no --url, --from or --out")
    if args.verb == "list":
        rows = shown.listing(args.files)
        return print_document(args, {"profiles": rows}, lambda: Console().print(shown.listing_table(rows)))
    profiles = [load_profile(path) for path in args.files]
    if args.verb == "show":
        document = msgspec.to_builtins(profiles[0])
        return print_document(args, document, lambda: shown.print_profile(profiles[0]))
    for difference in shown.differences(*profiles):
        print(visible(f"warning: different {difference}"), file=sys.stderr)
    compared = shown.comparison(*profiles)
    return print_document(args, compared, lambda: shown.print_comparison(compared))


def _degrees(args: argparse.Namespace) -> list[int | None]:
    """Return the degrees of `--tp`; several only with aiconfigurator. Raises `InputError`."""
    if args.tp is None:
        return [None]
    parts = args.tp.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InputError(f"--tp: expected a whole number from 1, got {args.tp!r}")
    if len(parts) > 1 and args.source != "aiconfigurator" and args.gpu is None:
        raise InputError(f"--tp: expected one degree, got {args.tp} (several: --from aiconfigurator, --gpu)")
    return [int(part) for part in parts]


def _finish(args: argparse.Namespace, out: Path, source: Measurements) -> dict[str, Any]:
    """Fit, plot, write and report one profile; returns its entry for `--json`."""
    facts: Facts = args.facts
    found = facts.completed(source)
    if args.probe is not None and found.host is not None:
        raise InputError("--probe: expected points without host time (csv, aiconfigurator)")
    profile, result = profile_of(found, name=facts.file.name, stated_host=facts.file.host)
    if args.probe is not None:
        profile = _probed(args, profile)
    for warning in result.warnings:
        print(visible(f"warning: {warning}"), file=sys.stderr)
    if args.plot is not None:
        plot = args.plot if out == args.out else args.plot.with_stem(out.stem)
        write_plot(plot, profile.name, found.points, result, profile.engine.max_num_batched_tokens)
    write_profile(out, profile)
    if not args.json:
        console = Console()
        console.print(shown.errors_table(profile))
        for line in profile.assumed:
            console.print(f"assumed {line}", highlight=False)
        console.print(f"written to {out}", highlight=False)
    return {"out": str(out), "profile": msgspec.to_builtins(profile), "warnings": list(result.warnings)}


def _probed(args: argparse.Namespace, profile: Profile) -> Profile:
    """Return a profile with the host time of the server of `--probe`."""
    url = check_url(args.probe, "--probe")

    async def probe() -> LatencyModel:
        async with EngineClient(url, os.environ.get("OPENAI_API_KEY")) as client:
            return await probe_host(client, await client.facts(None), profile.latency, random.Random())

    return with_host(profile, asyncio.run(probe()))


def _from_data_sheet(args: argparse.Namespace, degree: int) -> Measurements:
    """Return the estimate for a GPU of the table. Raises `ConfigError`, `InputError`."""
    facts = load_facts(args.config, args.model)
    if why := "" if facts.shape is None else refused_degree(facts.shape, degree):
        raise InputError(f"--tp: expected a degree that vLLM takes, got {degree}: {why}")
    found = data_sheet(gpu_named(args.gpu, "--gpu"), facts, degree)
    if found.engine.kv_cache_tokens is None:
        print(f"warning: {facts.name} does not fit {degree} {args.gpu}", file=sys.stderr)
    return found


def _from_aiconfigurator(args: argparse.Namespace, degree: int) -> Measurements:
    for flag in ("system", "model"):
        if getattr(args, flag) is None:
            raise InputError(f"--{flag}: expected a name with --from aiconfigurator, got none")
    stated = args.facts.file.engine
    layout = Layout(degree, stated.data_parallel_size or 1, bool(stated.enable_expert_parallel))
    limits = {name: getattr(stated, name) for name in ("max_num_batched_tokens", "max_num_seqs")}
    found = query(args.model, args.system, layout, **limits)
    if found.engine.kv_cache_tokens is None and stated.kv_cache_tokens is None:
        why = next(
            (line for line in found.assumed if line.startswith("no KV cache")), "the model does not fit"
        )
        print(visible(f"warning: --tp {degree}: {why}; no KV cache is stated"), file=sys.stderr)
    return found


# --- a profile corrected by a log ------------------------------------------------------------------------


def write_corrected(args: argparse.Namespace, path: Path) -> int:
    """Correct the profile `--start` by a log and write it. Raises `TraceError` if the log is too poor."""
    if args.start is None:
        raise InputError("--start: expected the profile that is to be corrected (--from log:), got none")
    if args.facts.file != FactsFile(name=args.facts.file.name):
        raise InputError("--facts: expected `name` alone with --from log:FILE, as --start has the rest")
    start = load_profile(args.start)
    log = read_log(path)
    instances = sorted({each.instance for each in log.requests})
    if len(instances) > 1:
        raise TraceError(f"{path}: expected the log of one server, got {', '.join(instances)}")
    engine = engine_of(start)
    try:
        before = replay(log.requests, engine)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    if reason := varies_enough(before):
        raise TraceError(
            f"{path}: expected arrivals that vary (as at 2, 8 and 20 requests/s): {reason}, "
            "so prefill, mixed and decode steps cannot be told apart"
        )
    found = fit_corrections(log.requests, engine)
    tested = reach(log.requests, engine, found)
    test = (
        f"corrected by its quieter half, {tested.metric.upper()} of the busier half is off by "
        f"{100 * tested.after:+.1f} % (before {100 * tested.before:+.1f} %)"
    )
    if tested.harms:
        raise TraceError(
            f"{path}: expected a log that tells the parts of the model apart: {test}, so a correction would "
            "do harm at other loads; a log with more varied load may tell (2, 8 and 20 requests/s, say)"
        )
    latency = found.applied(engine.latency)
    after = replay(log.requests, replace(engine, latency=latency))
    holds = (
        f"holds up to {tested.sequences} sequences at once, {tested.times:g} times the log's rate"
        if tested.times
        else "holds at the log's own load alone: mixed steps of another form fit it as well"
    )
    parts = found.described()
    note = f"{start.name} corrected by {len(log.requests)} requests: {', '.join(parts)}; {holds}; {test}"
    old, new = errors(log.requests, before.requests), errors(log.requests, after.requests)
    changes = {name: (old[name].error, new[name].error) for name in old}
    told = [
        f"{name}: error of the mean {100 * was:+.1f} % before, {100 * now:+.1f} % after"
        for name, (was, now) in changes.items()
    ]
    profile = corrected(start, latency, ProfileSource(kind="log", name=path.name, note=note))
    if name := args.facts.file.name:
        profile = msgspec.structs.replace(profile, name=name)
    write_profile(args.out, profile)
    document = {
        "out": str(args.out),
        "profile": msgspec.to_builtins(profile),
        "errors": changes,
        "tested": {**asdict(tested), "corrections": asdict(found)},
        "warnings": [],
    }
    lines = [*parts, holds, test, *told, f"written to {args.out}"]
    return print_document(args, document, lambda: print("\n".join(lines)))


_Table = TypeVar("_Table", bound=msgspec.Struct)


class FactsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file of `--facts` as written. `host` is for points without a host time.

    `model` and `roofline` are as in a plan.
    """

    name: str | None = None
    licence: str | None = None
    hardware: Hardware | None = None
    model: PlanModelTable | None = None
    engine: EngineInfo = EngineInfo()
    host: HostTime | None = None
    roofline: RooflineTable | None = None


class Facts(msgspec.Struct, frozen=True):
    """Facts with the model of their `config.json`; `path` is None if no file was given."""

    path: Path | None = None
    file: FactsFile = FactsFile()
    model: Model | None = None

    @property
    def gpu(self) -> str | None:
        """Return the name of the GPU."""
        return None if self.file.hardware is None else self.file.hardware.gpu

    def completed(self, found: Measurements) -> Measurements:
        """Return the measurements, with stated facts in place of the source's.

        Raises `InputError` for facts of another source.
        """
        file, model = self.file, found.model
        if file.roofline is not None and found.source.kind != "roofline":
            raise InputError(f"{self.path}: roofline: expected --from roofline with it")
        if file.host is not None and found.host is not None:
            raise InputError(f"{self.path}: host: expected none, as these points hold the host's time")
        launch = found.launch
        if self.model is not None:
            named = self.model.name if model is None else model.name
            model = _over(model, model_info(self.model.known, named))
            if launch is None and self.model.facts is not None and found.host is None:
                launch = assumed_launch(self.model.facts, found.engine.tensor_parallel_size or 1)
        source = found.source
        if file.licence is not None:
            source = msgspec.structs.replace(source, licence=file.licence)
        hardware, engine = _over(found.hardware, file.hardware), _over(found.engine, file.engine)
        assert engine is not None
        return replace(found, source=source, hardware=hardware, model=model, engine=engine, launch=launch)

    def estimate(self, degree: int, gpu: str | None) -> Measurements:
        """Return the roofline's points at a degree. Raises `InputError` without the tables for it."""
        table = self.file.roofline
        if table is None or self.model is None or self.path is None:
            raise InputError("--facts: expected a file with `roofline:` and `model:` for --from roofline")
        shape = self.model.shape
        if why := "" if shape is None else refused_degree(shape, degree):
            raise InputError(f"--tp: expected a degree that vLLM takes, got {degree}: {why}")
        gpu = gpu or self.gpu
        return roofline_of(table, self.model, gpu, degree).measurements(gpu)


def read_facts_file(path: Path | None) -> Facts:
    """Read the file of `--facts`. Raises `ConfigError`."""
    if path is None:
        return Facts()
    file = load_yaml(path, FactsFile, ConfigError)
    needed = ("parameters", "kv_bytes_per_token") if file.roofline is not None else ()
    model = None if file.model is None else read_model(file.model, path, "model", needed)
    return Facts(path, file, model)


def _over(known: _Table | None, stated: _Table | None) -> _Table | None:
    """Return a table with stated values in place of known ones; either may be missing."""
    if known is None or stated is None:
        return stated if known is None else known
    values = {field.name: getattr(stated, field.name) for field in msgspec.structs.fields(stated)}
    usual = {field.name: field.default for field in msgspec.structs.fields(stated)}
    return msgspec.structs.replace(
        known, **{name: value for name, value in values.items() if value != usual[name]}
    )
