"""One sequence in a simulated engine, and the states it passes through; `engine_model.py` preempts it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import StrEnum
from typing import Any, TypeAlias

from mypy_extensions import mypyc_attr

from hetlb.tools.sim.block_pool import CachedSpan

#: A stretch of a prompt: its content's name, and its tokens.
TokenSpan: TypeAlias = tuple[Hashable, int]


class SequenceState(StrEnum):
    """State of a sequence. `PREFILL` and `DECODE` are what vLLM counts as running.

    `FETCHING`: blocks are allocated, the KV cache of its prompt comes from another engine.
    """

    NEW = "new"
    WAITING = "waiting"
    FETCHING = "fetching"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    ABORTED = "aborted"


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineSequence:
    """One sequence: a prompt and as many output tokens as it will have. `tag` is the driver's own.

    `output_tokens` is when the model would stop; 0 is a prompt without an answer (an embedding).
    `pieces` and `answer` name the contents for an engine with a prefix cache (`hetlb.tools.sim.kv_blocks`).
    The KV cache of the first `remote_tokens` prompt tokens comes from another engine. `held`: the blocks stay
    allocated when it has finished, until `EngineModel.release_held`. `adapter`: its LoRA adapter, or "".
    `state` and `preemptions` are read-only for drivers; the fields from `admission` on are the engine's own.
    Drivers may subclass it to hang data on it.
    """

    __slots__ = (
        "adapter", "admission", "answer", "cached_tokens", "computed", "fetch_tokens", "generated",
        "held", "nodes", "offset", "output_tokens", "pieces", "preemptions", "prompt_tokens", "remote_tokens",
        "shared_blocks", "spans", "state", "tag",
    )  # fmt: skip

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        tag: Any = None,
        *,
        pieces: tuple[TokenSpan, ...] = (),
        answer: Hashable | None = None,
        remote_tokens: int = 0,
        held: bool = False,
        adapter: str = "",
    ) -> None:
        if prompt_tokens < 1:
            raise ValueError(f"prompt_tokens: expected at least 1, got {prompt_tokens}")
        if output_tokens < 0:
            raise ValueError(f"output_tokens: expected 0 or more, got {output_tokens}")
        if not 0 <= remote_tokens <= prompt_tokens:
            raise ValueError(f"remote_tokens: expected 0 to {prompt_tokens}, got {remote_tokens}")
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.tag = tag
        self.pieces = pieces
        self.answer = answer
        self.state = SequenceState.NEW
        self.preemptions = 0
        #: Tokens found in the prefix cache when it was first admitted, None without such a cache or before.
        self.cached_tokens: int | None = None
        #: Prompt tokens with a pending KV transfer; 0 after it ended or was given up.
        self.remote_tokens = remote_tokens
        #: Tokens to transfer: `remote_tokens` without the tokens in the engine's own prefix cache.
        self.fetch_tokens = 0
        self.held = held
        self.adapter = adapter
        self.admission = 0  # its number among all admissions
        self.computed = 0  # tokens in the cache, while in PREFILL
        self.generated = 0  # output tokens, while not in DECODE
        self.offset = 0  # step counter minus tokens in the cache, while in DECODE
        #: Spans of the prompt, with the answer as the last one. The first spans that are cached, as nodes,
        #: and the number of their blocks that the sequence uses.
        self.spans: tuple[TokenSpan, ...] = ()
        self.nodes: list[CachedSpan] = []
        self.shared_blocks = 0

    def __repr__(self) -> str:
        return f"EngineSequence({self.prompt_tokens}+{self.output_tokens}, {self.state}, tag={self.tag!r})"


class LoadedAdapters:
    """The adapters of the running sequences, and the adapters in slots. "" is the base model: in no slot."""

    __slots__ = ("_last_step", "_running", "loads", "slots", "used")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        #: True once a sequence has had an adapter.
        self.used = False
        #: Adapters loaded so far.
        self.loads = 0
        self._running: dict[str, int] = {}
        #: The adapters in slots, each with the last batch it was in.
        self._last_step: dict[str, int] = {}

    @property
    def running(self) -> tuple[str, ...] | None:
        """Adapters of the running sequences, None if no sequence ever had one."""
        return tuple(self._running) if self.used else None

    def expect(self, name: str) -> None:
        """Note that a sequence of an adapter has arrived."""
        if name:
            self.used = True

    def first_admitted(self, waiting: Iterable[EngineSequence]) -> EngineSequence | None:
        """Return the first waiting sequence with an adapter that the batch can hold."""
        for sequence in waiting:
            name = sequence.adapter
            if not name or name in self._running or len(self._running) < self.slots:
                return sequence
        return None

    def begin(self, name: str, step: int) -> bool:
        """Add a sequence to the batch of this step; returns whether its adapter has to be loaded."""
        if not name:
            return False
        self._running[name] = self._running.get(name, 0) + 1
        known = name in self._last_step
        self._last_step[name] = step
        if not known:
            self.loads += 1
        return not known

    def evict(self) -> None:
        """Drop adapters that the complete batch does not use, to make room for the adapters it loads."""
        while len(self._last_step) > self.slots:
            idle = ((used, other) for other, used in self._last_step.items() if other not in self._running)
            del self._last_step[min(idle)[1]]

    def end(self, name: str, step: int) -> None:
        """Remove a sequence; it was in the batch of this step."""
        if not name:
            return
        self._last_step[name] = step
        if self._running[name] > 1:
            self._running[name] -= 1
        else:
            del self._running[name]

    def check_integrity(self, names: list[str]) -> None:
        """Assert that `names` are the adapters of the running sequences."""
        used = [name for name in names if name]
        assert self._running == {name: used.count(name) for name in used}, self._running
        assert len(self._running) <= self.slots
        assert self._running.keys() <= self._last_step.keys()
        assert len(self._last_step) <= self.slots
