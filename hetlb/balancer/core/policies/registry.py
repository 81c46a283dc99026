"""Registry of policies: by the names of the fleet file, policies of other packages included."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from hetlb.balancer.core.policies.base import Policy, PolicyParams
from hetlb.errors import ConfigError

#: Group of entry points of other packages' policies.
GROUP: Final = "hetlb.policies"

#: Policies of hetlb by name.
_OWN: Final = (
    "rr", "wrr", "random", "least-requests", "p2c", "least-kv", "peak-ewma", "single", "prefix", "session",
    "paper", "paper-memory", "lmetric", "lmetric-speed", "hetlb", "planned",
)  # fmt: skip


def _own(name: str) -> type[Policy]:
    """Import a policy of hetlb: most processes run the default one alone."""
    if name == "hetlb":
        from hetlb.balancer.core.policies.hetlb import Hetlb

        return Hetlb
    if name == "planned":
        from hetlb.balancer.core.policies.planned import Planned

        return Planned
    from hetlb.balancer.core.policies.baselines import BASELINES

    return BASELINES[name]


class PolicyRegistry:
    """Policies by name: hetlb's, and installed packages'; each is imported when it is used."""

    def __init__(self) -> None:
        self._known: dict[str, type[Policy]] = {}
        self._outside: dict[str, EntryPoint] | None = None

    def _others(self) -> dict[str, EntryPoint]:
        """Return the entry points by name, looked for once: that takes tens of milliseconds."""
        if self._outside is None:
            self._outside = {each.name: each for each in entry_points(group=GROUP) if each.name not in _OWN}
        return self._outside

    def __contains__(self, name: object) -> bool:
        return name in _OWN or name in self._others()

    def __iter__(self) -> Iterator[str]:
        return iter([*_OWN, *sorted(self._others())])

    def __len__(self) -> int:
        return len(_OWN) + len(self._others())

    def __getitem__(self, name: str) -> type[Policy]:
        """Return a policy's class. Raises `KeyError` for an unknown name, `ConfigError` for a broken one."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = _own(name) if name in _OWN else _load(self._others()[name])
        return found


POLICIES: Final = PolicyRegistry()


def _load(entry: EntryPoint) -> type[Policy]:
    package = "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    where = f"policy {entry.name!r} of {package} ({entry.value})"
    try:
        found = entry.load()
    except Exception as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(
            f"{where}: expected a subclass of ViewPolicy (hetlb.balancer.core.policies.views), got {found!r}"
        )
    if getattr(found, "name", None) != entry.name:
        raise ConfigError(f"{where}: name: expected {entry.name!r}, got {getattr(found, 'name', None)!r}")
    return found


def make_policy(name: str, params: PolicyParams, rng: random.Random) -> Policy:
    """Return a policy. Raises `KeyError` for an unknown name, `ConfigError` for a broken one."""
    return POLICIES[name](params, rng)
