"""`hetlb status`, and the switches of a running proxy (`drain`, `ready`, `maint`, `policy`), for scripts."""

from __future__ import annotations

import argparse
import time
from typing import Any, Final
from urllib.parse import quote

from hetlb.cli.adminclient import AdminClient, add_admin_argument
from hetlb.cli.flags import FINITE, add_json, declare, print_document
from hetlb.errors import visible

#: Exit status of `status` by state.
EXITS: Final = {"well": 0, "busy": 0, "degraded": 1, "down": 2}
#: Seconds between two looks at an instance (`--wait`).
_LOOK_S: Final = 0.2
#: Seconds that `--wait` waits without `--timeout`.
_WAIT_S: Final = 600.0
#: Condition that `--wait` waits for, by command.
_WAITED_FOR: Final = {
    "drain": "its last request has ended",
    "maint": "its last request has ended",
    "ready": "it answers",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = declare(parser)
    command = parser.prog.rpartition(" ")[2]
    if command == "policy":
        add("name", "policy to switch to; without one the current policy is printed", "NAME", nargs="?")
    elif command != "status":
        add("name", "instance, by its name in `hetlb top`", "NAME")
        add("--wait", f"return when {_WAITED_FOR[command]}", action="store_true")
        add("--timeout", f"longest wait in seconds (default {_WAIT_S:g}); then exit 1", "S", FINITE, _WAIT_S)
    add_admin_argument(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run one of the commands.

    The exit status of a switch is 0 if done, 1 if not in time, 2 without such an instance, policy or proxy.
    `status` ends as `EXITS` says, or with 2 without a proxy.
    """
    client = AdminClient(args.admin)
    if args.command == "status":
        found = client.document("/v1/status", "state", "sentence", "advice")
        line = visible(f"{found['state']}: {found['sentence']}. {found['advice']}")
        print_document(args, found, lambda: print(line))
        return EXITS[found["state"]]
    if args.command == "policy":
        return _policy(args, client)
    path = f"/v1/fleet/instances/{quote(args.name, safe='')}/state"
    client.change("PUT", path, {"state": args.command})
    found, in_time = _instance(client, args.name), True
    ends_at = time.monotonic() + args.timeout
    while args.wait and not _done(args.command, found):
        if time.monotonic() >= ends_at:
            in_time = False
            break
        time.sleep(_LOOK_S)
        found = _instance(client, args.name)
    print_document(args, found | {"in_time": in_time}, lambda: print(visible(_sentence(args.command, found))))
    return 0 if in_time else 1


def _policy(args: argparse.Namespace, client: AdminClient) -> int:
    """Switch the policy, if one is named, and print it."""
    if args.name is None:
        found = {"name": client.document("/v1/fleet", "policy")["policy"]}
    else:
        found = client.change("PUT", "/v1/policy", {"name": args.name})
    return print_document(args, found, lambda: print(visible(str(found.get("name", found.get("policy"))))))


def _instance(client: AdminClient, name: str) -> dict[str, Any]:
    """Return the state of an instance; a removed one has no requests."""
    models = client.document("/v1/fleet", "models")["models"]
    keys = ("name", "state", "health", "in_flight", "queued")
    for each in (each for model in models for each in model["instances"]):
        if each["name"] == name:
            return {key: each[key] for key in keys}
    return dict(zip(keys, (name, "removed", "ejected", 0, 0), strict=True))


def _done(command: str, found: dict[str, Any]) -> bool:
    """Return True if the condition of `--wait` holds."""
    if command == "ready":
        return (found["state"], found["health"]) == ("ready", "up")
    return (found["in_flight"], found["queued"]) == (0, 0)


def _sentence(command: str, found: dict[str, Any]) -> str:
    """Return one line about an instance after the switch."""
    running = int(found["in_flight"]) + int(found["queued"])
    if command == "ready":
        return f"{found['name']} is {found['state']}, health {found['health']}"
    rest = f"{running} request{'s'[: running != 1]} running" if running else "no request running"
    return f"{found['name']} is in {found['state']}, {rest}"
