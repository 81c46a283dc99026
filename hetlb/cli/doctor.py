"""`hetlb doctor`: looks for the mistakes that fleets have, a line for each, and says what to do."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from hetlb.cli.engine_facts import EngineFacts, ask_engines
from hetlb.cli.flags import add_json, declare
from hetlb.config.fleet import Fleet, fleet_from_urls, load_fleet
from hetlb.core.engine_tables import VLLM
from hetlb.core.types import InstanceSpec
from hetlb.errors import InputError
from hetlb.proxy.service import require_urls

#: Older vLLM has other metrics and flags; its answers pass, its figures may not.
OLDEST: Final = (0, 8)
#: Clocks further apart than this make logs and certificates misleading.
MOST_SKEW_S: Final = 5.0
_DEFAULT_FILE: Final = Path("fleet.yaml")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `name` is the check and its server, `found` what is so, `advice` what to do, or ""."""

    name: str
    ok: bool
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """A server of the fleet and what it told."""

    spec: InstanceSpec
    facts: EngineFacts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb doctor`."""
    declare(parser)("--config", "fleet file (default fleet.yaml)", "FLEET.yaml", Path)
    servers = "server, instead of a file (repeatable)"
    parser.add_argument("--instance", action="append", default=[], metavar="URL", help=servers)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 if one is not ok."""
    if args.config is not None and args.instance:
        raise InputError("expected either --config FLEET.yaml or --instance URL (repeatable)")
    fleet = fleet_from_urls(args.instance) if args.instance else load_fleet(args.config or _DEFAULT_FILE)
    found = asyncio.run(examine(fleet))
    if args.json:
        print(json.dumps({"checks": [asdict(each) for each in found]}))
    else:
        _print(found)
    return 0 if all(each.ok for each in found) else 1


def bearer(variable: str | None) -> dict[str, str]:
    """The header with the key of a variable. Raises `InputError` where that is not set."""
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InputError(f"--api-key-env: expected a variable with an API key, but {variable!r} is not set")
    return {"Authorization": f"Bearer {key}"}


async def examine(fleet: Fleet) -> list[Check]:
    """All findings about a fleet and its servers."""
    access = require_urls(fleet)
    headers: dict[str, dict[str, str]] = {}
    for spec in fleet.instances:
        key = access.engines[spec.name].authorization
        headers[spec.url] = {} if key is None else {"Authorization": key.decode("ascii")}
    facts = await ask_engines(headers)
    servers = [Seen(spec, facts[spec.url]) for spec in fleet.instances]
    found = list(_of_this_machine(fleet))
    for seen in servers:
        found += _of_server(seen)
    answering = [seen for seen in servers if not seen.facts.trouble]
    return found + list(_of_all(answering))


def _of_this_machine(fleet: Fleet) -> Iterable[Check]:
    listen, admin = fleet.file.listen, fleet.file.admin
    if listen.port and (listen.host, listen.port) == (admin.host, admin.port):
        yield Check(
            "ports",
            False,
            f"listen and admin are both {listen.host}:{listen.port}",
            "give admin.port another number",
        )
    else:
        yield Check("ports", True, f"clients at {listen.port}, admin at {admin.port}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= 4096
    told = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    yield Check(
        "file descriptors",
        enough,
        told,
        "" if enough else "raise it (ulimit -Hn, LimitNOFILE): two for a client",
    )


def _of_server(seen: Seen) -> list[Check]:
    """Findings about one server, until one makes the others moot."""
    spec, facts = seen.spec, seen.facts

    def check(name: str, ok: bool, found: str, advice: str = "") -> Check:
        return Check(f"{name} of {spec.name}", ok, found, "" if ok else advice)

    if facts.trouble:
        return [
            check("address", False, f"{spec.url}: {facts.trouble}",
                  "start it, or correct host and port: `vllm serve` prints its own when it starts")
        ]  # fmt: skip
    found = [
        check(
            "address", facts.health == 200, f"{spec.url}: /health answers {facts.health}", "look at its log"
        )
    ]
    if facts.models_status in (401, 403):
        return [
            *found,
            check("key", False, f"/v1/models answers {facts.models_status}",
                  "set api_key_env or api_key_file of the instance or model to its `vllm serve --api-key`"),
        ]  # fmt: skip
    found.append(check("key", True, "accepted" if facts.models_status == 200 else "none asked for"))
    wanted = spec.model
    serves = not wanted or wanted in facts.names
    found.append(
        check("model", serves and bool(facts.entries), f"serves {', '.join(facts.names) or 'nothing'}",
              f"expected {wanted}: correct the model's name, or start it with --served-model-name {wanted}")
    )  # fmt: skip
    found.append(
        check("metrics", facts.table is not None, _metrics(facts),
              "without them hetlb goes by its own ledger alone: start it without --disable-log-stats")
    )  # fmt: skip
    is_vllm = facts.table is None or facts.table is VLLM
    old = is_vllm and (facts.old_names or (facts.version is not None and _version(facts.version) < OLDEST))
    title = "vLLM" if facts.table is None else facts.table.title
    found.append(
        check("version", not old, f"{title} {facts.version or 'of unknown version'}",
              f"upgrade to {OLDEST[0]}.{OLDEST[1]} or later: older ones lack what hetlb reads")
    )  # fmt: skip
    skewed = abs(facts.skew_s) > MOST_SKEW_S
    found.append(
        check("clock", not skewed, f"{facts.skew_s:+.0f} s" if skewed else "within seconds of this one",
              "synchronise the clocks (NTP): logs, traces and certificates go by them")
    )  # fmt: skip
    several = len(facts.began) > 1
    behind = facts.proxy or ("two answers came from two processes" if several else "")
    found.append(
        check("directness", not behind, behind or "no proxy in front",
              "hetlb must reach each engine itself: a proxy or Service in front of several chooses again")
    )  # fmt: skip
    return found


def _metrics(facts: EngineFacts) -> str:
    table = facts.table
    if table is not None:
        return "; ".join([f"those of {table.title}", *table.lacks]) if table.lacks else "there"
    if facts.metrics_status == 200:
        return "/metrics: no figures of an engine that is known"
    return f"/metrics: status {facts.metrics_status}" if facts.metrics_status else "/metrics: no answer"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text)[:2]) or OLDEST


def _of_all(servers: Sequence[Seen]) -> Iterable[Check]:
    """Findings about several servers together."""
    by_process: dict[tuple[float, ...], list[str]] = {}
    for seen in servers:
        if seen.facts.began:
            by_process.setdefault(tuple(sorted(seen.facts.began)), []).append(seen.spec.name)
    twice = [names for names in by_process.values() if len(names) > 1]
    yield Check(
        "one address per server",
        not twice,
        "; ".join(f"{' and '.join(names)} are one process" for names in twice)
        or "each is a process of its own",
        "leave one of them out: the load would be counted twice" if twice else "",
    )
    for model in dict.fromkeys(seen.spec.model for seen in servers):
        pool = [seen for seen in servers if seen.spec.model == model]
        yield from _of_pool(model or "the servers", model, pool)


def _of_pool(title: str, model: str, pool: Sequence[Seen]) -> Iterable[Check]:
    yield _alike(
        f"prefix caching of {title}", pool, _caching,
        "use --enable-prefix-caching everywhere or nowhere: what is cached is taken for faster",
    )  # fmt: skip
    yield _alike(
        f"weights of {title}", pool, lambda seen: _root(seen, model),
        "one name must be one model: correct the file, or give the other one a name of its own",
    )  # fmt: skip


def _alike(name: str, pool: Sequence[Seen], of: Callable[[Seen], str | None], advice: str) -> Check:
    """A check that all servers of a pool tell the same; those that tell nothing are left out."""
    told: dict[str, list[str]] = {}
    for seen in pool:
        value = of(seen)
        if value is not None:
            told.setdefault(value, []).append(seen.spec.name)
    found = "; ".join(f"{value}: {', '.join(names)}" for value, names in told.items()) or "not told"
    return Check(
        name, len(told) < 2, found if len(told) != 1 else next(iter(told)), advice if len(told) > 1 else ""
    )


def _caching(seen: Seen) -> str | None:
    sample = seen.facts.sample
    caches = None if sample is None else sample.capacity.enable_prefix_caching
    return None if caches is None else "on" if caches else "off"


def _root(seen: Seen, model: str) -> str | None:
    """Path or repository of the weights that a server has under a model's name."""
    entry: Mapping[str, object] = next(
        (each for each in seen.facts.entries if not model or each["id"] == model), {}
    )
    root = entry.get("root")
    return root if isinstance(root, str) else None


def _print(found: Sequence[Check]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    width = max(len(each.name) for each in found)
    for each in found:
        console.print("ok   " if each.ok else "WRONG", style="green" if each.ok else "bold red", end=" ")
        advice = f" -> {each.advice}" if each.advice else ""
        console.print(f"{each.name:<{width}}  {each.found}{advice}")
    wrong = sum(not each.ok for each in found)
    console.print(f"\n{len(found)} checks, {wrong or 'none'} of them wrong")
