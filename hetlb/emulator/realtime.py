"""`/v1/realtime` of vLLM 0.32: a WebSocket that takes recordings in pieces and gives their words.

The events and their errors are vLLM's (`vllm/entrypoints/speech_to_text/realtime`). Nothing is heard: as in
`emulator/audio.py` the length of a piece decides how long it is read and how many words come back.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from hetlb.emulator.audio import TOKENS_PER_SECOND, WORDS_PER_SECOND
from hetlb.emulator.data_parallel import EngineGroup
from hetlb.emulator.http import Connection
from hetlb.emulator.requests import Reader
from hetlb.emulator.runner import Choice
from hetlb.websocket import (
    CLOSE,
    NO_CODE,
    NORMAL,
    PING,
    PONG,
    TEXT,
    FrameReader,
    ProtocolError,
    accept_of,
    close_code,
    close_frame,
    frame,
)

#: uvicorn's defaults: the longest message, and how often a client is asked for a sign of life.
_MOST_MESSAGE: Final = 16 << 20
_PING_S: Final = 20.0
#: 16 kHz, 16 bits, mono.
_BYTES_PER_SECOND: Final = 32_000

_encode = msgspec.json.encode


class RealtimeSession:
    """One WebSocket."""

    def __init__(self, connection: Connection, engines: EngineGroup, reader: Reader, key: bytes) -> None:
        self._connection = connection
        self._engines = engines
        self._reader = reader
        self._ids = random.Random()
        self._frames = FrameReader(masked=True, most_kept=_MOST_MESSAGE, strict=True)
        self._model_known = False
        self._closed = False
        #: Bytes of the pieces that wait to be read; None is the end of a recording.
        self._pieces: deque[int | None] = deque()
        #: True between a commit and the end of its recording.
        self._generating = False
        self._choice: _Piece | None = None
        self._words = self._prompt_tokens = 0
        self._loop = asyncio.get_running_loop()
        connection.upgrade(self.receive, self._gone, accept_of(key))
        self._send({"type": "session.created", "id": f"sess-{self._id()}", "created": int(time.time())})
        self._pinger = self._loop.call_later(_PING_S, self._ping)

    # --- from the client ---

    def receive(self, data: bytes) -> None:
        """Take what the client sent."""
        try:
            for opcode, message in self._frames.feed(data):
                if self._closed:
                    return
                if opcode == TEXT:
                    self._event(message)
                elif opcode == PING:
                    self._connection.write(frame(PONG, message))
                elif opcode == CLOSE:
                    code = close_code(message)
                    self._close(NORMAL if code == NO_CODE else code, "")
        except ProtocolError as error:
            self._close(error.code, str(error))

    def _event(self, message: bytes) -> None:
        try:
            event = msgspec.json.decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._error("Invalid JSON", "invalid_json")
            return
        if not isinstance(event, dict):
            self._error(f"'{type(event).__name__}' object has no attribute 'get'", "processing_error")
            return
        kind = event.get("type")
        if kind == "session.update":
            self._update(event.get("model"))
        elif kind == "input_audio_buffer.append":
            self._append(event.get("audio"))
        elif kind == "input_audio_buffer.commit":
            self._commit(final=bool(event.get("final", False)))
        else:
            self._error(f"Unknown event type: {kind}", "unknown_event")

    def _update(self, model: Any) -> None:
        if model is None:
            self._error("Missing required field: model", "invalid_event")
        elif model not in self._reader.served:
            self._error(f"The model `{model}` does not exist.", "model_not_found")
        else:
            self._model_known = True

    def _append(self, audio: Any) -> None:
        try:
            size = len(base64.b64decode(audio))
        except (TypeError, ValueError, binascii.Error):
            size = 0
        if not size or size % 2:
            self._error("Invalid audio data", "invalid_audio")
            return
        self._pieces.append(size)
        self._read_next()

    def _commit(self, *, final: bool) -> None:
        if not self._model_known:
            text = "Model not validated. Make sure to validate the model by sending a session.update event."
            self._error(text, "model_not_validated")
        elif final:
            self._pieces.append(None)
            self._read_next()
        elif not self._generating:
            self._generating = True
            self._words = self._prompt_tokens = 0
            self._read_next()

    # --- generating ---

    def _read_next(self) -> None:
        """Have the engine read the next piece, or end the recording."""
        if not self._generating or self._choice is not None or not self._pieces:
            return
        size = self._pieces.popleft()
        if size is None:
            self._done()
            return
        seconds = size / _BYTES_PER_SECOND
        room = self._reader.max_model_len
        prompt_tokens = min(max(1, math.ceil(seconds * TOKENS_PER_SECOND)), room - room // 4)
        words = min(max(1, round(seconds * WORDS_PER_SECOND)), room - prompt_tokens)
        self._prompt_tokens += prompt_tokens
        self._choice = _Piece(prompt_tokens, words, self._word, self._piece_done)
        self._engines.submit([self._choice])

    def _word(self) -> None:
        self._send({"type": "transcription.delta", "delta": f" t{self._words}"})
        self._words += 1

    def _piece_done(self) -> None:
        self._choice = None
        self._read_next()

    def _done(self) -> None:
        """The recording has ended: its whole text, and what it cost."""
        self._generating = False
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "total_tokens": self._prompt_tokens + self._words,
            "completion_tokens": self._words,
            "prompt_tokens_details": None,
        }
        text = "".join(f" t{number}" for number in range(self._words))
        self._send({"type": "transcription.done", "text": text, "usage": usage})
        self._pieces.clear()  # as vLLM does

    # --- answering ---

    def _send(self, event: dict[str, Any]) -> None:
        if not self._closed:
            self._connection.write(frame(TEXT, _encode(event)))

    def _error(self, message: str, code: str) -> None:
        self._send({"type": "error", "error": message, "code": code})

    def _ping(self) -> None:
        self._connection.write(frame(PING, self._id()[:4].encode()))
        self._pinger = self._loop.call_later(_PING_S, self._ping)

    def _close(self, code: int, reason: str) -> None:
        if not self._closed:
            self._connection.write(close_frame(code, reason))
        self._gone()
        self._connection.done()

    def _gone(self) -> None:
        """The client left: what runs for it stops now."""
        self._closed = True
        self._pinger.cancel()
        choice, self._choice = self._choice, None
        if choice is not None:
            self._engines.abort([choice])

    def _id(self) -> str:
        return f"{self._ids.getrandbits(128):032x}"


class _Piece(Choice):
    """A piece of a recording: `word` is called for each of its tokens, `done` after the last."""

    __slots__ = ("_done", "_word")

    def __init__(
        self, prompt_tokens: int, output_tokens: int, word: Callable[[], None], done: Callable[[], None]
    ) -> None:
        super().__init__(prompt_tokens, output_tokens)
        self._word = word
        self._done = done

    def token(self) -> None:
        self._word()

    def finish(self) -> None:
        self._word()
        self._done()
