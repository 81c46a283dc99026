"""Latency profiles: file format, checks, and conversion to a `LatencyModel`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec

from hetlb.balancer.config.engine_defaults import batch_limits
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.core.kv_need import KvNeed
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.step_times import (
    DecodeTable,
    LaunchTime,
    MixedTerm,
    PnormPrefill,
    PrefillGrid,
    SplitKv,
)
from hetlb.balancer.core.types import Capacity
from hetlb.errors import ConfigError, ProfileError
from hetlb.inputs.mistakes import short
from hetlb.inputs.yaml_file import NonNegative, Positive, PositiveInt, load_yaml
from hetlb.logs import escape


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hardware the profile was measured on. `memory_bytes` is of one GPU.

    `all_reduce_bytes_s` is the bus bandwidth of a large all-reduce between the GPUs, as nccl-tests gives it.
    """

    gpu: str
    gpus: PositiveInt = 1
    memory_bytes: PositiveInt | None = None
    all_reduce_bytes_s: Positive | None = None


class KvWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes that some layers keep for each of a sequence's last `tokens` alone."""

    tokens: PositiveInt
    bytes_per_token: Positive


def kv_need(per_token: float, windows: Sequence[tuple[int, float]], state: float) -> KvNeed | None:
    """Return the need in bytes: per token, per token within a window, and per sequence.

    None if all layers keep all tokens, or nothing is known. Several windows become one. This is exact for
    sequences at least as long as the longest window.
    """
    windowed = math.fsum([size for _, size in windows])
    unit = per_token or windowed or state
    if unit <= 0.0 or (windowed <= 0.0 and state <= 0.0):
        return None
    full = math.fsum([tokens * size for tokens, size in windows])
    length = full / windowed if windowed > 0.0 else 0.0
    return KvNeed(1.0 if per_token > 0.0 else 0.0, windowed / unit, length, state / unit)


class ModelInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model served. `layers` and `attention_heads` are of the whole model, not of one GPU.

    `kv_bytes_per_token` grow with every token. Engines set all of it aside (`kv_allocated` of `hetlb model`).
    """

    name: str
    kv_bytes_per_token: PositiveInt | None = None
    kv_windows: tuple[KvWindow, ...] | None = None
    state_bytes: PositiveInt | None = None
    layers: PositiveInt | None = None
    attention_heads: PositiveInt | None = None

    @property
    def kv_need(self) -> KvNeed | None:
        """Return the need of a sequence in tokens of a KV cache; None if it is the number of its tokens."""
        windows = [(each.tokens, each.bytes_per_token) for each in self.kv_windows or ()]
        return kv_need(self.kv_bytes_per_token or 0.0, windows, self.state_bytes or 0.0)


class EngineInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine and its limits, in vLLM's own spellings.

    With `data_parallel_size`, times and limits are of one rank while all ranks are equally busy.
    `tokens_per_step`: mean tokens per decode step with speculative decoding.
    """

    name: str = "vllm"
    version: str | None = None
    tensor_parallel_size: PositiveInt | None = None
    data_parallel_size: PositiveInt | None = None
    enable_expert_parallel: bool | None = None
    tokens_per_step: Annotated[float, msgspec.Meta(ge=1)] | None = None
    kv_cache_tokens: PositiveInt | None = None
    block_size: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    max_loras: PositiveInt | None = None

    def schedules_asynchronously(self, gpu: str | None) -> bool | None:
        """Return `async_scheduling`, else vLLM's default: on from 0.14, off on CPUs; None if unknown."""
        if self.async_scheduling is not None:
            return self.async_scheduling
        found = re.match(r"(\d+)\.(\d+)", self.version or "")
        if self.name != "vllm" or found is None:
            return None
        on_cpu = "cpu" in (self.version or "").lower() or (gpu or "").lower().startswith("cpu")
        return (int(found[1]), int(found[2])) >= (0, 14) and not on_cpu


class PrefillCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """k1*B*I + k2*B + k3*I + k4, seconds."""

    k1: float
    k2: float
    k3: float
    k4: float


class DecodeCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """k5*B*c + k6*B + k7*c + k8, seconds of one step."""

    k5: float
    k6: float
    k7: float
    k8: float


class PrefillGridTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """log(measured / p-norm form) at the points of a grid, one row per batch, one column per length."""

    batches: tuple[PositiveInt, ...]
    lengths: tuple[PositiveInt, ...]
    log_ratio: tuple[tuple[float, ...], ...]


class BetterPrefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """(floor_s^p + (token_s*B*I)^p)^(1/p) + attention_s*B*I^2, times the grid's factor, if any.

    Dense work (B*I) is done in whole tiles of `tile` tokens.
    """

    floor_s: NonNegative
    token_s: Positive
    attention_s: NonNegative
    p: Annotated[float, msgspec.Meta(ge=1)]
    tile: PositiveInt | None = None
    grid: PrefillGridTable | None = None

    @property
    def form(self) -> PnormPrefill:
        """Convert to the latency model's type. Raises `ValueError`."""
        g = self.grid
        grid = PrefillGrid(g.batches, g.lengths, g.log_ratio) if g is not None else None
        return PnormPrefill(self.floor_s, self.token_s, self.attention_s, self.p, grid, self.tile or 1)


class BetterDecode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """token_s*C + context_s*C/B + seconds(B), C cached tokens in all; `seconds` stand for `batches`."""

    token_s: NonNegative
    context_s: NonNegative
    batches: tuple[PositiveInt, ...]
    seconds: tuple[Positive, ...]


class MixedSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds that D decodes over C cached tokens add to a pass over P prompt tokens.

    sequence_s*D + pair_s*D*P + max(token_s*C, context_s*C/D)
    """

    sequence_s: NonNegative
    pair_s: NonNegative
    token_s: NonNegative
    context_s: NonNegative


class SplitKvAttention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Attention of a decode step lasts `context_s` per token of the longest context in one of its blocks.

    Each of B sequences has `blocks` // B of them, B padded as for CUDA graphs.
    """

    blocks: Positive
    context_s: Positive


class LaunchOfKernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds that the host needs to launch the kernels of a prefill pass, if no point shows them.

    `graph_s` up to `graph_tokens` tokens, in CUDA graphs; `eager_s` beyond (0 graph_tokens: --enforce-eager).
    """

    graph_tokens: Annotated[float, msgspec.Meta(ge=0)] = 512.0
    graph_s: NonNegative
    eager_s: NonNegative


class HostTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Host time that no point shows: of every iteration, of each sequence in it, and of every request."""

    iteration_s: NonNegative = 0.0
    sequence_s: NonNegative = 0.0
    request_s: NonNegative = 0.0


class PhaseReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Held-out relative errors of one phase in one form; `worst` is the point of the largest one.

    `uncertainty` is the largest standard error of its points, by their samples.
    """

    form: str
    mean_error: NonNegative
    p95_error: NonNegative
    max_error: NonNegative
    points: PositiveInt
    worst: dict[Literal["batch", "length", "prefill_tokens"], PositiveInt] | None = None
    uncertainty: NonNegative | None = None


class FitReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Relative errors of the fit. For a fit made by hetlb they are on held-out points.

    The four figures are over both phases. `prefill` and `decode` are each phase in the form in use. If that
    is a better form, `prefill_paper` and `decode_paper` are the errors of k1..k8.
    """

    mean_error: NonNegative
    p95_error: NonNegative
    max_error: NonNegative
    points: PositiveInt
    prefill: PhaseReport | None = None
    prefill_paper: PhaseReport | None = None
    decode: PhaseReport | None = None
    decode_paper: PhaseReport | None = None
    mixed: PhaseReport | None = None


#: Largest mean and maximum errors of a fit to rely on: default sweeps have 1 to 5 % in the mean.
MEAN_ERROR_LIMIT = 0.10
MAX_ERROR_LIMIT = 0.30
#: Largest standard error of a point: beyond, a quieter machine should measure it again.
UNCERTAINTY_LIMIT = 0.05


def fit_warnings(phase: str, error: PhaseReport) -> list[str]:
    """Return a line for each held-out error of a phase above its limit."""
    lines = []
    if error.mean_error > MEAN_ERROR_LIMIT:
        over = f"{error.mean_error:.1%} (over {MEAN_ERROR_LIMIT:.0%})"
        lines.append(f"{phase}: the mean held-out error is {over}")
    if error.max_error > MAX_ERROR_LIMIT:
        over = f"{error.max_error:.1%} (over {MAX_ERROR_LIMIT:.0%})"
        worst = ", ".join(f"{key} {size}" for key, size in (error.worst or {}).items())
        lines.append(f"{phase}: the largest held-out error is {over}{worst and f', at {worst}'}")
    if (error.uncertainty or 0.0) > UNCERTAINTY_LIMIT:
        share = f"{error.uncertainty:.1%} (over {UNCERTAINTY_LIMIT:.0%})"
        lines.append(f"{phase}: samples differ: the standard error of a point is {share}; measure it quiet")
    return lines


#: Basis of the times of each kind of source.
_BASES = {
    "live": "measured",
    "csv": "measured",
    "aiconfigurator": "composed",
    "roofline": "roofline",
    "log": "corrected by a log",
}


class ProfileSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Origin of the points. `measured` is false for estimates that no hardware has confirmed."""

    kind: str
    measured: bool = True
    name: str | None = None
    system: str | None = None
    licence: str | None = None
    attribution: str | None = None
    note: str | None = None

    @property
    def basis(self) -> str:
        """Basis of the times, such as measured, composed of kernel times, or roofline."""
        return _BASES.get(self.kind, self.kind)


class RawGrid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fitted points: rows of batch, length, seconds; rows of mixed steps begin with prefill_tokens.

    `prefill_passes` has one number per row of `prefill`: its forward passes, if the engine split it (missing:
    one each).
    """

    prefill: tuple[tuple[PositiveInt, PositiveInt, Positive], ...] = ()
    decode: tuple[tuple[PositiveInt, PositiveInt, Positive], ...] = ()
    prefill_passes: tuple[PositiveInt, ...] | None = None
    mixed: tuple[tuple[PositiveInt, PositiveInt, PositiveInt, Positive], ...] = ()


#: Sections that only version 2 has.
_SECOND_VERSION = ("better_decode", "mixed", "split_kv", "launch", "host", "assumed")


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A latency profile: eight constants of one model on one engine, and what that engine can hold.

    `hetlb profile` adds all else; any of it may be missing. `assumed` names figures that no point shows.
    """

    version: Literal[1, 2]
    name: str
    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    hardware: Hardware | None = None
    model: ModelInfo | None = None
    engine: EngineInfo = EngineInfo()
    fit: FitReport | None = None
    better_prefill: BetterPrefill | None = None
    better_decode: BetterDecode | None = None
    mixed: MixedSteps | None = None
    split_kv: SplitKvAttention | None = None
    launch: LaunchOfKernels | None = None
    host: HostTime | None = None
    assumed: tuple[str, ...] = ()
    source: ProfileSource | None = None
    grid: RawGrid | None = None

    @property
    def latency(self) -> LatencyModel:
        """Latency model of these constants. Raises `ValueError`."""
        p, d, decode, mixed = self.prefill, self.decode, self.better_decode, self.mixed
        split = self.split_kv
        host = self.host or HostTime()
        share = 1.0 / (self.engine.tokens_per_step or 1.0)
        table = None
        if decode is not None:
            # The model adds the host's time per token; the tokens of a step share it.
            saved_s = [
                (1.0 - share) * (host.iteration_s + host.sequence_s * batch) for batch in decode.batches
            ]
            seconds = (
                max(1e-6, share * s - less_s) for s, less_s in zip(decode.seconds, saved_s, strict=True)
            )
            rising = tuple(accumulate(seconds, max))
            table = DecodeTable(share * decode.token_s, share * decode.context_s, decode.batches, rising)
        return LatencyModel(
            *(p.k1, p.k2, p.k3, p.k4, share * d.k5, share * d.k6, share * d.k7, share * d.k8),
            better_prefill=self.better_prefill.form if self.better_prefill is not None else None,
            better_decode=table,
            mixed=None
            if mixed is None
            else MixedTerm(mixed.sequence_s, mixed.pair_s, mixed.token_s, mixed.context_s),
            host_s=host.iteration_s,
            host_sequence_s=host.sequence_s,
            request_s=host.request_s,
            split_kv=None if split is None else SplitKv(split.blocks, share * split.context_s),
            launch=None
            if (launch := self.launch) is None
            else LaunchTime(launch.graph_tokens, launch.graph_s, launch.eager_s),
        )

    @property
    def host_assumed(self) -> bool:
        """Return whether no point shows the host's time, and requests to an idle vLLM server would."""
        vllm = self.engine.name.lower() == "vllm" and (self.engine.tokens_per_step or 1.0) == 1.0
        return vllm and any(line.startswith("host:") for line in self.assumed)

    @property
    def lacks(self) -> tuple[str, ...]:
        """List what the profile lacks and the default used instead; one phrase each."""
        found = []
        if self.better_prefill is None or self.better_prefill.tile is None:
            found.append("tiles: time is taken to be proportional to tokens")
        if self.better_decode is None:
            found.append("a decode step that bends: k5..k8 are taken, a straight line in the batch")
        if self.mixed is None:
            found.append(
                "mixed steps: the attention of decodes beside a prompt is taken to be 1.5 times as long"
            )
        if self.host is None:
            found.append("host time: none is taken, per iteration, per sequence and per request")
        return tuple(found)

    @property
    def other_discipline(self) -> str:
        """Return the difference of the engine's scheduling from the model of vLLM's; "" for vLLM."""
        engine = self.engine.name
        if engine.lower() == "vllm":
            return ""
        how = "computes prompts first" if engine.lower() == "sglang" else "may schedule otherwise"
        return (
            f"{self.name}: times are simulated as vLLM schedules (parts of prompts beside decodes); "
            f"{engine} {how}, so first tokens and whole answers can be far off"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return reasons not to rely on the profile, a line each."""
        found = []
        if self.source is not None and not self.source.measured:
            found.append("unmeasured: an estimate that no hardware has confirmed")
        if self.fit is not None:
            for phase in ("prefill", "decode", "mixed"):
                if (report := getattr(self.fit, phase)) is not None:
                    found += fit_warnings(phase, report)
        return tuple(found)

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Bytes of KV cache per token of a sequence, None if not stated."""
        return None if self.model is None else self.model.kv_bytes_per_token

    def differences(self, entries: Sequence[Mapping[str, Any]], version: str | None) -> Iterator[str]:
        """Yield a text if an engine is another than the measured one; `entries` are of its `/v1/models`."""
        serves = {str(entry[key]) for entry in entries for key in ("id", "root") if entry.get(key)}
        model, measured = None if self.model is None else self.model.name, self.engine.version
        if model is not None and serves and model not in serves:
            shown = ", ".join(sorted(map(escape, serves)))
            yield f"its profile is of the model {model}, it serves {shown}"
        if measured is not None and version not in (None, measured):
            yield f"its profile is of vLLM {measured}, it runs {escape(str(version))}"

    @property
    def capacity(self) -> Capacity:
        """Limits of the server; None if not stated."""
        e = self.engine
        ranks = e.data_parallel_size or 1
        return Capacity(
            engines=e.data_parallel_size,
            kv_cache_tokens=None if e.kv_cache_tokens is None else e.kv_cache_tokens * ranks,
            block_size=e.block_size,
            max_num_seqs=e.max_num_seqs,
            max_num_batched_tokens=e.max_num_batched_tokens,
            max_model_len=e.max_model_len,
            kv_tokens_per_request=e.kv_cache_tokens,
            enable_prefix_caching=e.enable_prefix_caching,
            async_scheduling=e.schedules_asynchronously(self.hardware.gpu if self.hardware else None),
            max_loras=e.max_loras,
            kv_need=None if self.model is None else self.model.kv_need,
        )

    @property
    def usual_capacity(self) -> Capacity:
        """Return the limits; the batch's are by default vLLM's for this GPU."""
        stated, hardware = self.capacity, self.hardware
        if self.engine.name.lower() != "vllm" or hardware is None:
            return stated
        tokens, sequences = batch_limits(hardware.gpu, hardware.memory_bytes)
        tokens = stated.max_num_batched_tokens or max(tokens, stated.max_num_seqs or 0)
        sequences = stated.max_num_seqs or min(sequences, tokens)
        return stated.updated(Capacity(max_num_batched_tokens=tokens, max_num_seqs=sequences))


def sections(latency: LatencyModel) -> dict[str, Any]:
    """Return the profile sections with the constants of a latency model; the inverse of `Profile.latency`."""
    better = latency.better_prefill
    prefill = None
    if better is not None:
        table = _section(PrefillGridTable, better.grid)
        prefill = msgspec.structs.replace(_section(BetterPrefill, replace(better, grid=None)), grid=table)
    return {
        "prefill": _section(PrefillCoefficients, latency),
        "decode": _section(DecodeCoefficients, latency),
        "better_prefill": prefill,
        "better_decode": _section(BetterDecode, latency.better_decode),
        "mixed": _section(MixedSteps, latency.mixed),
        "split_kv": _section(SplitKvAttention, latency.split_kv),
        "launch": _section(LaunchOfKernels, latency.launch),
    }


def _section(kind: Any, form: Any) -> Any:
    """Return the section with the constants of the same names of a form; None without one."""
    return None if form is None else kind(**{key: getattr(form, key) for key in kind.__struct_fields__})


def with_latency(profile: Profile, latency: LatencyModel) -> Profile:
    """Copy of a profile with the times of another latency model."""
    host = HostTime(
        iteration_s=latency.host_s, sequence_s=latency.host_sequence_s, request_s=latency.request_s
    )
    found = sections(latency)
    return msgspec.structs.replace(profile, **found, host=host if host != HostTime() else None)


#: Times must be positive at these points; corners suffice as both formulas are bilinear.
_CORNERS = ((1, 1), (256, 1), (1, 32768), (256, 32768))


def load_named(base: Path, named: str, where: str) -> Profile:
    """Read the profile that a file names at `where`. Raises `ConfigError` or `ProfileError`."""
    if not (base / named).exists():
        raise ConfigError(
            f"{where}: expected the path of a latency profile, got {short(named)}: no such file"
        )
    return load_profile(base / named)


def profiles_of(fleet: Fleet) -> Mapping[str, Profile]:
    """Return the profiles of a fleet by instance, with all that their files say."""
    return cast(Mapping[str, Profile], fleet.profiles)


def load_profile(path: Path) -> Profile:
    """Read a latency profile. Raises `ProfileError`."""
    profile = load_yaml(path, Profile, ProfileError)
    if profile.version == 1:
        for key in _SECOND_VERSION:
            if getattr(profile, key):
                raise ProfileError(f"{path}: {key}: expected version: 2 of the file for this key, got 1")
    try:
        latency = profile.latency
    except ValueError as caught:
        raise ProfileError(f"{path}: better_prefill, better_decode or mixed: {caught}") from caught
    for batch, length in _CORNERS:
        for section, seconds in (
            ("prefill", latency.paper_prefill_s(batch, length)),
            ("decode", latency.paper_step_s(batch, length)),
        ):
            if seconds <= 0:
                raise ProfileError(
                    f"{path}: {section}: expected constants that predict a positive time, "
                    f"got {seconds:.3g} s for a batch of {batch} at length {length}"
                )
    _check_memory(path, profile)
    return profile


def _check_memory(path: Path, profile: Profile) -> None:
    """Raise `ProfileError` for a KV cache that the GPUs cannot hold."""
    tokens, hardware, model = profile.engine.kv_cache_tokens, profile.hardware, profile.model
    if tokens is None or hardware is None or hardware.memory_bytes is None or model is None:
        return
    most = (hardware.gpus or 1) * hardware.memory_bytes
    if tokens * (model.kv_bytes_per_token or 0) > most:
        raise ProfileError(
            f"{path}: engine.kv_cache_tokens: expected at most {most // (model.kv_bytes_per_token or 1)}, as "
            f"{hardware.gpus or 1} GPUs of {hardware.memory_bytes} bytes hold, got {tokens}"
        )
