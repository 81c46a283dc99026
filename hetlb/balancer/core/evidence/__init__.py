"""Evidence about the instances: what each did and says, what that makes of it, and what it gets meanwhile.

`table.py` has the states, the restraints and the facts that change either; docs/behaviour.md prints it. An
instance has an `Evidence` (`evidence.py`) of four parts: its state (`health.py`), its answers by client
(`lost_answers.py`), its signs of work (`silence.py`) and its room (`room.py`). A fleet has one account of
what was lost (`losses.py`): by client (`clients.py`) and by kind of request (`kinds.py`); and one of second
tries (`retries.py`).
"""
