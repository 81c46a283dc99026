"""A log held against the engine model, as a document, as tables and as a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetlb.balancer.config.profile_file import Profile
from hetlb.errors import ConfigError
from hetlb.tools.plots import new_figure, plot_distribution, save_figure, tidy
from hetlb.tools.sim.against import Comparison
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.study import engine_of
from hetlb.tools.tables import document_table, print_report
from hetlb.tools.workload.measured_logs import Log

_MEASURED, _SIMULATED = "#24292f", "#d9480f"


def engines(path: Path, log: Log, profile: Profile | None) -> dict[str, EngineSpec]:
    """Return the engines of a log by name, from its set-up or the profile. Raises `InputError`."""
    names = sorted({each.instance for each in log.requests})
    if profile is not None:
        return dict.fromkeys(names, engine_of(profile))
    if log.setup is None:
        raise ConfigError(
            "--against: expected --profile P.yaml, the profile of the server that wrote the log"
        )
    specs = {spec.name: spec for spec in log.setup.specs}
    found = {}
    for name in names:
        spec = specs.get(name)
        if spec is None or spec.latency is None or spec.gpu_alone:
            raise ConfigError(
                f"{path}: {name}: expected an instance that had a profile when the log began, "
                "or --profile P.yaml for all"
            )
        try:
            found[name] = EngineSpec(spec.latency, EngineLimits.from_capacity(spec.capacity))
        except ValueError as error:
            raise ConfigError(f"{path}: {name}: {error}") from error
    return found


def comparison_document(log: Log, profile: Profile | None, found: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON; seconds, shares as fractions."""
    return {
        "log": log.kind,
        "profile": profile.name if profile is not None else None,
        "lacks": list(profile.lacks) if profile is not None else [],
        "requests": found.requests,
        "failed": found.failed,
        "preemptions": found.preemptions,
        "verdict": found.verdict,
        "errors": {name: asdict(error) for name, error in found.errors.items()},
        "loads": {
            label: {name: asdict(error) for name, error in errors.items()}
            for label, errors in found.loads.items()
        },
        "kv_usage": [list(each) for each in found.kv],
        "per_request": [
            {
                "arrival_s": m.arrival_s,
                "input_tokens": m.input_tokens,
                "output_tokens": m.output_tokens,
                "measured": {"queue_s": m.queue_s, "ttft_s": m.ttft_s, "e2e_s": m.e2e_s},
                "simulated": {"queue_s": s.queue_s, "ttft_s": s.ttft_s, "e2e_s": s.e2e_s},
            }
            for m, s in zip(found.measured, found.simulated, strict=True)
        ],
    }


#: Columns of the errors, of a row of the document.
_COLUMNS = (
    "={metric}|>measured={measured_s:.4g} s|>simulated={simulated_s:.4g} s|>error={error:+.1%}"
    "|>per request={per_request:.1%}|>median={median:.1%}|>p95={p95:.1%}"
)


def print_comparison(profile: Profile | None, document: dict[str, Any]) -> None:
    """Print the verdict, tables for people, and what the profile lacks."""
    title = f"{document['requests']} requests, {document['preemptions']} preemptions"
    tables = [
        document_table(label, _COLUMNS, [{"metric": name.upper()} | each for name, each in errors.items()])
        for label, errors in ((title, document["errors"]), *document["loads"].items())
    ]
    note = "per request: mean distance over the mean; median and p95 of each request's own"
    lines = [note, *(f"the profile lacks {each}" for each in document["lacks"])]
    lines += [f"assumed {each}" for each in (profile.assumed if profile is not None else ())]
    print_report([document["verdict"]], tables, lines, [])


def write_against_plot(path: Path, found: Comparison) -> None:
    """Draw whole answers by arrival, three distributions, and the KV cache in use. Raises `InputError`."""
    figure = new_figure(11.0, 6.4)
    above, below = figure.subplots(2, 3)
    arrivals = [each.arrival_s for each in found.measured]
    for axes, name in ((above[0], "ttft_s"), (above[1], "e2e_s")):
        axes.plot(arrivals, [getattr(each, name) for each in found.measured], ".", color=_MEASURED, ms=3)
        axes.plot(arrivals, [getattr(each, name) for each in found.simulated], ".", color=_SIMULATED, ms=3)
        _label(axes, "arrival (s)", f"{name.removesuffix('_s').upper()} (s)")
    above[2].plot(
        [at_s for at_s, _ in found.kv], [100.0 * used for _, used in found.kv], lw=0.8, color=_SIMULATED
    )
    _label(above[2], "time (s)", "KV cache in use (%), simulated")
    for axes, name in zip(below, ("ttft_s", "tpot_s", "e2e_s"), strict=True):
        for label, side, color in (
            ("measured", found.measured, _MEASURED),
            ("simulated", found.simulated, _SIMULATED),
        ):
            plot_distribution(axes, [getattr(each, name) for each in side], label=label, color=color)
        _label(axes, f"{name.removesuffix('_s').upper()} (s)", "share of the requests")
    below[0].legend(frameon=False)
    figure.suptitle(found.verdict)
    save_figure(figure, path)


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    tidy(axes)
