"""Fuzz one target: `run_target.py NAME --seconds 60 --seed 1`. Exit status 1 where something was found.

With atheris (the extra `fuzz`) the search is led by coverage; without it inputs are mutated at
random from the kept corpus. One seed gives the same inputs in every run without a grown corpus; others
look elsewhere, and `make fuzz` uses the first. What is found lies under `.cache/fuzz/NAME`, and belongs
into `corpus/NAME` with its mending: the tests run every file there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.corpora import corpora

try:
    import atheris
except ImportError:
    atheris = None

#: Each target has a folder of inputs.
TARGETS = sorted(corpora())
FOUND = Path(__file__).resolve().parents[2] / ".cache" / "fuzz"


def mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """One to four small changes."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(out))
        end = min(len(out), at + rng.randint(1, 16))
        choice = rng.randrange(6)
        if choice == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif choice == 1:
            out[at:at] = bytes([rng.choice(b'\r\n\t \0,:;={}[]"0159aAfFxX-+.\x7f\x80\xff')])
        elif choice == 2:
            del out[at:end]
        elif choice == 3:
            out[at:at] = out[at:end] * rng.randint(1, 3)
        elif choice == 4:
            other = rng.choice(others)
            begin = rng.randint(0, len(other))
            out[at:end] = other[begin : begin + rng.randint(1, 40)]
        else:
            out[at:end] = rng.randbytes(end - at)
    return bytes(out)


def without_coverage(name: str, seconds: float, seed: int) -> int:
    """Mutate the kept corpus for that long."""
    from fuzz.targets import TARGETS, seeds

    rng, target = random.Random(seed), TARGETS[name]
    kept = [path.read_bytes() for path in seeds(name)]
    ends, runs = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        data = mutate(rng, rng.choice(kept), kept)
        runs += 1
        try:
            target(data)
        except Exception:
            path = FOUND / name / f"crash-{runs}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            traceback.print_exc()
            print(f"{name}: found after {runs} runs: {path}", file=sys.stderr)
            return 1
    print(f"{name}: {runs} runs without coverage, nothing found")
    return 0


def load() -> None:
    """Import the targets, under atheris's watch: that takes seconds, which forked processes share."""
    watched = contextlib.nullcontext() if atheris is None else atheris.instrument_imports(include=["hetlb"])
    with contextlib.redirect_stderr(io.StringIO()), watched:  # it names each module
        import_module("fuzz.targets")


def fuzz(name: str, seconds: int, seed: int) -> int:
    """Fuzz a target; return 1 where something was found. libFuzzer ends the process with its own status."""
    load()
    if atheris is None:
        return without_coverage(name, seconds, seed)
    with_coverage(name, seconds, seed)
    return 0


def with_coverage(name: str, seconds: int, seed: int) -> None:
    """Let libFuzzer lead; it ends the process with its own status."""
    from fuzz.targets import TARGETS

    grown = FOUND / name / "corpus"
    grown.mkdir(parents=True, exist_ok=True)
    # An input that takes minutes hangs: what is merely slow is for the target `cost` to find, by CPU time. It
    # measures one input up to 500 times, and may have to share the core.
    patience_s = 1800 if name == "cost" else 300
    flags = [
        f"-max_total_time={seconds}", f"-timeout={patience_s}", "-rss_limit_mb=4096", "-max_len=4096",
        f"-seed={seed}", "-verbosity=0", "-print_final_stats=1", f"-artifact_prefix={FOUND / name}/",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *flags, str(grown), str(corpora()[name])], TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    """Fuzz as the arguments say."""
    parser = argparse.ArgumentParser(description="Fuzz one target.")
    parser.add_argument("name", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    return fuzz(arguments.name, arguments.seconds, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
