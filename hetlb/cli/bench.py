"""`hetlb bench`: load against any OpenAI-compatible server, measured by a client that judges itself.

The load is open-loop and made before the run from the seed; latency counts from the time a request
was due; every run says whether its client was fit to measure. Ctrl-C ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import re
import secrets
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from hetlb.cli.flags import FINITE, SHARE, add_json, add_load, declare, real, whole
from hetlb.cli.signals import cancel_on_signals
from hetlb.config.fleet import load_fleet
from hetlb.core.objective import ServiceClass
from hetlb.core.policies.registry import POLICIES
from hetlb.errors import HetlbError, InputError, TraceError
from hetlb.extras import require
from hetlb.files import write_text
from hetlb.loadtest import options
from hetlb.loadtest.bodies import CHAT, COMPLETIONS
from hetlb.loadtest.campaign import Campaign, CampaignResult
from hetlb.loadtest.metrics import details
from hetlb.loadtest.report import (
    classes_table,
    comparison_table,
    instances_table,
    latency_table,
    search_table,
    throughput_table,
)
from hetlb.loadtest.results import (
    check_writable,
    csv_text,
    default_filename,
    json_text,
    platform_document,
)
from hetlb.loadtest.runs import LoadSpec, first_model
from hetlb.loadtest.screen import Screen
from hetlb.workload.arrivals import Ramp, Rate
from hetlb.workload.datasets import custom_rows, random_rows, sharegpt_rows
from hetlb.workload.traces import Row, read_trace

_DATASETS = ("random", "sharegpt", "custom")
#: Of the datasets that do not say how much of them to ask; `vllm bench serve` has the same.
_DATASET_PROMPTS = 1000
_PLAIN_WIDTH = 130
_HEADER_VALUE = re.compile(r"[\x21-\x7e]{1,256}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb bench`, named as those of `vllm bench serve` where it has them."""
    parser.add_argument("--url", required=True, metavar="URL", help="server, http://HOST:PORT")
    add_load(parser)
    _add_requests(parser)
    add, switch = declare(parser), parser.add_argument
    switch("--ramp-up-strategy", choices=("linear", "exponential"), help="growth of the rate during a run")
    add("--ramp-up-start-rps", "requests/s at the start", "R", FINITE)
    add("--ramp-up-end-rps", "requests/s at the end", "R", FINITE)
    add("--max-concurrency", "most requests in flight; with rate inf a closed loop", "N", whole(1))
    add("--num-warmups", "unmeasured requests before every run", "N", whole(0), 0)
    add("--seed", "seed of lengths and arrivals (default 0)", "N", int, 0)
    add("--admin", "admin address of the proxy at --url", "URL")
    add("--compare", "policies to compare on the same load; the first is the baseline", "A,B,C")
    add("--rounds", "rounds of a comparison; from 2 on with intervals", "N", whole(1), 1)
    switch("--sweep", action="store_true", help="with --goodput: search the highest rate that meets it")
    add("--slo-attainment", "share of requests that must meet the limits (default 0.95)", "S", SHARE, 0.95)
    switch("--goodput", nargs="+", default=(), metavar="NAME:MS", help="latency limits: ttft, tpot, e2el")
    add("--percentile-metrics", "latencies in the table", "A,B", default="ttft,tpot,itl,e2el")
    add("--metric-percentiles", "percentiles of the latencies", "P,Q", default="90,99")
    _add_results(parser)


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add, switch = declare(parser), parser.add_argument
    add("--model", "model to ask for (default: the first of /v1/models)")
    path = f"path of the requests (default {COMPLETIONS})"
    switch("--endpoint", choices=(COMPLETIONS, CHAT), default=COMPLETIONS, help=path)
    switch("--dataset-name", choices=_DATASETS, help="source of requests, instead of a trace")
    add("--config", "fleet file with the classes that the trace names", "FLEET.yaml", Path)
    add("--dataset-path", "file of sharegpt (JSON) or custom (text or .jsonl)", "FILE", Path)
    add("--random-input-len", "prompt tokens of random (default 1024)", "N", whole(1), 1024)
    add("--random-output-len", "output tokens of random (default 128)", "N", whole(1), 128)
    spread = real("0 to 1", lambda value: 0 <= value <= 1)
    add("--random-range-ratio", "spread of random lengths, +-R (0 to 1)", "R", spread, 0.0)
    add("--sharegpt-output-len", "output tokens of sharegpt (default: as recorded)", "N", whole(1))
    add("--custom-output-len", "output tokens of custom (default 256)", "N", whole(1), 256)
    formats = "prompts as token ids or text (default: ids of a trace or random lengths)"
    switch("--prompt-format", choices=("ids", "text"), help=formats)
    add("--num-prompts", "requests (default: every row; random, sharegpt: 1000)", "N", whole(1))
    eos = "answers of exactly the planned length (default)"
    switch("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help=eos)
    add("--prompt-salt", "seed of the prompts (default: new ones, in no cache)", "TEXT")
    session = "header that names a conversation (default x-session-id)"
    add("--session-header", session, "NAME", default="x-session-id")
    add("--tenant-header", "header that names a tenant, besides `user`", "NAME", default="")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add, switch = declare(parser), parser.add_argument
    switch("--metadata", nargs="+", default=(), metavar="KEY=VALUE", help="entries of the result's metadata")
    switch("--save-result", action="store_true", help="write the JSON document to a file")
    add("--result-dir", "folder of the result (default: the working directory)", "DIR", Path, Path())
    add("--result-filename", "name of the result (default: RATEqps-MODEL-DATE.json)", "NAME")
    switch("--save-detailed", action="store_true", help="add times and lengths of every request")
    add("--csv", "CSV file, a line per run", "FILE", Path)
    add("--html", "report with charts, in one file", "FILE", Path)
    add_json(parser)
    switch("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    require(*(["jinja2"] if args.html else []), *(["scipy"] if args.rounds > 1 else []))
    bench = _Bench(args)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(bench.run(Screen(quiet=args.disable_tqdm)))
    except asyncio.CancelledError:
        return 1  # told to stop; Ctrl-C comes as a KeyboardInterrupt
    document = bench.document(outcome)
    bench.write(document, outcome)
    if args.json:
        print(json_text(document))
    else:
        bench.show(document)
    for each in outcome.measured:
        if not each.run["completed"]:
            kind, example = next(iter(each.result.examples.items()))
            raise HetlbError(f"{bench.url}: every request failed, the first with {kind}: {example}")
    return 0


class _Bench:
    """One command: its flags, checked before anything is sent."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._started = datetime.now(UTC)
        self.url = options.read_url("--url", args.url)
        self._rates: list[Rate | Ramp] = list(options.read_rates(args.request_rate))
        ramp = options.read_ramp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
        if ramp is not None:
            if self._rates != [math.inf]:
                raise InputError(f"--request-rate: expected none beside a ramp, got {args.request_rate!r}")
            self._rates = [ramp]
        self._slo_s = options.read_goodput(args.goodput)
        self._metrics = options.read_metrics(args.percentile_metrics)
        self._percentiles = options.read_percentiles(args.metric_percentiles)
        self._metadata = options.read_metadata(args.metadata)
        self._admin_url = None if args.admin is None else options.read_url("--admin", args.admin)
        self._policies = options.read_names("--compare", args.compare, POLICIES) if args.compare else []
        if self._policies and self._admin_url is None:
            raise InputError("--admin: expected the proxy's admin address to compare policies, got none")
        if args.rounds > 1 and not self._policies:
            raise InputError(f"--rounds: expected --compare to repeat, got {args.rounds}")
        if args.sweep and self._slo_s and not all(_is_finite(rate) for rate in self._rates):
            raise InputError(f"--request-rate: expected rates to search from, got {args.request_rate!r}")
        if args.sweep and not self._slo_s and len(self._rates) < 2:
            raise InputError("--sweep: expected several rates in --request-rate, or limits in --goodput")
        for flag, name in (("session", args.session_header), ("tenant", args.tenant_header)):
            if name and not re.fullmatch(r"[A-Za-z0-9-]+", name):
                raise InputError(f"--{flag}-header: expected the name of a header, got {name!r}")
        self._waves = options.read_waves(args.waves)
        if args.endpoint == CHAT and args.prompt_format == "ids":
            raise InputError(f"--prompt-format: expected text with {CHAT}, got 'ids'")
        for flag, path in (("--csv", args.csv), ("--html", args.html)):
            if path is not None:
                check_writable(flag, path)
        if args.save_result and not args.result_dir.is_dir():
            raise InputError(f"--result-dir: expected a folder that exists, got {args.result_dir}")
        if args.save_result and args.result_filename:
            check_writable("--result-filename", args.result_dir / args.result_filename)
        self._salt = secrets.token_hex(4) if args.prompt_salt is None else args.prompt_salt
        self._rows = self._read_rows()
        self._model = args.model
        self._fleet = None if args.config is None else load_fleet(args.config)

    def _read_rows(self) -> list[Row]:
        """Read the rows of the trace or data set. Raises `InputError`."""
        args, rng = self._args, random.Random(self._args.seed)
        if (args.trace is None) == (args.dataset_name is None):
            raise InputError("expected either --trace or --dataset-name")
        if args.trace is not None:
            rows = read_trace(args.trace)
            self._check_rows(rows)
            if "trace" in self._rates:
                for number, row in enumerate(rows, start=1):
                    if row.arrival_s is None:
                        raise TraceError(
                            f"{args.trace}: arrival_s: expected a time in every row to replay, "
                            f"row {number} has none"
                        )
            return rows
        if "trace" in self._rates:
            raise InputError("--request-rate: expected --trace to replay, got --dataset-name")
        if args.dataset_name == "random":
            count = args.num_prompts or _DATASET_PROMPTS
            return random_rows(
                count, args.random_input_len, args.random_output_len, args.random_range_ratio, rng
            )
        if args.dataset_path is None:
            raise InputError(f"--dataset-path: expected a file for {args.dataset_name}")
        if args.dataset_name == "sharegpt":
            return sharegpt_rows(args.dataset_path, args.sharegpt_output_len, rng)[
                : args.num_prompts or _DATASET_PROMPTS
            ]
        return custom_rows(args.dataset_path, args.custom_output_len)

    def _check_rows(self, rows: list[Row]) -> None:
        """Refuse rows that a chat or a header cannot express. Raises `InputError`."""
        args = self._args
        for number, row in enumerate(rows, start=1):
            where = f"{args.trace}: row {number}"
            if args.endpoint == CHAT and row.sequences > 1:
                raise TraceError(f"{where}: sequences: expected 1 with {CHAT}, got {row.sequences}")
            if args.tenant_header and row.tenant and not _HEADER_VALUE.fullmatch(row.tenant):
                raise TraceError(f"{where}: tenant: expected a word for a header, got {row.tenant!r}")
            if row.service and not _HEADER_VALUE.fullmatch(row.service):
                raise TraceError(f"{where}: class: expected a word for a header, got {row.service!r}")

    def _classes(self, model: str) -> dict[str, ServiceClass]:
        """The classes of the model in `--config`, none without one. Raises `InputError`."""
        if self._fleet is None:
            return {}
        classes = self._fleet.service_classes.get(model, {})
        for row in self._rows:
            if row.service not in ("", *classes):
                known = ", ".join(classes) or f"none, as `{model}` has no classes in {self._args.config}"
                raise InputError(f"--trace: class: expected one of {known}, got {row.service!r}")
        return classes

    async def run(self, screen: Screen) -> CampaignResult:
        """Every run."""
        cancel_on_signals()
        args = self._args
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if self._model is None:
            self._model = await first_model(self.url, headers)
        spec = LoadSpec(
            url=self.url,
            model=self._model,
            rows=self._rows,
            num_prompts=args.num_prompts or len(self._rows),
            seed=args.seed,
            salt=self._salt,
            path=args.endpoint,
            text=args.prompt_format == "text"
            or (args.prompt_format is None and args.dataset_name in ("sharegpt", "custom")),
            hash_block_tokens=args.hash_block_size,
            ignore_eos=args.ignore_eos,
            burstiness=args.burstiness,
            max_concurrency=args.max_concurrency,
            num_warmups=args.num_warmups,
            slo_s=self._slo_s or None,
            percentiles=self._percentiles,
            headers=headers,
            session_header=args.session_header,
            tenant_header=args.tenant_header,
            waves=self._waves,
            classes=self._classes(self._model),
        )
        searching = args.sweep and bool(self._slo_s)
        return await Campaign(
            spec,
            self._rates,
            screen,
            admin_url=self._admin_url,
            policies=self._policies,
            rounds=args.rounds,
            attainment=args.slo_attainment if searching else None,
        ).run()

    def document(self, outcome: CampaignResult) -> dict[str, Any]:
        """The document that `--json` prints and `--save-result` keeps."""
        detailed = self._args.save_detailed
        return {
            "runs": [
                {**each.run, **(details(each.result, each.rows) if detailed else {})}
                for each in outcome.measured
            ],
            "comparison": outcome.comparison,
            "search": outcome.search,
            "metadata": {
                "date": self._started.isoformat(timespec="seconds"),
                "command": command_line(self._args),
                "url": self.url,
                "model_id": self._model,
                "endpoint": self._args.endpoint,
                "dataset": self._args.dataset_name or str(self._args.trace),
                "prompt_salt": self._salt,
                "goodput_slo_ms": {name: 1e3 * limit for name, limit in self._slo_s.items()},
                **platform_document(),
                **self._metadata,
            },
        }

    def write(self, document: dict[str, Any], outcome: CampaignResult) -> None:
        """The files that were asked for."""
        args = self._args
        if args.csv is not None:
            write_text(args.csv, csv_text(document["runs"]))
        if args.html is not None:
            from hetlb.loadtest.htmlreport import report

            write_text(args.html, report(document, outcome.measured))
        if args.save_result:
            name = args.result_filename or default_filename(
                str(self._model), args.request_rate, self._started
            )
            write_text(args.result_dir / name, json_text(document) + "\n")

    def show(self, document: dict[str, Any]) -> None:
        """The tables."""
        console = Console(highlight=False, markup=False)
        if not console.is_terminal:
            console.width = _PLAIN_WIDTH
        runs = document["runs"]
        console.print(throughput_table(runs))
        console.print(latency_table(runs, self._metrics, self._percentiles))
        if len(runs) == 1 and runs[0]["instances"]:
            console.print(instances_table(runs[0]))
        if len(runs) == 1 and runs[0].get("classes"):
            console.print(classes_table(runs[0]))
        for comparison in document["comparison"]:
            console.print(comparison_table(comparison))
        if document["search"]:
            console.print(search_table(document["search"]))


def _is_finite(rate: Rate | Ramp) -> bool:
    return isinstance(rate, float) and math.isfinite(rate)


def command_line(args: argparse.Namespace) -> str:
    """The command, with the flags that were left out at their defaults."""
    words = ["hetlb", "bench"]
    for key, value in vars(args).items():
        flag = f"--{key.replace('_', '-')}"
        if key == "command" or value is None or value is False or value == ():
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    if not args.ignore_eos:
        words.append("--no-ignore-eos")
    return shlex.join(words)
