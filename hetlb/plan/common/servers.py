"""Servers of a plan: their `vllm serve` commands, and the fleet file that `hetlb serve` reads.

Machine names stand for hosts: in what a plan writes, the host of machine `h100-0` is `h100-0.invalid`, which
no resolver knows and `hetlb serve --check` names.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from hetlb.config.profile_file import Profile
from hetlb.errors import ConfigError
from hetlb.files import write_text
from hetlb.plan.common.capabilities import Form, Status, fact_of
from hetlb.profiler.sources import write_profile

#: Port of the first server of a machine.
FIRST_PORT = 8000
#: Domain of hosts that have to be filled in (RFC 2606: it never resolves).
PLACEHOLDER = ".invalid"
#: The file of a profile, or what makes one: a file name without suffix, and the profile.
ProfileOf: TypeAlias = Path | Callable[[], tuple[str, Profile]]
#: Words for the heading of a fleet file.
FILL_IN = "Fill in the hosts (NAME.invalid): `hetlb serve --check` names those that are missing."


def host_of(machine: str) -> str:
    """The host of a machine, to be filled in."""
    return f"{machine}{PLACEHOLDER}"


@dataclass(frozen=True, slots=True)
class VllmServer:
    """One server: its model, degrees, the GPUs of each machine in the order of the stages, and its flags.

    `layers` are of its pipeline stages, where they are known; None values are left to vLLM. A `max_model_len`
    of `auto` is the longest that its KV cache holds: a plan for lengths is no limit on what clients send.
    """

    name: str
    model: str
    form: Form
    gpus: Sequence[tuple[str, tuple[int, ...]]]
    port: int
    utilization: float
    layers: Sequence[int] = ()
    replicas: int = 1
    max_model_len: int | str = "auto"
    max_num_seqs: int | None = None
    kv_transfer: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    profile: ProfileOf | None = None

    @property
    def url(self) -> str:
        """Its address, with the host of its first machine."""
        return f"http://{host_of(self.gpus[0][0])}:{self.port}"

    def command(self) -> str:
        """The command for its (first) machine; a comment says where it runs, and if that was never tried."""
        form, machines = self.form, dict(self.gpus)
        words = ["vllm", "serve", self.model, "--tensor-parallel-size", str(form.tensor_parallel_size)]
        flags: list[tuple[str, object]] = [
            (
                "--pipeline-parallel-size",
                form.pipeline_parallel_size if form.pipeline_parallel_size > 1 else None,
            ),
            ("--data-parallel-size", self.replicas if self.replicas > 1 else None),
            ("--gpu-memory-utilization", f"{self.utilization:g}"),
            ("--max-model-len", self.max_model_len),
            ("--max-num-seqs", self.max_num_seqs),
            ("--port", self.port),
        ]
        if self.kv_transfer is not None:
            flags.append(("--kv-transfer-config", json.dumps(self.kv_transfer, separators=(",", ":"))))
        if len(machines) > 1:
            flags.append(("--distributed-executor-backend", "ray"))
        words += [str(word) for flag, value in flags if value is not None for word in (flag, value)]
        environment = dict(self.environment)
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
        tried = "" if fact_of(form).status is Status.STARTED else f"; {self._untried}"
        return f"{prefix}{shlex.join(words)}  # {self.name} on {where}{tried}"

    @property
    def _untried(self) -> str:
        return f"{fact_of(self.form).status}: {fact_of(self.form).source.partition(':')[0]}"


def write_servers(
    path: Path, heading: str, servers: Sequence[VllmServer], policy: Mapping[str, Any] | None = None
) -> None:
    """Write the fleet file of these servers, and beside it the profiles that are no file yet.

    Raises `InputError` naming what cannot be written.
    """
    models: dict[str, dict[str, Any]] = {}
    for server in servers:
        entry = {"name": server.name, "url": server.url}
        if server.profile is not None:
            entry["profile"] = _reference(path, server.profile)
        model = models.setdefault(server.model, {"name": server.model, "instances": []})
        model["instances"].append(entry)
        if server.kv_transfer is not None:
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
    """The path of a profile relative to the fleet file at `path`; writes one that is no file yet."""
    if not isinstance(profile, Path):
        folder = path.parent / f"{path.stem}-profiles"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: expected a folder to write to: {error.strerror}") from error
        name, made = profile()
        profile = folder / f"{name}.yaml"
        write_profile(profile, made)
    return os.path.relpath(profile.resolve(), path.parent.resolve())
