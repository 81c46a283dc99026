"""The largest file of requests that a command reads, packed or not: it bounds memory."""

from __future__ import annotations

import zlib

#: Default of `--max-input-mib`.
DEFAULT_MIB = 1024
_PIECE_BYTES = 1 << 20
#: Packed bytes that are given to zlib at once: what a short member leaves of them is copied.
_GIVEN_BYTES = 16 << 10
#: The limit in bytes of this run.
_limit = [DEFAULT_MIB << 20]


def set_limit(mib: int) -> None:
    _limit[0] = mib << 20


def max_input_bytes() -> int:
    """Return the limit of this run."""
    return _limit[0]


def too_large() -> str:
    """Return the words for a file beyond the limit."""
    return f"expected at most {_limit[0] >> 20} MiB (--max-input-mib), got more"


def unpacked(data: bytes) -> bytes:
    """Return the content of a gzip file. Raises `zlib.error`, `EOFError`, above a limit `OverflowError`."""
    most, out = _limit[0], bytearray()
    view, at = memoryview(data), 0
    while at < len(view):
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            given = view[at : at + _GIVEN_BYTES]
            piece = member.decompress(given, _PIECE_BYTES)
            at += len(given) - len(member.unused_data if member.eof else member.unconsumed_tail)
            out += piece
            if len(out) > most:
                raise OverflowError
            if not piece and not given and not member.eof:
                raise EOFError("it ends in the middle")
        while at < len(view) and not view[at]:  # padding
            given = view[at : at + _GIVEN_BYTES]
            at += len(given) - len(bytes(given).lstrip(b"\0"))
    return bytes(out)
