"""Tables under `discovery:`, and the selection of profiles by label."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from hetlb.errors import ConfigError
from hetlb.inputs.yaml_file import NonNegative, Port, Positive


class DnsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """DNS name of servers: one per address (A, else AAAA), or one per SRV record.

    Resolved again when the TTL expires, after `interval_s` at the latest. `servers` are name servers (`host`
    or `host:port`), the system's by default.
    """

    name: str
    type: Literal["A", "SRV"] = "A"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    scheme: Literal["http", "https"] = "http"
    model: str | None = None
    labels: dict[str, str] = {}
    interval_s: Positive = 1.0
    servers: tuple[str, ...] = ()


class ClusterTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Address and credentials of the API server: without these keys, hetlb's own pod's."""

    namespace: str | None = None
    api_server: str | None = None
    token_file: str | None = None
    ca_file: str | None = None


class KubernetesTable(ClusterTable, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pods by label, the EndpointSlices of a service, or an InferencePool, watched at the API server.

    `pool` names the InferencePool, whose pods and ports are its own. `port` is a number or the name of a
    container's port. `model_label` names the label that holds the model. Without `namespace`, `api_server`,
    `token_file` and `ca_file` the values of hetlb's own pod are used.
    """

    resource: Literal["pods", "endpointslices", "inferencepools"] = "pods"
    selector: str = ""
    service: str | None = None
    pool: str | None = None
    port: Port | str = 8000
    scheme: Literal["http", "https"] = "http"
    model: str | None = None
    model_label: str | None = None


class DiscoveryTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sources of instances besides `models`.

    `files` are files or folders of files with `models`, as in a fleet file. `poll_s` is the polling interval
    of files. `ttl_s` is the default lifetime of registrations, 0 for unlimited.
    """

    files: tuple[str, ...] = ()
    dns: tuple[DnsTable | str, ...] = ()
    kubernetes: KubernetesTable | tuple[KubernetesTable, ...] = ()
    poll_s: Positive = 1.0
    ttl_s: NonNegative = 0.0

    @property
    def names(self) -> tuple[DnsTable, ...]:
        """The DNS names as tables."""
        return tuple(DnsTable(name=each) if isinstance(each, str) else each for each in self.dns)

    @property
    def clusters(self) -> tuple[KubernetesTable, ...]:
        """The Kubernetes sources."""
        return (self.kubernetes,) if isinstance(self.kubernetes, KubernetesTable) else self.kubernetes


#: Kubernetes labels that name the GPU of a node.
GPU_LABELS = ("gpu", "nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
_SELECTOR = re.compile(r"[A-Za-z0-9._/-]+(?:=[^,=]*)?(?:,[A-Za-z0-9._/-]+=[^,=]*)*")


def parse_selector(text: str, key: str) -> dict[str, str]:
    """Parse `gpu=H100,tp=2` into a mapping; a single word names a GPU. Raises `ConfigError`."""
    if _SELECTOR.fullmatch(text) is None:
        raise ConfigError(f"{key}: expected labels like gpu=H100,tp=2 or the name of a GPU, got {text!r}")
    if "=" not in text:
        return {"gpu": text}
    return dict(part.split("=", 1) for part in text.split(","))


def gpu_of(labels: Mapping[str, str]) -> str:
    """Return the GPU named by labels, "" if none."""
    return next((labels[name] for name in GPU_LABELS if labels.get(name)), "")


def select_profile(labels: Mapping[str, str], profiles: Mapping[str, str]) -> str | None:
    """Profile of the most specific selector that matches the labels; the first of equal ones."""
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
