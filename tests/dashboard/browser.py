"""A fleet of processes and a headless browser that looks at its dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import HANG_S

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

PROFILES = Path(__file__).parents[2] / "hetlb" / "tools" / "demo"
MODEL = "llama-3-8b"
#: Names of the instances and the profiles that time them.
ENGINES = {"a800-0": "fast.yaml", "v100-0": "slow.yaml", "v100-1": "slow.yaml"}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """A headless Chromium: this machine's, else the one playwright installed, else the tests are skipped."""
    with playwright.sync_playwright() as driver:
        found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
        own = driver.chromium.executable_path
        if found is None and not Path(own).exists():
            pytest.skip("no Chromium on this machine")
        # As root, in a container, Chromium has no sandbox to start in.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        playwright.expect.set_options(timeout=HANG_S * 1e3)
        browser = driver.chromium.launch(executable_path=found, args=flags, timeout=HANG_S * 1e3)
        try:
            yield browser
        finally:
            browser.close()


class Look:
    """One page and all that went wrong on it."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._context = browser.new_context(viewport={"width": 1360, "height": 900}, **context)
        self._context.set_default_timeout(HANG_S * 1e3)
        self.page = self._context.new_page()
        self.page.on("console", lambda message: self.errors.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def live(self) -> Look:
        """Wait for the first snapshot."""
        playwright.expect(self.page.locator("#link")).to_have_text("live")
        return self

    def row(self, name: str) -> Any:
        """The row of an instance."""
        return self.page.locator("#models tbody tr").filter(has=self.page.get_by_role("rowheader", name=name))

    def close(self) -> None:
        self._context.close()


class Fleet:
    """`hetlb serve` in front of emulated engines, each a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.url = self.admin = ""
        self._token: str | None = None

    def start_engine(self, name: str, profile: str, port: int = 0, *flags: str) -> str:
        return self._start(
            name, "engine", "--profile", str(PROFILES / profile), "--port", str(port),
            "--served-model-name", MODEL, *flags,
        )[0]  # fmt: skip

    def serve(
        self, urls: dict[str, str], *, token: str | None = None, profiles: bool = True, **tables: Any
    ) -> None:
        """Start the proxy over these engines, with their profiles or without any."""
        document: dict[str, Any] = {
            "version": 1,
            "listen": {"port": 0},
            "admin": {"port": 0},
            "models": [
                {
                    "name": MODEL,
                    "instances": [
                        {"name": name, "url": url}
                        | (
                            {"profile": str(PROFILES / ENGINES.get(name, "fast.yaml"))}
                            if profiles
                            else {"max_num_seqs": 22}
                        )
                        for name, url in urls.items()
                    ],
                }
            ],
        }
        for name, table in tables.items():
            document[name] = {**document.get(name, {}), **table} if isinstance(table, dict) else table
        if token is not None:
            (self._folder / "token").write_text(token)
            document["admin"]["token_file"] = str(self._folder / "token")
        self._token = token
        path = self._folder / "fleet.yaml"
        path.write_text(yaml.safe_dump(document))
        self.url, self.admin = self._start("serve", "serve", "--config", str(path))

    def _start(self, name: str, *arguments: str) -> list[str]:
        with (self._folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hetlb", *arguments], stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._processes[name] = process
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " ready on " in line, (line, (self._folder / f"{name}.log").read_text())
        return [word.strip("()\n") for word in line.split() if word.startswith("http://")]

    def load(self, *flags: str) -> None:
        """Let clients ask the proxy, as `hetlb bench` with these flags, until the fleet is closed."""
        with (self._folder / "load.log").open("a") as log:
            self._processes["load"] = subprocess.Popen(
                [sys.executable, "-m", "hetlb", "bench", "--url", self.url, "--disable-tqdm", *flags],
                stdout=log, stderr=log, text=True,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """End a process at once."""
        process = self._processes.pop(name)
        process.kill()
        process.communicate()

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """A process that stands still until the end of the block."""
        self._processes[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._processes[name].send_signal(signal.SIGCONT)

    def state(self, name: str) -> str:
        """An instance's administrative state, as the proxy says."""
        [model] = self._get("/v1/fleet")["models"]
        return next(str(each["state"]) for each in model["instances"] if each["name"] == name)

    def decision(self) -> dict[str, Any]:
        """The last decision."""
        [decision] = self._get("/v1/decisions?last=1")["decisions"]
        return dict(decision)

    def _get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        with urllib.request.urlopen(urllib.request.Request(f"{self.admin}{path}", headers=headers)) as reply:
            return json.load(reply)

    def ask(self, number: int = 1, tokens: int = 5) -> list[str]:
        """Send completions, one after the other; returns who answered."""
        answered = []
        for _ in range(number):
            body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": tokens}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{self.url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=HANG_S) as reply:
                answered.append(reply.headers["x-hetlb-instance"])
        return answered

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)
