"""How close the simulator is to real vLLM: the same requests through the same proxy, and in virtual time.

Shows: two CPU vLLM servers of unequal size, one a core, profiled live; a seeded load through `hetlb serve`
with its event log; then the same requests simulated twice: `placed` as the log says who got what and when
(the engine model alone), and `free`, the scheduler as it was when the run began deciding anew (all of it).
The simulation sees profiles, capacities, what a lone request costs beyond its profile, arrivals and
lengths, nothing else of the run; every round is compared by itself and the median of the rounds is reported;
times are the proxy's. Exit status 1 if a request failed or a median is above the limit.

`.venv/bin/python bench/fidelity.py` (about 12 minutes on two idle cores) writes bench/results/fidelity.json
and its table into bench/FIDELITY.md; `--emulated` puts `hetlb engine` in the place of vLLM, which
shows what the bench and the machine alone are good for, and writes fidelity-emulated.json alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "vllm"))  # engines.py, pair.py

import pair as real
from engines import REPO_ROOT, SERVED_MODEL_NAME, TINY_FAST, TINY_SLOW

from hetlb.balancer.config.profile_file import Profile, load_profile
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.types import Health, Request
from hetlb.options.event_log.eventlog import Replay, decode_setup, read_value
from hetlb.tools.loadtest.processes import helper_processes
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.workload.arrivals import PlannedRequest, make_plan
from hetlb.tools.workload.records import RequestResult
from hetlb.tools.workload.rows import Row

RESULTS = REPO_ROOT / "bench" / "results"
PAGE = REPO_ROOT / "bench/FIDELITY.md"
PROFILES = REPO_ROOT / "tests" / "vllm" / "profiles"
HETLB = (sys.executable, "-m", "hetlb")
NAMES = (TINY_FAST.name, TINY_SLOW.name)
PROMPT_TOKENS = (32, 320)
OUTPUT_TOKENS = (16, 96)
#: What is required of the medians of `placed`, relative errors.
REQUIRED = {"throughput": 0.05, "tpot": 0.08, "ttft": 0.12}
#: Lone requests that show what a server adds to a request: how many, and how far apart (seconds).
LONE, LONE_GAP_S = 24, 0.4


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server to be compared with."""

    name: str
    url: str


@dataclass(slots=True)
class Observed:
    """One request as the event log tells it; times in seconds on the proxy's clock, whose grain is 1 ms.

    Not the client's stamps: it sees text, and a random model's first token is often part of a character.
    `line` is where the arrival stands in the log, `held_s` how long the proxy kept the request.
    """

    line: int
    request: Request
    arrived_s: float
    instance: str = ""
    held_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return _at(self.first_token_s) - self.arrived_s

    @property
    def e2el_s(self) -> float:
        return _at(self.ended_s) - self.arrived_s

    @property
    def tpot_s(self) -> float:
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)


def main() -> int:
    """Profile, run, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--profiles", type=Path, metavar="DIR", help="take DIR/tiny-fast.yaml and tiny-slow.yaml"
    )
    parser.add_argument(
        "--budget", default="4m", help="of the profiles made otherwise, both at once (default 4m)"
    )
    parser.add_argument("--keep-profiles", type=Path, metavar="DIR", help="copy the profiles made there")
    parser.add_argument("--policies", default="rr,hetlb", help="default rr,hetlb")
    parser.add_argument("--request-rate", default="5,inf", help="requests/s, several allowed (default 5,inf)")
    parser.add_argument("--num-prompts", type=int, default=160, help="requests of a run (default 160)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--emulated", action="store_true", help="`hetlb engine` instead of vLLM")
    parser.add_argument("--one-by-one", action="store_true", help="profile each server while the other rests")
    parser.add_argument("--out", type=Path, help="another file; the page then stays as it is")
    parser.add_argument("--keep-events", type=Path, metavar="FILE", help="copy hetlb's event log there")
    args = parser.parse_args()
    policies = args.policies.split(",")
    if unknown := [name for name in policies if name not in POLICIES]:
        parser.error(f"--policies: expected names out of {', '.join(POLICIES)}, got {unknown[0]!r}")
    rates = [float(rate) for rate in args.request_rate.split(",")]
    started = datetime.now(UTC)
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="hetlb-fidelity-") as name:
        folder = Path(name)
        with servers(folder, emulated=args.emulated) as endpoints:
            profiles = make_profiles(endpoints, folder, args)
            overheads = {each.name: asyncio.run(overhead_s(each, profiles[each.name])) for each in endpoints}
            say(
                ", ".join(
                    f"{name}: a lone request costs {1e3 * s:.1f} ms more" for name, s in overheads.items()
                )
            )
            runs, lines = measure(endpoints, folder, rates, policies, args)
            texts = {each.name: (folder / f"{each.name}.yaml").read_text() for each in endpoints}
        if args.keep_events is not None:
            args.keep_events.write_text("".join(lines))
    setup, observed = read_log(lines)
    engines = engine_specs(profiles, overheads)
    compared = []
    for index, run in enumerate(runs):
        seen = observed[index * args.num_prompts : (index + 1) * args.num_prompts]
        compared.append(compare(setup, lines[: seen[0].line], engines, run, seen))
    document = {
        "about": about(args, started, load_before),
        "request_overhead_s": overheads,
        "profiles": texts,
        "runs": compared,
        "medians": medians(compared),
        "required": REQUIRED,
    }
    name = "fidelity-emulated" if args.emulated else "fidelity"
    out = args.out or RESULTS / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    text = show(document)
    print(text)
    if args.out is None and not args.emulated:
        write_block(name, text)
    return verdict(document)


def say(text: str) -> None:
    """Progress line."""
    print(f"[{datetime.now(UTC):%H:%M:%S}] {text}", file=sys.stderr, flush=True)


# --- the real run ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def servers(folder: Path, *, emulated: bool) -> Iterator[list[Endpoint]]:
    """Both servers, the fast one first."""
    if not emulated:
        say("starting two real vLLM servers on CPU (about a minute)")
        with real.pair(folder / "logs") as started:
            yield [Endpoint(server.name, server.url) for server in started]
        return
    with helper_processes() as helpers:
        endpoints = []
        for name in NAMES:
            profile = str(PROFILES / f"{name}.yaml")
            process = helpers.start(
                name, "engine", "--profile", profile, "--port", "0", "--served-model-name", SERVED_MODEL_NAME
            )
            asyncio.run(process.ready())
            endpoints.append(Endpoint(name, process.urls[0]))
        yield endpoints


def make_profiles(
    endpoints: Sequence[Endpoint], folder: Path, args: argparse.Namespace
) -> dict[str, Profile]:
    """The profiles given, or new ones: of both servers at the same time, since they work at the same time."""
    paths = {each.name: folder / f"{each.name}.yaml" for each in endpoints}
    if args.profiles is not None:
        for path in paths.values():
            path.write_bytes((args.profiles / path.name).read_bytes())
    else:
        say(f"profiling {'each server alone' if args.one_by_one else 'both servers at once'} ({args.budget})")
        sweeps: list[subprocess.Popen[bytes]] = []
        try:
            for each in endpoints:
                command = [*HETLB, "profile", "--url", each.url, "--out", str(paths[each.name])]
                command += ["--budget", args.budget, "--system", "cpu-core", "--tp", "1"]
                sweeps.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, process_group=0))
                if args.one_by_one:
                    sweeps[-1].wait()
            status = [sweep.wait() for sweep in sweeps]
        finally:
            for sweep in sweeps:
                sweep.kill()
        if any(status):
            raise SystemExit(f"a profile failed: exit status {status}")
    if args.keep_profiles is not None:
        args.keep_profiles.mkdir(parents=True, exist_ok=True)
        for path in paths.values():
            (args.keep_profiles / path.name).write_bytes(path.read_bytes())
    return {name: load_profile(path) for name, path in paths.items()}


async def overhead_s(endpoint: Endpoint, profile: Profile) -> float:
    """What a request costs beyond its profile: lone requests for one token, less their prefill; the median.

    A profile leaves out what the server does before its engine has the request; users wait for it.
    """
    prompts = random.Random(7).choices(range(*PROMPT_TOKENS), k=LONE)
    plan = [PlannedRequest(i, LONE_GAP_S * i, Row(None, prompt, 1)) for i, prompt in enumerate(prompts)]
    result = await real.load(endpoint.url, plan, f"lone {time.time_ns()}", stream=False)
    if result.errors:
        raise SystemExit(f"{endpoint.name} does not serve: {result.examples}")
    beyond = []
    for record in result.records:
        prefill_s = profile.latency.prefill_s(record.prompt_tokens)
        beyond.append(_at(record.last_token_s) - _at(record.sent_s) - prefill_s)
    return max(0.0, statistics.median(beyond))


@dataclass(frozen=True, slots=True)
class Run:
    """One real run."""

    number: int
    rate: float
    policy: str
    client: str


def measure(
    endpoints: Sequence[Endpoint],
    folder: Path,
    rates: Sequence[float],
    policies: Sequence[str],
    args: argparse.Namespace,
) -> tuple[list[Run], list[str]]:
    """Every round, rate and policy through the proxy, one after the other; and the event log."""
    instances = [{"name": e.name, "url": e.url, "profile": str(folder / f"{e.name}.yaml")} for e in endpoints]
    models = [{"name": SERVED_MODEL_NAME, "instances": instances}]
    config = folder / "fleet.yaml"
    config.write_text(
        yaml.safe_dump({"version": 1, "listen": {"port": 0}, "admin": {"port": 0}, "models": models})
    )
    events = folder / "events.jsonl"
    rng = random.Random(args.seed)
    rows = [
        Row(None, rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)) for _ in range(args.num_prompts)
    ]
    runs = []
    with helper_processes() as helpers:
        process = helpers.start("hetlb", "serve", "--config", str(config), "--event-log", str(events))
        asyncio.run(process.ready())
        url, admin = process.urls
        proxy = real.Proxy(url, admin, events)
        asyncio.run(proxy.idle())
        for number in range(1, args.rounds + 1):
            for rate in rates:
                for policy in policies:
                    plan = make_plan(rows, None, rate, random.Random(f"{args.seed}/{number}"))
                    runs.append(asyncio.run(_run(proxy, number, rate, policy, plan)))

        async def unwritten() -> int:
            written = events.read_text().count('"kind":"lease_ended"')
            return len(runs) * len(rows) - written

        asyncio.run(real.until(unwritten, "complete event log"))
        return runs, events.read_text().splitlines(keepends=True)


async def _run(
    proxy: real.Proxy, number: int, rate: float, policy: str, plan: Sequence[PlannedRequest]
) -> Run:
    async with proxy.policy(policy):
        result = await real.load(proxy.url, plan, f"fidelity {time.time_ns()}")
        await proxy.idle()
    if result.errors:
        raise SystemExit(f"requests failed under {policy}: {result.examples}")
    summary = result.summary()
    say(f"round {number}, {rate:g} requests/s, {policy}: {summary['total_token_throughput']:,.0f} tokens/s")
    return Run(number, rate, policy, summary["client"]["verdict"])


# --- the log --------------------------------------------------------------------------------------------


def read_log(lines: Sequence[str]) -> tuple[SchedulerSetup, list[Observed]]:
    """The set-up, and every request in order of arrival."""
    setup = decode_setup(lines[0])
    requests: dict[int, Observed] = {}
    leases: dict[int, Observed] = {}
    for number, line in enumerate(lines[1:], start=1):
        fact = json.loads(line)
        now, kind = fact["t"], fact["kind"]
        if kind == "arrival":
            request = read_value(Request, fact["request"])
            requests[request.id] = Observed(number, request, now)
        elif kind == "first_token":
            leases[fact["lease"]].first_token_s = now
        elif kind == "lease_ended":
            leases[fact["lease"]].ended_s = now
            leases[fact["lease"]].output_tokens = fact["output_tokens"]
        for command in fact["out"]:
            if command[0] == "dispatch":
                seen = leases[command[2]] = requests[command[1]]
                seen.instance, seen.held_s = command[3], now - seen.arrived_s
    return setup, list(requests.values())


# --- simulated ------------------------------------------------------------------------------------------


class Replayed(FleetSimulation):
    """A simulation whose scheduler is told of each request what the proxy's was told."""

    requests: Mapping[int, Request]

    def make_request(self, planned: PlannedRequest) -> Request:
        return replace(self.requests[planned.index], id=planned.index)


def engine_specs(profiles: Mapping[str, Profile], overheads: Mapping[str, float]) -> dict[str, EngineSpec]:
    """The simulated engines."""
    return {
        name: EngineSpec(
            replace(profile.latency, request_s=overheads[name]), EngineLimits.from_capacity(profile.capacity)
        )
        for name, profile in profiles.items()
    }


def simulate_placed(
    setup: SchedulerSetup, engines: Mapping[str, EngineSpec], seen: Sequence[Observed]
) -> list[RequestResult]:
    """Each engine with the requests it got, when it got them."""
    records: dict[int, RequestResult] = {}
    for spec in setup.specs:
        plan = [
            PlannedRequest(
                i, each.arrived_s + each.held_s, Row(None, each.request.prompt_tokens, each.output_tokens)
            )
            for i, each in enumerate(seen)
            if each.instance == spec.name
        ]
        plan.sort(key=lambda planned: planned.scheduled_s)
        start_s = seen[0].arrived_s
        # In front of a server that is found already.
        alone = replace(setup, specs=(spec,), policy="single", initial_health=Health.UP, now=start_s)
        run = FleetSimulation(alone, engines, plan, model=spec.model, start_s=start_s)
        records.update(zip((planned.index for planned in plan), run.run().records, strict=True))
    return [records[i] for i in range(len(seen))]


def simulate_free(
    before: Sequence[str], engines: Mapping[str, EngineSpec], seen: Sequence[Observed]
) -> list[RequestResult]:
    """The whole fleet; the scheduler decides, knowing what it knew when the run began."""
    replay = Replay(before)
    for step in replay:
        assert step.same, f"line {step.line}: the log replays with another decision"
    plan = [
        PlannedRequest(i, each.arrived_s, Row(None, each.request.prompt_tokens, each.output_tokens))
        for i, each in enumerate(seen)
    ]
    model, start_s = replay.setup.specs[0].model, seen[0].arrived_s
    simulation = Replayed(replay.setup, engines, plan, model=model, start_s=start_s)
    simulation.scheduler = replay.scheduler
    simulation.requests = {i: each.request for i, each in enumerate(seen)}
    return simulation.run().records


# --- compared -------------------------------------------------------------------------------------------


def compare(
    setup: SchedulerSetup,
    before: Sequence[str],
    engines: Mapping[str, EngineSpec],
    run: Run,
    seen: Sequence[Observed],
) -> dict[str, Any]:
    """One run against its two simulations; `before` is the event log up to its first request."""
    placed = simulate_placed(setup, engines, seen)
    free = simulate_free(before, engines, seen)
    tokens = sum(each.request.prompt_tokens + each.output_tokens for each in seen)
    return {
        "round": run.number,
        "request_rate": f"{run.rate:g}",
        "policy": run.policy,
        "client": run.client,
        "real": {
            "tok_s": tokens / (max(_at(each.ended_s) for each in seen) - seen[0].arrived_s),
            "mean_ttft_ms": 1e3 * statistics.fmean(each.ttft_s for each in seen),
            "mean_tpot_ms": 1e3 * statistics.fmean(each.tpot_s for each in seen),
            "mean_e2el_ms": 1e3 * statistics.fmean(each.e2el_s for each in seen),
        },
        "requests": {name: sum(each.instance == name for each in seen) for name in engines},
        "requests_free": {name: sum(record.instance == name for record in free) for name in engines},
        "placed": errors(seen, placed),
        "free": errors(seen, free),
        "by_instance": {
            name: errors([seen[i] for i in mine], [placed[i] for i in mine])
            for name in engines
            if (mine := [i for i, each in enumerate(seen) if each.instance == name])
        },
    }


def errors(seen: Sequence[Observed], records: Sequence[RequestResult]) -> dict[str, float]:
    """Return relative errors: the mean over requests of each one's, and `bias`, the error of their mean.

    `finish` is of a request's whole time, `throughput` of tokens/s from the first request on to the
    last token.
    """
    found: dict[str, float] = {}
    kinds: dict[str, tuple[Callable[[Observed], float], Callable[[Observed, RequestResult], float]]] = {
        "ttft": (lambda o: o.ttft_s, lambda o, r: _at(r.first_token_s) - o.arrived_s),
        "tpot": (lambda o: o.tpot_s, lambda o, r: r.tpot_s or 0.0),
        "finish": (lambda o: o.e2el_s, lambda o, r: _at(r.last_token_s) - o.arrived_s),
    }
    for name, (measured, simulated) in kinds.items():
        pairs = [(measured(o), simulated(o, r)) for o, r in zip(seen, records, strict=True)]
        found[name] = statistics.fmean(abs(sim / was - 1) for was, sim in pairs)
        found[f"{name}_bias"] = sum(sim for _, sim in pairs) / sum(was for was, _ in pairs) - 1
    start = seen[0].arrived_s
    was = max(_at(each.ended_s) for each in seen) - start
    found["throughput_bias"] = was / (max(_at(record.last_token_s) for record in records) - start) - 1
    found["throughput"] = abs(found["throughput_bias"])
    return found


def _at(when: float | None) -> float:
    assert when is not None, "expected a request that completed"
    return when


def medians(compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the rounds, for every rate and policy; and over the rounds of the mean of them all."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in compared:
        groups.setdefault((run["request_rate"], run["policy"]), []).append(run)
    found = [
        {
            "request_rate": rate,
            "policy": policy,
            **{way: _medians(run[way] for run in runs) for way in ("placed", "free")},
        }
        for (rate, policy), runs in groups.items()
    ]
    rounds: dict[int, list[Mapping[str, Any]]] = {}
    for run in compared:
        rounds.setdefault(run["round"], []).append(run)
    means = {
        way: [
            {key: statistics.fmean(run[way][key] for run in runs) for key in runs[0][way]}
            for runs in rounds.values()
        ]
        for way in ("placed", "free")
    }
    return [*found, {"request_rate": "all", "policy": "all", **{way: _medians(means[way]) for way in means}}]


def _medians(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    tables = list(tables)
    return {key: statistics.median(table[key] for table in tables) for key in tables[0]}


def show(document: Mapping[str, Any]) -> str:
    """The medians in Markdown: every case as it was placed, and all cases simulated freely too."""
    kinds = ("throughput", "ttft", "tpot", "finish")
    lines = [
        "| requests/s | policy | placement | " + " | ".join(kinds) + " |",
        "| --- | --- | --- | " + " | ".join("---:" for _ in kinds) + " |",
    ]
    for each in document["medians"]:
        for way, label in (("placed", "as it was"), ("free", "simulated")):
            if way == "free" and each["policy"] != "all":
                continue
            cells = (
                f"{100 * each[way][kind]:.1f} % ({100 * each[way][f'{kind}_bias']:+.1f})" for kind in kinds
            )
            lines.append(
                f"| {each['request_rate']} | `{each['policy']}` | {label} | " + " | ".join(cells) + " |"
            )
    return "\n".join(lines)


def write_block(name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end -->` on the page."""
    page = PAGE.read_text()
    before, found, rest = page.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not found or not end:
        raise SystemExit(f"{PAGE}: expected the markers <!-- {name} --> and <!-- end -->")
    PAGE.write_text(f"{before}{found}{text}\n{end}{after}")


def verdict(document: Mapping[str, Any]) -> int:
    """0 if every requirement is met by the medians over all runs, with the placement as it was."""
    reached = document["medians"][-1]["placed"]
    missed = {kind: most for kind, most in REQUIRED.items() if reached[kind] > most}
    for kind, most in REQUIRED.items():
        word = "NOT met" if kind in missed else "met"
        print(f"{kind}: {100 * reached[kind]:.1f} %, at most {100 * most:.0f} %: {word}")
    return 1 if missed else 0


def about(
    args: argparse.Namespace, started: datetime, load_before: tuple[float, float, float]
) -> dict[str, Any]:
    """Where and with what this was measured."""

    def output(*command: str) -> str:
        done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    left_out = ("out", "keep_events", "keep_profiles", "profiles")
    how = "each server alone" if args.one_by_one else "both servers at once"
    return {
        "date": started.isoformat(timespec="seconds"),
        "arguments": {key: value for key, value in vars(args).items() if key not in left_out},
        "profiles": "given" if args.profiles is not None else f"measured live, {how}",
        "commit": output("git", "rev-parse", "HEAD"),
        "changed_since": output("git", "diff", "HEAD", "--name-only", "--", "hetlb", "tests/vllm").split(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }


if __name__ == "__main__":
    sys.exit(main())
