"""Changes that an operator makes: carried out here, and at every peer of this process."""

from __future__ import annotations

import math
from typing import Annotated, Final, TypeAlias

import msgspec

from hetlb.balancer.core.types import AdminState

#: Longest notice, in seconds: an instance that leaves later has been given none yet.
MOST_NOTICE_S: Final = 86_400
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
_Notice: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MOST_NOTICE_S)]


class SetPolicy(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """Another policy."""

    name: _Name


class SetState(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Administrative state of an instance, with the seconds until it is gone where that is known."""

    instance: _Name
    state: AdminState
    deadline_s: _Notice | None = None

    def __post_init__(self) -> None:
        """Refuse a time that is none. Raises `ValueError`, in decoding `DecodeError`."""
        if self.deadline_s is not None and math.isnan(self.deadline_s):
            raise ValueError("a notice with no time")


class Register(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """An instance that registers; `table` is a JSON object with the keys of an instance."""

    name: _Name
    table: Annotated[bytes, msgspec.Meta(max_length=64 << 10)]


class Unregister(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """An instance taken out."""

    instance: _Name


class ReloadFile(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Another look at the fleet file."""


OperatorChange: TypeAlias = SetPolicy | SetState | Register | Unregister | ReloadFile
