"""Evidence about the instances: what each did and says, what that makes of it, and what it gets meanwhile.

`table.py` has the states, the restraints and the facts that change either; docs/behaviour.md prints it. An
instance has an `Evidence` (`evidence.py`) of four parts: its state (`health.py`), its answers by client
(`lost_answers.py`), its signs of work (`silence.py`) and its room (`room.py`). Of all instances there is an
account of answers by client (`clients.py`), of refusals by kind of request (`kinds.py`), and of second tries
(`retries.py`).
"""
