"""`hetlb bench`: load against any OpenAI-compatible server, measured by a client that judges itself."""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import secrets
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hetlb.balancer.config.fleet import Fleet, load_fleet
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.cli.flags import COUNT, FINITE, FRACTION, INTEGER, SHARE, add_json, declare, whole
from hetlb.cli.request_files import (
    add_load,
    read_entry,
    read_goodput,
    read_metrics,
    read_names,
    read_percentiles,
    read_ramp,
    read_rates,
)
from hetlb.cli.signals import stoppable
from hetlb.errors import HetlbError, InputError, TraceError, visible
from hetlb.extras import require
from hetlb.inputs.urls import check_base, check_url
from hetlb.output_files import output_path, write_text
from hetlb.tools.loadtest import result_tables
from hetlb.tools.loadtest.bodies import CHAT, COMPLETIONS
from hetlb.tools.loadtest.campaign import Campaign
from hetlb.tools.loadtest.generator import LONGEST_ANSWER_S
from hetlb.tools.loadtest.load_result import (
    csv_text,
    default_filename,
    json_text,
    platform_document,
)
from hetlb.tools.loadtest.result_tables import write_load_plot
from hetlb.tools.loadtest.runs import LoadSpec, first_model
from hetlb.tools.plots import picture_path
from hetlb.tools.tables import Console, Screen
from hetlb.tools.workload.arrivals import Load, Ramp, Rate
from hetlb.tools.workload.rows import Row, block_tokens, classes_of
from hetlb.tools.workload.trace_formats import custom_rows, random_rows, read_trace, sharegpt_rows

_DATASETS = ("random", "sharegpt", "custom")
#: Default number of requests of random and sharegpt, as in `vllm bench serve`.
_DATASET_PROMPTS = 1000
_PLAIN_WIDTH = 130
_HEADER_VALUE = re.compile(r"[\x21-\x7e]{1,256}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hetlb bench`, with the names that `vllm bench serve` has for them."""
    add = declare(parser)
    url = partial(check_url, where="--url", prefixed=True)
    add("--url", "server, http://HOST:PORT", "URL", url, required=True)
    add_load(parser)
    _add_requests(parser)
    add("--ramp-up-strategy", "growth of the rate during a run", choices=("linear", "exponential"))
    add("--ramp-up-start-rps", "requests/s at the start", "R", FINITE)
    add("--ramp-up-end-rps", "requests/s at the end", "R", FINITE)
    add("--max-concurrency", "most requests in flight; with rate inf a closed loop", "N", COUNT)
    limit = "seconds after which a request has failed (default 21600)"
    add("--timeout", limit, "S", FINITE, LONGEST_ANSWER_S)
    add("--num-warmups", "unmeasured requests before every run", "N", whole(0), 0)
    add("--seed", "seed of lengths and arrivals (default 0)", "N", INTEGER, 0)
    admin = partial(check_base, where="--admin", example="http://127.0.0.1:8081")
    add("--admin", "admin address of the proxy at --url", "URL", admin)

    def policies(text: str) -> list[str]:
        return read_names("--compare", text, POLICIES) if text else []

    add("--compare", "policies to compare on the same load; the first is the baseline", "A,B,C", policies, ())
    add("--rounds", "rounds of a comparison; from 2 on with intervals", "N", COUNT, 1)
    highest = "search the highest rate at which this share of requests (default 0.95) meets --goodput"
    add("--sweep", highest, "SHARE", SHARE, nargs="?", const=0.95)
    add("--goodput", "latency limits: ttft, tpot, e2el", "NAME:MS", default=(), nargs="+")
    names = "latencies in the table"
    add("--percentile-metrics", names, "A,B", read_metrics, "ttft,tpot,itl,e2el")
    add("--metric-percentiles", "percentiles of the latencies", "P,Q", read_percentiles, "90,99")
    _add_results(parser)


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    add("--model", "model to ask for (default: the first of /v1/models)")
    path = f"path of the requests (default {COMPLETIONS})"
    add("--endpoint", path, default=COMPLETIONS, choices=(COMPLETIONS, CHAT))
    add("--dataset-name", "source of requests, instead of a trace", choices=_DATASETS)
    add("--config", "fleet file with the classes that the trace names", "FLEET.yaml", Path)
    add("--dataset-path", "file of conversations, prompts, a batch or a trace", "FILE", Path)
    add("--random-input-len", "prompt tokens of random (default 1024)", "N", COUNT, 1024)
    add("--random-output-len", "output tokens of random (default 128)", "N", COUNT, 128)
    add("--random-range-ratio", "spread of random lengths, +-R (0 to 1)", "R", FRACTION, 0.0)
    add("--sharegpt-output-len", "output tokens of sharegpt (default: as recorded)", "N", COUNT)
    add("--custom-output-len", "output tokens of custom (default 256)", "N", COUNT, 256)
    formats = "prompts as token ids or text (default: ids of a trace or random lengths)"
    add("--prompt-format", formats, choices=("ids", "text"))
    add("--num-prompts", "requests (default: every row; random, sharegpt: 1000)", "N", COUNT)
    eos = "answers of exactly the planned length (default)"
    add("--ignore-eos", eos, default=True, action=argparse.BooleanOptionalAction)
    session = "header that names a conversation (default x-session-id)"
    add("--session-header", session, "NAME", default="x-session-id")
    add("--tenant-header", "header that names a tenant, besides `user`", "NAME", default="")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    entries = "entries of the result's metadata"
    add("--metadata", entries, "KEY=VALUE", read_entry, (), nargs="+")
    add("--save-result", "write the JSON document to a file", action="store_true")
    add("--result-dir", "folder of the result (default: the working directory)", "DIR", Path, Path())
    add(
        "--result-filename",
        "name of the result (default: RATEqps-MODEL-DATE.json; .csv: a line per run)",
        "NAME",
    )
    add("--save-detailed", "add times and lengths of every request", action="store_true")
    add("--plot", "picture of latencies and of each instance's share", "P.png", picture_path)
    add_json(parser)
    add("--disable-tqdm", "no progress bar", action="store_true")


def run(args: argparse.Namespace) -> int:
    require(*(["scipy"] if args.rounds > 1 else []))
    started = datetime.now(UTC)
    campaign, fleet = _campaign(args)
    with stoppable() as until_signal:
        interrupted = False
        try:
            until_signal(_measure(campaign, fleet))
        except KeyboardInterrupt:
            interrupted, newest = True, campaign.measured[-1:]
            stopped = [each.run["client"]["reasons"][-1] for each in newest if each.interrupted is not None]
            reason = (*stopped, "interrupted: no request of this run had ended")[0]
            print(visible(f"hetlb bench: {reason}"), file=sys.stderr)
            if not newest:
                return 1
        document = _document(args, campaign, started)
        try:  # what cannot be written is printed all the same
            _write(args, document, campaign, started)
        finally:
            if args.json:
                print(json_text(document))
            else:
                _show(args, document)
            sys.stdout.flush()
    if not interrupted:
        _check_answered(args, campaign)
    return int(interrupted)


def _campaign(args: argparse.Namespace) -> tuple[Campaign, Fleet | None]:
    """Return runs that the flags ask for, all validated, and the fleet of `--config`. Raises `InputError`."""
    _check_flags(args)
    rates = _read_rates(args)
    slo_s = read_goodput(args.goodput)
    if args.sweep and slo_s and not all(isinstance(rate, float) and math.isfinite(rate) for rate in rates):
        raise InputError(f"--request-rate: expected rates to search from, got {args.request_rate!r}")
    if args.sweep and not slo_s and len(rates) < 2:
        raise InputError("--sweep: expected several rates in --request-rate, or limits in --goodput")
    key = os.environ.get("OPENAI_API_KEY")
    rows = _read_rows(args, recorded="trace" in rates)
    texts = args.dataset_name != "random" and all(row.text is not None for row in rows)
    spec = LoadSpec(
        url=args.url,
        model=args.model or "",
        load=Load(rows, args.num_prompts, args.burstiness, waves=args.waves),
        seed=args.seed,
        salt=secrets.token_hex(4),
        endpoint=args.endpoint,
        text=args.prompt_format == "text" or (args.prompt_format is None and texts),
        hash_block_tokens=block_tokens(rows),
        ignore_eos=args.ignore_eos,
        max_concurrency=args.max_concurrency,
        num_warmups=args.num_warmups,
        slo_s=slo_s or None,
        percentiles=args.metric_percentiles,
        headers={"authorization": f"Bearer {key}"} if key else {},
        session_header=args.session_header,
        tenant_header=args.tenant_header,
        timeout_s=args.timeout,
    )
    campaign = Campaign(
        spec,
        rates,
        Screen(quiet=args.disable_tqdm),
        admin_url=args.admin,
        policies=args.compare,
        rounds=args.rounds,
        attainment=args.sweep if slo_s else None,
    )
    return campaign, None if args.config is None else load_fleet(args.config)


def _check_flags(args: argparse.Namespace) -> None:
    """Raise `InputError` for contradictory flags and for output files that cannot be written."""
    if args.compare and args.admin is None:
        raise InputError("--admin: expected the proxy's admin address to compare policies, got none")
    if args.rounds > 1 and not args.compare:
        raise InputError(f"--rounds: expected --compare to repeat, got {args.rounds}")
    for flag, name in (("session", args.session_header), ("tenant", args.tenant_header)):
        if name and not re.fullmatch(r"[A-Za-z0-9-]+", name):
            raise InputError(f"--{flag}-header: expected the name of a header, got {name!r}")
    if args.endpoint == CHAT and args.prompt_format == "ids":
        raise InputError(f"--prompt-format: expected text with {CHAT}, got 'ids'")
    if args.save_result and not args.result_dir.is_dir():
        raise InputError(f"--result-dir: expected a folder that exists, got {args.result_dir}")
    if args.save_result and args.result_filename:
        output_path(args.result_dir / args.result_filename, "--result-filename")


def _read_rates(args: argparse.Namespace) -> list[Rate | Ramp]:
    rates: list[Rate | Ramp] = list(read_rates(args.request_rate))
    ramp = read_ramp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    if ramp is None:
        return rates
    if rates != [math.inf]:
        raise InputError(f"--request-rate: expected none beside a ramp, got {args.request_rate!r}")
    return [ramp]


def _read_rows(args: argparse.Namespace, *, recorded: bool) -> list[Row]:
    """Read the rows of the trace or data set; `recorded` arrivals need a trace. Raises `InputError`."""
    rng = random.Random(args.seed)
    name, path = args.dataset_name, args.trace or args.dataset_path
    if (args.trace is None) == (name is None and args.dataset_path is None):
        raise InputError("expected --trace FILE, --dataset-name random, or --dataset-path FILE")
    count = args.num_prompts or _DATASET_PROMPTS
    if name == "random":
        if recorded:
            raise InputError("--request-rate: expected --trace to replay, got --dataset-name random")
        return random_rows(count, args.random_input_len, args.random_output_len, args.random_range_ratio, rng)
    if path is None:
        raise InputError(f"--dataset-path: expected a file for {name}")
    if name == "sharegpt":
        rows = sharegpt_rows(path, args.sharegpt_output_len, rng)[:count]
    elif name == "custom":
        rows = custom_rows(path, args.custom_output_len)
    else:
        rows = read_trace(path, args.custom_output_len)
    _check_rows(args, path, rows, recorded)
    return rows


def _check_rows(args: argparse.Namespace, path: Path, rows: list[Row], recorded: bool) -> None:
    """Refuse rows that a chat, a header or a replay cannot express. Raises `TraceError`."""
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number}"
        if args.endpoint == CHAT and row.sequences > 1:
            raise TraceError(f"{where}: sequences: expected 1 with {CHAT}, got {row.sequences}")
        if args.tenant_header and row.tenant and not _HEADER_VALUE.fullmatch(row.tenant):
            raise TraceError(f"{where}: tenant: expected a word for a header, got {row.tenant!r}")
        if row.service and not _HEADER_VALUE.fullmatch(row.service):
            raise TraceError(f"{where}: class: expected a word for a header, got {row.service!r}")
        if recorded and row.arrival_s is None:
            raise TraceError(
                f"{path}: arrival_s: expected a time in every row to replay, row {number} has none"
            )


async def _measure(campaign: Campaign, fleet: Fleet | None) -> None:
    """Run the campaign; without `--model` on the server's first model."""
    spec = campaign.spec
    model = spec.model or await first_model(spec.url, spec.headers)
    if fleet is not None:
        spec = replace(spec, classes=classes_of(fleet, model, spec.load.rows))
    campaign.spec = replace(spec, model=model)
    await campaign.run()


def _check_answered(args: argparse.Namespace, campaign: Campaign) -> None:
    """Raise `HetlbError` if requests failed; in a search, which overloads, only if all of a run did."""
    runs = [
        each for each in campaign.measured if each.examples and not (args.sweep and each.run["completed"])
    ]
    if runs:
        count, failed = (sum(each.run[key] for each in runs) for key in ("num_prompts", "failed"))
        which = "every request" if failed == count else f"{failed:,} of {count:,} requests"
        kind, example = next(iter(runs[0].examples.items()))
        raise HetlbError(f"{args.url}: {which} failed, the first with {kind}: {example}")


def _document(args: argparse.Namespace, campaign: Campaign, started: datetime) -> dict[str, Any]:
    """Return the document that `--json` prints and `--save-result` keeps."""
    more = (each.details() if args.save_detailed else {} for each in campaign.measured)
    return {
        "runs": [{**each.run, **its} for each, its in zip(campaign.measured, more, strict=True)],
        "comparison": campaign.comparison,
        "search": campaign.search,
        "metadata": {
            "date": started.isoformat(timespec="seconds"),
            "command": args.command_line,
            "url": args.url,
            "model_id": campaign.spec.model,
            "endpoint": args.endpoint,
            "dataset": args.dataset_name or str(args.trace or args.dataset_path),
            "prompt_salt": campaign.spec.salt,
            "goodput_slo_ms": {name: 1e3 * limit for name, limit in (campaign.spec.slo_s or {}).items()},
            **platform_document(),
            **dict(args.metadata),
        },
    }


def _write(args: argparse.Namespace, document: dict[str, Any], campaign: Campaign, started: datetime) -> None:
    """Write the requested result files."""
    if args.save_result:
        model = document["metadata"]["model_id"]
        name = args.result_filename or default_filename(model, args.request_rate, started)
        text = csv_text(document["runs"]) if name.endswith(".csv") else json_text(document) + "\n"
        write_text(args.result_dir / name, text)
    if args.plot is not None:
        write_load_plot(args.plot, campaign.measured)


def _show(args: argparse.Namespace, document: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    runs = document["runs"]
    console.print(result_tables.throughput_table(runs))
    console.print(result_tables.latency_table(runs, args.percentile_metrics, args.metric_percentiles))
    if len(runs) == 1 and runs[0]["instances"]:
        console.print(result_tables.instances_table(runs[0]))
    if len(runs) == 1 and runs[0].get("classes"):
        console.print(result_tables.classes_table(runs[0]))
    for comparison in document["comparison"]:
        console.print(result_tables.comparison_table(comparison))
    if document["search"]:
        console.print(result_tables.search_table(document["search"]))
