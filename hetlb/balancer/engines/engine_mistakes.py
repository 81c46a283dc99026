"""Mistakes at an engine with the next step, in the same words for `hetlb status`, log and `hetlb doctor`."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping
from errno import ECONNREFUSED
from functools import lru_cache
from typing import Any, Final

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.engines.engine_tables import LLAMA_CPP, SGLANG, TABLES, VLLM
from hetlb.errors import reason_of
from hetlb.served_models import version_numbers

REFUSED: Final = "connection refused"
CLOSED: Final = "it closes the connection without an answer"
NO_TLS: Final = "it does not speak TLS"
#: Reasons of OpenSSL at an answer that is plain text.
_NOT_TLS: Final = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}
_ERRNO: Final = re.compile(r"\[Errno (\d++)\]")
#: Next step for a server that is not reached, for several, and for any of several.
START: Final = (
    "Start it, wait if it is loading, or check its network.",
    "Start them, wait if they are loading, or check their network.",
    "Start one, wait if one is loading, or check the network.",
)
#: Next steps by words of the reason why a server is down; the last one is for all others.
_STEPS: Final = (
    ("TLS fails", "Look at its log: it may ask for a client's certificate or another version of TLS."),
    ("certificate has expired", "Renew its certificate."),
    ("not yet valid", "Wait until its certificate is valid, or correct the clock of this machine."),
    ("is not valid for|[Hh]ostname mismatch", "Use a name that stands in the certificate."),
    ("certificate", "Set ca_file of the instance to the authority that signed its certificate."),
    ("does not speak TLS", "Write http:// in its url."),
    ("no address", "Correct the host: this machine finds no such name."),
    (
        "no answer to /",
        "Look for a firewall or a server that hangs; for a slow one raise scrape.timeout_s.",
    ),
    ("not HTTP", "Correct the port: it is of another program. `vllm serve` prints its own when it starts."),
    (
        "close[sd] the connection",
        "Correct the port, or write https:// in its url; it may ask for a client's certificate.",
    ),
    ("no list of models", "Correct the address: give the one that `vllm serve` prints, without a path."),
    ("answers 40[13]", "Engines ask for no key at /health: correct the address, or let that path through."),
    ("answers 404", "Correct the address: give the one that `vllm serve` prints, without a path."),
    ("answers 3", "Correct the address: it redirects."),
    ("loading|answers 503", "Wait until it has loaded its model, or look at its log."),
    ("answers", "Look at its log."),
    ("", START[0]),
)
#: Oldest version of vLLM with the metrics and flags that hetlb reads, and the first with the present names.
_OLDEST_VLLM: Final = (0, 8)
_NEW_NAMES_VLLM: Final = (0, 11)


def connect_failure(error: OSError, host: str) -> str:
    """Return why no connection to an engine at a host was made."""
    if isinstance(error, socket.gaierror):
        return f"the name has no address: {host}: {error.strerror or error}"
    if isinstance(error, ConnectionRefusedError) or set(_ERRNO.findall(str(error))) == {str(ECONNREFUSED)}:
        return REFUSED  # also if each of its addresses refused
    if isinstance(error, ssl.SSLError | ConnectionResetError):
        return no_answer(error)
    return f"no connection: {error.strerror or error}"


def no_answer(error: BaseException) -> str:
    """Return why a server gave no answer; TLS and closed connections in plain words."""
    found: Any = getattr(error, "certificate_error", None) or getattr(error, "os_error", error)
    if (untrusted := getattr(found, "verify_message", None)) is not None:
        return f"its certificate is not trusted: {untrusted}"
    if isinstance(found, ssl.SSLError):
        reason = getattr(found, "reason", None) or type(found).__name__
        return NO_TLS if reason in _NOT_TLS else f"TLS fails: {reason.lower().replace('_', ' ')}"
    closed = isinstance(found, ConnectionResetError) or str(error) == "Server disconnected"
    return CLOSED if closed else reason_of(error)


def no_answer_at(error: BaseException) -> str:
    """Return why a server gave no answer, and how another URL or setting of the command may help."""
    why = no_answer(error)
    hints = {NO_TLS: ": use http://", CLOSED: "; if it speaks TLS, use https://"}
    trust = " (SSL_CERT_FILE names an authority)" if "not trusted" in why else ""
    return why + hints.get(why, trust)


def is_hetlb(headers: Mapping[str, str]) -> bool:
    """Return True if the headers of an answer are of a hetlb in front of engines."""
    return headers.get("x-request-id", "").startswith("hetlb-")


@lru_cache(256)
def next_step(reason: str) -> str:
    """Return what to do about a server that is down for a reason, in sentences."""
    return next(step for words, step in _STEPS if re.search(words, reason))


def without_load(sample: EngineSample) -> tuple[str, str] | None:
    """Return what a metrics page lacks, and what to do, if it is a known engine's and tells no load."""
    table = next((each for each in TABLES if each.name == sample.engine), None)
    if table is None or sample.running is not None or sample.waiting is not None:
        return None
    lacking = ", ".join(each.partition("{")[0] for each in (*table.running[:1], *table.waiting[:1]))
    step = "Start it without --disable-log-stats."
    if table is SGLANG:
        step = "Upgrade SGLang: its metrics had other names in 2024."
    elif table is LLAMA_CPP:
        step = "Start it with --metrics."
    elif table is not VLLM:
        step = f"Upgrade {table.title}."
    return f"its /metrics has names of {table.title}, but not {lacking}", step


def small_cache(tokens: int | None, least: int) -> tuple[str, str] | None:
    """Return what is wrong with a KV cache of fewer than `least` tokens."""
    if tokens is None or tokens >= least:
        return None
    step = "Give vLLM more memory (--gpu-memory-utilization), or look at what else the GPU holds."
    return f"the KV cache holds only {tokens:,} tokens", step


def old_version(version: str | None, page: str) -> tuple[str, str] | None:
    """Return what is wrong with the version of a vLLM server, by `/version` and `/metrics`."""
    numbers = version_numbers(version or "")
    old_names = "vllm:gpu_cache_usage_perc" in page and "vllm:kv_cache_usage_perc" not in page
    if numbers and numbers < _OLDEST_VLLM:
        oldest = ".".join(map(str, _OLDEST_VLLM))
        return f"vLLM {version}", f"Upgrade it to {oldest} or later: this one lacks what hetlb reads."
    if old_names and numbers >= _NEW_NAMES_VLLM:
        found = f"vLLM {version}, but its /metrics has names of an older one (gpu_cache_usage_perc)"
        return found, "Look which server answers /metrics there: it is not the one that answers /version."
    return None
