"""Collector of spans, as the fleet file states it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from hetlb.balancer.config.fleet import Fleet
from hetlb.errors import ConfigError
from hetlb.extras import check_extra
from hetlb.inputs.urls import check_base


class TracingTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Collector of spans: its address (OTLP over HTTP).

    `service_name` is the key to find them; `sample_ratio` is the share that is kept of the requests of
    clients that do not say whether theirs is.
    """

    otlp_endpoint: str
    service_name: str = "hetlb"
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


def mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield a line where the collector's address is none."""
    try:
        check_base(fleet.file.tracing.otlp_endpoint, "tracing.otlp_endpoint", "http://collector:4318")
    except ConfigError as error:
        yield str(error)


def check_serving(fleet: Fleet) -> None:
    """Raise `ConfigError` unless the packages are installed."""
    check_extra(f"{fleet.where}tracing", "opentelemetry.exporter.otlp.proto.http", "otel")
