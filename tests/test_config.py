"""Every mistake in a file is one line that names file, key, value and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetlb.balancer.config.fleet import Fleet, fleet_from_urls, load_fleet
from hetlb.balancer.config.profile_file import load_profile
from hetlb.cli.main import main
from hetlb.errors import ConfigError, InputError
from hetlb.inputs.urls import check_url
from hetlb.tools.workload.trace_formats import read_trace

PROFILE = """\
version: 1
name: v100-llama3-8b-tp4
hardware: {gpu: V100-SXM2-32GB, gpus: 4, memory_bytes: 34359738368}
model: {name: meta-llama/Meta-Llama-3-8B, kv_bytes_per_token: 131072}
engine: {name: vllm, version: 0.6.0, tensor_parallel_size: 4, kv_cache_tokens: 690000, block_size: 16, max_num_seqs: 256, max_num_batched_tokens: 2048}
prefill: {k1: 1.1e-4, k2: 1.0e-3, k3: 0.0, k4: 1.0e-2}     # k1*B*I + k2*B + k3*I + k4
decode:  {k5: 5.0e-8, k6: 6.0e-5, k7: 0.0, k8: 1.3e-2}
fit: {mean_error: 0.021, p95_error: 0.05, max_error: 0.07, points: 40}
"""  # noqa: E501
FLEET = """\
version: 1
listen: {host: 127.0.0.1, port: 8080}
admin: {host: 127.0.0.1, port: 8081}
policy: {name: hetlb}
models:
  - name: llama-3-8b
    instances:
      - {name: a800-0, url: "http://127.0.0.1:8000", profile: p.yaml}
      - {name: v100-0, url: "http://127.0.0.1:8001", profile: p.yaml, weight: 4}
"""


def write_fleet(folder: Path, fleet: str = FLEET, profile: str = PROFILE) -> Path:
    (folder / "p.yaml").write_text(profile)
    path = folder / "fleet.yaml"
    path.write_text(fleet)
    return path


def load(folder: Path, fleet: str = FLEET, profile: str = PROFILE) -> Fleet:
    return load_fleet(write_fleet(folder, fleet, profile))


def test_the_examples_of_the_contract_load(tmp_path: Path) -> None:
    fleet = load(tmp_path)
    assert [spec.name for spec in fleet.instances] == ["a800-0", "v100-0"]
    assert fleet.instances[1].weight == 4
    assert fleet.instances[0].capacity.kv_cache_tokens == 690_000
    assert fleet.instances[0].latency is not None
    assert fleet.instances[0].latency.k5 == 5e-8


def test_only_version_and_models_are_needed(tmp_path: Path) -> None:
    fleet = load(
        tmp_path, 'version: 1\nmodels: [{name: m, instances: [{url: "http://h:1"}, {url: "http://h:2/"}]}]\n'
    )
    assert [(spec.name, spec.url, spec.weight) for spec in fleet.instances] == [
        ("h:1", "http://h:1", 1.0),
        ("h:2", "http://h:2", 1.0),
    ]
    assert fleet.file.policy.name == "hetlb"


def test_a_number_is_a_number_however_it_is_written(tmp_path: Path) -> None:
    text = PROFILE.replace("1.1e-4", "11e-5").replace("5.0e-8", "5e-8").replace("1.3e-2", ".013")
    latency = load(tmp_path, profile=text).instances[0].latency
    assert latency is not None
    assert (latency.k1, latency.k5, latency.k8) == (11e-5, 5e-8, 0.013)


def test_a_profile_without_hardware_model_or_capacity_is_good(tmp_path: Path) -> None:
    kept = [line for line in PROFILE.splitlines() if line.split(":")[0] in "version name prefill decode"]
    profile = load_profile(write_fleet(tmp_path, profile="\n".join(kept)).parent / "p.yaml")
    assert profile.capacity.kv_cache_tokens is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("weight: 4", "weight: two", "models[0].instances[1].weight: expected a number, got 'two'"),
        ("weight: 4", "weight: 0", "models[0].instances[1].weight: expected a number > 0"),
        ("weight: 4", "weigth: 4", "weigth: unknown key, expected one of name, url, profile, weight"),
        ("policy:", "polisy:", "polisy: unknown key, expected one of version, models, listen"),
        ("version: 1", "version: 2", "version: expected 1, the only version there is, got 2"),
        ("version: 1\n", "", "version: expected a value, but the key is missing"),
        ("name: v100-0", "name: a800-0", "expected a name used once in the fleet, got 'a800-0' again"),
        ("p.yaml}", "q.yaml}", "instances[0].profile: expected the path of a latency profile, got 'q.yaml'"),
        ("{name: hetlb}", "{name: fastest}", "policy.name: expected one of rr, wrr, random"),
        ("{name: hetlb}", "{combine: cube}", "policy.combine: expected one of power, exp, linear, sum"),
        ("{name: hetlb}", "{theta: .nan}", "policy.theta"),
        ("policy:", "proxy: {forward_headers: [Via]}\npolicy:", "forward_headers[0]: expected one that"),
        ("port: 8080", "port: 99999", "listen.port: expected a whole number <= 65535, got 99999"),
        ("http://127.0.0.1:8000", "ftp://x", "instances[0].url: expected a URL like http://host:8000"),
        ("http://127.0.0.1:8000", "http://u:p@h:1", "instances[0].url: expected a URL like"),
        ("http://127.0.0.1:8000", "http://h:1/api", "instances[0].url: expected a URL like"),
        ("policy: {name: hetlb}", "policy: {name: hetlb}\npolicy: {name: rr}", "line 5: expected valid YAML"),
        ("models:", "models: [", "expected valid YAML"),
        ("name: a800-0", 'name: "a\\nb"', "instances[0].name: expected letters, digits"),
    ],
)  # fmt: skip
def test_mistakes_in_a_fleet_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in FLEET
    with pytest.raises(InputError) as caught:
        load(tmp_path, FLEET.replace(old, new, 1))
    text = str(caught.value)
    assert text.startswith(str(tmp_path / "fleet.yaml") + ":")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("5.0e-8", ".nan", "decode.k5: expected a finite number, got nan"),
        ("1.0e-2}", "-1.0}", "prefill: expected constants that predict a positive time"),
        ("kv_cache_tokens: 690000", "kv_cache_tokens: -5", "kv_cache_tokens: expected a whole number >= 1"),
        ("kv_cache_tokens: 690000", "kv_cache_tokens: .nan", "kv_cache_tokens: expected a finite number"),
        ("block_size", "blocksize", "engine.blocksize: unknown key, expected one of name, version"),
        ("k8: 1.3e-2", "k9: 1.3e-2", "decode"),
    ],
)  # fmt: skip
def test_mistakes_in_a_profile(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in PROFILE
    with pytest.raises(InputError) as caught:
        load(tmp_path, profile=PROFILE.replace(old, new, 1))
    assert str(caught.value).startswith(str(tmp_path / "p.yaml") + ":")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "just text", "models: []\nversion: 1\n"])
def test_a_file_that_is_no_fleet(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="expected"):
        load(tmp_path, text)


def test_no_instance_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"models\[0\].instances: expected at least one instance"):
        load(tmp_path, "version: 1\nmodels: [{name: m, instances: []}]\n")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no-such-file\.yaml: no such file"):
        load_fleet(tmp_path / "no-such-file.yaml")


def test_a_fleet_from_addresses() -> None:
    fleet = fleet_from_urls(["http://h:1", "http://h:2"])
    assert [(spec.name, spec.model) for spec in fleet.instances] == [("h:1", ""), ("h:2", "")]
    with pytest.raises(InputError, match="--instance: expected every URL once"):
        fleet_from_urls(["http://h:1", "http://h:1/v1/"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected requests, got nothing; hetlb reads: hetlb's CSV (arrival_s,input_tokens"),
        ("arrival_s,input_tokens,output_tokens\n", "expected at least one row"),
        ("arrival_s,input_tokens,output_tokens\n0,x,1\n", "line 2: input_tokens: expected a whole number"),
        ("arrival_s,input_tokens,output_tokens\n0,0,1\n", "line 2: input_tokens: expected a whole"),
        ("arrival_s,input_tokens,output_tokens\n0,1,-1\n", "line 2: output_tokens"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n", "line 2: arrival_s: expected seconds"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", "line 2: expected 3 columns, got 2"),
    ],
)  # fmt: skip
def test_mistakes_in_a_trace(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "//"])
def test_one_rule_for_addresses_of_servers(end: str) -> None:
    assert check_url(f"http://h:8000{end}", "--url") == "http://h:8000"
    assert check_url(f"https://h/api/openai{end}", "--url", prefixed=True) == "https://h/api/openai"


@pytest.mark.parametrize(
    "url", ["h:8000", "http://h/api", "http://h/v1/models", "http://h?x=1", "http://u:p@h"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--url: expected a URL like http://host:8000, got "):
        check_url(url, "--url", prefixed=url.endswith("models"))


def test_a_trace_keeps_its_further_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,input_tokens,output_tokens,session_id,note\n,5,7,s1,x\n1.5,6,8,s2,y\n")
    rows = read_trace(path)
    assert [(r.arrival_s, r.input_tokens, r.output_tokens, r.session, r.extra) for r in rows] == [
        (None, 5, 7, "s1", {"note": "x"}),
        (1.5, 6, 8, "s2", {"note": "y"}),
    ]


def test_health_and_tenants_reach_the_scheduler_s_own_types(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    more = "health: {slow_start_s: 0}\nqueue: {tenant_share: 0.5, tenant_weights: {gold: 3, plain: 0.5}}\n"
    instances = "models: [{name: m, instances: [{url: 'http://h:1'}]}]\n"
    path.write_text("version: 1\n" + instances + more)
    fleet = load_fleet(path)
    assert fleet.health_params.slow_start_s == 0.0
    assert fleet.queue_limits.tenant_share == 0.5
    assert fleet.queue_limits.tenant_weights == {"gold": 3.0, "plain": 0.5}


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("health: {slow_start_s: -1}", "health.slow_start_s: expected"),
        ("health: {slow_start: 1}", "health.slow_start: unknown key"),
        ("queue: {tenant_share: 0}", "queue.tenant_share: expected"),
        ("queue: {tenant_weights: {gold: 0}}", "queue.tenant_weights"),
        ("queue: {tenant_weights: {gold: .inf}}", "queue.tenant_weights.gold: expected a finite number"),
    ],
)
def test_health_and_tenants_that_make_no_sense_are_refused(tmp_path: Path, more: str, complaint: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"version: 1\nmodels: [{{name: m, instances: [{{url: 'http://h:1'}}]}}]\n{more}\n")
    with pytest.raises(ConfigError) as caught:
        load_fleet(path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (
            "{name: m, instances: [{url: 'http://a:1', role: prefill}]}",
            "instances[0].role: expected both without",
        ),
        (
            "{name: m, kv_transfer: nixl, instances: [{url: 'http://a:1', role: prefill}]}",
            "models[0].instances: expected one with the role decode or both",
        ),
        ("{name: m, kv_transfer: smoke, instances: [{url: 'http://a:1'}]}", "kv_transfer"),
        (
            "{name: m, kv_transfer: {connector: nixl, lease_s: 0.5}, instances: [{url: 'http://a:1'}]}",
            "lease_s",
        ),
        (
            "{name: m, kv_transfer: mooncake, instances: [{url: 'http://a:1', kv_bootstrap: a}]}",
            "kv_bootstrap",
        ),
    ],
)
def test_roles_and_connectors_that_cannot_be_are_refused(tmp_path: Path, model: str, error: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"version: 1\nmodels:\n  - {model}\n")
    with pytest.raises(ConfigError) as caught:
        load_fleet(file)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_connector_has_the_lease_and_the_bootstrap_port_of_vllm(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "version: 1\nmodels:\n  - {name: m, kv_transfer: mooncake, instances: ["
        "{url: 'http://a:1', role: prefill},"
        " {url: 'http://b:1'}]}\n"
    )
    fleet = load_fleet(file)
    first, second = fleet.instances
    assert first.kv_transfer is not None
    assert (first.role, second.role, first.kv_transfer.lease_s) == ("prefill", "both", 480.0)
    assert first.kv_transfer.bootstrap == "http://a:8998"


def test_several_processes_split_no_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "version: 1\nmodels:\n  - {name: m, kv_transfer: nixl, instances: [{url: 'http://a:1'}]}\n"
    )
    assert main(["serve", "--config", str(file), "--workers", "2", "--check"]) == 2
    assert "proxy.workers: expected 1 with kv_transfer, got 2" in capsys.readouterr().err


def test_all_mistakes_of_a_file_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    text = (
        FLEET.replace("policy:", "polisy:").replace("port: 8080", "port: 99999").replace("weight", "weigth")
    )
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    where = f"{tmp_path / 'fleet.yaml'}: "
    assert [line.removeprefix(where).partition(":")[0] for line in caught.value.lines] == [
        "listen.port",
        "polisy",
        "models[0].instances[1].weigth",
    ]
    assert [line[-8:] for line in caught.value.lines] == ["(line 2)", "(line 4)", "(line 9)"]
    assert "(did you mean policy?)" in caught.value.lines[1]
    assert "(did you mean weight?)" in caught.value.lines[2]


def test_mistakes_that_only_the_whole_shows_are_reported_at_once_too(tmp_path: Path) -> None:
    text = FLEET.replace("name: hetlb", "name: hetl").replace(":8001", ":8000").replace("p.yaml}", "q.yaml}")
    text = text.replace("version: 1\n", "version: 1\ntracing: {otlp_endpoint: nowhere}\n")
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    lines = caught.value.lines
    assert len(lines) == 3
    assert "tracing.otlp_endpoint: expected a URL" in lines[0]
    assert "(did you mean hetlb?) (line 5)" in lines[1]
    assert lines[2].endswith("no such file (line 9)")


@pytest.mark.parametrize("again", ["http://127.0.0.1:8000", "http://127.0.0.1:8000/"])
def test_two_instances_with_one_address_are_refused(tmp_path: Path, again: str) -> None:
    with pytest.raises(
        InputError, match=r"instances\[1\]\.url: .* used once .*, got the address of a800-0 again"
    ):
        load(tmp_path, FLEET.replace("http://127.0.0.1:8001", again))


def test_the_port_of_a_scheme_is_the_one_that_is_left_out(tmp_path: Path) -> None:
    text = FLEET.replace("http://127.0.0.1:8000", "http://h").replace("http://127.0.0.1:8001", "http://h:80")
    with pytest.raises(InputError, match="expected an address used once"):
        load(tmp_path, text)
