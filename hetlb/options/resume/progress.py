"""Progress of a streamed answer: its parts so far, in the form that a second lease needs.

Bytes are kept as they came. They are read once an engine is lost, or once one stream or all streams keep
many. The kept bytes of a stream are bounded: beyond the bound its answer is not resumed.
"""

from __future__ import annotations

from typing import Final

import msgspec
from mypy_extensions import mypyc_attr

from hetlb.balancer.http.http1 import ChunkedDecoder
from hetlb.balancer.http.sse import data_of
from hetlb.options.resume.resume_fields import NOT_READ, ChunkFields

#: Maximum kept bytes of a prompt's token ids: as many as `MAX_INJECT_BYTES` of text have.
_MAX_PROMPT_ID_BYTES: Final = 1 << 19
#: Unread bytes kept of one stream: some 800 events, read in 3 ms.
_RAW_BYTES: Final = 256 << 10
#: Bytes of text, of token ids and of an unfinished event of one stream.
READ_BYTES: Final = 2 << 20
#: Bytes of all streams of a process.
_ALL_BYTES: Final = 128 << 20
#: Bytes of an object that holds a read, beside the read itself.
_OBJECT_BYTES: Final = 48
_decoder = msgspec.json.Decoder(ChunkFields)


@mypyc_attr(acyclic=True)
class Kept:
    """Bytes that the streams of one process keep."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


@mypyc_attr(acyclic=True)
class Progress:
    """Text, token ids and end of one answer so far, of all its leases.

    `raw` holds unread reads, as chunks. `texts` holds the text of each event as in its JSON, `ids` its token
    ids as a JSON list, a comma behind each. `ids` is b"" unless every event has token ids. `prompt_ids` are
    the prompt's, a JSON list. `why` is the reason for having no known continuation, "" while there is one.
    """

    __slots__ = (
        "_kept", "_raw_bytes", "_read_bytes", "_rest", "ahead", "created", "finish", "id", "ids", "in_block",
        "model", "most_tokens", "prompt_ids", "raw", "role_sent", "settled", "texts", "thought", "tokens",
        "usage_sent", "why",
    )  # fmt: skip

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._raw_bytes = self._read_bytes = 0
        self.raw: list[bytes] = []
        #: Beginning of an incomplete event.
        self._rest = b""
        self.texts = bytearray()
        self.ids = bytearray()
        #: Token ids in `ids`, and the most that the engine may generate; None if unknown.
        self.tokens = 0
        self.most_tokens: int | None = None
        #: Number of events of earlier leases: they have just the text of their token ids.
        self.settled = 0
        self.prompt_ids = b""
        #: Of the first event: the identity of the answer for the client.
        self.id = self.model = ""
        self.created = 0
        #: Reason of its end, None while it goes on.
        self.finish: str | None = None
        #: True if the last event belongs to a block that has to end first (reasoning); if any event did.
        self.in_block = self.thought = False
        self.role_sent = False
        #: True if the event of usage alone came.
        self.usage_sent = False
        self.why = ""
        #: Text that the client has beyond `texts`: a lease is about to repeat it.
        self.ahead = ""

    # Called for about every token.
    def add_chunks(self, chunks: bytes) -> None:
        """Keep a read of whole chunks."""
        self.raw.append(chunks)
        size = len(chunks) + _OBJECT_BYTES
        self._raw_bytes += size
        self._kept.bytes += size
        if self._raw_bytes > _RAW_BYTES or self._kept.bytes > _ALL_BYTES:
            self.read()

    def add(self, payload: bytes) -> None:
        """Keep part of a body that came in no whole chunks."""
        if payload and not self.why:  # an empty chunk would be the last one
            self.add_chunks(b"%x\r\n%b\r\n" % (len(payload), payload))

    def read(self) -> None:
        """Read the bytes that were only kept."""
        raw = b"".join(self.raw)
        self.raw.clear()
        self._kept.bytes -= self._raw_bytes
        self._raw_bytes = 0
        if self.why or not raw:
            return
        lines = ChunkedDecoder().feed(raw).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, self._rest = (self._rest + lines).split(b"\n\n")
        for event in events:
            data = data_of(event)
            if data.lstrip()[:1] == b"{":
                self.take(b"data: " + data)
        self.bound()

    def bound(self) -> None:
        """Give up an answer above its limit of bytes, or above its engine's limit of tokens."""
        if self.why:
            return
        size = len(self.texts) + len(self.ids) + len(self._rest) + len(self.prompt_ids)
        self._kept.bytes += size - self._read_bytes
        self._read_bytes = size
        if self.most_tokens is not None and self.tokens > self.most_tokens:
            self.spoil("more token ids than its limit")
        elif size > READ_BYTES or self._kept.bytes > _ALL_BYTES:
            self.spoil("too long to be kept")

    def take(self, event: bytes, *, has_prompt: bool = True) -> None:
        """Keep the contents of one whole event; `has_prompt`: its prompt's token ids are the client's."""
        if self.why:
            return
        try:
            chunk = _decoder.decode(event[6:])
        except NOT_READ:
            self.spoil("an event that is not read")
            return
        if not chunk.choices:
            self.usage_sent = self.finish is not None
            return
        choice, delta = chunk.choices[0], chunk.choices[0].delta
        if len(chunk.choices) != 1 or bytes(choice.logprobs) not in (b"", b"null"):
            self.spoil("several choices" if len(chunk.choices) != 1 else "logprobs")
            return
        if not self.id:
            self.named(chunk.id, chunk.created, chunk.model)
        text, reasons, role = choice.text, False, False
        if delta is not None:
            text, role = delta.content, delta.role is not None
            thought = bytes(delta.reasoning or delta.reasoning_content)
            reasons = thought not in (b"", b"null", b'""')
            self.role_sent = self.role_sent or role
            if bytes(delta.tool_calls) not in (b"", b"null", b"[]"):
                self.spoil("tool calls")
                return
        prompt = bytes(chunk.prompt_token_ids or choice.prompt_token_ids)
        if has_prompt and prompt[:1] == b"[" and len(prompt) <= _MAX_PROMPT_ID_BYTES:
            self.prompt_ids = prompt
        if choice.finish_reason == "abort":
            return  # no end, and nothing that the client has: vLLM gives up what it runs when it is stopped
        self.thought = self.thought or reasons
        self.finish = choice.finish_reason
        given = bytes(choice.token_ids)
        if text or reasons or given[:1] == b"[" or (choice.finish_reason is None and not role):
            self.in_block = reasons
            self.keep(text or "", given)

    def named(self, id: str | None, created: int | None, model: str | None) -> None:
        self.id, self.created, self.model = id or "", created or 0, model or ""

    def keep(self, text: str, ids: bytes) -> None:
        """Keep text and token ids (a JSON list, or nothing) of an event."""
        if ids[:1] != b"[" or (self.texts and not self.ids):
            self.ids.clear()
        else:
            self.ids += ids + b","
            self.tokens += ids.count(b",") + (len(ids) > 2)
        self.texts += msgspec.json.encode(text) + b","

    def cut(self, texts: list[str], ids: list[list[int]], ahead: str) -> None:
        """Keep these events alone; the client has `ahead` behind their text."""
        self.forget()
        for text, given in zip(texts, ids, strict=True):
            self.keep(text, msgspec.json.encode(given))
        self.ahead = ahead
        self.settled = len(texts)

    def forget(self) -> None:
        self.texts, self.ids, self.ahead, self.settled = bytearray(), bytearray(), "", 0
        self.tokens = 0

    def spoil(self, why: str) -> None:
        """Forget all of it; `why` is the reason."""
        self.why = self.why or why
        self.release()

    def release(self) -> None:
        """Keep nothing more."""
        self.forget()
        self.raw.clear()
        self.prompt_ids = self._rest = b""
        self._kept.bytes -= self._raw_bytes + self._read_bytes
        self._raw_bytes = self._read_bytes = 0
