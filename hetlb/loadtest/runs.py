"""One measured run after another, all of the same load: what `hetlb bench` repeats.

Arrivals and lengths come from the seed alone, so two runs of one seed and rate send the same plan
(`plan_sha256` says so); prompts come from the salt and the run's own label, so that no run finds the
prompts of another in a prefix cache (texts from a file excepted: they are what they are).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from hetlb.core.objective import ServiceClass
from hetlb.errors import HetlbError, reason_of
from hetlb.loadtest.bodies import CHAT, COMPLETIONS, MadePrompts, RequestBodies, own_headers
from hetlb.loadtest.fleet_admin import FleetAdmin, Reported
from hetlb.loadtest.generator import LoadProgress, run_load
from hetlb.loadtest.metrics import run_figures
from hetlb.loadtest.verdict import LoadResult
from hetlb.served_models import read_model_list
from hetlb.workload.arrivals import Load, Ramp, Rate, Waves, make_load
from hetlb.workload.traces import Row

_MODELS_TIMEOUT = aiohttp.ClientTimeout(total=10)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Settings that the runs of a bench share. `slo_s` and `percentiles` as in `run_figures`."""

    url: str
    model: str
    rows: Sequence[Row]
    num_prompts: int
    seed: int = 0
    salt: str = ""
    path: str = COMPLETIONS
    text: bool = False
    hash_block_tokens: int = 512
    ignore_eos: bool = True
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    slo_s: Mapping[str, float] | None = None
    percentiles: Sequence[float] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Headers that name the conversation and the tenant of a request that has one; "" is none.
    session_header: str = ""
    tenant_header: str = ""
    waves: Waves | None = None
    #: Objectives of the classes that the rows name, the default first.
    classes: Mapping[str, ServiceClass] = field(default_factory=dict)

    @property
    def as_text(self) -> bool:
        """True if prompts are sent as text: their lengths in tokens are estimates then."""
        return self.text or self.path == CHAT

    def bodies(self, load: Load, label: str) -> RequestBodies:
        """The requests of one run; `label` is its own."""
        salt = f"{self.salt}/{self.seed}/{label}"
        made = MadePrompts(load.rows, salt, text=self.as_text, hash_block_tokens=self.hash_block_tokens)
        headers = own_headers(load.rows, salt, self.session_header, self.tenant_header)
        return RequestBodies(self.model, made, path=self.path, ignore_eos=self.ignore_eos, headers=headers)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run: its document (a member of `runs`), and the records and rows behind it."""

    run: dict[str, Any]
    result: LoadResult
    rows: Sequence[Row] = ()


async def measure(
    spec: LoadSpec,
    rate: Rate | Ramp,
    *,
    policy: str | None = None,
    instances: Sequence[str] | None = None,
    round_number: int = 1,
    progress: LoadProgress | None = None,
    admin: FleetAdmin | None = None,
) -> MeasuredRun:
    """Warm up, send the load once and wait for every answer.

    The load of each round is drawn from a seed of its own, the same for every policy. `admin` is asked for
    what the engines report of the run.
    """
    seed = spec.seed + round_number - 1
    label = f"{policy}/{rate}/{round_number}"
    if spec.num_warmups:
        await _warm_up(spec, f"{label}/warm-up")
    load = make_load(spec.rows, spec.num_prompts, rate, random.Random(seed), spec.burstiness, spec.waves)
    async with contextlib.nullcontext(Reported()) if admin is None else admin.reported() as reported:
        result = await run_load(
            load.plan,
            spec.bodies(load, label),
            spec.url,
            progress=progress,
            headers=dict(spec.headers),
            max_concurrency=spec.max_concurrency,
        )
    result.exact_output = spec.ignore_eos
    result.exact_prompt = not spec.as_text
    run = {
        "policy": policy,
        "seed": seed,
        "round": round_number,
        **run_figures(
            result,
            goodput_slo_s=spec.slo_s,
            percentiles=spec.percentiles,
            instances=instances,
            preemptions=reported.preemptions,
            kv_peak=reported.kv_peak,
            classes=spec.classes,
        ),
        "request_rate": _rate_document(rate),
        "burstiness": "inf" if math.isinf(spec.burstiness) else spec.burstiness,
        "max_concurrency": spec.max_concurrency,
        "num_prompts": spec.num_prompts,
        "plan_sha256": plan_sha256(load),
        "error_examples": result.examples,
    }
    if isinstance(rate, Ramp):
        run["ramp_up_strategy"] = rate.strategy
        run["ramp_up_start_rps"] = rate.start_rps
        run["ramp_up_end_rps"] = rate.end_rps
    return MeasuredRun(run, result, load.rows)


async def _warm_up(spec: LoadSpec, label: str) -> None:
    """Send unmeasured requests, all at once: the first of a kind compile something in an engine."""
    load = make_load(spec.rows, spec.num_warmups, math.inf, random.Random(spec.seed))
    result = await run_load(
        load.plan,
        spec.bodies(load, label),
        spec.url,
        headers=dict(spec.headers),
        max_concurrency=spec.max_concurrency,
    )
    for kind, example in result.examples.items():
        raise HetlbError(
            f"{spec.url}: {result.errors[kind]} of {spec.num_warmups} warm-ups failed: {kind}: {example}"
        )


async def first_model(url: str, headers: Mapping[str, str]) -> str:
    """The first of `/v1/models`. Raises `HetlbError` where no server answers with one."""
    try:
        async with aiohttp.ClientSession(timeout=_MODELS_TIMEOUT, headers=headers) as session:
            async with session.get(f"{url}/v1/models") as reply:
                if reply.status != 200:
                    raise HetlbError(f"{url}/v1/models: expected a list of models, got status {reply.status}")
                entries = read_model_list(await reply.read())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise HetlbError(f"{url}: no answer: {reason_of(error)}") from error
    if not entries:
        raise HetlbError(f"{url}/v1/models: expected a list of models; give one with --model")
    return str(entries[0]["id"])


def plan_sha256(load: Load) -> str:
    """Return a digest of the plan: send times and lengths."""
    digest = hashlib.sha256()
    for planned in load.plan:
        digest.update(b"%r %d %d" % (planned.scheduled_s, planned.prompt_tokens, planned.output_tokens))
        if planned.sequences > 1 or not planned.generates:
            digest.update(b" %d %d %d" % (planned.prompts, planned.n, planned.generates))
        digest.update(b"\n")
    return digest.hexdigest()


def _rate_document(rate: Rate | Ramp) -> float | str:
    """The rate as `vllm bench serve` writes it: a number, or a word where JSON has none."""
    if isinstance(rate, Ramp):
        return "ramp"
    return "inf" if rate == math.inf else rate
