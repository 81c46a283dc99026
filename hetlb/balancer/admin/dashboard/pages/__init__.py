"""Parts of the dashboard that know nothing of fleets: colours (`theme.css`), elements (`dom.js`), charts."""

from __future__ import annotations

from importlib import resources


def asset(name: str, package: str = __name__) -> str:
    """Return the text of a file that is shipped inside `package`."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
