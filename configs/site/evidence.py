"""What the evidence about an instance means for it: by state, by restraint, and by how a lease ends."""

from hetlb.balancer.core.evidence import table
from hetlb.balancer.core.evidence.table import Verdict
from hetlb.balancer.core.types import Health

#: Changes by each verdict.
EFFECTS = {
    Verdict.WELL: "up, if it was suspect; a part of the way out of a doubt",
    Verdict.ABSENT: "ejected at once; what its process did is forgotten",
    Verdict.LOST: "a doubt, if more than elsewhere, and the client is answered there; if two instances lose "
    f"a request, {table.MOST_LOST_AS_ELSEWHERE} in a row",
    Verdict.REFUSED: "if another instance answers: the kind goes there, and trials of it alone go here",
}
#: Work of an instance that is not up.
GETS = {
    Health.SUSPECT: "requests while none is up",
    Health.EJECTED: "nothing, even if no other is left",
}
_TRIALS = f"trials alone: one request at a time, {table.PAUSE_S:g} to {table.MOST_PAUSE_S:g} s apart"
#: By restraint: how it begins, what the instance gets, how it ends.
RESTRAINTS = {
    table.STALLED: (
        f"no token for {table.STALL_FACTOR:g} times what one takes, {table.LEAST_SILENCE_S:g} s at least "
        f"({table.UNKNOWN_SILENCE_S:g} s while its speed is unknown, {table.BEGINNING_S:g} s behind a "
        "request with a field that its process has not answered yet), and its own counters stand still",
        f"{_TRIALS}; requests without a byte go elsewhere within the budget of retries",
        "a token comes, or its counters move",
    ),
    table.DOUBTED: (
        "it surely loses more answers than the best other of its model",
        "trials alone",
        f"{table.FORGIVING_ANSWERS} answers in a row end well; each lost answer within {table.RELAPSE_S:g} s "
        f"begins it again, and twice as many must end well, up to {table.MOST_FORGIVING_ANSWERS}",
    ),
    table.UNPROVEN: (
        "its process fails a request before it answers any",
        "trials alone",
        "a trial's answer begins",
    ),
    table.ASKED: (
        "429 or 503 with a time to come again, while nothing else ran there",
        "nothing",
        f"after that time, {table.MOST_PAUSE_S:g} s at most",
    ),
    table.SLOW_START: (
        "its process is new: by `process_start_time_seconds` of its metrics; without that, once a connection "
        "was refused; or it was added",
        "a growing part of its slots; no prefixes assumed",
        "after `health.slow_start_s`, or as soon as requests wait",
    ),
    table.FULL: (
        "429 or 503 while it answers others",
        "the sequences that it ran then",
        f"after the time it asked for or {table.LIMIT_S:g} s, one more is tried, then more",
    ),
}
