"""Progress of a streamed answer: what has come of it, as a second lease needs it to go on from there.

Bytes are kept as they came, and read once an engine is lost, or where those of all streams together are many
(`Driver`).
"""

from __future__ import annotations

from typing import Final

import msgspec
from mypy_extensions import mypyc_attr

from hetlb.proxy.http.http1 import ChunkedDecoder
from hetlb.proxy.http.openai_fields import ChunkFields
from hetlb.proxy.http.sse import data_of

#: Maximum bytes of a prompt's token ids that are kept: those of `MAX_INJECT_BYTES` of text.
_MAX_PROMPT_IDS: Final = 1 << 19
_decoder = msgspec.json.Decoder(ChunkFields)


@mypyc_attr(acyclic=True)
class Progress:
    """Text, token ids and end of one answer so far, of all its leases.

    `raw` holds reads that were not looked at, as chunks. `texts` holds the text of each event as in its JSON,
    with the quote behind it, `ids` its token ids as a JSON list; b"" in `ids` where not every event has some.
    `prompt_ids` are those of the prompt, a JSON list.
    """

    __slots__ = (
        "_rest", "ahead", "created", "finish", "id", "ids", "in_block", "model", "plain_text", "prompt_ids",
        "raw", "role_sent", "settled", "texts", "usable", "usage_sent",
    )  # fmt: skip

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        #: Beginning of an event that is not whole.
        self._rest = b""
        self.texts = bytearray()
        self.ids = bytearray()
        #: So many events have just the text of their token ids: those of leases before.
        self.settled = 0
        self.prompt_ids = b""
        #: Of the first event: what the client knows the answer by.
        self.id = self.model = ""
        self.created = 0
        #: Reason of its end, None while it goes on.
        self.finish: str | None = None
        #: True if the last event belongs to a block that has to end first: reasoning.
        self.in_block = False
        #: True if all of the answer is text of its message.
        self.plain_text = True
        self.role_sent = False
        #: True if the event of usage alone came.
        self.usage_sent = False
        #: False once something came of which no continuation is known.
        self.usable = True
        #: Text that the client has beyond `texts`: a lease is about to say it again.
        self.ahead = ""

    def add(self, payload: bytes) -> None:
        """Keep part of a body that came in no whole chunks."""
        self.raw.append(b"%x\r\n%b\r\n" % (len(payload), payload))

    def read(self) -> None:
        """Look at what was only kept."""
        raw = b"".join(self.raw)
        self.raw.clear()
        if not self.usable or not raw:
            return
        lines = ChunkedDecoder().feed(raw).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, self._rest = (self._rest + lines).split(b"\n\n")
        for event in events:
            data = data_of(event)
            if data.lstrip()[:1] == b"{":
                self.take(b"data: " + data)

    def take(self, event: bytes, *, has_prompt: bool = True) -> None:
        """Keep what one whole event says; `has_prompt`: token ids of a prompt are those of the client's."""
        try:
            chunk = _decoder.decode(event[6:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.spoil()
            return
        if not chunk.choices or not self.usable:
            self.usage_sent = self.finish is not None
            return
        choice, delta = chunk.choices[0], chunk.choices[0].delta
        if len(chunk.choices) != 1 or bytes(choice.logprobs) not in (b"", b"null"):
            self.spoil()
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
                self.spoil()
                return
        prompt = bytes(chunk.prompt_token_ids or choice.prompt_token_ids)
        if has_prompt and prompt[:1] == b"[" and len(prompt) <= _MAX_PROMPT_IDS:
            self.prompt_ids = prompt
        if choice.finish_reason == "abort":
            return  # no end, and nothing that the client has: vLLM gives up what it runs when it is stopped
        self.plain_text = self.plain_text and not reasons
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
            self.ids += ids
        self.texts += msgspec.json.encode(text)[1:]

    def cut(self, texts: list[str], ids: list[list[int]] | None, ahead: str) -> None:
        """Keep these events, without ids if they have none; the client has `ahead` behind their text."""
        self.forget()
        for number, text in enumerate(texts):
            self.keep(text, b"" if ids is None else msgspec.json.encode(ids[number]))
        self.ahead = ahead
        self.settled = len(texts)

    def forget(self) -> None:
        self.texts, self.ids, self.ahead, self.settled = bytearray(), bytearray(), "", 0

    def spoil(self) -> None:
        """Something came of which no continuation is known: forget all of it."""
        self.usable = False
        self.forget()
        self.raw.clear()
        self.prompt_ids = self._rest = b""
