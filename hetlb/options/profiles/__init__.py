"""Latency profiles: their files, and the host time of an idle instance where its profile assumes one.

The tools read and write profiles too: they import this option, and no other.
"""

from hetlb.options.profiles.profile_file import load_named as hook
from hetlb.options.profiles.selectors import mistakes

__all__ = ["hook", "mistakes"]
