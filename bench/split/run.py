"""Evidence for `hetlb split`: search against exhaustive search, time, the paper's settings.

    python bench/split/run.py PART [PART ...] [--out bench/results/split.json] [--fresh]

Every part has rows; each is written when it is done, and a part that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import clusters
from plan.every_split import Exhaustive

from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.plan.check import check_split
from hetlb.tools.plan.common.fleet_run import OVERLOAD
from hetlb.tools.plan.disaggregation import split_search
from hetlb.tools.plan.disaggregation.cost import CostModel, GroupTable, PaperCost, ProfileCost
from hetlb.tools.plan.disaggregation.split_cluster import Role, Slo, SplitCluster, SplitPlan
from hetlb.tools.plan.disaggregation.split_search import SplitsFound
from hetlb.tools.plan.disaggregation.split_simulation import simulate_plan
from hetlb.tools.plan.highs import SolveLimits
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.study import engine_of

SPLIT_ROLES = (Role.PREFILL, Role.DECODE)
SMALL = 30
#: Simulated requests per GPU of a large cluster.
SCALE_PER_GPU = 100


def search(of: SplitCluster, cost: CostModel, seconds: float, **options: Any) -> tuple[SplitsFound, float]:
    """One search from nothing, its plans checked, and its CPU seconds."""
    began = time.process_time()
    limits = SolveLimits(deadline=began + seconds, clock=time.process_time)
    found = split_search.search(GroupTable(of, cost), limits, **options)
    elapsed = time.process_time() - began
    for plan in found.plans:
        check_split(of, plan, cost.capacity)
    return found, elapsed


def best(found: SplitsFound) -> float:
    """Requests/s of the best plan."""
    return found.plans[0].throughput if found.plans else 0.0


def exhaustive(number: int, cost_model: type[ProfileCost] | type[PaperCost]) -> Any:
    """A small cluster: what `hetlb split` plans, and the best of all plans."""
    of = clusters.small(SMALL)[number]
    cost = cost_model(of)
    every = Exhaustive(GroupTable(of, cost))
    began = time.monotonic()
    plan = every.run(SolveLimits())
    seconds = time.monotonic() - began
    found, elapsed = search(of, cost, 4.0)
    most = 0.0 if plan is None else plan.throughput
    return {
        "cluster": number,
        "machines": [f"{m.gpus} {m.gpu}" for m in of.machines],
        "model": of.model.name,
        "cost_model": cost_model.__name__,
        "exhaustive_req_s": most,
        "search_req_s": best(found),
        "equal": math.isclose(most, best(found), rel_tol=1e-6),
        "splits": bool(plan and plan.splits),
        "exhaustive_s": seconds,
        "search_s": elapsed,
    }


def against(name: str, seconds: float) -> Any:
    """A setting: 4 s against a longer search."""
    of = clusters.setting(name, "online")
    cost = ProfileCost(of)
    short, elapsed = search(of, cost, 4.0)
    long, _ = search(of, cost, seconds)
    return {
        "setting": name,
        "gpus": of.gpus,
        "short_s": elapsed,
        "short_req_s": best(short),
        "long_s": seconds,
        "long_req_s": best(long),
        "short_over_long": best(short) / best(long),
    }


def scale(gpus: int, seconds: float) -> Any:
    """A large cluster: the plan, the bound on plans of the groups it chose from, and its simulation."""
    of = clusters.large(gpus)
    cost = ProfileCost(of)
    found, elapsed = search(of, cost, seconds)
    colocated = found.colocated.throughput if found.colocated else None
    served = simulate_plan(of, found.plans[0], cost, count=SCALE_PER_GPU * gpus)
    return {
        "gpus": gpus,
        "cpu_s": elapsed,
        "req_s": best(found),
        "bound_req_s": found.template_bound,
        "colocated_req_s": colocated,
        "simulated_requests": served.requests,
        "simulated_over_planned": served.request_throughput / best(found),
    }


def paper(workload: str, name: str) -> Any:
    """A setting of HexGen-2: output tokens/s of split, mixed and colocated plans under both cost models."""
    of = clusters.setting(name, workload)
    row: dict[str, Any] = {"workload": workload, "setting": name}
    for label, cost in (("profiles", ProfileCost(of)), ("paper", PaperCost(of))):
        split, _ = search(of, cost, 4.0, roles=SPLIT_ROLES)
        mixed, _ = search(of, cost, 4.0)
        output = of.workload.output_tokens
        row[label] = {
            "split": best(split) * output,
            "mixed": best(mixed) * output,
            "colocated": mixed.colocated.throughput * output if mixed.colocated else 0.0,
        }
    return row


def latency(workload: str) -> Any:
    """Mean seconds to the last token in setting 1: split and not, at 75 % of what the latter serves."""
    of = clusters.setting("het1", workload)
    cost = ProfileCost(of)
    split, _ = search(of, cost, 4.0, roles=SPLIT_ROLES)
    whole, _ = search(of, cost, 4.0, roles=(Role.BOTH,))
    rate = 0.75 * best(whole)
    row: dict[str, Any] = {"workload": workload, "req_s": rate}
    for label, found in (("split", split), ("whole", whole)):
        served = simulate_plan(of, found.plans[0], cost, rate=rate)
        row[f"{label}_s"] = served.ttft_s + served.tpot_s * (of.workload.output_tokens - 1)
    return row


def four(workload: str) -> Any:
    """Appendix G: output tokens/s of OPT-30B on four H100, every plan tried."""
    of = clusters.cluster(
        [clusters.machine("h100", "H100", 4)], clusters.OPT_30B, clusters.WORKLOADS[workload]
    )
    table = GroupTable(of, ProfileCost(of))
    row: dict[str, Any] = {"workload": workload}
    for label, roles in (("split", SPLIT_ROLES), ("whole", (Role.BOTH,))):
        plan = Exhaustive(table, roles).run(SolveLimits())
        row[label] = 0.0 if plan is None else plan.throughput * of.workload.output_tokens
    return row


#: Settings of HexGen-2 with the budget of 8 H100.
ONE_BUDGET = ("het1", "het2", "het3", "het4")


def distserve(workload: str, model: str) -> Any:
    """Output tokens/s of each setting of one budget, and of 8 H100, all with plans that split."""
    row: dict[str, Any] = {"workload": workload, "model": model}
    for name in ("homogeneous", *ONE_BUDGET):
        of = clusters.setting(name, workload, MODELS[model])
        cost = ProfileCost(of)
        found, _ = search(of, cost, 4.0, roles=SPLIT_ROLES)
        served = simulate_plan(of, found.plans[0], cost)
        row[name] = {"planned": best(found) * of.workload.output_tokens, "served": served.output_throughput}
    return row


MODELS = {"70b": clusters.LLAMA_70B, "30b": clusters.OPT_30B}


#: Tokens of a pass with chunked prefill in vLLM 0.6, and without; rounds of the KV cache that are served.
CHUNK, WHOLE, CHUNK_ROUNDS = 512, 16384, 40


def chunked(workload: str) -> Any:
    """Output tokens/s of OPT-30B on one H100, prompts in chunks beside decodes and prompts first, whole."""
    of = clusters.cluster(
        [clusters.machine("h100", "H100", 1)], clusters.OPT_30B, clusters.WORKLOADS[workload]
    )
    cost = ProfileCost(of)
    group = GroupTable(of, cost).group(((0, 1),), Role.BOTH)
    assert group is not None
    spec = engine_of(cost.profile(group.stages, group.kv_cache_tokens, Role.BOTH))
    prompt, output = (int(each) for each in clusters.WORKLOADS[workload])
    slots = group.kv_cache_tokens // (prompt + output)
    count = CHUNK_ROUNDS * slots
    limits = replace(spec.limits, max_num_seqs=slots, max_num_batched_tokens=CHUNK, async_scheduling=False)
    engine = EngineModel(spec.latency, limits)
    for _ in range(count):
        engine.submit(EngineSequence(prompt, output, None))
    chunked_s = 0.0
    while (stretch := engine.begin_run()) is not None:
        chunked_s += stretch.duration_s
        engine.end_iteration()
    whole_s = prompts_first_s(spec.latency, slots, count, prompt, output)
    tokens = count * output
    return {"workload": workload, "slots": slots, "chunked": tokens / chunked_s, "whole": tokens / whole_s}


def prompts_first_s(latency: LatencyModel, slots: int, count: int, prompt: int, output: int) -> float:
    """Return the seconds of `count` requests where prompts come first, in passes without decodes."""
    seconds, waiting = 0.0, count
    done: list[int] = []  # output tokens of each running sequence
    while waiting or done:
        room = min(waiting, slots - len(done), max(1, WHOLE // prompt))
        if room:
            seconds += latency.prefill_s(prompt, room)
            waiting -= room
            done += [1] * room
        else:
            seconds += latency.step_s(len(done), sum(done) + len(done) * prompt)
            done = [each + 1 for each in done if each + 1 < output]
    return seconds


#: Plans whose order is compared with the order in simulation, out of a search's plans.
RANKED = 5


def simulated(name: str, workload: str) -> Any:
    """Plans in simulation: planned and served, their order, and the best plan without splitting."""
    of = clusters.setting(name, workload)
    cost = ProfileCost(of)
    found, _ = search(of, cost, 12.0)
    splits = [plan for plan in found.plans if plan.splits]
    if len(apart(splits, RANKED)) < RANKED:  # few of them where not splitting is better
        splits += search(of, cost, 12.0, roles=SPLIT_ROLES)[0].plans
        splits.sort(key=lambda plan: -plan.throughput)
    ranked = apart(splits, RANKED)
    served = [simulate_plan(of, plan, cost).request_throughput for plan in ranked]
    colocated = found.colocated
    assert colocated is not None
    planned = [plan.throughput for plan in ranked]
    rate = OVERLOAD * max([colocated.throughput, *planned[:1]])
    other = {
        policy: simulate_plan(of, colocated, cost, policy=policy, rate=rate).request_throughput
        for policy in ("hetlb", "rr")
    }
    split = served[0] if served else 0.0
    return {
        "setting": name,
        "workload": workload,
        "planned_req_s": planned,
        "simulated_req_s": served,
        "simulated_over_planned": served[0] / planned[0] if served else None,
        "tau": tau(planned, served) if len(planned) > 2 else None,
        "colocated_planned_req_s": colocated.throughput,
        "colocated_simulated_req_s": other,
        "over_hetlb": split / other["hetlb"],
        "over_rr": split / other["rr"],
        "says": "split" if 0.95 * split > other["hetlb"] else "do not split",
    }


def apart(plans: list[SplitPlan], count: int) -> list[SplitPlan]:
    """The best plans whose throughputs are at least 3 % apart: nearer ones are the same to a simulation."""
    found: list[SplitPlan] = []
    for plan in plans:
        if len(found) < count and (not found or plan.throughput < 0.97 * found[-1].throughput):
            found.append(plan)
    return found


def tau(one: list[float], other: list[float]) -> float:
    """Kendall's rank correlation."""
    pairs = [(a, b) for a in range(len(one)) for b in range(a)]
    agree = sum((one[a] - one[b]) * (other[a] - other[b]) > 0 for a, b in pairs)
    return 2.0 * agree / len(pairs) - 1.0


PROMPTS = (64, 256, 1024, 4096, 12288)
OUTPUTS = (16, 64, 256, 1024)


def regions(first: str, second: str, between: float, ttft_s: float, tpot_s: float) -> Any:
    """Requests/s of the best plan with and without splitting, over prompt and output lengths."""
    grid = []
    for prompt in PROMPTS:
        row = []
        for output in OUTPUTS:
            of = clusters.cluster(
                [clusters.machine("a", first, 2), clusters.machine("b", second, 2)],
                clusters.LLAMA_8B,
                (prompt, output),
                between=between,
                slo=Slo(ttft_s, tpot_s),
            )
            table = GroupTable(of, ProfileCost(of))
            split = Exhaustive(table, SPLIT_ROLES).run(SolveLimits())
            whole = Exhaustive(table, (Role.BOTH,)).run(SolveLimits())
            row.append([0.0 if plan is None else plan.throughput for plan in (split, whole)])
        grid.append(row)
    return {
        "gpus": [f"2 {first}", f"2 {second}"],
        "between_bytes_per_s": between,
        "ttft_s": ttft_s if ttft_s < math.inf else None,
        "tpot_s": tpot_s if tpot_s < math.inf else None,
        "prompts": PROMPTS,
        "outputs": OUTPUTS,
        "split_and_whole_req_s": grid,
    }


HETEROGENEOUS = ("het1", "het2", "het3", "het4", "het5")
#: Part -> the function of its rows, and the arguments of each.
PARTS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "exhaustive": (
        exhaustive,
        [(n, cost) for n in range(SMALL + len(clusters.WORKLOADS) + 1) for cost in (ProfileCost, PaperCost)],
    ),
    "twenty": (against, [(name, 20.0) for name in HETEROGENEOUS]),
    "sixty": (against, [(name, 60.0) for name in ("het1", "het3", "het5")]),
    "scale": (scale, [(64, 20.0), (320, 60.0)]),
    "paper": (paper, [(w, name) for w in clusters.WORKLOADS for name in ("homogeneous", "het1", "het5")]),
    "latency": (latency, [(w,) for w in clusters.WORKLOADS]),
    "distserve": (distserve, [(w, model) for model in MODELS for w in clusters.WORKLOADS]),
    "chunked": (chunked, [(w,) for w in clusters.WORKLOADS]),
    "four": (four, [(w,) for w in clusters.WORKLOADS]),
    "simulated": (
        simulated,
        [("het1", w) for w in clusters.WORKLOADS]
        + [(name, "online") for name in ("het2", "het3", "het4", "het5", "homogeneous")],
    ),
    "regions": (
        regions,
        [
            (first, second, between, ttft_s, tpot_s)
            for first, second in (("H100", "H100"), ("H100", "A100"), ("H100", "L40"))
            for ttft_s, tpot_s in ((math.inf, math.inf), (5.0, 0.03))
            for between in (0.625e9, 12.5e9)
        ],
    ),
}


def main() -> None:
    """Run parts and keep their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=tuple(PARTS))
    parser.add_argument("--out", type=Path, default=Path("bench/results/split.json"))
    parser.add_argument("--fresh", action="store_true", help="begin the parts anew")
    parser.add_argument("--smoke", action="store_true", help="the first row of each part")
    args = parser.parse_args()
    for name in args.parts:
        function, arguments = PARTS[name]
        known = json.loads(args.out.read_text() or "{}") if args.out.is_file() else {}
        rows = [] if args.fresh else known.get(name, [])
        for each in arguments[len(rows) : 1 if args.smoke else None]:
            rows.append(function(*each))
            known = json.loads(args.out.read_text() or "{}") if args.out.is_file() else {}
            known[name] = rows
            args.out.write_text(json.dumps(known, indent=1) + "\n")
            print(name, json.dumps(rows[-1])[:600], flush=True)


if __name__ == "__main__":
    main()
