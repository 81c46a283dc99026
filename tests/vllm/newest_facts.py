"""What vLLM's source says, read without running it, against what hetlb knows: paths, fields, metrics, flags.

    pip download --no-deps vllm==VERSION -d W && unzip -q W/*.whl 'vllm/*.py' -d W/src
    python tests/vllm/newest_facts.py W/src/vllm

Prints what is unknown, a line each, and exits 1 if there is any. A new path gets a line in `endpoints.py` or
in `REFUSED`; a new field goes to engines unread, so it is only written down in `data/known-fields.json`
(`--write`) once it was checked whether it changes the work of a request or reaches other requests'.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hetlb.balancer.engines import engine_metrics
from hetlb.balancer.engines.engine_tables import VLLM
from hetlb.balancer.http.endpoints import ENDPOINTS, KEPT_PATHS, REALTIME_PATH
from hetlb.tools.plan.common import servers

KNOWN_FIELDS = Path(__file__).parent / "data" / "known-fields.json"
#: Answered by hetlb itself.
OWN = frozenset({"/health", "/ping", "/version", "/v1/models", "/metrics", "/load"})
#: Administration of one engine, and of tokens in place of text: 404, unless in `proxy.extra_paths`.
REFUSED = frozenset(
    {
        "/abort_requests", "/collective_rpc", "/fault_tolerance/apply", "/fault_tolerance/status",
        "/finish_weight_update", "/get_world_size", "/init_weight_transfer_engine", "/is_paused",
        "/is_scaling_elastic_ep", "/is_sleeping", "/kv_event_sources", "/pause", "/release_kv_cache_memory",
        "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache", "/resume", "/scale_elastic_ep",
        "/server_info", "/shutdown_weight_transfer_engine", "/sleep", "/start_draft_weight_update",
        "/start_profile", "/start_weight_update", "/stop_profile", "/tokenizer_info",
        "/update_weight_version",
        "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/wake_up", "/weight_checker",
        "/weight_info", "/inference/v1/abort_requests",
    }
)  # fmt: skip
_METHODS = frozenset({"get", "post", "put", "delete", "websocket", "head", "api_route"})
#: Classes of the bodies of the endpoints that hetlb reads.
_REQUESTS = re.compile(
    r"^(?:Batch)?(?:ChatCompletion|Completion|Responses|AnthropicMessages|Generate)Request$"
)


def _trees(root: Path) -> Iterator[ast.Module]:
    for path in sorted(root.rglob("*.py")):
        yield ast.parse(path.read_text(errors="replace"))


def paths(root: Path) -> set[str]:
    """Return the paths of all routers: first arguments of their decorators and of `add_api_route`."""
    found: set[str] = set()
    for tree in _trees(root / "entrypoints"):
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _METHODS | {"add_api_route"}
                and "router" in ast.unparse(node.func.value).lower()
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and str(node.args[0].value).startswith("/")
            ):
                found.add(str(node.args[0].value))
    return found


def fields(root: Path) -> dict[str, list[str]]:
    """Return the fields of request bodies by class, as they are written there."""
    found: dict[str, list[str]] = {}
    for tree in _trees(root / "entrypoints"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and _REQUESTS.match(node.name):
                names = [
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                ]
                found[node.name] = sorted({*found.get(node.name, ()), *names})
    return found


def metrics(root: Path) -> set[str]:
    """Return the names of metrics in all strings."""
    found: set[str] = set()
    for path in root.rglob("*.py"):
        found.update(re.findall(r"\bvllm:[a-z0-9_]+", path.read_text(errors="replace")))
    return found


def flags(root: Path) -> set[str]:
    """Return the flags of `vllm serve`."""
    found: set[str] = set()
    for path in [root / "engine" / "arg_utils.py", *(root / "entrypoints").rglob("*.py")]:
        text = path.read_text()
        if path.name == "arg_utils.py" or "args" in path.name or "ArgumentParser" in text:
            found.update(re.findall(r'"(--[a-z0-9-]+)"', text))
            found.update(
                "--" + each.target.id.replace("_", "-")
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ClassDef)
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            )
    return found


def is_known(path: str) -> bool:
    plain = path.replace("{response_id}", "resp_1")
    own = path in OWN or path in REFUSED or path.startswith("/v1/models/")
    return own or path in ENDPOINTS or path == REALTIME_PATH or plain.startswith(KEPT_PATHS)


def unknown(root: Path) -> list[str]:
    """Return what hetlb does not know of the vLLM in `root`, a line each."""
    lines = [
        f"path {path}: neither forwarded nor refused" for path in sorted(paths(root)) if not is_known(path)
    ]
    known: dict[str, list[str]] = json.loads(KNOWN_FIELDS.read_text())
    for name, each in sorted(fields(root).items()):
        lines += [f"field {name}.{new}: not looked at" for new in each if new not in known.get(name, ())]
    there = metrics(root)
    gauges = (VLLM.running, VLLM.waiting, VLLM.kv_usage, engine_metrics.CACHE_CONFIG)
    read = (*gauges, engine_metrics.SLEEP_STATE, engine_metrics.LORA_INFO, *engine_metrics._COUNTERS)
    for names in read:
        bases = [re.sub(r"(_total)?(_count)?$", "", each) for each in names]
        if not any(any(name.startswith(base) for name in there) for base in bases):
            lines.append(f"metric {names[0]}: gone")
    taken = flags(root)
    written = set(re.findall(r'"(--[a-z-]+)"', Path(servers.__file__).read_text()))
    lines += [f"flag {flag}: gone" for flag in sorted(written) if flag not in taken]
    return lines


def main() -> None:
    root = Path(sys.argv[1])
    if "--write" in sys.argv:
        known: dict[str, list[str]] = json.loads(KNOWN_FIELDS.read_text()) if KNOWN_FIELDS.is_file() else {}
        for name, each in fields(root).items():
            known[name] = sorted({*known.get(name, ()), *each})
        KNOWN_FIELDS.write_text(json.dumps(known, indent=1) + "\n")
    found = unknown(root)
    print("\n".join(found) or f"everything of {root} is known")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
