"""`hetlb profile --url`: a sweep over a live server that can be resumed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from hetlb.balancer.config.profile_file import EngineInfo, Hardware, HostTime, ModelInfo, ProfileSource
from hetlb.balancer.core.types import Capacity
from hetlb.cli.flags import COUNT, declare
from hetlb.errors import HetlbError, InputError, ProfileError, visible
from hetlb.inputs.urls import check_url
from hetlb.inputs.yaml_file import PositiveInt, load_yaml
from hetlb.tools.profiler.client import EngineClient, ServerFacts
from hetlb.tools.profiler.fit import too_few
from hetlb.tools.profiler.grid import DEFAULT_GRID, Size, StepKind, clip
from hetlb.tools.profiler.sample_file import Identity, SampleFile
from hetlb.tools.profiler.sources import Measurements
from hetlb.tools.profiler.sweep import REPEATS, BusyError, Sweep, learn_max_num_seqs, settled
from hetlb.tools.tables import Console, bar

#: Seconds of the budget reserved for the fit and the plot.
_FINISH_S = 5.0
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class _GridFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File of `--grid`: rows of batch and length per phase; mixed rows begin with prompt tokens."""

    prefill: tuple[tuple[PositiveInt, PositiveInt], ...]
    decode: tuple[tuple[PositiveInt, PositiveInt], ...]
    mixed: tuple[tuple[PositiveInt, PositiveInt, PositiveInt], ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a live sweep."""
    add = declare(parser.add_argument_group("a live server"))
    add("--url", "vLLM server to measure, without other load", "URL")
    add("--budget", "time for the measurement (default 5m)", "TIME", parse_duration, 300.0)
    add("--grid", "YAML file of points: rows of [batch, length] per phase", "FILE", Path)
    add("--repeats", "samples of a point (default 3)", "N", COUNT, REPEATS)
    add("--force", "measure a server that has other load", action="store_true")


def measure(args: argparse.Namespace, degree: int | None) -> tuple[Measurements, SampleFile]:
    """Run or resume the sweep; returns its measurements and the file of its samples."""
    args.url = check_url(args.url, "--url")
    grid = DEFAULT_GRID if args.grid is None else read_grid(args.grid)
    return asyncio.run(_measure(args, degree, grid))


def parse_duration(text: str) -> float:
    """Return `90`, `90s`, `5m`, `1.5h` in seconds. Raises `InputError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or float(match[1]) <= 0:
        raise InputError(f"--budget: expected a time such as 90s or 5m, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def read_grid(path: Path) -> tuple[Size, ...]:
    """Read the points of a grid file. Raises `ProfileError`."""
    table = load_yaml(path, _GridFile, ProfileError)
    for phase in (StepKind.PREFILL, StepKind.DECODE):
        if wrong := too_few(getattr(table, phase.value)):
            raise ProfileError(f"{path}: {phase}: {wrong}")
    pure = ((StepKind.PREFILL, table.prefill), (StepKind.DECODE, table.decode))
    return (
        *(Size(phase, batch, length) for phase, rows in pure for batch, length in rows),
        *(Size(StepKind.MIXED, batch, length, prompt) for prompt, batch, length in table.mixed),
    )


async def _measure(
    args: argparse.Namespace, degree: int | None, grid: tuple[Size, ...]
) -> tuple[Measurements, SampleFile]:
    started, budget_s = time.monotonic(), args.budget
    rng = random.Random()  # prompts that no earlier sweep left in a prefix cache
    console = Console(stderr=True)
    async with EngineClient(args.url, os.environ.get("OPENAI_API_KEY")) as client:
        facts = await _facts(args, client, rng, console)
        capacity = facts.capacity
        identity = Identity(
            facts.model,
            facts.version,
            capacity.kv_cache_tokens,
            capacity.max_model_len,
            capacity.max_num_seqs,
        )
        file = SampleFile(args.out.with_name(args.out.name + ".samples"), identity)
        if file.samples:
            console.print(f"{file.path}: going on after {len(file.samples)} samples", highlight=False)
        with bar("warming up") as draw:
            sweep = Sweep(
                client,
                facts,
                clip(grid, capacity, fill=args.grid is None),
                file,
                budget_s=budget_s - (time.monotonic() - started) - min(_FINISH_S, 0.05 * budget_s),
                repeats=args.repeats,
                force=args.force,
                max_num_batched_tokens=args.facts.file.engine.max_num_batched_tokens,
                rng=rng,
                on_progress=draw,
            )
            before = await client.counters() if facts.counts else None
            with _kept(file):
                measured = await sweep.run()
                lone = await sweep.lone_requests()
                after = await client.counters() if facts.counts else None
    for note in measured.given_up:
        console.print(f"note: {note}", style="yellow", highlight=False)
    tokens = None if after is None or before is None else after.tokens_per_step(before)
    found = Measurements(
        points=tuple(
            # Seconds of a step, not of a token.
            replace(each, seconds=(tokens or 1.0) * each.seconds) if each.phase is StepKind.DECODE else each
            for each in measured.points
        ),
        source=ProfileSource(kind="live", name=args.url),
        engine=_engine(facts, degree, measured.max_num_batched_tokens, tokens),
        hardware=Hardware(gpu=args.system, gpus=degree or 1) if args.system else None,
        model=ModelInfo(name=facts.model),
        host=HostTime(),
        tile=None,
        lone=tuple(lone),
        assumed=() if args.facts.file.engine.tokens_per_step is not None else _assumed(tokens),
        where=str(file.path),
    )
    return found, file


def _engine(facts: ServerFacts, degree: int | None, batched: int | None, tokens: float | None) -> EngineInfo:
    """Return the engine of a profile: `batched` tokens of an iteration, `tokens` of a decode step."""
    capacity = facts.capacity
    return EngineInfo(
        version=facts.version,
        tensor_parallel_size=degree,
        kv_cache_tokens=capacity.kv_cache_tokens,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=batched,
        max_model_len=capacity.max_model_len,
        enable_prefix_caching=facts.prefix_cache if facts.counts else None,
        tokens_per_step=tokens,
    )


def _assumed(tokens: float | None) -> tuple[str, ...]:
    """Return the assumption on the tokens of a decode step, if they were counted."""
    if tokens is None:
        return ()
    made = f"engine.tokens_per_step: {tokens:.2f}, as with the made prompts of the sweep"
    return (f"{made}; in --facts it states the figure of your traffic",)


async def _facts(
    args: argparse.Namespace, client: EngineClient, rng: random.Random, console: Console
) -> ServerFacts:
    """Return the facts of the server, completed by flags and by probing. Raises `BusyError`."""
    facts = await client.facts(args.model)
    if not facts.counts:
        unseen = "warning: the server has no metrics: others' work and preemptions go unseen"
        console.print(unseen, style="yellow")
    elif not args.force and not await settled(client, facts):
        raise BusyError("the server is busy with the work of others (--force measures all the same)")
    stated = args.facts.file.engine
    capacity = facts.capacity.updated(
        Capacity(kv_cache_tokens=stated.kv_cache_tokens, max_num_seqs=stated.max_num_seqs)
    )
    if capacity.max_num_seqs is None:
        learnt = await learn_max_num_seqs(client, facts, rng)
        capacity = capacity.updated(Capacity(max_num_seqs=learnt))
    return replace(facts, capacity=capacity)


@contextlib.contextmanager
def _kept(file: SampleFile) -> Iterator[None]:
    """Close the sample file if the sweep ends early, and say that its samples are kept."""
    try:
        yield
    except (HetlbError, asyncio.CancelledError) as stopped:
        kept = f"{len(file.samples)} samples are kept in {file.path}; the same command goes on"
        file.close()
        if isinstance(stopped, asyncio.CancelledError):
            print(visible(f"hetlb profile: interrupted; {kept}"), file=sys.stderr)
            raise
        raise type(stopped)(f"{stopped}; {kept}") from stopped
