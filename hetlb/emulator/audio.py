"""`POST /v1/audio/transcriptions` and `translations`: a form with a recording, answered as vLLM 0.32 does.

Nothing is heard: the length of the recording decides how long it is read and how many words come back.
"""

from __future__ import annotations

import io
import math
import time
import wave
from email.message import Message as Part
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

import msgspec

from hetlb.emulator.fields import ApiError, bad_type, bad_value, read_bool, read_int
from hetlb.emulator.replies import DONE, Out, chunk, words
from hetlb.emulator.requests import Reader
from hetlb.emulator.runner import Choice

#: Whisper's: encoder positions of 30 s, and tokens before the text.
TOKENS_PER_SECOND = 50
START_TOKENS = 4
#: Words of speech: three tokens a second.
WORDS_PER_SECOND = 3
#: Of what is not WAV: 16 kHz, 16 bits, mono.
_BYTES_PER_SECOND = 32_000

_encode = msgspec.json.encode


class Transcription(msgspec.Struct, kw_only=True):
    """One checked request."""

    model: str
    seconds: float
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    verbose: bool
    language: str | None
    stream: bool
    include_usage: bool


def read_transcription(body: bytes, content_type: str, reader: Reader) -> Transcription:
    """The form of a request. Raises `ApiError`."""
    fields, recording = _form(body, content_type)
    if recording is None:
        raise bad_type("missing", "body.file", "Field required", fields)
    response_format = fields.get("response_format", "json")
    if response_format not in ("json", "text", "verbose_json"):
        raise bad_value("Currently only support response_format: `text`, `json` or `verbose_json`")
    stream, include_usage = read_bool(fields, "stream"), read_bool(fields, "stream_include_usage")
    if include_usage and not stream:
        raise bad_value("Stream options can only be defined when `stream=True`.", "stream_include_usage")
    if stream and response_format == "verbose_json":
        raise bad_value("verbose_json format doesn't support streaming case")
    model = reader.model(fields)
    seconds = _seconds(recording)
    # Whisper hears 30 s at a time and refuses no length: what is beyond the context is cut here.
    longest = reader.max_model_len
    prompt_tokens = min(START_TOKENS + math.ceil(seconds * TOKENS_PER_SECOND), longest - longest // 4)
    wanted = max(1, round(seconds * WORDS_PER_SECOND))
    limit = longest - prompt_tokens
    if (asked := read_int(fields, "max_completion_tokens", None)) is not None:
        limit = max(1, min(limit, asked))
    return Transcription(
        model=model,
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=min(limit, wanted),
        finish_reason="length" if limit < wanted else "stop",
        verbose=response_format == "verbose_json",
        language=fields.get("language"),
        stream=stream,
        include_usage=include_usage,
    )


def _form(body: bytes, content_type: str) -> tuple[dict[str, Any], bytes | None]:
    """Text fields, and the content of the part `file`."""
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise bad_type("missing", "body.file", "Field required", None)
    head = f"content-type: {content_type}\r\n\r\n".encode("latin-1")
    form = BytesParser(policy=HTTP).parsebytes(head + body)
    if not form.is_multipart():
        raise ApiError(400, "There was an error parsing the body", "Bad Request")
    fields: dict[str, Any] = {}
    recording: bytes | None = None
    for part in form.iter_parts():
        name, content = part.get_param("name", header="content-disposition"), _content(part)
        if name == "file":
            recording = content
        elif isinstance(name, str):
            fields[name] = content.decode("utf-8", "replace")
    return fields, recording


def _content(part: Part) -> bytes:
    content = part.get_payload(decode=True)
    return content if isinstance(content, bytes) else b""


def _seconds(recording: bytes) -> float:
    """Duration of a recording: by its head if it is WAV, else by its size."""
    try:
        with wave.open(io.BytesIO(recording)) as sound:
            return float(sound.getnframes() / sound.getframerate())
    except (wave.Error, EOFError, ZeroDivisionError):
        return len(recording) / _BYTES_PER_SECOND


class TranscriptionReply(Choice):
    """One answer; it has one sequence, itself."""

    __slots__ = ("_created", "_id", "_out", "_request", "_sent", "_task")

    def __init__(self, out: Out, request: Transcription, task: str, request_id: str) -> None:
        super().__init__(request.prompt_tokens, request.output_tokens, request.finish_reason)
        self._out = out
        self._request = request
        self._task = task
        self._id = f"{'trsc' if task == 'transcription' else 'trsl'}-{request_id}"
        self._created = int(time.time())
        self._sent = 0

    def token(self) -> None:
        if self._request.stream:
            self._out.write(chunk(self._event({})))

    def finish(self) -> None:
        if not self._request.stream:
            self._out.respond(200, _encode(self._body()))
            return
        last = self._event({"finish_reason": self.finish_reason, "stop_reason": None})
        usage = b""
        if self._request.include_usage:
            tokens = {
                "prompt_tokens": self.prompt_tokens,
                "total_tokens": self.prompt_tokens + self.output_tokens,
                "completion_tokens": self.output_tokens,
            }
            usage = chunk(b"data: %b\n\n" % _encode({**self._head(), "choices": [], "usage": tokens}))
        self._out.write(chunk(last) + usage + DONE)
        self._out.done()

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": f"{self._task}.chunk",
            "created": self._created,
            "model": self._request.model,
        }

    def _event(self, end: dict[str, Any]) -> bytes:
        delta = {"content": f" t{self._sent}"}
        self._sent += 1
        return b"data: %b\n\n" % _encode({**self._head(), "choices": [{"delta": delta, **end}]})

    def _body(self) -> dict[str, Any]:
        text = words(self.output_tokens)
        if self._request.verbose:
            segment = {
                "id": 0, "avg_logprob": -0.5, "compression_ratio": 1.0, "end": self._request.seconds,
                "no_speech_prob": None, "seek": 0, "start": 0.0, "temperature": 0.0, "text": text,
                "tokens": list(range(self.output_tokens)),
            }  # fmt: skip
            return {
                "duration": self._request.seconds, "language": self._request.language or "en", "text": text,
                "segments": [segment], "words": None,
            }  # fmt: skip
        if self._task == "translation":
            return {"text": text}
        return {"text": text, "usage": {"type": "duration", "seconds": math.ceil(self._request.seconds)}}
