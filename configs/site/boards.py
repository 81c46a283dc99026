"""Writes Grafana's dashboards into configs/grafana from one table of panels. `make boards`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "grafana"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
#: Matcher of every selector: the proxies that are chosen at the top of a board.
_PROXY = 'instance=~"$proxy"'
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8
_QUANTILES = (0.5, 0.9, 0.99)


class Panel(NamedTuple):
    """Title and unit of a panel, and its series: pairs of expression and legend."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    about: str = ""
    stacked: bool = False


def now(metric: str, by: str, how: str = "sum", matchers: str = "") -> str:
    """Return the expression of a gauge by a label."""
    return f"{how} by ({by}) ({metric}{{{_PROXY}{matchers}}})"


def rate(metric: str, by: str, matchers: str = "") -> str:
    """Return the expression of a counter's rate by a label."""
    return f"sum by ({by}) (rate({metric}{{{_PROXY}{matchers}}}[$__rate_interval]))"


def count(metric: str, by: str = "") -> str:
    """Return the expression of a counter's increase, by a label or in all."""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (increase({metric}{{{_PROXY}}}[$__rate_interval]))"


def counted(metric: str, by: str, matchers: str = "") -> str:
    """Return the growth of counters, with a series' first event, which `increase` does not see."""
    own = f"{metric}{{{_PROXY}{matchers}}}"
    return f"sum by ({by}) (clamp_min({own} - ({own} offset $__rate_interval or 0 * {own}), 0))"


def quantiles(title: str, metric: str, unit: str, by: str = "model", about: str = "") -> Panel:
    """Return the panel of a histogram: median, 90th and 99th percentile by a label."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    series = tuple(
        (f"histogram_quantile({q}, {rate(f'{metric}_bucket', labels)})", f"p{100 * q:g}{legend}")
        for q in _QUANTILES
    )
    return Panel(title, unit, series, about)


def by_server(title: str, unit: str, expression: str, about: str = "", stacked: bool = False) -> Panel:
    """Return the panel of one expression by server."""
    return Panel(title, unit, ((expression, "{{server}}"),), about, stacked)


#: Panels by board: file name, title, panels in reading order.
BOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "fleet": (
        "hetlb: the fleet now",
        (
            Panel(
                "State",
                "short",
                ((now("hetlb_state", "model, state", "max"), "{{model}} {{state}}"),),
                "1 for the state in force: well, busy, degraded or down.",
            ),
            Panel(
                "Causes",
                "short",
                (
                    (
                        f"max by (cause, exported_instance) (hetlb_cause{{{_PROXY}}})",
                        "{{cause}} {{exported_instance}}",
                    ),
                ),
                "Each cause of a state that is not well, while it lasts.",
            ),
            Panel(
                "Load over capacity",
                "percentunit",
                ((now("hetlb_load_ratio", "instance", "max"), "{{instance}}"),),
            ),
            Panel(
                "Capacity and headroom",
                "reqps",
                (
                    (now("hetlb_capacity_requests_per_second", "instance"), "capacity {{instance}}"),
                    (now("hetlb_headroom_requests_per_second", "instance"), "headroom {{instance}}"),
                ),
            ),
            Panel("Waiting requests", "short", ((now("hetlb_queue_requests", "model"), "{{model}}"),)),
            Panel(
                "Longest wait", "s", ((now("hetlb_oldest_wait_seconds", "instance", "max"), "{{instance}}"),)
            ),
            by_server(
                "Output tokens by server",
                "short",
                rate("hetlb_instance_output_tokens_total", "server"),
                stacked=True,
            ),
            by_server(
                "In flight by server", "short", now("hetlb_instance_in_flight", "server"), stacked=True
            ),
            by_server(
                "Work assigned and not completed", "s", now("hetlb_instance_workload_seconds", "server")
            ),
            by_server(
                "KV cache reserved",
                "percentunit",
                now("hetlb_instance_kv_reserved_tokens", "server")
                + " / "
                + now("hetlb_instance_kv_cache_tokens", "server", "max"),
                "hetlb's own bookings.",
            ),
            by_server(
                "KV cache reported", "percentunit", now("hetlb_instance_kv_reported_ratio", "server", "max")
            ),
            by_server(
                "Prompt tokens from the prefix cache",
                "percentunit",
                rate("hetlb_instance_cached_prompt_tokens_total", "server")
                + " / "
                + rate("hetlb_instance_prompt_tokens_total", "server"),
            ),
        ),
    ),
    "latency": (
        "hetlb: latency",
        (
            quantiles("Time to first token", "hetlb_time_to_first_token_seconds", "s"),
            quantiles("Between tokens", "hetlb_inter_token_latency_seconds", "s"),
            quantiles("Whole request", "hetlb_e2e_request_latency_seconds", "s"),
            quantiles("Time in the queue", "hetlb_request_queue_time_seconds", "s"),
            by_server(
                "Waiting inside the engines", "short", now("hetlb_instance_reported_waiting", "server", "max")
            ),
            by_server(
                "Age of the engines' reports", "s", now("hetlb_instance_signal_age_seconds", "server", "max")
            ),
            quantiles("Predicted over actual output tokens", "hetlb_predicted_output_ratio", "short"),
            quantiles("Predicted over actual time", "hetlb_predicted_time_ratio", "short"),
            by_server(
                "Predicted over actual time by server",
                "short",
                rate("hetlb_instance_predicted_seconds_total", "server")
                + " / "
                + rate("hetlb_instance_served_seconds_total", "server"),
                "1 is a profile that is right.",
            ),
            quantiles("Decision time", "hetlb_decision_seconds", "s", "event"),
            quantiles(
                "Loop lag", "hetlb_loop_lag_seconds", "s", "", "In this time every stream stood still."
            ),
            Panel(
                "CPU and memory of hetlb",
                "short",
                (
                    (f"rate(process_cpu_seconds_total{{{_PROXY}}}[$__rate_interval])", "CPU {{instance}}"),
                    (f"process_resident_memory_bytes{{{_PROXY}}} / 2^30", "GiB {{instance}}"),
                ),
            ),
        ),
    ),
    "failure": (
        "hetlb: failures",
        (
            Panel(
                "Requests by outcome",
                "reqps",
                ((rate("hetlb_requests_total", "outcome"), "{{outcome}}"),),
                stacked=True,
            ),
            Panel(
                "Requests without an answer",
                "percentunit",
                (
                    (
                        counted("hetlb_requests_total", "model", ',cause=~"engine|hetlb"')
                        + " / "
                        + counted("hetlb_requests_total", "model"),
                        "{{model}}",
                    ),
                ),
                "Share whose cause is an engine or hetlb.",
            ),
            Panel(
                "Refused by limits and clients' mistakes",
                "reqps",
                ((rate("hetlb_requests_total", "cause", ',cause=~"client|limit"'), "{{cause}}"),),
            ),
            by_server("Servers up", "short", now("hetlb_instance_health", "server", "max", ',health="up"')),
            by_server(
                "Servers ready", "short", now("hetlb_instance_state", "server", "max", ',state="ready"')
            ),
            Panel(
                "Leases that ended badly",
                "short",
                (
                    (
                        counted(
                            "hetlb_instance_requests_total",
                            "server, outcome",
                            ',outcome!~"ok|client_gone|bad_request|upstream_refused"',
                        )
                        + " > 0",
                        "{{server}} {{outcome}}",
                    ),
                ),
            ),
            by_server(
                "Ejections",
                "short",
                count("hetlb_instance_ejections_total", "server"),
            ),
            by_server(
                "Stalls",
                "short",
                count("hetlb_instance_stalls_total", "server"),
            ),
            Panel(
                "Retries and resumed answers",
                "reqps",
                (
                    (rate("hetlb_retries_total", "instance"), "retries {{instance}}"),
                    (rate("hetlb_requests_resumed_total", "reason"), "resumed: {{reason}}"),
                ),
            ),
            Panel(
                "Reloads",
                "short",
                (
                    (
                        count("hetlb_config_reloads_total", "result"),
                        "{{result}}",
                    ),
                ),
            ),
            Panel(
                "Lost log lines",
                "short",
                ((count("hetlb_log_lost_lines_total"), "lines"),),
            ),
            by_server(
                "Odd metrics pages",
                "short",
                count("hetlb_instance_invalid_samples_total", "server"),
            ),
        ),
    ),
    "tenants": (
        "hetlb: tenants, classes and models",
        (
            Panel(
                "Requests by tenant",
                "reqps",
                ((rate("hetlb_tenant_requests_total", "tenant"), "{{tenant}}"),),
                stacked=True,
            ),
            Panel(
                "Output tokens by tenant",
                "short",
                ((rate("hetlb_tenant_output_tokens_total", "tenant"), "{{tenant}}"),),
                stacked=True,
            ),
            Panel(
                "Prompt tokens by tenant",
                "short",
                ((rate("hetlb_tenant_prompt_tokens_total", "tenant"), "{{tenant}}"),),
                stacked=True,
            ),
            Panel(
                "Mean wait by tenant",
                "s",
                (
                    (
                        rate("hetlb_tenant_queue_seconds_total", "tenant")
                        + " / "
                        + rate("hetlb_tenant_requests_total", "tenant"),
                        "{{tenant}}",
                    ),
                ),
            ),
            Panel(
                "Requests by class", "reqps", ((rate("hetlb_class_requests_total", "class"), "{{class}}"),)
            ),
            Panel(
                "Share that met its targets",
                "percentunit",
                (
                    (
                        rate("hetlb_class_requests_total", "class", ',met="true"')
                        + " / "
                        + rate("hetlb_class_requests_total", "class"),
                        "{{class}}",
                    ),
                ),
            ),
            Panel(
                "Requests by model",
                "reqps",
                ((rate("hetlb_requests_total", "model"), "{{model}}"),),
                stacked=True,
            ),
            Panel(
                "Servers that take requests", "short", ((now("hetlb_model_instances", "model"), "{{model}}"),)
            ),
            Panel(
                "Saturation",
                "percentunit",
                ((now("hetlb_model_saturation_ratio", "model", "max"), "{{model}}"),),
                "Above 0.7 the autoscaling examples add a server.",
            ),
        ),
    ),
}


def panel_document(number: int, panel: Panel) -> dict[str, Any]:
    """Return one panel as Grafana stores it."""
    row, column = divmod(number, _COLUMNS)
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 20, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    targets = [
        {"refId": chr(65 + i), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(panel.series)
    ]
    return {
        "id": number + 1, "type": "timeseries", "title": panel.title, "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }  # fmt: skip


def board(name: str) -> str:
    """Return the JSON text of one board."""
    title, panels = BOARDS[name]
    variable = {
        "name": "proxy", "label": "Proxy", "type": "query", "datasource": _SOURCE,
        "query": {"query": "label_values(hetlb_build_info, instance)", "refId": "proxy"},
        "refresh": 2, "multi": True, "includeAll": True, "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    links = [
        {"title": other, "type": "link", "url": f"/d/hetlb-{key}", "keepTime": True, "includeVars": True}
        for key, (other, _) in BOARDS.items()
        if key != name
    ]
    document = {
        "title": title, "uid": f"hetlb-{name}", "tags": ["hetlb", "vllm"], "schemaVersion": 39, "version": 1,
        "editable": True, "graphTooltip": 1, "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
        "timezone": "", "templating": {"list": [source, variable]}, "annotations": {"list": []},
        "links": links,
        "panels": [panel_document(i, panel) for i, panel in enumerate(panels)],
    }  # fmt: skip
    return json.dumps(document, indent=1) + "\n"


if __name__ == "__main__":
    for each in BOARDS:
        (FOLDER / f"{each}.json").write_text(board(each))
