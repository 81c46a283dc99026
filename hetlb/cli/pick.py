"""`hetlb pick`: the endpoint picker for Envoy and the Gateway API."""

from __future__ import annotations

import argparse
import signal

import uvloop

from hetlb.cli.flags import PORT, changed, declare
from hetlb.cli.serve import add_fleet_arguments, allow_many_connections, fleet_of, run_service
from hetlb.errors import InputError
from hetlb.proxy.service import require_urls
from hetlb.proxy.telemetry.log_writer import logging_to_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb pick`; each beats the file."""
    add_fleet_arguments(parser)
    parser.set_defaults(host=None, port=None, workers=None)
    add = declare(parser)
    add("--grpc-host", "address that gateways connect to (default 127.0.0.1)", "HOST")
    add("--grpc-port", "port that gateways connect to (default 9002; 0 picks a free one)", "PORT", PORT)


def run(args: argparse.Namespace) -> int:
    """Pick until stopped."""
    try:
        from hetlb.pick.pick_service import PickService, check_pick
    except ImportError as error:
        raise InputError(
            f"expected the packages of hetlb[pick]: pip install 'hetlb[pick]' ({error})"
        ) from error
    fleet = fleet_of(args)
    fleet = fleet.with_tables(pick=changed(fleet.file.pick, host=args.grpc_host, port=args.grpc_port))
    require_urls(fleet)
    check_pick(fleet)
    if args.check:
        print(f"{fleet.path or 'the addresses'}: {len(fleet.instances)} instances, all is well")
        return 0
    allow_many_connections()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # rotators of logs send it; its default is to end us

    async def pick() -> None:
        await run_service(PickService(fleet, args.event_log))

    with logging_to_stderr(fleet.file.proxy.request_log_format):
        uvloop.run(pick())
    return 0
