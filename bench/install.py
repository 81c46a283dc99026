"""Size and start time of an installation: an empty environment, without a compiler.

`python bench/install.py [WHEEL_OR_FOLDER]` (default: this repository) installs into a new virtual environment
whose PATH has no compiler, prints the size of the installed tree and the time of `hetlb --help`, starts
`hetlb engine` and `hetlb serve`, and with `--demo` installs the extra `tools` too and runs `hetlb demo`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROFILE = ROOT / "hetlb" / "tools" / "demo" / "fast.yaml"
REPEATS = 15


def tree_bytes(folder: Path) -> int:
    """Bytes of all files, as a listing counts them."""
    return sum(each.lstat().st_size for each in folder.rglob("*") if each.is_file())


def ready_line(command: list[str], environment: dict[str, str]) -> str:
    """The first line of a server, which is then told to stop."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        process.terminate()
    return line or "did not start"


def main() -> int:
    """Install, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", type=lambda text: Path(text).resolve(), default=ROOT)
    parser.add_argument("--demo", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetlb-install-") as scratch:
        folder = Path(scratch) / "venv"
        venv.create(folder, with_pip=True)
        own = tree_bytes(folder / "lib")
        # Of the machine's programs none: neither a compiler nor another hetlb.
        environment = {"PATH": str(folder / "bin"), "HOME": os.environ.get("HOME", "/")}
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, str(args.source)], check=True, env=environment, cwd=scratch)
        print(
            f"installed tree: {(tree_bytes(folder / 'lib') - own) / 1e6:.1f} MB, without pip and setuptools"
        )
        hetlb = str(folder / "bin" / "hetlb")
        print(
            subprocess.run([hetlb, "--version"], check=True, env=environment, capture_output=True, text=True)
            .stdout.strip()
        )  # fmt: skip
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            subprocess.run([hetlb, "--help"], check=True, env=environment, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
        print(f"hetlb --help: {min(times):.3f} s at least, {statistics.median(times):.3f} s in the median")
        engine = ["engine", "--profile", str(PROFILE), "--served-model-name", "m", "--port", "0"]
        serve = ["serve", "--instance", "http://127.0.0.1:9", "--port", "0", "--admin-port", "0"]
        for command in (engine, serve):
            print(ready_line([hetlb, *command], environment))
        if not args.demo:
            return 0
        subprocess.run([*pip, f"{args.source}[tools]"], check=True, env=environment, cwd=scratch)
        print(f"with the tools: {(tree_bytes(folder / 'lib') - own) / 1e6:.1f} MB")
        return subprocess.run([hetlb, "demo"], check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
