"""Row U12 where answers may go on: one that is shorter than it says is asked for once more."""

from __future__ import annotations

from faults.cases import case
from faults.rig import Rig


@case("U12", "short-length-resumed", outcomes={"no_response": 1}, proxy={"resume": "ids"})
async def shorter_than_it_says_and_resumed(rig: Rig) -> None:
    answer = await rig.ask("short-length", stream=False, runs=2)
    assert answer.status == 502, answer.body
