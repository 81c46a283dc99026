"""Profiles corrected by a log, and the client of a running proxy that reads what it has seen."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import pytest

from hetlb.cli.main import main

PROFILE = """\
version: 1
name: some
prefill: {k1: 1.0e-4, k2: 1.0e-3, k3: 0.0, k4: 1.0e-2}
decode: {k5: 5.0e-8, k6: 6.0e-5, k7: 0.0, k8: 1.3e-2}
engine: {kv_cache_tokens: 60000}
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


def test_the_token_goes_to_the_proxy_and_not_to_where_it_redirects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[tuple[str, str | None]] = []

    class Redirect(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append((self.path, self.headers["authorization"]))
            self.send_response(200 if self.path == "/elsewhere" else 302)
            self.send_header("location", "/elsewhere")
            self.end_headers()
            self.wfile.write(b'{"decisions": [], "clock_s": 0}')

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("HETLB_ADMIN_TOKEN", "secret")
    with serving(Redirect) as url:
        assert main(["explain", "--url", url, "--last", "1"]) == 0
    assert heard == [("/v1/decisions?last=1", "Bearer secret"), ("/elsewhere", None)]


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", b""])
def test_a_server_of_another_protocol_is_one_line(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(answer)

    with serving(Other) as url:
        assert main(["explain", "--url", url, "--last", "1"]) == 2
        assert (
            f"--admin: expected the admin address of a running proxy, got '{url}'" in capsys.readouterr().err
        )


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


def test_a_log_of_one_load_tells_no_parts_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, log = tmp_path / "start.yaml", tmp_path / "log.csv"
    start.write_text(PROFILE)
    rows = "".join(f"{20 * i},500,50,0.06,0.7\n" for i in range(30))
    log.write_text("arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n" + rows)
    out = str(tmp_path / "out.yaml")
    assert main(["profile", "--from", f"log:{log}", "--start", str(start), "--out", out]) == 2
    assert "expected arrivals that vary" in capsys.readouterr().err
    assert main(["simulate", "--against", str(log), "--profile", str(start)]) == 0
    assert "mean distance over the mean" in capsys.readouterr().out
