"""Speed of an instance, from its answers, over its latency model.

One factor on all durations of the model, bounded, and exactly 1 while a measured profile is about right. An
answer of n tokens takes n - 1 steps at the batch that ran beside it, and the prompts that were prefilled
meanwhile. The factor is the time that answers took over the time that the model predicts for them, both
summed over about the last `MEMORY_S` seconds.

Models of a fleet are often wrong together (another build, an estimate, the default): until an instance has
answered, its factor is the mean of the other instances', with profiles and without apart. The default model
is a guess at other loads, too: of equal instances, the one with less to do would show another factor, and get
less for that reason. So factors without a profile that are near each other are averaged.

Engines differ more in reading than in decoding (an L40S with a 70B model reads 40 x and decodes 3 x as slowly
as an H100). Without a profile, prompts that were read alone show a factor of reading. It counts apart if it
differs clearly.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.latency import LatencyModel, delay_of_reading_s
from hetlb.balancer.core.rate import MEMORY_S, RecentRate

#: Seconds of answers in agreement with the model that stand against the first evidence.
PRIOR_S: Final = 5.0
#: Least expected seconds of first prompts that may correct a profile (a network adds some ms). Least factor
#: between them and the profile. Seconds of answers that the correction counts for.
FIRST_PROMPTS_S: Final = 0.1
_CLEAR_FACTOR: Final = 1.5
_FIRST_S: Final = 0.5
#: Ratio of the factor of reading to the other one from which on it counts apart, prompts that show it, and
#: seconds that one such prompt is believed without another; each further one doubles them.
_APART_FACTOR: Final = 2.0
_READINGS: Final = 8
_BELIEVED_S: Final = 60.0
#: Largest factor that leaves a measured profile as it is, and the largest correction.
TRUSTED_FACTOR: Final = 1.2
MOST_PROFILED_FACTOR: Final = 4.0
#: Largest correction of the default model, used without a profile.
MOST_UNPROFILED_FACTOR: Final = 64.0
#: Seconds over which `_good` is averaged. A worse factor returns to it while no answer comes.
_GOOD_S: Final = 60.0
#: Answers in a row that are slower, or faster, by `_CLEAR_FACTOR`. Then they alone are the speed.
_CLEAR_ANSWERS: Final = 5
#: Answers over which the usual speed is averaged, until four times as many have come. After that, seconds
#: over which it follows a slower speed.
_USUAL_ANSWERS: Final = 10
_USUAL_S: Final = 3600.0
#: Answers in a row that are clearly slower, for the server to count as slower.
_SLOW_ANSWERS: Final = 3
#: Factor over a profile of a slow server.
SLOW_FACTOR: Final = 1.5
#: Multiple of its usual factor from which on a server is compared with others.
SLOWED_FACTOR: Final = 2.0
#: Least relative change for a new factor to replace the one in force.
_CHANGE_SHARE: Final = 0.05
#: Share of the time of steps, spent on prompts beside them, above which the steps count as mixed.
_MIXED_SHARE: Final = 0.1


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Mark:
    """Work of an instance so far: sequence-seconds, token-seconds in the KV cache, prefilled prompts.

    `turns`: iterations that some of these prompts were done in. `stood_s`: seconds in which it stood still,
    which are no part of the others.
    """

    sequence_s: float
    token_s: float
    prompt_tokens: int
    prompts: int
    turns: int
    stood_s: float

    def __init__(
        self,
        sequence_s: float,
        token_s: float,
        prompt_tokens: int,
        prompts: int,
        turns: int,
        stood_s: float = 0.0,
    ) -> None:
        self.sequence_s = sequence_s
        self.token_s = token_s
        self.prompt_tokens = prompt_tokens
        self.prompts = prompts
        self.turns = turns
        self.stood_s = stood_s


class SpeedTracker:
    """The evidence about one instance: its requests over time, and the times of its answers."""

    def __init__(self, profiled: bool, now: float) -> None:
        self._profiled = profiled
        self._most = MOST_PROFILED_FACTOR if profiled else MOST_UNPROFILED_FACTOR
        #: Time of the last `elapsed`.
        self.last = now
        #: Time of the newest evidence.
        self.seen_at = now
        self._sequence_s = self._token_s = 0.0
        #: Tokens of prompts that were prefilled so far.
        self.prompt_tokens = self._prompts = self._turns = 0
        self._turn_at = -math.inf
        #: Prompt tokens that were prefilled.
        self.prefilling = RecentRate()
        # The default model is a guess: the first answer may replace it.
        self._observed_s = self._expected_s = PRIOR_S if profiled else 0.0
        #: Factor for the model's durations that is in force, and the factor of its own answers.
        self.factor = self.shown = 1.0
        #: Factor and expected seconds of the newest prompts that were read alone; the least and the largest
        #: factor of the long ones, and the time until which they are believed without another prompt.
        self._readings: list[tuple[float, float]] = []
        self._least_reading, self._most_reading, self._doubt_at = 0.0, math.inf, math.inf
        #: The model's seconds of the last answer's steps, and whether many were mixed.
        self.last_expected_s = 0.0
        self.last_mixed = False
        #: Engines that share the requests.
        self.engines = 1
        #: True if some answer has shown a speed, and if the first prompts have been compared with a profile.
        self.seen = self.begun = False
        #: Seconds that it stood still so far, and the last time that it did.
        self.stood_s = 0.0
        self.stood_at = -math.inf
        #: Running sequences and their tokens since the last `elapsed`.
        self._running = self._tokens = 0.0
        #: Mean of the factors that it showed, over about `_GOOD_S` seconds; at first over all its answers.
        self._good = 1.0
        #: The same over about an hour: its usual factor.
        self.usual = 1.0
        self.answers = 0
        #: Observed and expected seconds of the last answers in a row that differ clearly from the factor.
        #: Their number, below 0 if they are faster.
        self._run_observed_s = self._run_expected_s = 0.0
        self._run = 0
        self._aged_at = now
        #: Factor of about the last three answers, and their seconds; 0 before the first.
        self._newest = self.newest_s = 0.0
        #: True from a factor of `SLOW_FACTOR` until newer answers are well. That a factor ages does not end
        #: it.
        self.slow = False
        #: Time since which it is slower than usual while others are not, None if it is not.
        self.slowed_since: float | None = None
        #: Good answers in a row since then; number that ends the slowness; time when it last ended.
        self.well, self.enough, self.well_at = 0, 0, -math.inf
        #: True if `age` changed the factor.
        self.changed = False

    @property
    def confidence(self) -> float:
        """Confidence in the factor, 0 to 1: observed seconds over the observed and `PRIOR_S` assumed ones."""
        return self._observed_s / (self._observed_s + PRIOR_S)

    @property
    def newest(self) -> float:
        """Factor of about the last three answers; it does not age."""
        return self._newest or self.shown

    @property
    def lately(self) -> float:
        """The factor in force, or a larger newest one after some clearly slower answers in a row."""
        return max(self.shown, self.newest) if self._run >= _SLOW_ANSWERS else self.shown

    @property
    def settled(self) -> bool:
        """True if enough answers were seen for a usual speed."""
        return self.answers >= 4 * _USUAL_ANSWERS

    @property
    def in_doubt(self) -> bool:
        """True if it is slow. Its work goes elsewhere then, so few answers show whether it still is."""
        return self.slow or self.slowed_since is not None

    @property
    def reading(self) -> float:
        """Factor for the model's times of reading: another one if all long prompts read alone show it."""
        if self._least_reading >= _APART_FACTOR * self.factor:
            return self._least_reading
        if self._most_reading * _APART_FACTOR <= self.factor:
            return self._most_reading
        return self.factor

    def read(self, expected_s: float, seconds: float, now: float) -> bool:
        """Learn from a prompt that was read alone. Return True if the factor of reading changed."""
        before, most, readings = self.reading, self._most, self._readings
        readings.append((max(1.0 / most, min(most, seconds / expected_s)), expected_s))
        del readings[:-_READINGS]
        long_s = max([each[1] for each in readings]) / 2.0
        shown = [factor for factor, each_s in readings if each_s >= long_s]
        if len(shown) > 1:
            self._least_reading, self._most_reading = min(shown), max(shown)
        elif self._least_reading > 0.0:
            least, most_shown = min(self._least_reading, shown[0]), max(self._most_reading, shown[0])
            self._least_reading, self._most_reading = least, most_shown
        self._doubt_at = now + _BELIEVED_S * 2.0 ** (len(readings) - 1)
        return self.reading != before

    def apart(self, model: LatencyModel) -> LatencyModel:
        """Return a model of one factor with reading as much slower as prompts showed it to be."""
        reading = self.reading / self.factor
        if reading == 1.0:
            return model
        host_s, request_s, sequence_s = model.host_s, model.request_s, model.host_sequence_s
        return model.with_factors(reading, 1.0, 1.0, host_s, request_s, sequence_s)

    def renew(self, now: float) -> bool:
        """Take the last answers in a row as its speed if they are clearly faster.

        Return True if the factor changed.
        """
        if self._run >= 0:
            return False
        self._observed_s, self._expected_s = self._run_observed_s, self._run_expected_s
        return self._observe(0.0, 0.0, now)

    def elapsed(self, running: float, tokens: float, now: float) -> None:
        """Add `running` sequences that decode, with `tokens` in the KV cache, until now; call it first."""
        since = now - self.last
        if since > 0.0:
            self._sequence_s += since * running
            self._token_s += since * tokens
            self.last = now
            self._running, self._tokens = running, tokens

    def stood(self, since: float, now: float) -> float:
        """Take the time that it stood still out of the evidence. Return the seconds.

        The time begins at `since`, or at the last call if that was later. Call it right after `elapsed`.
        """
        seconds = max(0.0, now - max(since, self.stood_at))
        if seconds > 0.0:
            self.stood_s += seconds
            self._sequence_s -= seconds * self._running
            self._token_s -= seconds * self._tokens
        self.stood_at = now
        return seconds

    def age(self, now: float) -> None:
        """Let a factor that is worse than before return to `_good` while no answer confirms it.

        A factor of reading is no longer in force once no prompt has confirmed it for long.
        """
        if now > self._doubt_at:
            self.changed = self.changed or self.reading != self.factor
            self._least_reading, self._most_reading, self._doubt_at = 0.0, math.inf, math.inf
        begin = max(self.seen_at + MEMORY_S, self._aged_at)
        if not self.seen or now <= begin or self.shown <= self._good * (1.0 + _CHANGE_SHARE):
            return
        keep = math.exp(-(now - begin) / MEMORY_S)
        self._aged_at, self.changed = now, True
        self.factor = self.shown = self._good + (self.shown - self._good) * keep
        self._observed_s = self._expected_s * self.shown

    def prefilled(self, prompts: int, tokens: int, now: float, least_step_s: float) -> None:
        """Note prefilled prompts, of `tokens` together. An iteration takes at least `least_step_s`."""
        if now - self._turn_at >= 0.5 * least_step_s:
            self._turns += 1
            self._turn_at = now
        self._prompts += prompts
        self.prompt_tokens += tokens
        self.prefilling = self.prefilling.plus(tokens, now)

    def mark(self) -> Mark:
        """Return the work up to the last `elapsed`."""
        return Mark(
            self._sequence_s, self._token_s, self.prompt_tokens, self._prompts, self._turns, self.stood_s
        )

    def answered(
        self, model: LatencyModel, since: Mark, seconds: float, steps: float, now: float, budget: float
    ) -> bool:
        """Learn from `steps` decode steps in `seconds` since a mark. Return True if the factor changed."""
        if seconds <= 0.0 or steps < 1.0:
            return False
        self.last_expected_s, self.last_mixed = self.expected(
            model, since, self.mark(), seconds, steps, budget
        )
        return self._observe(self.last_expected_s, seconds, now)

    def expected(
        self, model: LatencyModel, since: Mark, until: Mark, seconds: float, steps: float, budget: float
    ) -> tuple[float, bool]:
        """Return the predicted seconds of `steps` decode steps between two marks; True if many were mixed."""
        model, engine_s = self.apart(model), seconds * self.engines
        running = (until.sequence_s - since.sequence_s) / engine_s
        if running < 1.0:
            running = 1.0
        tokens = (until.token_s - since.token_s) / engine_s
        step_s = model.step_s(running, tokens)
        expected_s = steps * step_s
        prompts = until.prompts - since.prompts
        delay_s = 0.0
        if prompts > 0:
            mean_prompt = max(1.0, (until.prompt_tokens - since.prompt_tokens) / prompts)
            turns = max(1.0, float(until.turns - since.turns))
            beside = prompts / turns / self.engines if prompts > turns * self.engines else 1.0
            read_s = model.first_token_s(mean_prompt, 0.0, 0.0, running, tokens, budget, beside)
            delay_s = delay_of_reading_s(read_s, beside * mean_prompt, running, step_s, budget)
            delay_s *= prompts / (beside * self.engines)
            expected_s += delay_s
        return expected_s, delay_s > _MIXED_SHARE * expected_s

    def observe_prefill(self, expected_s: float, seconds: float, now: float) -> bool:
        """Learn from a prompt's `seconds`, expected in `expected_s`. Return True if the factor changed."""
        return seconds > 0.0 and expected_s > 0.0 and self._observe(expected_s, seconds, now)

    def begin(self, expected_s: float, seconds: float, now: float) -> bool:
        """Correct a profile that the first prompts show to be wrong. Return True if the factor changed."""
        if expected_s < FIRST_PROMPTS_S:
            return False
        self.begun = True
        ratio = max(1.0 / self._most, min(self._most, seconds / expected_s))
        if self.seen or 1.0 / _CLEAR_FACTOR < ratio < _CLEAR_FACTOR:
            return False
        self._observed_s, self._expected_s, self.seen_at = ratio * _FIRST_S, _FIRST_S, now
        return self._observe(0.0, 0.0, now)

    def told(self, expected_s: float, seconds: float, now: float) -> bool:
        """Take over the engine's own mean as first evidence. Return False if its figures are unusable."""
        if not (0.0 < expected_s < math.inf and 0.0 < seconds < math.inf):
            return False
        ratio = PRIOR_S / expected_s
        self._observe(PRIOR_S, ratio * seconds, now)
        return True

    def assume(self, factor: float) -> bool:
        """Take the factor that others show, before any answer of its own. Return True if it changed."""
        if self.seen or abs(factor / self.factor - 1.0) <= _CHANGE_SHARE:
            return False
        self._observed_s = self._expected_s * factor
        self.factor = self.shown = factor
        return True

    def _observe(self, expected_s: float, seconds: float, now: float) -> bool:
        """Take in one comparison of seconds with their expectation. Return True if the factor changed."""
        since = now - self.seen_at
        keep = math.exp(-since / MEMORY_S)
        self.seen_at, self.seen = now, True
        if seconds > 0.0 and expected_s > 0.0:
            newest = seconds / expected_s
            self._newest = math.sqrt(self._newest * newest) if self._newest > 0.0 else newest
            self.newest_s = 0.5 * (self.newest_s + seconds) if self.newest_s > 0.0 else seconds
        if self._observed_s > 0.0 and self._changed(expected_s, seconds):
            keep, self._observed_s, self._expected_s = 1.0, self._run_observed_s, self._run_expected_s
            expected_s = seconds = 0.0
            self._run = 0
        self._observed_s = self._observed_s * keep + seconds
        self._expected_s = self._expected_s * keep + expected_s
        if self._expected_s <= 0.0:
            return False
        ratio, most = self._observed_s / self._expected_s, self._most
        if self._profiled and 1.0 / TRUSTED_FACTOR <= ratio <= TRUSTED_FACTOR:
            ratio = 1.0
        elif ratio > most:
            ratio = most
        elif ratio < 1.0 / most:
            ratio = 1.0 / most
        self._remember(ratio, since)
        if self._profiled and (ratio >= SLOW_FACTOR or self.lately >= SLOW_FACTOR):
            self.slow = True
        if ratio == self.shown or (abs(ratio / self.shown - 1.0) <= _CHANGE_SHARE and ratio != 1.0):
            return False
        self.factor = self.shown = ratio
        return True

    def _changed(self, expected_s: float, seconds: float) -> bool:
        """Return True if the newest answers in a row show a new speed."""
        before = expected_s * self._observed_s
        ratio = seconds * self._expected_s / before if before > 0.0 else 1.0
        side = 1 if ratio >= _CLEAR_FACTOR else (-1 if ratio * _CLEAR_FACTOR <= 1.0 else 0)
        if side * self._run <= 0:
            self._run, self._run_observed_s, self._run_expected_s = 0, 0.0, 0.0
        if side:
            self._run += side
            self._run_observed_s += seconds
            self._run_expected_s += expected_s
        return abs(self._run) >= _CLEAR_ANSWERS

    def _remember(self, factor: float, since: float) -> None:
        """Let the long-term factors follow a new one, shown `since` seconds after the last."""
        self.answers += 1
        gain = max(1.0 / self.answers, 1.0 - math.exp(-min(since, 1.0) / _GOOD_S))
        self._good *= (factor / self._good) ** gain
        if not self.settled:  # the first answers of a process that starts are no usual ones
            gain = max(gain, 1.0 / _USUAL_ANSWERS)
        elif factor > self.usual:
            gain = 1.0 - math.exp(-min(since, 1.0) / _USUAL_S)
        self.usual *= (factor / self.usual) ** gain


def averaged(shown: Sequence[tuple[float, float]]) -> list[float]:
    """Return for each factor the mean of the factors near it, weighted by confidence.

    The mean is geometric. Factors within `TRUSTED_FACTOR` of each other are near, so a larger factor never
    has a smaller mean. (When factors further off were averaged while few answers were seen, servers that
    differ 2 times became one: a lone user's E2E 0.49 of the best other, `ordinary.py`.) A pair is a factor
    with its confidence, above 0.
    """
    factors = sorted(shown)
    sums = [(0.0, 0.0)]
    for factor, weight in factors:
        sums.append((sums[-1][0] + weight, sums[-1][1] + weight * math.log(factor)))
    found = []
    for factor, _ in shown:
        first = bisect_left(factors, (factor / TRUSTED_FACTOR, 0.0))
        last = bisect_right(factors, (factor * TRUSTED_FACTOR, math.inf))
        found.append(math.exp((sums[last][1] - sums[first][1]) / (sums[last][0] - sums[first][0])))
    return found
