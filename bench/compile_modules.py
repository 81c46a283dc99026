"""Cost and gain of compiling modules.

`python bench/compile_modules.py build NAME` compiles what `hatch_build.py` lists into `.cache/compile/NAME`
and prints CPU seconds and sizes; `--plain 'options/*/*.py,balancer/http/multipart.py'` leaves out the modules
of these patterns, `--opt 2` takes gcc's -O2. `bench/proxies/instructions.py` counts what each tree costs;
`python bench/compile_modules.py measure NAME...` measures its CPU: it drives hetlb of these folders, and the
interpreted one, with plain requests and with paced streams (`bench/proxies`), a round each in turn, and
prints least and median: on a machine that others use the least is nearest to the truth.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "compile"
_SETUP = """\
import json, os, time
from mypyc.build import mypycify
from setuptools import setup
modules = mypycify({files!r}, opt_level="{opt}", debug_level="0")
generated = time.process_time()
setup(name="hetlb", packages=[], ext_modules=modules)
times = os.times()
with open("times.json", "w") as file:
    json.dump({{"mypyc_s": generated, "gcc_s": times.children_user + times.children_system}}, file)
"""


def _listed() -> tuple[str, ...]:
    """Return the patterns that `hatch_build.py` compiles; read, since it imports what only a build has."""
    tree = ast.parse((ROOT / "hatch_build.py").read_text())
    [patterns] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED"
    ]
    found: tuple[str, ...] = eval(compile(ast.Expression(patterns), "hatch_build.py", "eval"), {})
    return found


def _files(patterns: Iterable[str]) -> set[str]:
    """Return the files of patterns below `hetlb/`. Exits where one matches nothing."""
    found: set[str] = set()
    for pattern in patterns:
        matching = [path for path in (ROOT / "hetlb").glob(pattern) if path.name != "__init__.py"]
        if not matching:
            sys.exit(f"{pattern}: expected modules below hetlb/, found none")
        found.update(str(path.relative_to(ROOT)) for path in matching)
    return found


def build(name: str, files: list[str], opt: str) -> None:
    """Compile the files of a copy of the tree. Exits with mypyc's output where that fails."""
    folder = CACHE / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "hetlb", folder / "hetlb", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (folder / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n")
    (folder / "setup.py").write_text(_SETUP.format(files=files, opt=opt))
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, "CFLAGS": "-fno-semantic-interposition", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")
    times = json.loads((folder / "times.json").read_text())
    shutil.rmtree(folder / "build")
    size = sum(path.stat().st_size for path in folder.rglob("*.so"))
    print(
        f"{name}: {len(files)} modules, -O{opt}: mypyc {times['mypyc_s']:.1f} s, gcc {times['gcc_s']:.1f} s, "
        f"together {sum(times.values()):.1f} CPU s, {size / 1e6:.1f} MB"
    )


def measure(names: list[str], rounds: int, requests: int) -> None:
    """CPU of a plain request and of a paced chunk, microseconds."""
    sys.path.insert(0, str(ROOT / "bench" / "proxies"))
    from rig import Rig, one_at_a_time
    from scenarios import scenarios

    loads = {key: load for key, load in scenarios(requests, 2.0).items() if key in ("plain@32", "paced5@32")}
    proxies = {name: f"hetlb-interpreted@{CACHE / name}" for name in names}
    proxies["interpreted"] = "hetlb-interpreted"
    found: dict[tuple[str, str], list[float]] = {}
    with one_at_a_time(), Rig(2, [0], [1]) as rig:
        failed = rig.place(list(proxies.values()), 1.0)
        for name, proxy in proxies.items():
            if proxy in failed:
                sys.exit(f"{name}: {failed[proxy]}")
        for _ in range(rounds):
            for key, load in loads.items():
                for name, proxy in proxies.items():
                    result = rig.measure(proxy, **load)
                    if "us" in result:
                        found.setdefault((name, key), []).append(result["us"])
    for name in proxies:
        figures = ", ".join(
            f"{key} {min(found[name, key]):.2f} to {statistics.median(found[name, key]):.2f} us"
            for key in loads
        )
        print(f"{name}: {figures} (least to median of {rounds} rounds)")


def main() -> None:
    """Build or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    building.add_argument("name")
    building.add_argument("--opt", default="3", choices=("0", "1", "2", "3", "s"))
    building.add_argument("--plain", default="", help="patterns that are left out, separated by commas")
    measuring = commands.add_parser("measure")
    measuring.add_argument("names", nargs="+")
    measuring.add_argument("--rounds", type=int, default=5)
    measuring.add_argument("--requests", type=int, default=5000)
    args = parser.parse_args()
    if args.command == "measure":
        measure(args.names, args.rounds, args.requests)
    else:
        plain = _files(pattern for pattern in args.plain.split(",") if pattern)
        build(args.name, sorted(_files(_listed()) - plain), args.opt)


if __name__ == "__main__":
    main()
