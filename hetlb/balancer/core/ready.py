"""Filter of the scheduler: which instances of a model can take a request now, and why the others cannot."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import CanarySide, Candidate, Health, Request, Role


def tokens_of(request: Request) -> int:
    """Return tokens of its longest sequence, with the output that the client may ask for."""
    output = 0 if not request.generates else (1 if request.max_tokens is None else request.max_tokens)
    return request.longest_prompt_tokens + output


@mypyc_attr(acyclic=True)
class Choices:
    """Instances that may get a request now, in file order, and why each other one of its model may not.

    `restraints` (see `Evidence.restraint`) by name; None if no instance is throttled.
    """

    __slots__ = ("excluded", "instances", "restraints")

    def __init__(
        self,
        instances: list[Instance],
        excluded: dict[str, str],
        restraints: dict[str, str] | None = None,
    ) -> None:
        self.instances = instances
        self.excluded = excluded
        self.restraints = restraints

    def without(self, reasons: Mapping[str, str]) -> Choices:
        """Return the choices but for the instances that are named, with the reasons against them."""
        if not reasons:
            return self
        kept = [each for each in self.instances if each.name not in reasons]
        restraints = self.restraints
        if restraints is not None:
            restraints = {name: why for name, why in restraints.items() if name not in reasons}
        return Choices(kept, {**self.excluded, **reasons}, restraints)


class ReadyInstances:
    """Instances of one model that take any but very long requests, and reasons against the others."""

    def __init__(self, instances: list[Instance], now: float) -> None:
        self.instances = instances
        routable = [each for each in instances if not each.why_not]
        #: Instances that take requests, in any role.
        self.up = [each for each in routable if each.evidence.health.state is Health.UP] or routable
        #: Reasons of instances without whole requests: another instance has the role for these.
        self.roles = _kept_by_role(routable)
        #: Choices of a request that may go to all of `able`.
        self.everyone = self._fitting(0, None, None, False)
        self.able = self.everyone.instances
        #: Throttled instances, and whether there are any.
        self.active = [each for each in self.able if each.evidence.active(now)]
        self.throttled = bool(self.active)
        #: Largest prompt and output that fit every instance. The same, but none while an instance is
        #: throttled: up to it a request may go to all of `able`.
        self.fitting_tokens = min([_longest(each) for each in self.able], default=math.inf)
        self.longest_tokens = -1.0 if self.throttled else self.fitting_tokens
        #: Lengths that instances can take, ascending. The index of a length is the class of its instances.
        self.limits = tuple(sorted({_longest(instance) for instance in instances}))
        #: A prompt longer than this, with one token of output if there is any, fits no instance.
        self.longest_prompt = max((_longest(instance) for instance in instances), default=math.inf)

    @property
    def idle(self) -> bool:
        """True if no instance has a request that takes a slot."""
        for each in self.instances:  # noqa: SIM110 (compiled, a loop is faster than a generator)
            if each.in_flight > each.slotless:
                return False
        return True

    def fit_of(self, request: Request) -> int:
        """Return the smallest class of instances that can take a request; the largest if none can."""
        limits = self.limits
        return 0 if len(limits) < 2 else min(bisect_left(limits, tokens_of(request)), len(limits) - 1)

    def class_of(self, instance: Instance) -> int:
        """Return the class of an instance."""
        return 0 if len(self.limits) < 2 else bisect_left(self.limits, _longest(instance))

    def choices(
        self,
        request: Request,
        tried: Sequence[str] | None,
        now: float,
        *,
        holds_back: bool,
        side: CanarySide | None = None,
    ) -> Choices:
        """Return the choices of a request now.

        `tried`: instances that the request was at before; it is no trial then. `holds_back`: the policy heeds
        restraints itself. Otherwise instances with a restraint are left out, unless all have one. `side`
        counts only while its instances can serve the request and a canary is not restrained.
        """
        tokens = tokens_of(request)
        by_ids = request.generated > 0 and any(
            not each.why_not and gives_ids(each) for each in self.instances
        )
        anywhere = tried is None and request.places.subset is None and not by_ids and side is None
        if anywhere and tokens <= self.fitting_tokens:
            found = Choices(self.able, self.everyone.excluded)
        else:
            found = self._fitting(tokens, request.places.subset, tried, by_ids, side)
            if side is not None and not any(tokens <= _longest(each) for each in found.instances):
                found, side = self._fitting(tokens, request.places.subset, tried, by_ids), None
        chosen = found.instances
        active = [each for each in self.active if each.evidence.active(now)]
        if active and chosen is not self.able:
            names = {each.name for each in chosen}
            active = [each for each in active if each.name in names]
        if not active:
            return found
        doubt = len(active) < len(chosen) or not all(each.evidence.held(now) for each in active)
        found.restraints = restraints = {}
        for each in active:
            if why := each.evidence.restraint(each.sequences, each.max_num_seqs, now, doubt=doubt):
                restraints[each.name] = why
        if side is not None and side.inside and len(restraints) == len(chosen):
            return self.choices(request, tried, now, holds_back=holds_back)
        if tried is not None or not request.sequences:
            reasons = {each.name: each.evidence.why(now) for each in active}
            restrained = {name: why for name, why in reasons.items() if why}
            if restrained and len(restrained) < len(chosen):
                found = found.without(restrained)
                chosen, restraints = found.instances, found.restraints or {}
        elif doubt:
            due = [each for each in active if each.evidence.due(now)]
            if due and len(due) < len(chosen):
                waits = f"{due[0].name} gets a trial"
                return found.without({each.name: waits for each in chosen if each is not due[0]})
        if holds_back or len(restraints) == len(chosen):
            return found
        return found.without(restraints)

    def _fitting(
        self,
        tokens: int,
        subset: Sequence[str] | None,
        tried: Sequence[str] | None,
        by_ids: bool,
        side: CanarySide | None = None,
    ) -> Choices:
        """Return the instances that may have a request of `tokens` and are large enough.

        An instance with another role is taken if there is no other. With `by_ids`, the request goes on by
        token ids and only instances that take these are left.
        """
        excluded: dict[str, str] = {}
        able: list[Instance] = []
        kept: list[Instance] = []
        for instance in self.instances:
            if subset is not None and instance.name not in subset:
                reason = "not in the subset of the gateway"
            elif side is not None and (instance.name == side.instance) is not side.inside:
                reason = "not the canary" if side.inside else "the canary, which gets its share alone"
            else:
                reason = instance.why_not
                if not reason and tried is not None and instance.name in tried:
                    reason = "tried before"
                if not reason and by_ids and not gives_ids(instance):
                    reason = "it takes no token ids"
                if not reason and self.roles:
                    reason = self.roles.get(instance.name, "")
                    if reason:
                        kept.append(instance)
            if reason:
                excluded[instance.name] = reason
            else:
                able.append(instance)
        if not able:
            able = kept
            for instance in kept:
                del excluded[instance.name]
        fitting = [instance for instance in able if tokens <= _longest(instance)]
        if not fitting and able:
            # vLLM serves a prompt that fits and cuts the answer at its context length; and a length that
            # was only estimated must not shut out everyone. The largest engine has the last word.
            longest = max(instance.longest_request_tokens or 0 for instance in able)
            fitting = [i for i in able if (i.longest_request_tokens or 0) == longest]
        up = [instance for instance in fitting if instance.evidence.health.state is Health.UP]
        chosen = up or fitting
        if len(chosen) < len(able):
            for instance in able:
                if instance not in fitting:
                    excluded[instance.name] = "too small for prompt and max_tokens"
                elif instance not in chosen:
                    excluded[instance.name] = f"suspect: {instance.evidence.health.reason}"
        return Choices(chosen, excluded)


def _longest(instance: Instance) -> float:
    limit = instance.longest_request_tokens
    return math.inf if limit is None else limit


def _kept_by_role(routable: Sequence[Instance]) -> dict[str, str]:
    """Return reasons against instances by their roles, if the roles differ.

    Whole requests go to instances of both phases if there are some, else to `decode` instances.
    """
    roles = {each.spec.role for each in routable}
    if roles <= {Role.BOTH} or len(roles) == 1:
        return {}
    takes = Role.BOTH if Role.BOTH in roles else Role.DECODE
    return {each.name: f"its role is {each.spec.role}" for each in routable if each.spec.role is not takes}


def least_tokens(request: Request) -> int:
    """Return the tokens of its longest sequence that an instance must hold: one of output, if any."""
    return request.longest_prompt_tokens + request.generates


def with_excluded(
    candidates: Sequence[Candidate], instances: Sequence[Instance], excluded: Mapping[str, str]
) -> list[Candidate]:
    """Return the scored candidates and, in their places, the filtered out ones."""
    scored = iter(candidates)
    return [
        Candidate(instance.name, math.inf, eligible=False, reason=excluded[instance.name])
        if instance.name in excluded
        else next(scored)
        for instance in instances
    ]


def gives_ids(instance: Instance) -> bool:
    """Return True if an engine takes token ids for a prompt and gives the answer's."""
    return instance.engine == "vllm"
