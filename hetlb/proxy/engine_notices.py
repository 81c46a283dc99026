"""Log events about engines that are absent, or are not what the file or their profile says."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hetlb.core.instance import Instance
from hetlb.core.types import Health
from hetlb.proxy.telemetry.access_log import escape
from hetlb.proxy.telemetry.events import Event, tell

if TYPE_CHECKING:
    from hetlb.config.profile_file import Profile

logger = logging.getLogger("hetlb.proxy")


def log_absent(instance: Instance) -> None:
    """Log that an engine did not answer the first round of probes, if so."""
    if instance.health.state is Health.UP:
        return
    url, reason = instance.spec.url, instance.health.reason
    tell(
        logger, Event.INSTANCE_ABSENT, "%s (%s) is not answering: %s; the others are served",
        instance.name, url, reason, instance=instance.name, url=url, reason=reason,
    )  # fmt: skip


def log_models(name: str, model: str, before: tuple[str, ...] | None, now: tuple[str, ...]) -> None:
    """Log that an engine serves other models than `before`, or than `model`, that of the file ("": none)."""
    shown = ", ".join(map(escape, now))
    if model and model not in now:
        text = "%s serves %s, not %s: it gets requests for what it serves"
        tell(logger, Event.INSTANCE_OTHER_MODEL, text, name, shown, model, instance=name)
    elif before is not None:
        text, old = "%s now serves %s (before: %s)", ", ".join(map(escape, before))
        tell(logger, Event.INSTANCE_MODELS, text, name, shown, old, instance=name)


def log_other_than_profiled(
    name: str, profile: Profile, entries: Sequence[Mapping[str, Any]], version: str | None
) -> None:
    """Warn where an engine is not what its profile was measured on; `entries` are of its `/v1/models`."""
    serves = {str(entry[key]) for entry in entries for key in ("id", "root") if entry.get(key)}
    if profile.model is not None and serves and profile.model.name not in serves:
        shown = ", ".join(sorted(map(escape, serves)))
        text = "%s: its profile is of the model %s, it serves %s"
        tell(logger, Event.INSTANCE_PROFILE, text, name, profile.model.name, shown, instance=name)
    if profile.engine.version is not None and version not in (None, profile.engine.version):
        shown, text = escape(str(version)), "%s: its profile is of vLLM %s, it runs %s"
        tell(logger, Event.INSTANCE_PROFILE, text, name, profile.engine.version, shown, instance=name)
