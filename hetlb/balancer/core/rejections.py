"""Rejections: reason, text for the client, and seconds after which to try again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import Reject, RejectReason, Request, RequestId

#: Message about a request that an engine dropped without a byte of an answer.
DROPPED: Final = "The instance closed the connection without answering."
#: Largest number of names in an answer.
_LISTED_NAMES: Final = 20


def later(request_id: RequestId, reason: RejectReason, text: str) -> Reject:
    """Refuse a request that another time might be served."""
    return Reject(request_id, reason, text, retry_after_s=1.0)


def queue_full(request_id: RequestId) -> Reject:
    """Reject a request without room in the queue, or to make room for others."""
    return later(request_id, RejectReason.QUEUE_FULL, "Too many requests are waiting for an instance.")


def expired(request_id: RequestId, waited_s: float) -> Reject:
    """Reject a request after the longest allowed wait."""
    text = f"The request waited {waited_s:.0f} s for an instance and none became free."
    return later(request_id, RejectReason.QUEUE_EXPIRED, text)


def unknown_model(request: Request, instances: Iterable[Instance], models: Iterable[str]) -> Reject:
    """Reject a request for a model that no instance of the fleet is known to serve; `models` exist."""
    fleet = list(instances)
    if not fleet:
        return later(request.id, RejectReason.NO_INSTANCE, "No instance is there yet.")
    if any(each.served is None and not each.spec.model for each in fleet):
        text = f"Not every instance has listed its models yet; none of the others serves {request.model!r}."
        return later(request.id, RejectReason.NO_INSTANCE, text)
    names = ", ".join(islice(models, _LISTED_NAMES))
    text = f"The model `{request.model}` does not exist. Valid names: {names or 'none yet'}."
    return Reject(request.id, RejectReason.UNKNOWN_MODEL, text)


def too_long(request: Request, longest: float) -> Reject:
    """Reject a prompt longer than `longest` tokens, the limit of the model's largest instance."""
    text = f"This model's maximum context length is {longest:.0f} tokens. "
    text += (
        f"However, your prompt has {request.longest_prompt_tokens} input tokens. Please reduce its length."
    )
    return Reject(request.id, RejectReason.TOO_LONG, text)


def no_instance(request: Request) -> Reject:
    """Reject a request after the longest allowed wait for an instance of its model."""
    text = f"No instance of the model `{request.model}` is up."
    return later(request.id, RejectReason.NO_INSTANCE, text)


def not_answered(request_id: RequestId, *, unsent: bool) -> Reject:
    """Refuse a request that no engine answered; `unsent`: none can have run it."""
    if unsent:
        text = "No instance of this model accepts connections."
        return later(request_id, RejectReason.CONNECT_FAILED, text)
    return Reject(request_id, RejectReason.NO_RESPONSE, DROPPED)


def policy_failed(request_id: RequestId) -> Reject:
    """Refuse a request after an error of the policy, or after its invalid choice."""
    return Reject(request_id, RejectReason.POLICY_FAILED, "The scheduling policy failed on this request.")
