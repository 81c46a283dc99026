"""`hetlb init`: writes a commented fleet file from facts read from the servers."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from urllib.parse import urlsplit

from hetlb.balancer.config.fleet import fleet_from_urls
from hetlb.cli.engine_facts import EngineFacts, ask_engines
from hetlb.cli.flags import declare
from hetlb.errors import HetlbError, InputError, visible

#: Name of the schema file that editors look for next to the fleet file.
SCHEMA = "fleet.schema.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    add("urls", "address of a vLLM server", "URL", nargs="+")
    add("--api-key-env", "environment variable with the servers' API key", "NAME")


def run(args: argparse.Namespace) -> int:
    """Print the file; warnings go to stderr."""
    urls = [each.url for each in fleet_from_urls(args.urls, "URL").instances]
    key = args.api_key_env and _secret("--api-key-env", args.api_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found = asyncio.run(ask_engines(dict.fromkeys(urls, headers)))
    for url, facts in found.items():
        if not _is_engine(facts):
            print(visible(f"hetlb init: {url}: {why_unknown(facts)}"), file=sys.stderr)
    if not any(map(_is_engine, found.values())):
        raise HetlbError("no server listed its models: nothing to write")
    print(fleet_text(list(found.values()), args.api_key_env), end="")
    return 0


def _secret(flag: str, variable: str) -> str:
    """Return value of the environment variable that a flag names. Raises `InputError` if it is not set."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise InputError(f"{flag}: expected a variable with a key, but {variable!r} is not set")
    return value


def _is_engine(facts: EngineFacts) -> bool:
    return bool(facts.entries) and not facts.foreign


def why_unknown(facts: EngineFacts) -> str:
    """Return the reason for leaving a server out of the file."""
    if facts.trouble:
        return facts.trouble + (f"; it answers at {facts.other_url}" if facts.other_url else "")
    if facts.foreign:
        return f"{facts.foreign} answers there: give the addresses of the engines themselves"
    if facts.models_status in (401, 403):
        return f"it wants an API key ({facts.models_status}): name its variable with --api-key-env"
    return f"/v1/models answers {facts.models_status}"


def fleet_text(found: list[EngineFacts], key_env: str | None) -> str:
    """Return the text of the fleet file, servers grouped by model."""
    models: dict[str, list[EngineFacts]] = {}
    for facts in found:
        if _is_engine(facts):
            models.setdefault(facts.names[0], []).append(facts)
    lines = [
        f"# yaml-language-server: $schema={SCHEMA}",
        f"# For editors: `hetlb schema fleet > {SCHEMA}`.",
        "# Written by `hetlb init`. Check: `hetlb doctor --config FILE`. Serve: `hetlb serve --config FILE`.",
        "version: 1",
        "listen: {host: 127.0.0.1, port: 8080}     # for clients; 0.0.0.0 for clients on other machines",
        "admin: {host: 127.0.0.1, port: 8081}      # dashboard, metrics, switches",
        "models:",
    ]
    names: set[str] = set()
    for model, servers in models.items():
        lines += [f"  - name: {json.dumps(model)}", "    instances:"]
        if key_env:
            lines.insert(-1, f"    api_key_env: {key_env}")
        for facts in servers:
            lines += [f"      # {visible(about(facts))}"]
            name = _name(facts.url, names)
            lines += [f"      - name: {name}", f"        url: {json.dumps(facts.url)}"]
            lines += [
                "        # max_num_seqs: 256        # as in its `vllm serve`; not stated, it is learnt",
                "        # gpu: H100                # of `hetlb profile --gpus`: its speed before an answer",
                "        # gpus: 1                  # their number",
                "        # profile: profile.yaml    # `hetlb profile --url URL --out profile.yaml` makes it",
            ]
    silent = [facts for facts in found if not _is_engine(facts)]
    lines += [visible(f"# left out: {facts.url}: {why_unknown(facts)}") for facts in silent]
    return "\n".join(lines) + "\n"


def about(facts: EngineFacts) -> str:
    """Return the comment line that describes a server."""
    parts = [f"vLLM {facts.version}" if facts.version else "version unknown"]
    if facts.max_model_len is not None:
        parts.append(f"context {facts.max_model_len:,} tokens")
    capacity = None if facts.sample is None else facts.sample.capacity
    if capacity is not None and capacity.kv_cache_tokens is not None:
        parts.append(f"KV cache {capacity.kv_cache_tokens:,} tokens")
        if capacity.engines is not None and capacity.engines > 1:
            parts.append(f"{capacity.engines} data-parallel engines")
        if capacity.enable_prefix_caching is not None:
            parts.append(f"prefix caching {'on' if capacity.enable_prefix_caching else 'off'}")
    else:
        parts.append("KV cache unknown: are its metrics on?")
    return ", ".join(parts)


def _name(url: str, taken: set[str]) -> str:
    parts = urlsplit(url)
    name = base = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{parts.hostname}-{parts.port or 80}").strip("-")
    number = 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name)
    return name
