"""`hetlb pick`: the endpoint picker for Envoy and the Gateway API."""

from __future__ import annotations

import argparse

import uvloop

from hetlb.balancer.fleet.reloading import require_urls
from hetlb.cli.flags import PORT, changed, declare
from hetlb.cli.serve import add_fleet_arguments, fleet_of, prepare_process, run_service
from hetlb.cli.serving_options import OPTIONS
from hetlb.logs import logging_to_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hetlb pick`; each beats the file."""
    add_fleet_arguments(parser)
    parser.set_defaults(host=None, port=None, workers=None)
    add = declare(parser)
    add("--grpc-port", "port that gateways connect to (default 9002; 0 picks a free one)", "PORT", PORT)


def run(args: argparse.Namespace) -> int:
    from hetlb.options.peers import check_shared
    from hetlb.options.pick.pick_service import PickService, check_pick

    fleet = fleet_of(args)
    fleet = fleet.with_tables(pick=changed(fleet.file.pick, port=args.grpc_port))
    require_urls(fleet)
    check_pick(fleet)
    if fleet.file.shared is not None:
        check_shared(fleet.file.shared, f"{fleet.where}shared")
    if args.check:
        from hetlb.cli.profile_doubts import all_is_well

        return all_is_well(fleet)
    prepare_process()

    async def pick() -> None:
        service = PickService(fleet, OPTIONS, args.event_log)
        if fleet.file.shared is not None:
            from hetlb.options.peers import share

            share(service)
        await run_service(service)

    with logging_to_stderr(fleet.file.proxy.request_log_format):
        uvloop.run(pick())
    return 0
