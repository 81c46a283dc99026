"""One measured run after another, all of the same load: what `hetlb bench` repeats.

Arrivals and lengths come from the seed alone, so two runs of one seed and rate send the same plan
(`plan_sha256` says so); prompts come from the salt and the run's own label, so that no run finds the
prompts of another in a prefix cache (texts from a file excepted: they are what they are).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.engines.engine_mistakes import no_answer_at
from hetlb.errors import HetlbError
from hetlb.served_models import read_model_list
from hetlb.tools.loadtest.bodies import COMPLETIONS, RequestBodies
from hetlb.tools.loadtest.fleet_admin import FleetAdmin
from hetlb.tools.loadtest.generator import LONGEST_ANSWER_S, LoadInterruptedError, check_key, run_load
from hetlb.tools.loadtest.load_result import LoadResult
from hetlb.tools.tables import LoadProgress
from hetlb.tools.workload.arrivals import Load, PlannedRequest, Ramp, Rate
from hetlb.tools.workload.rows import HASH_BLOCK_TOKENS

_MODELS_TIMEOUT = aiohttp.ClientTimeout(total=10)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Settings that the runs of a bench share. `slo_s` and `percentiles` as in `LoadResult.figures`."""

    url: str
    model: str
    load: Load
    seed: int = 0
    salt: str = ""
    endpoint: str = COMPLETIONS
    text: bool = False
    hash_block_tokens: int = HASH_BLOCK_TOKENS
    ignore_eos: bool = True
    max_concurrency: int | None = None
    num_warmups: int = 0
    slo_s: Mapping[str, float] | None = None
    percentiles: Sequence[float] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    session_header: str = ""
    tenant_header: str = ""
    timeout_s: float = LONGEST_ANSWER_S
    #: Objectives of the classes that the rows name, the default first.
    classes: Mapping[str, ServiceClass] = field(default_factory=dict)

    def bodies(self, plan: Sequence[PlannedRequest], label: str) -> RequestBodies:
        return RequestBodies(
            self.model,
            plan,
            f"{self.salt}/{self.seed}/{label}",
            endpoint=self.endpoint,
            text=self.text,
            hash_block_tokens=self.hash_block_tokens,
            ignore_eos=self.ignore_eos,
            session_header=self.session_header,
            tenant_header=self.tenant_header,
        )

    async def send(self, plan: Sequence[PlannedRequest], label: str, **options: Any) -> LoadResult:
        """Send a plan once; `options` go to `run_load`."""
        bodies = self.bodies(plan, label)
        try:
            result = await run_load(
                plan,
                bodies,
                self.url,
                headers=dict(self.headers),
                max_concurrency=self.max_concurrency,
                timeout_s=self.timeout_s,
                **options,
            )
        except LoadInterruptedError as stopped:
            self._note(stopped.result, bodies)
            raise
        self._note(result, bodies)
        return result

    def _note(self, result: LoadResult, bodies: RequestBodies) -> None:
        result.exact_output, result.exact_prompt = self.ignore_eos, not bodies.text


async def measure(
    spec: LoadSpec,
    rate: Rate | Ramp,
    *,
    policy: str | None = None,
    instances: Sequence[str] | None = None,
    round_number: int = 1,
    progress: LoadProgress | None = None,
    admin: FleetAdmin | None = None,
) -> LoadResult:
    """Warm up, send the load once and wait for every answer.

    If it is stopped meanwhile, it returns what has ended, with `interrupted`. The load of each round is drawn
    from a seed of its own, the same for every policy. `admin` tells what the engines report of the run.
    """
    seed = spec.seed + round_number - 1
    label = f"{policy}/{rate}/{round_number}"
    if spec.num_warmups:
        await _warm_up(spec, f"{label}/warm-up")
    plan = spec.load.plan(rate, seed)
    async with contextlib.AsyncExitStack() as stack:
        counted = None if admin is None else await stack.enter_async_context(admin.reported())
        try:
            result = await spec.send(plan, label, progress=progress, in_turn=rate != "trace")
            await stack.aclose()
        except LoadInterruptedError as stopped:
            stack.pop_all()  # engines are not asked once more
            result = stopped.result
        except asyncio.CancelledError:
            result.interrupted = len(plan)  # while engines were asked
    run = result.run = {
        "policy": policy,
        "seed": seed,
        "round": round_number,
        **result.figures(
            goodput_slo_s=spec.slo_s,
            percentiles=spec.percentiles,
            instances=instances,
            counted=counted,
            classes=spec.classes,
        ),
        "request_rate": _rate_document(rate),
        "burstiness": "inf" if math.isinf(spec.load.burstiness) else spec.load.burstiness,
        "max_concurrency": spec.max_concurrency,
        "num_prompts": spec.load.count,
        "plan_sha256": plan_sha256(plan),
        "error_examples": result.examples,
    }
    if isinstance(rate, Ramp):
        run["ramp_up_strategy"] = rate.strategy
        run["ramp_up_start_rps"] = rate.start_rps
        run["ramp_up_end_rps"] = rate.end_rps
    return result


async def _warm_up(spec: LoadSpec, label: str) -> None:
    """Send unmeasured requests, all at once: the first of a kind compile something in an engine."""
    plan = replace(spec.load, num_prompts=spec.num_warmups).plan(math.inf, spec.seed)
    result = await spec.send(plan, label)
    for kind, example in result.examples.items():
        raise HetlbError(
            f"{spec.url}: {result.errors[kind]} of {spec.num_warmups} warm-ups failed: {kind}: {example}"
        )


async def first_model(url: str, headers: Mapping[str, str]) -> str:
    """Return the first of `/v1/models`. Raises `HetlbError` if no server answers with one."""
    try:
        async with aiohttp.ClientSession(timeout=_MODELS_TIMEOUT, headers=headers) as session:
            async with session.get(f"{url}/v1/models") as reply:
                check_key(f"{url}/v1/models", reply.status)
                if reply.status != 200:
                    said = (await reply.content.read(200)).decode("utf-8", "replace")
                    problem = f"expected a list of models, got status {reply.status}: {said}"
                    raise HetlbError(f"{url}/v1/models: {problem}")
                entries = read_model_list(await reply.read())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise HetlbError(f"{url}: no answer: {no_answer_at(error)}") from error
    if not entries:
        raise HetlbError(f"{url}/v1/models: expected a list of models; give one with --model")
    return str(entries[0]["id"])


def plan_sha256(plan: Sequence[PlannedRequest]) -> str:
    digest = hashlib.sha256()
    for planned in plan:
        digest.update(b"%r %d %d" % (planned.scheduled_s, planned.prompt_tokens, planned.output_tokens))
        if planned.sequences > 1 or not planned.generates:
            digest.update(b" %d %d %d" % (planned.row.sequences, planned.row.n, planned.generates))
        digest.update(b"\n")
    return digest.hexdigest()


def _rate_document(rate: Rate | Ramp) -> float | str:
    """Return the rate as `vllm bench serve` writes it: a number, or a word if JSON has none."""
    if isinstance(rate, Ramp):
        return "ramp"
    return "inf" if rate == math.inf else rate
