"""Parts of the fleet file that few fleets have: KV connectors, counters of tokens, profiles by label."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import InstanceTable, KvTransferTable, gpu_of
from hetlb.balancer.core.types import Connector, KvLink
from hetlb.errors import ConfigError
from hetlb.files import content
from hetlb.inputs.urls import bracketed, check_url

#: vLLM's own defaults: `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`, `VLLM_MOONCAKE_BOOTSTRAP_PORT`.
MOONCAKE_LEASE_S: Final = 480.0
MOONCAKE_BOOTSTRAP_PORT: Final = 8998


def kv_link(
    stated: str | KvTransferTable, instance: InstanceTable, key: str, kv_bytes_per_token: float | None
) -> KvLink:
    """Return the KV connector of the instance at `key`; the bytes per token default to its profile's.

    Raises `ConfigError`.
    """
    table = KvTransferTable(connector=stated) if isinstance(stated, str) else stated  # type: ignore[arg-type]
    connector = Connector(table.connector)
    figures = {
        "lease_s": table.lease_s or (MOONCAKE_LEASE_S if connector is Connector.MOONCAKE else None),
        "bytes_per_token": table.bytes_per_token or kv_bytes_per_token,
        "bandwidth_bytes_per_s": table.bandwidth_bytes_per_s,
        "latency_s": table.latency_s,
    }
    known = {key: float(value) for key, value in figures.items() if value is not None}
    return KvLink(connector, **known, bootstrap=_bootstrap(instance, key, connector))


def _bootstrap(instance: InstanceTable, key: str, connector: Connector) -> str | None:
    """Return the URL of an instance's bootstrap server, None if its connector has none."""
    if instance.kv_bootstrap is not None:
        return check_url(instance.kv_bootstrap, f"{key}.kv_bootstrap")
    if connector is not Connector.MOONCAKE or instance.url is None:
        return None
    return f"http://{bracketed(urlsplit(instance.url).hostname or '')}:{MOONCAKE_BOOTSTRAP_PORT}"


def token_counters(fleet: Fleet) -> dict[str, Callable[[str], int]]:
    """Return the tokenizers of models, as functions from a text to its tokens. Raises `ConfigError`."""
    counters: dict[str, Callable[[str], int]] = {}
    for m, model in enumerate(fleet.file.models):
        if model.tokenizer is None:
            continue
        key, path = f"{fleet.where}models[{m}].tokenizer", fleet.base / model.tokenizer
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"{key}: expected the package 'tokenizers' (pip install 'hetlb[tokenizer]')"
            ) from error
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            tokenizer = Tokenizer.from_buffer(content(file))
        except OSError as error:
            raise ConfigError(
                f"{key}: expected a tokenizer.json, got {str(path)!r}: {error.strerror}"
            ) from error
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{key}: expected a tokenizer.json, got {str(path)!r}") from error

        def count(text: str, tokenizer: Tokenizer = tokenizer) -> int:
            return len(tokenizer.encode(text, add_special_tokens=True).ids)

        counters[model.name] = count
    return counters


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
