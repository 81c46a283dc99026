"""`hetlb serve`: the reverse proxy. Builds the fleet from a file or from addresses, then runs the service."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from hetlb import systemd
from hetlb.balancer.config.fleet import Fleet, check_policy
from hetlb.balancer.config.fleet_tables import MOST_WORKERS, Listen
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.fleet.reloading import require_urls
from hetlb.balancer.fleet.service import Service, announce, tune_gc
from hetlb.cli.flags import PORT, changed, declare, stated_fleet, whole
from hetlb.cli.serving_options import OPTIONS
from hetlb.errors import InputError
from hetlb.logs import logging_to_stderr, plain_line
from hetlb.options.peers import share
from hetlb.options.peers.offer import Offer
from hetlb.systemd import NO_LISTENERS, Listeners
from hetlb.tasks import exit_by_force

if TYPE_CHECKING:
    from hetlb.options.peers.takeover import Takeover

#: Hosts that stand for every address of the machine.
_EVERY = {"0.0.0.0", "::", ""}


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all that serve a fleet; each beats the file."""
    add = declare(parser)
    add("--config", "fleet file (default fleet.yaml)", "FLEET.yaml", Path)
    servers = "server, instead of a file (repeatable); its capacity is read, its speed is learnt"
    add("--instance", servers, "URL", default=[], action="append")
    add("--admin-port", "port of the admin listener (default 8081)", "PORT", PORT)
    add("--policy", "scheduling policy (default: the file's, else hetlb)", "NAME", choices=POLICIES)
    add("--check", "validate the configuration and exit", action="store_true")
    add("--event-log", "record the scheduler's facts and decisions", "FILE", Path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hetlb serve`; each beats the file."""
    add_fleet_arguments(parser)
    add = declare(parser)
    add("--host", "address to listen on (default 127.0.0.1)")
    add("--port", "port to listen on (default 8080; 0 picks a free one)", "PORT", PORT)
    workers = "processes that share the port (default 1)"
    add("--workers", workers, "N", whole(1, MOST_WORKERS))
    add("--replace", "take over from the process that serves this address", action="store_true")


def run(args: argparse.Namespace) -> int:
    fleet = fleet_of(args)
    require_urls(fleet)
    admin = fleet.file.admin
    for listen in fleet.file.addresses:
        alike = listen.host == admin.host or _EVERY & {listen.host, admin.host}
        if listen.port and listen.port == admin.port and alike:
            raise InputError(
                f"{fleet.where}admin.port: expected another than listen.port, got {admin.port} for both"
            )
    _check_alone(fleet)
    _warn_of_descriptors(fleet)
    if args.check:
        from hetlb.cli.doctor import check_filled_in
        from hetlb.cli.profile_doubts import all_is_well

        check_filled_in(fleet)
        _ = fleet.token_counters
        return all_is_well(fleet)
    prepare_process()
    if fleet.file.proxy.workers > 1:
        from hetlb.options.peers.supervisor import Supervisor

        takeover = asyncio.run(_ask(fleet, args.event_log)) if args.replace else None
        Supervisor(
            fleet, OPTIONS, fleet.file.proxy.workers, args.event_log, systemd.inherited(), takeover
        ).run()
        return 0
    with logging_to_stderr(fleet.file.proxy.request_log_format):
        uvloop.run(_serve(fleet, args.event_log, args.replace))
    return 0


def _check_alone(fleet: Fleet) -> None:
    """Raise `InputError` if a feature needs a single process, and the file has workers or peers."""
    where, shared, workers = fleet.where, fleet.file.shared, fleet.file.proxy.workers
    hands_over = any(spec.kv_transfer is not None for spec in fleet.instances)
    if hands_over and workers > 1:
        raise InputError(f"{where}proxy.workers: expected 1 with kv_transfer, got {workers}")
    if hands_over and shared is not None:
        raise InputError(f"{where}shared: expected none with kv_transfer: peers do not know what it holds")
    if shared is not None:
        from hetlb.options.peers import check_shared

        check_shared(shared, f"{where}shared")


def prepare_process() -> None:
    """Use as many file descriptors as this process may, and survive SIGUSR1."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the usual soft limit is for select(2)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # rotators of logs send it; its default is to end us


def _warn_of_descriptors(fleet: Fleet) -> None:
    """Log if the configured clients need more descriptors than allowed: one each, and one to an engine."""
    limit = fleet.file.proxy.max_connections
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit is not None and hard != resource.RLIM_INFINITY and 2 * limit > hard:
        text = (
            f"hetlb: {fleet.where}proxy.max_connections: {limit} clients need up to {2 * limit} file "
            f"descriptors, this process may open {hard} (ulimit -Hn)"
        )
        style = fleet.file.proxy.request_log_format
        print(plain_line(text, style, level=logging.WARNING), file=sys.stderr)


async def _ask(fleet: Fleet, event_log: Path | None) -> Takeover | None:
    """Ask the process that serves the fleet's address for its listeners."""
    from hetlb.options.peers.takeover import Takeover

    first = fleet.file.addresses[0]
    takeover = await Takeover.ask((first.host, first.port))
    if takeover is not None and event_log is not None:
        try:
            os.rename(event_log, f"{event_log}.before")  # the old process still writes to it
        except FileNotFoundError:
            pass
        except OSError as error:
            takeover.end.close()
            takeover.listeners.only()
            raise InputError(
                f"--event-log: expected a file that can be renamed, got {str(event_log)!r}: {error.strerror}"
            ) from error
    return takeover


async def _serve(fleet: Fleet, event_log: Path | None, replace: bool) -> None:
    takeover = await _ask(fleet, event_log) if replace else None
    service = Service(fleet, OPTIONS, event_log)
    # Imported at the start: when another process takes this one's place the files may be of another version.
    service.offer = Offer(service)
    if fleet.file.shared is not None:
        share(service)
    elif takeover is not None:
        takeover.join(service)
    await run_service(service, systemd.inherited(), takeover)


async def run_service(
    service: Service, listeners: Listeners = NO_LISTENERS, takeover: Takeover | None = None
) -> None:
    """Start a service, log it, and serve until stopped."""
    try:
        await service.start(listeners, takeover)
        tune_gc()
        style = service.fleet.file.proxy.request_log_format
        service.on_hurry = exit_by_force
        await service.run(lambda: announce(service.ready_line, style))
    except asyncio.CancelledError:
        pass  # Ctrl-C before the service had its own handlers
    finally:
        await service.close()


def fleet_of(args: argparse.Namespace) -> Fleet:
    """Return the fleet of the file or the addresses, with the flags applied. Raises `InputError`."""
    fleet = stated_fleet(args)
    listen = fleet.file.listen
    if not isinstance(listen, Listen) and (args.host is not None or args.port is not None):
        raise InputError(f"--host, --port: expected one address under listen in the file, got {len(listen)}")
    fleet = fleet.with_tables(
        listen=changed(listen, host=args.host, port=args.port),
        admin=changed(fleet.file.admin, port=args.admin_port),
        policy=changed(fleet.file.policy, name=args.policy),
        proxy=changed(fleet.file.proxy, workers=args.workers),
    )
    check_policy(fleet.file.policy, "")
    if fleet.file.policy.trace is None:
        return fleet
    from hetlb.balancer.core.length_samples import LengthDistribution
    from hetlb.tools.workload.trace_formats import read_trace

    rows = read_trace(fleet.base / fleet.file.policy.trace)
    lengths = LengthDistribution(row.output_tokens for row in rows)
    return msgspec.structs.replace(fleet, lengths=lengths)
