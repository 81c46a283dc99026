"""The request log: a line per ended request, as words or as JSON."""

from collections.abc import Callable

from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.options.request_log.access_log import FORMATS


def hook(style: str) -> Callable[[RequestRecord, float], str]:
    """Return the writer of a line, by the value of `proxy.request_log_format`."""
    return FORMATS[style]
