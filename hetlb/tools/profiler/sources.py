"""Points without a live server: grids in CSV files, the roofline of a GPU; and profiles of points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec

from hetlb.balancer.config.engine_defaults import batch_limits
from hetlb.balancer.config.gpus import Gpu, wider
from hetlb.balancer.config.profile_file import (
    EngineInfo,
    FitReport,
    Hardware,
    HostTime,
    ModelInfo,
    Profile,
    ProfileSource,
    RawGrid,
    sections,
    with_latency,
)
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.step_times import LaunchTime, SplitKv
from hetlb.errors import ProfileError
from hetlb.tools.models.degrees import needs_whole_experts
from hetlb.tools.models.model_facts import ModelFacts
from hetlb.tools.models.model_file import model_info
from hetlb.tools.profiler.fit import MIXED_FACTOR, FitResult, assumed_mixed, fit
from hetlb.tools.profiler.grid import (
    DEFAULT_DECODE_GRID,
    DEFAULT_PREFILL_GRID,
    Point,
    StepKind,
    merge_repeats,
)
from hetlb.tools.workload.record_file import CsvRow, csv_rows

#: Share of a GPU's memory that vLLM takes by default.
MEMORY_SHARE = 0.9
#: Bytes of one value that GPUs send each other.
ACTIVATION_BYTES = 2
#: Tokens of a tile if no point shows it: the usual size of GPU kernels of matrix products.
ASSUMED_TILE_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Points, their source, and the engine, hardware and model if the source knows them.

    `host` is None if the points hold no host time. `tile` applies if the points show none. `lone` are prompt
    tokens and seconds of single requests. `split_blocks`: sequences that fill the GPU with one block per KV
    head, if contexts are split (`SplitKv`). `where` begins error messages. `name` is the profile's if nothing
    else names it.
    """

    points: tuple[Point, ...]
    source: ProfileSource
    engine: EngineInfo
    hardware: Hardware | None = None
    model: ModelInfo | None = None
    host: HostTime | None = None
    tile: int | None = ASSUMED_TILE_TOKENS
    lone: tuple[tuple[int, float], ...] = ()
    split_blocks: float | None = None
    launch: LaunchTime | None = None
    assumed: tuple[str, ...] = ()
    where: str = ""
    name: str = ""

    @property
    def gpu(self) -> str | None:
        return None if self.hardware is None else self.hardware.gpu

    @property
    def own_name(self) -> str:
        """Name of a profile of these points: GPU, model and degree."""
        degree = self.engine.tensor_parallel_size
        parts = (self.gpu, self.model and self.model.name, degree and f"tp{degree}")
        return "-".join(part for part in parts if part).lower().replace("/", "-") or self.name

    def request_s(self, latency: LatencyModel) -> float:
        """Return the seconds that the server adds to a request beyond its prefill: the lone ones' median."""
        return max(0.0, median(seconds - latency.prefill_s(tokens) for tokens, seconds in self.lone))


REQUIRED_COLUMNS = ("phase", "batch", "length", "latency_ms")
#: Of mixed rows: the prompt tokens beside `batch` decodes over `length` cached tokens each.
MIXED_COLUMN = "prefill_tokens"
IDENTITY_COLUMNS = ("system", "backend", "backend_version", "model", "tp")
_MAX_SIZE = 1 << 24


def read_csv(
    path: Path,
    *,
    system: str | None = None,
    model: str | None = None,
    tp: int | None = None,
) -> Measurements:
    """Return the points of one system, model and degree. Raises `ProfileError`, also for several."""
    rows = [(row.cells, _point(row)) for row in csv_rows(path, REQUIRED_COLUMNS, ProfileError)]
    wanted = {"system": system, "model": model, "tp": None if tp is None else str(tp)}
    for column, value in wanted.items():
        if value is None:
            continue
        names = sorted({cells.get(column, "").strip() for cells, _ in rows})
        rows = [row for row in rows if row[0].get(column, "").strip() == value]
        if not rows:
            raise ProfileError(f"{path}: --{column}: expected one of {', '.join(names)}, got {value!r}")
    identity: dict[str, str | None] = {}
    for column in IDENTITY_COLUMNS:
        names = sorted({cells[column].strip() for cells, _ in rows if column in cells})
        if len(names) > 1:
            flag = f"--{column}" if column in wanted else column
            raise ProfileError(f"{path}: {flag}: expected one to be chosen out of {', '.join(names)}")
        identity[column] = names[0] if names else None
    degree, gpu = int(identity["tp"] or tp or 0) or None, identity["system"]
    return Measurements(
        points=tuple(merge_repeats(point for _, point in rows)),
        source=ProfileSource(kind="csv", name=path.name, system=gpu),
        engine=EngineInfo(
            name=identity["backend"] or "vllm",
            version=identity["backend_version"],
            tensor_parallel_size=degree,
        ),
        hardware=Hardware(gpu=gpu, gpus=degree or 1) if gpu else None,
        model=ModelInfo(name=identity["model"]) if identity["model"] else None,
        where=str(path),
        name=path.stem,
    )


def _point(row: CsvRow) -> Point:
    if row.get("phase") not in tuple(StepKind):
        raise row.error("phase", "prefill, decode or mixed")
    phase = StepKind(row.get("phase"))
    if phase is StepKind.MIXED and MIXED_COLUMN not in row.cells:
        raise row.error("phase", f"a column {MIXED_COLUMN} beside mixed steps")
    if "tp" in row.cells:
        row.whole("tp", 1, _MAX_SIZE)
    return Point(
        phase,
        row.whole("batch", 1, _MAX_SIZE),
        row.whole("length", 1, _MAX_SIZE),
        row.number("latency_ms", "milliseconds above 0", positive=True) / 1e3,
        prefill_tokens=row.whole(MIXED_COLUMN, 1, _MAX_SIZE) if phase is StepKind.MIXED else 0,
    )


#: Share of the bf16 efficiency that products of quantised weights reach: activations are quantised first.
_QUANTISED_SHARE = 0.82
#: The same of products of routed experts: in bf16, and quantised at the peak of the next wider format.
_EXPERT_SHARE, _QUANTISED_EXPERT_SHARE = 0.68, 0.88
#: Rows that the last block of an expert leaves empty on average; blocks are smaller for few rows.
_EMPTY_ROWS = 48
#: Reads and writes of hidden states, in rows: by the norms of a layer for each token; for each row of experts
#: (sorted, read, written, read for the sum). All GPUs of a group do both for all tokens.
_NORM_MOVES, _EXPERT_MOVES = 8.0, 7.0
#: Seconds of a layer's kernels on few tokens, in a prefill and in a decode step; of experts beside them; of
#: an all-reduce.
_LAYER_S = {StepKind.PREFILL: 40e-6, StepKind.DECODE: 30e-6}
_EXPERTS_S, _ALL_REDUCE_S = 30e-6, 10e-6
#: Points beyond the usual grids, as (batch, length): attention of long prompts, the cache of long contexts.
_LONG_PROMPTS = ((1, 8192), (1, 32768), (1, 131072))
_LONG_CONTEXTS = ((1, 32768), (16, 32768))


@dataclass(frozen=True, slots=True)
class Roofline:
    """A GPU and a model in peak figures: FLOP/s and bytes/s of one GPU, and the shares really reached.

    A pass takes the sum of these times. First: products with the weights or reading these, whichever is
    longer, for dense weights and for experts. Second: attention or reading the cache, whichever is longer.
    Third: moves of activations. Fourth: two all-reduces a layer. Fifth: `step_overhead_s` of the host or the
    launches of kernels, whichever is longer.

    Only experts that the batch reaches are read, evenly spread over the GPUs. Work that each GPU of a group
    does for all tokens is not divided: norms, rows of experts, projections to a latent. `format_flops` is the
    peak for the model's quantised weights, `expert_flops` for its experts (None: as bf16). The times of a
    data-parallel server are one rank's while all have equally many tokens. Experts are then divided over all
    GPUs, which exchange the tokens of all ranks.
    """

    peak_flops: float
    bandwidth_bytes_s: float
    model: ModelFacts
    tensor_parallel_size: int = 1
    flops_efficiency: float = 0.5
    bandwidth_efficiency: float = 0.7
    step_overhead_s: float = 0.002
    format_flops: float | None = None
    expert_flops: float | None = None
    attention_efficiency: float | None = None
    all_reduce_bytes_s: float | None = None
    data_parallel_size: int = 1

    @classmethod
    def of_gpu(cls, gpu: Gpu, model: ModelFacts, degree: int, data_parallel_size: int = 1) -> Roofline:
        """Return the roofline of a GPU of the table; it holds no host time."""
        return cls(
            gpu.bf16_flops,
            gpu.bandwidth_bytes_s,
            model,
            degree,
            gpu.flops_share,
            gpu.bandwidth_share,
            0.0,
            gpu.flops(model.weight_format),
            gpu.flops(wider(model.weight_format)),
            gpu.attention_share,
            gpu.all_reduce_bytes_s,
            data_parallel_size,
        )

    @property
    def _bytes_s(self) -> float:
        """Bytes/s that one GPU reaches."""
        return self.bandwidth_bytes_s * self.bandwidth_efficiency

    def seconds(self, phase: StepKind, batch: int, length: int) -> float:
        """Return the time of a prefill of `batch` prompts, or of a decode step at context `length`."""
        model, degree = self.model, self.tensor_parallel_size
        tokens = batch * (length if phase is StepKind.PREFILL else 1)
        each = model.prompt_attention_flops if phase is StepKind.PREFILL else model.step_attention_flops
        efficiency = self.attention_efficiency or self.flops_efficiency
        attention_s = batch * each(length, degree) / (self.peak_flops * efficiency)
        cache_s = batch * model.kv_bytes(length) * model.replication(degree) / (self._bytes_s * degree)
        moved_s = tokens * model.layers * _NORM_MOVES * self._row_bytes / self._bytes_s
        launched_s = model.layers * (_LAYER_S[phase] + (_EXPERTS_S if model.experts else 0.0))
        return (
            self._dense_s(tokens, batch)
            + self._experts_s(tokens)
            + max(attention_s, cache_s)
            + moved_s
            + self._exchange_s(tokens)
            + max(self.step_overhead_s, launched_s)
        )

    @property
    def _row_bytes(self) -> float:
        """Bytes of the hidden state of a token."""
        return self.model.width * ACTIVATION_BYTES

    def _dense_s(self, tokens: int, batch: int) -> float:
        """Return the seconds of weights that each token passes; the output is computed once a sequence."""
        model, degree = self.model, self.tensor_parallel_size
        copied, experts = model.copied_parameters, model.passed_expert_parameters
        head = min(model.head_parameters, model.passed_parameters - experts)
        body = model.passed_parameters - experts - head
        quantised = min(
            1.0, max(0.0, model.format_share * model.passed_parameters - experts) / max(1.0, body)
        )
        per_flop = (1.0 - quantised) / self.peak_flops
        per_flop += quantised / (_QUANTISED_SHARE * (self.format_flops or self.peak_flops))
        flops = 2.0 * tokens * ((body - copied) / degree + copied)
        products_s = flops * per_flop + 2.0 * batch * head / (degree * self.peak_flops)
        idle = model.embedding_parameters + model.encoder_parameters
        read = model.weight_bytes - model.expert_bytes - ACTIVATION_BYTES * idle
        held = read * (1.0 + copied * (degree - 1.0) / max(1.0, body + head)) / degree
        # Each kernel writes the values of its product, which the next one reads.
        written_s = tokens * (body / degree) / model.width * ACTIVATION_BYTES / self._bytes_s
        return max(products_s / self.flops_efficiency, held / self._bytes_s) + written_s

    def _experts_s(self, tokens: int) -> float:
        """Return the seconds of routed experts."""
        model, degree, ranks = self.model, self.tensor_parallel_size, self.data_parallel_size
        if not model.experts:
            return 0.0
        gpus, touched = degree * ranks, model.touched_experts(ranks * tokens)
        rows = ranks * tokens * model.chosen
        computed = rows + min(rows, _EMPTY_ROWS * touched * model.experts)
        flops = 2.0 * model.expert_parameters / model.experts * computed
        plain = model.weight_format == "bf16"
        share = self.flops_efficiency * (_EXPERT_SHARE if plain else _QUANTISED_EXPERT_SHARE)
        products_s = flops / (gpus * (self.expert_flops or self.peak_flops) * share)
        read_s = model.expert_bytes * touched / (gpus * self._bytes_s)
        # Tensor parallelism divides every expert: each GPU moves all rows. Of whole experts it moves its own.
        moved = rows if ranks == 1 else rows / gpus
        moved_s = moved * model.layers * _EXPERT_MOVES * self._row_bytes / self._bytes_s
        return max(products_s, read_s) + moved_s

    def _exchange_s(self, tokens: int) -> float:
        """Return the seconds of two all-reduces a layer; 0 if the link is unknown.

        Data-parallel ranks gather the tokens of all before the experts, and scatter the sums: one all-reduce.
        """
        degree, ranks = self.tensor_parallel_size, self.data_parallel_size
        if ranks == 1:
            return 2.0 * self._all_reduce_s(tokens, degree)
        return self._all_reduce_s(tokens, degree) + self._all_reduce_s(ranks * tokens, ranks * degree)

    def _all_reduce_s(self, tokens: int, gpus: int) -> float:
        """Return the seconds of an all-reduce in each layer."""
        if gpus == 1 or self.all_reduce_bytes_s is None:
            return 0.0
        size = tokens * self._row_bytes * 2.0 * (gpus - 1) / gpus
        return self.model.layers * (_ALL_REDUCE_S + size / self.all_reduce_bytes_s)

    def points(self) -> list[Point]:
        """Return the points of the usual grids, and of long prompts and contexts."""
        prompts, steps = (*DEFAULT_PREFILL_GRID, *_LONG_PROMPTS), (*DEFAULT_DECODE_GRID, *_LONG_CONTEXTS)
        grids = ((StepKind.PREFILL, prompts), (StepKind.DECODE, steps))
        return [Point(phase, b, n, self.seconds(phase, b, n)) for phase, grid in grids for b, n in grid]

    def measurements(
        self, gpu: str | None, memory_bytes: int | None = None, *, base: Profile | None = None
    ) -> Measurements:
        """Return the estimate, marked unmeasured, with the limits that vLLM has on a GPU.

        With `step_overhead_s` the points contain the host's time. `base` is a profile of the same GPU. The
        points are scaled by its times over the roofline's, and its limits and host time are taken over.
        """
        tp, ranks = self.tensor_parallel_size, self.data_parallel_size
        gpus, known = tp * ranks, EngineInfo() if base is None else base.engine
        batched, seqs = batch_limits(gpu, memory_bytes) if gpu and base is None else (None, None)
        whole = True if ranks > 1 or needs_whole_experts(self.model.shape, tp) else None
        note = (
            f"estimated, not measured: {self.peak_flops:g} FLOP/s at {self.flops_efficiency:g}, "
            f"{self.bandwidth_bytes_s:g} bytes/s at {self.bandwidth_efficiency:g}, "
            f"{1e3 * self.step_overhead_s:g} ms a step; the errors are of the fit to this estimate"
        )
        factors = dict.fromkeys(_USUAL, 1.0)
        if base is not None:
            note += f"; times what {base.name} takes of them"
            factors = self._taken(base)
        host = HostTime() if self.step_overhead_s else None
        return Measurements(
            points=tuple(replace(p, seconds=p.seconds * factors[p.phase]) for p in self.points()),
            source=ProfileSource(kind="roofline", measured=False, system=gpu, note=note),
            engine=msgspec.structs.replace(
                known,
                tensor_parallel_size=tp,
                data_parallel_size=ranks if ranks > 1 else None,
                enable_expert_parallel=whole,
                kv_cache_tokens=None,
                max_num_seqs=known.max_num_seqs or seqs,
                max_num_batched_tokens=known.max_num_batched_tokens or batched,
            ),
            hardware=None
            if gpu is None
            else Hardware(
                gpu=gpu,
                gpus=gpus,
                memory_bytes=memory_bytes,
                all_reduce_bytes_s=self.all_reduce_bytes_s if gpus > 1 else None,
            ),
            model=model_info(self.model),
            host=host if base is None else base.host,
            launch=None if self.step_overhead_s else assumed_launch(self.model, gpus),
            name="roofline",
        )

    def _taken(self, base: Profile) -> dict[StepKind, float]:
        """Return the times of a profile over its roofline, for prompts and for decode steps."""
        latency = base.latency
        own = replace(self, tensor_parallel_size=base.engine.tensor_parallel_size or 1, data_parallel_size=1)
        prompts, tokens = _USUAL[StepKind.PREFILL]
        batch, context = _USUAL[StepKind.DECODE]
        seconds = {
            StepKind.PREFILL: latency.prefill_s(tokens, prompts) - latency.host_of_s(prompts),
            StepKind.DECODE: latency.step_s(batch, batch * context) - latency.host_of_s(batch),
        }
        return {phase: seconds[phase] / own.seconds(phase, *_USUAL[phase]) for phase in _USUAL}


#: A usual prompt, and a usual decode step: (batch, tokens).
_USUAL = {StepKind.PREFILL: (1, 4096), StepKind.DECODE: (32, 2048)}
#: Bytes of a GPU that vLLM needs beside weights and cache: activations, graphs, its context.
_RESERVED_BYTES = 2 << 30


def data_sheet(gpu: Gpu, facts: ModelFacts, degree: int) -> Measurements:
    """Return the estimate for `degree` GPUs of the table, with the cache they hold.

    `engine.kv_cache_tokens` is None if the model does not fit.
    """
    room = degree * (MEMORY_SHARE * gpu.memory_bytes - _RESERVED_BYTES) - facts.weight_bytes
    tokens = int(room // max(1.0, facts.cached_token_bytes * facts.replication(degree)))
    found = Roofline.of_gpu(gpu, facts, degree).measurements(gpu.name, gpu.memory_bytes)
    shares = "read off kernel tables of this GPU" if gpu.measured else "the usual ones of kernels"
    return replace(
        found,
        source=msgspec.structs.replace(found.source, note=f"{found.source.note}; shares: {shares}"),
        engine=msgspec.structs.replace(found.engine, kv_cache_tokens=tokens if tokens > 0 else None),
        assumed=tuple(_sheet_limits(gpu, facts)),
        name=f"{gpu.name.lower()}-{facts.name.rpartition('/')[2].lower()}-tp{degree}",
    )


def _sheet_limits(gpu: Gpu, facts: ModelFacts) -> Iterator[str]:
    """Yield a phrase for each thing that an estimate by a data sheet does not know."""
    yield f"peak figures and shares of {gpu.name} (`hetlb profile --gpus`): nothing was measured here"
    if facts.experts:
        yield (
            "experts: kernel tables of seven GPUs say 0.7 to 1.7 times this for prompts from 8,192 tokens "
            "(three in four within 15 %), up to 3 times for shorter ones; --from aiconfigurator has them"
        )


def profile_of(
    found: Measurements,
    *,
    name: str | None = None,
    stated_host: HostTime | None = None,
) -> tuple[Profile, FitResult]:
    """Fit the points, complete the fit by assumptions. Raises `ProfileError`.

    `stated_host` is the host time if the points hold none.
    """
    asynchronous = found.engine.schedules_asynchronously(found.gpu)
    host = found.host
    if host is None:
        host = stated_host or assumed_host(asynchronous)
    try:
        estimated = not found.source.measured
        launched = found.host is not None and not estimated
        result = fit(found.points, usual_tile=found.tile, launched=launched, estimated=estimated)
    except (ProfileError, RuntimeError, ValueError) as error:
        lead = "" if isinstance(error, ProfileError) else "expected points that a model can be fitted to: "
        where = f"{found.where}: " if found.where else ""
        raise ProfileError(f"{where}{lead}{error}") from error
    result, assumed = complete(result, found.points, host, asynchronous, found.split_blocks, found.launch)
    if found.lone:
        host = msgspec.structs.replace(host, request_s=found.request_s(result.latency))
    found = replace(found, host=host, assumed=(*assumed, *found.assumed))
    return make_profile(name or found.own_name, found, result), result


def make_profile(name: str, found: Measurements, result: FitResult) -> Profile:
    """Return a profile of fitted points, its errors and the points themselves."""
    prefill, decode = result.reports["prefill"], result.reports["decode"]
    weight = prefill.points + decode.points
    mean = (prefill.mean_error * prefill.points + decode.mean_error * decode.points) / weight
    by_phase = {phase: [p for p in found.points if p.phase is phase] for phase in StepKind}
    passes = tuple(p.passes for p in by_phase[StepKind.PREFILL])
    return Profile(
        version=2,
        name=name,
        hardware=found.hardware,
        model=found.model,
        engine=found.engine,
        **sections(result.latency),
        host=found.host,
        assumed=found.assumed,
        fit=FitReport(
            mean_error=mean,
            p95_error=max(prefill.p95_error, decode.p95_error),
            max_error=max(prefill.max_error, decode.max_error),
            points=weight,
            **result.reports,
        ),
        source=found.source,
        grid=RawGrid(
            prefill=tuple((p.batch, p.length, p.seconds) for p in by_phase[StepKind.PREFILL]),
            decode=tuple((p.batch, p.length, p.seconds) for p in by_phase[StepKind.DECODE]),
            mixed=tuple((p.prefill_tokens, p.batch, p.length, p.seconds) for p in by_phase[StepKind.MIXED]),
            prefill_passes=passes if any(each > 1 for each in passes) else None,
        ),
    )


def corrected(profile: Profile, latency: LatencyModel, source: ProfileSource) -> Profile:
    """Return a profile with other constants; it drops points and errors of the old ones."""
    return msgspec.structs.replace(
        with_latency(profile, latency), version=2, source=source, fit=None, grid=None
    )


#: Seconds to launch a layer's kernels: of attention, which CUDA graphs of a pass with prefill
#: leave out, by kind; of dense work and of experts, beyond the graphs. Fitted on Qwen3-32B, Qwen3.6-35B-A3B
#: at TP 2 on B300 (vLLM 0.20.1): three figures for four constants, so linear attention and experts may trade.
_ATTENTION_LAUNCH_S, _STATE_LAUNCH_S = 0.1e-3, 0.45e-3
_DENSE_LAUNCH_S, _EXPERTS_LAUNCH_S = 0.15e-3, 0.475e-3
#: Such a pass of Qwen3.6-35B-A3B on one B300, which has no collectives, took half as long.
_ALONE_SHARE = 0.5
#: Largest batch, in tokens, that vLLM captures CUDA graphs of by default.
_GRAPH_TOKENS = 512


def assumed_launch(facts: ModelFacts, gpus: int) -> LaunchTime:
    """Return the launch times of a model on a server of `gpus` GPUs by the kinds of its layers."""
    states = facts.kinds.get("linear", 0) + facts.kinds.get("state", 0)
    layers = max(facts.layers, sum(facts.kinds.values()))
    graph_s = _STATE_LAUNCH_S * states + _ATTENTION_LAUNCH_S * (layers - states)
    eager_s = graph_s + (_DENSE_LAUNCH_S + (_EXPERTS_LAUNCH_S if facts.experts else 0.0)) * layers
    share = _ALONE_SHARE if gpus == 1 and facts.experts else 1.0
    return LaunchTime(_GRAPH_TOKENS, share * graph_s, share * eager_s)


#: Share of a GPU's blocks of threads that reads its memory as fast as all of them do.
SPLIT_SHARE = 0.4

#: Host time beyond tables of kernels: of an iteration, and of each sequence in it. Asynchronous scheduling
#: (True) hides most of it behind the GPU.
_ASSUMED_HOST = {True: (0.4e-3, 1.2e-5), False: (1.2e-3, 4.5e-5)}
#: Time that a server takes over a request: HTTP, tokenizer, and the way to the engine's process.
_ASSUMED_REQUEST_S = 4e-3
_RANGES = {True: "0 to 1.5 ms an iteration were found", False: "1 to 8 ms an iteration were found"}


def assumed_host(asynchronous: bool | None) -> HostTime:
    """Return the host time if no point shows it; unknown scheduling is asynchronous, as vLLM's."""
    iteration_s, sequence_s = _ASSUMED_HOST[asynchronous is not False]
    return HostTime(iteration_s=iteration_s, sequence_s=sequence_s, request_s=_ASSUMED_REQUEST_S)


def complete(
    result: FitResult,
    points: Sequence[Point],
    host: HostTime,
    asynchronous: bool | None = None,
    split_blocks: float | None = None,
    launch: LaunchTime | None = None,
) -> tuple[FitResult, tuple[str, ...]]:
    """Return the fit with assumptions for figures that its points do not show; one phrase for each.

    A phrase names the assumed value, its range on other machines, and a measurement that would replace it.
    `split_blocks` belong to a kernel that splits contexts (`SplitKv`).
    """
    latency, assumed = result.latency, []
    better, table = latency.better_prefill, latency.better_decode
    if better is not None and result.tile is None:
        assumed.append(
            f"tile: {better.tile} tokens (every prefill point holds whole tiles of 128 or few tokens); "
            "prefill points such as 1 x 300 would show it"
        )
    if latency.mixed is None:
        latency = replace(latency, mixed=assumed_mixed(latency))
        assumed.append(
            f"mixed: {MIXED_FACTOR:g} times the attention of a decode step (1.3 to 3.4 were found); "
            "2 or more mixed points measure it, as a live sweep does, and a log corrects it"
        )
    if split_blocks is not None and table is not None:
        context_s = SPLIT_SHARE * split_blocks * table.token_s
        latency = replace(latency, split_kv=SplitKv(split_blocks, context_s))
        assumed.append(
            f"split_kv: a decode step lasts until its longest context is through {split_blocks:g} // "
            f"sequences blocks; {SPLIT_SHARE:.0%} of them read as fast as all (38 to 41 % on B300); steps "
            "of unequal contexts would measure it"
        )
    if launch is not None:
        latency = replace(latency, launch=launch)
        assumed.append(
            f"launch: kernels of a pass that prefills are launched in {1e3 * launch.graph_s:.3g} ms up to "
            f"{launch.graph_tokens:g} tokens (CUDA graphs) and {1e3 * launch.eager_s:.3g} ms beyond, by the "
            "kinds of the model's layers as on B300 (experts on one GPU: half of two); a live sweep measures "
            "the passes as they are"
        )
    if host == assumed_host(asynchronous):
        scheduling = "synchronous" if asynchronous is False else "asynchronous"
        assumed.append(
            f"host: {1e3 * host.iteration_s:g} ms an iteration and {1e3 * host.sequence_s:g} ms for each "
            f"sequence in it ({scheduling} scheduling; {_RANGES[asynchronous is not False]}), "
            f"{1e3 * host.request_s:g} ms a request (38 to 120 were found for chats of vLLM 0.10 and 0.11); "
            "a live sweep or a log measures it"
        )
    for phase, what in ((StepKind.PREFILL, "prompts"), (StepKind.DECODE, "contexts")):
        most = max(p.length for p in points if p.phase is phase)
        if most < _LONG_TOKENS:
            assumed.append(f"{what} beyond {most} tokens: extrapolated; longer points measure them")
    return replace(result, latency=latency), tuple(assumed)


#: Points of at least this length show the cost of long contexts.
_LONG_TOKENS = 16384
