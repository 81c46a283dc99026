"""Hostile clients and engines: what each attack gets, and that it costs or blames no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from proxy.memory import End, Proxy

from hetlb.balancer.core.types import Health
from hetlb.balancer.engines.upstream import MAX_INTERIM_ANSWERS
from hetlb.balancer.http.connection_states import ClientState, Reading
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import MAX_SMALL_CHUNKS
from hetlb.balancer.http.multipart import MAX_PART_LINES, MAX_PARTS, read_form
from hetlb.balancer.http.openai_body import MAX_PROMPTS, GateError, read_json
from hetlb.balancer.http.request_reader import MAX_BLANK_LINES

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\n"
ASK = HEAD + b"content-length: 26\r\n\r\n" + b'{"model":"m","prompt":"x"}'
STREAM = HEAD + b"content-length: 40\r\n\r\n" + b'{"model":"m","prompt":"x","stream":true}'
PING = b"GET /ping HTTP/1.1\r\nhost: p\r\n\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"id":"c","choices":[{"index":0,"text":"x"}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engines:
    """The far ends of connections to an engine that does what a test says."""

    def __init__(self) -> None:
        self.ends: list[End] = []

    def __call__(self) -> End:
        self.ends.append(End())
        return self.ends[-1]


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def make() -> Iterator[Callable[..., Proxy]]:
    made: list[Proxy] = []

    def start(*engines: Callable[[], End], **table: float) -> Proxy:
        made.append(Proxy(*engines, **table))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for proxy in made:
        proxy.close()


def healthy(proxy: Proxy) -> bool:
    return all(
        each.evidence.health.state is Health.UP
        and not each.evidence.answers.doubted
        and each.evidence.health.clean
        for each in proxy.scheduler.instances
    )


# --- empty lines ---


def test_more_than_a_few_empty_lines_are_refused(make: Callable[..., Proxy]) -> None:
    proxy = make()
    client = proxy.client()
    client.send(b"\r\n" * MAX_BLANK_LINES + PING)
    proxy.loop.rest()
    assert client.got.startswith(b"HTTP/1.1 200")
    other = proxy.client()
    other.send(b"\r\n" * (MAX_BLANK_LINES + 1))
    proxy.loop.rest()
    assert other.got.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("piece", [b"\r\n", b"G"])
def test_the_time_of_a_head_runs_from_its_first_byte(make: Callable[..., Proxy], piece: bytes) -> None:
    proxy = make(head_timeout_s=10.0)
    client = proxy.client()
    client.send(b"\r\n")
    for _ in range(3):
        proxy.loop.turn(3.0)
        client.send(piece)
        assert not client.got
    proxy.loop.turn(2.0)
    assert client.got.startswith(b"HTTP/1.1 408")


# --- turns ---


@pytest.mark.parametrize(
    "hostile",
    [
        PING * 10_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"y" * 70) * 20_000,
        b"\r\n" * 500_000,
    ],
    ids=["pipelined requests", "chunks", "empty lines"],
)
def test_a_client_that_sends_much_has_its_turn_like_any_other(
    make: Callable[..., Proxy], hostile: bytes
) -> None:
    proxy = make()
    loud, quiet = proxy.client(), proxy.client()
    for at in range(0, len(hostile), 256 << 10):
        loud.send(hostile[at : at + (256 << 10)])
    proxy.loop.turn()
    quiet.send(PING)
    turns = 0
    while not quiet.got:
        proxy.loop.turn()
        turns += 1
    assert turns <= 3
    connection = loud.transport._protocol if loud.transport else None
    closing = connection.state is ClientState.CLOSING
    assert closing or connection._reader.unread or connection.reading is not Reading.OPEN, (
        "all of it was read before"
    )


@pytest.mark.parametrize(
    "hostile",
    [
        SSE + chunk(TOKEN) + b"".join(chunk(TOKEN[at : at + 1]) for at in range(len(TOKEN))) * 1000,
        SSE + chunk(TOKEN * 5000),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"x") * 100_000,
    ],
    ids=["a stream in chunks of one byte", "many events", "an answer in chunks of one byte"],
)
def test_an_engine_that_sends_much_has_its_turn_like_any_other(
    make: Callable[..., Proxy], engines: Engines, hostile: bytes
) -> None:
    others = Engines()
    proxy = make(engines, others)
    askers = [proxy.client() for _ in range(2)]
    for asker in askers:
        asker.send(STREAM)
        proxy.loop.rest()
    loud, quiet = engines.ends[0], others.ends[0]
    loud.send(hostile)
    proxy.loop.turn()
    before = len(askers[0].got)
    quiet.send(SSE + chunk(TOKEN))
    turns = 0
    while not askers[1].got:
        proxy.loop.turn()
        turns += 1
    assert turns <= 3
    assert len(askers[0].got) - before < len(hostile) / 4, "all of it was read before"
    proxy.loop.rest()
    for asker in askers:
        asker.leave()
    proxy.loop.rest()


def test_many_engines_that_send_much_at_once_share_one_turn(
    make: Callable[..., Proxy], engines: Engines
) -> None:
    proxy = make(engines)
    askers = [proxy.client() for _ in range(40)]
    for asker in askers:
        asker.send(STREAM)
        proxy.loop.rest()
    tiny = b"".join(chunk(TOKEN[at : at + 1]) for at in range(len(TOKEN))) * 100
    for each in engines.ends:
        each.send(SSE + chunk(TOKEN) + tiny)
    proxy.loop.turn()
    assert sum(len(asker.got) > 0 for asker in askers) < 20
    proxy.loop.rest()
    for asker in askers:
        assert asker.got.count(TOKEN) == 101
        asker.leave()
    proxy.loop.rest()


def test_what_came_before_an_engine_closed_is_passed_on(make: Callable[..., Proxy], engines: Engines) -> None:
    proxy = make(engines)
    client = proxy.client()
    client.send(STREAM)
    proxy.loop.rest()
    done = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    engines.ends[0].send(SSE + chunk(TOKEN) * 4000 + done)
    engines.ends[0].leave()
    proxy.loop.rest()
    assert client.got.count(TOKEN) == 4000
    assert client.got.endswith(b"0\r\n\r\n")


# --- pieces that are too small or too many ---


def test_a_body_in_tiny_chunks_is_refused(make: Callable[..., Proxy]) -> None:
    proxy = make()
    client = proxy.client()
    client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"x") * (MAX_SMALL_CHUNKS + 500))
    proxy.loop.rest()
    assert client.got.startswith(b"HTTP/1.1 400")
    assert b"small chunks" in client.got


@pytest.mark.parametrize(
    ("count", "status"), [(MAX_INTERIM_ANSWERS, b"200"), (MAX_INTERIM_ANSWERS + 1, b"502")]
)
def test_interim_answers_are_bounded(
    make: Callable[..., Proxy], engines: Engines, count: int, status: bytes
) -> None:
    proxy = make(engines)
    client = proxy.client()
    client.send(ASK)
    proxy.loop.rest()
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    engines.ends[0].send(interim * count + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    proxy.loop.rest()
    assert client.got.startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("unit", [b"[],", b'"",', b"[1],", b'"a\\"b",'])
def test_prompts_of_one_request_are_bounded(unit: bytes) -> None:
    last = unit[:-1]
    body = b'{"model":"m","prompt":[' + unit * (MAX_PROMPTS - 1) + last + b"]}"
    assert read_json(Kind.COMPLETION, body).prompts == MAX_PROMPTS
    with pytest.raises(GateError, match=f"at most {MAX_PROMPTS} prompts"):
        read_json(Kind.COMPLETION, b'{"model":"m","prompt":[' + unit * MAX_PROMPTS + last + b"]}")


@pytest.mark.parametrize(
    "text", [rb'["a","b"]', rb'["a\\","b"]', rb'["a\",\"c", "b"]', rb'[ "\\\"" , "" ]', rb'["\\\\", "\""]']
)
def test_prompts_are_counted_whatever_is_in_them(text: bytes) -> None:
    assert read_json(Kind.COMPLETION, b'{"model":"m","prompt":' + text + b"}").prompts == 2


def test_parts_and_their_headers_are_bounded() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="x"\r\n%b\r\ny\r\n'
    for form, fits in (
        (part % b"" * MAX_PARTS, True),
        (part % b"" * (MAX_PARTS + 1), False),
        (part % (b"a: b\r\n" * (MAX_PART_LINES - 1)), True),
        (part % (b"a: b\r\n" * MAX_PART_LINES), False),
    ):
        if fits:
            read_form(b"multipart/form-data; boundary=b", form + b"--b--\r\n")
        else:
            with pytest.raises(GateError, match="more than"):
                read_form(b"multipart/form-data; boundary=b", form + b"--b--\r\n")


# --- blame ---


def test_clients_that_do_not_read_take_no_instance_out(make: Callable[..., Proxy], engines: Engines) -> None:
    others = Engines()
    proxy = make(engines, others, idle_timeout_s=60.0, write_timeout_s=300.0)
    clients = [proxy.client() for _ in range(12)]
    for client in clients:
        client.reading = False
        client.send(STREAM)
    proxy.loop.rest()
    large = chunk(b'data: {"choices":[{"text":"%b"}]}\n\n' % (b"y" * 60_000))
    for end in engines.ends + others.ends:
        end.send(SSE + large * 6)
    proxy.loop.rest()
    proxy.loop.turn(100.0)
    assert healthy(proxy)
    assert len(proxy.driver.exchanges) == 12
    clients[0].set_reading(True)
    proxy.loop.turn(100.0)  # now the engine's own silence counts
    assert [str(each.outcome) for each in proxy.driver.totals and proxy.ended] == ["broken_stream"]
    assert proxy.ended[0].end.name == "held-up"
    assert healthy(proxy)
    for client in clients[1:]:
        client.leave()
    proxy.loop.rest()


def test_half_sent_forms_hold_no_slot(make: Callable[..., Proxy], engines: Engines) -> None:
    proxy = make(engines)
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n' + b"x" * 3_000_000
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: p\r\n"
    head += b"content-type: multipart/form-data; boundary=b\r\n"
    clients = [proxy.client() for _ in range(20)]
    for client in clients:
        client.send(head + b"content-length: 3000100\r\n\r\n" + form[:2_900_000])
    proxy.loop.rest()
    assert not proxy.driver.exchanges
    assert not engines.ends
    for client in clients:
        client.leave()
    proxy.loop.rest()
    assert proxy.server.held_bytes == 0


def test_a_request_that_an_engine_does_not_read_is_held_against_none(
    make: Callable[..., Proxy], engines: Engines
) -> None:
    proxy = make(lambda: stuck(engines()))
    client = proxy.client()
    body = b'{"model":"m","prompt":"%b"}' % (b"x" * 400_000)
    client.send(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    proxy.loop.rest()
    engines.ends[0].leave()
    proxy.loop.rest()
    assert client.got.startswith(b"HTTP/1.1 502")
    assert healthy(proxy)


def stuck(end: End) -> End:
    end.reading = False
    return end


def test_a_connection_that_was_made_while_this_process_stood_still_is_made_again(
    make: Callable[..., Proxy], engines: Engines
) -> None:
    proxy = make(engines)
    calls: list[float] = []
    create = proxy.loop.create_connection

    async def slow(factory: object, host: object, port: object = None, **more: object) -> object:
        calls.append(proxy.loop.time())
        if len(calls) == 1:
            proxy.loop._clock.now += 20.0  # the loop turns no more for that long
            await proxy.loop.create_future()
        return await create(factory, host, port, **more)

    proxy.loop.create_connection = slow  # type: ignore[method-assign,assignment]
    client = proxy.client()
    client.send(ASK)
    proxy.loop.turn(5.0)
    proxy.loop.turn(0.5)
    assert len(calls) == 2
    assert healthy(proxy)
    client.leave()
    proxy.loop.rest()


# --- headers ---


def lines_at(engines: Engines) -> list[bytes]:
    return bytes(engines.ends[0].got).partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]


def test_only_headers_on_the_list_reach_an_engine(make: Callable[..., Proxy], engines: Engines) -> None:
    claims = (
        b"X-Forwarded-User: root\r\nX-Remote-User: root\r\nX_Forwarded_For: 1.1.1.1\r\nX-Original-URL: /\r\n"
        b"X-Data-Parallel-Rank: 0\r\nX-Real-IP: 1.1.1.1\r\nCookie: a=b\r\nX-Mine: 1\r\nX-Other: 2\r\n"
    )
    known = b"Accept: */*\r\nUser-Agent: me\r\nTraceparent: 00-1-2-01\r\nAnthropic-Version: 1\r\n"
    proxy = make(engines, forward_headers=("X-Mine",))
    client = proxy.client()
    client.send(
        ASK.replace(b"content-length", claims + known + b"Content-Type: application/json\r\ncontent-length")
    )
    proxy.loop.rest()
    names = sorted(line.partition(b":")[0] for line in lines_at(engines))
    assert names == [
        b"accept", b"accept-encoding", b"anthropic-version", b"content-length", b"content-type", b"host",
        b"traceparent", b"user-agent", b"via", b"x-mine", b"x-request-id",
    ]  # fmt: skip
    client.leave()
    proxy.loop.rest()


@pytest.mark.parametrize("name", [b"Content-Type", b"Authorization", b"x-api-key"])
def test_headers_that_readers_take_differently_stand_once(make: Callable[..., Proxy], name: bytes) -> None:
    proxy = make()
    client = proxy.client()
    client.send(PING[:-2] + b"%b: a\r\n%b: b\r\n\r\n" % (name, name.lower()))
    proxy.loop.rest()
    assert client.got.startswith(b"HTTP/1.1 400")


# --- loops ---


def test_a_request_that_comes_back_is_508_and_its_instance_is_out(
    make: Callable[..., Proxy], engines: Engines
) -> None:
    others = Engines()
    proxy = make(engines, others)
    client = proxy.client()
    client.send(ASK)
    proxy.loop.rest()
    back = proxy.client()
    back.send(bytes(engines.ends[0].got))  # the instance is this proxy
    proxy.loop.rest()
    assert back.got.startswith(b"HTTP/1.1 508")
    assert proxy.scheduler.in_flight == 1
    engines.ends[0].send(bytes(back.got))
    proxy.loop.rest()
    first, second = proxy.scheduler.instances
    assert (str(first.admin), str(second.admin)) == ("maint", "ready")
    others.ends[0].send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    proxy.loop.rest()
    assert client.got.startswith(b"HTTP/1.1 200")


def test_a_client_that_names_this_proxy_takes_nothing_out(
    make: Callable[..., Proxy], engines: Engines
) -> None:
    proxy = make(engines)
    via = b"via: 1.1 " + proxy.driver.forward_rules.own
    client = proxy.client()
    client.send(ASK.replace(b"content-length", via + b"\r\ncontent-length"))
    proxy.loop.rest()
    assert client.got.startswith(b"HTTP/1.1 508")
    # Nor does one that names a proxy behind this one.
    other = proxy.client()
    other.send(ASK.replace(b"content-length", b"via: 1.1 hetlb-another\r\ncontent-length"))
    proxy.loop.rest()
    assert b"via: 1.1 hetlb-another, 1.1 hetlb-" in engines.ends[0].got
    engines.ends[0].send(
        b"HTTP/1.1 508 Loop Detected\r\nvia: 1.1 hetlb-another\r\ncontent-length: 2\r\n\r\n{}"
    )
    proxy.loop.rest()
    assert other.got.startswith(b"HTTP/1.1 508")
    assert healthy(proxy)
    assert str(proxy.scheduler.instances[0].admin) == "ready"
