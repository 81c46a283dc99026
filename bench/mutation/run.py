"""Mutation testing: does a test fail when one line of what must never be wrong is changed?

Shows: for the parts of the mapper (ledger, health, admission, placement, ...) and for the framing gate, how
many of mutmut's mutants the tests of each kill, and which survive.
Mutants live in a copy under --folder, never in this tree; every mutant meets only tests that reach
the function it is in; one at a time per core, at the lowest priority. With `--sample N` at most N mutants of
a module are drawn (`--seed`), with `--only` mutants of functions of a name, with `--survivors` the mutants
that a saved result lists: so a new test is tried within a minute. Exit status 1 where a module is below
`--least`.

`make mutation`, or `.venv/bin/python bench/mutation/run.py [MODULE ...] [--save FILE]`; mutmut gets a virtual
environment of its own under .cache. About 5 minutes a module on two cores.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".cache" / "mutation"
MUTMUT = "mutmut==3.8.1"
#: mutmut's exit codes: no test failed; a test failed; it took far too long (killed, or out of CPU time).
SURVIVED, KILLED, TIMED_OUT = {0}, {1, 3}, {24, 36, 152, 255, -24, -9}


@dataclass(frozen=True)
class Module:
    """What is mutated, by file and function (all where none is named), and the tests that should notice."""

    files: tuple[str, ...]
    functions: tuple[str, ...]
    tests: tuple[str, ...]


def _core(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/core/test_{name}.py" for name in names)


LEDGER_TESTS = _core(
    "ledger", "retries", "scheduler", "placement", "split", "adapters", "data_parallel", "finished_sequences",
    "prefix_evidence", "prefix_index", "throttling",
)  # fmt: skip
PLACEMENT_TESTS = _core(
    "placement", "ready", "backlog", "throttle", "retries", "scheduler", "split", "adapters", "queue",
    "throttling",
)  # fmt: skip
EVIDENCE_TESTS = _core("speed", "prefix_index", "prefix_evidence", "split", "ledger")
HEALTH_TESTS = _core("evidence_states", "evidence_edges", "restraints", "throttling", "scheduler")
ADMISSION_TESTS = _core("admission", "queue", "overtaking", "backlog")
MODULES = {
    "ledger": Module(
        (
            "hetlb/balancer/core/instance.py",
            "hetlb/balancer/core/scheduler.py",
            "hetlb/balancer/core/ledger.py",
            "hetlb/balancer/core/placement.py",
            "hetlb/balancer/core/evidence/retries.py",
        ),
        (
            *(
                f"hetlb.balancer.core.instance.xǁInstanceǁ{name}"
                for name in ("acquire", "first_token", "release", "_elapsed")
            ),
            *(
                f"hetlb.balancer.core.scheduler.xǁSchedulerǁ{name}"
                for name in (
                    "on_first_token", "on_lease_ended", "_ended_badly", "on_busy", "on_cancelled", "_retry",
                )
            ),
            *(f"hetlb.balancer.core.ledger.xǁLedgerǁ{name}" for name in ("book", "drop", "grant")),
            "hetlb.balancer.core.placement.xǁPlacementǁbook",
            *(f"hetlb.balancer.core.evidence.retries.xǁRetriesǁ{name}" for name in ("forget", "allowed")),
        ),
        LEDGER_TESTS,
    ),
    "health": Module(
        ("hetlb/balancer/core/evidence/health.py",), (), HEALTH_TESTS
    ),
    "admission": Module(("hetlb/balancer/core/queue.py",), (), ADMISSION_TESTS),
    "placement": Module(
        (
            "hetlb/balancer/core/placement.py",
            "hetlb/balancer/core/ready.py",
            "hetlb/balancer/core/backlog.py",
            "hetlb/options/split/transfers.py",
        ),
        (),
        PLACEMENT_TESTS,
    ),
    "evidence": Module(
        ("hetlb/balancer/core/speed.py", "hetlb/balancer/core/prefix_index.py"), (), EVIDENCE_TESTS
    ),
    "gate": Module(
        ("hetlb/balancer/http/http1.py",),
        (),
        tuple(f"tests/proxy/test_{name}.py" for name in ("http1", "http1_chunks", "http1_refusals")),
    ),
}  # fmt: skip
#: Names of parametrized tests hold raw bytes, with which mutmut could not ask for them again; and a mutant
#: that a property test meets only beyond its first examples counts as alive, so that a run takes minutes; of
#: one that it meets no smaller example is looked for.
CONFTEST = """

import hypothesis as _hypothesis
import pytest as _pytest

_parametrize = _pytest.Metafunc.parametrize


def _numbered(self, argnames, argvalues, **more):
    argvalues = list(argvalues)
    more["ids"] = [str(number) for number in range(len(argvalues))]
    return _parametrize(self, argnames, argvalues, **more)


_pytest.Metafunc.parametrize = _numbered
_phases = (_hypothesis.Phase.explicit, _hypothesis.Phase.generate)
settings.register_profile("mutation", settings.get_profile("hetlb"), max_examples=25, phases=_phases)
settings.load_profile("mutation")
"""


def main() -> int:
    """Run the modules asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"{', '.join(MODULES)} (default all)")
    parser.add_argument("--save", type=Path, help="write the result here")
    parser.add_argument("--least", type=float, default=80.0, help="per cent killed (default 80)")
    parser.add_argument("--sample", type=int, help="most mutants of a module")
    parser.add_argument("--only", metavar="NAME", help="mutants of functions named so, as in Ledger.gr*")
    parser.add_argument("--survivors", type=Path, metavar="FILE", help="mutants that this result lists")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample (default 0)")
    parser.add_argument("--folder", type=Path, help="for the copies (default a temporary one)")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="of each module (default 1800)")
    parser.add_argument("--recorded", help="the date in the result (default today)")
    args = parser.parse_args()
    if unknown := set(args.modules) - MODULES.keys():
        parser.error(f"MODULE: expected of {', '.join(MODULES)}, got {', '.join(sorted(unknown))}")
    mutmut = _install()
    results = {}
    with tempfile.TemporaryDirectory(prefix="hetlb-mutation-") as folder:
        for name in args.modules or MODULES:
            results[name] = _run(name, mutmut, (args.folder or Path(folder)) / name, args)
    _show(results)
    if args.save is not None:
        kept = json.loads(args.save.read_text())["modules"] if args.save.exists() else {}
        document = {
            "bench": "mutation",
            "recorded": args.recorded or datetime.now(UTC).date().isoformat(),
            "tool": MUTMUT,
            "modules": {name: {**kept, **results}[name] for name in MODULES if name in {**kept, **results}},
        }
        args.save.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return 0 if all(each["killed_per_cent"] >= args.least for each in results.values()) else 1


def _install() -> Path:
    """mutmut, in an environment that sees the packages of ours but not this tree."""
    mutmut = VENV / "bin" / "mutmut"
    if not mutmut.exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        pip = [
            str(VENV / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            MUTMUT,
        ]
        subprocess.run(pip, check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Only this folder: the .pth files in it, which lead to this tree, are not read.
    path = VENV / "lib" / version / "site-packages" / "zz_packages.pth"
    path.write_text(sysconfig.get_paths()["purelib"] + "\n")
    return mutmut


def _run(name: str, mutmut: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    module = MODULES[name]
    _copy(module, folder)
    names = [f"{function}__mutmut_*" for function in module.functions] or [
        f"{file.removesuffix('.py').replace('/', '.')}.*" for file in module.files
    ]
    if args.sample is not None or args.only is not None or args.survivors is not None:
        names = _chosen(name, mutmut, folder, names, args)
    log = folder / "mutmut.log"
    command = ["nice", "-n", "19", str(mutmut), "run", "--max-children", str(os.cpu_count() or 1), *names]
    with log.open("w") as output:
        try:
            status = subprocess.run(
                command,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=args.limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    codes = _codes(folder, module)
    ran = {key: code for key, code in codes.items() if code is not None}
    if not ran:
        raise SystemExit(f"{name}: mutmut ran nothing (status {status}): {log.read_text()[-1500:]}")
    survivors = sorted(key for key, code in ran.items() if code in SURVIVED)
    untested = sorted(key for key, code in ran.items() if code not in SURVIVED | KILLED | TIMED_OUT)
    sources = _sources(folder, module)
    killed = len(ran) - len(survivors) - len(untested)
    return {
        "files": {
            file: hashlib.sha256((folder / file).read_bytes()).hexdigest()[:16] for file in module.files
        },
        "mutants": len(ran),
        "killed": killed,
        "timed_out": sum(code in TIMED_OUT for code in ran.values()),
        "survived": len(survivors),
        "not_reached": len(untested),
        "killed_per_cent": round(100 * killed / len(ran), 1),
        "whole": len(ran) == len(codes),
        "survivors": [_diff(sources, key) for key in (*survivors, *untested)],
    }


def _copy(module: Module, folder: Path) -> None:
    """What the tests need, and how mutmut is to go about it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hetlb", folder / "hetlb", ignore=ignore)
    shutil.copytree(ROOT / "docs", folder / "docs")  # tests hold tables of the pages
    for test in module.tests:
        if (ROOT / test).exists():
            (folder / test).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / test, folder / test)
    for shared in ("helpers.py", "conftest.py"):
        shutil.copy(ROOT / "tests" / shared, folder / "tests" / shared)
    with (folder / "tests" / "conftest.py").open("a") as conftest:
        conftest.write(CONFTEST)
    tests = [test for test in module.tests if (folder / test).exists()]
    settings = {
        "source_paths": ["hetlb"],
        "only_mutate": list(module.files),
        "also_copy": ["docs"],
        "pytest_add_cli_args": ["-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": tests,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    project = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(project + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n")


def _chosen(
    name: str, mutmut: Path, folder: Path, names: Sequence[str], args: argparse.Namespace
) -> list[str]:
    """The mutants asked for, by name: mutmut makes them all before it runs one.

    A survivor is found again by its change: its number is another one as soon as the function is changed.
    """
    subprocess.run(
        [str(mutmut), "run", "hetlb.nothing__mutmut_1"], cwd=folder, capture_output=True, check=False
    )
    module = MODULES[name]
    found = sorted(key for key in _codes(folder, module) if any(fnmatch(key, each) for each in names))
    if args.only is not None:
        found = [key for key in found if fnmatch(_function(key), f"*.{args.only}")]
    if args.survivors is not None:
        listed = json.loads(args.survivors.read_text())["modules"].get(name, {"survivors": []})["survivors"]
        sources = _sources(folder, module)
        found = [key for key in found if _diff(sources, key) in listed]
    if args.sample is not None:
        found = sorted(random.Random(args.seed).sample(found, min(args.sample, len(found))))
    if not found:
        raise SystemExit(f"{name}: expected mutants to run, got none: --only and --survivors leave none")
    return found


def _codes(folder: Path, module: Module) -> dict[str, int | None]:
    codes: dict[str, int | None] = {}
    for file in module.files:
        codes |= json.loads((folder / "mutants" / f"{file}.meta").read_text())["exit_code_by_key"]
    return codes


def _sources(folder: Path, module: Module) -> dict[str, list[str]]:
    """The lines of every function in the mutated files, by mutmut's names."""
    found: dict[str, list[str]] = {}
    for file in module.files:
        prefix = file.removesuffix(".py").replace("/", ".")
        for node in ast.walk(ast.parse((folder / "mutants" / file).read_text())):
            if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name:
                node.decorator_list = []
                found[f"{prefix}.{node.name}"] = ast.unparse(node).splitlines()[1:]
    return found


def _diff(sources: dict[str, list[str]], key: str) -> dict[str, str]:
    """A survivor in two lines."""
    mutated, _, _ = key.partition("__mutmut_")
    before, after = sources[f"{mutated}__mutmut_orig"], sources[key]
    lines = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    was = " ".join(line[1:].strip() for line in lines if line[0] == "-")
    now = " ".join(line[1:].strip() for line in lines if line[0] == "+")
    return {"function": _function(key), "was": was, "now": now}


def _function(key: str) -> str:
    """The dotted name of the function that a mutant is of."""
    return key.partition("__mutmut_")[0].replace("xǁ", "").replace("ǁ", ".").replace(".x_", ".")


def _show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in (
        "module",
        "mutants",
        "killed",
        "of these timed out",
        "survived",
        "not reached",
        "killed, %",
    ):
        table.add_column(heading, justify="left" if heading == "module" else "right")
    keys = ("mutants", "killed", "timed_out", "survived", "not_reached", "killed_per_cent")
    for name, each in results.items():
        table.add_row(name if each["whole"] else f"{name} (a part)", *(str(each[key]) for key in keys))
    console = Console(width=110)
    for name, each in results.items():
        for survivor in each["survivors"]:
            console.print(f"{name}: {survivor['function']}", style="bold", markup=False, highlight=False)
            console.print(f"  - {survivor['was']}\n  + {survivor['now']}", markup=False, highlight=False)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
