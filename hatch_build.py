"""Build hook of the wheel: with `HETLB_COMPILE=1` mypyc compiles the hot path, from the same source.

It needs a C compiler; without one the build ends at once with one line. The sources stay in the wheel beside
the compiled modules, and nothing is written into the tree that is built: a module that was compiled there
would go on hiding its source when that changes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: What every request and every token touches, and every event of a simulated fleet: plans are made of many.
#: Instructions of a chunk and of a plain request (`bench/proxies/instructions.py`, one engine): 5,865 and
#: 124,009 with all of these; core and simulator alone 20,828 and 348,848; without `clients` 6,256
#: and 188,812, without `telemetry` 6,176 and 177,114; without the states of connections and exchanges and
#: `ends` 2,200 more a plain request, without `transfer_fields` 2,000. Options: classes with a compiled base,
#: and what a token or a message between processes passes.
#: Not among them: what reads annotations while it runs (`balancer/http/openai_fields.py`), and what is called
#: once in a while.
COMPILED = (
    "balancer/core/*.py",
    "balancer/core/evidence/*.py",
    "balancer/core/policies/*.py",
    *(
        f"balancer/clients/{name}.py"
        for name in ("client_response", "connection", "prompt_keys", "router", "server", "token_estimator")
    ),
    *(
        f"balancer/exchange/{name}.py"
        for name in (
            "attempt", "driver", "driver_timers", "ends", "engine_answer", "exchange",
            "exchange_states", "kept_answers", "plain_attempt", "relocations", "scheduler_driver",
            "served_fleet", "streamed_answer",
        )
    ),
    *(
        f"balancer/engines/{name}.py"
        for name in (
            "engine_metrics", "engine_pools", "engine_tables", "last_page", "rounds", "upstream",
        )
    ),
    *(
        f"balancer/http/{name}.py"
        for name in (
            "answer_form", "connection_states", "error_responses", "forward_headers", "http1", "openai_body",
            "paced_reading", "request_reader", "sse", "text_shape", "transfer_fields",
        )
    ),
    *(
        f"balancer/telemetry/{name}.py"
        for name in ("access_log", "counters", "recent", "request_record")
    ),
    *(f"options/pick/{name}.py" for name in ("pick_driver", "stream")),
    *(f"options/resume/{name}.py" for name in ("continuation", "progress", "resumed")),
    "options/event_log/eventlog.py",
    "options/peers/shared_view.py",
    *(
        f"options/split/{name}.py"
        for name in ("hand_overs", "kv_transfers", "pairs", "transfers")
    ),
    "options/tunnel/realtime.py",
    *(
        f"tools/sim/{name}.py"
        for name in (
            "block_pool", "decode_batch", "engine_limits", "engine_model",
            "engine_sequence", "event_queue", "fleet_engine", "fleet_simulation", "flights",
            "iteration_times",
            "kv_blocks",
        )
    ),
)  # fmt: skip
_NEEDED = ("mypy>=2.1,<3", "setuptools>=77", "types-PyYAML")
#: `make check` has looked at all types strictly; what is not compiled need not be there.
_MYPY = "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
#: Functions call each other within one library: hidden, they are called directly (3 % of a request) and need
#: no names. Nothing unwinds through them.
_CFLAGS = "-fvisibility=hidden -fno-asynchronous-unwind-tables"
#: No symbols; no page of its own for each kind of section, of which a module has little: a fifth less in all.
_LDFLAGS = "-s -Wl,-z,noseparate-code"
#: The C compiler's -O. A wheel that is built once for many gets 2 (`make wheel`, pyproject.toml): a decision
#: costs up to a fifth less. An installation on the spot gets 1, a third faster (bench/EXPERIMENTS.md).
_LEVEL = "HETLB_COMPILE_LEVEL"
_LEVELS = ("0", "1", "2", "3", "s")
_SETUP = """\
from mypyc.build import mypycify
from setuptools import setup
setup(name="hetlb", packages=[], ext_modules=mypycify({files!r}, opt_level={level!r}, debug_level="0"))
"""


def level() -> str:
    """The optimisation level asked for. Raises `SystemExit` with one line where it is none."""
    asked = os.environ.get(_LEVEL, "1")
    if asked not in _LEVELS:
        raise SystemExit(f"hetlb: {_LEVEL}: expected one of {', '.join(_LEVELS)}, got {asked!r}")
    return asked


def missing_tool() -> str | None:
    """Name of what compiling needs and this machine lacks; None where all is there."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"a C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"the C headers of Python {sysconfig.get_python_version()} (Python.h)"
    return None


def require_tools() -> None:
    """Raise `SystemExit` with one line where this machine cannot compile."""
    if (missing := missing_tool()) is not None:
        raise SystemExit(
            f"hetlb: HETLB_COMPILE=1: expected {missing}, found none; "
            "install it, or leave HETLB_COMPILE out for the interpreted build"
        )


class CompilingHook(BuildHookInterface[Any]):
    """Adds compiled modules to a wheel that is asked for with `HETLB_COMPILE=1`."""

    _folder: str | None = None

    @property
    def _asked(self) -> bool:
        return os.environ.get("HETLB_COMPILE") == "1" and self.target_name == "wheel"

    def dependencies(self) -> list[str]:
        """Requirements of the compilation: the compiler, and all that the types come from."""
        if not self._asked:
            return []
        require_tools()  # before anything is downloaded
        level()
        return [*_NEEDED, *self.metadata.core.dependencies]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the compiled modules to the wheel. Raises `RuntimeError` with mypyc's output."""
        if not self._asked:
            return
        require_tools()
        if version == "editable":
            raise RuntimeError("HETLB_COMPILE=1: expected an installation that is not editable")
        self._folder = tempfile.mkdtemp(prefix="hetlb-compile-")
        folder, root = Path(self._folder), Path(self.root)
        shutil.copytree(
            root / "hetlb", folder / "hetlb", ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
        files = sorted(
            str(path.relative_to(folder))
            for pattern in COMPILED
            for path in (folder / "hetlb").glob(pattern)
            if path.name != "__init__.py"
        )
        (folder / "mypy.ini").write_text(_MYPY)
        (folder / "setup.py").write_text(_SETUP.format(files=files, level=level()))
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
            cwd=folder,
            env={
                **os.environ,
                "CFLAGS": f"{_CFLAGS} {os.environ.get('CFLAGS', '')}",
                "LDFLAGS": f"{_LDFLAGS} {os.environ.get('LDFLAGS', '')}",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"mypyc failed:\n{done.stdout}{done.stderr}")
        for path in (*folder.glob("*.so"), *folder.glob("hetlb/**/*.so")):
            build_data["force_include"][str(path)] = str(path.relative_to(folder))
        build_data["infer_tag"] = True
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the scratch folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
