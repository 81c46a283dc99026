"""Answers to bodies that are drawn from vLLM's classes, cut behind each event: the same, or an error.

Emulated engines, and vLLM in float32: in bfloat16 a prefill rounds otherwise than the steps it stands for.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pair as real
import pytest
import pytest_asyncio
from emulator.conftest import make_profile
from engines import TINY_FAST, VENV_PYTHON, vllm_servers
from forks import answered
from options.resume.test_resume import Answer, ask, proxied
from proxy.conftest import start
from proxy.cutter import AFTER_HEAD, Cut, Cutter
from proxy.test_proxying import Start

from hetlb.balancer.core.facts import CapacityLearned
from hetlb.balancer.core.types import Capacity
from hetlb.tools.emulator import EmulatedEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]
__all__ = ["start"]
#: Tokens of a request: what a chat without a limit may fill.
MODEL_LEN = 96
#: Bodies for each engine, of which some are refused, and the answers of some draws differ; `BODIES=all`
#: in the environment takes five times as many.
ALL = os.environ.get("BODIES") == "all"
BODIES = {"emulated": 120, "vllm": 60} if ALL else {"emulated": 24, "vllm": 12}
#: Cuts of one fleet: instances that fail oftener would be ejected.
CUTS = 3


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    """Bodies that vLLM's classes take."""
    if not VENV_PYTHON.is_file():
        pytest.skip("there is no .venv-vllm: run tests/vllm/install.sh first")
    lines = answered("judge_bodies.py", "400", "11", "streams").splitlines()
    return [each for line in lines if (each := json.loads(line))["read"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a vLLM server."""
    real.make_models()
    float32 = dataclasses.replace(
        TINY_FAST, max_model_len=MODEL_LEN, served_model_name="m", extra_args=("--dtype", "float32")
    )
    with vllm_servers([float32], real.MODELS, tmp_path_factory.mktemp("vllm"), forked=True) as (running,):
        yield running.port


@pytest_asyncio.fixture(params=["emulated", "vllm"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, int]]:
    """The name of an engine and its port."""
    if request.param == "vllm":
        yield "vllm", request.getfixturevalue("server")
        return
    async with EmulatedEngine(
        make_profile(), time_scale=0.01, served_model_names=("m",), max_model_len=MODEL_LEN
    ) as running:
        yield "emulated", running.port


def told(answer: Answer) -> dict[str, Any]:
    """Everything that an answer says, but for names and times; text and token ids joined."""
    choices = [each["choices"][0] for each in answer.events if each.get("choices")]
    ids = [each["token_ids"] for each in choices if each.get("token_ids")]
    return {
        "text": answer.text,
        "finish": answer.finish,
        "stop": [each.get("stop_reason") for each in choices if each.get("finish_reason")],
        "done": answer.done,
        "usage": answer.usage[-1:],
        "counts": bool(answer.usage[1:]),
        "roles": answer.roles,
        "ids": [number for each in ids for number in each],
    }


async def test_an_answer_that_is_cut_anywhere_is_the_same_or_ends_with_an_error(
    start: Start, bodies: list[dict[str, Any]], engine: tuple[str, int]
) -> None:
    name, port = engine
    seen: Counter[str] = Counter()
    why: Counter[str] = Counter()
    wrong = []
    for each in bodies[: BODIES[name]]:
        asked, kind = json.loads(each["body"]), "chat" if "chat" in each["path"] else "completions"
        if name == "emulated":  # where its model ends, whatever its limit is
            asked["vllm_xargs"] = {"output_tokens": 1 + len(each["body"]) % 50}
            if asked.get("stop"):
                asked["stop"] = "x"  # it holds back nothing for longer ones
        whole, again = [await ask(f"http://127.0.0.1:{port}", kind, asked) for _ in range(2)]
        if whole.status != 200 or whole.failed:
            seen["refused"] += 1
            continue
        if told(whole) != told(again):
            seen["differs when asked again"] += 1
            continue
        seen["unlimited chats"] += kind == "chat" and each["read"]["max_tokens"] is None
        cuts = [Cut(AFTER_HEAD, "fin"), *(Cut(at, "rst", True) for at in range(1, len(whole.events) + 3))]
        for first in range(0, len(cuts), CUTS):
            todo: list[Cut] = []
            async with Cutter(port, todo) as one, Cutter(port, todo) as two:
                proxy = await proxied(start, one.url, two.url)
                for instance in proxy.scheduler.instances:
                    proxy.scheduling.change(CapacityLearned(instance.name, Capacity(max_model_len=MODEL_LEN)))
                for cut in cuts[first : first + CUTS]:
                    todo[:] = [cut]
                    got = await ask(f"http://127.0.0.1:{proxy.port}", kind, asked)
                    record = proxy.exchanges[-1]
                    if not got.done and record.not_resumed:
                        seen["not resumed"] += 1
                        why[record.not_resumed.partition(" - ")[0]] += 1
                        if asked.get("n") != 2 and not whole.text.startswith(got.text):
                            wrong.append((cut, asked, got.text, whole.text))
                    elif told(got) != told(whole):
                        wrong.append((cut, asked, told(got), told(whole), got.raw[-600:]))
                    else:
                        seen["same"] += 1
                        seen["resumed"] += record.resumed
    print(name, dict(seen), why.most_common())
    for case in wrong[:5]:
        print(case)
    assert not wrong, len(wrong)
    assert seen["resumed"] > (300 if ALL else 40), seen
    assert seen["unlimited chats"] > (5 if ALL else 0), seen
