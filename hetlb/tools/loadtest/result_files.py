"""Results in files: the JSON document of a bench, and a CSV with a line per run.

The document holds the settings that make the same load again (command, versions, seed, salt); a
file is complete or not there.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Any

import hetlb


def platform_document() -> dict[str, Any]:
    return {
        "hetlb": hetlb.__version__,
        "python": platform.python_version(),
        "aiohttp": version("aiohttp"),
        "uvloop": version("uvloop"),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def default_filename(model: str, rates: str, when: datetime) -> str:
    """Return `RATEqps-MODEL-DATE.json`, as `vllm bench serve` names its results."""
    name = f"{rates}qps-{model.rsplit('/', 1)[-1]}-{when:%Y%m%d-%H%M%S}.json"
    return re.sub(r"[^\w.,+-]", "_", name)


def csv_text(runs: Sequence[Mapping[str, Any]]) -> str:
    columns = dict.fromkeys(
        key for run in runs for key, value in run.items() if not isinstance(value, dict | list)
    )
    columns["verdict"] = None
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for run in runs:
        writer.writerow({**run, "verdict": run["client"]["verdict"]})
    return text.getvalue()


def json_text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)
