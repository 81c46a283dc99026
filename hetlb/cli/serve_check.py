"""`hetlb serve --check`: what a plan left to be filled in, and with `--connect` if the servers are there."""

from __future__ import annotations

import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from hetlb.config.fleet import Fleet
from hetlb.errors import ConfigError

#: Domain of hosts that plans leave to be filled in.
_PLACEHOLDER = ".invalid"
_TIMEOUT_S = 5.0
_MOST_AT_ONCE = 32


def check_filled_in(fleet: Fleet) -> None:
    """Raise `ConfigError`, a line for each placeholder and for each file of stages that is not there."""
    found = [
        f"{fleet.where}instance {spec.name}: url: expected the host in place of {host}"
        for spec in fleet.instances
        if spec.name not in fleet.stages and (host := _host(spec.url)).endswith(_PLACEHOLDER)
    ]
    for name, group in fleet.stages.items():
        where = f"{fleet.where}stages {name}"
        found += [
            f"{where}: worker {worker}: url: expected the host in place of {host}"
            for worker, url in group.workers.items()
            if (host := _host(url)).endswith(_PLACEHOLDER)
        ]
        if not (group.folder / "config.json").is_file():
            found.append(f"{where}: folder: expected the model's config.json in it, got {group.folder}")
        if group.key_file is not None and not group.key_file.is_file():
            found.append(f"{where}: key_file: expected the key that the workers have, got {group.key_file}")
    if found:
        raise ConfigError("\n".join(found))


def check_connected(fleet: Fleet) -> list[str]:
    """Ask every server and every worker; a line for each that is not there."""
    targets = [
        (f"instance {spec.name}", f"{spec.url.rstrip('/')}/v1/models")
        for spec in fleet.instances
        if spec.name not in fleet.stages
    ]
    for name, group in fleet.stages.items():
        targets += [
            (f"stages {name}: worker {worker}", f"{url.rstrip('/')}/health")
            for worker, url in group.workers.items()
        ]
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        answers = list(pool.map(_ask, (url for _, url in targets)))
    return [
        f"{fleet.where}{what}: expected an answer from {url}, got {answer}"
        for (what, url), answer in zip(targets, answers, strict=True)
        if answer
    ]


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def _ask(url: str) -> str:
    """The reason for which a server counts as absent, empty if it is there."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as answer:
        # It listens; whether it wants a key or has no such page is not asked here.
        return "" if answer.code < 500 else f"status {answer.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
