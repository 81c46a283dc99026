"""The engine model against data of GPUs that it was not made from: logs, single iterations, closed loops.

    python bench/model_truth.py [DATA] [--write]

DATA (default: the folder shared/data beside the checkout) holds `vllm-logs`, `iterations` and `closed-loop`;
what is missing is skipped with a message. Profiles are made as a user would: of tables of kernels, host time
and mixed steps assumed. `--write` puts the tables into bench/FIDELITY.md, `--only` makes one of them.

* Logs: requests of a real server replayed; errors of the mean without any assumption (no host time,
  decodes beside a prompt as k5..k8 have them), with what is assumed, and with a probe's host time.
* Iterations: every forward pass of a real server against the model's time for it, the same three ways; the
  longest context of each follows from sums and variances (`bench/contexts.py`).
* Closed loops: clients that send their next request when the last is answered; TPOT against published rows,
  and the order of two layouts under the same load.
* Corrections: a server whose times are drawn, a log of it at half its load, and what that corrects elsewhere.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from contexts import longest_contexts

from hetlb.balancer.config.profile_file import Profile, load_profile
from hetlb.balancer.core.latency import LatencyModel, scaled
from hetlb.balancer.core.step_times import DecodeTable, MixedTerm
from hetlb.balancer.engines.host_probe import with_host_time
from hetlb.cli.main import main as hetlb
from hetlb.errors import HetlbError
from hetlb.tools.profiler.sources import assumed_host
from hetlb.tools.sim.against import errors, fit_corrections, reach, replay
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.iteration_times import uneven_s
from hetlb.tools.sim.study import engine_of
from hetlb.tools.workload.measured_logs import LoggedRequest, read_log

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "bench/FIDELITY.md"
METRICS = ("ttft", "tpot", "e2e")
Rows = list[list[str]]


def percent(share: float) -> str:
    """A signed share in percent."""
    return f"{100 * share:+.1f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, its first column text."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@cache
def composed(model: str, system: str, tp: int, expert: bool = False, dp: int = 1) -> Profile:
    """The profile of `hetlb profile --from aiconfigurator`. Raises `HetlbError`."""
    engine = {"data_parallel_size": dp} if dp > 1 else {}
    engine |= {"enable_expert_parallel": True} if expert else {}
    return made("aiconfigurator", engine, "--model", model, "--system", system, "--tp", str(tp))


def made(source: str, engine: Mapping[str, object], *flags: str) -> Profile:
    """The profile that `hetlb profile --from` makes. Raises `HetlbError`."""
    told = StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(told):
        out = str(Path(folder) / "p.yaml")
        facts = Path(folder) / "facts.yaml"
        facts.write_text(json.dumps({"engine": engine}))
        if hetlb(["profile", "--from", source, "--facts", str(facts), "--out", out, *flags]):
            raise HetlbError(told.getvalue().strip().splitlines()[-1])
        return load_profile(Path(out))


def bare(latency: LatencyModel) -> LatencyModel:
    """The model without any assumption: no host time, decodes beside a prompt as k5..k8 have them."""
    bare = replace(latency, mixed=None, split_kv=None, launch=None)
    return replace(bare, host_s=0.0, host_sequence_s=0.0, request_s=0.0)


# --- logs -----------------------------------------------------------------------------------------------


def logs(data: Path) -> str:
    """Errors of the mean of every log with the grid of its GPU."""
    found = []
    for folder in sorted(path.parent for path in data.glob("vllm-logs/*/iteration_time.csv")):
        log = read_log(folder / "requests.csv")
        engine = engine_of(made(f"csv:{folder / 'iteration_time.csv'}", KV_CACHES.get(folder.name, {})))
        engine = replace(engine, limits=replace(engine.limits, max_num_seqs=256, max_num_batched_tokens=2048))
        kinds = {"nothing assumed": bare(engine.latency), "assumed": engine.latency}
        if (found_probe := probe_of_log(log.requests, engine.latency, folder.name)) is not None:
            kinds["as a probe finds it"] = found_probe
        for words, latency in kinds.items():
            said = errors(log.requests, replay(log.requests, replace(engine, latency=latency)).requests)
            found.append([folder.name, words, *(percent(said[name].error) for name in METRICS)])
    return table(["log", "host time", "TTFT %", "TPOT %", "E2E %"], found) if found else ""


def probe_of_log(requests: Sequence[LoggedRequest], latency: LatencyModel, name: str) -> LatencyModel | None:
    """Return a model with the host time that its server would show a probe, None if nothing tells.

    Requests of the log that ran alone tell what a probe asks for. Where there are none, `NO_HOST_TIME` does.
    """
    if name in NO_HOST_TIME:
        return replace(latency, host_s=0.0, host_sequence_s=0.0, request_s=0.0)
    ends = [each.arrival_s + each.e2e_s for each in requests]
    lone = [
        each
        for i, each in enumerate(requests)
        if each.output_tokens > 8
        and all(end <= each.arrival_s for end in ends[:i])
        and all(other.arrival_s >= ends[i] for other in requests[i + 1 :])
    ]
    if not lone:
        return None
    found = [
        with_host_time(
            latency,
            each.input_tokens,
            each.output_tokens,
            (each.e2e_s - each.ttft_s) / (each.output_tokens - 1),
            each.ttft_s,
        )
        for each in lone
    ]
    return sorted(found, key=lambda each: each.host_s)[len(found) // 2]


#: Servers whose logs have no lone request, and whose iterations last as long as their kernels: with times
#: straight from the tables `real_run.py` is off by +0.1 to +0.7 %.
NO_HOST_TIME = ("rtx4090-llama-3.1-8b",)


#: What the READMEs say of the servers that wrote the logs.
KV_CACHES = {"rtx4090-llama-3.1-8b": {"kv_cache_tokens": 41408, "block_size": 16}}


# --- single iterations ----------------------------------------------------------------------------------

#: Files of iterations, and the model, system and layout of the profile that is held against them.
RUNS = {
    "b300-qwen3-32b-tp2": ("Qwen/Qwen3-32B", "b300_sxm", 2, False),
    "b300-qwen3.6-35b-a3b-tp2-ep2": ("Qwen/Qwen3.5-35B-A3B", "b300_sxm", 2, True),
}


def iteration_s(latency: LatencyModel, row: dict[str, float], longest_context: float | None) -> float:
    """Seconds that the model says for a forward pass; of its prompts mean and variance are known."""
    tokens, prompts = row["sum_prefill_tokens"], row["num_prefill_requests"]
    batch, kv_tokens = row["num_decode_requests"], row["sum_decode_kv_tokens"]
    if not tokens:
        return latency.step_s(batch, kv_tokens) + uneven_s(latency, batch, kv_tokens, longest_context or 0.0)
    mean, variance = tokens / prompts, row["var_prefill_length"]
    longest = min(tokens, mean + (variance * (prompts - 1)) ** 0.5) if prompts > 1 else tokens
    attended = prompts * (mean * mean + variance) + 2 * row["sum_prefill_kv_tokens"] * mean
    return latency.mixed_step_s(tokens, prompts, longest, batch, kv_tokens, attended)


def passes(path: Path) -> list[tuple[str, str, dict[str, float]]]:
    """Phase, segment and figures of the forward passes of a file, in order."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    words = ("phase", "workload_segment")
    figures = [{key: float(value) for key, value in row.items() if key not in words} for row in rows]
    found = [(row["phase"], row["workload_segment"], each) for row, each in zip(rows, figures, strict=True)]
    return sorted(found, key=lambda each: each[2]["counter_id"])


def iterations(data: Path) -> str:
    """Return errors of forward passes: nothing assumed, assumed, and with a probe's host time."""
    found = []
    for name, (model, system, tp, expert) in RUNS.items():
        path = data / "iterations" / f"{name}.csv.gz"
        if not path.exists():
            continue
        latency = composed(model, system, tp, expert).latency
        rows = passes(path)
        models = (bare(latency), latency, probe_of_passes(rows, latency))
        longest = longest_contexts([row for _, segment, row in rows if segment == "real"])
        kinds: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        for phase, _, row in rows:
            context = longest.get(int(row["counter_id"]))
            said = [iteration_s(each, row, context) for each in models]
            for kind in kinds_of(phase, row):
                kinds[kind].append((row["latency_ms"] / 1e3, *said))
        for kind, each in sorted(kinds.items()):
            measured, *sums = (sum(column) for column in zip(*each, strict=True))
            off = [percent(one / measured - 1) for one in sums]
            mean_error = f"{100 * fmean(abs(one[-1] / one[0] - 1) for one in each):.1f}"
            found.append([name, kind, str(len(each)), *off, mean_error])
    sums_of = [f"sum, {what} %" for what in ("nothing assumed", "assumed", "as a probe finds it")]
    return table(["run", "passes", "number", *sums_of, "mean error %"], found) if found else ""


def probe_of_passes(rows: Sequence[tuple[str, str, dict[str, float]]], latency: LatencyModel) -> LatencyModel:
    """Return a model with the host time that lone decodes show, as a probe's request does."""
    lone = [row for _, _, row in rows if not row["sum_prefill_tokens"] and row["num_decode_requests"] == 1]
    prompt = median(row["sum_decode_kv_tokens"] for row in lone)
    step_s = median(row["latency_ms"] for row in lone) / 1e3
    return with_host_time(latency, prompt, 0.0, step_s, latency.prefill_s(prompt) + latency.request_s)


def kinds_of(phase: str, row: dict[str, float]) -> list[str]:
    """Kinds of passes that one belongs to."""
    if phase == "context":
        return ["all", "prefill"]
    if phase == "mixed":
        size = "mixed up to 512 prompt tokens" if row["sum_prefill_tokens"] <= 512 else "mixed above"
        return ["all", "mixed", size]
    if row["num_decode_requests"] < 16:
        return ["all", "decode, below 16 sequences"]
    spread = row["var_decode_kv_tokens"] ** 0.5 / (row["sum_decode_kv_tokens"] / row["num_decode_requests"])
    return ["all", f"decode, 16 sequences or more, contexts {'unequal' if spread > 0.6 else 'alike'}"]


# --- closed loops ---------------------------------------------------------------------------------------

#: Models of the rows whose weights are of another file.
NAMES = {"meta-llama/Llama-3.1-70B": "nvidia/Llama-3.1-70B-Instruct-FP8"}
#: Servers of 2025 scheduled synchronously; where the version is not told, the date says so.
SYNCHRONOUS = ("0.12.0", "")
ROUNDS = 6


def closed_loop(engine: EngineSpec, clients: int, prompt: int, output: int) -> float:
    """Mean TPOT of clients that send their next request when the last is answered; the start is left out."""
    rng = random.Random(prompt * output + clients)
    model = EngineModel(engine.latency, engine.limits)
    sent, now, total = 0, 0.0, clients * ROUNDS
    times: list[float] = []

    def send() -> None:
        nonlocal sent
        sent += 1
        model.submit(EngineSequence(prompt, max(2, round(output * rng.uniform(0.9, 1.1))), [0.0]))

    for _ in range(clients):
        send()
    while (stretch := model.begin_run()) is not None:
        now += stretch.duration_s
        ended = model.end_iteration()
        for sequence in ended.first:
            sequence.tag[0] = now
        for sequence in ended.finished:
            times.append((now - sequence.tag[0]) / (sequence.output_tokens - 1))
            if sent < total:
                send()
    return fmean(times[clients:-clients] if len(times) > 2 * clients else times)


@dataclass(frozen=True, slots=True)
class Row:
    """A published row and what the model says of it; TPOT in seconds."""

    model: str
    layout: tuple[int, int, int]
    load: tuple[int, int, int]
    measured_s: float
    said_s: float
    bare_s: float


def closed_loops(data: Path) -> tuple[str, str]:
    """TPOT against published rows by model, and how often the order of two layouts is right."""
    path = data / "closed-loop" / "vllm-public.csv"
    if not path.exists():
        return "", ""
    rows, refused = [], set()
    with path.open() as file:
        for raw in csv.DictReader(file):
            try:
                rows.append(said_of(raw))
            except HetlbError as caught:
                refused.add(str(caught))
    by_model: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_model[row.model].append(row)
    found = []
    for model, each in sorted(by_model.items()):
        before = [row.bare_s / row.measured_s - 1 for row in each]
        now = [row.said_s / row.measured_s - 1 for row in each]
        right, pairs = order(each)
        errors_of = [percent(fmean(before)), percent(fmean(now)), f"{100 * fmean(map(abs, now)):.1f}"]
        found.append([model, str(len(each)), *errors_of, f"{right} of {pairs}"])
    orders = [order(each) for each in by_model.values()]
    right, pairs = sum(each for each, _ in orders), sum(each for _, each in orders)
    found.append(["all", str(len(rows)), "", "", "", f"{right} of {pairs}"])
    header = [
        "model",
        "rows",
        "TPOT bias, nothing assumed %",
        "TPOT bias %",
        "mean error %",
        "order of layouts right",
    ]
    return table(header, found), "; ".join(sorted(refused))


def said_of(raw: dict[str, str]) -> Row:
    """A row with the times of the model. Raises `HetlbError` where no profile can be made."""
    tp, expert = int(raw["tp_size"]), int(raw["moe_ep_size"] or 1) > 1
    gpus = max(tp, int(raw["moe_tp_size"] or 1) * int(raw["moe_ep_size"] or 1))
    dp = gpus // tp
    name = NAMES.get(raw["model_path"], raw["model_path"])
    profile = composed(name, raw["system"], tp, expert, dp)
    synchronous = raw["backend_version"] in SYNCHRONOUS
    clients, prompt, output = int(raw["batch_size"]), int(raw["isl"]), int(raw["osl"])
    limits = EngineLimits.from_capacity(profile.capacity)
    limits = replace(limits, max_num_seqs=1024, max_num_batched_tokens=8192, async_scheduling=not synchronous)
    latency = with_host(profile.latency, synchronous)
    said_s, bare_s = (
        closed_loop(EngineSpec(each, limits), max(1, round(clients / dp)), prompt, output)
        for each in (latency, bare(latency))
    )
    measured_s = float(raw["silicon_tpot_ms"]) / 1e3
    return Row(
        raw["model_path"], (tp, dp, int(expert)), (prompt, output, clients), measured_s, said_s, bare_s
    )


def with_host(latency: LatencyModel, synchronous: bool) -> LatencyModel:
    """The host time that is assumed for such scheduling."""
    host = assumed_host(not synchronous)
    return replace(latency, host_s=host.iteration_s, host_sequence_s=host.sequence_s)


def order(rows: Sequence[Row]) -> tuple[int, int]:
    """Pairs of layouts under one load whose order is right, and all that differ by 2 % or more."""
    right = pairs = 0
    by_load: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        by_load[row.load].append(row)
    for each in by_load.values():
        for one, two in combinations(each, 2):
            if one.layout == two.layout or abs(one.measured_s / two.measured_s - 1) < 0.02:
                continue
            pairs += 1
            right += (one.measured_s < two.measured_s) == (one.said_s < two.said_s)
    return right, pairs


# --- corrections by a log -------------------------------------------------------------------------------

SERVERS, WRITTEN, RATES = 8, (2, 4, 6), (2, 4, 6, 7, 8)
LIMITS = EngineLimits(263_000, 16, 256, 2048, async_scheduling=True)


def drawn(start: LatencyModel, rng: random.Random) -> LatencyModel:
    """Return a server whose every term is off by as much as was found elsewhere."""
    assert start.better_prefill is not None
    assert isinstance(start.better_decode, DecodeTable)
    token_s = start.better_decode.token_s
    return replace(
        start,
        better_prefill=scaled(start.better_prefill, rng.uniform(0.9, 1.15)),
        better_decode=scaled(start.better_decode, rng.uniform(0.92, 1.12)),
        mixed=MixedTerm(
            rng.uniform(0, 6e-5),
            rng.uniform(0, 6e-8),
            rng.uniform(1, 3) * token_s,
            rng.uniform(2, 6) * token_s,
        ),
        host_s=rng.uniform(0, 2e-3),
        host_sequence_s=rng.uniform(0, 3e-5),
        request_s=rng.uniform(2e-3, 15e-3),
    )


def log_of(server: LatencyModel, rate: float, seed: int, count: int = 400) -> list[LoggedRequest]:
    """A log of a server: lognormal lengths, Poisson arrivals."""
    rng, at_s, asked = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        prompt = min(3000, max(8, int(rng.lognormvariate(6.0, 0.9))))
        asked.append(
            LoggedRequest(at_s, prompt, min(1200, max(2, int(rng.lognormvariate(5.2, 0.7)))), 0.0, 0.0)
        )
    return replay(asked, EngineSpec(server, LIMITS)).requests


def corrections() -> str:
    """The worst of TTFT, TPOT and E2E at every load, before and after a correction at each of the others."""
    start = load_profile(ROOT / "profiling" / "a100_sxm-qwen3-14b-tp1.yaml").latency
    engine = EngineSpec(start, LIMITS)
    off: dict[tuple[int, int], list[tuple[float, float, bool]]] = defaultdict(list)
    refused = 0
    for number in range(SERVERS):
        server = drawn(start, random.Random(number))
        logs = {rate: log_of(server, rate, 10 * number + rate) for rate in RATES}
        before = {rate: worst(log, engine) for rate, log in logs.items()}
        for written in WRITTEN:
            found = fit_corrections(logs[written], engine)
            tested = reach(logs[written], engine, found)
            if tested.harms:
                refused += 1
                continue
            fixed = replace(engine, latency=found.applied(start))
            for rate, log in logs.items():
                holds = rate <= max(1.0, tested.times) * written
                off[written, rate].append((before[rate], worst(log, fixed), holds))
    rows = []
    for (written, rate), each in sorted(off.items()):
        sides = ([one for one, _, _ in each], [two for _, two, _ in each])
        figures = [f"{100 * figure(side):.1f}" for side in sides for figure in (median, max)]
        harm = f"{100 * max(after - first for first, after, _ in each):+.1f}"
        held = [after for _, after, holds in each if holds]
        said = [f"{len(held)} of {len(each)}", f"{100 * max(held):.1f}" if held else ""]
        rows.append([f"{written}/s", f"{rate}/s", *figures, harm, *said])
    header = [
        "log at",
        "load",
        "before, median %",
        "most %",
        "corrected, median %",
        "most %",
    ]
    header += ["worse by, most", "said to hold", "most % there"]
    return table(header, rows) + f"\n\n{refused} of {SERVERS * len(WRITTEN)} logs were refused."


def worst(log: Sequence[LoggedRequest], engine: EngineSpec) -> float:
    """The largest error of a mean that users see."""
    said = errors(log, replay(log, engine).requests)
    return max(abs(said[name].error) for name in METRICS)


# --- the page -------------------------------------------------------------------------------------------


def main() -> int:
    """Print, and write, what the data allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", default=ROOT.parent / "shared" / "data")
    parser.add_argument("--write", action="store_true", help="put the tables into bench/FIDELITY.md")
    names = ("truth-logs", "truth-iterations", "truth-loops", "truth-corrections")
    parser.add_argument("--only", choices=names, help="one table alone")
    args = parser.parse_args()
    parts: dict[str, Callable[[], str]] = {
        "truth-logs": lambda: logs(args.data),
        "truth-iterations": lambda: iterations(args.data),
        "truth-loops": lambda: "\n\nNo profile: ".join(filter(None, closed_loops(args.data))),
        "truth-corrections": corrections,
    }
    for name, part in parts.items():
        if args.only not in (None, name):
            continue
        try:
            text = part()
        except HetlbError as caught:
            text = ""
            print(f"{name}: skipped: {caught}", file=sys.stderr)
        if not text:
            print(f"{name}: skipped: its data does not lie in {args.data}", file=sys.stderr)
            continue
        print(f"## {name}\n{text}\n", flush=True)
        if args.write:
            page = PAGE.read_text()
            begin, end = f"<!-- {name} -->\n", "\n<!-- end -->"
            head, _, rest = page.partition(begin)
            PAGE.write_text(head + begin + text + rest[rest.index(end) :])
    return 0


if __name__ == "__main__":
    sys.exit(main())
