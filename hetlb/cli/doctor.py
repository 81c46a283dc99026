"""`hetlb doctor` and `hetlb serve --check`: look for common mistakes in a fleet and at its servers."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from hetlb.addresses import is_loopback
from hetlb.balancer.admin.causes import LEAST_KV_TOKENS
from hetlb.balancer.admin.rare_causes import KEY_ADVICE
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.profile_file import Profile, profiles_of
from hetlb.balancer.core.types import InstanceSpec
from hetlb.balancer.engines.engine_mistakes import next_step, small_cache, without_load
from hetlb.balancer.engines.scrape import UNKNOWN_PATH
from hetlb.balancer.fleet.reloading import require_urls
from hetlb.balancer.fleet.source import Found, Source
from hetlb.cli.doctor_local import (
    ANY_HOSTS,
    Check,
    checked,
    is_own_address,
    of_gpus,
    of_running,
    of_targets,
    of_this_machine,
    of_times,
    publisher_trouble,
    several_addresses,
)
from hetlb.cli.engine_facts import EngineFacts, ask_engines
from hetlb.cli.flags import add_json, declare, print_document, stated_fleet
from hetlb.cli.profile_doubts import doubt_beside, one_step_s
from hetlb.cli.serving_options import OPTIONS
from hetlb.errors import ConfigError, ConfigErrors, reason_of, visible
from hetlb.tasks import ended
from hetlb.tools.tables import Console

#: Largest difference of clocks, in seconds: beyond, logs and certificates mislead.
MOST_SKEW_S: Final = 5.0
#: Share of the KV cache above which requests may wait although a slot is free.
_FULL_KV_SHARE: Final = 0.8
#: Factor between steps by the profiles of one model beyond which one is wrong: GPUs' bandwidths differ by 25.
_OTHER_STEP_FACTOR: Final = 40
#: Seconds for a source of instances to report all it knows.
_SOURCE_S: Final = 5.0
#: Domain of placeholder hosts in generated plans.
_PLACEHOLDER: Final = ".invalid"


@dataclass(frozen=True, slots=True)
class Seen:
    """A server of the fleet and its facts."""

    spec: InstanceSpec
    facts: EngineFacts
    #: Listener of this very fleet at its address, "" if it is none.
    own: str = ""
    profile: Profile | None = None
    #: Addresses of its name, if a connection may go to each of several.
    several: Sequence[str] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    add("--config", "fleet file (default fleet.yaml)", "FLEET.yaml", Path)
    add("--instance", "server, instead of a file (repeatable)", "URL", default=[], action="append")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 if one is not ok."""
    fleet = stated_fleet(args)
    found = asyncio.run(examine(fleet))
    if not args.instance:
        found += of_running(fleet)
    print_document(args, {"checks": [asdict(each) for each in found]}, lambda: _print(found))
    return 0 if all(each.ok for each in found) else 1


async def examine(fleet: Fleet) -> list[Check]:
    """Run all checks on a fleet and its servers."""
    access, specs = require_urls(fleet), {each.url: each for each in fleet.instances}
    engines = {spec.url: access.engines[spec.name] for spec in fleet.instances}
    found: list[Check] = []
    table = fleet.file.discovery
    for source in () if table is None else OPTIONS.sources(fleet, table):
        check, more = await _of_source(source, fleet)
        found.append(check)
        for spec in more:
            specs.setdefault(spec.url, spec)
            engines.setdefault(spec.url, access.unlisted(spec.url, spec.model, None))
    headers = {
        url: {} if engine.authorization is None else {"Authorization": engine.authorization.decode("ascii")}
        for url, engine in engines.items()
    }
    tls = {url: engine.tls for url, engine in engines.items()}
    facts = await ask_engines(headers, tls, fleet.file.scrape.timeout_s)
    profiles = profiles_of(fleet)
    several = dict(zip(specs, await asyncio.gather(*map(several_addresses, specs)), strict=True))
    servers = [
        Seen(spec, facts[url], is_own_address(fleet, url), profiles.get(spec.name), several[url])
        for url, spec in specs.items()
    ]
    answering = [seen for seen in servers if not seen.facts.trouble]
    found += chain.from_iterable(map(_of_server, servers))
    for name, each in fleet.listed.items():
        if (publisher := each.table.publisher) is not None:
            endpoint = publisher.endpoint
            trouble = await publisher_trouble(endpoint)
            advice = "correct the address, or start the server with --kv-events-config"
            told = f"{endpoint}: {trouble or 'there'}"
            found.append(checked(f"KV events of {name}", not trouble, told, advice))
    return [
        *of_this_machine(fleet, access),
        *of_targets(fleet),
        *of_gpus(fleet),
        *of_times(fleet),
        *found,
        *_of_all(answering),
    ]


async def _of_source(source: Source, fleet: Fleet) -> tuple[Check, list[InstanceSpec]]:
    """Return the check of a source of instances, and its instances."""
    first: asyncio.Future[Sequence[Found]] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(source.run(lambda found: None if first.done() else first.set_result(found)))
    both: list[asyncio.Future[Any]] = [first, task]
    await asyncio.wait(both, timeout=_SOURCE_S, return_when=asyncio.FIRST_COMPLETED)
    told = first.result() if first.done() else ()
    trouble = "" if told else "no servers"
    if not first.done():
        trouble = reason_of(task.exception() or TimeoutError()) if task.done() else "no answer"
    await ended(task)
    advice = "correct its name, labels or address under `discovery`, or wait until its servers are there"
    check = checked(f"source {source.name}", not trouble, trouble or f"{len(told)} servers", advice)
    return check, [fleet.resolve_found(each, each.model, {}) for each in told]


def _of_server(seen: Seen) -> Iterator[Check]:
    """Yield checks of one server; stops at one that makes the rest pointless."""
    spec, facts = seen.spec, seen.facts

    def check(name: str, ok: bool, found: str, advice: str) -> Check:
        return checked(f"{name}{'' if name.endswith(' to') else ' of'} {spec.name}", ok, found, advice)

    if wrong := _wrong_address(seen):
        yield check("address", False, f"{spec.url}: {wrong[0]}", wrong[1])
        return
    said = f"/health answers {facts.health}"
    by_models = facts.health in UNKNOWN_PATH and bool(facts.entries)  # Ollama, LM Studio
    yield check("address", facts.health == 200 or by_models, f"{spec.url}: {said}", _step(said))
    if facts.health >= 500 and facts.models_status >= 500:
        return
    if facts.sample is not None and facts.sample.asleep:
        advice = f"wake it: curl -X POST {spec.url}/wake_up"
        yield check("sleep", False, "its engine sleeps and gets no requests", advice)
    if slots := _wrong_slots(seen):
        usual = "256, on H100 and larger ones 1024"
        advice = f"state the `--max-num-seqs` of its `vllm serve` (without it: {usual}) as max_num_seqs"
        yield check("slots", False, slots, advice)
    if facts.models_status in (401, 403):
        advice = _lowered(KEY_ADVICE)
        yield check("key", False, f"it refuses hetlb's key ({facts.models_status} at /v1/models)", advice)
        return
    yield check("key", True, "accepted" if facts.models_status == 200 else "none asked for", "")
    wanted = spec.model
    serves = bool(facts.entries) and (not wanted or wanted in facts.names)
    advice = f"correct the model's name, or start it with --served-model-name {wanted}"
    served = f"serves {', '.join(facts.names) or 'nothing'}" + ("" if serves else f", not {wanted}")
    if facts.models_status != 200:
        served = f"/v1/models: status {facts.models_status or 'none'}"
        advice = "look at its log; hetlb needs OpenAI's API (`vllm serve`)"
    yield check("model", serves, served, advice)
    if facts.coordinates:
        down = [name for name, up in facts.stages.items() if not up]
        found = f"down: {', '.join(down)}" if down else f"{len(facts.stages)} up"
        yield check("stages", not down, found, "start them (`hetlb stage`), or look at the coordinator's log")
    if (profile := seen.profile) is not None:
        wrong_profile = doubt_beside(profile, spec, facts)
        found = wrong_profile or next(iter(profile.warnings), "of this model, without warnings")
        advice = f"name the profile of its model and GPU, or measure it: hetlb profile --url {spec.url}"
        yield check("profile", not wrong_profile, found, advice)
    yield from _of_engine(seen, check)


def _of_engine(seen: Seen, check: Callable[[str, bool, str, str], Check]) -> Iterator[Check]:
    """Yield checks of the engine of a server that answers: its metrics, version, clock, and way to it."""
    facts = seen.facts
    advice = "without them hetlb goes by its own ledger alone: start it without --disable-log-stats"
    advice += " (llama.cpp: with --metrics); for an engine that has none state max_num_seqs"
    if facts.metrics_status in (401, 403):
        advice = "hetlb asks with the key of the instance: correct it, or let /metrics through without one"
    sample = facts.sample if facts.table is not None else None
    no_load = None if sample is None else without_load(sample)
    if no_load is not None:
        yield check("metrics", False, no_load[0], _lowered(no_load[1]))
    else:
        none = facts.metrics_status in UNKNOWN_PATH and seen.spec.slots_stated
        yield check("metrics", facts.table is not None or none, _metrics(facts), advice)
    tokens = None if sample is None else sample.capacity.kv_tokens_per_request
    least = min(LEAST_KV_TOKENS, facts.max_model_len or LEAST_KV_TOKENS)
    if (small := small_cache(tokens, least)) is not None:
        yield check("KV cache", False, small[0], _lowered(small[1]))
    found, step = (facts.title, "") if facts.old is None or facts.coordinates else facts.old
    yield check("version", not step, found, _lowered(step))
    skewed = abs(facts.skew_s) > MOST_SKEW_S
    skew = f"{facts.skew_s:+.0f} s" if skewed else "within seconds of this one"
    advice = "synchronise the clocks (NTP): logs, traces and certificates go by them"
    yield check("clock", not skewed, skew, advice)
    behind = facts.proxy or ("two answers came from two processes" if len(facts.began) > 1 else "")
    advice = "hetlb must reach each engine itself: a proxy or Service in front of several chooses again"
    if seen.several:
        behind = f"its name has {len(seen.several)} addresses: {', '.join(seen.several[:3])}"
        advice = "a connection goes to any of them: name each engine, or let `discovery.dns` find them"
    yield check("direct way to", not behind, behind or "no proxy in between", advice)


def _wrong_address(seen: Seen) -> tuple[str, str] | None:
    """Return the mistake of an address, and advice; None if an engine may be there."""
    facts = seen.facts
    if seen.own:
        return f"hetlb's own address ({seen.own})", "give the address of the engine: hetlb would ask itself"
    if facts.foreign:
        return f"{facts.foreign} answers there", "give the address that `vllm serve` prints when it starts"
    to = urlsplit(urljoin(f"{seen.spec.url}/", facts.moved))
    if facts.moved and to.netloc != urlsplit(seen.spec.url).netloc:
        found = f"{facts.health}, it redirects to {to.geturl()}"
        return found, f"write the engine's own address, or url: {to.scheme}://{to.netloc}"
    if facts.is_no_engine or facts.moved:
        return "an HTTP server, but no engine", "give the address that `vllm serve` prints, without a path"
    if not facts.trouble:
        return None
    if facts.other_url and "certificate" not in facts.trouble:
        return f"{facts.trouble}, but it answers at {facts.other_url}", f"write url: {facts.other_url}"
    advice = _step(facts.trouble)
    host = urlsplit(seen.spec.url).hostname or ""
    if "refused" in facts.trouble and (is_loopback(host) or host in ANY_HOSTS):
        advice += f"; in a container or on another machine {host} leads elsewhere"
    return facts.trouble, advice


def _lowered(step: str) -> str:
    """Return a sentence of `hetlb status` in the form of the end of a line."""
    return step[:1].lower() + step[1:].removesuffix(".")


def _step(reason: str) -> str:
    """Return what to do about a server that is down for a reason."""
    return _lowered(next_step(reason))


def _wrong_slots(seen: Seen) -> str:
    """Return the difference of the stated number of slots from the engine's, "" if nothing shows any."""
    sample, stated = seen.facts.sample, seen.spec.capacity.max_num_seqs
    if not seen.spec.slots_stated or stated is None or sample is None or sample.running is None:
        return ""
    if sample.running > stated:
        return f"{sample.running} requests run, max_num_seqs states {stated}"
    if sample.waiting and sample.running < stated and (sample.kv_usage or 0.0) < _FULL_KV_SHARE:
        return f"{sample.waiting} requests wait while {sample.running} run, max_num_seqs states {stated}"
    return ""


def _metrics(facts: EngineFacts) -> str:
    table = facts.table
    if table is not None:
        return "; ".join([f"names of {table.title}", *table.lacks]) if table.lacks else "there"
    if facts.metrics_status == 200:
        return "/metrics: no figures of an engine that is known"
    return f"/metrics: status {facts.metrics_status}" if facts.metrics_status else "/metrics: no answer"


def _of_all(servers: Sequence[Seen]) -> Iterator[Check]:
    """Yield checks across servers."""
    groups = {seen.spec.url: [seen.spec.name] for seen in servers}
    for seen in servers:
        if seen.facts.same_as:
            groups[seen.facts.same_as].append(seen.spec.name)
    twice = [f"{' and '.join(names)} are one process" for names in groups.values() if len(names) > 1]
    found = "; ".join(twice) or "each is a process of its own"
    advice = "leave one of them out: the load would be counted twice"
    yield checked("one address per server", not twice, found, advice)
    for model in dict.fromkeys(seen.spec.model for seen in servers):
        title = model or "the servers"
        pool = [seen for seen in servers if seen.spec.model == model]
        yield from _steps(title, pool)
        advice = "use --enable-prefix-caching everywhere or nowhere: what is cached is taken for faster"
        yield _alike(f"prefix caching of {title}", pool, _caching, advice)
        advice = "one name must be one model: correct the file, or give the other one a name of its own"
        yield _alike(f"weights of {title}", pool, partial(_root, model), advice)


def _steps(title: str, pool: Sequence[Seen]) -> Iterator[Check]:
    """Yield a check of a model's profiles by their steps of one sequence, if these differ too much."""
    steps = {seen.spec.name: one_step_s(seen.spec) for seen in pool if seen.profile is not None}
    fast, slow = (find(steps, key=steps.__getitem__, default="") for find in (min, max))
    if steps and steps[slow] > _OTHER_STEP_FACTOR * steps[fast]:
        told = ", ".join(f"{1e3 * steps[name]:.3g} ms of {name}" for name in (fast, slow))
        advice = f"no two GPUs differ so: measure again, hetlb profile --url of {fast} and of {slow}"
        yield checked(f"profiles of {title}", False, f"a step of one sequence takes {told}", advice)


def _alike(name: str, pool: Sequence[Seen], of: Callable[[Seen], str | None], advice: str) -> Check:
    """Check that all servers of a pool report the same value; servers without one are ignored."""
    said: dict[str, list[str]] = {}
    for seen in pool:
        value = of(seen)
        if value is not None:
            said.setdefault(value, []).append(seen.spec.name)
    several = "; ".join(f"{value}: {', '.join(names)}" for value, names in said.items())
    found = several if len(said) > 1 else next(iter(said), "unknown")
    return checked(name, len(said) < 2, found, advice)


def _caching(seen: Seen) -> str | None:
    sample = seen.facts.sample
    caches = None if sample is None else sample.capacity.enable_prefix_caching
    return None if caches is None else "on" if caches else "off"


def _root(model: str, seen: Seen) -> str | None:
    """Return the path or repository of the weights that a server serves under a model's name."""
    entry: Mapping[str, object] = next(
        (each for each in seen.facts.entries if not model or each["id"] == model), {}
    )
    root = entry.get("root")
    return root if isinstance(root, str) else None


def _print(found: Sequence[Check]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(each.name) for each in found)
    for each in found:
        console.print("ok   " if each.ok else "WRONG", style="green" if each.ok else "bold red", end=" ")
        advice = f" -> {each.advice}" if each.advice else ""
        console.print(visible(f"{each.name:<{width}}  {each.found}{advice}"))
    wrong = sum(not each.ok for each in found)
    console.print(f"\n{len(found)} checks, {wrong or 'none'} of them wrong")


# --- checks of `hetlb serve --check` ---


def check_filled_in(fleet: Fleet) -> None:
    """Raise `ConfigErrors`, one line per placeholder."""
    hosts = {each.name: urlsplit(each.url).hostname or "" for each in fleet.instances}
    found = [
        f"instance {name}: url: expected the host in place of {host}"
        for name, host in hosts.items()
        if host.endswith(_PLACEHOLDER)
    ]
    if found:
        raise ConfigErrors([ConfigError(fleet.where + each) for each in found])
