"""Profiles corrected by a log and by what a running proxy has seen."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import pytest

from hetlb.cli.main import main
from hetlb.cli.profile_corrected import counters
from hetlb.config.profile_file import load_profile
from hetlb.core.types import Outcome
from hetlb.proxy.telemetry.counters import InstanceTotals

PROFILE = """\
version: 1
name: some
prefill: {k1: 1.0e-4, k2: 1.0e-3, k3: 0.0, k4: 1.0e-2}
decode: {k5: 5.0e-8, k6: 6.0e-5, k7: 0.0, k8: 1.3e-2}
engine: {kv_cache_tokens: 60000}
"""
PAGE = """\
# TYPE hetlb_instance_model_expected_seconds_total counter
hetlb_instance_model_expected_seconds_total{server="a",part="prefill"} 40.0
hetlb_instance_model_expected_seconds_total{server="a",part="mixed"} 3.0
hetlb_instance_model_expected_seconds_total{server="a",part="decode"} 100.0
hetlb_instance_model_seen_seconds_total{server="a",part="prefill"} 50.0
hetlb_instance_model_seen_seconds_total{server="a",part="mixed"} 30.0
hetlb_instance_model_seen_seconds_total{server="a",part="decode"} 90.0
hetlb_instance_model_seen_seconds_total{server="b",part="decode"} 1.0
"""


@contextlib.contextmanager
def serving(handler: type[BaseRequestHandler]) -> Iterator[str]:
    """A server on a free port while the block runs; its URL."""
    with TCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def admin() -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving(Page) as url:
        yield url


def test_a_part_that_was_seen_enough_is_corrected(
    tmp_path: Path, admin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start, out = tmp_path / "start.yaml", tmp_path / "out.yaml"
    start.write_text(PROFILE)
    arguments = ["profile", "--from", f"proxy:{admin}", "--server", "a", "--start", str(start)]
    assert main([*arguments, "--out", str(out)]) == 0
    before, after = load_profile(start).latency, load_profile(out).latency
    assert after.k1 == pytest.approx(1.25 * before.k1)
    assert after.k8 == pytest.approx(0.9 * before.k8)
    assert "mixed: left as it is, under 30 s" in capsys.readouterr().out
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["profile"]["source"]["kind"] == "proxy"
    assert document["warnings"] == ["mixed: left as it is, under 30 s of it were seen"]
    assert main([*arguments[:-3], "b", "--start", str(start), "--out", str(out)]) == 2
    assert "expected at least 30 s of some part on b" in capsys.readouterr().err


def test_the_token_goes_to_the_proxy_and_not_to_where_it_redirects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, str | None]] = []

    class Redirect(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append((self.path, self.headers["authorization"]))
            self.send_response(302 if self.path == "/metrics" else 200)
            self.send_header("location", "/elsewhere")
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *_: object) -> None:
            pass

    start, out = tmp_path / "start.yaml", tmp_path / "out.yaml"
    start.write_text(PROFILE)
    monkeypatch.setenv("SOME_TOKEN", "secret")
    with serving(Redirect) as url:
        source = ["profile", "--from", f"proxy:{url}", "--server", "a", "--start", str(start)]
        assert main([*source, "--out", str(out), "--api-key-env", "SOME_TOKEN"]) == 0
    assert heard == [("/metrics", "Bearer secret"), ("/elsewhere", None)]


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", b""])
def test_a_server_of_another_protocol_is_one_line(
    answer: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(answer)

    start = tmp_path / "start.yaml"
    start.write_text(PROFILE)
    with serving(Other) as url:
        source = ["profile", "--from", f"proxy:{url}", "--server", "a", "--start", str(start)]
        assert main([*source, "--out", str(tmp_path / "out.yaml")]) == 2
        assert (
            f"--from: expected the admin address of a running proxy, got '{url}'" in capsys.readouterr().err
        )
        assert main(["explain", "--url", url, "--last", "1"]) == 2
        assert (
            f"--admin: expected the admin address of a running proxy, got '{url}'" in capsys.readouterr().err
        )


def test_counters_of_a_page() -> None:
    assert counters(PAGE, "a")["decode"] == {"expected": 100.0, "seen": 90.0}
    assert counters(PAGE, "nothing") == {}


def test_a_version_1_profile_says_what_it_lacks_and_may_not_have_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(PROFILE)
    assert main(["profile", "show", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "lacks mixed steps: the attention of decodes beside a prompt is taken to be 1.5 times as long"
        in shown
    )
    path.write_text(PROFILE + "host: {iteration_s: 0.001}\n")
    assert main(["profile", "show", str(path)]) == 2
    assert "host: expected version: 2 of the file for this key, got 1" in capsys.readouterr().err


def test_factors_need_evidence() -> None:
    totals = InstanceTotals()
    totals.ended(Outcome.OK)
    totals.took("prefill", 0.5, 0.6)
    assert totals.model_factors()["prefill"] is None
    totals.took("prefill", 1.5, 1.8)
    totals.took("mixed", 2.0, 1.0)
    assert totals.model_factors() == {"prefill": pytest.approx(1.2), "mixed": 0.5, "decode": None}


def test_a_log_of_one_load_tells_no_parts_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, log = tmp_path / "start.yaml", tmp_path / "log.csv"
    start.write_text(PROFILE)
    rows = "".join(f"{20 * i},500,50,0.06,0.7\n" for i in range(30))
    log.write_text("arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n" + rows)
    out = str(tmp_path / "out.yaml")
    assert main(["profile", "--from", f"log:{log}", "--start", str(start), "--out", out]) == 2
    assert "expected arrivals that vary" in capsys.readouterr().err
    assert main(["simulate", "--against", str(log), "--profile", str(start)]) == 0
    assert "E2E error by part" in capsys.readouterr().out
