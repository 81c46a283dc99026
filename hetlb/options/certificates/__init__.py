"""TLS: certificates of the listeners and of engines."""

from typing import Any

from hetlb.options.certificates.certificates import server_context as hook
from hetlb.options.certificates.tls_table import TlsTable

TABLES: dict[str, Any] = {"tls": TlsTable | None}

__all__ = ["TABLES", "hook"]
