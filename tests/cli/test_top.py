"""`hetlb top`: every line fits, `q` ends it, and a proxy that goes away is waited for."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import HANG_S, free_port
from proxy.incidents import INCIDENTS, Watched
from proxy.services import Engine, document, serving
from rich.console import Console

from hetlb.cli.main import main
from hetlb.cli.top import FleetScreen, quits, seconds, shortened, sparkline

PROFILE = Path(__file__).parents[2] / "hetlb" / "tools" / "demo" / "fast.yaml"
ROOM = (24, 80)


def instance(number: int, **more: Any) -> dict[str, Any]:
    return {
        "name": f"node-{number:03}",
        "url": "http://127.0.0.1:1",
        "state": "ready",
        "health": "up",
        "health_reason": "probe answered",
        "in_flight": number,
        "queued": 0,
        "workload": number / 10,
        "kv_reserved_tokens": 10 * number,
        "kv_cache_tokens": 10_000,
        "kv_reported": 0.5,
        "signal_age_s": 0.4,
        "running": number,
        "waiting": None,
        **more,
    }


def snapshot(*instances: dict[str, Any], waiting: int = 0, decisions: int = 25) -> dict[str, Any]:
    columns = (
        "ok_per_s",
        "not_ok_per_s",
        "output_tokens_per_s",
        "ttft_p50_s",
        "ttft_p99_s",
        "e2e_p50_s",
        "e2e_p99_s",
    )
    return {
        "version": "0.1.0",
        "clock_s": 1000.0,
        "policies": ["rr", "hetlb"],
        "fleet": {
            "policy": "hetlb",
            "models": [
                {
                    "name": "a-model",
                    "instances": list(instances),
                    "totals": {
                        "instances": len(instances),
                        "able": sum((each["health"], each["state"]) == ("up", "ready") for each in instances),
                        **{
                            name: sum(each[name] for each in instances)
                            for name in ("in_flight", "kv_reserved_tokens", "kv_cache_tokens")
                        },
                    },
                }
            ],
            "queue": {"requests": waiting, "bytes": 0, "models": {}, "oldest_s": 3.2 if waiting else None},
        },
        "status": {
            "state": "well", "load": 0.4, "capacity_req_s": 12.0, "limited_by": "slots of node-001",
            "headroom_req_s": 7.2, "advice": "Nothing to do.",
            "sentence": "load 40 % of about 12 requests/s, limited by slots of node-001, room for 7.2 more",
        },
        "series": {"bin_s": 2.0, **{name: [None] * 100 + [float(n) for n in range(50)] for name in columns}},
        "decisions": {
            "total": decisions,
            "last": [
                {
                    "request_id": 900 - number, "lease": number, "policy": "hetlb", "model": "a-model",
                    "prompt_tokens_per_sequence": 120, "sequences": 1, "predicted_output": 50.4,
                    "dispatched_at_s": 999.0,
                    "output_tokens": 17, "ended": number % 2 == 0, "chosen": "node-001",
                }
                for number in range(decisions)
            ],
        },
    }  # fmt: skip


def frame(view: FleetScreen, width: int = 80, height: int | None = 24) -> list[str]:
    """The lines as the terminal shows them."""
    console = Console(width=width, height=height, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(view.render(width, height))
    return [line.rstrip() for line in capture.get().splitlines()]


def viewing(*instances: dict[str, Any], **more: Any) -> FleetScreen:
    view = FleetScreen("http://127.0.0.1:8081")
    view.snapshot = snapshot(*instances, **more)
    return view


# --- the frame ---


@pytest.mark.parametrize("width", range(60, 201, 7))
def test_a_figure_is_shown_whole_or_not_at_all(width: int) -> None:
    """Each word of a narrow frame stands in the widest one, too; "…" stands for words without room."""
    rows = [instance(n) for n in (1, 17, 123)]
    rows.append(instance(9, in_flight=123_456, workload=98_765.4, kv_reserved_tokens=9_876))
    view = viewing(*rows, waiting=12_345)
    wide = {word for line in frame(view, 400, None) for word in line.split()}
    narrow = {word for line in frame(view, width, None) for word in line.split()}
    curves = set("▁▂▃▄▅▆▇█░")
    assert {word for word in narrow - wide if not set(word) <= curves} == set()
    assert "a-model" not in narrow


@pytest.mark.parametrize("incident", INCIDENTS)
def test_the_first_line_is_state_and_cause(incident: str) -> None:
    """Made by the table of causes, as `status`, the page and `/metrics` have it."""
    fleet = Watched()
    make, state, cause = INCIDENTS[incident]
    make(fleet)
    status = fleet.look()
    assert (status["state"], status["causes"][0]["cause"]) == (state, cause)
    view = viewing(instance(1))
    view.snapshot["status"] = status  # type: ignore[index]
    shown = " ".join(" ".join(frame(view, 400)).split())
    assert shown.startswith(f"{status['state']} {status['sentence']}. ")
    assert status["causes"][0]["sentence"][1:] in shown or status["state"] == "down"
    narrow = " ".join(" ".join(frame(view, 60, 24)).split())
    assert narrow.startswith(f"{status['state']} {status['sentence']}. {status['advice']} hetlb")


@pytest.mark.parametrize("width", range(60, 201, 20))
def test_the_sentence_of_the_fleet_is_read_whole(width: int) -> None:
    view = viewing(instance(1))
    status = view.snapshot["status"]  # type: ignore[index]
    lines = frame(view, width)
    shown = " ".join(" ".join(lines).split())
    assert shown.startswith(f"well {status['sentence']}. {status['advice']} hetlb 0.1.0")


def test_figures_stand_beside_names_on_a_wide_terminal() -> None:
    [row] = [line for line in frame(viewing(instance(7)), 200) if line.startswith("node-007")]
    assert len(row) < 80


@pytest.mark.parametrize("width", [60, 61, 80, 81, 100, 132, 200])
@pytest.mark.parametrize("height", [None, 8, 24, 60])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_every_line_fits(width: int, height: int | None, count: int) -> None:
    long = {"name": "a-server-with-a-name-that-is-longer-than-any-column", "health": "ejected"}
    rows = [instance(n) for n in range(count - 1)] + [
        instance(
            9, **long, health_reason="3 probes failed in a row " * 9, in_flight=123_456, workload=98_765.4
        )
    ]
    lines = frame(viewing(*rows, waiting=12_345), width, height)
    assert max(map(len, lines)) <= width
    if height is not None:
        assert len(lines) <= height
        assert sum(line.startswith(("node-", "a-s")) and " is " not in line for line in lines) >= 1


def test_the_figures_of_an_instance() -> None:
    lines = frame(viewing(instance(7), instance(3, state="drain"), waiting=4))
    assert lines[0] == " well  load 40 % of about 12 requests/s, limited by slots of node-001, room for"
    assert lines[1] == "7.2 more. Nothing to do."
    assert lines[2].startswith("hetlb 0.1.0  http://127.0.0.1:8081  policy hetlb")
    assert lines[2].endswith("live")
    assert lines[3] == "1 of 2 up   10 in flight   queue 4 (oldest 3.2 s)   KV reserved 0% of 20,000"
    [row] = [line for line in lines if line.startswith("node-007")]
    assert row.split() == [
        "node-007",
        "up",
        "ready",
        "7",
        "7",
        "-",
        "█░░░░░░░░░░",
        "1%",
        "50%",
        "700",
        "ms",
        "400",
        "ms",
    ]
    assert any(re.match("node-003 +up +drain", line) for line in lines)


def test_instances_that_are_not_up_and_why() -> None:
    lines = frame(viewing(instance(1), instance(2, health="ejected", health_reason="connection refused")))
    assert "node-002 is ejected: connection refused" in lines


def test_the_last_decisions() -> None:
    lines = frame(viewing(instance(1)))
    assert "  1.0 s       900     120        50        17  node-001 (hetlb)" in lines
    assert any("17…" in line for line in lines)


def test_decisions_for_names_that_do_not_fit_stay_different() -> None:
    view = viewing(instance(1))
    last = view.snapshot["decisions"]["last"]
    names = [f"vllm-a100-production-eu-west-{number}" for number in range(2)]
    view.snapshot["decisions"]["last"] = [{**last[0], "chosen": name} for name in names]
    found = [line.split()[-1] for line in frame(view, 60) if line.startswith("  1.0 s ")]
    assert found == ["…t-0", "…t-1"]


def test_names_of_hosts_and_ports_stand_whole_at_80_columns() -> None:
    rows = [{**instance(number), "name": f"127.0.0.1-910{number}"} for number in (1, 2)]
    assert {"127.0.0.1-9101", "127.0.0.1-9102"} <= {line.partition(" ")[0] for line in frame(viewing(*rows))}


def test_instances_in_trouble_come_first() -> None:
    rows = [instance(1), instance(2, state="drain"), instance(3, health="suspect")]
    lines = frame(viewing(*rows))
    found = [line.split()[0] for line in lines if re.match(r"node-\d+ +(up|suspect)", line)]
    assert found == ["node-003", "node-002", "node-001"]


def test_as_many_instances_as_fit() -> None:
    lines = frame(viewing(*(instance(n) for n in range(200))))
    shown = sum(line.startswith("node-") for line in lines)
    assert lines[-1] == f"and {200 - shown} more instances"
    assert len(lines) <= 24


def test_a_connection_that_is_lost_is_said_and_the_last_state_stays() -> None:
    view = viewing(instance(1))
    view.trouble = "no connection: Connection refused"
    lines = frame(view)
    assert lines[2].endswith("no connection: Connection refused; trying again")
    assert any(line.startswith("node-001") for line in lines)
    view.trouble = "no connection: " + "because " * 30
    assert len(frame(view)[0]) <= 80
    view.snapshot = None
    assert len(frame(view)) == 1


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 10, ""),
        ([1.0], 0, ""),
        ([None, 0.0, 1e-9, 4.0, 8.0], 10, " ▁▂▄█"),
        ([0.0, 0.0, 8.0, 8.0], 2, "▁█"),
        ([None, 4.0, None, None], 2, "█ "),
    ],
)
def test_sparklines(values: list[float | None], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0 s"), (0.0124, "12 ms"), (0.99999, "1.0 s"), (9.94, "9.9 s"), (9.96, "10 s"),
     (600.0, "10 min"), (40_000.0, "11 h")],
)  # fmt: skip
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text
    assert len(text) <= 6


# --- against a proxy ---


async def test_one_frame_and_one_document(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        await running.ask()
        url = f"http://127.0.0.1:{running.service.admin.address[1]}/"
        assert await asyncio.to_thread(main, ["top", "--admin", url, "--once"]) == 0
        text = capfd.readouterr().out
        assert re.search(r"^i0 +up +ready", text, re.MULTILINE)
        assert "i0 (rr)" in text
        assert await asyncio.to_thread(main, ["top", "--admin", url, "--json"]) == 0
        shown = json.loads(capfd.readouterr().out)
        assert shown["fleet"]["models"][0]["instances"][0]["name"] == "i0"
        # Output that is no terminal gets one frame.
        assert await asyncio.to_thread(main, ["top", "--admin", url]) == 0


async def test_the_token_comes_from_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("sesame")
    fleet = document(admin={"token_file": str(tmp_path / "token")})
    async with Engine() as engine:
        fleet["models"][0]["instances"] = [{"name": "i0", "url": engine.url}]
        async with serving(tmp_path, fleet) as running:
            url = f"http://127.0.0.1:{running.service.admin.address[1]}"
            monkeypatch.delenv("HETLB_ADMIN_TOKEN", raising=False)
            for command in (["top", "--once"], ["explain", "--last", "1"]):
                assert await asyncio.to_thread(main, [*command, "--admin", url]) == 2
                err = capfd.readouterr().err
                assert "401 Unauthorized: expected the admin token in HETLB_ADMIN_TOKEN" in err
                assert err.count(f"hetlb {command[0]}: ") == 1
                monkeypatch.setenv("HETLB_ADMIN_TOKEN", "sesame")
                assert await asyncio.to_thread(main, [*command, "--admin", url]) == 0
                monkeypatch.delenv("HETLB_ADMIN_TOKEN")
                capfd.readouterr()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "127.0.0.1:8081"], "--admin: expected a URL like http://127.0.0.1:8081, got"),
        (["--admin", "http://u:p@h:1"], "--admin: expected a URL like"),
        (["--admin", "http://h:99999"], "--admin: expected a URL like"),
        (["--admin", "http://127.0.0.1:1", "--once"], "'http://127.0.0.1:1': Connection refused"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["top", *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


async def test_an_address_that_is_another_servers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with Engine() as engine:
        assert await asyncio.to_thread(main, ["top", "--admin", engine.url, "--once"]) == 2
    assert "it has no event stream" in capfd.readouterr().err


# --- in a terminal ---


class Terminal:
    """A command in a terminal of 24 lines and 80 columns."""

    def __init__(self, *arguments: str) -> None:
        self.fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", *ROOM, 0, 0))
        self.child = child
        self.before = termios.tcgetattr(child)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hetlb", *arguments],
            stdin=child, stdout=child, stderr=child, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
        )  # fmt: skip
        self.seen = ""

    def until(self, pattern: str) -> None:
        """Read until the screen has shown this since the last call."""
        seen = ""
        while not re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)):
            ready, _, _ = select.select([self.fd], [], [], HANG_S)
            assert ready, f"{pattern!r} did not come; the screen showed {seen[-4000:]!r}"
            seen += os.read(self.fd, 65_536).decode("utf-8", "replace")

    def press(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def ended(self) -> int:
        """Wait for the end while reading what it still says."""
        while self.process.poll() is None:
            if select.select([self.fd], [], [], 0.05)[0]:
                os.read(self.fd, 65_536)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self.child)


class Processes:
    """`hetlb` commands that print where they listen."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> list[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "hetlb", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.running.append(process)
        assert process.stdout is not None
        return [
            word.strip("()\n") for word in process.stdout.readline().split() if word.startswith("http://")
        ]

    def kill_last(self) -> None:
        process = self.running.pop()
        process.kill()
        process.communicate()


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    while processes.running:
        processes.kill_last()


def test_in_a_terminal_until_q_and_through_a_restart(tmp_path: Path, processes: Processes) -> None:
    [engine] = processes.start("engine", "--profile", str(PROFILE), "--port", "0", "--served-model-name", "m")
    path = tmp_path / "fleet.yaml"
    fleet = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": free_port()},  # it comes back there: the kernel's own could be taken by then
        "models": [{"name": "m", "instances": [{"name": "one", "url": engine}]}],
    }
    path.write_text(yaml.safe_dump(fleet))
    _, admin = processes.start("serve", "--config", str(path))
    terminal = Terminal("top", "--admin", admin)
    try:
        terminal.until(r"one +up +ready")
        terminal.press(b"x\x1b[B")
        terminal.until("live")
        processes.kill_last()
        terminal.until("trying again")
        processes.start("serve", "--config", str(path))
        terminal.until("live")
        terminal.press(b"q")
        assert terminal.ended() == 0
        # The terminal is as it was found.
        assert termios.tcgetattr(terminal.child) == terminal.before
    finally:
        terminal.close()


@pytest.mark.parametrize("keys", [b"\x04", b"\x1b", b"Q"])
def test_other_keys_that_end_it(keys: bytes) -> None:
    terminal = Terminal("top", "--admin", "http://127.0.0.1:1")
    try:
        terminal.until("Connection refused; trying again")
        terminal.press(keys)
        assert terminal.ended() == 0
        assert termios.tcgetattr(terminal.child) == terminal.before
    finally:
        terminal.close()


@pytest.mark.parametrize("keys", [b"\x1b[B", b"\x1bOA", b"x"])
def test_other_keys_do_not(keys: bytes) -> None:
    assert not quits(keys)


def test_ctrl_c_ends_it_and_leaves_the_terminal_whole() -> None:
    terminal = Terminal("top", "--admin", "http://127.0.0.1:1")
    try:
        terminal.until("Connection refused; trying again")
        os.killpg(terminal.process.pid, 2)
        assert terminal.ended() == 1
        assert termios.tcgetattr(terminal.child) == terminal.before
    finally:
        terminal.close()


def test_names_that_are_cut_stay_different() -> None:
    names = ["vllm-a100-production-eu-west-0", "vllm-a100-production-eu-west-1", "b"]
    short = shortened(names, 13)
    assert len(set(short.values())) == 3
    assert max(map(len, short.values())) <= 13
    assert shortened(names[:2], 13) == {names[0]: "…t-0", names[1]: "…t-1"}
    assert shortened(["a", "b"], 13) == {"a": "a", "b": "b"}
