"""What the proxy passes on, either way, is read alike by three parsers; what is ambiguous is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import h11
from faults.client import Client, body_of, request
from faults.engine import FaultEngine
from faults.rig import in_process
from fuzz.desync import DOCUMENT, INNER, Case, requests, responses
from fuzz.readers import ANSWER_READERS, REQUEST_READERS
from helpers import HANG_S

REQUESTS = requests()
RESPONSES = responses()
#: Limits of the proxy in seconds, by whether a message is to be refused: some refused ones wait for bytes
#: that never come. The others are whole, and no limit may end them.
PATIENCE_S = {True: 1.0, False: HANG_S}
TIMEOUTS = ("head_timeout_s", "body_timeout_s", "first_byte_timeout_s", "idle_timeout_s")
#: Paths of the watch.
LOOKS = (b"/v1/models", b"/health", b"/metrics", b"/version", b"/api/version")


class Recorder:
    """An engine that keeps every byte it is sent, by connection, and answers by h11 or with given bytes."""

    def __init__(self, answers: dict[str, bytes] | None = None) -> None:
        self.connections: list[bytearray] = []
        self._answers = answers or {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        kept = bytearray()
        self.connections.append(kept)
        peer = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        label = ""
        with contextlib.suppress(ConnectionError, h11.RemoteProtocolError):
            while data := await reader.read(1 << 16):
                kept += data
                peer.receive_data(data)
                while (event := peer.next_event()) is not h11.NEED_DATA:
                    if isinstance(event, h11.Request):
                        label = dict(event.headers).get(b"x-request-id", b"").decode()
                        path = event.target
                    elif isinstance(event, h11.EndOfMessage):
                        if label in self._answers:
                            writer.write(self._answers[label])
                            writer.close()
                            return
                        listed = b'{"data":[{"id":"m","object":"model"}]}'
                        body = listed if path == b"/v1/models" else DOCUMENT
                        head = (
                            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                        )
                        writer.write(head % len(body) + body)
                        peer.send(h11.Response(status_code=200, headers=[("content-length", str(len(body)))]))
                        peer.send(h11.Data(data=body))
                        peer.send(h11.EndOfMessage())
                        peer.start_next_cycle()
        writer.close()


@contextlib.asynccontextmanager
async def proxy(folder: Path, recorder: Recorder, refused: bool) -> AsyncIterator[int]:
    """A proxy in front of a recorder, for messages to be refused or read; its port."""
    limits = dict.fromkeys(TIMEOUTS, PATIENCE_S[refused])
    tables = {"proxy": {**limits, "connect_timeout_s": HANG_S}, "scrape": {"timeout_s": HANG_S}}
    folder = folder / str(refused)
    folder.mkdir()
    server = await asyncio.start_server(recorder.serve, "127.0.0.1", 0)
    async with FaultEngine(served="bg") as neighbour:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with in_process(folder, [], neighbour, tables, [url]) as rig:
            yield rig.port
    server.close()
    await server.wait_closed()


def test_there_are_enough() -> None:
    assert len(REQUESTS) + len(RESPONSES) >= 250
    for cases in (REQUESTS, RESPONSES):
        assert len({case.name for case in cases}) == len(cases)


async def test_requests(tmp_path: Path) -> None:
    """Many at once, each on a connection of its own; where that stays open, an honest request follows."""
    recorder = Recorder()
    wrong: list[str] = []

    async def one(number: int, case: Case) -> None:
        async with Client(port) as client:
            client.send(case.data.replace(b"{id}", b"case-%d" % number))
            try:
                answer = await client.answer()
            except (asyncio.IncompleteReadError, ConnectionError):
                if not case.refused:
                    wrong.append(f"{case.name}: closed without an answer")
                return
            if answer.status >= 500:
                wrong.append(f"{case.name}: {answer.status}")
            if case.refused:
                if not 400 <= answer.status < 500:
                    wrong.append(f"{case.name}: {answer.status}, expected a refusal")
                rest = await client.eof()
                # Of what followed on the connection nothing may have been answered but with a refusal.
                if b" 200 " in rest:
                    wrong.append(f"{case.name}: a second answer {rest[:60]!r}")
            elif answer.status == 200 and answer.header("connection") != "close":
                client.send(b"GET /v1/models HTTP/1.1\r\nHost: p\r\n\r\n")
                honest = await client.answer()
                if (honest.status, b'"id":"m"' in honest.body) != (200, True):
                    wrong.append(f"{case.name}: the next answer is not its own: {honest.body[:60]!r}")

    for refused in (True, False):
        async with proxy(tmp_path, recorder, refused) as port:
            numbered = [each for each in enumerate(REQUESTS) if each[1].refused is refused]
            await asyncio.gather(*(one(number, case) for number, case in numbered))
    reached: set[bytes] = set()
    for kept in recorder.connections:
        readings = {name: read(bytes(kept)) for name, read in REQUEST_READERS.items()}
        first = readings["h11"]
        assert first is not None, bytes(kept)
        assert all(reading == first for reading in readings.values()), readings
        for method, target, headers, body in first:
            named = dict(headers)
            assert len([name for name, _ in headers if name == b"host"]) == 1
            assert b"transfer-encoding" not in named
            assert target in (b"/v1/completions", *LOOKS), target
            if target == b"/v1/completions":
                assert (method, body) == (b"POST", INNER)
                reached.add(named[b"x-request-id"])
    for number, case in enumerate(REQUESTS):
        if case.refused and b"case-%d" % number in reached:
            wrong.append(f"{case.name}: reached the engine")
    assert b"case-0" in reached
    assert not wrong, "\n".join(wrong)


async def test_responses(tmp_path: Path) -> None:
    """Each answer to a request of its own; the whole of what the client gets is read three times."""
    recorder = Recorder({f"case-{number}": case.data for number, case in enumerate(RESPONSES)})
    wrong: list[str] = []

    async def one(number: int, case: Case) -> None:
        async with Client(port) as client:
            label = f"case-{number}"
            client.send(request(label, body_of(label, stream=False), "Connection: close"))
            raw = await client.eof()
        readings = {name: read(raw) for name, read in ANSWER_READERS.items()}
        status, body, whole = readings["h11"] or (0, b"", False)
        if b"smuggled" in raw:
            wrong.append(f"{case.name}: the second answer went through")
        if any(reading != (status, body, whole) for reading in readings.values()):
            wrong.append(f"{case.name}: read in several ways: {readings}")
        elif case.refused and whole and status < 400:
            wrong.append(f"{case.name}: passed as {status} {body!r}")
        elif not case.refused and (not whole or status >= 400):
            wrong.append(f"{case.name}: expected an answer, got {status} {body!r}")

    for refused in (True, False):
        async with proxy(tmp_path, recorder, refused) as port:
            numbered = [each for each in enumerate(RESPONSES) if each[1].refused is refused]
            await asyncio.gather(*(one(number, case) for number, case in numbered))
    assert not wrong, "\n".join(wrong)
