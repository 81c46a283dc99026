"""KV caches that come from, or are kept for, other engines: the transfers of a simulated engine.

A sequence with `remote_tokens` takes blocks for its prompt, leaves the queue and waits for the transfer; the
driver takes it from `take_begun`. Then it is admitted before all that wait, and computes what was not
transferred, at least its last token. One with `held` keeps its blocks when it has finished.
"""

from __future__ import annotations

from hetlb.sim.engine_sequence import EngineSequence, SequenceState


class KvFetches:
    """Transfers that run or are complete, and finished sequences whose KV cache is held."""

    __slots__ = ("_begun", "held", "ready", "running")

    def __init__(self) -> None:
        self._begun: list[EngineSequence] = []  # not taken by the driver
        self.running: dict[EngineSequence, None] = {}
        #: Complete and not admitted.
        self.ready: dict[EngineSequence, None] = {}
        #: Finished sequences, each with its tokens in the cache.
        self.held: dict[EngineSequence, int] = {}

    def begin(self, sequence: EngineSequence, found: int) -> None:
        """Begin to fetch the tokens beyond `found`; complete at once if there are none."""
        remote, sequence.remote_tokens = max(found, sequence.remote_tokens), 0
        sequence.computed, sequence.fetch_tokens = remote, remote - found
        if remote == found:
            self.ready[sequence] = None
            return
        sequence.state = SequenceState.FETCHING
        self.running[sequence] = None
        self._begun.append(sequence)

    def take_begun(self) -> list[EngineSequence]:
        """Return the sequences whose transfer (of `fetch_tokens` tokens) began since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def drop(self, sequence: EngineSequence) -> None:
        """Forget a sequence whose transfer runs or is complete."""
        self.running.pop(sequence, None)
        self.ready.pop(sequence, None)
        if sequence in self._begun:
            self._begun.remove(sequence)
