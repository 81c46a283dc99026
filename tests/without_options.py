"""`python tests/without_options.py [OPTION...]`: run the tests of all the rest in a copy without an option.

The folder of `hetlb/options` goes, and with it every folder of that name in `tests/options`. With `--collect`
the tests are found and not run, which imports all of their modules. Without a name it is each option in turn.

A test that asks for no option in any of its processes is not changed by its absence: with `--asked FOLDER`
only the files that ask are run. A run of all tests records them where FOLDER is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest")
#: Status of pytest where it finds no test.
NO_TESTS = 5
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


def asking(folder: Path) -> dict[str, set[str]]:
    """Return the files of tests that ask for each option, as recorded in a folder."""
    found: dict[str, set[str]] = {}
    for record in folder.iterdir():
        for line in record.read_text().splitlines():
            test, option = line.split("\t")
            found.setdefault(option, set()).add(test.partition("::")[0])
    return found


def record(folder: Path, more: list[str]) -> int:
    """Run all tests and note which options they ask for; return pytest's status."""
    folder.mkdir(parents=True, exist_ok=True)
    path = f"{ROOT / 'tests' / 'asking'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "HETLB_ASKED": str(folder.resolve())}
    return subprocess.run([*PYTEST, *more], cwd=ROOT, env=environment, check=False).returncode


def passes_without(option: str, more: list[str], files: list[str]) -> bool:
    """Return whether tests of files (all without any) pass without an option; `more` are arguments of pytest.

    As arguments, files would have the fixtures of their folders imported before a test can be skipped.
    """
    with tempfile.TemporaryDirectory(prefix="hetlb-without-") as folder:
        root = copy_without(option, Path(folder))
        asked = root / "build" / "asked"
        asked.mkdir(parents=True)
        path = f"{root}{os.pathsep}{root / 'tests' / 'asking'}"
        more_of = {"PYTHONPATH": path, "HETLB_WITHOUT": option, "HETLB_ASKED": str(asked)}
        more_of["HETLB_ONLY"] = os.pathsep.join(files)
        environment = {**os.environ, **more_of}
        # A test that ends early because it asks for the option leaves open what it had opened.
        command = [*PYTEST, "-p", "no:unraisableexception", *more]
        return subprocess.run(command, cwd=root, env=environment, check=False).returncode in (0, NO_TESTS)


def main() -> int:
    """Run the tests without each of the named options; return 1 where some fail."""
    parser = argparse.ArgumentParser(description="Run the tests without an option.")
    parser.add_argument("options", nargs="*", choices=[*OPTIONS, []], metavar="OPTION")
    parser.add_argument("--collect", action="store_true", help="find the tests and run none")
    parser.add_argument("--asked", type=Path, metavar="FOLDER", help="run only files that ask for the option")
    parser.add_argument("--pytest", default="", help="more arguments of pytest, as '-n 4 tests/core'")
    arguments = parser.parse_args()
    more = arguments.pytest.split() + (["--collect-only", "-qq"] if arguments.collect else [])
    asked: dict[str, set[str]] = {}
    if arguments.asked is not None:
        if not arguments.asked.is_dir() and (status := record(arguments.asked, more)):
            return status
        asked = asking(arguments.asked)
    failed = []
    for option in arguments.options or OPTIONS:
        own = re.compile(rf"tests/options/(\w+/)*{option}/")
        files = sorted(each for each in asked.get(option, ()) if not own.match(each))
        if arguments.asked is not None and not files:
            print(f"without {option}: no other test asks for it", flush=True)
            continue
        passed = passes_without(option, more, files)
        print(f"without {option}: {'passed' if passed else 'FAILED'}", flush=True)
        failed += [] if passed else [option]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
