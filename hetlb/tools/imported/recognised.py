"""Recogniser of the balancer whose file it is: by the form of its text, not by its name."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from hetlb.errors import ConfigError
from hetlb.files import read_text
from hetlb.tools.imported.compose_file import NOT_YAML, read_compose
from hetlb.tools.imported.draft import FleetDraft
from hetlb.tools.imported.haproxy_file import read_haproxy
from hetlb.tools.imported.litellm_file import read_litellm
from hetlb.tools.imported.nginx_file import read_nginx

_HAPROXY = re.compile(
    r"^(global|defaults|frontend|backend|listen)([ \t]+[^\s{;]+)*[ \t]*(#.*)?\r?$", re.MULTILINE
)
_NGINX = re.compile(r"^\s*((http|server|stream|events)\s*\{|upstream\s+\S+?\s*\{)", re.MULTILINE)
#: A line of Compose or LiteLLM.
_YAML = re.compile(r"^(services|model_list)\s*:", re.MULTILINE)


def read_foreign(path: Path) -> FleetDraft:
    """Read a file of nginx, HAProxy, LiteLLM or Compose. Raises `ConfigError`, also if it has no server."""
    text = read_text(path, ConfigError)
    draft = _read(path, text)
    if not any(model.instances for model in draft.models.values()):
        left = "; ".join(draft.left_out[:3])
        raise ConfigError(
            f"{path}: expected servers of vLLM in this {draft.kind} file, got none"
            + (f": {left}" if left else "")
        )
    return draft


def _read(path: Path, text: str) -> FleetDraft:
    if _HAPROXY.search(text) and not _NGINX.search(text):
        return read_haproxy(path)
    try:
        document = yaml.safe_load(text)
    except NOT_YAML as error:
        document = None
        mark = getattr(error, "problem_mark", None)
        if mark is not None and _YAML.search(text) and not _NGINX.search(text):
            raise ConfigError(f"{path}: line {mark.line + 1}: expected valid YAML") from error
    if isinstance(document, dict):
        if "model_list" in document:
            return read_litellm(path, document)
        if "services" in document:
            return read_compose(path, document)
    if _NGINX.search(text):
        return read_nginx(path)
    raise ConfigError(
        f"{path}: expected nginx.conf (upstream, server), haproxy.cfg (backend), LiteLLM's config.yaml "
        "(model_list) or a Compose file (services)"
    )
