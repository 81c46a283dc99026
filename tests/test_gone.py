"""What went is refused with one line that says what to use, and is nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetlb.balancer.config.fleet import load_fleet
from hetlb.cli.main import main
from hetlb.errors import ConfigError
from hetlb.inputs.gone import GONE_FLAGS, GONE_KEYS, GONE_VALUES
from hetlb.inputs.yaml_file import yaml_text


def fleet_with(path: str, value: object) -> dict[str, Any]:
    """Return a fleet file that is valid but for a value at a path such as `models[].name`."""
    instance = {"name": "a", "url": "http://h:1"}
    document: dict[str, Any] = {"version": 1, "models": [{"name": "m", "instances": [instance]}]}
    *above, last = path.split(".")
    at: Any = document
    for key in above:
        name = key.removesuffix("[]")
        at = at.setdefault(name, [{}] if key.endswith("[]") else {})
        at = at[0] if key.endswith("[]") else at
    at[last] = value
    return document


CASES = [(key, "x", use) for key, use in GONE_KEYS.items()]
CASES += [(key, value, use) for (key, value), use in GONE_VALUES.items()]  # type: ignore[misc]


@pytest.mark.parametrize(("path", "value", "use"), CASES)
def test_a_key_or_value_that_went_is_one_line(tmp_path: Path, path: str, value: object, use: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml_text(fleet_with(path, value)))
    with pytest.raises(ConfigError) as caught:
        load_fleet(file)
    [line] = caught.value.lines
    assert path.replace("[]", "[0]") in line
    assert "was removed" in line
    assert use in line


@pytest.mark.parametrize(("command", "flag"), GONE_FLAGS)
def test_a_flag_that_went_is_one_line(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *flag.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"hetlb {command}: {flag}: was removed; {GONE_FLAGS[command, flag]}"
