"""Parts that every page of hetlb shares: colours and figures (`theme.css`), elements (`dom.js`), charts.

The dashboard serves these files; a page in one file has them inline (`inline_style`, `inline_module`).
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

#: Imports between the modules: in one file they share a scope.
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)


def asset(name: str, package: str = __name__) -> str:
    """The text of a file that is shipped inside `package`."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def inline_style(*own: str) -> str:
    """The shared style and then the page's `own`, for one `<style>`."""
    return "".join((asset("theme.css"), *own))


def inline_module(*own: str) -> str:
    """The shared scripts and then the page's `own` as one module without imports."""
    return "".join(_IMPORT.sub("", text) for text in (asset("dom.js"), asset("charts.js"), *own))


def content_hash(text: str) -> str:
    """Source expression of a Content-Security-Policy that allows this inline text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
