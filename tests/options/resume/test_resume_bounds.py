"""What a continuation may take, keep and decide: limits, hostile engines, notices, fields of a body."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from emulator.conftest import make_profile
from helpers import turns_are_short, turns_until
from options.resume.test_resume import ask, body, proxied, resumed, same
from proxy.cutter import Cut, Cutter
from proxy.test_proxying import Start
from proxy.upstreams import DONE, LAST, SSE_HEAD, Upstream, Visit, chunk

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.facts import AdminStateSet, CapacityLearned
from hetlb.balancer.core.types import AdminState, Capacity
from hetlb.balancer.exchange.exchange import EngineRequest
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import RequestHead
from hetlb.balancer.telemetry.access_log import keyvalue_line
from hetlb.errors import ConfigError
from hetlb.options.resume.continuation import Continuation
from hetlb.options.resume.progress import Kept, Progress
from hetlb.options.resume.resume_fields import read_asked
from hetlb.tools.emulator import EmulatedEngine

MODEL_LEN = 512
MIB = 1 << 20


def event(text: str, ids: list[int] | str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": ids} | more
    raw = json.dumps({"id": "c", "created": 1, "model": "m", "choices": [choice]}, separators=(",", ":"))
    return b"data: " + raw.encode() + b"\n\n"


def thought(text: str, ids: list[int]) -> bytes:
    choice = {"index": 0, "delta": {"reasoning": text}, "finish_reason": None, "token_ids": ids}
    return b"data: " + json.dumps({"id": "c", "created": 1, "choices": [choice]}).encode() + b"\n\n"


def said(text: str, ids: list[int]) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "token_ids": ids}
    return b"data: " + json.dumps({"id": "c", "created": 1, "choices": [choice]}).encode() + b"\n\n"


def continuation(asked: dict[str, Any], *, longest: int = MODEL_LEN, chat: bool = False) -> Continuation:
    outgoing = EngineRequest(RequestHead(), json.dumps(asked).encode(), "label")
    made = Continuation(
        Kind.CHAT if chat else Kind.COMPLETION,
        outgoing,
        Kept(),
        streamed=True,
        asks_ids=True,
        hides_usage=True,
    )
    assert made.dispatched(gives_ids=True, max_model_len=longest)
    return made


def fed(rest: Continuation, *events: bytes) -> Progress:
    rest.stream(False)
    assert rest.progress is not None, rest.why
    for each in events:
        rest.progress.add(each)
    return rest.progress


# --- the limit ---


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("limit", ["none", "null"])
async def test_without_a_limit_an_answer_is_as_long_as_from_one_engine(
    start: Start, kind: str, limit: str
) -> None:
    async with EmulatedEngine(
        make_profile(), time_scale=0.01, served_model_names=("m",), max_model_len=MODEL_LEN
    ) as engine:
        asked = body(kind, True, vllm_xargs={"output_tokens": 30})
        if limit == "null":
            asked["max_tokens"] = None
        else:
            del asked["max_tokens"]
        whole = await ask(engine.url, kind, asked)
        assert whole.finish
        size = len(whole.raw)
        for after in range(300, size + 300, size // 30):  # every token
            cuts = [Cut(after, "rst")]
            async with Cutter(int(engine.url.rpartition(":")[2]), cuts) as wire:
                proxy = await proxied(start, wire.url, wire.url)
                for each in proxy.scheduler.instances:
                    proxy.scheduling.change(CapacityLearned(each.name, Capacity(max_model_len=MODEL_LEN)))
                got = await ask(f"http://127.0.0.1:{proxy.port}", kind, asked)
                await proxy.settled()
            same(got, whole)
            for second in wire.bodies[1:]:
                fields = json.loads(second.partition(b"\r\n\r\n")[2])
                if "prompt" in fields and isinstance(fields["prompt"], list):
                    assert isinstance(fields["max_tokens"], int)


@pytest.mark.parametrize(("kind", "stated"), [("completions", 400), ("chat", 400), ("chat", None)])
@pytest.mark.parametrize("third", [True, False], ids=["a third", "two alone"])
@pytest.mark.parametrize("fits", [True, False], ids=["fits", "does not fit"])
async def test_the_rest_at_an_engine_with_less_room(
    start: Start, kind: str, stated: int | None, third: bool, fits: bool
) -> None:
    """It is asked for what it holds, and its `length` is no end of the answer."""
    async with contextlib.AsyncExitStack() as stack:

        async def emulated(longest: int) -> EmulatedEngine:
            made = EmulatedEngine(
                make_profile(), time_scale=0.01, served_model_names=("m",), max_model_len=longest
            )
            return await stack.enter_async_context(made)

        large = await emulated(MODEL_LEN)
        asked = body(kind, True, vllm_xargs={"output_tokens": 60}, stream_options={"include_usage": True})
        asked["max_tokens"] = stated
        whole = await ask(large.url, kind, asked)
        [usage] = whole.usage
        assert (usage["completion_tokens"], whole.finish) == (60, ["stop"])
        room = usage["prompt_tokens"] + (70 if fits else 40)
        small = await emulated(room)
        wire = await stack.enter_async_context(Cutter(large.port, [Cut(5000, "rst")]))
        urls = [wire.url, small.url, *([large.url] if third else [])]
        proxy = await proxied(start, *urls)
        for each, longest in zip(proxy.scheduler.instances, (MODEL_LEN, room, MODEL_LEN), strict=False):
            proxy.scheduling.change(CapacityLearned(each.name, Capacity(max_model_len=longest)))
        asking = asyncio.create_task(ask(f"http://127.0.0.1:{proxy.port}", kind, asked))
        await turns_until(lambda: bool(wire.bodies))
        proxy.scheduling.change(AdminStateSet("i0", AdminState.DRAIN))
        got = await asking
        await proxy.settled()
        record = proxy.exchanges[-1]
    if fits or third:
        same(got, whole)
        assert record.resumed == (1 if fits or stated else 2)  # with a limit it goes where that fits
    else:
        assert (got.failed, got.finish) == (True, [])


def test_the_limit_is_what_the_first_engine_would_have_taken() -> None:
    first = event("a", [7], prompt_token_ids=[1, 2, 3])
    for stated, most in ((None, 16), (20, 20), (10_000, MODEL_LEN - 3)):
        rest = continuation({"prompt": "abc", "max_tokens": stated, "temperature": 0})
        fed(rest, first, event("b", [8]))
        draft = rest.draft()
        assert draft is not None
        assert json.loads(draft.body)["max_tokens"] == most - 2
    rest = continuation({"prompt": "abc", "temperature": 0}, longest=0)
    fed(rest, first)
    draft = rest.draft()
    assert draft is not None
    assert json.loads(draft.body)["max_tokens"] == 15  # vLLM's own limit of a completion


def test_a_chat_without_a_limit_needs_the_engine_s() -> None:
    rest = continuation({"messages": [{"role": "user", "content": "x"}]}, longest=0, chat=True)
    rest.stream(False)
    assert rest.progress is None
    assert "max_model_len" in rest.why


# --- fields ---


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ('"max_tokens": "100"', "max_tokens"), ('"max_tokens": 100.5', "max_tokens"), ('"x": 1', "`x`"),
        ('"temperature": 1e999', "temperature"), ('"seed": 1', "seed"), ('"bad_words": ["a"]', "bad_words"),
        ('"logit_bias": {"5": "1"}', "logit_bias"), ('"stop_token_ids": [-1]', "stop_token_ids"),
        ('"prompt_logprobs": 0', "prompt_logprobs"), ('"watermarking": true', "watermarking"),
        ('"stream_options": {"x": 1}', "stream_options"), ('"min_tokens": -1', "min_tokens"),
    ],
)  # fmt: skip
def test_a_field_that_is_unknown_or_odd_is_said_and_not_resumed(more: str, why: str) -> None:
    for head in ('"prompt": "x"', '"messages": [{"role": "user", "content": "x"}]'):
        found = read_asked(f"{{{head}, {more}}}".encode(), chat="messages" in head)
        assert isinstance(found, str)
        assert why in found


async def test_why_an_answer_was_not_resumed_is_in_the_record(start: Start) -> None:
    async with EmulatedEngine(make_profile(), time_scale=0.01, served_model_names=("m",)) as engine:
        asked = body("completions", True, unheard_of=1)
        _, _, proxy = await resumed(start, engine, "completions", asked, [Cut(3000, "fin")])
    assert "unheard_of" in proxy.exchanges[-1].not_resumed


def test_resume_by_text_is_refused_with_what_to_use(tmp_path: Any) -> None:
    path = tmp_path / "fleet.yaml"
    text = "version: 1\nproxy: {resume: true}\nmodels:\n  - name: m\n    resume: true\n"
    text += "    classes: {a: {resume: true}}\n    instances: [{name: i, url: 'http://127.0.0.1:1'}]\n"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_fleet(path)
    lines = str(caught.value).splitlines()
    for key in ("proxy.resume", "models[0].resume", "models[0].classes.a.resume"):
        assert any(f"{key}: expected ids or false, got true" in line for line in lines)


# --- reasoning ---


def test_reasoning_is_not_said_again() -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100, "temperature": 0}
    first = b'"prompt_token_ids":[1,2],"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]'
    role = b'data: {"id":"c","created":1,%b}\n\n' % first
    end = said("", [9])  # `</think>`
    for events in ((thought("a", [5]),), (thought("a", [5]), end), (thought("a", [5]), end, said("", [10]))):
        rest = continuation(asked, chat=True)
        fed(rest, role, *events)
        assert rest.draft() is None
        assert "reasoning" in rest.why
    rest = continuation(asked, chat=True)
    fed(rest, role, thought("a", [5]), end, said("x", [10]))
    draft = rest.draft()
    assert draft is not None
    assert json.loads(draft.body)["prompt"] == [1, 2, 5, 9, 10]


@pytest.mark.parametrize(
    ("events", "ids", "ahead"),
    [
        # Several ids in an event: the last ones may be the first part of a character.
        ((("ab", [7, 8]),), [], "ab"),
        ((("ab", [7, 8]), ("c", [9])), [7, 8, 9], ""),
        ((("ab", [7, 8]), ("\u00e9", [9]), ("d", [10, 11])), [7, 8, 9], "d"),
        ((("a", [7]), ("bc", [8, 9]), ("\u4f60\u597d", [10, 11])), [7], "bc\u4f60\u597d"),
        ((("a", [7]), ("", [8])), [7], ""),
    ],
)
def test_the_rest_begins_behind_a_whole_character(
    events: tuple[tuple[str, list[int]], ...], ids: list[int], ahead: str
) -> None:
    for temperature in (0, 1):
        rest = continuation({"prompt": [1], "max_tokens": 20, "temperature": temperature})
        fed(rest, *(event(text, given) for text, given in events))
        draft = rest.draft()
        if temperature and ahead:
            assert draft is None
            assert "another draw" in rest.why
            continue
        assert draft is not None
        assert (json.loads(draft.body)["prompt"], draft.ahead) == ([1, *ids], ahead)


async def test_an_engine_that_gives_up_and_ends_is_lost(start: Start) -> None:
    """`[DONE]` behind `finish_reason: abort` is no end of the answer."""

    async def give_up(visit: Visit) -> None:
        first = json.loads(visit.body)["prompt"] != [1, 2, 5]
        begun = chunk(event("a", [5], prompt_token_ids=[1, 2])) if first else b""
        visit.send(SSE_HEAD + begun + chunk(event("", [6], "abort") + DONE) + LAST)

    async with Upstream(give_up) as one, Upstream(give_up) as two:
        proxy = await proxied(start, one.url, two.url)
        got = await ask(f"http://127.0.0.1:{proxy.port}", "completions", body("completions", True))
        assert (got.status, got.text, got.finish, got.done) == (200, "a", ["abort"], True)
        assert [each[0] for each in proxy.ended] == ["broken_stream"]


def test_a_read_may_end_between_cr_and_lf() -> None:
    rest = continuation({"prompt": "abc", "max_tokens": 9, "temperature": 0})
    stream = rest.stream(False)
    first, second = event("a", [7], prompt_token_ids=[1]), event("b", [8])
    crlf = (first + second).replace(b"\n", b"\r\n")
    cut = crlf.index(b"\r\n") + 1
    for piece in (crlf[:cut], crlf[cut : cut + 1], crlf[cut + 1 :]):
        stream.read(piece, 0.0)
    draft = rest.draft()
    assert draft is not None
    assert json.loads(draft.body)["prompt"] == [1, 7, 8]


# --- hostile engines ---


@pytest.mark.parametrize(
    "events",
    [
        (event("a", [7], prompt_token_ids=list(range(60_000))),),
        (event("a", [7], prompt_token_ids=[1]), event("b", list(range(60_000)))),
        (event("a", [7], prompt_token_ids=[1]), event("b", [-1])),
        (event("a", [7], prompt_token_ids=[1]), event("b", [1 << 40])),
        (event("a", [7], prompt_token_ids=[1]), event("b", [8]).replace(b"[8]", b"[" + b"9" * 5000 + b"]")),
        (event("a", [7], prompt_token_ids=[1]), event("b", [8]).replace(b'"b"', b"1e999")),
        (event("a", [7]),),
    ],
    ids=["prompt", "answer", "negative", "large", "digits", "number", "none"],
)
def test_an_engine_does_not_choose_the_prompt_of_the_next(events: tuple[bytes, ...]) -> None:
    rest = continuation({"prompt": "abc", "max_tokens": 21, "temperature": 0})
    fed(rest, *events)
    assert rest.draft() is None
    assert rest.why


def test_what_is_kept_is_counted_and_bounded() -> None:
    kept = Kept()
    progresses = [Progress(kept) for _ in range(4)]
    most = 0
    large = event("x" * 15_000, [1])
    for number in range(3000):  # 45 MB of each, and an event without an end
        for each in progresses:
            each.add(large if number < 2500 else b"y" * 15_000)
        most = max(most, kept.bytes)
        held = sum(
            sum(map(len, each.raw)) + len(each.texts) + len(each.ids) + len(each._rest) for each in progresses
        )
        assert held <= kept.bytes + 4 * MIB
    assert most < 16 * MIB
    assert all(each.why for each in progresses)
    assert kept.bytes == 0


async def test_many_answers_of_one_engine_go_on_in_turns(start: Start) -> None:
    streams, events = 60, 700
    answer = chunk(event("tok", [5], prompt_token_ids=[1, 2])) + chunk(event("tok", [5])) * events
    cut = asyncio.Event()

    async def dying(visit: Visit) -> None:
        if b'"prompt":[1,2,' in visit.body:
            visit.send(SSE_HEAD + chunk(event("end", [6], "stop")) + chunk(DONE) + LAST)
            return
        visit.send(SSE_HEAD + answer)
        await cut.wait()
        visit.reset()

    async with Upstream(dying) as one, Upstream(dying) as two:
        proxy = await proxied(start, one.url, two.url)
        for each in proxy.scheduler.instances:
            proxy.scheduling.change(CapacityLearned(each.name, Capacity(max_model_len=MODEL_LEN * 100)))
        asked = body("completions", True, max_tokens=5000)
        got = [
            asyncio.create_task(ask(f"http://127.0.0.1:{proxy.port}", "completions", asked))
            for _ in range(streams)
        ]
        await turns_until(
            lambda: (
                len(proxy.driver.exchanges) == streams
                and all(each.attempt.tokens_so_far > events for each in proxy.driver.exchanges.values())
            )
        )
        async with turns_are_short():
            cut.set()
            await turns_until(lambda: not proxy.driver.exchanges)
        for each in await asyncio.gather(*got):
            assert (each.done, each.text[-3:]) == (True, "end")


async def test_tokens_of_a_resumed_answer_are_counted_as_of_one_engine(start: Start) -> None:
    """Five streams, their engine killed: every reader has the client's prompts, and all tokens as output."""

    async def dies(visit: Visit) -> None:
        visit.send(SSE_HEAD + chunk(event("a", [5], prompt_token_ids=[1, 2])) + chunk(event("b", [6])))
        await cut.wait()
        visit.reset()

    async def ends(visit: Visit) -> None:
        if visit.head.startswith(b"GET"):
            visit.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        prompt = json.loads(visit.body)["prompt"]
        assert prompt == [1, 2, 5, 6]
        usage = {
            "prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
        }  # fmt: skip
        last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        visit.send(
            SSE_HEAD + chunk(event("c", [7])) + chunk(event("d", [8])) + chunk(event("e", [9], "stop"))
        )
        visit.send(chunk(last) + chunk(DONE) + LAST)

    cut, streams = asyncio.Event(), 5
    async with Upstream(dies) as one, Upstream(ends) as two:
        proxy = await proxied(start, one.url, two.url, policy="single")
        asked = body("completions", True, stream_options={"include_usage": True})
        url = f"http://127.0.0.1:{proxy.port}"
        got = [asyncio.create_task(ask(url, "completions", asked)) for _ in range(streams)]
        await turns_until(
            lambda: (
                len(proxy.driver.exchanges) == streams
                and all(each.attempt.tokens_so_far == 2 for each in proxy.driver.exchanges.values())
            )
        )
        cut.set()
        for each in await asyncio.gather(*got):
            [usage] = each.usage
            assert each.text == "abcde"
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 5, 7)
            assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
        await proxy.settled()
    for record in proxy.exchanges:
        assert (record.prompt_tokens_total, record.output_tokens, record.cached_tokens) == (2, 5, 2)
        assert " prompt_tokens=2 cached_tokens=2 output_tokens=5 " in keyvalue_line(record)
    [(_, account)] = proxy.driver.totals.accounts.items()
    counts = account.prompt_tokens, account.output_tokens, account.cached_prompt_tokens
    assert counts == (2 * streams, 5 * streams, 2 * streams)


class Killers:
    """Engines of which each dies after 20 tokens of a request: `how` is "rst", or "error" with `/health` 503.

    While `kills` is False, the second lease of an answer ends well.
    """

    def __init__(self, how: str) -> None:
        self.how = how
        self.dead: set[str] = set()
        self.servers: list[Upstream] = []
        self.kills = True

    @property
    def asked(self) -> int:
        """Number of engines that were asked for an answer."""
        return sum(any(v.head.startswith(b"POST") for v in each.visits) for each in self.servers)

    async def __call__(self, visit: Visit) -> None:
        server = next(each for each in self.servers if visit in each.visits)
        if visit.head.startswith(b"GET"):
            status = b"503 Gone" if server.url in self.dead else b"200 OK"
            visit.send(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status)
            return
        visit.send(SSE_HEAD)
        prompt = json.loads(visit.body)["prompt"]
        again = isinstance(prompt, list)
        visit.send(chunk(event("tok", [5], **({} if again else {"prompt_token_ids": [1, 2]}))))
        for _ in range(19):
            visit.send(chunk(event("tok", [5])))
        if again and not self.kills:
            visit.send(chunk(event("end", [6], "stop")) + chunk(DONE) + LAST)
            return
        await visit.writer.drain()
        self.dead.add(server.url)
        if self.how == "error":
            failed = b'{"error":{"message":"EngineCore encountered an issue","code":500}}'
            visit.send(chunk(b"data: " + failed + b"\n\n") + chunk(DONE) + LAST)
            return
        assert server._server is not None
        server._server.close()  # nothing listens there any more
        visit.reset()


@pytest.mark.parametrize("how", ["rst", "error"])
async def test_a_request_that_kills_engines_ends_two_of_them(start: Start, how: str) -> None:
    killers = Killers(how)
    async with Upstream(killers) as one, Upstream(killers) as two, Upstream(killers) as three:
        killers.servers += [one, two, three]
        proxy = await proxied(start, *[each.url for each in killers.servers])
        got = await ask(
            f"http://127.0.0.1:{proxy.port}", "completions", body("completions", True, max_tokens=500)
        )
        assert got.failed
        assert killers.asked == 2
        await proxy.settled()
        assert proxy.exchanges[-1].not_resumed == "2 engines died in it"


async def test_where_engines_die_without_their_requests_doing_an_answer_is_in_more_than_two_deaths(
    start: Start,
) -> None:
    killers = Killers("rst")
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(9):
            killers.servers.append(await stack.enter_async_context(Upstream(killers)))
        proxy = await proxied(start, *[each.url for each in killers.servers])
        asked = body("completions", True, max_tokens=500)
        url = f"http://127.0.0.1:{proxy.port}"
        killers.kills = False
        for _ in range(2):  # each is in one death and ends well
            got = await ask(url, "completions", asked)
            assert (got.failed, got.finish) == (False, ["stop"])
        assert len(killers.dead) == 2
        killers.kills = True
        got = await ask(url, "completions", asked)
        assert got.failed
        assert len(killers.dead) == 2 + 3
        got = await ask(url, "completions", asked)  # these deaths are its own: they excuse nothing
        assert got.failed
        assert len(killers.dead) == 5 + 3


# --- notices ---


class Slow:
    """Engines that begin answers and end them once `ended` is set; the rest of one they end at once."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def __call__(self, visit: Visit) -> None:
        if b'"prompt":[1,2,' not in visit.body:
            visit.send(SSE_HEAD + chunk(event("a", [5], prompt_token_ids=[1, 2])) + chunk(event("b", [6])))
            await self.ended.wait()
        visit.send(chunk(event("c", [7], "stop")) + chunk(DONE) + LAST)

    async def rest(self, visit: Visit) -> None:
        if b'"prompt":[1,2,' in visit.body:
            visit.send(SSE_HEAD)
        await self(visit)


async def begun(start: Start, slow: Slow, streams: int, *urls: str) -> Any:
    """A proxy and streams of which the first two tokens have come."""
    proxy = await proxied(start, *urls)
    asked = body("completions", True)
    got = [
        asyncio.create_task(ask(f"http://127.0.0.1:{proxy.port}", "completions", asked))
        for _ in range(streams)
    ]
    opened = proxy.driver.exchanges
    await turns_until(
        lambda: (
            len(opened) == streams and all(each.record.first_byte_at is not None for each in opened.values())
        )
    )
    return proxy, got


async def test_a_notice_for_all_instances_leaves_answers_where_they_are(start: Start) -> None:
    slow = Slow()
    async with Upstream(slow.rest) as one, Upstream(slow.rest) as two:
        proxy, got = await begun(start, slow, 30, one.url, two.url)
        for each in proxy.scheduler.instances:
            proxy.scheduling.change(AdminStateSet(each.name, AdminState.READY, deadline_s=0.1))
        for _ in range(20):
            proxy.driver.swept(0.0)
            await asyncio.sleep(0)
        slow.ended.set()
        for each in await asyncio.gather(*got):
            assert (each.text, each.done, each.failed) == ("abc", True, False)
        assert not proxy.driver.totals.resumptions
        assert len(one.visits) + len(two.visits) == 30


async def test_a_notice_takes_answers_to_where_there_is_a_place(start: Start) -> None:
    slow = Slow()
    async with Upstream(slow.rest) as one, Upstream(slow.rest) as two:
        proxy, got = await begun(start, slow, 6, one.url, two.url)
        proxy.scheduling.change(AdminStateSet("i0", AdminState.READY, deadline_s=0.1))
        proxy.driver.swept(0.0)
        await turns_until(lambda: len(two.visits) == 6)
        slow.ended.set()
        for each in await asyncio.gather(*got):
            assert (each.text, each.done, each.failed, len(each.names)) == ("abc", True, False, 1)
        assert dict(proxy.driver.totals.resumptions) == {("m", "notice"): 3}
