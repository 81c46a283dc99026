"""Clients' own SDKs get the same answers from an engine and through hetlb: every case is asked of both.

Streams also by two engines, of which one is lost in the middle. `/v1/messages` and `/v1/responses` are
answered with what a real vLLM sent (`tests/vllm/data`).

openai and curl are at hand in development; `make test-sdks` brings anthropic, litellm and langchain-openai.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import HANG_S
from proxy.cutter import Cut, Cutter
from proxy.upstreams import Upstream, Visit

import hetlb.tools.demo
from hetlb.tools.loadtest.fleet_admin import fleet_admin
from hetlb.tools.loadtest.processes import helper_processes

pytestmark = pytest.mark.filterwarnings("default")  # of the SDKs

MODEL = "tiny"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": SCHEMA}}
USER: list[Any] = [{"role": "user", "content": "What is the weather like?"}]
#: Texts of the recorded answers.
MESSAGE_TEXT, RESPONSE_TEXT = "futeanfuteanfutean", " brisbreng pumfeengfarsyn"
RECORDINGS = Path(__file__).parents[1] / "vllm" / "data"
WORDS = " t0 t1 t2 t3 t4 t5 t6 t7"
#: Fields that differ between any two answers. vLLM puts the fingerprint of a stream on the event with usage,
#: which hetlb asks for and keeps from clients that did not.
VARIES = {
    "id", "_request_id", "call_id", "item_id", "tool_call_id", "created", "created_at", "completed_at",
    "signature", "system_fingerprint",
}  # fmt: skip


class Urls(NamedTuple):
    engine: str
    proxy: str


async def up(admin_url: str) -> None:
    """Wait until the proxy has heard of its engine: it may listen before."""
    async with fleet_admin(admin_url) as admin:
        await admin.idle()


@pytest.fixture(scope="module")
def urls() -> Iterator[Urls]:
    """An engine, and hetlb in front of it."""
    profile = Path(hetlb.tools.demo.__file__).parent / "fast.yaml"
    with helper_processes() as helpers:
        engine = helpers.start(
            "engine", "engine", "--profile", str(profile), "--port", "0", "--served-model-name", MODEL,
            "--time-scale", "0.01",
        )  # fmt: skip
        asyncio.run(engine.ready())
        proxy = helpers.start(
            "proxy", "serve", "--instance", engine.urls[0], "--port", "0", "--admin-port", "0"
        )
        asyncio.run(proxy.ready())
        asyncio.run(up(proxy.urls[1]))
        yield Urls(engine.urls[0], proxy.urls[0])


async def recorded(visit: Visit) -> None:
    """Answer as the recorded vLLM did."""
    _, path, _ = visit.head.decode("latin-1").split(" ", 2)
    streamed = "stream" if json.loads(visit.body or b"{}").get("stream") else "plain"
    name = {
        "/v1/messages": f"messages-{streamed}",
        "/v1/messages/count_tokens": "messages-count-tokens",
        "/v1/responses": f"responses-{streamed}",
        "/v1/models": "get-v1-models",
        "/metrics": "metrics-idle",
        "/health": "get-health",
        "/version": "get-version",
    }[path]
    visit.send((RECORDINGS / f"{name}.http").read_bytes())


@pytest.fixture(scope="module")
def recordings() -> Iterator[Urls]:
    """The recorded engine, and hetlb in front of it."""
    engine = Upstream(recorded)
    with running_loop() as loop, helper_processes() as helpers:
        asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result(HANG_S)
        proxy = helpers.start("proxy", "serve", "--instance", engine.url, "--port", "0", "--admin-port", "0")
        asyncio.run(proxy.ready())
        asyncio.run(up(proxy.urls[1]))
        yield Urls(engine.url, proxy.urls[0])
        asyncio.run_coroutine_threadsafe(engine.__aexit__(), loop).result(HANG_S)


class Lost(NamedTuple):
    """hetlb in front of an engine by two wires, which are cut as `cuts` says."""

    url: str
    cuts: list[Cut]
    wires: list[Cutter]

    @property
    def runs(self) -> int:
        """Requests that the engine got."""
        return sum(len(each.bodies) for each in self.wires)


@contextlib.contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def lost(urls: Urls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lost]:
    cuts: list[Cut] = []
    wires = [Cutter(int(urls.engine.rpartition(":")[2]), cuts) for _ in range(2)]
    with running_loop() as loop, helper_processes() as helpers:

        def run(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result(HANG_S)

        for wire in wires:
            run(wire.__aenter__())
        path = tmp_path_factory.mktemp("lost") / "fleet.yaml"
        fleet = {
            "version": 1, "listen": {"port": 0}, "admin": {"port": 0}, "proxy": {"resume": "ids"},
            "models": [{"name": MODEL, "instances": [{"url": wire.url} for wire in wires]}],
        }  # fmt: skip
        path.write_text(json.dumps(fleet))
        proxy = helpers.start("proxy", "serve", "--config", str(path))
        asyncio.run(proxy.ready())
        asyncio.run(up(proxy.urls[1]))
        yield Lost(proxy.urls[0], cuts, wires)
        for wire in wires:
            run(wire.__aexit__())


#: Clients of the test that runs.
_clients: list[Any] = []


def closed_later(client: Any) -> Any:
    """A client that is closed after the test: the collector would find its sockets in another one."""
    _clients.append(client)
    return client


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _clients:
        _clients.pop().close()


def plain(answer: Any) -> Any:
    """An SDK's object as JSON without what differs between any two answers."""
    if hasattr(answer, "model_dump"):
        answer = answer.model_dump()
    if isinstance(answer, dict):
        return {key: plain(value) for key, value in answer.items() if key not in VARIES}
    if isinstance(answer, list | tuple):
        return [plain(each) for each in answer]
    return answer


def sdk(name: str) -> Any:
    return pytest.importorskip(name, reason="brought by make test-sdks")


# --- openai ------------------------------------------------------------------------------------------------


def openai_client(url: str) -> Any:
    return closed_later(sdk("openai").OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))


def openai_chat(url: str) -> Any:
    answer = openai_client(url).chat.completions.create(model=MODEL, messages=USER, max_tokens=8)
    assert answer.choices[0].message.content == WORDS
    return answer


def openai_chat_stream(url: str) -> Any:
    chunks = list(
        openai_client(url).chat.completions.create(
            model=MODEL, messages=USER, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == WORDS
    assert chunks[-1].usage.completion_tokens == 8
    return chunks


def openai_chat_stream_without_usage(url: str) -> Any:
    chunks = list(
        openai_client(url).chat.completions.create(model=MODEL, messages=USER, max_tokens=8, stream=True)
    )
    assert all(each.usage is None for each in chunks)
    return chunks


def openai_tools(url: str) -> Any:
    """The whole loop of an agent."""
    client, messages = openai_client(url), [*USER]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    [call] = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"city": "t0", "days": 0}
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    last = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=8)
    assert last.choices[0].message.content == WORDS
    return [first, last]


def openai_tools_stream(url: str) -> Any:
    with openai_client(url).chat.completions.stream(model=MODEL, messages=USER, tools=[TOOL]) as stream:
        answer = stream.get_final_completion()
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "t0", "days": 0}
    return answer


def openai_reasoning(url: str) -> Any:
    answer = openai_client(url).chat.completions.create(
        model=MODEL, messages=USER, max_tokens=16, reasoning_effort="medium"
    )
    assert answer.choices[0].message.reasoning == WORDS
    return answer


def openai_completion(url: str) -> Any:
    answer = openai_client(url).completions.create(model=MODEL, prompt=["a", "b"], max_tokens=8, n=2)
    assert [choice.text for choice in answer.choices] == [WORDS] * 4
    return answer


def openai_responses(url: str) -> Any:
    answer = openai_client(url).responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    assert answer.output_text == RESPONSE_TEXT
    return answer


def openai_responses_stream(url: str) -> Any:
    events = list(
        openai_client(url).responses.create(model=MODEL, input="Hello", max_output_tokens=8, stream=True)
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[-1].response.output_text == "".join(deltas)
    return events


def openai_embeddings(url: str) -> Any:
    answer = openai_client(url).embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
    assert [len(each.embedding) for each in answer.data] == [8, 8]
    return answer


def openai_models(url: str) -> Any:
    return [each.id for each in openai_client(url).models.list()]


def openai_unknown_model(url: str) -> Any:
    with pytest.raises(sdk("openai").NotFoundError) as error:
        openai_client(url).chat.completions.create(model="other", messages=USER)
    return error.value.status_code


def openai_wrong_value(url: str) -> Any:
    with pytest.raises(sdk("openai").BadRequestError) as error:
        openai_client(url).chat.completions.create(model=MODEL, messages=USER, temperature=9)
    return error.value.body


# --- anthropic ---------------------------------------------------------------------------------------------


def anthropic_client(url: str) -> Any:
    return closed_later(sdk("anthropic").Anthropic(base_url=url, api_key="none", max_retries=0))


def anthropic_message(url: str) -> Any:
    answer = anthropic_client(url).messages.create(
        model=MODEL, messages=USER, max_tokens=8, system="Be brief."
    )
    assert answer.content[0].text == MESSAGE_TEXT
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)
    return answer


def anthropic_stream(url: str) -> Any:
    with anthropic_client(url).messages.stream(model=MODEL, messages=USER, max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        answer = stream.get_final_message()
    assert text == MESSAGE_TEXT == answer.content[0].text
    assert answer.usage.output_tokens == 3
    return answer


def anthropic_count(url: str) -> Any:
    return anthropic_client(url).messages.count_tokens(model=MODEL, messages=USER)


# --- litellm -----------------------------------------------------------------------------------------------


def litellm_of(url: str, provider: str) -> Callable[..., Any]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched from elsewhere
    litellm = sdk("litellm")
    base = {"openai": f"{url}/v1", "anthropic": url}[provider]

    def call(**more: Any) -> Any:
        return litellm.completion(
            model=f"{provider}/{MODEL}", api_base=base, api_key="none", messages=USER, num_retries=0, **more
        )

    return call


def litellm_chat(url: str) -> Any:
    answer = litellm_of(url, "openai")(max_tokens=8)
    assert answer.choices[0].message.content == WORDS
    return answer


def litellm_stream(url: str) -> Any:
    chunks = list(litellm_of(url, "openai")(max_tokens=8, stream=True))
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == WORDS
    return chunks


def litellm_tools(url: str) -> Any:
    answer = litellm_of(url, "openai")(tools=[TOOL])
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    return answer


def litellm_messages(url: str) -> Any:
    answer = litellm_of(url, "anthropic")(max_tokens=8)
    assert answer.choices[0].message.content == MESSAGE_TEXT
    return answer


# --- langchain ---------------------------------------------------------------------------------------------


def langchain_model(url: str, **more: Any) -> Any:
    return sdk("langchain_openai").ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, **more
    )


def langchain_facts(answer: Any) -> Any:
    return [
        answer.content,
        plain(answer.tool_calls),
        answer.usage_metadata,
        answer.response_metadata["finish_reason"],
    ]


def langchain_invoke(url: str) -> Any:
    answer = langchain_model(url, max_tokens=8).invoke("Hello")
    assert answer.content == WORDS
    return langchain_facts(answer)


def langchain_stream(url: str) -> Any:
    chunks = list(langchain_model(url, max_tokens=8, stream_usage=True).stream("Hello"))
    assert "".join(each.content for each in chunks) == WORDS
    assert sum(each.usage_metadata["output_tokens"] for each in chunks if each.usage_metadata) == 8
    return [each.content for each in chunks]


def langchain_tools(url: str) -> Any:
    answer = langchain_model(url).bind_tools([TOOL]).invoke("Hello")
    assert answer.tool_calls[0]["args"] == {"city": "t0", "days": 0}
    return langchain_facts(answer)


# --- curl --------------------------------------------------------------------------------------------------


def curl(url: str, *arguments: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    return subprocess.run(
        ["curl", "--silent", "--show-error", "--no-buffer", *arguments, url],
        check=True, capture_output=True, text=True, timeout=HANG_S,
    ).stdout  # fmt: skip


def curl_json(url: str, body: dict[str, Any]) -> str:
    return curl(url, "-H", "Content-Type: application/json", "-d", json.dumps(body))


def curl_chat(url: str) -> Any:
    answer = json.loads(
        curl_json(f"{url}/v1/chat/completions", {"model": MODEL, "messages": USER, "max_tokens": 8})
    )
    assert answer["choices"][0]["message"]["content"] == WORDS
    return answer


def curl_stream(url: str) -> Any:
    body = {"model": MODEL, "messages": USER, "max_tokens": 8, "stream": True}
    *events, end = curl_json(f"{url}/v1/chat/completions", body).strip().split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def curl_messages_stream(url: str) -> Any:
    body = {"model": MODEL, "messages": USER, "max_tokens": 8, "stream": True}
    blocks = curl_json(f"{url}/v1/messages", body).strip().split("\n\n")
    assert blocks[-1].startswith("event: message_stop\n")
    return [json.loads(block.partition("data: ")[2]) for block in blocks]


CASES: list[Callable[[str], Any]] = [
    openai_chat, openai_chat_stream, openai_chat_stream_without_usage, openai_tools, openai_tools_stream,
    openai_reasoning, openai_completion, openai_embeddings, openai_models, openai_unknown_model,
    openai_wrong_value,
    litellm_chat, litellm_stream, litellm_tools,
    langchain_invoke, langchain_stream, langchain_tools,
    curl_chat, curl_stream,
]  # fmt: skip
RECORDED = [
    openai_responses, openai_responses_stream, anthropic_message, anthropic_stream, anthropic_count,
    litellm_messages, curl_messages_stream,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_answer_is_the_same_from_the_engine_and_through_hetlb(
    case: Callable[[str], Any], urls: Urls
) -> None:
    assert plain(case(urls.engine)) == plain(case(urls.proxy))


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.__name__)
def test_a_recorded_answer_is_the_same_through_hetlb(case: Callable[[str], Any], recordings: Urls) -> None:
    assert plain(case(recordings.engine)) == plain(case(recordings.proxy))


RESUMED = [
    openai_chat, openai_chat_stream, openai_chat_stream_without_usage, litellm_stream, langchain_invoke,
    langchain_stream, curl_chat, curl_stream,
]  # fmt: skip


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.__name__)
def test_the_answer_is_the_same_where_an_engine_is_lost_in_the_middle(
    case: Callable[[str], Any], how: str, urls: Urls, lost: Lost
) -> None:
    whole, before = plain(case(urls.engine)), lost.runs
    lost.cuts.append(Cut(1500 if "stream" in case.__name__ else 300, how))
    assert plain(case(lost.url)) == whole
    assert (lost.runs - before, lost.cuts) == (2, [])


def test_the_sdk_of_anthropic_is_told_of_an_engine_that_is_lost(recordings: Urls) -> None:
    """An answer that is not resumed ends with an error event, and not as if it were whole."""
    broken_off = sdk("anthropic").APIError  # before anything is open: the test is skipped without it
    cuts: list[Cut] = []
    wire = Cutter(int(recordings.engine.rpartition(":")[2]), cuts)
    with running_loop() as loop, helper_processes() as helpers:
        asyncio.run_coroutine_threadsafe(wire.__aenter__(), loop).result(HANG_S)
        proxy = helpers.start("proxy", "serve", "--instance", wire.url, "--port", "0", "--admin-port", "0")
        asyncio.run(proxy.ready())
        asyncio.run(up(proxy.urls[1]))
        cuts.append(Cut(900, "rst"))
        with pytest.raises(broken_off, match="The answer broke off"):
            anthropic_stream(proxy.urls[0])
        assert (len(wire.bodies), cuts) == (1, [])
        asyncio.run_coroutine_threadsafe(wire.__aexit__(), loop).result(HANG_S)


@pytest.mark.skipif("HETLB_ALL_SDKS" not in os.environ, reason="make test-sdks sets it")
def test_no_sdk_is_missing() -> None:
    for name in ("openai", "anthropic", "litellm", "langchain_openai"):
        importlib.import_module(name)
