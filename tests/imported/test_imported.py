"""Files to move from: their fleet passes the check, and nothing of a file is dropped silently."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetlb.cli.main import main
from hetlb.errors import ConfigError
from hetlb.tools.imported.recognised import read_foreign

FILES = sorted(each for each in Path(__file__).parent.iterdir() if each.suffix in (".conf", ".cfg", ".yaml"))

#: Instances by model: URL, weight, most requests at once, variable of the key.
FLEETS: dict[str, dict[str, list[tuple[str, float, int | None, str | None]]]] = {
    "gpu.nginx.conf": {
        "vllm_backend": [
            ("http://gpu-a.internal:8000", 3, None, "KEY_VLLM_BACKEND"),
            ("http://gpu-b.internal:8000", 1, None, "KEY_VLLM_BACKEND"),
            ("http://[fd00::12]:8001", 1, 64, "KEY_VLLM_BACKEND"),
        ]
    },
    "conf-d.nginx.conf": {
        "qwen": [("https://gpu-a:8000", 1, None, None), ("https://gpu-b:80", 1, None, None)],
        "embeddings.internal": [("http://embeddings.internal:9000", 1, None, None)],
    },
    "tls.nginx.conf": {
        "llama-70b": [
            ("https://gpu-1.example.com:443", 2, None, None),
            ("https://gpu-2.example.com:443", 1, None, None),
        ]
    },
    "variables.nginx.conf": {
        "llama": [("http://gpu-a:8000", 1, None, None), ("http://gpu-b:8000", 1, None, None)],
        "qwen": [("http://gpu-c:8000", 1, 64, None)],
        "embeddings": [("http://embeddings:9000", 1, None, None)],
    },
    "stream.nginx.conf": {
        "vllm": [("http://gpu-a:8000", 2, None, None), ("http://gpu-b:8000", 1, None, None)]
    },
    "mixed.compose.yaml": {
        "llama3": [("http://llama:8000", 1, 128, "VLLM_API_KEY")],
        "Qwen/Qwen3-8B": [("http://qwen:30000", 1, 96, None)],
    },
    "usual.haproxy.cfg": {
        "vllm": [("http://10.0.0.7:8000", 30, 128, "VLLM_KEY"), ("http://10.0.0.8:8000", 10, 32, "VLLM_KEY")]
    },
    "odd.haproxy.cfg": {
        "llama": [
            ("http://[fd00::7]:8000", 5, None, None),
            ("https://llama-2.example.com:9000", 1, None, None),
        ]
    },
    "two.haproxy.cfg": {
        "large": [("http://gpu-a:8000", 1, None, None)],
        "small": [("http://gpu-c:8000", 1, None, None), ("http://gpu-d:8000", 1, None, None)],
    },
    "usual.litellm.yaml": {
        "qwen3-8b": [("http://gpu-a:8000", 3, None, "VLLM_KEY"), ("http://gpu-b:8000", 1, 64, None)],
        "meta-llama/Llama-3.1-70B-Instruct": [("http://gpu-c:8000", 1, None, "KEY_GPT_4O")],
        "gpu-d": [("http://gpu-d:8000", 1, None, None)],
    },
    "odd.litellm.yaml": {
        "small": [("https://small.example.com", 1, None, "KEY")],
        "large": [("https://large.example.com:8443", 1, None, "KEY")],
        "bge-m3": [("http://embed:80", 1, None, None)],
    },
    "usual.compose.yaml": {
        "qwen3-8b": [("http://vllm-a:8000", 1, 128, "VLLM_KEY"), ("http://vllm-b:9000", 1, None, None)]
    },
    "health.nginx.conf": {
        "vllm_backend": [("http://127.0.0.1:8000", 3, None, None), ("http://127.0.0.1:8001", 1, None, None)]
    },
    "wildcard.litellm.yaml": {
        "Qwen/Qwen3-32B": [("http://localhost:8000", 1, None, None)],
        "qwen3-8b": [("http://10.0.0.2:8002", 2, None, None)],
    },
    "host.compose.yaml": {
        "meta-llama/Llama-3.1-8B-Instruct": [("http://lora:8000", 1, 64, "VLLM_API_KEY")],
        "qwen": [("http://127.0.0.1:9000", 1, None, "KEY_TWO")],
    },
    "ports.haproxy.cfg": {
        "llama": [
            ("https://10.0.0.1:8100", 1, None, None),
            ("http://10.0.0.2:8100", 1, None, None),
            ("https://10.0.0.3:8443", 1, None, None),
        ]
    },
    "scheme.nginx.conf": {
        "llama": [("http://gpu-a:8000", 1, None, None)],
        "embeddings.example.com": [("https://embeddings.example.com", 1, None, None)],
    },
    "short.compose.yaml": {
        "org/m": [("http://short:8100", 1, None, None), ("https://secured:8000", 1, None, None)]
    },
    "adapter.litellm.yaml": {"org/m": [("http://gpu-a:8000", 1, None, None)]},
    "odd.compose.yaml": {
        "meta-llama/Llama-3.1-8B-Instruct": [("http://small:8100", 1, None, "KEY_SMALL")],
        "meta-llama/Llama-3.1-70B-Instruct": [("http://large:8000", 1, 256, None)],
    },
}

#: Lines that say nothing that a fleet file could lack: what they ask for is always so.
ALWAYS = re.compile(r"mode http|default_backend \w+|\.endif|x-\w+.*|version:.*|name: llm")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_fleet_of_a_file_passes_the_check(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["init", "--from", str(path)]) == 0
    out, err = capsys.readouterr()
    fleet = yaml.safe_load(out)
    found = {
        model["name"]: [
            (each["url"], each.get("weight", 1), each.get("max_num_seqs"), each.get("api_key_env"))
            for each in model["instances"]
        ]
        for model in fleet["models"]
    }
    assert found == FLEETS[path.name]
    assert "secret" not in out + err  # keys are named, never shown
    for name in re.findall(r"set the variable (\w+)", err):
        monkeypatch.setenv(name, "k")
    config = tmp_path / "fleet.yaml"
    config.write_text(out)
    assert main(["serve", "--check", "--config", str(config)]) == 0


def test_settings_round_the_servers_are_kept() -> None:
    by_name = {path.name: read_foreign(path) for path in FILES}
    nginx = by_name["gpu.nginx.conf"]
    assert nginx.listen == {"host": "0.0.0.0", "port": 80}
    assert nginx.proxy == {"first_byte_timeout_s": 600, "connect_timeout_s": 5, "max_body_bytes": 16 << 20}
    assert by_name["tls.nginx.conf"].proxy == {"first_byte_timeout_s": 900, "connect_timeout_s": 0.5}
    assert by_name["health.nginx.conf"].proxy == {"first_byte_timeout_s": 300}
    assert by_name["usual.haproxy.cfg"].proxy == {"connect_timeout_s": 5, "first_byte_timeout_s": 600}
    large = by_name["usual.litellm.yaml"].models["meta-llama/Llama-3.1-70B-Instruct"]
    assert (large.aliases, large.fallback) == (["gpt-4o", "gpt-4"], "qwen3-8b")
    assert by_name["usual.compose.yaml"].models["qwen3-8b"].aliases == ["qwen"]


def outcome(path: Path, text: str) -> tuple[str, list[str]] | None:
    """Return the fleet and what was left out, without numbers of lines; None if the text is none any more."""
    path.write_text(text)
    try:
        draft = read_foreign(path)
    except ConfigError:
        return None
    return draft.text(), sorted(re.sub(r"^[^ ]*: ", "", line) for line in draft.left_out)


LINES = [path for path in FILES if path.suffix != ".yaml"]


@pytest.mark.parametrize("path", LINES, ids=lambda path: path.name)
def test_each_line_is_in_the_fleet_or_named_as_left_out(path: Path, tmp_path: Path) -> None:
    """Without a line the result is another one, or the file is broken: no line is dropped silently."""
    lines = path.read_text().splitlines()
    scratch = tmp_path / path.name
    whole = outcome(scratch, "\n".join(lines))
    for number, line in enumerate(lines):
        plain = line.strip()
        if not plain or plain.startswith("#") or ALWAYS.fullmatch(plain):
            continue
        without = outcome(scratch, "\n".join([*lines[:number], *lines[number + 1 :]]))
        assert without != whole, f"line {number + 1}: {line}"


def pruned(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield a YAML document without one of its values, for each value, and where that was."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield {name: each for name, each in document.items() if name != key}, (*path, key)
            for less, where in pruned(value, (*path, key)):
                yield {**document, key: less}, where
    elif isinstance(document, list) and all(isinstance(each, dict) for each in document):
        for index, value in enumerate(document):
            for less, where in pruned(value, (*path, index)):
                yield [*document[:index], less, *document[index + 1 :]], where


YAMLS = [path for path in FILES if path.suffix == ".yaml"]


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_each_key_is_in_the_fleet_or_named_as_left_out(path: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    scratch = tmp_path / path.name
    whole = outcome(scratch, yaml.safe_dump(document))
    silent = []
    for less, where in pruned(document):
        if outcome(scratch, yaml.safe_dump(less)) == whole:
            silent.append(".".join(map(str, where)))
    # Keys inside sections that stay with the server as a whole, and a key that stands for none.
    inner = re.compile(
        r"services\.[\w-]+\.(deploy|healthcheck|build)\..*|services\.nginx\.ports|networks\..*|x-.*|name|volumes\..*"
        r"|model_list\.\d+\.model_info\..*|.*\.api_key|.*\.image|services\.((small|two)\.entrypoint|unknown\.restart)"
        # Names of the servers themselves, and deployments that are left out as a whole.
        r"|model_list\.[01]\.model_name|model_list\.3\.litellm_params\.\w+|model_list\.4\..*model"
    )
    assert [key for key in silent if not inner.fullmatch(key)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", r"expected nginx\.conf .* haproxy\.cfg .* LiteLLM's .* Compose"),
        ("http { upstream a { server b", "line 1: expected `;` or `}`"),
        ("http { server { listen 80; } } }", "line 1: expected `;` or no '}'"),
        ("http { server { listen 80; } }", "expected servers of vLLM in this nginx file, got none"),
        ('backend a\n  server b "c', "line 2: expected quotes that end"),
        ("model_list: []", "expected servers of vLLM in this LiteLLM file, got none"),
        ("services: {redis: {image: redis}}", "Compose file, got none: .*redis"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_foreign(path)
    assert "\n" not in str(caught.value)


def test_included_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "nginx.conf").write_text("http {\n  include conf.d/*.conf;\n  include missing.types;\n}\n")
    (tmp_path / "conf.d" / "a.conf").write_text("upstream a { server gpu:8000; }\n")
    (tmp_path / "conf.d" / "b.conf").write_text("server { gzip on; location / { proxy_pass http://a; } }\n")
    draft = read_foreign(tmp_path / "nginx.conf")
    assert [each.url for each in draft.models["a"].instances] == ["http://gpu:8000"]
    assert draft.left_out == ["nginx.conf:b.conf:1: gzip on", "nginx.conf:3: include missing.types"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("name: 'openai/*'", r"models\[0\]\.name: expected the name of a model, got the pattern 'openai/\*'"),
        (
            "name: m, aliases: ['*']",
            r"models\[0\]\.aliases\[0\]: expected the name of a model, got the pattern",
        ),
    ],
)
def test_patterns_of_names_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str, message: str
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"version: 1\nmodels: [{{{names}, instances: [{{url: 'http://h:1'}}]}}]\n")
    assert main(["serve", "--check", "--config", str(path)]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "urls", "left"),
    [
        (
            "http { upstream a { server gpu:1; }\n"
            " server { location /x { content_by_lua_block { ngx.say('}') }"
            " }\n location / { proxy_pass http://a; } } }\n",
            ["http://gpu:1"],
            "2: location /x { content_by_lua_block",
        ),
        (
            "frontend f\n bind :80\n use_backend %[req.hdr(x-model)]\nbackend a\n server s gpu:1\n",
            ["http://gpu:1"],
            "3: use_backend %[req.hdr(x-model)]",
        ),
        (
            "userlist u\n user me password hush\nbackend a\n server s gpu:1\n",
            ["http://gpu:1"],
            "user me password ***",
        ),
        (
            "http { upstream a { server gpu:1; }\n"
            " server { location / { proxy_pass http://a; } error_page 502 = @b;\n"
            " location @b { proxy_pass http://other:1; } } }\n",
            ["http://gpu:1"],
            "3: location @b { proxy_pass http://other:1; }",
        ),
        (
            "server { set $b gpu:1; location /v1/models { proxy_pass http://$b; }\n"
            " location /v1/ { proxy_pass http://$b; proxy_read_timeout 60s; } }\n",
            ["http://gpu:1"],
            "2: proxy_read_timeout 60s",
        ),
        (
            "frontend stats\n bind :8404\n stats enable\nfrontend f\n bind :443\n default_backend a\n"
            "backend a\n server s gpu\n",
            ["http://gpu:443"],
            "2: bind :8404 (frontend stats leads to no server)",
        ),
        (
            "services:\n"
            " b: {image: vllm/vllm-openai, entrypoint: [/bin/sh, -c], command: [vllm serve org/b]}\n"
            " a: {image: vllm/vllm-openai, environment: {VLLM_API_KEY: '${OWN_KEY:?hush}'},"
            " command: 'bash -c \"pip install x && vllm serve org/m --port 9\"'}\n"
            " redis: {image: redis, command: --requirepass hush}\n",
            ["http://b:8000", "http://a:9"],
            "services.redis: redis",
        ),
        (
            "model_list: [{model_name: a, litellm_params: {model: org/b, custom_llm_provider: openai, "
            'api_base: "http://gpu:1"}}]\ngeneral_settings: {database_url: "postgresql://me:hush@db/x"}\n',
            ["http://gpu:1"],
            "database_url: postgresql://***@db/x",
        ),
        (
            "http { upstream a { server gpu:1; }\n"
            " server { listen ${PORT}; location / { proxy_pass http://a; }\n"
            " location = /auth { internal; proxy_pass http://auth:9; } } }\n",
            ["http://gpu:1"],
            "3: location = /auth { internal;",
        ),
        (
            "services:\n a: {image: vllm/vllm-openai, environment: {VLLM_API_KEY: hush}, ports: ['8000'],"
            " command: --model org/m}\n"
            " b: {extends: {service: a}}\n c: {extends: a, command: --model org/m --port 9}\n"
            " d: {extends: {file: none.yaml, service: a}}\n e: {extends: e}\n",
            ["http://a:8000", "http://b:8000", "http://c:9"],
            "services.d: extends what is not there",
        ),
    ],
)
def test_further_forms_are_read_and_no_secret_is_shown(
    tmp_path: Path, text: str, urls: list[str], left: str
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    draft = read_foreign(path)
    assert [each.url for model in draft.models.values() for each in model.instances] == urls
    lines = "\n".join(draft.left_out)
    assert left in lines
    assert "hush" not in lines


def test_a_compose_service_extends_one_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text("services: {a: {extends: {file: base/b.yaml, service: b}}}\n")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "b.yaml").write_text(
        "services:\n b: {extends: c, command: vllm serve org/m --max-num-seqs 7}\n"
        " c: {image: vllm/vllm-openai}\n"
    )
    [model] = read_foreign(tmp_path / "compose.yaml").models.values()
    assert [(each.url, each.max_num_seqs) for each in model.instances] == [("http://a:8000", 7)]


@pytest.mark.parametrize("extends", ["{service: [a]}", "{service: {a: b}}", "{file: deep.yaml, service: a}"])
def test_a_service_whose_base_cannot_be_read_is_left_out(tmp_path: Path, extends: str) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 10_000)
    (tmp_path / "compose.yaml").write_text(
        f"services:\n a: {{image: vllm/vllm-openai, command: --model org/m}}\n b: {{extends: {extends}}}\n"
    )
    draft = read_foreign(tmp_path / "compose.yaml")
    assert draft.left_out == ["compose.yaml:services.b: extends what is not there"]


def test_variables_of_the_file_beside_a_compose_file_are_filled_in(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("# models\nexport MODEL='org/m'\nPORT=8100\nVLLM_KEY=hush\n")
    command = "--model ${MODEL} --port $PORT --api-key ${VLLM_KEY}"
    (tmp_path / "compose.yaml").write_text(
        f"services: {{a: {{image: vllm/vllm-openai, command: '{command}'}}}}\n"
    )
    [model] = read_foreign(tmp_path / "compose.yaml").models.values()
    assert model.name == "org/m"
    assert [(each.url, each.api_key_env) for each in model.instances] == [("http://a:8100", "VLLM_KEY")]


def test_broken_yaml_is_said_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text("services:\n  a: {image: ${X}}\n")
    with pytest.raises(ConfigError, match="line 2: expected valid YAML"):
        read_foreign(path)
