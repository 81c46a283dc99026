"""Events of the proxy outside of requests (docs/reference/events.md)."""

from __future__ import annotations

import logging
import math
import time
from enum import Enum
from typing import Any, Final

_INFO, _WARNING, _ERROR = logging.INFO, logging.WARNING, logging.ERROR
#: Seconds from one line of a `Rarely` to the next.
_EVERY_S: Final = 10.0


class Event(Enum):
    """One kind of event: its name, its level, and when it is logged."""

    STARTED = "started", _INFO, "the listeners accept requests"
    TOO_MANY_CONNECTIONS = "too_many_connections", _WARNING, "a client was refused: too many are connected"
    STOPPING = "stopping", _INFO, "SIGTERM or SIGINT came, or another process took over"
    STOPPED = "stopped", _INFO, "every request has ended"
    HANDOVER = "handover", _INFO, "the listeners went to the process that replaces this one, or came from it"
    HANDOVER_REFUSED = "handover_refused", _WARNING, "the listeners could not be, or were not, handed over"
    RELOADED = "reloaded", _INFO, "the fleet file was read again and is in force"
    RELOAD_REFUSED = "reload_refused", _ERROR, "it has a mistake; the last good configuration stays"
    CERTIFICATE = "certificate", _INFO, "a reload put another certificate in force"
    POLICY = "policy", _INFO, "the policy was switched"
    INSTANCE_ADDED = "instance_added", _INFO, "an instance came (reload, discovery, registration)"
    INSTANCE_REMOVED = "instance_removed", _INFO, "an instance was removed; its running answers are completed"
    INSTANCE_UPDATED = "instance_updated", _INFO, "it has another profile, capacity or weight"
    INSTANCE_STATE = (
        "instance_state",
        _INFO,
        "an operator drained it, took it out, set it ready or gave notice",
    )
    INSTANCE_UP = "instance_up", _INFO, "it answers"
    INSTANCE_SUSPECT = "instance_suspect", _WARNING, "it failed probes and no other could take over"
    INSTANCE_EJECTED = "instance_ejected", _WARNING, "it is taken out as dead"
    INSTANCE_ABSENT = "instance_absent", _WARNING, "it did not answer the first probes"
    INSTANCE_LOOP = "instance_loop", _ERROR, "it is this proxy, or leads back to it"
    INSTANCE_STALLED = "instance_stalled", _WARNING, "no token comes of it though it should give some"
    INSTANCE_MOVES = "instance_moves", _INFO, "it had stalled and gives tokens again"
    CAUSE = "cause", _WARNING, "the status has a new cause that no other event tells; at most once a minute"
    CAUSE_OVER = "cause_over", _INFO, "no server has the cause any more"
    INSTANCE_MODELS = "instance_models", _INFO, "it serves other models than before"
    INSTANCE_OTHER_MODEL = "instance_other_model", _WARNING, "it does not serve the model of the file"
    INSTANCE_ASLEEP = "instance_asleep", _INFO, "its engine sleeps"
    INSTANCE_AWAKE = "instance_awake", _INFO, "its engine woke up"
    WAKE_FAILED = "wake_failed", _WARNING, "it does not wake up"
    SLEEP_FAILED = "sleep_failed", _WARNING, "it does not sleep"
    INSTANCE_PROFILE = "instance_profile", _WARNING, "it is not what its profile was measured on"
    INSTANCE_HOST_TIME = "instance_host_time", _INFO, "its host time was measured, or could not be"
    INSTANCE_METRICS = "instance_metrics", _WARNING, "its metrics lack what is read, or are too large"
    INSTANCE_ACCESS = "instance_access", _WARNING, "TLS fails, or it does not accept the API key"
    INSTANCE_KV_EVENTS = "instance_kv_events", _WARNING, "its KV events cannot be read"
    TRANSFERS_FAIL = "transfers_fail", _WARNING, "KV caches do not reach an instance; the pair is not split"
    GATEWAY_ELSEWHERE = "gateway_elsewhere", _WARNING, "a gateway did not take a chosen instance"
    DISCOVERY_FAILED = "discovery_failed", _WARNING, "a source cannot be read; its last list stays in force"
    DISCOVERY_CONFLICT = "discovery_conflict", _WARNING, "it gave a name or address that another has"
    REGISTRATION_EXPIRED = "registration_expired", _WARNING, "a registered instance was not registered again"
    EVENT_LOG = "event_log", _INFO, "the event log goes on in another file, or ends"
    SHARED = "shared", _INFO, "the server of the shared view is reached"
    SHARED_LOST = "shared_lost", _WARNING, "the server of the shared view is gone; the own view goes on"
    SHARED_MESSAGE = "shared_message", _WARNING, "an invalid message of the shared view; once in 10 s"
    SHARED_PEER_GONE = "shared_peer_gone", _WARNING, "another process of the fleet is silent; its leases go"
    SHARED_CHANGE = "shared_change", _WARNING, "an operator's change is not in force at a peer"
    REQUEST_FAILED = "request_failed", _ERROR, "hetlb raised an error at a request, which ends alone"
    INTERNAL = "internal", _ERROR, "hetlb raised an error in work of no request; the same once a minute"
    WORKER_ENDED = "worker_ended", _ERROR, "a process ended and is replaced"
    WORKER_HUNG = "worker_hung", _ERROR, "a process does not answer and is killed"
    WORKER_FAILED = "worker_failed", _ERROR, "a process failed, with what is known"

    def __init__(self, event: str, level: int, meaning: str) -> None:
        self.event = event
        self.level = level
        self.meaning = meaning


def tell(
    logger: logging.Logger,
    event: Event,
    message: str,
    *args: object,
    exc_info: bool | BaseException = False,
    **fields: object,
) -> None:
    """Log an event: a sentence for people, `fields` for programs."""
    extra = {"event": event.event, "fields": fields}
    logger.log(event.level, message, *args, extra=extra, exc_info=exc_info)


class Rarely:
    """Log of events that a stranger can cause: a line in ten seconds, with the number of omitted ones."""

    def __init__(self) -> None:
        self._told_at = -math.inf
        self._left_out = 0

    def tell(self, logger: logging.Logger, event: Event, message: str, *args: object, **fields: Any) -> None:
        now = time.monotonic()
        if now - self._told_at < _EVERY_S:
            self._left_out += 1
            return
        if self._left_out:
            message, args = message + " (and %d more like it)", (*args, self._left_out)
        self._told_at, self._left_out = now, 0
        tell(logger, event, message, *args, **fields)
