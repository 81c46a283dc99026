"""`python tests/without_options.py [OPTION...]`: run the tests of all the rest in a copy without an option.

The folder of `hetlb/options` goes, and with it every folder of that name in `tests/options`. With `--collect`
the tests are found and not run, which imports all of their modules. Without a name it is each option in turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = sorted(path.parent.name for path in (ROOT / "hetlb" / "options").glob("*/__init__.py"))


def copy_without(option: str, folder: Path) -> Path:
    """Copy the files that git knows into a folder, without an option; return where they are."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    shutil.rmtree(folder / "hetlb" / "options" / option)
    of_options = folder / "tests" / "options"
    for tests in [of_options / option, *of_options.glob(f"*/{option}")]:
        shutil.rmtree(tests, ignore_errors=True)
    return folder


def main() -> int:
    """Run the tests without each of the named options; return 1 where some fail."""
    parser = argparse.ArgumentParser(description="Run the tests without an option.")
    parser.add_argument("options", nargs="*", choices=[*OPTIONS, []], metavar="OPTION")
    parser.add_argument("--collect", action="store_true", help="find the tests and run none")
    parser.add_argument("--pytest", default="", help="more arguments of pytest, as '-n 4 tests/core'")
    arguments = parser.parse_args()
    failed = []
    for option in arguments.options or OPTIONS:
        with tempfile.TemporaryDirectory(prefix="hetlb-without-") as folder:
            root = copy_without(option, Path(folder))
            more = ["--collect-only", "-qq"] if arguments.collect else arguments.pytest.split()
            # A test that ends early because it asks for the option leaves open what it had opened.
            command = [sys.executable, "-m", "pytest", "-p", "no:unraisableexception", *more]
            done = subprocess.run(
                command,
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root), "HETLB_WITHOUT": option},
                check=False,
            )
        print(f"without {option}: {'passed' if done.returncode == 0 else 'FAILED'}", flush=True)
        failed += [option] if done.returncode else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
