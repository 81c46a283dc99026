"""A short run of every bench: that it still runs with hetlb as it is, not what it measures.

`python bench/smoke.py [NAME ...]`; `make smoke` runs all. Benches that need an engine, a GPU, a compiler or
data that is not here show their help, which imports all that they import. `tests/test_benches.py` holds that
every bench stands here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BENCH = Path(__file__).resolve().parent
#: Runs at once: most of them wait for half of their time.
AT_ONCE = 4
#: Runs that take longest and mostly wait: they begin first, so that none is left alone at the end.
FIRST = ("faults/streams.py", "scale/parity.py", "faults/accounts.py", "batch_gaps.py", "workers_balance.py")
#: A run that takes longer has failed: seconds.
MOST_S = 240.0
_HELP = ("--help",)
#: Arguments of each bench's short run; `OUT` is a file that is thrown away.
RUNS: dict[str, tuple[str, ...]] = {
    "batch_gaps.py": ("--smoke",),
    "check_signatures.py": _HELP,
    "claims.py": ("--out", "OUT"),
    "compile_modules.py": _HELP,
    "cpu_server.py": _HELP,
    "fidelity.py": _HELP,
    "in_flight.py": _HELP,
    "install.py": _HELP,
    "loadtest_accuracy.py": ("--request-rate", "20", "--seconds", "1"),
    "loadtest_agreement.py": _HELP,
    "metrics_page.py": ("--scrapes", "2"),
    "model_truth.py": _HELP,
    "real_run.py": _HELP,
    "vllm_layouts.py": _HELP,
    "vllm_pair.py": _HELP,
    "vllm_report.py": _HELP,
    "workers_balance.py": ("--workers", "2", "--rounds", "1", "--num-prompts", "20", "--out", "OUT"),
    "workers_cost.py": ("--rounds", "1"),
    "engines/mixed.py": _HELP,
    "engines/without_figures.py": ("--seeds", "1"),
    "faults/bad_hour.py": _HELP,
    "faults/accounts.py": ("full",),
    "faults/compared.py": ("--only", "hetlb"),
    "faults/floods.py": ("--rounds", "1", "--seconds", "0.5", "--only", "admin"),
    "faults/lost_engines.py": ("--requests", "20"),
    "faults/resumed_floods.py": ("--seconds", "0.5", "--streams", "20"),
    "faults/notices.py": ("--requests", "10"),
    "faults/real_stop.py": _HELP,
    "faults/run.py": ("terminate", "--help"),
    "faults/soak.py": ("--minutes", "0.1", "--warm-up", "500"),
    "faults/streams.py": ("--minutes", "0.1", "--streams", "20"),
    "head_to_head/run.py": _HELP,
    "mutation/run.py": _HELP,
    "paper/run.py": _HELP,
    "place/run.py": ("--smoke",),
    "proxies/instructions.py": _HELP,
    "proxies/limits.py": _HELP,
    "proxies/run.py": (
        "--proxies", "hetlb-interpreted", "--only", "plain@1", "--requests", "1000", "--rounds", "1",
        "--repeats", "1", "--quiet", "0.1", "--out", "OUT",
    ),
    "rent/claims.py": _HELP,
    "rent/run.py": ("random", "--smoke"),
    "scale/at_rest.py": ("--instances", "2", "--batches", "1"),
    "scale/costs.py": _HELP,
    "scale/decide.py": _HELP,
    "scale/demo.py": ("--smoke",),
    "scale/large.py": ("--instances", "10", "--rate", "5", "--seconds", "2", "--repeats", "1"),
    "scale/parity.py": ("--rounds", "1", "--num-prompts", "10", "--out", "OUT"),
    "scale/watching.py": ("--servers", "4", "--settling", "3", "--seconds", "2", "--load-s", "1"),
    "scale/schedulers.py": (
        "--instances", "10", "--requests", "100", "--counts", "1,2", "--delays", "0.001", "--seeds", "1",
        "--out", "OUT",
    ),
    "scheduling/decisions.py": _HELP,
    "scheduling/front.py": _HELP,
    "scheduling/grid.py": _HELP,
    "scheduling/mixed.py": _HELP,
    "scheduling/ordinary.py": _HELP,
    "scheduling/run.py": ("--list",),
    "split/decisions.py": ("--requests", "20"),
    "split/per_request.py": ("--requests", "20", "--seeds", "1", "--out", "OUT"),
    "split/picture.py": _HELP,
    "split/run.py": ("four", "--smoke", "--out", "OUT"),
    "stages/run.py": _HELP,
}  # fmt: skip


def main() -> int:
    """Return 1 where a run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="benches by their path below bench/ (default: all)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = sorted(args.names or RUNS, key=lambda name: name not in FIRST)
        shown = [name for name in names if RUNS[name] == _HELP]
        outs = {name: Path(folder) / name.replace("/", "-") for name in names if name not in shown}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            helps = pool.submit(show_help, shown)
            ran = pool.map(lambda name: runs(name, outs[name].with_suffix(".json")), outs)
            failed = [name for name, well in zip(outs, ran, strict=True) if not well] + helps.result()
    print(f"{len(names) - len(failed)} ran, {len(failed)} failed: {' '.join(failed)}")
    return int(bool(failed))


#: Shows the help of each script named, and its exit status. One process: they import the same packages.
#: Modules beside a script are its own.
_SHOW = """
import io, runpy, sys, traceback
from contextlib import redirect_stdout
from pathlib import Path
paths = sys.path[1:]
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    sys.path[:] = [folder := str(Path(script).parent), *paths]
    try:
        with redirect_stdout(io.StringIO()) as said:
            runpy.run_path(script, run_name="__main__")
        why = "no help"
    except SystemExit as ended:
        why = "" if not ended.code and "usage:" in said.getvalue() else f"status {ended.code}"
    except BaseException:
        why = traceback.format_exc()
    print(script, repr(why), flush=True)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
"""


def show_help(names: list[str]) -> list[str]:
    """Show the help of benches, and return the names of the benches that fail."""
    command = [sys.executable, "-c", _SHOW, *(str(BENCH / name) for name in names)]
    done = subprocess.run(
        command, cwd=BENCH.parent, stdout=subprocess.PIPE, text=True, timeout=MOST_S, check=False
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    failed = [name for name in names if lines.get(str(BENCH / name)) != "''"]
    print(f"ok  the help of {len(names) - len(failed)} benches", flush=True)
    for name in failed:
        print(f"FAILED  {name} --help: {lines.get(str(BENCH / name), 'not reached')}", flush=True)
    return failed


def runs(name: str, out: Path) -> bool:
    """Return whether a short run ends well; print how long it took, and the end of its output if not."""
    command = [
        sys.executable,
        str(BENCH / name),
        *(str(out) if each == "OUT" else each for each in RUNS[name]),
    ]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=BENCH.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=MOST_S, check=False,
        )  # fmt: skip
        said = done.stdout
        # 1 is a verdict: a busy machine is too slow for some.
        failed = done.returncode not in (0, 1) or "Traceback" in said
    except subprocess.TimeoutExpired:
        failed, said = True, f"not done after {MOST_S:g} s"
    print(f"{'FAILED' if failed else 'ok'}  {time.monotonic() - began:5.1f} s  {name}", flush=True)
    if failed:
        print(said[-2000:], flush=True)
    return not failed


if __name__ == "__main__":
    sys.exit(main())
