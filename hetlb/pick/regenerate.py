"""Compiles `ext_proc.proto` to the descriptor that `messages` reads (needs grpcio-tools)."""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDER = Path(__file__).parent


def regenerate(target: Path = _FOLDER / "ext_proc.binpb") -> None:
    """Write the descriptor. Raises `RuntimeError` where the compiler refuses the file."""
    from grpc_tools import protoc

    status = protoc.main(
        ["protoc", f"-I{_FOLDER}", f"--descriptor_set_out={target}", str(_FOLDER / "ext_proc.proto")]
    )
    if status:
        raise RuntimeError(f"protoc ended with status {status}")


if __name__ == "__main__":
    regenerate(*map(Path, sys.argv[1:]))
