"""Answers of clients that lost some: one client alone says nothing about an instance.

A client is known by its session, and by its tenant and address, at each model by itself: what one model
answers says nothing about the instances of another. A lost answer counts against an instance if the same
client is answered elsewhere. It does not count if the client's requests are lost there too. If the client has
been nowhere else, all its losses count as one.
"""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.types import Request

#: Clients remembered: the last that lost an answer.
_MOST_CLIENTS: Final = 256
#: Counts below this are forgotten.
_LEAST: Final = 0.05


def client_of(request: Request) -> str:
    """Return the tenant, address and model of the client of a request, "" if none is known."""
    if request.tenant is None and not request.client:
        return ""
    return f"{request.tenant or ''}@{request.client} {request.model}"


def session_of(request: Request) -> str:
    """Return the client's session of a request, or else the client itself."""
    keys = request.prefix_keys
    if keys and keys[0][1] is None:
        return keys[0][0]
    return client_of(request)


def traffic_of(request: Request) -> str:
    """Return the key of one client's requests to one path of a model that begin with the same prompt."""
    keys = request.prefix_keys
    start = keys[1 if keys and keys[0][1] is None and len(keys) > 1 else 0][0] if keys else ""
    return f"{start} {request.path} {client_of(request)}"


def kind_of(request: Request) -> str:
    """Return the key of one client's requests to one path of a model, with any prompt."""
    return f" {request.path} {client_of(request)}"


@mypyc_attr(acyclic=True)
class ClientAnswers:
    """Good and lost answers by client and instance (its incarnation); `known` is empty in a good hour."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        #: By client and instance: good answers, lost ones.
        self.known: dict[str, dict[int, list[float]]] = {}

    def lost(self, client: str, instance: int) -> None:
        """Count a lost answer of a client."""
        counts = self.known.pop(client, None)
        if counts is None:
            counts = {}
            while len(self.known) >= _MOST_CLIENTS:
                del self.known[next(iter(self.known))]
        self.known[client] = counts  # the newest last
        counts.setdefault(instance, [0.0, 0.0])[1] += 1.0

    def well(self, request: Request, instance: int, *, odd: bool = False) -> None:
        """Count a good answer if its client lost some.

        An `odd` answer is not counted as good for its traffic and its kind.
        """
        client, session = client_of(request), session_of(request)
        keys = {client, session}
        for each in keys if odd else keys | {traffic_of(request), kind_of(request)}:
            counts = self.known.get(each)
            if counts is not None:
                counts.setdefault(instance, [0.0, 0.0])[0] += 1.0

    def counted(self, client: str, instance: int, lost: float) -> float:
        """Return how many of the `lost` answers of a client count against an instance."""
        least = math.inf
        for other, counts in self.known.get(client, {}).items():
            count = counts[0] + counts[1]
            if other != instance and count >= 1.0 - _LEAST:
                least = min(least, counts[1] / count)
        if least == math.inf:
            return min(lost, 1.0)
        return lost * (1.0 - least)

    def fails_everywhere(self, client: str) -> bool:
        """Return True if a client is known to be answered well by no instance, and was at several."""
        counts = self.known.get(client, {}).values()
        return len(counts) > 1 and all(well <= _LEAST * lost for well, lost in counts)

    def age(self, keep: float) -> None:
        """Multiply all counts by `keep`."""
        for client in list(self.known):
            counts = self.known[client]
            for instance in list(counts):
                each = counts[instance]
                each[0] *= keep
                each[1] *= keep
                if each[0] < _LEAST and each[1] < _LEAST:
                    del counts[instance]
            if not counts:
                del self.known[client]
