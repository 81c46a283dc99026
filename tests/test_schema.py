"""JSON schemas: files in configs/ are the reader's, examples are valid, both refuse the same mutants."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.cli.main import main
from hetlb.cli.schema import KINDS, json_schema
from hetlb.errors import ConfigError
from hetlb.inputs.yaml_file import parse_yaml

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
#: The kind of every example, by folder.
EXAMPLES = {
    path: kind
    for kind, globs in {
        "fleet": ("configs/*.yaml", "configs/deploy/fleet.yaml"),
        "cluster": ("configs/clusters/*.yaml",),
        "market": ("configs/markets/*.yaml",),
        "profile": ("configs/profiles/*.yaml", "profiling/*.yaml"),
    }.items()
    for each in globs
    for path in sorted(ROOT.glob(each))
}
FLEET: dict[str, Any] = {
    "version": 1,
    "listen": {"port": 80, "tls": {"cert": "c", "key": "k"}},
    "policy": {"shares": [{"type": "a", "input_tokens": 1, "output_tokens": 1, "instances": {"i": 1}}]},
    "queue": {"tenant_share": 0.5, "tenant_weights": {"gold": 3}},
    "proxy": {"forward_headers": ["x-mine"], "request_log_format": "json", "upstream_idle_s": 2},
    "discovery": {"dns": ["a", {"name": "b", "type": "SRV"}], "kubernetes": {"port": "http"}},
    "models": [
        {
            "name": "m",
            "kv_transfer": "nixl",
            "instances": [{"url": "http://h", "kv_events": {"endpoint": "tcp://h:1"}, "role": "both"}],
        }
    ],
}  # fmt: skip
SCHEMAS = {kind: json_schema(kind) for kind in KINDS}
VALIDATORS = {kind: jsonschema.Draft202012Validator(schema) for kind, schema in SCHEMAS.items()}


def accepted(kind: str, raw: Any) -> bool:
    """True if the table of a kind reads `raw`."""
    try:
        msgspec.convert(raw, KINDS[kind])
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_the_schemas_in_configs_are_the_reader_s(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", kind]) == 0
    printed = capsys.readouterr().out
    jsonschema.Draft202012Validator.check_schema(json.loads(printed))
    assert (CONFIGS / f"schemas/{kind}.json").read_text() == printed, "run `make schemas`"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    VALIDATORS[EXAMPLES[path]].validate(parse_yaml(path, ConfigError))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_name_their_schema(path: Path) -> None:
    found = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text())
    if path.is_relative_to(CONFIGS) and path.parent.name != "deploy":  # that one is copied elsewhere
        assert found is not None
        assert (path.parent / found[1]).resolve() == CONFIGS / f"schemas/{EXAMPLES[path]}.json"


RAW = [("fleet", FLEET), *((kind, parse_yaml(path, ConfigError)) for path, kind in EXAMPLES.items())]
VALUES = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        70000,
        0.5,
        -0.5,
        1e9 + 0.5,
        "",
        "x",
        "http://h",
        "http",
        [],
        [1],
        ["x"],
        {},
        {"x": 1},
    ]
)


def test_the_chart_s_values_have_the_schema_of_the_fleet_file() -> None:
    sys.path.insert(0, str(CONFIGS / "site"))
    try:
        from chart_schema import VALUES, with_fleet
    finally:
        sys.path.pop(0)
    values = json.loads(VALUES.read_text())
    assert with_fleet(values) == values, "run `make schemas`"


@given(data=st.data())
def test_schema_and_reader_refuse_the_same(data: st.DataObject) -> None:
    kind, raw = data.draw(st.sampled_from(RAW))
    raw = copy.deepcopy(raw)
    for _ in range(data.draw(st.integers(0, 2))):
        at = raw
        while True:
            inner = list(at) if isinstance(at, dict) else range(min(3, len(at)))
            key = data.draw(st.sampled_from(list(inner))) if inner else "new"
            deeper = inner and isinstance(at[key], dict | list)
            if not deeper or data.draw(st.integers(0, 4)) == 0:
                break
            at = at[key]
        if isinstance(at, list):
            at[:] = [*at[:key], data.draw(VALUES), *at[key + 1 :]] if inner else [data.draw(VALUES)]
        elif data.draw(st.booleans()):
            at[key] = data.draw(VALUES)
        elif data.draw(st.booleans()):
            at.pop(key, None)
        else:
            at[data.draw(st.sampled_from(["new", "name", "model", "version"]))] = data.draw(VALUES)
    assert VALIDATORS[kind].is_valid(raw) == accepted(kind, raw), raw
