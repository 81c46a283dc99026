"""The reference column: what other proxies do with the same faults, one faulty engine, one streaming request.

Shows, for every proxy and fault: the status the client saw, whether the stream could be taken for complete,
how often the engine ran the request, and whether it was let go when the client left.
Every proxy is installed as `bench/proxies` has it and runs with its own defaults for retries; the
circuit breakers of the two routers are off, so that no row depends on the one before. hetlb runs beside them
on the same engine. Rows that a proxy could not be started for are left out and named.

`.venv/bin/python bench/faults/compared.py [--only NAME,…] [--save bench/results/faults-compared.json]` prints
every row, and the summary of bench/faults/RESULTS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "proxies"))

import peers as installed
from faults.client import PATH, Client, body_of, request
from faults.engine import FaultEngine, Visit

ROOT = Path(__file__).resolve().parents[2]
PROXIES = ("haproxy", "nginx", "envoy", "sglang-router", "vllm-router", "hetlb")
#: Rows of the table: what it is called, and the engine's mode.
FAULTS = (
    ("well", "ok"),
    ("429", "429"),
    ("500", "500"),
    ("closes without an answer", "close"),
    ("resets without an answer", "reset"),
    ("junk", "junk"),
    ("dies in the stream (FIN)", "fin"),
    ("dies in the stream (RST)", "rst"),
    ("ends without [DONE]", "no-done"),
    ("bad chunk size", "bad-chunk"),
    ("a body without length is cut", "no-length-cut"),
    ("a body shorter than its length", "short-length-stream"),
    ("both framings", "te-cl"),
    ("two lengths", "dup-cl"),
    ("trailers", "trailers"),
    ("a second answer", "second-response"),
    ("redirects", "redirect"),
)
LEAVES = (
    ("client leaves before the head", "stall"),
    ("client leaves in the stream", "endless"),
    ("client leaves while the engine stalls", "stall-mid"),
)
#: An answer that takes longer is none, seconds; an engine that is held longer is held.
PATIENCE_S, HELD_S = 8.0, 4.0


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def command(name: str, port: int, engine: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    """How a proxy is started for one engine, and its environment."""
    if name == "hetlb":
        flags = ["--instance", f"http://127.0.0.1:{engine}", "--port", str(port), "--admin-port", "0"]
        return [sys.executable, "-m", "hetlb", "serve", *flags, "--policy", "rr"], {}
    peer = installed.PEERS[name]
    peer.install()
    if name.endswith("-router"):
        # bench/proxies turns retries off; here they are the point.
        argv = peer.command(port, free_port(), [engine], folder)
        kept = [each for each in argv if each != "--disable-retries"]
        return [*kept, "--disable-circuit-breaker"], dict(peer.environment)
    return peer.command(port, free_port(), [engine], folder), dict(peer.environment)


@contextlib.asynccontextmanager
async def started(name: str, engine: FaultEngine, folder: Path) -> AsyncIterator[int]:
    """A proxy in front of an engine; its port. Raises `RuntimeError` if it does not come up."""
    port = free_port()
    argv, environment = command(name, port, engine.port, folder)
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=log, stderr=log, cwd=folder, env={**os.environ, **environment}
        )
        try:
            await _ready(name, process, port, folder)
            yield port
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), 8)
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def _ready(name: str, process: asyncio.subprocess.Process, port: int, folder: Path) -> None:
    for attempt in range(240):
        if process.returncode is not None:
            break
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
            if (await one(port, f"ready-{attempt}"))["status"] == 200:
                return
        await asyncio.sleep(0.25)
    tail = (folder / f"{name}.log").read_text(errors="replace")[-600:]
    raise RuntimeError(f"{name} did not come up: {tail}")


async def one(port: int, label: str) -> dict[str, Any]:
    """One streaming request: status, how the answer ended, and whether it holds an error event."""
    async with Client(port) as client:
        client.send(request(label, body_of(label)))
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await client.answer()
        except TimeoutError:
            return {"status": None, "end": "nothing"}
        except asyncio.IncompleteReadError as cut:
            return {"status": None, "end": "raw bytes" if cut.partial else "closed"}
        except (ValueError, IndexError):
            return {"status": None, "end": "no HTTP"}
        except AssertionError:
            return {"status": 200, "end": "something behind the end", "error_event": False}
    # Where only the close ends an answer, it looks as complete as one can.
    end = "clean" if answer.end == "closed" else "cut" if answer.end == "reset" else answer.end
    return {
        "status": answer.status,
        "end": end,
        "error_event": answer.status == 200 and b'data: {"error"' in answer.body,
        "smuggled": b"smuggled" in answer.body,
        "both_framings": {"content-length", "transfer-encoding"} <= {name for name, _ in answer.headers},
    }


async def fault(port: int, engine: FaultEngine, mode: str) -> dict[str, Any]:
    """What comes of one request that meets a fault."""
    engine.visits.clear()
    engine.mode = mode
    found = await one(port, f"fault-{mode}")
    engine.mode = "ok"
    return {**found, "runs": len(_generations(engine))}


def _generations(engine: FaultEngine) -> list[Visit]:
    """The requests that a client sent: some proxies ask the engine things of their own."""
    return [visit for visit in engine.visits if (visit.method, visit.path) == ("POST", PATH)]


async def leaves(port: int, engine: FaultEngine, mode: str) -> dict[str, Any]:
    """How long the engine is held for a client that has left, seconds; None beyond the patience."""
    engine.visits.clear()
    engine.mode, engine.pace_s = mode, 0.05
    loop = asyncio.get_running_loop()
    async with Client(port) as client:
        client.send(request(f"left-{mode}", body_of("left")))
        await engine.until(lambda: bool(_generations(engine)))
        (visit,) = _generations(engine)
        if mode != "stall":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await client.first_token()
        tokens, left_at = visit.tokens, loop.time()
        client.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELD_S):
                await visit.left.wait()
        held = visit.left_at is None
        found = {
            "held_s": None if visit.left_at is None else visit.left_at - left_at,
            "more_tokens": visit.tokens - tokens,
        }
    engine.mode, engine.pace_s = "ok", 0.0
    if held:
        for writer in list(engine.open):
            writer.transport.abort()
    return found


async def measure(name: str, folder: Path) -> dict[str, Any]:
    """Every row for one proxy, each against a proxy that has just answered well."""
    rows: dict[str, Any] = {}
    async with FaultEngine() as engine, started(name, engine, folder) as port:
        for title, mode in FAULTS:
            rows[title] = await fault(port, engine, mode)
            await one(port, f"well-after-{mode}")
        for title, mode in LEAVES:
            rows[title] = await leaves(port, engine, mode)
    for head in engine.nonsense:
        print(f"{name} sent the engine what is no request: {head[:100]!r}", file=sys.stderr)
    version = installed.PEERS[name].version() if name != "hetlb" else _commit()
    return {"version": version, "rows": rows}


def _commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def cell(row: dict[str, Any]) -> str:
    """One row of one proxy in a few words."""
    if "held_s" in row:
        if row["held_s"] is None:
            return f"**held** > {HELD_S:g} s"
        return f"closed, {1e3 * row['held_s']:.0f} ms, {row['more_tokens']} more"
    words = [str(row["status"] or row["end"])]
    if row["status"] == 200:
        words.append("error event, cut" if row["error_event"] and row["end"] == "cut" else row["end"])
    if row.get("smuggled"):
        words.append("**second answer seen**")
    if row.get("both_framings"):
        words.append("**both framings**")
    runs = f"run {row['runs']}"
    return ", ".join([*words, f"**{runs}**" if row["runs"] > 2 else runs])


def table(results: dict[str, Any]) -> str:
    """Every row of every proxy."""
    names = [f"{name} {result['version']}" if name != "hetlb" else name for name, result in results.items()]
    lines = [f"| fault | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for title, _ in (*FAULTS, *LEAVES):
        lines.append(f"| {title} | {' | '.join(cell(each['rows'][title]) for each in results.values())} |")
    return "\n".join(lines)


def summary(results: dict[str, Any]) -> str:
    """The table of bench/faults/RESULTS.md, a line for each proxy."""
    names = ("most runs of one request", "broken answers that end clean", "engine held after its client left")
    lines = [f"| proxy | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    broken = [title for title, _ in FAULTS if title not in ("well", "a second answer")]
    for name, result in results.items():
        rows = result["rows"]
        runs = max(row["runs"] for row in rows.values() if "runs" in row)
        clean = sum(rows[title]["status"] == 200 and rows[title]["end"] == "clean" for title in broken)
        held = sum(rows[title]["held_s"] is None for title, _ in LEAVES)
        lines.append(
            f"| {name} {result['version']} | {runs} | {clean} of {len(broken)} | {held} of {len(LEAVES)} |"
        )
    return "\n".join(lines)


async def everything(names: list[str], folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Results by proxy, and why the others have none."""
    results, absent = {}, {}
    for name in names:
        try:
            results[name] = await measure(name, folder)
        except (RuntimeError, OSError, subprocess.CalledProcessError, KeyError) as error:
            absent[name] = str(error)
    return results, absent


def main() -> int:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(description="The same faults for every proxy.")
    parser.add_argument("--only", default=",".join(PROXIES), help=f"some of {','.join(PROXIES)}")
    parser.add_argument("--save", type=Path, help="write the document here")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in PROXIES]:
        parser.error(f"--only: expected some of {', '.join(PROXIES)}, got {unknown[0]!r}")
    with tempfile.TemporaryDirectory() as folder:
        results, absent = asyncio.run(everything(names, Path(folder)))
    for name, reason in absent.items():
        print(f"{name}: absent: {reason}", file=sys.stderr)
    print(table(results), summary(results), sep="\n\n")
    if arguments.save is not None:
        document = {"recorded": datetime.now(UTC).strftime("%Y-%m-%d"), "absent": absent, "proxies": results}
        arguments.save.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
