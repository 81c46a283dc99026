"""Responses that their engine keeps: the id of each is noted, and later requests for it go to that engine.

Example: the answer to `POST /v1/responses` begins `{"id": "resp_1", ...`. `GET /v1/responses/resp_1`, its
`/cancel` and a `previous_response_id` go to the instance that gave it. An engine without a store says so.
"""

from __future__ import annotations

import re
from typing import Final

from hetlb.balancer.core.types import Lease, RejectReason
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.exchange.engine_answer import EngineAnswer
from hetlb.balancer.exchange.exchange import Exchange, Maker
from hetlb.balancer.exchange.kept_places import MOST_ID_CHARACTERS, KeptPlaces, Place
from hetlb.balancer.exchange.plain_attempt import Handling, Plain
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.endpoints import KEPT_PATHS
from hetlb.balancer.http.error_responses import Refusal
from hetlb.balancer.http.http1 import GateError, RequestHead

#: The id of a response; in a text of a prompt the quotes would be escaped.
_ID: Final = re.compile(rb'"id"\s{0,4}:\s{0,4}"(resp_[\w.:-]{1,250})"')
#: Bytes in which it stands: engines write it first.
_MOST_BYTES: Final = 4096
_CANCEL: Final = "/cancel"
#: Words about an answer that no instance is known to keep.
UNKNOWN: Final = "No instance is known to keep this response: send the whole conversation in `input`."


class _Noting(Handling):
    """Handling that notes the id at the beginning of an answer."""

    __slots__ = ("_begun", "_places")

    def __init__(self, places: KeptPlaces) -> None:
        super().__init__()
        self._places = places
        self._begun = b""

    def begins(self, attempt: Plain, answer: EngineAnswer, payload: bytes, whole: bool) -> bytes | None:
        if answer.refuses:
            return payload
        begun = self._begun + payload
        found = _ID.search(begun, 0, _MOST_BYTES)
        waits = 0 < len(begun) < _MOST_BYTES and begun.find(b"\n\n") < 0  # no event is held
        if found is None and not whole and waits:
            self._begun = begun
            return None
        self._begun = b""
        if found is not None:
            record, lease = attempt.exchange.record, attempt.lease
            place = Place(lease.instance, lease.request.model, record.tenant)
            self._places.note(found[1].decode("ascii"), place)
        return begun


class NotingMaker(Maker):
    """Maker of the attempts of requests with answers that may be kept."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def attempt(self, exchange: Exchange, lease: Lease, gives_ids: bool, max_model_len: int) -> Plain:
        return Plain(self._driver, exchange, lease, _Noting(self._driver.kept))


def kept_place(driver: Driver, response_id: str, owner: str | None) -> Place | None:
    """Return the place of a response that a key asked for, None without one. Raises `GateError`.

    If its instance takes no requests now, the error is a 503: later it may take some.
    """
    place = driver.kept.of(response_id, owner) if len(response_id) <= MOST_ID_CHARACTERS else None
    takes = None if place is None else driver.scheduling.fleet.takes(place.instance)
    if takes is False:
        text = "The instance that keeps this response takes no requests now."
        raise Refusal(error_responses.REJECTIONS[RejectReason.NO_INSTANCE], text, 1.0)
    return None if takes is None else place


def place_asked_for(driver: Driver, head: RequestHead, owner: str | None) -> Place:
    """Return the place of the response that a path names. Raises `GateError`."""
    name = head.path[len(KEPT_PATHS) :]
    method = b"GET"
    if name.endswith(_CANCEL):
        name, method = name[: -len(_CANCEL)], b"POST"
    if "/" in name:
        raise GateError(404, "Not Found")
    if head.method != method:
        answer = error_responses.bad_request(405, "method_not_allowed")
        raise Refusal(answer, "Method Not Allowed", lines=b"allow: " + method + b"\r\n")
    place = kept_place(driver, name, owner)
    if place is None:
        raise GateError(404, UNKNOWN)
    return place
