"""The files under configs/deploy: each is read by its reader, and what they say of hetlb is true."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import yaml
from helpers import HANG_S, free_port, turns_until
from proxy.services import Engine, document, serving
from test_walkthrough import vllm_accepts

import hetlb.tools.demo
from hetlb.balancer.config.fleet import Fleet, load_fleet
from hetlb.balancer.config.fleet_tables import DiscoveryTable
from hetlb.balancer.fleet.service import READINESS_LAG_S
from hetlb.cli.main import build_parser, main
from hetlb.tools.loadtest.processes import helper_processes

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "configs" / "deploy"
TOKEN = "0123456789abcdef0123456789abcdef"


def manifests(kind: str, which: str = "kubernetes.yaml") -> dict[str, dict[str, Any]]:
    """The objects of one kind, by name."""
    documents = yaml.safe_load_all((DEPLOY / which).read_text())
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def fleet_text(which: str) -> str:
    if which.startswith("kubernetes"):
        text: str = manifests("ConfigMap", which)["hetlb"]["data"]["fleet.yaml"]
        return text
    return (DEPLOY / which).read_text()


def laid_out(folder: Path, text: str) -> Path:
    """A fleet file and the token beside it, as the pages and the manifest put them into /etc/hetlb."""
    (folder / "secrets").mkdir()
    (folder / "secrets" / "admin-token").write_text(f"{TOKEN}\n")
    path = folder / "fleet.yaml"
    path.write_text(text)
    return path


FLEETS = ("fleet.yaml", "kubernetes.yaml", "kubernetes-discovery.yaml")


def served(arguments: list[str]) -> Any:
    """The flags of a `hetlb` command line that serves what stands in /etc/hetlb."""
    args = build_parser(arguments[0]).parse_args(arguments)
    assert args.command == "serve"
    assert args.config == Path("/etc/hetlb/fleet.yaml")
    return args


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_every_yaml_file_is_one_and_is_known_here(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert all(isinstance(each, dict) and each for each in documents)
    assert path.name in FLEETS


@pytest.mark.parametrize("which", FLEETS)
def test_every_fleet_can_be_served_and_needs_its_token(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = laid_out(tmp_path, fleet_text(which))
    assert main(["serve", "--config", str(path), "--check"]) == 0
    (tmp_path / "secrets" / "admin-token").unlink()
    assert main(["serve", "--config", str(path), "--check"]) == 2
    assert "admin.token_file" in capsys.readouterr().err


# --- systemd -----------------------------------------------------------------------------------------------


def unit() -> dict[str, list[str]]:
    """The settings of the unit, each with all its values."""
    found = defaultdict(list)
    for line in (DEPLOY / "hetlb.service").read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found[key].append(value)
    return found


def test_the_unit_serves_checks_before_it_reloads_and_waits_for_the_drain(tmp_path: Path) -> None:
    settings = unit()
    (start,) = settings["ExecStart"]
    assert not served(shlex.split(start)[1:]).check
    check, hang_up = settings["ExecReload"]
    assert served(shlex.split(check)[1:]).check
    assert hang_up == "/bin/kill -HUP $MAINPID"
    assert settings["Type"] == ["notify"]  # known to every systemd, and it hears RELOADING=1 too
    assert settings["RestartPreventExitStatus"] == [str(main(["serve", "--config", str(tmp_path / "none")]))]
    grace_s = load_fleet(DEPLOY / "fleet.yaml").file.proxy.shutdown_grace_s
    assert float(settings["TimeoutStopSec"][0]) > READINESS_LAG_S + grace_s
    assert settings["KillMode"] == ["mixed"]  # SIGTERM to hetlb alone


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    here = tmp_path / "hetlb.service"
    text = (DEPLOY / "hetlb.service").read_text()
    for name in ("hetlb.socket", "hetlb-admin.socket"):
        shutil.copy(DEPLOY / name, tmp_path)
    here.write_text(text.replace("/opt/hetlb/bin/hetlb", sys.executable))
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(here), *map(str, tmp_path.glob("*.socket"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


# --- the image ---------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container file in order, continued lines joined."""
    text = (DEPLOY / "Containerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def test_the_image_runs_hetlb_unprivileged_on_the_ports_of_the_fleet() -> None:
    said = dict(instructions())
    entry, command = json.loads(said["ENTRYPOINT"]), json.loads(said["CMD"])
    assert entry == ["hetlb"]
    assert not served(command).check
    fleet = load_fleet(DEPLOY / "fleet.yaml")
    assert said["EXPOSE"].split() == [str(fleet.file.listen.port), str(fleet.file.admin.port)]
    security = manifests("Deployment")["hetlb"]["spec"]["template"]["spec"]["securityContext"]
    assert said["USER"] == f"{security['runAsUser']}:{security['runAsGroup']}"


def test_the_image_is_built_from_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {
        source
        for instruction, rest in instructions()
        if instruction == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed |= set(wheel["packages"])
    assert "custom" in wheel["hooks"]
    needed.add("hatch_build.py")
    assert copied == needed
    lists = [each for _, rest in instructions() for each in re.findall(r"(?:\.|hetlb)\[([\w,-]+)\]", rest)]
    assert len(lists) == 2
    assert lists[0] == lists[1]
    extras = set(lists[0].split(","))
    assert "otel" in extras
    assert "tools" not in extras
    assert extras <= project["project"]["optional-dependencies"].keys()
    lowest = project["project"]["requires-python"].removeprefix(">=")
    images = [rest for instruction, rest in instructions() if instruction == "FROM"]
    (version,) = {
        re.findall(r"python:([0-9.]+)\b", image)[0] for image in images
    }  # what is compiled fits one
    assert tuple(map(int, version.split("."))) >= tuple(map(int, lowest.split(".")))


# --- Kubernetes --------------------------------------------------------------------------------------------


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifests("Deployment")[name]["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return dict(only)


def selected(selector: dict[str, str]) -> list[str]:
    """The deployments whose pods bear these labels."""
    return [
        name
        for name, each in manifests("Deployment").items()
        if selector.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    ]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """The fleet of the manifest."""
    return load_fleet(laid_out(tmp_path, fleet_text("kubernetes.yaml")))


def test_the_pod_finds_its_files_where_the_fleet_names_them(fleet: Fleet) -> None:
    served(container("hetlb")["args"])
    mounts = {each["name"]: each["mountPath"] for each in container("hetlb")["volumeMounts"]}
    assert mounts["config"] == "/etc/hetlb"
    (projected,) = (each["projected"] for each in pod("hetlb")["volumes"] if each["name"] == "config")
    config, secret = projected["sources"]
    assert "fleet.yaml" in manifests("ConfigMap")[config["configMap"]["name"]]["data"]
    assert [item["path"] for item in secret["secret"]["items"]] == [fleet.written.admin.token_file]
    assert {each["name"] for each in pod("hetlb")["volumes"]} == mounts.keys()


def test_every_service_leads_to_a_port_of_one_deployment(fleet: Fleet) -> None:
    services = manifests("Service")
    for service in services.values():
        (name,) = selected(service["spec"]["selector"])
        ports = {each.get("name"): each["containerPort"] for each in container(name)["ports"]}
        (port,) = service["spec"]["ports"]
        target = port.get("targetPort", port["port"])
        assert target in ports or target in ports.values()
    ports = {each["name"]: each["containerPort"] for each in container("hetlb")["ports"]}
    assert ports == {"http": fleet.file.listen.port, "admin": fleet.file.admin.port}
    assert {service for service in services if services[service]["metadata"]["labels"]["app"] == "vllm"} == {
        urlsplit(spec.url).hostname for spec in fleet.instances
    }
    for spec in fleet.instances:
        address = urlsplit(spec.url)
        (port,) = services[address.hostname or ""]["spec"]["ports"]
        assert port["port"] == address.port


def test_every_selector_finds_its_own_pods() -> None:
    for name, each in manifests("Deployment").items():
        assert selected(each["spec"]["selector"]["matchLabels"]) == [name]
    (policy,) = manifests("NetworkPolicy").values()
    engines = selected(policy["spec"]["podSelector"]["matchLabels"])
    assert sorted([*engines, "hetlb"]) == sorted(manifests("Deployment"))
    ((rule,),) = (rule["from"] for rule in policy["spec"]["ingress"])
    assert selected(rule["podSelector"]["matchLabels"]) == ["hetlb"]


def test_every_pod_has_time_to_drain(fleet: Fleet) -> None:
    def slept(name: str) -> float:
        sleep, seconds = container(name)["lifecycle"]["preStop"]["exec"]["command"]
        assert sleep == "sleep"
        return float(seconds)

    needed_s = slept("hetlb") + READINESS_LAG_S + fleet.file.proxy.shutdown_grace_s
    assert pod("hetlb")["terminationGracePeriodSeconds"] > needed_s
    for name in selected({"app": "vllm"}):
        arguments = container(name)["args"]
        timeout_s = float(arguments[arguments.index("--shutdown-timeout") + 1])
        assert pod(name)["terminationGracePeriodSeconds"] > slept(name) + timeout_s


def test_the_servers_serve_the_model_of_the_fleet(fleet: Fleet) -> None:
    for name in selected({"app": "vllm"}):
        arguments = container(name)["args"]
        assert arguments[arguments.index("--served-model-name") + 1] == fleet.instances[0].model
        ports = [each["containerPort"] for each in container(name)["ports"]]
        assert ports == [int(arguments[arguments.index("--port") + 1])]


@pytest.mark.vllm
def test_vllm_knows_the_flags_of_the_manifest() -> None:
    commands = [[*container(name)["command"], *container(name)["args"]] for name in selected({"app": "vllm"})]
    assert commands
    assert all(command[:2] == ["vllm", "serve"] for command in commands)
    vllm_accepts([command[2:] for command in commands])


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=HANG_S) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.mark.asyncio
async def test_the_probes_get_what_they_look_for_without_a_token(tmp_path: Path) -> None:
    ports = dict(zip(("8080", "8081"), (str(free_port()), str(free_port())), strict=True))
    with helper_processes() as helpers:
        profile = Path(hetlb.tools.demo.__file__).parent / "fast.yaml"
        engine = helpers.start(
            "engine", "engine", "--profile", str(profile), "--port", "0", "--served-model-name", "qwen3-8b"
        )
        await engine.ready()
        text = fleet_text("kubernetes.yaml").replace("http://vllm-h100-0:8000", engine.urls[0])
        text = re.sub(r"\b808[01]\b", lambda found: ports[found[0]], text)
        proxy = helpers.start("proxy", "serve", "--config", str(laid_out(tmp_path, text)))
        await proxy.ready()
        admin = f"http://127.0.0.1:{ports['8081']}"
        probes = [container("hetlb")[key]["httpGet"] for key in ("readinessProbe", "livenessProbe")]
        assert [probe["port"] for probe in probes] == ["admin", "admin"]
        async with asyncio.timeout(HANG_S):
            while [status(admin + probe["path"]) for probe in probes] != [200, 200]:
                await asyncio.sleep(0.02)  # it listens before it has heard of a slow engine
        assert status(f"{admin}/metrics") == 401


# --- discovery ---------------------------------------------------------------------------------------------


def test_hetlb_may_list_and_watch_what_it_discovers() -> None:
    which = "kubernetes-discovery.yaml"
    fleet = yaml.safe_load(fleet_text(which))
    table = msgspec.convert(fleet["discovery"], DiscoveryTable)
    (binding,) = manifests("RoleBinding", which).values()
    role = manifests("Role", which)[binding["roleRef"]["name"]]
    allowed = {(group, name): rule["verbs"] for rule in role["rules"] for group in rule["apiGroups"]
               for name in rule["resources"]}  # fmt: skip
    for cluster in table.clusters:
        group = "" if cluster.resource == "pods" else "discovery.k8s.io"
        assert {"list", "watch"} <= set(allowed[group, cluster.resource])
    (account,) = manifests("ServiceAccount", which)
    (deployment,) = manifests("Deployment", which).values()
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == account
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_a_job_registers_its_server_for_as_long_as_it_runs(tmp_path: Path) -> None:
    async with (
        Engine() as engine,
        serving(tmp_path, document(engine, admin={"registration": True})) as running,
    ):
        async with Engine() as other:
            environment = {
                **os.environ,
                "HETLB": f"http://127.0.0.1:{running.service.admin.address[1]}",
                "MODEL": "m",
                "ADDRESS": "127.0.0.1",
                "PORT": other.url.rpartition(":")[2],
                "LABELS": '{"gpu": "H100"}',
                "EVERY": "0.05",
                "SLURM_JOB_ID": "17",
            }
            script = str(DEPLOY / "register.sh")
            job = await asyncio.create_subprocess_exec(script, "sleep", "60", env=environment)
            await turns_until(lambda: len(running.names) == 2)
            assert running.names[1].startswith("job-17-")
            assert running.instance(running.names[1]).spec.url == other.url
            job.terminate()
            await job.wait()
            assert running.names == ["i0"]


# --- workflows ---------------------------------------------------------------------------------------------


def test_a_tag_publishes_wheels_and_image_with_provenance_and_without_a_stored_secret() -> None:
    folder = ROOT / ".github" / "workflows"
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert texts.keys() == {"image.yml", "wheels.yml"}
    for name, job in (("wheels.yml", "publish"), ("image.yml", "image")):
        workflow = yaml.safe_load(texts[name])
        assert workflow[True]["push"]["tags"] == ["v*"]  # YAML 1.1 reads `on` as true
        assert workflow["permissions"] == {"contents": "read"}
        granted = workflow["jobs"][job]["permissions"]
        assert (granted["id-token"], granted["attestations"]) == ("write", "write")
        assert "secrets." not in texts[name]
        uses = [
            step["uses"] for each in workflow["jobs"].values() for step in each["steps"] if "uses" in step
        ]
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v[\d.]+|release/v1)", each) for each in uses)
        assert any(each.startswith("actions/attest-build-provenance@") for each in uses)
    assert "file: configs/deploy/Containerfile" in texts["image.yml"]
