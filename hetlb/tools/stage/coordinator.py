"""Driver of `tools.paths`: sends sequences over paths of stages and hands their tokens out.

A sequence gets its tokens in order and one end: finished by its receiver, failed, or cancelled. A
path that breaks is replayed elsewhere from the tokens so far. Every stage of a path is told when its lease
ended. An unreachable worker is tried again until it answers. A recovered one is used at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import aiohttp
import msgspec

from hetlb.balancer.core.predictor import OnlinePredictor
from hetlb.balancer.core.types import Outcome, Reject, RejectReason, Request
from hetlb.tasks import ended
from hetlb.tools.paths.path_scheduler import PathCommand, PathLog, PathScheduler
from hetlb.tools.paths.stages import (
    SINK,
    SOURCE,
    BatchLimits,
    Curve,
    Edge,
    LinkSpec,
    PathLease,
    StageNetwork,
    StageSpec,
    decode_curve,
    kv_by_layer,
)
from hetlb.tools.stage.checkpoint import ModelConfig
from hetlb.tools.stage.stage_channel import ChannelError, StageChannel, connect
from hetlb.tools.stage.stage_messages import (
    Cause,
    Close,
    Lost,
    Opening,
    Pass,
    RouteHop,
    Sampling,
    StageProtocolError,
    Token,
    Tokens,
    Welcome,
    decode,
    encode,
    frames,
    pack,
)
from hetlb.tools.stage.stages_file import StageGroup

log = logging.getLogger("hetlb.stage")

#: Seconds that requests wait while the running stages do not hold all layers.
NO_PATH_S: Final = 10.0
_TOKEN_BYTES: Final = 4
_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


class Receiver(Protocol):
    """Taker of the tokens of a sequence."""

    def token(self, token: Token) -> bool:
        """Take in the next token. Return False to end the sequence."""

    def failed(self, reason: RejectReason | None, message: str) -> None:
        """There will be no further token; without a reason the request itself is at fault."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt on its way to an answer. `output` holds the tokens so far."""

    id: int
    prompt: list[int]
    sampling: Sampling
    receiver: Receiver
    output: list[int] = field(default_factory=list)
    lease: PathLease | None = None


@dataclass(slots=True)
class _Worker:
    """A stage's address and, while connected, its channel and description."""

    url: str
    task: asyncio.Task[None] = field(init=False)
    channel: StageChannel | None = None
    welcome: Welcome | None = None
    problem: str = "not reached yet"
    outgoing: list[tuple[Pass, bytes]] = field(default_factory=list)

    async def stop(self) -> None:
        """End its connection for good."""
        await ended(self.task)


class Coordinator:
    """One model served through stages."""

    def __init__(
        self,
        group: StageGroup,
        config: ModelConfig,
        *,
        key: bytes = b"",
        tls: ssl.SSLContext | None = None,
        write_event: Callable[[str], object] | None = None,
    ) -> None:
        self.group = group
        self.config = config
        self._key, self._tls = key, tls
        self._session = secrets.randbelow((1 << 32) - 1) + 1
        self._log = None if write_event is None else PathLog(write_event)
        self._workers: dict[str, _Worker] = {}
        table = group.table
        self.scheduler = PathScheduler(
            self._network(), OnlinePredictor(), policy=table.scheduler, high_water=table.high_water
        )
        self._sequences: dict[int, Sequence] = {}
        self._leased: dict[int, Sequence] = {}
        self._next_id = 1
        self._http: aiohttp.ClientSession | None = None
        self._stranded: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self.replays = self.preemptions = 0

    # --- life ---

    async def start(self) -> None:
        """Begin to connect to the workers."""
        self._http = aiohttp.ClientSession()
        for name, url in self.group.workers.items():
            self._add_worker(name, url)

    async def wait_passable(self, timeout_s: float) -> bool:
        """Wait until the running stages hold all layers; False if they do not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.scheduler.passable:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Fail open requests and close all connections."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, RejectReason.NO_INSTANCE, "The server is shutting down.", Outcome.SHUTDOWN)
        for worker in self._workers.values():
            await worker.stop()
        if self._stranded is not None:
            self._stranded.cancel()
        if self._http is not None:
            await self._http.close()

    async def reconfigure(self, group: StageGroup) -> None:
        """Use another list of workers, and other links, from now on."""
        gone = {name for name, worker in self._workers.items() if group.workers.get(name) != worker.url}
        self.group = group
        for name in gone:
            await self._workers[name].stop()
            del self._workers[name]
        for name, url in group.workers.items():
            if name not in self._workers:
                self._add_worker(name, url)
        self._renew_network()

    # --- for others ---

    @property
    def kv_tokens(self) -> int:
        """Token capacity of the running stages in the layer with the least room."""
        layers = kv_by_layer(self.scheduler.ledgers.values(), self.config.layers)
        return int(min(total for _, total in layers))

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together: the model's limit, and what every up stage could hold alone."""
        specs = [ledger.spec for ledger in self.scheduler.ledgers.values() if ledger.up]
        stated = self.group.table.max_model_len or self.config.max_positions
        holds = [spec.kv_token_layers // spec.layers for spec in specs]
        return min([stated, self.config.max_positions, *holds])

    def documents(self) -> list[dict[str, Any]]:
        """Return one description per worker, for operators."""
        found = []
        for name, worker in self._workers.items():
            ledger, welcome = self.scheduler.ledgers.get(name), worker.welcome
            document = {
                "name": name,
                "url": worker.url,
                "state": "up" if ledger is not None and ledger.up else "down",
                "problem": None if welcome is not None else worker.problem,
                "layers": None if welcome is None else [welcome.first, welcome.end],
                "in_flight": 0 if ledger is None else ledger.in_flight,
                "kv_reserved_token_layers": 0 if ledger is None else ledger.kv_token_layers,
                "kv_token_layers": None if welcome is None else welcome.kv_token_layers,
            }
            found.append(document)
        return found

    # --- sequences ---

    def submit(self, prompt: list[int], sampling: Sampling, max_tokens: int, receiver: Receiver) -> Sequence:
        """Start a request. The receiver may get a failure before this returns."""
        sequence = Sequence(self._next_id, prompt, sampling, receiver)
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        request = Request(sequence.id, self.group.model, len(prompt), max_tokens, prompt_exact=True)
        self._obey(self.scheduler.on_arrival(request, self._now()))
        self._flush()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Drop the rest of an answer. Harmless after its end."""
        if self._sequences.pop(sequence.id, None) is not None:
            self._end(sequence, Outcome.CLIENT_GONE)
            self._flush()

    def _end(self, sequence: Sequence, outcome: Outcome) -> None:
        """End a sequence's lease, or its wait, for good."""
        now, lease = self._now(), sequence.lease
        if lease is None:
            self._obey(self.scheduler.on_cancelled(sequence.id, now))
        else:
            self._close_lease(sequence, lease)
            self._obey(self.scheduler.on_lease_ended(lease, outcome, now))

    def _fail(self, sequence: Sequence, reason: RejectReason | None, message: str, outcome: Outcome) -> None:
        if self._sequences.pop(sequence.id, None) is not None:
            self._end(sequence, outcome)
            sequence.receiver.failed(reason, message)

    def _close_lease(self, sequence: Sequence, lease: PathLease) -> None:
        """Tell all stages of a path that its lease ended."""
        sequence.lease = None
        key = self._lease_key(lease)
        del self._leased[key]
        frame = encode(Close([key]))
        for hop in lease.hops:
            if (channel := self._workers[hop.stage].channel) is not None:
                channel.send(frame)

    def _lease_key(self, lease: PathLease) -> int:
        return self._session << 32 | lease.id

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # --- commands of the scheduler ---

    def _obey(self, commands: Iterable[PathCommand]) -> None:
        for command in commands:
            if isinstance(command, Reject):
                if (rejected := self._sequences.pop(command.request_id, None)) is not None:
                    rejected.receiver.failed(command.reason, command.detail)
            elif (sequence := self._sequences.get(command.request.id)) is not None:
                self._start(sequence, command)
            else:  # it ended while its command was on the way
                self._obey(self.scheduler.on_lease_ended(command, Outcome.CLIENT_GONE, self._now()))

    def _start(self, sequence: Sequence, lease: PathLease) -> None:
        """Send the prompt and the tokens so far over a path."""
        if self._log is not None:
            self._log.path(lease)
        sequence.lease = lease
        key = self._lease_key(lease)
        self._leased[key] = sequence
        tokens = sequence.prompt + sequence.output
        route = tuple(RouteHop(self._workers[hop.stage].url, hop.first, hop.end) for hop in lease.hops)
        sampling = sequence.sampling
        if sampling.penalises:
            sampling = msgspec.structs.replace(sampling, history=pack(tokens))
        self._queue(lease, Pass(key, 0, 0, len(tokens), True, Opening(route, sampling)), tokens)

    def _queue(self, lease: PathLease, each: Pass, tokens: list[int]) -> None:
        self._workers[lease.hops[0].stage].outgoing.append((each, pack(tokens)))

    def _flush(self) -> None:
        """Send all queued passes: passes to one stage together."""
        for worker in self._workers.values():
            if worker.outgoing:
                passes, worker.outgoing = worker.outgoing, []
                if worker.channel is not None:
                    for frame in frames(passes):
                        worker.channel.send(frame)

    # --- messages of stages ---

    def _token(self, token: Token) -> None:
        sequence = self._leased.get(token.lease)
        if sequence is None or (lease := sequence.lease) is None:
            return
        known = len(sequence.prompt) + len(sequence.output)
        if token.position != known:
            self._broken(lease, f"a token at {token.position} of {known}")
            return
        sequence.output.append(token.token)
        lease.output_tokens += 1
        if lease.first_token_at is None:
            self._obey(self.scheduler.on_first_token(lease, self._now()))
        if not sequence.receiver.token(token):
            del self._sequences[sequence.id]
            self._end(sequence, Outcome.OK)
            return
        self._queue(lease, Pass(token.lease, 0, token.position, 1, True), [token.token])

    def _given_up(self, lost: Lost) -> None:
        for key in lost.leases:
            sequence = self._leased.get(key)
            if sequence is None or (lease := sequence.lease) is None:
                continue
            if lost.cause is Cause.KV:
                self.preemptions += 1
                self._close_lease(sequence, lease)
                self._obey(self.scheduler.on_preempted(lease, self._now()))
            elif lost.cause is Cause.REQUEST:
                message = f"The request cannot be computed: {lost.reason}."
                self._fail(sequence, None, message, Outcome.BAD_REQUEST)
            else:
                self._broken(lease, lost.reason)

    def _broken(self, lease: PathLease, reason: str) -> None:
        """Let the scheduler replay or give up a request after its path broke."""
        log.warning("%r broke: %s", lease, reason)
        self.replays += 1
        sequence = self._leased[self._lease_key(lease)]
        self._close_lease(sequence, lease)
        self._obey(self.scheduler.on_lease_ended(lease, Outcome.BROKEN_STREAM, self._now()))

    # --- workers that come and go ---

    def _add_worker(self, name: str, url: str) -> None:
        worker = self._workers[name] = _Worker(url)
        worker.task = asyncio.create_task(self._keep(name, worker))

    async def _keep(self, name: str, worker: _Worker) -> None:
        """Hold the connection to a worker, and make it again whenever it ends."""
        assert self._http is not None
        while True:
            try:
                channel, welcome = await connect(self._http, worker.url, self._key, self._session, self._tls)
                try:
                    self._check(name, welcome)
                    worker.channel, worker.welcome = channel, welcome
                    log.info("stage %s is up: layers %d to %d", name, welcome.first, welcome.end - 1)
                    self._renew_network()
                    await self._listen(channel)
                    worker.problem = "the connection ended"
                finally:
                    self._went(name, worker)
                    await channel.close()
            except (ChannelError, StageProtocolError) as error:
                if str(error) != worker.problem:
                    log.warning("stage %s is not used: %s", name, error)
                worker.problem = str(error)
            except Exception:  # a fault of ours must not take the stage out for good
                log.exception("the connection to stage %s failed", name)
            await asyncio.sleep(self.group.table.reconnect_s)

    async def _listen(self, channel: StageChannel) -> None:
        async for frame in channel.frames():
            message, _ = decode(frame)
            if isinstance(message, Tokens):
                for token in message.tokens:
                    self._token(token)
            elif isinstance(message, Lost):
                self._given_up(message)
            self._flush()

    def _check(self, name: str, welcome: Welcome) -> None:
        """Raise `ChannelError` unless the stage holds layers of our model in the dtype of the others."""
        if welcome.model != self.config.fingerprint:
            raise ChannelError(f"{name} holds another model than {self.group.folder}")
        if not 0 <= welcome.first < welcome.end <= self.config.layers:
            raise ChannelError(f"{name} holds layers {welcome.first}:{welcome.end} of {self.config.layers}")
        others = {each.welcome.dtype for each in self._workers.values() if each.welcome is not None}
        if others and welcome.dtype not in others:
            raise ChannelError(f"{name} computes in {welcome.dtype}, the others in {others.pop()}")

    def _went(self, name: str, worker: _Worker) -> None:
        if worker.welcome is None:
            return
        worker.channel = worker.welcome = None
        worker.outgoing.clear()
        if name not in self.scheduler.ledgers:  # its description was no network
            return
        log.warning("stage %s is lost", name)
        commands = self.scheduler.on_stage_lost(name, self._now())
        for lease, _ in list(self.scheduler.ledgers[name].leases.values()):
            self._broken(lease, f"stage {name} is lost")
        self._obey(commands)
        self._renew_network()

    def _renew_network(self) -> None:
        """Give the scheduler the network of connected stages."""
        self._obey(self.scheduler.on_network(self._network(), self._now()))
        self._changed.set()
        if self._stranded is not None:
            self._stranded.cancel()
            self._stranded = None
        if not self.scheduler.passable:
            self._stranded = asyncio.get_running_loop().call_later(NO_PATH_S, self._strand)
        self._flush()

    def _network(self) -> StageNetwork:
        """Return the network of the connected stages; write it to the event log if there is one."""
        group = self.group
        there = {name: each.welcome for name, each in self._workers.items() if each.welcome is not None}
        edges: list[Edge] = [(a, b) for a in there for b in there if a != b]
        edges += [(SOURCE, name) for name in there] + [(name, SINK) for name in there]
        links: dict[Edge, LinkSpec] = {edge: group.links.get(edge, group.link) for edge in edges}
        dtype = next((welcome.dtype for welcome in there.values()), "float32")
        network = StageNetwork(
            layers=self.config.layers,
            stages=tuple(_stage(name, welcome) for name, welcome in there.items()),
            links=links,
            activation_bytes=self.config.hidden * _ITEM_BYTES[dtype],
            token_bytes=_TOKEN_BYTES,
            partial_inference=group.table.partial_inference,
            flows={edge: rate for edge, rate in group.flows.items() if edge in links},
        )
        if self._log is not None:
            self._log.network(network, self._now())
        return network

    def _strand(self) -> None:
        """Fail the requests that wait: no path came up in time."""
        for sequence in [each for each in self._sequences.values() if each.lease is None]:
            message = "The stages that are up do not hold all layers."
            self._fail(sequence, RejectReason.NO_INSTANCE, message, Outcome.NO_INSTANCE)


def _stage(name: str, welcome: Welcome) -> StageSpec:
    return StageSpec(
        name=name,
        first=welcome.first,
        end=welcome.end,
        prompt=Curve(*zip(*welcome.prompt_times, strict=True)),
        decode=decode_curve(welcome.decode_times),
        kv_token_layers=welcome.kv_token_layers,
        batch=BatchLimits(
            prompts=welcome.max_num_seqs,
            prompt_tokens=welcome.max_num_batched_tokens,
            decodes=welcome.max_num_seqs,
            decode_context=welcome.kv_token_layers,
        ),
    )
