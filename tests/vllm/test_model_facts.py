"""Parameters and defaults of `hetlb.tools.models` against the classes of transformers, on the meta device."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engines import VENV_PYTHON

from hetlb.tools.models.config_keys import ALIASES
from hetlb.tools.models.facts import read_facts
from hetlb.tools.models.families import FAMILIES

pytestmark = pytest.mark.vllm

MODELS = Path(__file__).parents[2] / "hetlb/tools/models"
#: transformers leaves out weights that checkpoints of Gemma 3n have; MiMo's windows have heads of their own.
ROUGH = {"gemma3n_text": 0.005, "mimo_v2_flash": 0.001}
#: transformers has weights for experts that do nothing, and encoders of images and sound in one model.
LEFT_OUT = {"longcat_flash", "phi4_multimodal"}


def asked(script: str, question: Any) -> str:
    command = [str(VENV_PYTHON), str(Path(__file__).with_name(script))]
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(600)
def test_defaults_are_those_of_transformers() -> None:
    """Written anew by: this test's question piped to `make_model_defaults.py`."""
    code = "".join(path.read_text() for path in sorted(MODELS.glob("*.py")))
    keys = set(re.findall(r'"([A-Za-z_0-9]+)"', code)) | {
        name for names in ALIASES.values() for name in names
    }
    question = {"types": sorted(FAMILIES), "keys": sorted(keys)}
    assert asked("make_model_defaults.py", question) == (MODELS / "defaults.json").read_text()


@pytest.mark.timeout(1800)
def test_parameters_are_those_of_transformers() -> None:
    counted = json.loads(asked("count_parameters.py", sorted(set(FAMILIES) - LEFT_OUT)).splitlines()[-1])
    assert len(counted) > 60
    wrong = []
    for model_type, (config, parameters) in counted.items():
        found = read_facts(config, model_type).parameters
        # Biases of routers are no parameters there.
        if abs(found - parameters) > ROUGH.get(model_type, 1e-4) * parameters:
            wrong.append(f"{model_type}: hetlb {found}, transformers {parameters}")
    assert not wrong, "\n".join(wrong)
