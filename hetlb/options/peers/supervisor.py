"""The parent of the workers: it starts, watches and replaces them.

It runs no event loop and has one thread, so that its children are forked from it within milliseconds, with
all modules loaded. It holds the listening sockets, the workers' counts and the last good fleet file for later
processes. A dead worker is replaced at once; if it dies again within `STEADY_S`, each time a little later. A
worker without an answer for `HANG_S` is killed and replaced; time spent waiting for a CPU does not count.
Each worker has a listening socket of its own on each address; the sockets outlive the workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import uvloop

from hetlb import systemd
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.fleet.admin_listener import named
from hetlb.balancer.fleet.service import READINESS_LAG_S, WorkerState, announce, ready_line
from hetlb.balancer.http.forward_headers import ForwardRules
from hetlb.balancer.option_record import Options, Predecessor
from hetlb.balancer.telemetry.events import Event, Rarely, tell
from hetlb.errors import HetlbError
from hetlb.logs import FORMATTERS, logging_to_stderr
from hetlb.options.peers.control import ChildControl, ChildState, Tally, content_of
from hetlb.options.peers.hub import remove_folder, view_folder
from hetlb.options.peers.worker_service import Worker, WorkerPlace, log_of
from hetlb.systemd import NO_LISTENERS, Listeners

logger = logging.getLogger("hetlb.workers")

#: Least seconds of service for an immediate replacement; after less, replacements come later and later.
_START_S: Final = 60.0
#: Seconds of service after which a dead process is replaced at once; others later and later.
STEADY_S: Final = 10.0
BACKOFF_S: Final = 0.5
BACKOFF_CAP_S: Final = 30.0
#: Seconds between questions for a sign of life; without one a process counts as silent, then is killed.
PING_S: Final = 0.5
SILENT_S: Final = 1.5
HANG_S: Final = 5.0
#: Seconds after a stop, beyond the grace of their requests, until processes are killed.
_KILL_AFTER_S: Final = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class _Child:
    """One worker, whichever process it is now."""

    def __init__(self, number: int) -> None:
        self.name = f"worker {number}"
        self.number = number
        self.tally = Tally()
        self.pid = 0
        self.control: ChildControl | None = None
        self.life = 0
        self.up = False
        self.failure = ""
        self.began = False
        self.restarts = self.hangs = self.deaths = 0
        self.started_at = self.heard_at = self.asked_at = 0.0
        #: `cpu_wait_s` of its process when it became silent, None while it is not.
        self.waited_s: float | None = None
        #: Time of the next start of its successor, None while it lives.
        self.due: float | None = 0.0

    def heard(self, now: float) -> None:
        self.heard_at, self.waited_s = now, None


class Supervisor:
    """Runs `hetlb serve` with `number` workers."""

    def __init__(
        self,
        fleet: Fleet,
        options: Options,
        number: int,
        event_log: Path | None = None,
        listeners: Listeners = NO_LISTENERS,
        takeover: Predecessor | None = None,
    ) -> None:
        """Bind listeners not yet in `listeners`. Raises `HetlbError` if a bind fails."""
        self._fleet = fleet
        self._options = options
        self._listeners = bind_listeners(fleet, number, listeners if takeover is None else takeover.listeners)
        #: Until the first worker has it.
        self._takeover = takeover
        #: Folder of the workers' sockets: of the hub of their view, and one for each.
        self._owns_folder = takeover is None or takeover.folder is None
        self._folder = view_folder() if takeover is None or takeover.folder is None else takeover.folder
        self._event_log = event_log
        self._state = pickle.dumps(
            ChildState(fleet, ForwardRules(fleet.file.proxy.forward_headers).own.decode()),
            pickle.HIGHEST_PROTOCOL,
        )
        self._children = [_Child(each) for each in range(number)]
        self._lives = 0
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._signals: list[int] = []
        self._looked_at = time.monotonic()
        self._shown: list[WorkerState] = []
        self._no_room = Rarely()
        self._stopping = False
        #: Workers that have yet to read the fleet file again.
        self._reloading: set[int] = set()
        #: True once other processes accept in place of these.
        self._replaced = False

    # --- life ---

    def run(self) -> None:
        """Serve until stopped. Raises `HetlbError` if a process fails to start."""
        lines = _Stderr()
        lines.setFormatter(FORMATTERS[self._fleet.file.proxy.request_log_format]())
        logging.basicConfig(level=logging.INFO, handlers=[lines])
        for end in (self._wake, self._waker):
            end.setblocking(False)
        handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            self._until(lambda: all(child.began for child in self._children), _START_S, fail=True)
            table = self._fleet.file
            places = [(each.host, each.port) for each in table.addresses]
            main = [each[0].getsockname()[:2] for each in self._listeners.at(places)]
            admin = self._listeners.admin[0].getsockname()[:2]
            line = ready_line(main, [each.tls for each in table.addresses], admin, table.admin.tls)
            self._send(self._children[0], "serving")
            self._owns_folder = True
            announce(line, table.proxy.request_log_format)
            self._until(lambda: self._ends or self._replaced)
            systemd.notify("STOPPING=1")
            self._stop()
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._kill_all()

    def _until(
        self, holds: Callable[[], bool], timeout_s: float = float("inf"), *, fail: bool = False
    ) -> None:
        """Watch over the children until something holds; with `fail`, raises `HetlbError` if it does not."""
        deadline = time.monotonic() + timeout_s
        while not holds() and (now := time.monotonic()) < deadline:
            if fail and self._ends:
                return
            self._watch(now)
            if fail:
                self._check_start(deadline)

    @property
    def _ends(self) -> bool:
        """True once SIGTERM or SIGINT arrived."""
        return signal.SIGTERM in self._signals or signal.SIGINT in self._signals

    @property
    def _ending(self) -> bool:
        """True if workers that end are not replaced."""
        return self._stopping or self._replaced

    def _check_start(self, deadline: float) -> None:
        for child in self._children:
            if child.failure:
                raise HetlbError(child.failure)
            if not child.began and time.monotonic() >= deadline:
                raise HetlbError(f"{child.name} did not begin within {_START_S:.0f} s")

    def _watch(self, now: float) -> None:
        """Run one turn: start due children, read messages, reap, kill hung ones."""
        if now - self._looked_at > SILENT_S:  # this process stood still, and maybe the whole machine
            for child in self._children:
                child.heard(now)
        self._looked_at = now
        for child in self._children:
            if child.due is not None and child.due <= now and not self._ending:
                self._start(child)
        for child in self._children:
            self._ask(child, now)
        self._show()
        for key, _ in self._selector.select(timeout=PING_S / 2):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    while self._wake.recv(4096):
                        pass
            else:
                self._hear(key.data)
        self._reap()
        while signal.SIGHUP in self._signals:
            self._signals.remove(signal.SIGHUP)
            systemd.reloading_begins()
            self._reloading = {each.number for each in self._children if self._send(each, "reload")}
            if not self._reloading:
                systemd.notify("READY=1")

    def _on_signal(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    # --- one child ---

    def _start(self, child: _Child) -> None:
        """Start a process; a successor that this machine has no room for now is started later."""
        try:
            self._fork(child)
        except OSError as error:
            if not child.restarts:
                raise HetlbError(f"{child.name} cannot be started: {error.strerror}") from error
            child.due = time.monotonic() + BACKOFF_S
            text = "%s cannot be started: %s; it is tried again"
            self._no_room.tell(
                logger, Event.WORKER_FAILED, text, child.name, error.strerror, worker=child.name
            )

    def _fork(self, child: _Child) -> None:
        """Make the process of a child. Raises `OSError` without a descriptor, memory or a process for it."""
        now = time.monotonic()
        ours, theirs = ChildControl.pair()
        self._lives += 1
        life = self._lives
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            ours.close()
            theirs.close()
            raise
        if not pid:
            self._become(child, life, ours, theirs, blocked)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        if not child.number and self._takeover is not None:
            self._takeover.end.close()
            self._takeover = None
        child.pid, child.control, child.life, child.due = pid, ours, life, None
        child.started_at = child.asked_at = now
        child.heard(now)
        child.failure = ""
        self._selector.register(ours, selectors.EVENT_READ, child)

    def _become(
        self,
        child: _Child,
        life: int,
        ours: ChildControl,
        theirs: ChildControl,
        mask: set[int | signal.Signals],
    ) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            for number in (signal.SIGINT, signal.SIGHUP):  # the supervisor's business
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._let_go(child, ours)
            with contextlib.suppress(OSError):
                Path("/proc/self/comm").write_text(f"hetlb-worker-{child.number}")
            logging.getLogger().handlers.clear()
            with logging_to_stderr(self._fleet.file.proxy.request_log_format):
                try:
                    uvloop.run(self._serve(child, life, theirs))
                    status = 0
                except (HetlbError, OSError) as error:
                    theirs.send("failed", str(error))
                except Exception:
                    tell(
                        logger, Event.WORKER_FAILED, "%s failed", child.name, exc_info=True, worker=child.name
                    )
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
            os._exit(status)

    def _let_go(self, child: _Child, ours: ChildControl) -> None:
        """Close what belongs to the supervisor and to other children."""
        self._selector.close()
        for end in (self._wake, self._waker, ours):
            end.close()
        for other in self._children:
            if other.control is not None:
                other.control.close()
        if child.number and self._takeover is not None:
            self._takeover.end.close()
            self._takeover = None

    def _serve(self, child: _Child, life: int, control: ChildControl) -> Coroutine[Any, Any, None]:
        state: ChildState = pickle.loads(self._state)
        own = share_of(child.number, len(self._children), self._listeners.main)
        listeners = self._listeners
        if child.number:
            listeners = listeners.only(own, listeners.admin)

        async def worker() -> None:
            place = WorkerPlace(child.number, life, self._folder, [each.tally for each in self._children])
            log = log_of(self._event_log, child.number, child.restarts)
            process = Worker(state, place, control, self._options, log)
            await process.serve(own, listeners, self._takeover)

        return worker()

    def _send(self, child: _Child, *packet: Any) -> bool:
        return child.control is not None and child.control.send(*packet)

    def _hear(self, child: _Child) -> None:
        control = child.control
        try:
            while control is not None and (received := control.receive()) is not None:
                (kind, *rest), fds = received
                child.heard(time.monotonic())
                if kind == "ready":
                    child.up = child.began = True
                elif kind == "failed":
                    child.failure = rest[0]
                elif kind == "state" and fds:  # without a descriptor to spare none came
                    self._state = content_of(fds[0])
                elif kind == "reloaded":
                    self._has_read(child)
                elif kind == "replaced":
                    self._leave()
        except EOFError:
            self._selector.unregister(control)  # type: ignore[arg-type]
            child.control = None

    def _has_read(self, child: _Child) -> None:
        """Note that a worker has read the fleet file again, or has ended."""
        if child.number in self._reloading:
            self._reloading.discard(child.number)
            if not self._reloading:
                systemd.notify("READY=1")

    def _ask(self, child: _Child, now: float) -> None:
        """Ping a child; kill it if it stays silent, not counting what it waited for a CPU meanwhile."""
        if not child.pid:
            return
        if now - child.asked_at >= PING_S:
            child.asked_at = now
            self._send(child, "ping")
        silent_s = now - child.heard_at
        if silent_s > SILENT_S:
            waited_s = cpu_wait_s(child.pid)
            if child.waited_s is None:
                child.waited_s = waited_s
            silent_s -= waited_s - child.waited_s
        if silent_s > (HANG_S if child.up else _START_S):
            text = "%s has not answered for %.1f s: it is killed"
            tell(logger, Event.WORKER_HUNG, text, child.name, silent_s, worker=child.name)
            child.hangs += 1
            child.heard(now)
            os.kill(child.pid, signal.SIGKILL)

    def _show(self) -> None:
        """Tell the workers how all of them are, for metrics."""
        now = time.monotonic()
        shown = [
            WorkerState(
                str(each.number), each.up and now - each.heard_at < SILENT_S, each.restarts, each.hangs
            )
            for each in self._children
        ]
        if shown != self._shown:
            self._shown = shown
            for child in self._children:
                self._send(child, "workers", shown)

    def _reap(self) -> None:
        for child in self._children:
            if not child.pid:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                if child.control is not None:
                    self._hear(child)
                self._bury(child, os.waitstatus_to_exitcode(status))

    def _bury(self, child: _Child, status: int) -> None:
        """Log a child's end and schedule its successor."""
        now = time.monotonic()
        if child.control is not None:
            self._selector.unregister(child.control)
            child.control.close()
            child.control = None
        child.pid, child.up = 0, False
        self._shown = []
        self._has_read(child)
        if self._ending:
            return
        if not child.began:
            child.failure = child.failure or f"{child.name} ended with status {status}"
            return
        child.deaths = 1 if now - child.started_at >= STEADY_S else child.deaths + 1
        child.restarts += 1
        pause_s = 0.0
        if child.deaths > 1:
            pause_s = min(BACKOFF_CAP_S, BACKOFF_S * 2.0 ** min(16, child.deaths - 2))
        child.due = now + pause_s
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        why = f" ({child.failure})" if child.failure else ""
        when = f"in {pause_s:g} s, after {child.deaths} deaths in a row" if pause_s else "at once"
        text = "%s %s%s; another takes its place %s"
        tell(logger, Event.WORKER_ENDED, text, child.name, how, why, when, worker=child.name)

    # --- the end ---

    def _leave(self) -> None:
        """Close the listeners, as other processes accept now; every connection gets one more answer."""
        self._replaced = True
        for child in self._children:
            self._send(child, "leave")
        self._listeners = self._listeners.only()

    def _stop(self) -> None:
        """Stop all workers: each answers 503 at `/readyz`, ends its requests and exits.

        A second signal, or `SIGINT`, makes them hurry.
        """
        signals = self._signals
        hurry = signal.SIGINT in signals or len(signals) > 1
        self._stopping = True
        if not self._replaced:
            for child in self._children:
                self._send(child, "stop", hurry)
        self._listeners = self._listeners.only()
        told = len(signals)
        most_s = READINESS_LAG_S + (0.0 if hurry else self._fleet.file.proxy.shutdown_grace_s) + _KILL_AFTER_S
        children = self._children
        self._until(lambda: not any(each.pid for each in children) or len(signals) > told, most_s)
        if any(each.pid for each in children):  # a second signal ends at once
            for child in children:
                self._send(child, "stop", True)
            self._until(lambda: not any(each.pid for each in children), _KILL_AFTER_S)

    def _kill_all(self) -> None:
        """Leave no process and no socket."""
        for child in self._children:
            if child.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
            if child.control is not None:
                child.control.close()
            child.tally.close()
        self._listeners.only()
        if self._owns_folder and not self._replaced:  # else other processes have it
            remove_folder(self._folder)
        for end in (self._wake, self._waker):
            end.close()
        self._selector.close()


class _Stderr(logging.Handler):
    """Lines to stderr without blocking: a slow reader must not stop the supervisor."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            if select.select([], [2], [], 0)[1]:
                os.write(2, (self.format(record) + "\n").encode())


def cpu_wait_s(pid: int) -> float:
    """Return the seconds that a process's main thread was ready to run without a CPU; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def bind_listeners(fleet: Fleet, workers: int, given: Listeners) -> Listeners:
    """Bind what is not `given` (by systemd or a replaced process). Raises `HetlbError`."""
    addresses, keys, admin = fleet.file.addresses, fleet.file.address_keys, fleet.file.admin
    admin_sockets = given.admin
    main_sockets: list[socket.socket] = []
    there = given.at([(each.host, each.port) for each in addresses])
    for number, (listen, sockets) in enumerate(zip(addresses, there, strict=True)):
        if not sockets:
            with named(keys[number], listen.host, listen.port):
                sockets = list(_bound(listen.host, listen.port, workers))
        main_sockets += sockets
    if not admin_sockets:
        with named("admin", admin.host, admin.port):
            admin_sockets = tuple(_bound(admin.host, admin.port, 1))
            for each in admin_sockets:
                each.listen(128)
    return Listeners(tuple(main_sockets), admin_sockets)


def share_of(worker: int, workers: int, sockets: Sequence[socket.socket]) -> list[socket.socket]:
    """Return the sockets of one worker: one on every address at least, and no socket is without a worker."""
    by_address: dict[Any, list[socket.socket]] = {}
    for each in sockets:
        by_address.setdefault(each.getsockname(), []).append(each)
    return [
        alike[number % len(alike)]
        for alike in by_address.values()
        for number in range(worker, max(workers, len(alike)), workers)
    ]


def _bound(host: str, port: int, count: int) -> Iterator[socket.socket]:
    """Yield the sockets, `count` on each address of a host; several share the port."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    places = dict.fromkeys((family, kind, number, str(at[0])) for family, kind, number, _, at in infos)
    for family, kind, protocol, address in places:
        with socket.socket(family, kind, protocol) as alone:
            # With SO_REUSEPORT the bind succeeds even if another process listens on the port.
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                alone.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
            alone.bind((address, port))
        for _ in range(count):
            one = socket.socket(family, kind, protocol)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if count > 1:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.setblocking(False)
            one.bind((address, port))
            port = one.getsockname()[1]
            yield one
