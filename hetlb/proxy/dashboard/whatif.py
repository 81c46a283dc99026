"""Replay of the last hour under another policy ("what if"): `hetlb simulate` in a process of its own.

The figures are those that the command prints for the same requests and the same fleet; the proxy's
event loop neither simulates nor waits for it; one runs at a time, none longer than `LIMIT_S`, and none
outlives the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hetlb.config.fleet import Fleet
from hetlb.config.profile import DecodeCoefficients, PrefillCoefficients, Profile
from hetlb.core.instance import Instance
from hetlb.core.policies.registry import POLICIES
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import AdminState, Health, Outcome
from hetlb.errors import InputError
from hetlb.proxy.telemetry.history import History, Row
from hetlb.workload.records import RequestResult, summarize

#: Requests that came in within this many seconds are replayed.
WINDOW_S = 3600.0
#: A simulation that takes longer is ended.
LIMIT_S = 600.0
_NICE = 19
_MESSAGE_CHARS = 500


class Source(Protocol):
    """Interface of the running service for a what-if."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def fleet(self) -> Fleet: ...
    @property
    def history(self) -> History: ...
    def now(self) -> float: ...


class WhatIf:
    """The one replay that runs, or the last one that ran."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._document: dict[str, Any] = {"state": "idle"}
        self._task: asyncio.Task[None] | None = None

    def document(self) -> dict[str, Any]:
        """`state` idle, running, done or failed, and what belongs to it."""
        return self._document

    def obstacles(self, models: Sequence[str]) -> dict[str, str]:
        """Reason for which no replay can be made for a model, in a sentence; "" where it can."""
        return {model: self._obstacle(model) for model in models}

    def start(self, model: str | None, policy: str) -> None:
        """Begin a replay of a model's requests, by default of the first one's. Raises `InputError`."""
        if self._task is not None and not self._task.done():
            raise InputError("a replay is running; wait for it or cancel it")
        if policy not in POLICIES:
            raise InputError(f"policy: expected one of {', '.join(POLICIES)}, got {policy[:80]!r}")
        models = list(dict.fromkeys(map(pool_of, self._source.scheduler.instances)))
        if model is None and models:
            model = models[0]
        if model not in models:
            raise InputError(f"model: expected one of {', '.join(models)}, got {str(model)[:80]!r}")
        if obstacle := self._obstacle(model):
            raise InputError(obstacle)
        replay = _Replay(self._source, model, policy)
        self._document = {"state": "running", **replay.about, "started_s": self._source.now()}
        self._task = asyncio.get_running_loop().create_task(self._run(replay))

    async def cancel(self) -> None:
        """End the replay that runs, if one does."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _obstacle(self, model: str) -> str:
        instances, _ = _simulated(self._source.scheduler, model)
        if not instances:
            return "no instance of the model is routable"
        unseen = [
            each.name
            for each in instances
            if each.name not in self._source.fleet.profiles and not each.profiled and not each.learnt
        ]
        if unseen:
            return (
                f"a simulation needs a profile or a learnt speed of every instance; {_listed(unseen)} "
                "without one until a longer answer has ended there"
            )
        unknown = [instance.name for instance in instances if instance.capacity.kv_cache_tokens is None]
        if unknown:
            return f"a simulation needs the KV capacity of every instance; {_listed(unknown)} without one"
        return ""

    async def _run(self, replay: _Replay) -> None:
        about = self._document
        try:
            result = await replay.run()
        except asyncio.CancelledError:
            self._document = {"state": "idle"}
        except (InputError, OSError) as error:
            self._document = {**about, "state": "failed", "message": str(error)}
        else:
            took_s = self._source.now() - about["started_s"]
            self._document = {**about, "state": "done", "took_s": took_s, **result}


class _Replay:
    """One replay: what it needs is taken at once, all the rest happens beside the event loop."""

    def __init__(self, source: Source, model: str, policy: str) -> None:
        scheduler, fleet = source.scheduler, source.fleet
        instances, left_out = _simulated(scheduler, model)
        self._rows = source.history.copy()
        self._full = source.history.full
        self._since = source.now() - WINDOW_S
        self._names = {model, *(name for instance in instances for name in instance.served or ())}
        self._fleet = _fleet_document(fleet, model, instances)
        self._profiles = {
            instance.name: _profile_document(fleet.profiles.get(instance.name) or _learnt(instance), instance)
            for instance in instances
        }
        self._policies = list(dict.fromkeys((scheduler.policy_name, policy)))
        self.about = {
            "model": model,
            "current": scheduler.policy_name,
            "policy": policy,
            "instances": [instance.name for instance in instances],
            "left_out": left_out,
            "learnt": [each.name for each in instances if each.name not in fleet.profiles],
        }

    async def run(self) -> dict[str, Any]:
        """`runs` as `hetlb simulate --json` gives them, `measured`, and what was replayed.

        Raises `InputError`, `OSError`.
        """
        with tempfile.TemporaryDirectory(prefix="hetlb-what-if-") as name:
            folder = Path(name)
            preparing = asyncio.ensure_future(asyncio.to_thread(self._prepare, folder))
            try:
                replayed = await asyncio.shield(preparing)
            except asyncio.CancelledError:
                # A thread cannot be stopped, and the folder must not go while it writes there.
                await asyncio.wait([preparing])
                raise
            return {**replayed, "runs": await self._simulate(folder)}

    def _prepare(self, folder: Path) -> dict[str, Any]:
        """Write the fleet and the trace; tell what was replayed and what it measured."""
        rows = list(self._rows)
        whole_window = not self._full or rows[0].ended_at < self._since
        mine = [row for row in rows if row.arrived_at >= self._since and row.model in self._names]
        done = [row for row in mine if row.outcome == Outcome.OK and row.output_tokens > 0]
        if not done:
            raise InputError("no answer of this model ended in the last hour: there is nothing to replay")
        # JSON is YAML, and exact about numbers.
        (folder / "fleet.yaml").write_bytes(msgspec.json.encode(self._fleet))
        for name, profile in self._profiles.items():
            (folder / _profile_name(name)).write_bytes(msgspec.json.encode(profile))
        done.sort(key=lambda row: row.arrived_at)
        start = done[0].arrived_at
        with (folder / "trace.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("arrival_s", "input_tokens", "output_tokens"))
            for row in done:
                output_tokens = max(1, row.output_tokens // row.sequences)
                line = (row.arrived_at - start, row.prompt_tokens_per_sequence, output_tokens)
                writer.writerows([line] * row.sequences)
        return {
            "requests": len(done),
            "not_replayed": len(mine) - len(done),
            "whole_window": whole_window,
            "measured": summarize([_record(row, start) for row in done]),
        }

    async def _simulate(self, folder: Path) -> list[dict[str, Any]]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hetlb", "simulate", "--json",
            "--config", str(folder / "fleet.yaml"), "--trace", str(folder / "trace.csv"),
            "--request-rate", "trace", "--policy", ",".join(self._policies),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            with contextlib.suppress(OSError):
                # Requests go first.
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            async with asyncio.timeout(LIMIT_S):
                out, errors = await process.communicate()
        except TimeoutError:
            raise InputError(f"the simulation was ended after {LIMIT_S:g} s: too many requests") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            words = errors.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
            raise InputError(f"hetlb simulate failed: {words[-1][:_MESSAGE_CHARS]}")
        runs: list[dict[str, Any]] = msgspec.json.decode(out)["runs"]
        return runs


def pool_of(instance: Instance) -> str:
    """The name under which the fleet page lists an instance."""
    return instance.spec.model or (instance.served or ("",))[0]


def _simulated(scheduler: Scheduler, model: str) -> tuple[list[Instance], dict[str, str]]:
    """The instances of a model that take requests now, and why each other one is left out."""
    pool = [instance for instance in scheduler.instances if pool_of(instance) == model]
    left_out = {
        instance.name: (
            instance.admin.value if instance.admin is not AdminState.READY else Health.EJECTED.value
        )
        for instance in pool
        if not instance.routable
    }
    return [instance for instance in pool if instance.routable], left_out


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{rest} {'is' if len(names) == 1 else 'are'}"


def _fleet_document(fleet: Fleet, model: str, instances: Sequence[Instance]) -> Mapping[str, Any]:
    params = fleet.policy_params
    return {
        "version": 1,
        "policy": {"theta": params.theta, "combine": params.combine, "decay_s": params.decay_s},
        "models": [
            {
                "name": model,
                "instances": [
                    {
                        "name": name,
                        "profile": _profile_name(instance.name),
                        "weight": instance.spec.weight / instance.engines,
                    }
                    for instance in instances
                    for name in _engine_names(instance)
                ],
            }
        ],
    }


def _engine_names(instance: Instance) -> list[str]:
    """A data-parallel server is simulated as so many instances of one engine."""
    if instance.engines == 1:
        return [instance.name]
    return [f"{instance.name[:120]}:{number}" for number in range(instance.engines)]


def _profile_name(instance: str) -> str:
    return f"{instance}.profile.yaml"


def _learnt(instance: Instance) -> Profile:
    """A profile of what the answers of an instance have shown of its speed."""
    model = instance.latency
    return Profile(
        version=1,
        name=instance.name,
        prefill=PrefillCoefficients(k1=model.k1, k2=model.k2, k3=model.k3, k4=model.k4),
        decode=DecodeCoefficients(k5=model.k5, k6=model.k6, k7=model.k7, k8=model.k8),
    )


def _profile_document(profile: Profile, instance: Instance) -> Any:
    """The profile with what one engine said it can hold, without what only documents it."""
    replace, capacity = msgspec.structs.replace, instance.capacity
    engine = replace(
        profile.engine,
        kv_cache_tokens=instance.kv_cache_tokens // instance.engines,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=capacity.max_model_len,
    )
    return msgspec.to_builtins(replace(profile, engine=engine, fit=None, source=None, grid=None))


def _record(row: Row, start: float) -> RequestResult:
    return RequestResult(
        scheduled_s=row.arrived_at - start,
        prompt_tokens=row.prompt_tokens_total,
        output_tokens=row.output_tokens,
        first_token_s=None if row.first_byte_at is None else row.first_byte_at - start,
        last_token_s=row.ended_at - start,
        instance=row.instance,
        ok=True,
    )
