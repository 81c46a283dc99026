"""The OpenAI API in front of toy stages, alone and behind `hetlb serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from helpers import HANG_S
from stage.rig import Rig, rig, until
from stage.toy import answer

from hetlb.balancer.config.fleet import load_fleet
from hetlb.cli.doctor import examine
from hetlb.tools.stage.openai_api import OpenAIServer
from hetlb.tools.stage.text import TextModel

ROOT = Path(__file__).parents[2]


class Api:
    """A client of the API."""

    def __init__(self, made: Rig, http: aiohttp.ClientSession, url: str) -> None:
        self.rig, self.http, self.url = made, http, url

    async def ask(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json={"model": "m", "temperature": 0, **body}) as reply:
            return reply.status, await reply.json()

    async def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        async with self.http.post(
            self.url + path, json={"model": "m", "temperature": 0, "stream": True, **body}
        ) as reply:
            assert reply.status == 200
            lines = [line.decode().strip() async for line in reply.content if line.strip()]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest_asyncio.fixture
async def api(folder: Path) -> AsyncIterator[Api]:
    async with rig(folder) as made:
        server = OpenAIServer(made.coordinator, TextModel(folder))
        await server.start()
        try:
            async with aiohttp.ClientSession() as http:
                yield Api(made, http, f"http://127.0.0.1:{server.port}")
        finally:
            await server.close()
        await made.idle()


async def test_completions_plain_and_streamed_are_the_same(api: Api) -> None:
    prompt = [10, 20, 30]
    right = answer(prompt, 20)
    _, plain = await api.ask("/v1/completions", prompt=prompt, max_tokens=20, return_token_ids=True)
    choice = plain["choices"][0]
    assert choice["token_ids"] == right
    assert choice["finish_reason"] == "length"
    assert plain["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
    events = await api.events(
        "/v1/completions",
        prompt=prompt, max_tokens=20, return_token_ids=True, stream_options={"include_usage": True},
    )  # fmt: skip
    assert events[-1]["usage"] == plain["usage"]
    choices = [event["choices"][0] for event in events[:-1]]
    assert [token for each in choices for token in each["token_ids"]] == right
    assert "".join(each["text"] for each in choices) == choice["text"]
    assert [each["finish_reason"] for each in choices] == [None] * 19 + ["length"]


async def test_several_prompts_and_answers(api: Api) -> None:
    _, reply = await api.ask(
        "/v1/completions", prompt=[[1], [2, 3]], n=2, max_tokens=4, return_token_ids=True
    )
    tokens = [choice["token_ids"] for choice in reply["choices"]]
    assert tokens == [answer([1], 4)] * 2 + [answer([2, 3], 4)] * 2
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    events = await api.events("/v1/completions", prompt=["ab", "c"], max_tokens=3)
    assert sorted({event["choices"][0]["index"] for event in events}) == [0, 1]


async def test_chat_uses_the_template(api: Api) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    text = TextModel(api.rig._folder)
    prompt = text.encode("user:hi;", add_special_tokens=False)
    _, reply = await api.ask(
        "/v1/chat/completions", messages=messages, max_completion_tokens=6, logprobs=True
    )
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    right = answer(prompt, 6)
    stream = text.stream(skip_special_tokens=True)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "".join(map(stream, right))}
    assert len(reply["choices"][0]["logprobs"]["content"]) == 6
    events = await api.events("/v1/chat/completions", messages=messages, max_tokens=6)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "does not exist"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": [999]}, 400, "token ids from 0 to"),
        ("/v1/completions", {"prompt": [True]}, 400, "Expected text, token ids"),
        ("/v1/completions", {"prompt": [{"a": 1}]}, 400, "Expected text, token ids"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 600}, 400, "maximum context length is 512"),
        ("/v1/completions", {"prompt": "x", "top_p": 1.5}, 400, "at `$.top_p`"),
        ("/v1/completions", {"prompt": "x", "n": 1000}, 400, "1 to 128 answers"),
        ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop cannot contain"),
        ("/v1/completions", {"prompt": "x", "stop": ["ab"] * 10_000}, 400, "stop must be at most"),
        (
            "/v1/completions",
            {"prompt": "x", "stop_token_ids": [*range(257)], "min_tokens": 4, "top_p": 0.9, "temperature": 1},
            400,
            "leave no token",
        ),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": []}, 400, "must not be empty"),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": [257]}, 400, "token ids from 0 to"),
        (
            "/v1/completions",
            {"prompt": "x", "truncate_prompt_tokens": 600, "max_tokens": None},
            400,
            "must be in [-1, 512]",
        ),
        ("/v1/nothing", {}, 404, "Not Found: POST /v1/nothing"),
        ("/v1/models", {}, 405, "Method Not Allowed"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "Expected token ids"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
        ("/v1/chat/completions", {"messages": []}, 400, "at least one message"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}], "tools": [1]},
            400,
            "tools is not supported",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "parts of text",
        ),
    ],
)
async def test_bad_requests_get_the_reason(
    api: Api, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    found, reply = await api.ask(path, **body)
    assert found == status, reply
    assert message in reply["error"]["message"]


async def test_biases_beyond_all_measure_are_cut(api: Api) -> None:
    body = {"prompt": [1, 2], "max_tokens": 4, "temperature": 0.01, "logit_bias": {"3": 1e308, "5": 1e308}}
    status, reply = await api.ask("/v1/completions", **body, return_token_ids=True)
    assert status == 200, reply
    assert set(reply["choices"][0]["token_ids"]) <= {3, 5}


async def test_allowed_tokens_and_truncated_prompts(api: Api) -> None:
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 6, "return_token_ids": True}
    _, reply = await api.ask("/v1/completions", **body, allowed_token_ids=[7, 8, 9])
    assert set(reply["choices"][0]["token_ids"]) <= {7, 8, 9}
    for more, kept in (
        ({"truncate_prompt_tokens": 2}, [3, 4]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [1, 2]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3, 4]),
    ):
        _, reply = await api.ask("/v1/completions", **body, **more)
        assert reply["choices"][0]["token_ids"] == answer(kept, 6)
        assert reply["usage"]["prompt_tokens"] == len(kept)
    long = {"prompt": [1] * 600, "max_tokens": 12, "truncate_prompt_tokens": -1}
    assert (await api.ask("/v1/completions", **long))[1]["usage"]["prompt_tokens"] == 500


async def test_a_request_that_cannot_be_computed_is_answered(api: Api) -> None:
    for stage in api.rig.stages.values():
        stage.runner.poison = 250
    for stream in (False, True):
        status, reply = await api.ask("/v1/completions", prompt=[250], stream=stream)
        assert (status, reply["error"]["type"]) == (400, "BadRequestError")
    assert (await api.ask("/v1/completions", prompt=[1], max_tokens=3))[0] == 200


async def test_a_client_that_leaves_frees_everything(api: Api) -> None:
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 400, "temperature": 0}
    for stream in (True, False):
        for stage in api.rig.stages.values():
            stage.runner.gate.set()
        asking = asyncio.create_task(
            api.http.post(f"{api.url}/v1/completions", json={**body, "stream": stream})
        )
        await until(lambda: len(api.rig.coordinator._sequences) == 1)
        await until(lambda: any(stage.pool.used for stage in api.rig.stages.values()))
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await asking).close()
        await api.rig.idle()


async def test_health_models_and_metrics(api: Api) -> None:
    async with api.http.get(f"{api.url}/health") as reply:
        assert reply.status == 200
    async with api.http.get(f"{api.url}/v1/models") as reply:
        card = (await reply.json())["data"][0]
        assert (card["id"], card["max_model_len"]) == ("m", 512)
    async with api.http.get(f"{api.url}/metrics") as reply:
        page = await reply.text()
    assert 'vllm:num_requests_running{model_name="m"} 0.0' in page
    assert 'hetlb_stage_up{stage="a"} 1.0' in page
    await api.rig.stages["a"].kill()
    await api.rig.stages["b"].kill()
    await until(lambda: not api.rig.coordinator.scheduler.passable)
    async with api.http.get(f"{api.url}/health") as reply:
        assert reply.status == 503
    assert (await api.ask("/v1/completions", prompt="x"))[0] == 503


async def test_requests_need_the_key_where_there_is_one(folder: Path) -> None:
    async with rig(folder, "ac") as made, aiohttp.ClientSession() as http:
        server = OpenAIServer(made.coordinator, TextModel(folder), api_key="secret")
        await server.start()
        url, body = f"http://127.0.0.1:{server.port}", {"model": "m", "prompt": [1], "max_tokens": 1}
        try:
            for sent, status in ((None, 401), ("Bearer wrong", 401), ("Bearer secret", 200)):
                headers = {} if sent is None else {"authorization": sent}
                async with http.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
                    assert reply.status == status
            async with http.get(f"{url}/metrics") as reply:
                assert reply.status == 200
        finally:
            await server.close()


async def started(line: str, *arguments: str) -> tuple[asyncio.subprocess.Process, list[str]]:
    """A command that runs, and the addresses in the line that says that it is ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hetlb", *arguments,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(HANG_S):
        said = (await process.stdout.readline()).decode()
    assert line in said
    return process, re.findall(r"http://[\d.:]+", said)


async def test_a_coordinator_and_serve_in_front_of_stages(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Rig(folder)
    processes: list[asyncio.subprocess.Process] = []
    try:
        for stage in made.stages.values():
            await stage.start()
        workers = [
            {"name": name, "url": f"http://127.0.0.1:{stage.port}"} for name, stage in made.stages.items()
        ]
        file, fleet = tmp_path / "stages.yaml", tmp_path / "fleet.yaml"

        def write(used: list[dict[str, str]]) -> None:
            table = {"version": 1, "model": "m", "folder": str(folder), "workers": used, "reconnect_s": 0.05}
            file.write_text(yaml.safe_dump(table))

        write([workers[0], workers[2]])
        coordinator, (engine,) = await started(
            "hetlb coordinator ready on", "stage", "--coordinate", str(file), "--port", "0"
        )
        processes.append(coordinator)
        listed = {"version": 1, "listen": {"port": 0}, "admin": {"port": 0}}
        models = [{"name": "m", "instances": [{"name": "stages", "url": engine}]}]
        fleet.write_text(yaml.safe_dump(listed | {"models": models}))
        checked = load_fleet(fleet)
        assert [each for each in await examine(checked) if not each.ok] == []
        proxy, (url, admin) = await started("hetlb ready on", "serve", "--config", str(fleet))
        processes.append(proxy)
        async with aiohttp.ClientSession() as http:
            api = Api(made, http, url)
            _, reply = await api.ask("/v1/completions", prompt=[7, 8], max_tokens=9, return_token_ids=True)
            assert reply["choices"][0]["token_ids"] == answer([7, 8], 9)
            events = await api.events("/v1/completions", prompt=[7, 8], max_tokens=9, return_token_ids=True)
            assert [event["choices"][0]["token_ids"][0] for event in events] == answer([7, 8], 9)
            write(workers)
            coordinator.send_signal(signal.SIGHUP)

            async def page() -> str:
                async with http.get(f"{engine}/metrics") as shown:
                    return await shown.text()

            async with asyncio.timeout(HANG_S):
                while (await page()).count("} 1.0", (await page()).index("hetlb_stage_up{")) < 4:
                    await asyncio.sleep(0.01)
            async with http.get(f"{admin}/v1/fleet") as shown:
                instance = (await shown.json())["models"][0]["instances"][0]
            assert instance["in_flight"] == instance["kv_reserved_tokens"] == instance["workload"] == 0
        await made.stages["b"].kill()
        async with asyncio.timeout(HANG_S):
            while not (wrong := [each for each in await examine(checked) if not each.ok]):
                await asyncio.sleep(0.01)
        assert [(each.name, each.found) for each in wrong] == [("stages of stages", "down: b")]
    finally:
        for process in reversed(processes):
            process.terminate()
            await process.wait()
        for stage in made.stages.values():
            await stage.kill()
