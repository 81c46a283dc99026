"""Requests of a batch, at most a given number at once, each until it has a result: nothing is lost.

A full server (429, 503) says when to come again, and few lanes ask it until it answers. One that is out of
reach for `timeout_s`, from the start too, gives no result for so long, or lets several requests in a row run
into it, ends the run: the lines are not at fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence

import aiohttp
from yarl import URL

from hetlb.balancer.core.resend_budget import Resends
from hetlb.balancer.engines.engine_mistakes import no_answer, no_answer_at
from hetlb.balancer.http.retry_after import retry_after_s
from hetlb.errors import HetlbError
from hetlb.served_models import read_model_list
from hetlb.tools.loadtest.batch_files import BatchJob, BatchJournal, is_final
from hetlb.tools.loadtest.bodies import CLASS_HEADER
from hetlb.tools.loadtest.generator import check_key, client_session
from hetlb.tools.openai.answers import AnswerError, read_answer
from hetlb.tools.tables import LoadProgress

#: Requests at once if none are stated, with a background class and without. Simulated jobs of 512 and 192
#: tokens on eight idle A800: 74 a second with 256 at once, 143 with 1,024.
BACKGROUND_LANES, LANES = 1024, 32
#: Lanes that begin each second. All at once they take a briefly idle fleet, and what comes next
#: waits for their ends. Simulated p99 TTFT of interactive requests: 19 s; 0.6 s so; 0.12 s without a batch.
_LANES_PER_S = 16.0
#: Tries of a request before a broken connection or a server failure is its result.
_TRIES = 3
#: Timeouts without an answer between them, after which the server is at fault.
_SILENT_TIMEOUTS = 3
_LEAST_WAIT_S, _LONGEST_WAIT_S, _LONGEST_RETRY_AFTER_S = 0.25, 30.0, 600.0
#: Answers of a gateway to `/v1/models` while its server starts or is full.
_NOT_YET = (429, 502, 503, 504)


class BatchRun:
    """A run over `jobs` at the server at `url`; their results go to `journal`, outages to `tell`."""

    def __init__(
        self,
        url: str,
        jobs: Sequence[BatchJob],
        journal: BatchJournal,
        timeout_s: float,
        api_key: str | None,
        tell: Callable[[str], None],
    ) -> None:
        self.progress = LoadProgress()
        self._tell = tell
        self._url, self._journal, self._timeout_s = url, journal, timeout_s
        self._waiting = list(reversed(jobs))
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._classes: Mapping[str, str] = {}
        self._heard_s = time.monotonic()
        #: Time of the last result.
        self._result_s = self._heard_s
        self._timeouts = 0  # since the last answer
        self._told = False  # that there is none
        #: Sends while the server takes none, of all lanes together.
        self._resends = Resends()
        self._refused = False
        #: The status with which it takes none, "" if it is not reached.
        self._refusal = ""

    async def run(self, lanes: int | None) -> None:
        """Ask until every job has a result. Raises `HetlbError` if the server answers nothing any more."""
        async with client_session(self._headers) as session:
            self._classes = await self._background_classes(session)
            lanes = lanes or (BACKGROUND_LANES if self._classes else LANES)
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(min(lanes, len(self._waiting))):
                        group.create_task(self._lane(session, number / _LANES_PER_S))
            except* HetlbError as stopped:
                raise stopped.exceptions[0] from None

    async def _background_classes(self, session: aiohttp.ClientSession) -> dict[str, str]:
        """Return the background class of each model, as hetlb states it; {} of other servers."""
        target = f"{self._url}/v1/models"
        waits = 0
        while True:
            status, body, why = 0, b"", ""
            try:
                async with asyncio.timeout(min(self._timeout_s, _LONGEST_WAIT_S)):
                    async with session.get(URL(target, encoded=True)) as response:
                        status, body = response.status, await response.read()
            except aiohttp.ClientSSLError as error:
                raise self._untrusted(error) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                status, why = 0, no_answer_at(error)
            check_key(target, status)
            if status and (self._late or status not in _NOT_YET):
                break
            waits += 1
            await self._wait(waits, why or f"status {status}")
        self._heard_s = time.monotonic()
        stated = {entry["id"]: entry.get("background_class") for entry in read_model_list(body)}
        return {model: name for model, name in stated.items() if isinstance(name, str) and name.isascii()}

    async def _lane(self, session: aiohttp.ClientSession, begins_s: float) -> None:
        await asyncio.sleep(begins_s)
        while self._waiting:
            self.progress.sent += 1
            good = await self._answered(session, self._waiting.pop())
            self.progress.completed += good
            self.progress.failed += not good

    async def _answered(self, session: aiohttp.ClientSession, job: BatchJob) -> bool:
        """Send a request until it has a result; True if it is an answer."""
        name = self._classes.get(job.model or "")
        headers = {CLASS_HEADER: name} if name else {}
        waits = tries = 0
        while True:
            await self._turn()
            try:
                async with asyncio.timeout(self._timeout_s):
                    target = URL(self._url + job.url, encoded=True)
                    data = bytes(job.body)
                    async with session.post(
                        target, data=data, headers=headers, allow_redirects=False
                    ) as response:
                        body = await response.read()
            except TimeoutError:
                self._timeouts += 1
                if self._timeouts >= _SILENT_TIMEOUTS:
                    raise self._silent() from None
                return self._journal.broken(job, "timeout", f"no answer within {self._timeout_s:g} s")
            except aiohttp.ClientSSLError as error:
                raise self._untrusted(error) from error
            except aiohttp.ClientError as error:
                tries += not isinstance(error, aiohttp.ClientConnectorError)
                if tries == _TRIES:
                    return self._journal.broken(job, "connection_error", no_answer(error))
                waits += 1
                self._refused, self._refusal = True, ""
                await self._wait(waits, no_answer_at(error))
            else:
                self._heard_s, self._timeouts, self._told = time.monotonic(), 0, False
                status = response.status
                asked_s = retry_after_s({name.lower(): value for name, value in response.raw_headers})
                tries += not is_final(status) and status not in (429, 503)
                if is_final(status) or tries == _TRIES:
                    self._result_s, self._refused = self._heard_s, False
                    self._resends.answered()
                    self._count(body)
                    label = response.headers.get("x-request-id", "").encode("ascii", "replace").decode()
                    return self._journal.answered(job, status, label, body)
                waits += 1
                wait_s = _wait_s(waits) if asked_s is None else min(asked_s, _LONGEST_RETRY_AFTER_S)
                self._refused, self._refusal = True, f"status {status} alone"
                await asyncio.sleep(min(wait_s, self._left_s()))

    def _untrusted(self, error: aiohttp.ClientSSLError) -> HetlbError:
        """Return the error that ends a run at a server that is not trusted: waiting would not change that."""
        return HetlbError(f"{self._url}: {no_answer_at(error)}")

    async def _turn(self) -> None:
        """Wait until the next request may be sent: a server that takes none is asked by few lanes."""
        while self._refused and not self._resends.take(now := time.monotonic()):
            if not self._refusal and self._late:
                raise self._silent()
            most_s = self._left_s() if self._refusal else _LONGEST_WAIT_S
            await asyncio.sleep(min(self._resends.wait_s(now), most_s))

    def _left_s(self) -> float:
        """Return the seconds that a server may still take no request. Raises `HetlbError` after the last."""
        left_s = self._result_s + self._timeout_s - time.monotonic()
        if left_s <= 0:
            full = f"{self._refusal}, no result for {self._timeout_s:g} s (--timeout)"
            raise HetlbError(f"{self._url}: {full}")
        return left_s

    @property
    def _late(self) -> bool:
        """True once the server has not been heard for the timeout."""
        return time.monotonic() - self._heard_s > self._timeout_s

    async def _wait(self, waits: int, why: str) -> None:
        """Wait for a server that does not answer, and tell the first wait. Raises `HetlbError` if `_late`."""
        if self._late:
            raise self._silent()
        if not self._told:
            self._told = True
            self._tell(f"{self._url}: {why}; it is asked again for {self._timeout_s:g} s (--timeout)")
        await asyncio.sleep(_wait_s(waits))

    def _count(self, body: bytes) -> None:
        with contextlib.suppress(AnswerError):
            usage = read_answer(body).usage
            self.progress.output_tokens += (usage and usage.completion_tokens) or 0

    def _silent(self) -> HetlbError:
        return HetlbError(f"{self._url}: no answer for {self._timeout_s:g} s (--timeout)")


def _wait_s(waits: int) -> float:
    """Return a random wait, which doubles with each try in vain."""
    return random.uniform(0.5, 1.0) * min(_LONGEST_WAIT_S, _LEAST_WAIT_S * 2.0 ** min(waits, 10))
