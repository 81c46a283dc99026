"""Progress of the answers of one instance by its latency model: a decode step is a token a sequence."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.types import Lease


@mypyc_attr(acyclic=True)
class DecodeSteps:
    """Steps of each engine of an instance so far, and the answers that they add tokens to."""

    __slots__ = ("_begun", "most", "per_s", "sequences", "total")

    def __init__(self) -> None:
        self.total = self.per_s = 0.0
        #: Number of decoding sequences. Sum over them of the step at which each began.
        self.sequences, self._begun = 0, 0.0
        #: Most sequences that were seen to decode at once.
        self.most = 0

    @property
    def grown_tokens(self) -> float:
        """Tokens of all answers under way: one for each sequence and step since it began."""
        return self.sequences * self.total - self._begun

    def age(self, lease: Lease) -> float:
        """Return the tokens of each sequence of a lease so far."""
        begun = lease.begun_steps
        return 0.0 if begun is None else self.total - begun

    def begin(self, lease: Lease) -> None:
        """Count the steps of an answer from now on."""
        lease.begun_steps = self.total
        self._begun += lease.request.sequences * self.total
        self.sequences += lease.request.sequences

    def end(self, lease: Lease) -> None:
        """Stop counting the steps of an answer."""
        if lease.begun_steps is None:
            return
        self._begun -= lease.request.sequences * lease.begun_steps
        self.sequences -= lease.request.sequences
        if not self.sequences:
            self._begun = self.total = 0.0
