"""`hetlb serve` as an operator meets it: a process that starts, says where it is, and ends when told to."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from helpers import HANG_S, free_port

from hetlb.balancer.config.profile_file import Hardware, load_profile
from hetlb.cli.main import main
from hetlb.cli.profile_doubts import other_gpu

DEMO = Path(__file__).parents[2] / "hetlb" / "tools" / "demo"
Starter = Callable[..., subprocess.Popen[str]]


@contextlib.contextmanager
def starting() -> Iterator[Starter]:
    """Give what starts `python -m hetlb …`; whatever is still running at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def starter(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "hetlb", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    try:
        yield starter
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.fixture
def start() -> Iterator[Starter]:
    with starting() as starter:
        yield starter


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    """URLs of two engines, for all tests: none of them does anything to an engine."""
    with starting() as starter:
        yield [engine(starter) for _ in range(2)]


def ready(process: subprocess.Popen[str]) -> list[str]:
    """The URLs of the ready line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert " ready on " in line, (line, process.stderr.read() if process.stderr else "")
    return [word.strip("()\n") for word in line.split() if word.startswith("http://")]


def engine(start: Starter) -> str:
    profile = str(DEMO / "fast.yaml")
    arguments = ("engine", "--profile", profile, "--port", "0", "--served-model-name", "m")
    return ready(start(*arguments, "--time-scale", "0.05"))[0]


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=HANG_S) as reply:
        document: dict[str, Any] = json.load(reply)
        return document


def proxy(start: Starter, *instances: str, up: int | None = None) -> tuple[subprocess.Popen[str], str, str]:
    """A proxy in front of these addresses, and its own two, once `up` of them (all) are."""
    flags = [word for instance in instances for word in ("--instance", instance)]
    process = start("serve", *flags, "--port", "0", "--admin-port", "0")
    url, admin = ready(process)
    wait_until_up(admin, len(instances) if up is None else up)
    return process, url, admin


def wait_until_up(admin: str, count: int) -> None:
    """A proxy listens after its first look at the engines, however little that has seen."""
    wait_for(lambda: sum(each["health"] == "up" for each in instances_of(admin)) >= count)


def wait_for(known: Callable[[], bool]) -> None:
    end_s = time.monotonic() + HANG_S
    while not known():
        assert time.monotonic() < end_s, "not within HANG_S"


def instances_of(admin: str) -> list[dict[str, Any]]:
    return [each for model in get(f"{admin}/v1/fleet")["models"] for each in model["instances"]]


def ask(url: str, **fields: object) -> tuple[int, dict[str, object]]:
    body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 4, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def _kv_cache_tokens() -> int | None:
    return load_profile(DEMO / "fast.yaml").engine.kv_cache_tokens


def test_addresses_alone_are_enough(start: Starter, engines: list[str]) -> None:
    _, url, admin = proxy(start, *engines)
    wait_for(lambda: all(each["signal_age_s"] is not None for each in instances_of(admin)))
    assert [entry["id"] for entry in get(f"{url}/v1/models")["data"]] == ["m"]
    for _ in range(4):
        status, document = ask(url)
        assert status == 200
        assert document["usage"]["completion_tokens"] == 4  # type: ignore[index]
    instances = instances_of(admin)
    assert {each["kv_cache_tokens"] for each in instances} == {_kv_cache_tokens()}
    assert all(each[key] == 0 for each in instances for key in ("in_flight", "queued", "workload"))


def test_an_instance_that_is_not_there_is_named_and_the_other_serves(
    start: Starter, engines: list[str]
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    process, url, _ = proxy(start, dead, engines[0], up=1)
    assert ask(url)[0] == 200
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert f"({dead}) is not answering: connection refused; serving with the others" in err
    assert "Traceback" not in err


def test_a_port_in_use_is_one_line(start: Starter) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start("serve", "--instance", "http://127.0.0.1:9", "--port", str(port), "--admin-port", "0")
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert f"hetlb serve: listen: 127.0.0.1:{port} cannot be listened on" in err.splitlines()[-1]
    assert "--replace" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_status_0(start: Starter, engines: list[str], number: signal.Signals) -> None:
    process, url, _ = proxy(start, engines[0])
    assert ask(url)[0] == 200
    process.send_signal(number)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 0


#: A `serve` with a thread that does not end: a name server of the system that is mute, a file on a dead disk.
STUCK = """
import asyncio, sys, threading
from hetlb import tasks
from hetlb.cli.main import main
tasks._FORCED_EXIT_S = 1.0
from hetlb.balancer.fleet import service
start = service.Service.start
async def stuck(self, *given):
    self.stuck = asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    await start(self, *given)
service.Service.start = stuck
sys.exit(main(sys.argv[1:]))
"""


def test_a_second_signal_ends_it_though_a_thread_does_not(engines: list[str], tmp_path: Path) -> None:
    fleet = {"version": 1, "listen": {"port": 0}, "admin": {"port": 0}}
    fleet["models"] = [{"name": "m", "instances": [{"url": engines[0]}]}]
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet))
    command = [sys.executable, "-c", STUCK, "serve", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = int(ready(process)[0].rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as client:  # the first waits for it
                client.sendall(b"GET /ping HTTP/1.1\r\nhost: p\r\n\r\n")
                assert client.recv(1)
                process.send_signal(signal.SIGTERM)
                assert process.stderr is not None
                while "stopping" not in process.stderr.readline():
                    assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    assert process.returncode == 1


def test_a_request_in_flight_ends_before_the_proxy_does(start: Starter, engines: list[str]) -> None:
    process, url, _ = proxy(start, engines[0])
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 100, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=HANG_S) as reply:
        first = reply.readline()
        process.send_signal(signal.SIGTERM)
        text = first + reply.read()
    assert text.rstrip().endswith(b"data: [DONE]")
    assert text.count(b'"text":"') == 100
    process.communicate(timeout=HANG_S)
    assert process.returncode == 0


def test_the_request_log_has_one_line_per_request(start: Starter, engines: list[str]) -> None:
    process, url, _ = proxy(start, engines[0])
    ask(url)
    ask(url, model="nobody\nknows=it")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)
    lines = [line for line in err.splitlines() if " request=" in line]
    assert len(lines) == 2
    assert "outcome=ok" in lines[0]
    assert "output_tokens=4" in lines[0]
    assert "model=nobody%0aknows%3dit" in lines[1]
    assert "outcome=bad_request" in lines[1]
    assert "hello" not in err


FLEET = 'version: 1\nmodels: [{name: m, instances: [{url: "http://127.0.0.1:9"}]}]\n'


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        ([], FLEET + "listen: {port: many}\n", "listen.port: expected a whole number, got 'many'"),
        ([], FLEET + "policy: {predictor: oracle}\n", "policy.predictor"),
        ([], FLEET + "policy: {predictor: mean}\n", "needs a sample of output lengths"),
        ([], FLEET + "admin: {host: 0.0.0.0}\n", "admin.host: expected a loopback address"),
        (
            [],
            "version: 1\nmodels: [{name: m, instances: [{name: a}]}]\n",
            "a: url: expected the server's URL",
        ),
        (["--port", "70000"], FLEET, "--port: expected a port from 0 to 65535, got 70000"),
        (["--workers", "0"], FLEET, "--workers: expected a whole number from 1 to 128, got 0"),
        (["--event-log", "/no/such/folder/x"], FLEET, "--event-log: expected a file that can be written"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], text: str, message: str
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    assert main(["serve", "--config", str(path), *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_pipe_that_nothing_reads_is_no_event_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, pipe = tmp_path / "fleet.yaml", tmp_path / "pipe"
    path.write_text(FLEET)
    os.mkfifo(pipe)
    assert main(["serve", "--config", str(path), "--event-log", str(pipe)]) == 2
    assert "nothing reads this pipe" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "'::'"])
def test_one_port_for_both_listeners_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        f"version: 1\nlisten: {{host: {host}, port: 9}}\nadmin: {{port: 9}}\n"
        'models: [{name: m, instances: [{url: "http://127.0.0.1:1"}]}]\n'
    )
    assert main(["serve", "--config", str(path), "--check"]) == 2
    assert "admin.port: expected another than listen.port, got 9 for both" in capsys.readouterr().err


def test_with_json_logs_every_line_is_json(start: Starter, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "version: 1\nlisten: {port: 0}\nadmin: {port: 0}\nproxy: {request_log_format: json, "
        f"max_connections: {10**9}}}\n"
        'models: [{name: m, instances: [{url: "http://127.0.0.1:1"}]}]\n'
    )
    process = start("serve", "--config", str(path))
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert (first["event"], first["level"]) == ("started", "info")
    assert first["message"].startswith("hetlb ready on http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    lines = [json.loads(line) for line in [*out.splitlines(), *err.splitlines()]]
    assert "max_connections" in lines[0]["message"]
    assert [line["event"] for line in lines][-1] == "stopped"


def test_check_validates_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    assert main(["serve", "--config", str(path), "--check"]) == 0
    assert "is valid: 1 instance (not contacted; see hetlb doctor)" in capsys.readouterr().out


def test_a_fleet_or_addresses_but_not_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == (
        "hetlb serve: fleet.yaml: no such file; write it with `hetlb init URL... > fleet.yaml`, "
        "or name servers with --instance URL\n"
    )
    assert main(["serve", "--config", str(tmp_path), "--instance", "http://h:1"]) == 2
    assert capsys.readouterr().err.count("expected either --config") == 1
    Path("fleet.yaml").write_text(FLEET)
    assert main(["serve", "--check"]) == 0


def test_killing_the_proxy_leaves_nothing(start: Starter, engines: list[str]) -> None:
    process, _, _ = proxy(start, engines[0])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    assert not children.exists() or children.read_text() == ""
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=HANG_S)


def test_more_clients_than_descriptors_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for clients, warned in ((hard // 2, False), (hard // 2 + 1, True)):
        path = tmp_path / "fleet.yaml"
        path.write_text(
            f"version: 1\nproxy: {{max_connections: {clients}}}\n"
            "models: [{name: m, instances: [{name: a, url: 'http://127.0.0.1:8000'}]}]\n"
        )
        assert main(["serve", "--config", str(path), "--check"]) == 0
        said = capsys.readouterr().err
        assert (f"proxy.max_connections: {clients} clients need up to {2 * clients}" in said) is warned


def test_check_prints_what_makes_profiles_doubtful(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {
        "version": 1, "name": "p", "model": {"name": "org/eight"},
        "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 1e-2},
        "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1.3e-2},
    }  # fmt: skip
    figures = {"mean_error": 0.37, "p95_error": 0.5, "max_error": 0.53, "points": 9}
    poor = {**good, "fit": {**figures, "decode": {"form": "paper", **figures}}}
    other = {**good, "model": {"name": "org/seventy"}, "source": {"kind": "roofline", "measured": False}}
    for name, made in (("good", good), ("poor", poor), ("other", other)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(made))

    def checked(*profiles: str) -> tuple[str, list[str]]:
        instances = [
            {"name": f"i{n}", "url": f"http://127.0.0.1:{n + 1}", "profile": f"{each}.yaml"}
            for n, each in enumerate(profiles)
        ]
        (tmp_path / "fleet.yaml").write_text(
            yaml.safe_dump({"version": 1, "models": [{"name": "m", "instances": instances}]})
        )
        assert main(["serve", "--config", str(tmp_path / "fleet.yaml"), "--check"]) == 0
        shown = capsys.readouterr()
        return shown.out, shown.err.splitlines()

    out, lines = checked("good", "good")
    assert (out.endswith("is valid: 2 instances (not contacted; see hetlb doctor)\n"), lines) == (True, [])
    out, lines = checked("good", "poor", "other")
    assert "3 instances, 4 warnings (not contacted" in out
    assert all(line.startswith(f"warning: {tmp_path}/fleet.yaml: ") for line in lines)
    assert [line.split(": ", 2)[2] for line in lines] == [
        "i1: profile: decode: the mean held-out error is 37.0% (over 10%)",
        "i1: profile: decode: the largest held-out error is 53.0% (over 30%)",
        "i2: profile: unmeasured: an estimate that no hardware has confirmed",
        "m: expected profiles of one model, got i0 of org/eight, i1 of org/eight, i2 of org/seventy",
    ]


@pytest.mark.parametrize(
    ("stated", "of", "same"),
    [
        ("H100", "h100_sxm", True),
        ("NVIDIA H100 80GB HBM3", "h100_sxm", True),
        ("NVIDIA-A100-SXM4-80GB", "a100_sxm", True),
        ("RTX 4090", "4090", True),
        ("NVIDIA RTX PRO 6000", "rtx_pro_6000_server", True),
        ("L40S", "h100_sxm", False),
        ("A100", "h100_sxm", False),
        ("H100", "H200", False),
        ("gold", "h100_sxm", True),
        ("H100", None, True),
    ],
)
def test_a_profile_of_another_gpu_is_known_by_letters_and_number(
    stated: str, of: str | None, same: bool
) -> None:
    profile = load_profile(DEMO.parents[2] / "profiling" / "h100_sxm-llama-3.1-8b-tp1.yaml")
    profile = msgspec.structs.replace(profile, hardware=None if of is None else Hardware(gpu=of))
    assert (other_gpu(profile, stated) == "") is same
