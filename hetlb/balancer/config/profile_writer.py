"""Latency profiles as files: their text, and a server's measured host time in place of an assumed one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hetlb.balancer.config.profile_file import HostTime, Profile, load_profile, with_latency
from hetlb.balancer.core.latency import LatencyModel
from hetlb.errors import ProfileError
from hetlb.files import read_text
from hetlb.inputs.yaml_file import yaml_text
from hetlb.output_files import write_text


def profile_text(profile: Profile) -> str:
    """Return the profile as YAML: one line per row of a grid, 6 digits, empty values left out."""
    return yaml_text(_written(msgspec.to_builtins(profile)))


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile. Raises `ProfileError`."""
    write_text(path, profile_text(profile), ProfileError)


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _written(inner) for key, inner in value.items() if inner is not None}
        return {key: inner for key, inner in kept.items() if inner not in ({}, [])}
    if isinstance(value, list):
        return [_written(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_host(path: Path, found: LatencyModel) -> tuple[LatencyModel, str]:
    """Write a measured host time into a profile that assumes one.

    Return the model as the file has it then, and "", or `found` and why the file stays as it is.
    """
    try:
        text = read_text(path, ProfileError)
        profile = load_profile(path)
        if not profile.host_assumed:
            return found, "the file has a measured one by now"
        if not os.access(path, os.W_OK):
            return found, "the file may not be written"
        write_text(path, _edited(text, profile, with_host(profile, found)), ProfileError)
        return load_profile(path).latency, ""
    except ProfileError as error:
        return found, str(error)


def _edited(text: str, old: Profile, new: Profile) -> str:
    """Return the text of a profile with the sections that differ replaced, the others as they are."""
    sections, before = _written(msgspec.to_builtins(new)), _written(msgspec.to_builtins(old))
    changed = {key: value for key, value in sections.items() if value != before.get(key)}
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "a profile was read from this text"
    ends = [key.start_mark.index for key, _ in root.value[1:]] + [len(text)]
    for (key, _), end in reversed(list(zip(root.value, ends, strict=True))):
        if key.value in changed:
            begin = key.start_mark.index
            own = text[begin:end].splitlines(keepends=True)
            # Comments behind a section belong to the next one, or to the file.
            while own and own[-1].lstrip()[:1] in ("#", ""):
                end -= len(own.pop())
            text = text[:begin] + yaml_text({key.value: changed.pop(key.value)}) + text[end:]
    return text.rstrip("\n") + "\n" + (yaml_text(changed) if changed else "")


def with_host(profile: Profile, found: LatencyModel) -> Profile:
    """Return a profile with the host time of `found`, its own model as `HostProbe` has corrected it."""
    host = HostTime(iteration_s=found.host_s, sequence_s=found.host_sequence_s, request_s=found.request_s)
    note = (
        f"host.sequence_s: {1e3 * host.sequence_s:.3g} ms, added by a server to an iteration of one "
        "sequence; more sequences would show it"
    )
    assumed = [line for line in profile.assumed if not line.startswith("host")]
    if found.better_decode != profile.latency.better_decode or found.k8 != profile.latency.k8:
        note = (
            "decode: every step is shorter than its point by as much as a server's step of one sequence was"
        )
        # Times of a profile are per step, times of a model per token.
        if (profile.engine.tokens_per_step or 1.0) == 1.0:
            profile = with_latency(profile, found)
    return msgspec.structs.replace(profile, host=host, assumed=(*assumed, note))
