"""Plans of `hetlb rent` in force: the worth of instances' time, and the policy `planned`.

The tools that make plans import this option too.
"""

from typing import Any

from hetlb.options.plans.plan_keys import PlannedTypeTable, mistakes, planned_types
from hetlb.options.plans.worth import Worth as hook

TABLES: dict[str, Any] = {"types": tuple[PlannedTypeTable, ...]}

__all__ = ["TABLES", "hook", "mistakes", "planned_types"]
