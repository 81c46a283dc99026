"""`hetlb batch`: OpenAI's batch file through any OpenAI-compatible server; the results are the journal."""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

from hetlb.cli.flags import COUNT, FINITE, add_json, declare, print_document
from hetlb.cli.signals import run_until_signal
from hetlb.errors import HetlbError, InputError, visible
from hetlb.inputs.urls import check_url
from hetlb.tools.loadtest.batch_files import BatchJournal, read_jobs
from hetlb.tools.loadtest.batch_run import BACKGROUND_LANES, LANES, BatchRun
from hetlb.tools.loadtest.generator import allow_open_files
from hetlb.tools.tables import Screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    add("requests", "OpenAI's batch file: custom_id, url, body", "IN.jsonl", Path)
    add("results", "its results; begun again, it goes on from them", "OUT.jsonl", Path)
    url = partial(check_url, where="--url", prefixed=True)
    add("--url", "server, http://HOST:PORT", "URL", url, required=True)
    lanes = f"requests at once (default {LANES}; {BACKGROUND_LANES} in a background class)"
    add("--concurrency", lanes, "N", COUNT)
    limit = "seconds after which a request has failed, and a server that answers nothing (default 600)"
    add("--timeout", limit, "S", FINITE, 600.0)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the requests without a result; return 0 if every request was answered, else 1."""
    if os.path.realpath(args.requests) == os.path.realpath(args.results):
        raise InputError(f"{args.results}: expected another file than the one of the requests")
    jobs = read_jobs(args.requests)
    journal = BatchJournal(args.results, {job.custom_id for job in jobs})
    began_s, before = time.monotonic(), len(journal.ended)
    rest = [job for job in jobs if job.custom_id not in journal.ended]
    screen = Screen()
    work = BatchRun(args.url, rest, journal, args.timeout, os.environ.get("OPENAI_API_KEY"), screen.warn)
    try:
        if rest:
            run_until_signal(_shown(work, args, len(rest), screen))
    except InputError:
        raise
    except (HetlbError, KeyboardInterrupt) as stopped:
        reason = str(stopped) or "interrupted"
        ended = f"{len(journal.ended):,} of {len(jobs):,} results are in {args.results}"
        print(visible(f"hetlb batch: {reason}; {ended}: run it again to go on"), file=sys.stderr)
        return 1
    finally:
        journal.close()
    completed = len(jobs) - journal.failed
    document = {"requests": len(jobs), "completed": completed, "failed": journal.failed, "resumed": before}
    document |= {"total_output_tokens": work.progress.output_tokens}
    counts = (
        f"{completed:,} answer{'s'[: completed != 1]}, {journal.failed:,} error{'s'[: journal.failed != 1]}"
    )
    words = f"{args.results}: {counts}"
    words += f"; {before:,} of them before this run" if before else ""
    words += f"; the first error: {journal.first_error}" if journal.first_error else ""
    print_document(args, document | {"duration": time.monotonic() - began_s}, lambda: print(visible(words)))
    return int(journal.failed > 0)


async def _shown(work: BatchRun, args: argparse.Namespace, count: int, screen: Screen) -> None:
    allow_open_files(args.concurrency or BACKGROUND_LANES)
    async with screen.bar(args.results.name, work.progress, count):
        await work.run(args.concurrency)
