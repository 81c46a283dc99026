"""Choice of a policy for a request that may be split: one instance for all of it, or a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hetlb.balancer.core.instance import MAX_WORKLOAD_S, Instance
from hetlb.balancer.core.policies.base import Choice, Policy
from hetlb.balancer.core.policies.hetlb import Hetlb
from hetlb.balancer.core.policies.sight import SchedulingContext, Sight, foreseen
from hetlb.balancer.core.types import Candidate, Role, pair_name
from hetlb.options.split.transfers import TransferTimes

#: Prompt tokens beyond its prefix cache that a `decode` instance computes itself if the cache holds half of
#: the prompt. Short prompts alone would make it do both as soon as prefill is busy.
OWN_PREFILL_TOKENS: Final = 256
#: Steps until the first token of a request after its KV cache came: half of the running one, and its own.
JOINING_STEPS: Final = 1.5


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """Instances for the prefill and for the decode of a request that may be split, by index.

    Both indexes are equal if one instance gets the whole request, and -1 if the request is not to be split.
    Works are in seconds. `forecast` is the prefill leg's. `decode_first_s` and `decode_end_s` count from the
    dispatch of the decode leg to its first token and its end, without transfer. `candidates` are all
    instances, and pairs behind them.
    """

    prefill: int
    decode: int
    work_s: float
    candidates: Callable[[], list[Candidate]]
    forecast: Sight | None = None
    decode_work_s: float = 0.0
    decode_first_s: float = 0.0
    decode_end_s: float = 0.0


def unsplit_choice(candidates: Callable[[], list[Candidate]]) -> SplitChoice:
    """Return the choice not to split a request."""
    return SplitChoice(-1, -1, 0.0, candidates)


def whole_choice(index: int, choice: Choice) -> SplitChoice:
    """Return one instance for all of a request."""
    return SplitChoice(index, index, choice.work_s, choice.candidates, choice.forecast)


def join_s(instance: Instance, prompt_tokens: float) -> float:
    """Return seconds until the first token of a sequence that was prefilled elsewhere."""
    load = instance.load
    context = instance.prompt_tokens * load.context_share
    # Decode legs before their first token count one token each: no prompts.
    if instance.pending_prompt_tokens <= instance.sequences:
        return JOINING_STEPS * (load.next_step_s + load.next_token_s * (context + prompt_tokens))
    pending = instance.pending_prompt_tokens / instance.engines
    running_s = 0.5 * (load.step_s + load.token_s * context)
    return running_s + load.latency.first_token_s(
        prompt_tokens, prompt_tokens - 1.0, pending, load.batch, context, load.budget
    )


def choose_split(
    policy: Policy,
    ctx: SchedulingContext,
    instances: Sequence[Instance],
    transfers: TransferTimes,
    mixed: bool,
) -> SplitChoice | None:
    """Return instances for a request that may be split, None for none now; `mixed`: all have role `both`."""
    if isinstance(policy, Hetlb):
        from hetlb.options.split.pairs import choose_pair

        return choose_pair(ctx, policy.evaluate(ctx, instances, mixed), transfers, mixed)
    whole = [i for i, instance in enumerate(instances) if instance.spec.role is Role.BOTH]
    if whole:
        found = policy.choose(ctx, [instances[i] for i in whole])
        return None if found is None else whole_choice(whole[found.index], found)
    chosen: list[int] = []
    made: list[Callable[[], list[Candidate]]] = []
    for role in (Role.PREFILL, Role.DECODE):
        able = [i for i, instance in enumerate(instances) if instance.spec.role is role]
        found = policy.choose(ctx, [instances[i] for i in able]) if able else None
        if found is None:
            return None
        chosen.append(able[found.index])
        made.append(found.candidates)
    source, target = instances[chosen[0]], instances[chosen[1]]
    if not transfers.checks.usable(source, target, ctx.now):
        return unsplit_choice(lambda: [*made[0](), *made[1]()])
    name, prompt = pair_name(source.name, target.name), float(ctx.request.prompt_tokens)
    there, decode_first_s = foreseen(ctx, target), join_s(target, prompt)
    return SplitChoice(
        chosen[0],
        chosen[1],
        min(source.latency.prefill_s(prompt), MAX_WORKLOAD_S),
        lambda: [*made[0](), *made[1](), Candidate(name)],
        foreseen(ctx, source),
        min(target.latency.answer_s(prompt, ctx.predicted_output), MAX_WORKLOAD_S),
        decode_first_s,
        decode_first_s + there.end_s - there.first_token_s,
    )
