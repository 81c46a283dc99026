"""Kinds of requests that one instance refuses and another one answers: they go where they are answered.

A kind is a model, a path, whether it is a stream, and a field of the body that is not in every request
(`tools`), or none of these for a request without such a field; a body from some length on; or one client. An
instance that refused a kind gets one request of it at a time, a trial, after a pause that doubles; all other
requests go on as before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.evidence.clients import session_of
from hetlb.balancer.core.types import Request

#: Model, path (with a mark of a stream) and field of a kind; "" and "" and the client.
KindKey: TypeAlias = tuple[str, str, str]

#: Kinds remembered, the newest.
_MOST_KINDS: Final = 256
#: Seconds before the first trial. The most before later trials: of something that a server lacks; of a
#: feature that requests ask for.
PAUSE_S: Final = 1.0
_MOST_PAUSE_S: Final = 3.0
_MOST_PAUSE_OF_REQUEST_S: Final = 30.0
#: Seconds without a refusal after which a kind is forgotten.
_FORGOTTEN_S: Final = 300.0
#: Statuses about a body, and about its length alone.
_ABOUT_BODIES: Final = (400, 413, 414, 415, 422, 431, 501)
_ABOUT_LENGTHS: Final = (413, 414, 431)
#: Seconds that a client is answered elsewhere for after a lost answer.
AVOID_S: Final = 2.0
#: Requests that all instances refuse: as many as a client may send at once, and per second. Beyond that no
#: other instance is asked.
_VAIN_ASKS: Final = 5.0
_VAIN_ASKS_PER_S: Final = 0.5
_MOST_ASKERS: Final = 256


def path_of(request: Request) -> str:
    """Return the path of a request, with a mark of a stream."""
    return f"{request.path} (stream)" if request.streamed else request.path


@mypyc_attr(acyclic=True)
class RefusedKind:
    """Refusals of one kind by one instance."""

    __slots__ = (
        "_most_pause_s", "_pause_s", "at", "count", "least_bytes", "next_trial_at", "served_bytes", "since",
        "status", "trial",
    )  # fmt: skip

    def __init__(self, status: int, feature: str) -> None:
        #: The newest refusal: its status and time; refusals so far.
        self.status = status
        self.at = 0.0
        self.count = 0
        #: Time of the first refusal since it was answered.
        self.since = 0.0
        #: Bodies from this length on are refused; the longest that was answered.
        self.least_bytes = math.inf
        self.served_bytes = -1.0
        #: Lease of the trial under way, 0 for none.
        self.trial = 0
        self.next_trial_at = 0.0
        of_request = (feature and status in _ABOUT_BODIES) or status in _ABOUT_LENGTHS
        self._pause_s, self._most_pause_s = PAUSE_S, _MOST_PAUSE_OF_REQUEST_S if of_request else _MOST_PAUSE_S

    def refuses(self, status: int, size: float, least: float, now: float) -> None:
        """Note that a request of `size` bytes was refused, and bodies from `least` on with it."""
        if self.served_bytes >= 0.0 or status in _ABOUT_LENGTHS:
            least = max(least, min(size, self.served_bytes + 1.0))
        if self.least_bytes == math.inf:
            self.since = now
        self.least_bytes = min(self.least_bytes, least)
        self.status, self.at, self.trial = status, now, 0
        self.count += 1
        self.next_trial_at = max(self.next_trial_at, now + self._pause_s)

    def tried(self, lease_id: int, now: float) -> None:
        """Note that a trial is under way."""
        self.trial, self.next_trial_at = lease_id, now + self._pause_s
        self._pause_s = min(self._most_pause_s, 2.0 * self._pause_s)

    def serves(self, size: float) -> None:
        """Note that a request of `size` bytes was answered."""
        self.trial = 0
        self.served_bytes = max(self.served_bytes, size)
        if size >= self.least_bytes:
            self.least_bytes = math.inf


@mypyc_attr(acyclic=True)
class RefusedKinds:
    """Refusals of the instances of a fleet, by kind; `by_key` is empty in a good hour."""

    __slots__ = ("_vain", "by_key")

    def __init__(self) -> None:
        #: By kind and instance.
        self.by_key: dict[KindKey, dict[str, RefusedKind]] = {}
        #: By client: its remaining requests that all instances may refuse, and the time of that count.
        self._vain: dict[str, tuple[float, float]] = {}

    @property
    def known(self) -> bool:
        """True if some instance refuses some kind of request: features matter."""
        return any(key[0] for key in self.by_key) if self.by_key else False

    def refused(self, request: Request, instance: str, status: int, now: float) -> None:
        """Note that an instance refused a request that another one answers."""
        features: Sequence[str] = request.features or ()
        plain = not features or status in _ABOUT_LENGTHS
        size = float(request.body_bytes)
        least = size if plain and status in _ABOUT_BODIES else 0.0
        for feature in ("",) if plain else features:
            self._kind((request.model, path_of(request), feature), instance, status).refuses(
                status, size, least, now
            )

    def refuses(self, request: Request, instance: str, status: int, now: float) -> bool:
        """Return True if it is known that an instance refuses such requests, and note that it did again."""
        known = False
        if self.by_key:
            for feature in ("", *(request.features or ())):
                kind = self.by_key.get((request.model, path_of(request), feature), {}).get(instance)
                if kind is not None and kind.status == status and request.body_bytes >= kind.least_bytes:
                    kind.refuses(status, request.body_bytes, kind.least_bytes, now)
                    known = True
        return known

    def avoid(self, request: Request, instance: str, now: float) -> None:
        """Keep a client's requests from the instance that lost its answer, until a trial in `AVOID_S`."""
        client = session_of(request)
        if client:
            kind = self._kind(("", "", client), instance, 0)
            kind.refuses(0, 0.0, 0.0, now)
            kind.next_trial_at = now + AVOID_S

    def not_avoided(self, request: Request, instance: str) -> None:
        """Note that a client's lost answer was its request's fault."""
        kinds = self.by_key.get(("", "", session_of(request)))
        if kinds is not None:
            kinds.pop(instance, None)
            if not kinds:
                del self.by_key["", "", session_of(request)]

    def _kind(self, key: KindKey, instance: str, status: int) -> RefusedKind:
        kinds = self.by_key.get(key)
        if kinds is None:
            while len(self.by_key) >= _MOST_KINDS:
                del self.by_key[next(iter(self.by_key))]
            kinds = self.by_key[key] = {}
        kind = kinds.get(instance)
        if kind is None:
            kind = kinds[instance] = RefusedKind(status, key[2] if key[0] else "")
        return kind

    def _of(self, request: Request) -> list[dict[str, RefusedKind]]:
        """Return the kinds of a request that some instance refuses."""
        found: list[dict[str, RefusedKind]] = []
        for feature in ("", *(request.features or ())):
            kinds = self.by_key.get((request.model, path_of(request), feature))
            if kinds is not None:
                found.append(kinds)
        client = self.by_key.get(("", "", session_of(request)))
        if client is not None:
            found.append(client)
        return found

    def against(self, request: Request, now: float, *, again: bool) -> dict[str, str]:
        """Return the reason for each instance that refuses the kind of a request.

        Without `again` an instance that is due for a trial is left out.
        """
        reasons: dict[str, str] = {}
        for kinds in self._of(request):
            for instance, kind in kinds.items():
                held = again or kind.trial or now < kind.next_trial_at
                if held and request.body_bytes >= kind.least_bytes:
                    reasons[instance] = why(kind)
        return reasons

    def dispatched(self, request: Request, instance: str, lease_id: int, now: float) -> None:
        """Note where a request went: it may be a trial."""
        for kinds in self._of(request):
            kind = kinds.get(instance)
            if kind is not None and request.body_bytes >= kind.least_bytes:
                kind.tried(lease_id, now)

    def served(self, request: Request, instance: str, since: float) -> None:
        """Note that an instance answered a request that it got at `since`."""
        for kinds in self._of(request):
            kind = kinds.get(instance)
            if kind is not None and since >= kind.at:
                kind.serves(request.body_bytes)

    def ended(self, request: Request, instance: str, lease_id: int) -> None:
        """Note that a request ended that was neither answered nor refused."""
        for kinds in self._of(request):
            kind = kinds.get(instance)
            if kind is not None and kind.trial == lease_id:
                kind.trial = 0

    def by_instance(self) -> dict[str, list[tuple[KindKey, RefusedKind]]]:
        """Return what each instance refuses now, without what single clients lost there."""
        found: dict[str, list[tuple[KindKey, RefusedKind]]] = {}
        for key, kinds in self.by_key.items():
            for instance, kind in kinds.items() if key[0] else ():
                if kind.least_bytes < math.inf:
                    found.setdefault(instance, []).append((key, kind))
        return found

    def forget(self, instance: str) -> None:
        """Forget what an instance refused: its process is new, or it has left."""
        for key in list(self.by_key):
            self.by_key[key].pop(instance, None)
            if not self.by_key[key]:
                del self.by_key[key]

    def age(self, now: float) -> None:
        """Drop the refusals whose time is over."""
        for key in list(self.by_key):
            kinds = self.by_key[key]
            forgotten_s = _FORGOTTEN_S if key[0] else AVOID_S
            for instance in [each for each, kind in kinds.items() if now - kind.at > forgotten_s]:
                if not kinds[instance].trial:
                    del kinds[instance]
            if not kinds:
                del self.by_key[key]

    # --- mistakes of clients ---

    def may_ask(self, request: Request, now: float) -> bool:
        """Return True unless too many refusals of this client were its own mistakes."""
        return self._left(session_of(request), now) >= 1.0

    def asked_in_vain(self, request: Request, now: float) -> None:
        """Note that all refuse a request: it is its client's mistake."""
        client = session_of(request)
        left = self._left(client, now)
        self._vain.pop(client, None)
        while len(self._vain) >= _MOST_ASKERS:
            del self._vain[next(iter(self._vain))]
        self._vain[client] = left - 1.0, now

    def _left(self, client: str, now: float) -> float:
        left, at = self._vain.get(client, (_VAIN_ASKS, now))
        return min(_VAIN_ASKS, left + _VAIN_ASKS_PER_S * (now - at))


def why(kind: RefusedKind) -> str:
    """Return the message that says why a request of this kind does not go to an instance."""
    return f"it refuses such requests ({kind.status})" if kind.status else "its client lost an answer there"
