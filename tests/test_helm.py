"""The Helm chart, rendered and linted by Helm's own engine: hetlb accepts what comes out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import hetlb
from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.fleet.reloading import _FIXED
from hetlb.balancer.fleet.service import READINESS_LAG_S
from hetlb.cli.main import build_parser, main

helm = pytest.importorskip("helm_python", reason="needs the extra helm: make test-helm")

CHART = Path(__file__).parents[1] / "configs" / "helm" / "hetlb"
TOKEN = "0123456789abcdef0123456789abcdef"
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example/hetlb", "tag": "1.2.3"},
    "files": {"fast.yaml": "a: 1\nb:\n  - 2\n"},
    "secretFiles": [{"secret": "keys", "key": "clients", "path": "secrets/clients.yaml"}],
    "service": {"type": "LoadBalancer", "port": 8000, "annotations": {"a": "b"}},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "k", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "podAnnotations": {"c": "d"},
    "priorityClassName": "high",
    "imagePullSecrets": [{"name": "registry"}],
    "rbac": {"create": True},
    "serviceMonitor": {"enabled": True},
}


def rendered(values: dict[str, Any] | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of the chart by kind and name."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values or {}, name="demo", namespace="prod")
    documents = [
        document
        for name, text in files.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def pod(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Deployment", "demo-hetlb"]["spec"]["template"]["spec"]
    return spec


def write_fleet(folder: Path, objects: dict[tuple[str, str], dict[str, Any]]) -> Path:
    """The files of /etc/hetlb as the pod has them."""
    (folder / "secrets").mkdir()
    (folder / "secrets" / "admin-token").write_text(f"{TOKEN}\n")
    for name, text in objects["ConfigMap", "demo-hetlb"]["data"].items():
        (folder / name).write_text(text)
    return folder / "fleet.yaml"


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_helm_finds_nothing_to_complain_about(values: dict[str, Any]) -> None:
    report = helm.lint(str(CHART), values, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


def test_the_version_is_the_packages() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == hetlb.__version__


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_hetlb_serves_the_fleet_and_the_services_lead_to_it(values: dict[str, Any], tmp_path: Path) -> None:
    objects = rendered(values)
    path = write_fleet(tmp_path, objects)
    assert main(["serve", "--config", str(path), "--check"]) == 0
    fleet = load_fleet(path)
    (container,) = pod(objects)["containers"]
    args = build_parser("serve").parse_args(container["args"])
    assert args.config == Path("/etc/hetlb/fleet.yaml")
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": fleet.file.listen.port, "admin": fleet.file.admin.port}
    labels = objects["Deployment", "demo-hetlb"]["spec"]["template"]["metadata"]["labels"]
    for name, port in (("demo-hetlb", "http"), ("demo-hetlb-admin", "admin")):
        service = objects["Service", name]["spec"]
        assert service["selector"].items() <= labels.items()
        assert service["ports"][0]["targetPort"] == port
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in pod(objects)["volumes"]}


def test_the_pod_has_time_to_drain() -> None:
    spec = pod(rendered({"fleet": {"proxy": {"shutdown_grace_s": 300}}}))
    _, slept = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert spec["terminationGracePeriodSeconds"] > float(slept) + READINESS_LAG_S + 300


def test_large_numbers_of_the_fleet_arrive_as_they_were_written(tmp_path: Path) -> None:
    path = write_fleet(tmp_path, rendered({"fleet": {"proxy": {"max_body_bytes": 67108864}}}))
    assert load_fleet(path).file.proxy.max_body_bytes == 67108864


def test_what_is_not_asked_for_is_not_there() -> None:
    kinds = {kind for kind, _ in rendered()}
    assert kinds == {"ConfigMap", "Deployment", "Service", "ServiceAccount"}
    assert pod(rendered())["automountServiceAccountToken"] is False
    objects = rendered(EVERYTHING)
    assert {"Role", "RoleBinding", "ServiceMonitor"} <= {kind for kind, _ in objects}
    account = pod(objects)["serviceAccountName"]
    assert objects["RoleBinding", "demo-hetlb"]["subjects"][0]["name"] == account
    monitor = objects["ServiceMonitor", "demo-hetlb"]["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= objects["Service", "demo-hetlb-admin"]["metadata"]["labels"].items()
    assert not monitor.items() <= objects["Service", "demo-hetlb"]["metadata"]["labels"].items()


@pytest.mark.parametrize(
    "values",
    [
        {"fleet": {"listen": {"port": 1}}},
        {"service": {"port": "http"}},
        {"image": {"repository": ""}},
        {"replicas": 0},
        {"command": "engine"},
        {"gateway": {"pool": {"targetPorts": []}}},
    ],
    ids=["listen", "port", "image", "replicas", "command", "ports"],
)
def test_a_value_that_the_chart_does_not_take_is_refused(values: dict[str, Any]) -> None:
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmError):
        chart.validate_schema(chart.merge_values(values))


SCALED: dict[str, Any] = {"replicas": 3, "shared": {"secret": "valkey"}}


@pytest.mark.parametrize(("command", "gateway"), [("serve", False), ("pick", False), ("pick", True)])
def test_several_replicas_share_their_view_and_survive_drained_nodes(
    command: str, gateway: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**SCALED, "command": command, "gateway": {"enabled": gateway}}
    assert helm.lint(str(CHART), values, strict=True)["errors"] == []
    objects = rendered(values)
    assert objects["Deployment", "demo-hetlb"]["spec"]["replicas"] == 3
    budget = objects["PodDisruptionBudget", "demo-hetlb"]["spec"]
    labels = objects["Deployment", "demo-hetlb"]["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    (container,) = pod(objects)["containers"]
    (variable,) = container["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "valkey", "key": "redis-url"}
    path = write_fleet(tmp_path, objects)
    shared = load_fleet(path).file.shared
    assert shared is not None
    assert (shared.url_env, shared.group) == (variable["name"], "demo-hetlb")
    monkeypatch.setenv("HETLB_REDIS_URL", "redis://valkey:6379")
    assert main([container["args"][0], "--config", str(path), "--check"]) == 0


@pytest.mark.parametrize("name", ["eg", "istio", "kgateway"])
def test_a_picker_with_its_pool_route_and_gateway(name: str, tmp_path: Path) -> None:
    gateway = {
        "enabled": True, "className": name, "istio": name == "istio",
        "pool": {"matchLabels": {"app": "vllm", "model": "m"}, "targetPorts": [8000, 8001]},
    }  # fmt: skip
    objects = rendered({"command": "pick", "gateway": gateway})
    assert objects["Gateway", "inference"]["spec"]["gatewayClassName"] == name
    assert (("DestinationRule", "demo-hetlb") in objects) == (name == "istio")
    fleet = load_fleet(write_fleet(tmp_path, objects))
    assert fleet.file.discovery is not None
    (source,) = fleet.file.discovery.clusters
    pool = objects["InferencePool", source.pool or ""]["spec"]
    assert pool["selector"] == {"matchLabels": {"app": "vllm", "model": "m"}}
    assert [each["number"] for each in pool["targetPorts"]] == [8000, 8001]
    service = objects["Service", pool["endpointPickerRef"]["name"]]["spec"]
    (port,) = service["ports"]
    (container,) = pod(objects)["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"grpc": fleet.file.pick.port, "admin": fleet.file.admin.port}
    assert port["targetPort"] == "grpc"
    assert port["port"] == pool["endpointPickerRef"]["port"]["number"]
    assert container["readinessProbe"]["grpc"] == {"port": fleet.file.pick.port, "service": "readiness"}
    route = objects["HTTPRoute", "demo-hetlb"]["spec"]
    assert route["parentRefs"] == [{"name": "inference"}]
    assert route["rules"][0]["backendRefs"][0]["name"] == source.pool
    rules = objects["Role", "demo-hetlb"]["rules"]
    assert {"pods", "inferencepools", "inferenceobjectives"} <= {r for x in rules for r in x["resources"]}
    assert pod(objects)["automountServiceAccountToken"] is True


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gateway": {"enabled": True}}, "gateway.enabled: expected command: pick"),
        ({"replicas": 2}, "replicas: expected 1 without shared.secret"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        rendered(values)


def test_ways_in_from_outside_and_walls() -> None:
    values = {
        "ingress": {"enabled": True, "host": "llm.example", "tlsSecret": "cert", "className": "nginx"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gw"}], "hostnames": ["llm.example"]},
        "networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}]},
        "extraEnv": [{"name": "KEY", "value": "x"}],
    }
    objects = rendered(values)
    ingress = objects["Ingress", "demo-hetlb"]["spec"]
    assert (ingress["rules"][0]["host"], ingress["tls"][0]["secretName"]) == ("llm.example", "cert")
    assert objects["HTTPRoute", "demo-hetlb"]["spec"]["rules"][0]["backendRefs"][0]["name"] == "demo-hetlb"
    ports = [each["ports"][0]["port"] for each in objects["NetworkPolicy", "demo-hetlb"]["spec"]["ingress"]]
    assert ports == ["http", "admin"]
    [container] = pod(objects)["containers"]
    assert container["env"] == [{"name": "KEY", "value": "x"}]


def restart_mark(**fleet: Any) -> str:
    template = rendered({"fleet": {"models": MODELS, **fleet}})["Deployment", "demo-hetlb"]["spec"][
        "template"
    ]
    mark: str = template["metadata"]["annotations"]["hetlb/restart"]
    return mark


MODELS = [{"name": "m", "instances": [{"name": "a", "url": "http://a:8000"}]}]
#: A change of each key that hetlb says only a restart changes; listeners are the chart's own.
RESTARTS: dict[str, dict[str, Any]] = {
    "queue": {"queue": {"timeout_s": 7.0}},
    "health": {"health": {"slow_start_s": 5.0}},
    "scrape": {"scrape": {"interval_s": 7.0}},
    "proxy.workers": {"proxy": {"workers": 2}},
    "proxy.request_log": {"proxy": {"request_log": False}},
    "proxy.request_log_format": {"proxy": {"request_log_format": "json"}},
    "tracing": {"tracing": {"otlp_endpoint": "http://collector:4318"}},
    "discovery": {"discovery": {"poll_s": 3.0}},
    "watch": {"watch": False},
    "pick": {"pick": {"buffer_bytes": 1024}},
    "shared": {"shared": {"url_env": "REDIS"}},
    "policy": {"policy": {"seed": 7}},
    "models[].tokenizer": {"models": [{**MODELS[0], "tokenizer": "t.json"}]},
}
RELOADS: list[dict[str, Any]] = [
    {"policy": {"name": "rr"}},
    {"proxy": {"max_connections": 7}},
    {"models": [{**MODELS[0], "aliases": ["gpt"]}]},
    {"profiles": {}},
]


def test_a_key_that_needs_a_restart_rolls_the_pods_and_no_other_does() -> None:
    listeners = {"listen.host", "listen.port", "admin.host", "admin.port", "listen.tls", "admin.tls"}
    assert set(RESTARTS) == set(_FIXED) - listeners
    plain = restart_mark()
    assert {key for key, fleet in RESTARTS.items() if restart_mark(**fleet) == plain} == set()
    assert [fleet for fleet in RELOADS if restart_mark(**fleet) != plain] == []


@pytest.mark.parametrize(
    "fleet",
    [
        {"modles": []},
        {"models": [{"name": "m", "instnces": []}]},
        {"queue": {"timeout_s": "soon"}},
        {"listen": {}},
    ],
)
def test_a_mistake_in_the_fleet_is_refused_before_anything_is_installed(fleet: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError, match="fleet"):
        rendered({"fleet": fleet})


def test_the_prometheus_of_the_operator_passes_the_network_policy() -> None:
    values = {"networkPolicy": {"enabled": True}, "serviceMonitor": {"enabled": True}}
    admin = rendered(values)["NetworkPolicy", "demo-hetlb"]["spec"]["ingress"][1]
    prometheus = {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
    assert {"namespaceSelector": {}, "podSelector": prometheus} in admin["from"]
