"""The fleet file of a plan, and beside it the profiles that are no file yet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hetlb.config.profile_file import Profile
from hetlb.errors import ConfigError
from hetlb.files import write_text
from hetlb.profiler.sources import write_profile


@dataclass(frozen=True, slots=True)
class FleetWriter:
    """Writer of the fleet file at `path`. Its methods raise `InputError` naming what cannot be written."""

    path: Path

    def reference(self, profile: Path) -> str:
        """A profile as the fleet file names it: relative to the folder of that file."""
        return os.path.relpath(profile.resolve(), self.path.parent.resolve())

    def add_profile(self, name: str, profile: Profile) -> str:
        """Write a profile into the folder beside the fleet file; returns its reference."""
        folder = self.path.parent / f"{self.path.stem}-profiles"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: expected a folder to write to: {error.strerror}") from error
        file = folder / f"{name}.yaml"
        write_profile(file, profile)
        return self.reference(file)

    def write(self, heading: str, models: list[dict[str, Any]], policy: dict[str, Any] | None = None) -> None:
        """Write the fleet file; `heading` is its comment, without the policy hetlb's default is in force."""
        fleet = {"version": 1, **({} if policy is None else {"policy": policy}), "models": models}
        write_text(self.path, f"# {heading}\n{yaml.safe_dump(fleet, sort_keys=False)}")
