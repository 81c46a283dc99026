"""Sources at a Kubernetes API server, as the fleet file states them."""

from __future__ import annotations

from typing import Literal

import msgspec

from hetlb.balancer.config.fleet import Fleet
from hetlb.extras import check_extra
from hetlb.inputs.yaml_file import Port


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


def clusters(stated: KubernetesTable | tuple[KubernetesTable, ...]) -> tuple[KubernetesTable, ...]:
    """Return the sources of `discovery.kubernetes`."""
    return (stated,) if isinstance(stated, KubernetesTable) else stated


def check_serving(fleet: Fleet) -> None:
    """Raise `ConfigError` unless the package is installed."""
    check_extra(f"{fleet.where}discovery.kubernetes", "lightkube", "discovery")
