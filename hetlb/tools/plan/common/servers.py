"""Servers of a plan: their `vllm serve` commands, and the fleet file that `hetlb serve` reads.

Machine names stand for hosts: in a written plan, the host of machine `h100-0` is `h100-0.invalid`, which
no resolver knows and `hetlb serve --check` names.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from hetlb.balancer.config.profile_file import Profile
from hetlb.balancer.config.profile_writer import write_profile
from hetlb.balancer.core.instance import DEFAULT_KV_CACHE_TOKENS
from hetlb.balancer.core.types import Role
from hetlb.errors import ConfigError
from hetlb.output_files import write_text
from hetlb.tools.plan.common.capabilities import Form, Status, fact_of
from hetlb.tools.sim.engine_limits import EngineLimits

#: Ports of the first server of a machine, and of its side channel for KV transfers.
FIRST_PORT, _FIRST_SIDE_CHANNEL = 8000, 5600
#: Seconds that a prefill server keeps the KV cache of a request for its decode server (vLLM's default).
KV_LEASE_S = 30
_KV_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
#: Domain of placeholder hosts (RFC 2606: it never resolves).
PLACEHOLDER = ".invalid"
#: The file of a profile, or a function that makes the profile to write under its name.
ProfileOf: TypeAlias = Path | Callable[[], Profile]
#: Words for the heading of a fleet file.
FILL_IN = "Fill in the hosts (NAME.invalid): `hetlb serve --check` names missing ones."


def simulated_limits(profile: Profile) -> tuple[int, int]:
    """Return `max_num_batched_tokens` and `max_num_seqs` for the simulated engine of a profile."""
    tokens = profile.engine.kv_cache_tokens or DEFAULT_KV_CACHE_TOKENS
    limits = EngineLimits.from_capacity(replace(profile.usual_capacity, kv_cache_tokens=tokens))
    return limits.max_num_batched_tokens, limits.max_num_seqs


def host_of(machine: str) -> str:
    """Return the host of a machine, to be filled in."""
    return f"{machine}{PLACEHOLDER}"


@dataclass(frozen=True, slots=True)
class VllmServer:
    """One server: its model, degrees, the GPUs of each machine in the order of the stages, and its flags.

    `layers` are of its pipeline stages, if known. `engine` is the simulated profile: its limits are flags. A
    `max_model_len` of `auto` is the longest request that its KV cache holds: a plan for lengths does not
    limit what clients send.
    """

    name: str
    model: str
    form: Form
    gpus: Sequence[tuple[str, tuple[int, ...]]]
    utilization: float
    port: int = FIRST_PORT
    layers: Sequence[int] = ()
    replicas: int = 1
    max_model_len: int | str = "auto"
    engine: Profile | None = None
    profile: ProfileOf | None = None

    def _limits(self) -> dict[str, int | None]:
        """Return the flags of the simulated engine's limits, and of its experts."""
        if self.engine is None:
            return {}
        batched, seqs = simulated_limits(self.engine)
        return {
            "--max-num-seqs": seqs,
            "--max-num-batched-tokens": batched // self.form.pipeline_parallel_size,
        }

    @property
    def url(self) -> str:
        """Its address, with the host of its first machine."""
        return f"http://{host_of(self.gpus[0][0])}:{self.port}"

    def command(self) -> str:
        """Return the command for its (first) machine; a comment names the machine, and an untried form."""
        form, machines = self.form, dict(self.gpus)
        pp, connector = form.pipeline_parallel_size, form.connector
        ranks = self.replicas * form.data_parallel_size
        flags = {
            "--tensor-parallel-size": form.tensor_parallel_size,
            "--pipeline-parallel-size": pp if pp > 1 else None,
            "--data-parallel-size": ranks if ranks > 1 else None,
            "--gpu-memory-utilization": f"{self.utilization:g}",
            "--max-model-len": self.max_model_len,
            **self._limits(),
            "--port": self.port,
            "--kv-transfer-config": None if connector is None else _kv_transfer(connector, form.role),
            "--distributed-executor-backend": "ray" if len(machines) > 1 else None,
        }
        words = [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
        if self.engine is not None and self.engine.engine.enable_expert_parallel:
            words.append("--enable-expert-parallel")
        environment = {}
        if connector is not None:
            # A side channel per rank: the next server's begin behind this server's.
            side_channel = _FIRST_SIDE_CHANNEL + 16 * (self.port - FIRST_PORT)
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host_of(self.gpus[0][0])
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel)
        if len(set(self.layers)) > 1:
            environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, self.layers))
        if len(machines) == 1:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for _, own in self.gpus for gpu in own)
            where = next(iter(machines))
        else:
            where = "a Ray cluster of " + " and ".join(
                f"{machine} (GPUs {','.join(map(str, own))})" for machine, own in self.gpus
            )
        prefix = "".join(f"{key}={shlex.quote(value)} " for key, value in environment.items())
        fact = fact_of(form)
        tried = "" if fact.status is Status.RUN else f"; {fact.status}: {fact.source.partition(':')[0]}"
        return f"{prefix}{shlex.join(['vllm', 'serve', self.model, *words])}  # {self.name} on {where}{tried}"


def _kv_transfer(connector: str, role: Role) -> str:
    """Return the value of `--kv-transfer-config`."""
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": _KV_ROLE[role]}
    if role is not Role.DECODE:
        config["kv_connector_extra_config"] = {"kv_lease_duration": KV_LEASE_S}
    if role is not Role.PREFILL:
        config["kv_load_failure_policy"] = "recompute"
    return json.dumps(config, separators=(",", ":"))


def numbered(servers: Iterable[VllmServer]) -> list[VllmServer]:
    """Return the servers with distinct ports on their first machines."""
    ports: dict[str, Iterator[int]] = {}
    return [
        replace(server, port=next(ports.setdefault(server.gpus[0][0], count(FIRST_PORT))))
        for server in servers
    ]


def write_servers(
    path: Path, heading: str, servers: Sequence[VllmServer], policy: Mapping[str, Any] | None = None
) -> None:
    """Write a fleet file, and beside it the profiles not yet in a file. Raises `InputError`."""
    models: dict[str, dict[str, Any]] = {}
    profiles = dict.fromkeys(server.profile for server in servers)  # instances alike share one
    files = {each: _reference(path, each) for each in profiles if each is not None}
    for server in servers:
        entry = {"name": server.name, "url": server.url}
        if server.profile is not None:
            entry["profile"] = files[server.profile]
        model = models.setdefault(server.model, {"name": server.model, "instances": []})
        model["instances"].append(entry)
        if server.form.connector is not None:
            entry["role"] = str(server.form.role)
            model["kv_transfer"] = "nixl"
    write_fleet(path, heading, list(models.values()), policy)


def write_fleet(
    path: Path, heading: str, models: list[dict[str, Any]], policy: Mapping[str, Any] | None = None
) -> None:
    """Write a fleet file; without a policy the default one is in force. Raises `InputError`."""
    fleet = {"version": 1, **({} if policy is None else {"policy": policy}), "models": models}
    write_text(path, f"# {heading} {FILL_IN}\n{yaml.safe_dump(fleet, sort_keys=False)}")


def _reference(path: Path, profile: ProfileOf) -> str:
    """Return the path of a profile relative to the fleet file at `path`. Write it if it has no file yet."""
    if not isinstance(profile, Path):
        folder = path.parent / f"{path.stem}-profiles"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: expected a folder to write to: {error.strerror}") from error
        made = profile()
        profile = folder / f"{re.sub('[/ ]', '-', made.name)}.yaml"
        write_profile(profile, made)
    return os.path.relpath(profile.resolve(), path.parent.resolve())
