"""Choice of a pair of instances for one request, or of one: one prefills, the other fetches and decodes.

The score of a pair has the terms of a whole request (`hetlb.balancer.core.policies.hetlb`). The prefill's
terms count at the source, the decode's at the target; the time of the transfer comes between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.policies.base import MAX_WORKLOAD_S, Choice, Policy, paper_work
from hetlb.balancer.core.policies.hetlb import Evaluation, Hetlb
from hetlb.balancer.core.policies.score_terms import FINISH_INDEX
from hetlb.balancer.core.policies.sight import ROOM, SchedulingContext, Sight, foreseen
from hetlb.balancer.core.types import Candidate, Role, pair_name
from hetlb.options.split.transfers import TransferTimes

#: Largest cost of a pair over one instance's: it takes two slots, and may fail.
_WORTH_SHARE: Final = 0.9
#: Share of its time that a decode instance is taken to spend on prompts, at most.
_MOST_PREFILL_SHARE: Final = 0.95
#: An unstreamed answer is to end within this share of the lease on held KV blocks.
_LEASE_SHARE: Final = 0.4


@mypyc_attr(acyclic=True)
class _Pair:
    """Source and target by index, and their score.

    `start_s`: from the arrival of the KV cache to the first token. `in_time`: see `_in_time`.
    """

    __slots__ = ("in_time", "score", "source", "start_s", "target")

    def __init__(self, source: int, target: int, score: float, start_s: float, in_time: bool) -> None:
        self.source = source
        self.target = target
        self.score = score
        self.start_s = start_s
        self.in_time = in_time


def choose_pair(
    ctx: SchedulingContext, evaluation: Evaluation, transfers: TransferTimes, mixed: bool
) -> SplitChoice | None:
    """Return the instances of both legs, or one instance for the whole request; None if there is none now.

    `mixed`: all instances have the role `both`.
    """
    pairs = _Pairs(ctx, evaluation, transfers, mixed)
    whole = pairs.best_whole()
    below = math.inf if whole is None else _WORTH_SHARE * pairs.whole_score
    pair = pairs.best_pair(below)
    instances = evaluation.instances
    if pair is not None and pair.in_time:
        source, target, prompt = (
            instances[pair.source],
            instances[pair.target],
            float(ctx.request.prompt_tokens),
        )
        decode_s = target.latency.answer_s(prompt, ctx.predicted_output)
        return SplitChoice(
            pair.source,
            pair.target,
            min(source.latency.prefill_s(prompt), MAX_WORKLOAD_S),
            lambda: pairs.candidates(pair),
            evaluation.ratings[pair.source],
            min(decode_s, MAX_WORKLOAD_S),
            pair.start_s,
            pair.start_s + pairs.decode_s(evaluation.ratings[pair.target]),
        )
    if whole is None:
        unsplit = pair is not None or pairs.restrained
        return unsplit_choice(lambda: pairs.candidates(None)) if unsplit else None
    work_s = paper_work(instances[whole.index], ctx.request, ctx.predicted_output)[2]
    return whole_choice(whole.index, Choice(whole.index, work_s, lambda: pairs.candidates(None), whole))


class _Pairs:
    """Pairs of the instances of one evaluation."""

    def __init__(
        self, ctx: SchedulingContext, evaluation: Evaluation, transfers: TransferTimes, mixed: bool
    ) -> None:
        self._ctx = ctx
        self._evaluation = evaluation
        self._transfers = transfers
        self._mixed = mixed
        #: Weight of a second until the first token: as such, and as part of the whole answer.
        self._first = evaluation.weights[0] + evaluation.weights[1]
        self.whole_score = math.inf
        #: True if pairs with failing transfers were left out.
        self.restrained = False

    def best_whole(self) -> Sight | None:
        """Return the best instance with room for the whole request, None without one.

        Set `whole_score`: its score, plus the delay of later prompts there by the answer.
        """
        evaluation, prompt = self._evaluation, self._ctx.request.prompt_tokens
        among: list[int] | None = None
        if not self._mixed:
            own = min(OWN_PREFILL_TOKENS, prompt // 2)
            among = [
                each.index
                for each in evaluation.ratings
                if each.instance.spec.role is Role.BOTH
                or (each.instance.spec.role is Role.DECODE and prompt - each.cached <= own)
            ]
        found = evaluation.best(among)
        if found is not None:
            self.whole_score = found.score + self._delay_to_come_s(found, self.decode_s(found))
        return found

    def best_pair(self, below: float) -> _Pair | None:
        """Return the best pair with a score `below` a bound; pairs in time come first.

        Of sources and targets only the two best of each are combined: the cost of a decision must not grow
        with the square of the fleet.
        """
        evaluation, fleet = self._evaluation, self._evaluation.fleet
        kinds = {cost.token_prefill_s for cost in fleet.costs}
        if self._mixed and self._ctx.held is None and len(kinds) == 1:
            return None
        sources: list[tuple[float, int]] = []
        targets: list[tuple[float, int]] = []
        for each in evaluation.ratings:
            if each.state == ROOM:
                role = Role.BOTH if self._mixed else each.instance.spec.role
                if role is not Role.DECODE:
                    sources.append((self._prefill_score(each), each.index))
                if role is not Role.PREFILL:
                    targets.append((self._decode_score(each), each.index))
        if self._transfers.checks.restrained:
            sources, targets = self._usable(sources, targets)
        found: _Pair | None = None
        for prefill, i in sorted(sources)[:2]:
            for decode, j in sorted(targets)[:2]:
                if i != j and prefill + decode < below and self._suits(i, j) and self._reaches(i, j):
                    pair = self._pair(i, j)
                    if pair.score < below and (
                        found is None or (not pair.in_time, pair.score) < (not found.in_time, found.score)
                    ):
                        found = pair
        return found

    def _reaches(self, i: int, j: int) -> bool:
        """Return True unless transfers between both were seen to fail."""
        instances = self._evaluation.instances
        return self._transfers.checks.usable(instances[i], instances[j], self._ctx.now)

    def _usable(
        self, sources: list[tuple[float, int]], targets: list[tuple[float, int]]
    ) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """Return the sources and targets with at least one pair of working transfers."""
        able = [(s, t) for s in sources for t in targets if s[1] != t[1] and self._reaches(s[1], t[1])]
        usable = list({s for s, _ in able}), list({t for _, t in able})
        self.restrained = len(usable[0]) < len(sources) or len(usable[1]) < len(targets)
        return usable

    def _prefill_score(self, each: Sight) -> float:
        """Return the source's part of a pair's score."""
        return self._first * (each.first_token_s + each.coming_s) + max(0.0, each.others_s - each.slower_s)

    def _decode_score(self, each: Sight) -> float:
        """Return the target's part of a pair's score, without terms that depend on the source."""
        decode_s = self.decode_s(each)
        first_s = self._first * JOINING_STEPS * each.with_s
        finish = self._evaluation.weights[FINISH_INDEX] * each.finish_s
        return first_s + decode_s + each.slower_s + finish + self._delay_to_come_s(each, decode_s)

    @staticmethod
    def decode_s(each: Sight) -> float:
        """Return the seconds from the first token on, prompts to come included."""
        return each.end_s - each.first_token_s

    def _suits(self, i: int, j: int) -> bool:
        """Return True if the roles ask for a split, or if each instance is the better one for its leg.

        Idle, the source must prefill faster than the target, and the target decode no slower. If one instance
        is better at both, a transfer would only lighten the load of the moment.
        """
        ratings, evaluation = self._evaluation.ratings, self._evaluation
        source, target = evaluation.instances[i], evaluation.instances[j]
        if not self._mixed and (source.spec.role is Role.PREFILL or target.spec.role is Role.DECODE):
            return True
        costs, prompt = evaluation.fleet.costs, float(self._ctx.request.prompt_tokens)
        here_s = costs[i].token_prefill_s * (prompt - ratings[i].cached)
        if here_s >= costs[j].token_prefill_s * (prompt - ratings[j].cached):
            return False
        context = prompt + self._ctx.predicted_output / 2.0
        return target.latency.step_s(1.0, context) <= source.latency.step_s(1.0, context)

    def _pair(self, i: int, j: int) -> _Pair:
        ctx, instances, ratings = self._ctx, self._evaluation.instances, self._evaluation.ratings
        source, target, prompt = ratings[i], ratings[j], float(ctx.request.prompt_tokens)
        sent = prompt - target.cached
        ready_s = source.first_token_s + self._transfers.estimate_s(instances[i], instances[j], sent, ctx.now)
        wait_s = self._wait_for_prefill_s(target)
        start_s = JOINING_STEPS * target.with_s
        # Prompts prefilled at the target by then, and prompts still to come.
        prefill_s = join_s(instances[j], prompt) - start_s - ready_s
        late_s = wait_s if wait_s > prefill_s else prefill_s
        start_s += late_s
        score = self._prefill_score(source) + self._decode_score(target)
        score += self._first * (ready_s - source.first_token_s + late_s)
        whole_s = ready_s + start_s + self.decode_s(target)
        return _Pair(i, j, score, start_s, self._in_time(j, whole_s))

    def _in_time(self, j: int, whole_s: float) -> bool:
        """Return True if it is known or likely that the blocks are fetched within their lease.

        The first token of a streamed answer shows it. An unstreamed answer must end well before the lease
        ends: nothing else shows that the blocks were fetched in time.
        """
        link = self._evaluation.instances[j].spec.kv_transfer
        assert link is not None, f"{self._evaluation.instances[j].name} takes part in no KV transfer"
        return self._ctx.request.streamed or whole_s <= _LEASE_SHARE * link.lease_s

    def _delay_to_come_s(self, each: Sight, decode_s: float) -> float:
        """Return the weighted seconds that an answer of `decode_s` delays prompts yet to come there.

        A prompt that comes while others decode waits for half a step and is prefilled in longer iterations.
        Every answer is charged this whole delay, although one more answer beside others adds little to it.
        Otherwise all answers would go where some are running, and no instance would be left to prefill alone.
        """
        return self._first * each.prompts_per_s * decode_s * (0.5 * each.with_s + each.cost.beside_s)

    def _wait_for_prefill_s(self, each: Sight) -> float:
        """Return the seconds that future prefills delay a joining sequence, at their recent rate."""
        cost = each.cost
        share = each.seen.prefilling.per_s(self._ctx.now) * cost.token_prefill_s / each.load.engines
        return min(share, _MOST_PREFILL_SHARE) * cost.prefill_s if cost.prefill_s > each.with_s else 0.0

    def candidates(self, pair: _Pair | None) -> list[Candidate]:
        """Return every instance and the best pair with its score, as pages and logs show them.

        An instance is not eligible if its role excludes a whole request.
        """
        ctx, instances = self._ctx, self._evaluation.instances
        candidates = self._evaluation()
        for candidate, each in zip(candidates, self._evaluation.ratings, strict=True):
            role = each.instance.spec.role
            if role is not Role.BOTH and candidate.eligible:
                left = ctx.request.prompt_tokens - each.cached
                if role is Role.PREFILL or left > OWN_PREFILL_TOKENS:
                    candidate.eligible = False
                    candidate.reason = f"its role is {role}"
        if pair is not None:
            name = pair_name(instances[pair.source].name, instances[pair.target].name)
            candidates.append(Candidate(name, pair.score))
        return candidates


#: Most prompt tokens that a `decode` instance computes itself if its prefix cache holds half of the prompt.
#: Without that condition it would also compute all short prompts as soon as prefill instances are busy.
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
