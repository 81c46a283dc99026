"""A profile that was measured on another model or version than the server runs: said once, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from proxy.services import PatientService

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.profile_file import load_profile
from hetlb.cli.serving_options import OPTIONS
from hetlb.tools.emulator import EmulatedEngine

PROFILE = {
    "version": 1,
    "name": "p",
    "model": {"name": "llama"},
    "engine": {"version": "0.32.0", "kv_cache_tokens": 8192, "max_num_seqs": 32},
    "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 1e-2},
    "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1.3e-2},
}


@pytest.mark.parametrize(
    ("model", "version", "warnings"),
    [
        ("llama", "0.32.0", []),
        ("llama", "0.9.2", ["a: its profile is of vLLM 0.9.2, it runs 0.32.0"]),
        ("qwen", "0.32.0", ["a: its profile is of the model qwen, it serves llama"]),
    ],
)
async def test_mismatch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: str, version: str, warnings: list[str]
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(PROFILE))
    profile = load_profile(path)
    claimed = {
        **PROFILE,
        "model": {"name": model},
        "engine": {**PROFILE["engine"], "version": version},  # type: ignore[dict-item]
    }
    path.write_text(yaml.safe_dump(claimed))
    async with EmulatedEngine(profile) as engine:
        fleet = tmp_path / "fleet.yaml"
        instance = {"name": "a", "url": engine.url, "profile": "p.yaml"}
        document = {
            "version": 1,
            "listen": {"port": 0},
            "admin": {"port": 0},
            "models": [{"name": "llama", "instances": [instance]}],
        }
        fleet.write_text(yaml.safe_dump(document))
        service = PatientService(load_fleet(fleet), OPTIONS)
        await service.start()
        try:
            assert [
                record.getMessage() for record in caplog.records if "profile" in record.message
            ] == warnings
        finally:
            await service.stop(0.0)
