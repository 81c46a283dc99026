"""hetlb knows what the newest vLLM has: its wheel unpacked, or the vLLM beside the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engines import VENV_PYTHON
from newest_facts import flags, is_known, metrics, paths, unknown


def _root() -> Path:
    """Return the folder of vLLM's source: of HETLB_VLLM_SOURCE, or of .venv-vllm."""
    if named := os.environ.get("HETLB_VLLM_SOURCE"):
        return Path(named)
    found = list((VENV_PYTHON.parents[1] / "lib").glob("python3*/site-packages/vllm"))
    if not found:
        pytest.skip("expected HETLB_VLLM_SOURCE, the folder `vllm` of an unpacked wheel, or .venv-vllm")
    return found[0]


def test_paths_fields_metrics_and_flags_are_known() -> None:
    assert unknown(_root()) == []


def test_the_reader_of_the_source_finds_them() -> None:
    root = _root()
    assert {"/v1/chat/completions", "/v1/responses/{response_id}", "/sleep", "/v1/realtime"} <= paths(root)
    assert "vllm:num_requests_running" in metrics(root)
    assert {"--port", "--max-num-seqs", "--kv-transfer-config"} <= flags(root)


def test_what_is_new_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "entrypoints"
    folder.mkdir()
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text("")
    (folder / "api.py").write_text(
        '@router.post(\n "/v9/new")\nasync def new(): ...\n'
        "class CompletionRequest(Base):\n    prompt: str\n    reaches_others: str\n"
    )
    found = unknown(tmp_path)
    assert "path /v9/new: neither forwarded nor refused" in found
    assert "field CompletionRequest.reaches_others: not looked at" in found
    assert "metric vllm:num_requests_running: gone" in found
    assert "flag --max-num-seqs: gone" in found
    assert not is_known("/v9/new")
