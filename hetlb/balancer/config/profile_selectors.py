"""Selection of latency profiles by labels of instances: the key `profiles` of the fleet file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hetlb.balancer.config.fleet_tables import gpu_of
from hetlb.errors import ConfigError

_SELECTOR = re.compile(r"[A-Za-z0-9._/-]++(?:=[^,=]*+)?(?:,[A-Za-z0-9._/-]++=[^,=]*+)*")


def parse_selector(text: str, key: str) -> dict[str, str]:
    """Parse `gpu=H100,tp=2` into a mapping; a single word names a GPU. Raises `ConfigError`."""
    if _SELECTOR.fullmatch(text) is None:
        raise ConfigError(f"{key}: expected labels like gpu=H100,tp=2 or the name of a GPU, got {text!r}")
    if "=" not in text:
        return {"gpu": text}
    return dict(part.split("=", 1) for part in text.split(","))


def select_profile(labels: Mapping[str, str], profiles: Mapping[str, str]) -> str | None:
    """Return the profile of the most specific selector that matches the labels; the first of equal ones."""
    best: tuple[int, str] | None = None
    for text, profile in profiles.items():
        wanted = parse_selector(text, "profiles")
        fits = all(_fits(name, value, labels) for name, value in wanted.items())
        if fits and (best is None or len(wanted) > best[0]):
            best = len(wanted), profile
    return None if best is None else best[1]


def _fits(name: str, value: str, labels: Mapping[str, str]) -> bool:
    if name != "gpu":
        return labels.get(name) == value
    # Nodes say NVIDIA-H100-80GB-HBM3 where a file says H100.
    gpu = gpu_of(labels).lower()
    return value.lower() == gpu or value.lower() in re.split(r"[-_ ]", gpu)
