"""Every bench stands in the list of short runs; the picture of `top` in the docs can be taken."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from proxy.services import Engine, document, serving

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

import check_words  # noqa: E402
import claims  # noqa: E402
import smoke  # noqa: E402

#: Scripts that others start, or that have no arguments and take long or need vLLM.
NOT_RUN = {
    "smoke.py", "check_types.py", "check_words.py", "fit_errors.py", "ranking.py", "search_fleets.py",
    "faults/attacks.py", "faults/reference.py", "faults/watched.py",
    "head_to_head/relay.py",
    "proxies/client.py", "proxies/cpu.py", "proxies/mock_engine.py", "proxies/pick_envoy.py",
    "proxies/relay_aiohttp.py",
}  # fmt: skip


def test_every_bench_has_a_short_run() -> None:
    scripts = {str(path.relative_to(BENCH)) for path in BENCH.rglob("*.py") if "__main__" in path.read_text()}
    assert scripts - NOT_RUN == smoke.RUNS.keys()


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ('"""Seconds between tries."""\n#: Tries at most.\nTRIES = 3\n', 0),
        ('"""Seconds between\nthose."""\n', 1),
        ("#: A try fails after so\n#: many seconds.\nTRY_S = 3\n", 1),
        ('def count() -> int:\n    """Return that of the fleet, by which it is judged."""\n', 2),
        ("raise ValueError('expected none of those')  # a message\n", 0),
    ],
)
def test_comments_and_docstrings_name_the_thing(text: str, mistakes: int) -> None:
    assert len(list(check_words.of_prose(text))) == mistakes


def test_messages_name_the_thing() -> None:
    text = '"""Some of those."""\nraise ValueError(f"{KEY}: expected none of those, got {key}")\n'
    assert len(list(check_words.of_messages(text))) == 1


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ('def wait_s() -> float:\n    """Return the seconds of a wait."""\n', 0),
        ('def wait_s() -> float:\n    """Seconds of a wait."""\n', 1),
        ('class Wait:\n    """Seconds of a wait."""\n', 0),
        ('def waits() -> bool:\n    """Whether it waits."""\n', 1),
    ],
)
def test_docstrings_of_functions_begin_with_a_verb(text: str, mistakes: int) -> None:
    assert len(list(check_words.of_module(text))) == mistakes


def test_the_page_of_claims_is_as_its_results_are() -> None:
    assert claims.PAGE.read_text() == claims.page(), "run `python bench/claims.py`"


#: Runs scripts up to their parsers, which read command lines: `{script: [line, ...]}` on standard input.
#: All in one process, for they import the same packages; modules beside a script are its own.
_READ = """
import argparse, json, runpy, shlex, sys
from pathlib import Path
def read(self, *_):
    for line in lines:
        own(self, shlex.split(line))
    raise SystemExit(0)
own, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, read
for script, lines in json.load(sys.stdin).items():
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"{script}: {ended.code}")
    folder = sys.path.pop(0)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
"""


def test_benches_take_the_commands_of_their_claims() -> None:
    lines: dict[str, list[str]] = {}
    for command in sorted({each.command for _, of in claims.PAPERS for each in of if each.command != "-"}):
        script, _, rest = command.partition(" ")
        lines.setdefault(str(BENCH / script), []).append(rest)
    done = subprocess.run(
        [sys.executable, "-c", _READ], input=json.dumps(lines), text=True, stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_claim_that_is_not_run_says_why() -> None:
    assert all(
        each.here == "not run" and each.why for _, of in claims.PAPERS for each in of if each.command == "-"
    )


async def test_the_picture_of_top_can_be_taken(tmp_path: Path) -> None:
    pictures = pytest.importorskip("dashboard.pictures", reason="playwright is not installed")
    async with Engine() as one, serving(tmp_path, document(one)) as running:
        host, port = running.service.admin.address
        await asyncio.to_thread(pictures.terminal, f"http://{host}:{port}", tmp_path / "top.svg")
    assert "hetlb&#160;top" in (tmp_path / "top.svg").read_text()
