"""A machine of its own for the blocks of a page, which a shell runs as they are written.

Names, addresses and ports of the page are there, and folders like `/etc` and `/opt` can be written to: the
kernel's namespaces for users, networks, mounts and processes make a room that ends with all that runs in it.
A command that serves in the foreground is left running, as by a reader who opens another terminal; one that
shows a screen until `q` gets a `q`. Nothing in a room reaches a network.

`page_room.py enter FILE` is the first process of a room, `page_room.py look COMMAND...` presses the `q`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The clone that a page is read in, and what it leaves out: it is large, and no page names it.
CLONE, LEFT_OUT = Path("/clone"), ("tests/fuzz/corpus", "tests/vllm/data", "docs/pictures")
#: Printed at the end where something still runs.
LEFT_BEHIND = "=== processes are left behind"
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork")

#: Steps of a reader that stand in no block: a second terminal for what serves, `q` for what shows.
_READER = """
set -eu
hetlb() {
  if [ "$BASHPID" != "$$" ]; then exec hetlb "$@"; fi
  case " $* " in
    *" --check "*|*" --help "*|*" --once "*) command hetlb "$@" ;;
    " serve "*|" pick "*|" stage "*|" engine "*) another_terminal hetlb "$@" ;;
    " top "*) "$PAGE_PYTHON" "$PAGE_ROOM" look hetlb "$@" ;;
    *) command hetlb "$@" ;;
  esac
}
envoy() { another_terminal envoy "$@"; }
terminals=0
another_terminal() {
  terminals=$((terminals + 1))
  local log=$PAGE_LOGS/terminal-$terminals.log
  command "$@" > "$log" 2>&1 &
  until grep -qE ' ready on |starting main dispatch loop' "$log"; do
    kill -0 $! 2>/dev/null || { cat "$log"; return 1; }
    sleep 0.1
  done
}
"""


@dataclass(frozen=True)
class Room:
    """A script, and the addresses by name that its machine has."""

    script: str
    addresses: Mapping[str, str] = field(default_factory=dict)
    #: Seconds after which a page hangs.
    timeout_s: float = 1200.0


@functools.cache
def why_no_rooms() -> str:
    """Return why this machine gives no rooms, "" where it does."""
    if not all(shutil.which(name) for name in ("unshare", "ip", "mount", "bash", "curl", "git")):
        return "expected unshare, ip, mount, bash, curl and git"
    if not (ROOT / ".git").exists():
        return "expected a clone, whose files git lists"
    done = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"the kernel gives no namespaces: {done.stderr.strip()}"


def run_in_room(room: Room, folder: Path) -> tuple[int, str]:
    """Run a script in a room whose files lie in `folder`; return its exit status and what it printed."""
    clone = folder / "clone"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith(LEFT_OUT) and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    order = folder / "order.json"
    order.write_text(json.dumps({**asdict(room), "folder": str(folder), "clone": str(clone)}))
    output = folder / "output"
    with output.open("w") as stream:
        process = subprocess.Popen(
            [*_UNSHARE, sys.executable, __file__, "enter", str(order)],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, process_group=0,
        )  # fmt: skip
        try:
            status = process.wait(room.timeout_s)
        except subprocess.TimeoutExpired:
            status = 124  # as `timeout` says it
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the first process of the room takes all others along
                process.wait()
    return status, output.read_text(errors="replace")


def enter(order: Path) -> int:
    """Furnish the room, run its script and say if it leaves processes behind; return its status."""
    wanted = json.loads(order.read_text())
    folder = Path(wanted["folder"])
    _network(wanted["addresses"])
    root = _files(folder, Path(wanted["clone"]), wanted["addresses"])
    os.chroot(root)
    os.chdir(CLONE)
    environment = {
        **{name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR", "TERM")},
        **(_newcomers_python(folder) if "pip install" in wanted["script"] else _own_python()),
        "COLUMNS": "120", "PAGE_LOGS": str(folder), "PAGE_ROOM": __file__, "PAGE_PYTHON": sys.executable,
    }  # fmt: skip
    status = subprocess.run(
        ["bash", "-c", _READER + wanted["script"]], env=environment, check=False
    ).returncode
    with contextlib.suppress(ChildProcessError):
        # A process that has lost its parent is a child of the first one.
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        print(LEFT_BEHIND, flush=True)
    return status


def _own_python() -> dict[str, str]:
    """Return the variables of the environment that the tests run in."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _newcomers_python(folder: Path) -> dict[str, str]:
    """Return the variables of a new environment; all that pip would fetch is there."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "python")], check=True)
    return {
        "PATH": f"{folder}/python/bin:{os.environ['PATH']}:{Path(sys.executable).parent}",
        "PYTHONPATH": ":".join(entry for entry in sys.path if entry.endswith("site-packages")),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # "no" to isolation, as pip reads it
        "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1", "PIP_QUIET": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }  # fmt: skip


def _network(addresses: Mapping[str, str]) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in {*addresses.values()}:
        if not address.startswith("127."):
            subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)


def _files(folder: Path, clone: Path, addresses: Mapping[str, str]) -> Path:
    """Make a root folder: the machine's, with an `/etc` and room beside `/opt` that can be written."""
    root = folder / "root"
    root.mkdir()
    _mount("-t", "tmpfs", "none", str(root))
    for each in Path("/").iterdir():
        there = root / each.name
        if each.is_symlink():
            there.symlink_to(os.readlink(each))
        elif each.name == "opt":
            there.mkdir()
            for inner in (one for one in each.iterdir() if one.is_dir()):
                (there / inner.name).mkdir()
                _mount("--rbind", str(inner), str(there / inner.name))
        elif each.name == "etc":
            subprocess.run(["cp", "-a", "/etc", str(root)], stderr=subprocess.DEVNULL, check=False)
        elif each.name == "proc":
            there.mkdir()
            _mount("-t", "proc", "proc", str(there))
        elif each.is_dir():
            there.mkdir()
            _mount("--rbind", str(each), str(there))
    with (root / "etc" / "hosts").open("a") as hosts:
        hosts.writelines(f"{address} {name}\n" for name, address in addresses.items())
    (root / CLONE.name).mkdir()
    _mount("--bind", str(clone), str(root / CLONE.name))
    return root


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def look(command: list[str]) -> int:
    """Run a command on a terminal of its own and press `q` once it shows something; return its status."""
    seen = bytearray()

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 65536)
        if not seen:
            os.write(terminal, b"q")
        seen.extend(data)
        return data

    return os.waitstatus_to_exitcode(pty.spawn(command, read, lambda _: b""))


if __name__ == "__main__":
    sys.exit(enter(Path(sys.argv[2])) if sys.argv[1] == "enter" else look(sys.argv[2:]))
