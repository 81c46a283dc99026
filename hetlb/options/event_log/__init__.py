"""Event log: facts and decisions of the scheduler in a file, and a replay of them."""

from hetlb.options.event_log.log_file import EventLog as hook

__all__ = ["hook"]
