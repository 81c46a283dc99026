"""Service classes of requests: by header, key and model, with the targets that a request may change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetlb.balancer.config.fleet_tables import LEAST_TARGET_MS, MOST_TARGET_MS
from hetlb.balancer.core.objective import UNSTATED, ServiceClass
from hetlb.balancer.http.http1 import GateError, RequestHead

_CLASS = b"x-hetlb-class"
#: Headers that change a target, and the attribute that each one changes.
_TARGETS = (
    (b"x-hetlb-slo-ttft-ms", "ttft_s"),
    (b"x-hetlb-slo-tpot-ms", "tpot_s"),
    (b"x-hetlb-slo-e2e-ms", "e2e_s"),
)


class ServiceClasses:
    """Classes of each model by name, the default first."""

    def __init__(self, by_model: Mapping[str, Mapping[str, ServiceClass]]) -> None:
        self._by_model = by_model

    def background(self, model: str, allowed: Sequence[str] | None) -> str | None:
        """Return the first background class of a model that a key may use, None without one."""
        for name, service in self._by_model.get(model, {}).items():
            if service.background and (allowed is None or name in allowed):
                return name
        return None

    def of(self, model: str, head: RequestHead, allowed: Sequence[str] | None) -> ServiceClass:
        """Return the class of a request, one that its key may use. Raises `GateError` (400, 403)."""
        classes = self._by_model.get(model)
        if not classes:
            return UNSTATED
        asked = head.fields.get(_CLASS)
        usable = [name for name in classes if allowed is None or name in allowed]
        if asked is None:
            if not usable:
                raise GateError(403, f"This API key may use no class of the model `{model}`.")
            service = classes[usable[0]]
        else:
            name = asked.decode("ascii", "replace")
            if name not in classes:
                known = ", ".join(classes)
                raise GateError(400, f"x-hetlb-class: expected one of {known}, got {name[:64]!r}.")
            if name not in usable:
                raise GateError(403, f"This API key may not use the class `{name}`.")
            service = classes[name]
        for header, attribute in _TARGETS:
            stated = head.fields.get(header)
            if stated is not None:
                service = _changed(service, header.decode(), attribute, stated)
        return service


def _changed(service: ServiceClass, header: str, attribute: str, stated: bytes) -> ServiceClass:
    """Return the class with a target that is no tighter than its own. Raises `GateError` (400)."""
    limit_s = getattr(service, attribute)
    try:
        seconds = float(stated) / 1e3
    except ValueError:
        seconds = math.nan
    if not LEAST_TARGET_MS <= seconds * 1e3 <= MOST_TARGET_MS:
        bounds = f"{LEAST_TARGET_MS:g} to {MOST_TARGET_MS:g}"
        raise GateError(400, f"{header}: expected milliseconds, {bounds}.")
    if limit_s == math.inf:
        raise GateError(400, f"{header}: the class `{service.name}` has no such target.")
    if seconds < limit_s:
        raise GateError(400, f"{header}: the class `{service.name}` allows {limit_s * 1e3:g} ms at least.")
    if attribute == "ttft_s":
        return replace(service, ttft_s=seconds)
    return replace(service, tpot_s=seconds) if attribute == "tpot_s" else replace(service, e2e_s=seconds)
