"""Parameters, caches and defaults of `hetlb.tools.models` against the classes of transformers and vLLM.

Models are built on the meta device: without memory for their weights.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from forks import answered

from hetlb.tools.models.config_keys import ALIASES
from hetlb.tools.models.families import FAMILIES, model_type_of
from hetlb.tools.models.model_facts import read_facts

pytestmark = pytest.mark.vllm

MODELS = Path(__file__).parents[2] / "hetlb/tools/models"
#: transformers leaves out weights that checkpoints of Gemma 3n have; MiMo's windows have heads of their own.
ROUGH = {"gemma3n_text": 0.005, "mimo_v2_flash": 0.001}
#: transformers has weights for experts that do nothing, and encoders of images and sound in one model.
LEFT_OUT = {"longcat_flash", "phi4_multimodal"}
DATA = Path(__file__).parents[1] / "models" / "data"


def asked(script: str, question: Any) -> str:
    return answered(script, question=json.dumps(question))


@pytest.mark.timeout(600)
def test_defaults_equal_transformers() -> None:
    """Written anew by: this test's question piped to `make_model_defaults.py`."""
    code = "".join(path.read_text() for path in sorted(MODELS.glob("*.py")))
    keys = set(re.findall(r'"([A-Za-z_0-9]+)"', code)) | {
        name for names in ALIASES.values() for name in names
    }
    question = {"types": sorted(FAMILIES), "keys": sorted(keys)}
    assert asked("make_model_defaults.py", question) == (MODELS / "defaults.json").read_text()


@pytest.mark.timeout(1800)
def test_parameters_equal_transformers() -> None:
    counted = json.loads(asked("count_parameters.py", sorted(set(FAMILIES) - LEFT_OUT)).splitlines()[-1])
    assert len(counted) > 60
    wrong = []
    for model_type, (config, parameters) in counted.items():
        found = read_facts(config, model_type).parameters
        # Biases of routers are no parameters there.
        if abs(found - parameters) > ROUGH.get(model_type, 1e-4) * parameters:
            wrong.append(f"{model_type}: hetlb {found}, transformers {parameters}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_parameters_and_caches_equal_vllm() -> None:
    """Of public models in one table. States are not compared: on CPUs vLLM keeps them in 32 bits."""
    public = {}
    for file in ("published.json", "parameters.json"):
        for name, known in json.loads((DATA / file).read_text()).items():
            config = {key: each for key, each in known["config"].items() if key != "quantization_config"}
            if model_type_of(config.get("architectures", [""])[0]):
                public[name] = config
    lines = [json.loads(line) for line in asked("build_models.py", public).splitlines() if line[:1] == "{"]
    built = {each["name"]: each for each in lines if "error" not in each}
    assert len(built) > 40, [each["error"] for each in lines if "error" in each]
    print(len(built), "models, not built:", sorted(public.keys() - built.keys()))
    wrong = []
    for name, theirs in built.items():
        found, grows = read_facts(public[name], name), theirs["per_token"]
        windows = {int(tokens): size for tokens, size in theirs["windows"].items()}
        # A window of all positions is none; Cohere's is a token longer there.
        positions = public[name].get("max_position_embeddings", math.inf)
        grows += sum(windows.pop(each) for each in [*windows] if each >= positions)
        alike = [
            abs(ours - each) <= 1 for (ours, _), each in zip(found.kv_windows, sorted(windows), strict=False)
        ]
        sizes = [size for _, size in found.kv_windows]
        if (
            found.kv_bytes_per_token != grows
            or sizes != [windows[each] for each in sorted(windows)]
            or not all(alike)
        ):
            wrong.append(f"{name}: hetlb {found.needed}, vLLM {theirs}")
        if abs(found.parameters - theirs["parameters"]) > 1e-3 * theirs["parameters"]:
            wrong.append(f"{name}: hetlb {found.parameters}, vLLM {theirs}")
    assert not wrong, "\n".join(wrong)
