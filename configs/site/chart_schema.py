"""Writes the schema of the Helm chart's values: `fleet` is the fleet file, less what the chart states itself.

Run: PYTHONPATH=. python configs/site/chart_schema.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetlb.cli.schema import json_schema

VALUES = Path(__file__).parents[1] / "helm" / "hetlb" / "values.schema.json"
#: Keys of the fleet file that the chart states.
OWN_KEYS = ("version", "listen", "admin")


def with_fleet(values: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the values with the fleet file's in it."""
    schema = json_schema("fleet")
    tables = schema["$defs"]
    fleet = {**tables["FleetFile"], "required": ["models"]}
    fleet["properties"] = {key: of for key, of in fleet["properties"].items() if key not in OWN_KEYS}
    used = {name: table for name, table in tables.items() if name != "FleetFile"}
    properties = {**values["properties"], "fleet": fleet}
    return {**values, "properties": properties, "$defs": used}


def main() -> None:
    schema = with_fleet(json.loads(VALUES.read_text()))
    VALUES.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
