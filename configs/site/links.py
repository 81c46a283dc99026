"""MkDocs hook: pages and files outside docs/ that a page links to become part of the site.

In the repository links are relative to the file they stand in, so that they work where the files are read.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
#: Pages of the root that the navigation names.
_ROOT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def _in_repository(page: str, root: Path) -> str:
    """Path in the repository of a page of the site."""
    return page if (root / page).is_file() and not (root / "docs" / page).is_file() else f"docs/{page}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside docs/."""
    root = _root(config)
    pages = [file.src_uri for file in files.documentation_pages()]
    waiting = [*_ROOT_PAGES]
    for page in pages:
        waiting += _targets(f"docs/{page}", root)
    while waiting:
        path = waiting.pop()
        if path.startswith(("docs/", "..")) or not (root / path).is_file() or files.get_file_from_path(path):
            continue
        files.append(File.generated(config, path, abs_src_path=str(root / path)))
        waiting += _targets(path, root)
    return files


def _targets(path: str, root: Path) -> list[str]:
    """Repository paths that a Markdown file links to."""
    if not path.endswith(".md") or not (root / path).is_file():
        return []
    folder = posixpath.dirname(path)
    return [
        posixpath.normpath(posixpath.join(folder, found))
        for found in _LINK.findall((root / path).read_text())
    ]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite relative links from the repository's folders to the site's."""
    root = _root(config)
    source = _in_repository(page.file.src_uri, root)

    def rewritten(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        if target == "README.md":
            target = "docs/README.md"
        if not (root / target).is_file():
            return found[0]
        here = posixpath.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(target.removeprefix('docs/'), here)}"

    # A folder has no page: its name stays, without the link.
    plain = re.sub(
        r"\[([^\]]+)\]\((?!https?:|mailto:|#)([^)#\s]+)\)",
        lambda found: (
            found[1]
            if (root / posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))).is_dir()
            else found[0]
        ),
        markdown,
    )
    return _LINK.sub(rewritten, plain)
