"""The largest file of requests that a command reads, packed or not: it bounds memory."""

from __future__ import annotations

import zlib

#: Default of `--max-input-mib`.
DEFAULT_MIB = 1024
_PIECE_BYTES = 1 << 20
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
    while data:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            piece = member.decompress(data, _PIECE_BYTES)
            data = member.unused_data if member.eof else member.unconsumed_tail
            out += piece
            if len(out) > most:
                raise OverflowError
            if not piece and not data and not member.eof:
                raise EOFError("it ends in the middle")
        data = data.lstrip(b"\0")  # padding
    return bytes(out)
