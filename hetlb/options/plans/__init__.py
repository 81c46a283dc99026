"""Plans of `hetlb rent` in force: the worth of instances' time, and the policy `planned`.

The tools that make plans import this option too.
"""

from hetlb.options.plans.worth import Worth as hook

__all__ = ["hook"]
