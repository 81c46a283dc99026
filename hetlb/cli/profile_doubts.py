"""Doubts about the profiles of a fleet: their own warnings, another model, another GPU."""

from __future__ import annotations

import re
import sys

from hetlb.balancer.config.fleet import Fleet
from hetlb.options.profiles.profile_file import Profile, profiles_of


def all_is_well(fleet: Fleet) -> int:
    """Return the exit status of `--check` where nothing is wrong; doubts of profiles are printed."""
    doubts = profile_doubts(fleet)
    for line in doubts:
        print(f"warning: {fleet.where}{line}", file=sys.stderr)
    verdict = f"{len(doubts)} warnings" if doubts else "all is well"
    print(f"{fleet.path or 'the addresses'}: {len(fleet.instances)} instances, {verdict}")
    return 0


def profile_doubts(fleet: Fleet) -> list[str]:
    """Return why profiles of the fleet may be wrong, a line each."""
    lines, known = [], profiles_of(fleet)
    for model in fleet.file.models:
        specs = [spec for spec in fleet.instances if spec.model == model.name and spec.name in known]
        profiles = {spec.name: known[spec.name] for spec in specs}
        lines += [f"{name}: profile: {why}" for name, profile in profiles.items() for why in profile.warnings]
        for spec in specs:
            profile = profiles[spec.name]
            if "/" in model.name and (own := other_model(profile, [model.name])):
                lines.append(f"{spec.name}: profile: it is of the model {own}")
            if own := other_gpu(profile, spec.gpu):
                lines.append(f"{spec.name}: profile: it is of the GPU {own}, the instance states {spec.gpu}")
        served = {name: profile.model.name for name, profile in profiles.items() if profile.model}
        if len(set(served.values())) > 1:
            of = ", ".join(f"{name} of {what}" for name, what in served.items())
            lines.append(f"{model.name}: profiles: expected those of one model, got {of}")
    return lines


def other_model(profile: Profile, names: list[str]) -> str:
    """Return the profile's model where it is none of these (owners aside), else ""."""
    own = "" if profile.model is None else short_name(profile.model.name)
    known = [short_name(name) for name in names]
    return "" if not own or any(a.startswith(own) or own.startswith(a) for a in known) else own


def short_name(model: str) -> str:
    """Return the name of a model without its owner, in lower case."""
    return model.lower().rpartition("/")[2]


def other_gpu(profile: Profile, stated: str | None) -> str:
    """Return the profile's GPU where an instance states another one, else ""."""
    gpu = profile.hardware.gpu if profile.hardware is not None else None
    own, other = _chip(gpu), _chip(stated)
    return "" if not own or not other or own.endswith(other) or other.endswith(own) else gpu or ""


def _chip(gpu: str | None) -> str:
    """Return letters and number that name a GPU: `h100` of `NVIDIA H100 80GB` and `h100_sxm`, else ""."""
    found = re.search(r"[a-z]*\d+", (gpu or "").lower())
    return "" if found is None else found[0]
