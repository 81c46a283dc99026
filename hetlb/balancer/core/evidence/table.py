"""The tables of the evidence about an instance: its states, its restraints, verdicts, and their constants.

docs/behaviour.md prints them; `evidence.py` obeys them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import Health, Outcome

FALL_PROBES: Final = 3
RISE_PROBES: Final = 2
#: Duration of an ejection in seconds. It doubles with each ejection within
#: `FLAPPING_S` of the one before, up to `MOST_EJECTION_S`. The first for a refused connection has none.
EJECTION_S: Final = 2.5
FLAPPING_S: Final = 120.0
MOST_EJECTION_S: Final = 60.0
#: Age of evidence, in seconds, at which it counts 1/e.
MEMORY_S: Final = 20.0
#: Good answers in a row before earlier losses are forgotten; doubled with each doubt within `RELAPSE_S` of
#: the one before, and the largest value.
FORGIVING_ANSWERS: Final = 3
MOST_FORGIVING_ANSWERS: Final = 24
RELAPSE_S: Final = 60.0
#: Requests lost in a row, here and elsewhere, before they count: not every request can be at fault.
MOST_LOST_AS_ELSEWHERE: Final = 5
#: Seconds of a pause after a trial, doubled with each trial that fails, and the longest.
PAUSE_S: Final = 1.0
MOST_PAUSE_S: Final = 3.0
#: Multiple of the expected time, and seconds, without a token: then the instance is stalled.
STALL_FACTOR: Final = 5.0
LEAST_SILENCE_S: Final = 2.0
#: The same while no answer has shown its speed.
UNKNOWN_SILENCE_S: Final = 10.0
#: The same after a request of a kind that its process has not answered yet: an engine may compile for it.
BEGINNING_S: Final = 45.0
#: Seconds, and `STALL_FACTOR` steps, without a token: the stream has stopped, this is no slow step.
STANDS_S: Final = 0.5
#: Seconds for which a limit without a stated time holds.
LIMIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class HealthParams(PickleByFields):
    """Parameters under `health:` of the fleet file; 0 turns slow start off."""

    slow_start_s: float = 30.0


class Verdict(StrEnum):
    """Meaning of the end of a lease for its instance."""

    WELL = "as a success"
    ABSENT = "as a refused connection"
    LOST = "as a lost answer"
    REFUSED = "as a refusal of its kind of request"
    NOTHING = "against no instance"


_VERDICTS: dict[Outcome, Verdict] = {
    Outcome.OK: Verdict.WELL,
    Outcome.UPSTREAM_BUSY: Verdict.LOST,
    Outcome.UPSTREAM_REFUSED: Verdict.REFUSED,
    Outcome.UPSTREAM_ERROR: Verdict.LOST,
    Outcome.CONNECT_FAILED: Verdict.ABSENT,
    Outcome.NO_RESPONSE: Verdict.LOST,
    Outcome.BROKEN_STREAM: Verdict.LOST,
}


def verdict(outcome: Outcome) -> Verdict:
    """Return the verdict of a lease that ended in `outcome`."""
    return _VERDICTS.get(outcome, Verdict.NOTHING)


_IN_USE: Final = (Health.SUSPECT, Health.UP)
REFUSED: Final = Transition("a connection is refused, by a probe or a dispatch", _IN_USE, Health.EJECTED)
LOADS: Final = Transition("a probe finds that it lists no model, or loads one", _IN_USE, Health.EJECTED)
ANSWERS: Final = Transition("a probe is answered, or an answer begins", (Health.SUSPECT,), Health.UP)
PROBES_FAIL: Final = Transition(
    f"{FALL_PROBES} probes fail in a row, and no answer came since", (Health.UP,), Health.EJECTED
)
PROBES_FAIL_ALONE: Final = Transition(
    f"{FALL_PROBES} probes fail in a row, and no other instance could take over", (Health.UP,), Health.SUSPECT
)
RECOVERS: Final = Transition(
    f"the ejection time is over and {RISE_PROBES} probes in a row are answered", (Health.EJECTED,), Health.UP
)
TRANSITIONS: Final = (REFUSED, LOADS, ANSWERS, PROBES_FAIL, PROBES_FAIL_ALONE, RECOVERS)


#: Reason of an instance that is ejected since it does not take hetlb's key.
KEY_REFUSED: Final = "it refuses hetlb's key"
#: Statuses of a server that does not accept a key.
KEY_STATUSES: Final = (401, 403, 407)

#: Reasons for which an instance that is up gets less than others, the strictest first; docs/behaviour.md says
#: what each gets (`configs/site/evidence.py`).
STALLED: Final = "stalled"
DOUBTED: Final = "on trial"
UNPROVEN: Final = "unproven"
ASKED: Final = "asked for time"
SLOW_START: Final = "slow start"
FULL: Final = "at its limit"
RESTRAINTS: Final = (STALLED, DOUBTED, UNPROVEN, ASKED, SLOW_START, FULL)
