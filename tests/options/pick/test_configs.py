"""The configurations to copy: Envoy accepts them, and the manifests say what is true of `hetlb pick`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from options.pick.rig import CONFIGS, GATEWAY_API, STATIC, envoy_binary

from hetlb.balancer.config.fleet import load_fleet
from hetlb.cli.main import main

KUBERNETES = CONFIGS / "kubernetes"


@pytest.mark.envoy
@pytest.mark.parametrize("path", [STATIC, GATEWAY_API], ids=lambda path: path.stem)
def test_envoy_accepts_what_is_shipped(path: Path) -> None:
    done = subprocess.run(
        [str(envoy_binary()), "--mode", "validate", "-c", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def test_the_manifests_agree_with_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_kind = {each["kind"]: each for each in documents("picker.yaml")}
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "admin-token").write_text("0123456789abcdef0123456789abcdef\n")
    path = tmp_path / "fleet.yaml"
    path.write_text(by_kind["ConfigMap"]["data"]["fleet.yaml"])
    monkeypatch.setenv("HETLB_REDIS_URL", "redis://valkey:6379")
    assert main(["pick", "--config", str(path), "--check"]) == 0
    fleet = load_fleet(path)
    (container,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["pick", "--config"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"grpc": fleet.file.pick.port, "admin": fleet.file.admin.port}
    assert fleet.file.discovery is not None
    (source,) = fleet.file.discovery.clusters
    assert by_kind["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"] in {
        each["name"] for each in by_kind["RoleBinding"]["subjects"]
    }
    assert fleet.file.shared is not None
    assert fleet.file.shared.url_env in {each["name"] for each in container["env"]}
    pool = next(each for each in documents("gateway.yaml") if each["kind"] == "InferencePool")
    assert source.pool == pool["metadata"]["name"]
    picker = pool["spec"]["endpointPickerRef"]
    assert (picker["name"], picker["port"]["number"]) == (
        by_kind["Service"]["metadata"]["name"],
        fleet.file.pick.port,
    )
    (rule,) = documents("istio.yaml")
    assert rule["spec"]["host"] == picker["name"]


def test_wrong_input_is_one_line_that_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = "version: 1\nmodels: [{name: m, instances: [{url: 'http://127.0.0.1:1'}]}]\n"
    path = tmp_path / "fleet.yaml"
    cases = {
        "shared: {silent_s: 0}": "shared.silent_s",
        "shared: {url: 'http://h'}": "shared.url",
        "shared: {}": "shared.url",
        "pick: {client_ca_file: ca.pem}": "pick.client_ca_file",
        "pick: {tls: {cert: no.pem, key: no.pem}}": "pick.tls.cert",
        "pick: {fallbacks: -1}": "pick.fallbacks",
    }
    for line, key in cases.items():
        path.write_text(f"{fleet}{line}\n")
        assert main(["pick", "--config", str(path), "--check"]) == 2, line
        said = capsys.readouterr().err.strip()
        assert key in said, (line, said)
        assert "\n" not in said
