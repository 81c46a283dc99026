"""Endpoints of an engine, and their meaning to the scheduler."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """Kind of an endpoint for scheduling."""

    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    NO_OUTPUT = "no_output"
    AUDIO = "audio"
    PLAIN = "plain"
    REALTIME = "realtime"

    def __init__(self, name: str) -> None:
        #: True if the engine decodes for it.
        self.generates = name not in ("no_output", "plain", "realtime")
        #: True if the engine computes the answer; False if its server gives it alone.
        self.prompted = name not in ("plain", "realtime")


#: Paths that go to an engine, as vLLM 0.33 serves them (`tests/vllm/newest_facts.py` compares). Which of them
#: exist depends on the model.
ENDPOINTS: dict[str, Kind] = {
    "/v1/completions": Kind.COMPLETION,
    "/v1/completions/render": Kind.NO_OUTPUT,
    "/v1/completions/derender": Kind.PLAIN,
    "/v1/chat/completions": Kind.CHAT,
    "/v1/chat/completions/batch": Kind.CHAT,
    "/v1/chat/completions/render": Kind.NO_OUTPUT,
    "/v1/chat/completions/derender": Kind.PLAIN,
    "/v1/responses": Kind.RESPONSES,
    "/v1/responses/render": Kind.NO_OUTPUT,
    "/v1/messages": Kind.MESSAGES,
    "/v1/messages/count_tokens": Kind.NO_OUTPUT,
    "/v1/messages/render": Kind.NO_OUTPUT,
    "/v1/embeddings": Kind.NO_OUTPUT,
    "/v2/embed": Kind.NO_OUTPUT,
    "/v1/score": Kind.NO_OUTPUT,
    "/score": Kind.NO_OUTPUT,
    "/v1/rerank": Kind.NO_OUTPUT,
    "/v2/rerank": Kind.NO_OUTPUT,
    "/rerank": Kind.NO_OUTPUT,
    "/pooling": Kind.NO_OUTPUT,
    "/classify": Kind.NO_OUTPUT,
    "/generative_scoring": Kind.NO_OUTPUT,
    "/tokenize": Kind.PLAIN,
    "/detokenize": Kind.PLAIN,
    "/v1/audio/transcriptions": Kind.AUDIO,
    "/v1/audio/translations": Kind.AUDIO,
    "/v1/audio/speech": Kind.AUDIO,
    "/inference/v1/generate": Kind.COMPLETION,
    "/invocations": Kind.CHAT,
    "/v1/decisions": Kind.NO_OUTPUT,
    "/v1/systemone": Kind.NO_OUTPUT,
    "/cohere/v2/chat": Kind.MESSAGES,
    "/cohere/v2/chat/render": Kind.NO_OUTPUT,
}
#: The one path where a connection may become a WebSocket.
REALTIME_PATH = "/v1/realtime"
#: Beginning of the paths of answers that an engine keeps.
KEPT_PATHS = "/v1/responses/"
