"""`profiling/live.py run` on a machine without a network: real vLLM, weights made up, a profile comes out."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import REPO_ROOT, VENV_PYTHON

from hetlb.balancer.config.profile_file import load_profile

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCRIPT = REPO_ROOT / "profiling" / "live.py"
#: A wrapper that takes hetlb from this Python and vLLM from its own.
_SHIM = """#!/bin/sh
case "$2" in hetlb) exec {ours} "$@" ;; *) exec {vllm} "$@" ;; esac
"""


@pytest.mark.timeout(600)
def test_a_kit_profiles_a_model_without_weights(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("live", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    live = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(live)
    kit, out = tmp_path / "kit", tmp_path / "out"
    tiny = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {**live.MODELS["llama-3.1-8b"], **tiny, "num_key_value_heads": 2, "vocab_size": 4000}
    live.write_model(kit / "models" / "tiny", config)
    shim = tmp_path / "bin" / "python"
    shim.parent.mkdir()
    shim.write_text(_SHIM.format(ours=sys.executable, vllm=VENV_PYTHON))
    shim.chmod(0o755)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import live; sys.executable = sys.argv[2]; "
        "from pathlib import Path; kit, out = Path(sys.argv[3]), Path(sys.argv[4]); "
        "sys.exit(live.run(kit, out, 8.0, [], sys.argv[5:]))"
    )
    server = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    command = [sys.executable, "-c", code, str(SCRIPT.parent), str(shim), str(kit), str(out), *server]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    runs = json.loads((out / "runs.json").read_text())
    log = next(out.glob("*.log")).read_text()[-2000:]
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-2000:]}{log}"
    assert [each["ok"] for each in runs] == [True]
    profile = load_profile(out / runs[0]["profile"])
    assert profile.source is not None
    assert profile.source.kind == "live"
    assert profile.source.measured
    assert profile.engine.kv_cache_tokens
    assert profile.engine.tensor_parallel_size == 1
