"""The endpoint picker, as the fleet file states it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import TlsTable
from hetlb.inputs.option_keys import FileTable
from hetlb.inputs.yaml_file import Port, PositiveInt


class PickTable(FileTable, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The endpoint picker of `hetlb pick`: where gateways reach it (gRPC), and what it tells them.

    With `tls` it speaks TLS; with `client_ca_file` only to gateways whose certificate these authorities have
    signed. On an address of other machines it needs both, or `any_gateway`: every peer is one.
    `fallbacks` are named behind the chosen instance, for the gateway's own retries. `buffer_bytes`:
    Envoy's `per_connection_buffer_limit_bytes`, the largest body that it keeps where it streams the request.
    `objectives` are priorities by the names in `x-gateway-inference-objective`: the higher goes first, below
    0 does not wait.
    """

    host: str = "127.0.0.1"
    port: Port = 9002
    tls: TlsTable | None = None
    client_ca_file: str | None = None
    any_gateway: bool = False
    fallbacks: Annotated[int, msgspec.Meta(ge=0, le=16)] = 2
    buffer_bytes: PositiveInt = 8 << 20
    objectives: dict[str, int] = msgspec.field(default_factory=dict)


def pick_table(fleet: Fleet) -> PickTable:
    """Return the picker's table of the file."""
    stated: PickTable = fleet.file.pick or PickTable()
    return stated
