"""Progress of a streamed answer: what has passed of it, as a second lease needs it to go on from there.

Text and token ids are kept as they stand in the events, one piece per event: compared with what an event
costs anyway, keeping them costs next to nothing, and they are read only if an engine is lost.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from mypy_extensions import mypyc_attr

from hetlb.proxy.http.http1 import CHUNK_SIZES
from hetlb.proxy.http.openai_fields import ChunkFields

#: End of a chunk with one event whose token ids come last.
_ENDING: Final = b"}]}\n\n\r\n"
_LIST_ENDING: Final = b"]" + _ENDING
#: Ends of a chunk by their length, with a null in place of token ids that the client did not ask for.
_TAILS: Final = [
    b"null" + b" " * (size - 4 - len(_ENDING)) + _ENDING if size >= 4 + len(_ENDING) else b""
    for size in range(128)
]
#: No beginning of an event is longer than this: an id, a name of a model.
_MAX_BEGINNING: Final = 1024
#: Token ids of a longer prompt are not kept: 256 KiB of text, the most that `stream_options` is put into.
_MAX_PROMPT_IDS: Final = 1 << 19
_IDS = re.compile(rb'"((?:prompt_)?token_ids)":\[[0-9,]*\]')
#: An event of text: what stands before it, and from the quote behind it on, where nothing changes but ids.
_SHAPE = re.compile(
    rb'(data: \{[^\n]*?"choices":\[\{[^\n]*?"(?:content|text)":")(?:[^"\\\n]|\\.)*'
    rb'("(?!:)(?:(?!"usage":\{)[^\n])*)'
)
_decoder = msgspec.json.Decoder(ChunkFields)


@mypyc_attr(acyclic=True)
class Progress:
    """Events of one answer so far, of all its leases. `hides_ids`: hetlb asked for token ids, the client not.

    `texts` holds the text of each event as in its JSON, with the quote behind it, `ids` its token ids as a
    JSON list; b"" in `ids` where not every event has some. `prompt_ids` are those of the prompt, a JSON list.
    """

    __slots__ = (
        "_beginning", "_ids_last", "_last", "_middle", "ahead", "created", "finish", "hides_ids", "id",
        "ids", "in_block", "model", "plain_text", "prompt_ids", "role_sent", "texts", "usable",
    )  # fmt: skip

    def __init__(self, hides_ids: bool) -> None:
        self.hides_ids = hides_ids
        self.texts = bytearray()
        self.ids = bytearray()
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
        #: False once something came of which no continuation is known.
        self.usable = True
        #: Text that the client has beyond `texts`: a lease is about to say it again.
        self.ahead = ""
        #: Shape of events of text: what stands before the text, behind it, and the last one seen.
        self._beginning = self._middle = self._last = b""
        self._ids_last = False

    # --- for every token ---

    def take_chunks(self, chunks: bytes) -> tuple[bytes, int]:
        """Pass on a read that is nothing but whole chunks, each an event of text: it, and their number.

        (b"", 0) means that it takes a closer look; nothing was kept then.
        """
        beginning, middle, texts, ids = self._beginning, self._middle, self.texts, self.ids
        start, width, length = len(beginning), len(middle), len(chunks)
        had_texts, had_ids = len(texts), len(ids)
        events, end = 0, 0
        out = b""
        while end < length:
            begin = end
            line_end = chunks.find(b"\r\n", begin, begin + 5)
            size = CHUNK_SIZES.get(chunks[begin:line_end])
            at = line_end + 2 + start
            if size is None or chunks[line_end + 2 : at] != beginning:
                break
            end = line_end + size + 4
            if self._ids_last:
                ids_at = chunks.rfind(b"[", at, end)
                ids_end = end - len(_ENDING)
                if chunks[ids_end - 1 : end] != _LIST_ENDING:
                    break
            else:
                ids_at = end
            close = ids_at - width
            if close < at or chunks[close:ids_at] != middle:
                break
            text = chunks[at:close]
            if text.find(b'":') >= 0:  # more than one string: another event, or another part of it
                break
            texts += text
            texts += b'"'
            events += 1
            if self._ids_last:
                ids += chunks[ids_at:ids_end]
                if self.hides_ids:
                    tail = end - ids_at
                    if tail >= len(_TAILS) or not _TAILS[tail]:
                        break
                    out += chunks[begin:ids_at] + _TAILS[tail]
            if end == length:
                return (out if self.hides_ids and self._ids_last else chunks), events
        del texts[had_texts:]
        del ids[had_ids:]
        return b"", 0

    # --- a closer look ---

    def take(self, event: bytes) -> bytes:
        """Keep what one whole event says, without its end; returns what goes on of it."""
        self._last = b""
        if not self.usable:
            return event
        try:
            chunk = _decoder.decode(event[6:] if event[:6] == b"data: " else b"")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.spoil()
            return event
        if not chunk.choices:
            return event
        choice, delta = chunk.choices[0], chunk.choices[0].delta
        if len(chunk.choices) != 1 or bytes(choice.logprobs) not in (b"", b"null"):
            self.spoil()
            return event
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
                return event
        prompt = bytes(chunk.prompt_token_ids or choice.prompt_token_ids)
        if prompt[:1] == b"[" and len(prompt) <= _MAX_PROMPT_IDS:
            self.prompt_ids = prompt
        self.plain_text = self.plain_text and not reasons
        self.finish = choice.finish_reason
        given = bytes(choice.token_ids)
        if text or reasons or given[:1] == b"[" or (self.finish is None and not role):
            self.in_block = reasons
            self.keep(text or "", given)
        if text and self.finish is None and not reasons:
            self._last = event
        return _IDS.sub(rb'"\1":null', event) if self.hides_ids else event

    def learn(self) -> bool:
        """Take the shape of the next events from the last one; True if they need no closer look."""
        last, self._last = self._last, b""
        if not last:
            return False
        found = _SHAPE.fullmatch(last)
        if found is None or len(found[1]) > _MAX_BEGINNING:
            return False
        self._beginning, rest = found[1], found[2]
        self._ids_last = rest[-4:] == b"]}]}"
        ids_at = rest.rfind(b"[", 0, -4)
        self._middle = rest[:ids_at] if self._ids_last else rest + b"\n\n\r\n"
        return True

    def named(self, id: str | None, created: int | None, model: str | None) -> None:
        """Note what the client knows the answer by."""
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

    def forget(self) -> None:
        """Begin anew: no token stands."""
        self.texts, self.ids, self.ahead = bytearray(), bytearray(), ""

    def spoil(self) -> None:
        """Something came of which no continuation is known: forget all of it."""
        self.usable = False
        self.forget()
        self.prompt_ids = self._last = b""
