"""Doubts about the profiles of a fleet: their own warnings, another model, another GPU."""

from __future__ import annotations

import re
import sys
from typing import Final

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.profile_file import Profile, profiles_of
from hetlb.balancer.core.types import InstanceSpec
from hetlb.cli.engine_facts import EngineFacts
from hetlb.errors import visible

#: Least factor between the KV tokens of a profile and its server that means another GPU or degree.
_OTHER_KV_FACTOR: Final = 2
#: Seconds of the shortest and the longest decode step of one sequence that an engine may have.
_STEPS_S: Final = (2e-4, 2.0)
_QUANTISED: Final = re.compile(r"awq|gptq|fp8|fp4|int8|int4|w\da\d+|bnb|gguf|exl2")
#: Factors on the fastest and the slowest token of a profile between which a server's mean lies. Iterations
#: that read prompts, too, are slower than any decode step.
_TOKEN_FACTORS: Final = (0.65, 10.0)


def all_is_well(fleet: Fleet) -> int:
    """Return the exit status of `--check` if nothing is wrong; doubts of profiles are printed."""
    doubts = profile_doubts(fleet)
    for line in doubts:
        print(visible(f"warning: {fleet.where}{line}"), file=sys.stderr)
    number = len(fleet.instances)
    found = f"{number} instance{'' if number == 1 else 's'}"
    found += f", {len(doubts)} warning{'' if len(doubts) == 1 else 's'}" if doubts else ""
    if fleet.path is None:
        print(visible(f"valid: {found} (not contacted)"))
    else:
        print(visible(f"{fleet.path} is valid: {found} (not contacted; see hetlb doctor)"))
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
            lines.append(f"{model.name}: expected profiles of one model, got {of}")
    return lines


def one_step_s(spec: InstanceSpec) -> float:
    """Return the seconds of a decode step of one sequence by the profile of an instance."""
    return _STEPS_S[0] if spec.latency is None else spec.latency.step_s(1.0, 1.0)


def doubt_beside(profile: Profile, spec: InstanceSpec, facts: EngineFacts) -> str:
    """Return why a profile may be wrong for the server of an instance, "" if nothing shows that."""
    # Names of models as vLLM was started with them; paths have no meaning.
    roots = [str(entry.get("root") or "") for entry in facts.entries]
    named = [root for root in roots if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", root)]
    if named and (own := other_model(profile, named)):
        return f"it is of the model {own}, the server has {short_name(named[0])}"
    if own := other_gpu(profile, spec.gpu):
        return f"it is of the GPU {own}, the instance states {spec.gpu}"
    step_s = one_step_s(spec)
    if not _STEPS_S[0] <= step_s <= _STEPS_S[1]:
        return f"a step of one sequence takes {1e3 * step_s:.3g} ms by it: its times are in seconds"
    said = profile.capacity.kv_cache_tokens
    has = None if facts.sample is None else facts.sample.capacity.kv_cache_tokens
    if said and has and max(said, has) > _OTHER_KV_FACTOR * min(said, has):
        return f"it is of a server with {said:,} KV tokens, this one has {has:,}"
    if (own_s := facts.token_s) is not None and spec.latency is not None:
        each = profile.engine.tokens_per_step or 1.0
        full = spec.latency.step_s(spec.capacity.max_num_seqs or 1.0, spec.capacity.kv_cache_tokens or 1.0)
        fastest_s, slowest_s = step_s / each, max(step_s, full) / each
        if not _TOKEN_FACTORS[0] * fastest_s <= own_s <= _TOKEN_FACTORS[1] * slowest_s:
            by_it = f"{1e3 * fastest_s:.3g} to {1e3 * slowest_s:.3g} ms by it"
            own = f"{1e3 * own_s:.3g} ms by the server's own count"
            return f"a token takes {by_it}, {own}: another GPU or degree"
    return "; ".join(line for line in profile.warnings if not line.startswith("unmeasured"))


def other_model(profile: Profile, names: list[str]) -> str:
    """Return the profile's model if it is none of these (owners aside), else "".

    One name may begin the other (`-instruct`), unless a quantisation follows.
    """
    own = "" if profile.model is None else short_name(profile.model.name)
    known = [short_name(name) for name in names if own]
    alike = [name for name in known if name.startswith(own) or own.startswith(name)]
    return "" if not own or any(_quantised(name) == _quantised(own) for name in alike) else own


def _quantised(name: str) -> set[str]:
    """Return the words of a model's name that say how its weights are quantised."""
    return set(_QUANTISED.findall(name))


def short_name(model: str) -> str:
    """Return the name of a model without its owner, in lower case."""
    return model.lower().rpartition("/")[2]


def other_gpu(profile: Profile, stated: str | None) -> str:
    """Return the profile's GPU if an instance states another one, else ""."""
    gpu = profile.hardware.gpu if profile.hardware is not None else None
    own, other = _chip(gpu), _chip(stated)
    return "" if not own or not other or own.endswith(other) or other.endswith(own) else gpu or ""


def _chip(gpu: str | None) -> str:
    """Return letters and number that name a GPU: `h100` of `NVIDIA H100 80GB` and `h100_sxm`, else ""."""
    found = re.search(r"(?<![a-z])[a-z]*+\d++", (gpu or "").lower())
    return "" if found is None else found[0]
