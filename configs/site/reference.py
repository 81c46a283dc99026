"""Pages of docs/reference, made from the code by `make reference`; a test holds that they are equal to it.

Names, types, defaults and flags are the code's; `meanings.yaml` has the words of keys and metrics.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import yaml

from hetlb.balancer.admin import causes
from hetlb.balancer.admin.prometheus import MetricsPage
from hetlb.balancer.clients import connection
from hetlb.balancer.clients.api_keys import Tenant
from hetlb.balancer.config.fleet_tables import FleetFile
from hetlb.balancer.config.profile_file import Profile
from hetlb.balancer.core import fair_shares, predictor, prefix_index
from hetlb.balancer.core.evidence import clients, kinds
from hetlb.balancer.core.evidence import table as evidence_table
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import CAUSES, Health, InstanceSpec, Outcome
from hetlb.balancer.engines import scrape, upstream
from hetlb.balancer.engines.engine_metrics import MOST_SERIES
from hetlb.balancer.exchange import attempt, ends, exchange_states, kept_places
from hetlb.balancer.http import (
    error_responses,
    forward_headers,
    http1,
    multipart,
    openai_body,
    request_reader,
    sse,
)
from hetlb.balancer.telemetry import counters
from hetlb.balancer.telemetry.counters import Totals
from hetlb.balancer.telemetry.events import Event
from hetlb.balancer.telemetry.recent import Recent
from hetlb.cli.main import COMMANDS, build_parser
from hetlb.options.peers import lease_wire, peer_messages
from hetlb.options.pick import pick_server, stream_states
from hetlb.options.wake import doors, waker
from hetlb.tools.plan.cluster import ClusterFile
from hetlb.tools.plan.market import MarketFile
from hetlb.tools.stage.stages_file import StagesFile

ROOT = Path(__file__).parents[2]
#: Readers of what others write (`readers.py` beside this file).
READERS = runpy.run_path(str(Path(__file__).with_name("readers.py")))["READERS"]
#: What the evidence about an instance means for it (`evidence.py` beside this file).
EVIDENCE = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("evidence.py"))))
#: Begin and end of the part of docs/behaviour.md that is made.
_EVIDENCE = "<!-- evidence: made"
_END_OF_EVIDENCE = "<!-- end of evidence -->"
FOLDER = ROOT / "docs" / "reference"
#: The manual page, which the wheel installs as share/man/man1/hetlb.1.
MANUAL = ROOT / "hetlb" / "cli" / "hetlb.1"
#: Files of which every key is listed: title, kind in meanings.yaml, table.
FILES = (
    ("Fleet file", "fleet", FleetFile),
    ("Keys of clients", "keys of clients", Tenant),
    ("Cluster file", "cluster", ClusterFile),
    ("Market file", "market", MarketFile),
    ("File of stages", "stages", StagesFile),
    ("Latency profile", "profile", Profile),
)
PROTOCOL_RULES = """\
A message is a MessagePack array: version, name of its process (hexadecimal digits), kind, number among the
messages of its process, time by its own clock, changes. A change is an array: its number, then its fields.
Fields may be appended within a version and unknown ones are ignored; another version is refused. Over a hub
each message follows its length (four bytes, big-endian); over Redis or Valkey it is published on
`GROUP:leases`. Each process hears its own messages too.

- Kind 0: changes. 1: all that holds, from this message on up to the next change `Waiting`; leases of before
  that are not in it have ended. 2: a question for all that holds. 3: the last changes of a process that
  leaves; a hub says this in the name of a broken connection.
- A process whose numbers have a gap is asked for all that holds; until it comes its changes are left out.
- A message comes four times in `silent_s` at least; a process that is silent for `silent_s` is gone, and its
  leases with it. So is one that does not follow within a second when a hub has ended."""
_WORDS = {str: "text", int: "integer", float: "number", bool: "true, false", types.NoneType: "", Any: "text"}


class Key(NamedTuple):
    """A key of a file: its path, the values that it takes and its default as code has it."""

    path: str
    values: str
    default: object


def keys_of(table: type[msgspec.Struct], prefix: str = "") -> Iterator[Key]:
    """Every key of a table and of the tables in it, in the order of the code."""
    hints = get_type_hints(table, include_extras=True)
    for field in msgspec.structs.fields(table):
        path, kind = prefix + field.name, hints[field.name]
        inner, mark = _table_in(kind)
        values = _values(kind)
        if inner is None or values:
            default = (
                field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
            )
            yield Key(path, values or "mapping", default)
        if inner is not None:
            yield from keys_of(inner, f"{path}{mark}.")


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _table_in(kind: Any) -> tuple[type[msgspec.Struct] | None, str]:
    """The table that a key's value is or has, and what stands between its name and the table's names."""
    for part in _parts(kind):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part, ""
        arguments = get_args(part)
        if get_origin(part) is tuple and (found := _table_in(arguments[0])[0]):
            return found, "[]"
        if get_origin(part) is dict and (found := _table_in(arguments[1])[0]):
            return found, ""
    return None, ""


def _values(kind: Any) -> str:
    """The values of a type in words, "" where they are tables alone."""
    found = []
    for part in _parts(kind):
        origin, arguments = get_origin(part), get_args(part)
        if origin is Annotated:
            bounds = [
                f"{sign} {limit:g}"
                for meta in arguments[1:]
                for sign, limit in ((">", meta.gt), ("≥", meta.ge), ("<", meta.lt), ("≤", meta.le))
                if limit is not None
            ]
            found.append(" ".join([_values(arguments[0]), *bounds]))
        elif origin is Literal:
            found += [f"`{str(each).lower() if isinstance(each, bool) else each}`" for each in arguments]
        elif origin is tuple:
            found.append("list" if _table_in(arguments[0])[0] is None or _values(arguments[0]) else "")
        elif origin is dict:
            found.append("mapping")
        elif not (isinstance(part, type) and issubclass(part, msgspec.Struct)):
            found.append(_WORDS[part])
    return ", ".join(dict.fromkeys(each for each in found if each))


def _default(value: object) -> str:
    if value is None or value is msgspec.NODEFAULT:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20} MiB"
    return "none" if value in ((), {}) else f"{value:g}" if isinstance(value, float) else str(value)


def meanings() -> dict[str, dict[str, Any]]:
    """The words of meanings.yaml, by kind and name."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "meanings.yaml").read_text())
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _named(name: str, paths: Sequence[str]) -> list[str]:
    """The paths that a name of meanings.yaml stands for: `a.*` for all under `a`."""
    return [path for path in paths if path.startswith(name[:-1])] if name.endswith(".*") else [name]


def _key_rows(keys: Sequence[Key], words: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of keys, an entry's together. Raises `ValueError` where code and words differ."""
    by_path = {key.path: key for key in keys}
    rows, seen = [], set()
    for names, entry in words.items():
        paths = [path for name in names.split() for path in _named(name, list(by_path))]
        if absent := [path for path in paths if path not in by_path]:
            raise ValueError(f"meanings.yaml: {', '.join(absent)}: not a key")
        seen.update(paths)
        default, meaning = entry if isinstance(entry, list) else ("", entry)
        found = [by_path[path] for path in paths]
        values = "; ".join(dict.fromkeys(each.values for each in found))
        defaults = ", ".join(dict.fromkeys(filter(None, (_default(each.default) for each in found))))
        required = all(each.default is msgspec.NODEFAULT for each in found)
        shown = default or defaults or ("required" if required else "")
        rows.append((" ".join(f"`{name}`" for name in names.split()), values, shown, meaning))
    if missing := [path for path in by_path if path not in seen]:
        raise ValueError(f"meanings.yaml: {', '.join(missing)}: no meaning")
    return rows


#: First keys of the rows that most fleets need; all others of the fleet file are advanced.
FIRST_KEYS = (
    "version", "models[].name", "models[].instances[].name", "models[].instances[].url",
    "models[].instances[].profile", "models[].instances[].weight", "models[].instances[].max_num_seqs",
    "models[].instances[].api_key_file", "models[].aliases", "models[].classes", "models[].classes.ttft_ms",
    "models[].classes.background", "listen.host", "admin.host", "admin.token_file", "policy.name",
    "queue.timeout_s", "proxy.api_keys_file", "proxy.shutdown_grace_s",
)  # fmt: skip


def _first(row: tuple[str, str, str, str]) -> bool:
    return row[0].split()[0].strip("`") in FIRST_KEYS


def keys_page() -> str:
    """docs/reference/keys.md."""
    words = meanings()
    lines = [
        "# Keys of files",
        "",
        "[Configuration](../configuration.md) says how files are read.",
    ]
    for title, kind, table in FILES:
        rows = _key_rows(list(keys_of(table)), words[kind])
        parts = [(title, rows)]
        if kind == "fleet":
            parts = [
                (title, [row for row in rows if _first(row)]),
                (f"{title}, advanced", [row for row in rows if not _first(row)]),
            ]
        for heading, shown in parts:
            lines += ["", f"## {heading}", "", *_table(("key", "values", "default", "meaning"), shown)]
    return "\n".join(lines) + "\n"


def flags_page() -> str:
    """docs/reference/flags.md."""
    lines = ["# Flags of commands", "", "As `hetlb COMMAND --help` prints them."]
    top = build_parser()
    commands = next(each for each in top._actions if isinstance(each, argparse._SubParsersAction))
    for name, (summary, example) in COMMANDS.items():
        rows = []
        for action in commands.choices[name]._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            shown = (
                " ".join(f"`{each}`" for each in action.option_strings)
                or f"`{action.metavar or action.dest}`"
            )
            value = action.metavar or ""
            if action.option_strings and action.choices:
                value = ", ".join(map(str, action.choices))
            elif action.option_strings and not value and action.nargs != 0 and action.type is not None:
                value = {int: "N", float: "X"}.get(action.type, "")
            elif not action.option_strings:
                value = ", ".join(map(str, action.choices or ()))
            help_text = (action.help or "") + (
                " (required)" if action.required and action.option_strings else ""
            )
            rows.append((shown, str(value).replace("|", "\\|"), help_text.replace("|", "\\|")))
        lines += [
            "",
            f"## hetlb {name}",
            "",
            f"{summary[0].upper()}{summary[1:]}.",
            "",
            "```",
            example,
            "```",
            "",
        ]
        lines += _table(("flag", "value", "meaning"), rows) if rows else []
    return "\n".join(lines) + "\n"


def manual_page() -> str:
    """Return the manual page of the commands' parser, dated as the newest release."""
    day = re.search(r"^## [\d.]+ - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert day is not None, "CHANGELOG.md: expected a section with a version and a day"
    flags = (
        "--module", "hetlb.cli.main", "--function", "build_parser", "--prog", "hetlb",
        "--project-name", "hetlb", "--description", "reverse proxy for a mixed fleet of vLLM servers",
        "--manual-section", "1", "--manual-title", "User Commands", "--format", "single-commands-section",
    )  # fmt: skip
    dated = str(int(datetime.fromisoformat(day[1]).replace(tzinfo=UTC).timestamp()))
    return subprocess.run(
        (str(Path(sys.executable).with_name("argparse-manpage")), *flags),
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "SOURCE_DATE_EPOCH": dated},
    ).stdout


class _Everything:
    """A service with one of everything that has metrics."""

    def __init__(self) -> None:
        spec = InstanceSpec(name="server", model="model", url="http://server:8000")
        self.scheduler = Scheduler(SchedulerSetup(specs=(spec,), policy="rr"))
        self.totals = Totals()
        self.watch = SimpleNamespace(invalid_samples={})
        self.lost_lines = 0
        self.workers = ()
        self.waiting_elsewhere: tuple[dict[str, int], int] = {}, 0
        self.recent = Recent()
        self.reload_refused = ""
        view = SimpleNamespace(peer_leases=0, delay_s=0.0)
        self.sharing = SimpleNamespace(connected=True, peers=0, view=view, sent=0, received=0, rejected=0)

    def now(self) -> float:
        """Seconds."""
        return 0.0


def metric_kinds() -> dict[str, str]:
    """Type of every metric, by name."""
    page = "".join(MetricsPage(_Everything()).pieces())  # type: ignore[arg-type]
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


def metrics_page() -> str:
    """docs/reference/metrics.md."""
    kinds, words = metric_kinds(), meanings()["metrics"]
    if differ := sorted(kinds.keys() ^ words.keys()):
        raise ValueError(f"meanings.yaml: metrics: {', '.join(differ)}: not both in code and here")
    rows = [(f"`{name}`", kind, words[name][0], words[name][1]) for name, kind in kinds.items()]
    lines = [
        "# Metrics",
        "",
        "[Metrics and logs](../metrics.md) says how they are collected.",
        "",
    ]
    return "\n".join(lines + _table(("metric", "type", "labels", "meaning"), rows)) + "\n"


def events_page() -> str:
    """docs/reference/events.md."""
    rows = [(f"`{each.event}`", logging.getLevelName(each.level).lower(), each.meaning) for each in Event]
    lines = [
        "# Events",
        "",
        "They are [logged](../metrics.md#events) on stderr.",
        "",
    ]
    return "\n".join(lines + _table(("event", "level", "logged when"), rows)) + "\n"


def messages_page() -> str:
    """docs/reference/messages.md."""
    lines = [
        "# Messages between processes",
        "",
        f"Messages of [peers](../scale-out.md), version {peer_messages.VERSION}.",
        "",
        PROTOCOL_RULES,
        "",
    ]
    kinds = sorted(get_args(lease_wire.PeerChange), key=lambda kind: kind.__struct_config__.tag)
    rows = [
        (
            str(kind.__struct_config__.tag),
            f"`{kind.__name__.removeprefix('Wire')}`",
            ", ".join(f"`{name}`" for name in kind.__struct_fields__),
            " ".join((kind.__doc__ or "").split()),
        )
        for kind in kinds
    ]
    lines += _table(("number", "change", "fields", "meaning"), rows)
    return "\n".join(lines) + "\n"


def _outcome_rows() -> list[tuple[str, ...]]:
    """Rows of outcomes: status and `x-should-retry` are of hetlb's own answers, or the words."""
    words = meanings()["outcomes"]
    if differ := sorted({each.value for each in Outcome} ^ words.keys()):
        raise ValueError(f"meanings.yaml: outcomes: {', '.join(differ)}: not both in code and here")
    own = [each for each in vars(error_responses).values() if isinstance(each, error_responses.Answer)]
    own += error_responses.REJECTIONS.values()
    rows: list[tuple[str, ...]] = []
    for outcome in Outcome:
        entry = words[outcome.value]
        if isinstance(entry, list):
            when, status, retry = entry
        else:
            answers = [each for each in own if each.outcome == outcome]
            when, status = entry, ", ".join(sorted({str(each.status) for each in answers}))
            retry = ", ".join(sorted({str(each.should_retry).lower() for each in answers}))
        rows.append((f"`{outcome.value}`", CAUSES[outcome.value], when, status, retry))
    return rows


def _kib(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def limits_page() -> str:
    """docs/reference/limits.md."""
    of_clients = (
        ("empty lines before a request", f"{request_reader.MAX_BLANK_LINES}", "400"),
        (
            "head",
            f"{_kib(http1.MAX_HEAD_BYTES)}, {http1.MAX_HEADERS} headers, "
            f"{_kib(http1.MAX_LINE_BYTES)} a line, `proxy.head_timeout_s`",
            "431, 408",
        ),
        ("`Content-Type`, `Authorization`, `x-api-key`, `api-key`", "one of each", "400"),
        (
            "body",
            "`proxy.max_body_bytes`, `proxy.body_timeout_s` or "
            f"{connection._STEADY_BODY_BYTES_PER_S / 1024:g} KiB/s; "
            f"no stop of more than {connection._BODY_STOP_S:g} s",
            "413, 408",
        ),
        (
            "chunks of a body",
            f"{http1.MAX_SMALL_CHUNKS:,} of any size, the others {http1.LEAST_CHUNK_BYTES} bytes on average",
            "400",
        ),
        (
            f"values of a JSON body of more than {_kib(openai_body.LEAST_DENSE_BYTES)}",
            f"about {openai_body.MAX_DENSITY // 5_000_000} million quotation marks, brackets, commas, colons",
            "413",
        ),
        ("prompts of a request", f"{openai_body.MAX_PROMPTS:,} strings or lists of token ids", "400"),
        ("images, sounds and videos of a request", f"{openai_body.MOST_MEDIA:,} are counted", "not counted"),
        (
            "parts of a form, headers of a part",
            f"{multipart.MAX_PARTS}, {multipart.MAX_PART_LINES} "
            f"({_kib(multipart.MAX_PART_HEAD_BYTES)} together)",
            "400",
        ),
        (
            "`request_id` in the body of `/v1/responses`",
            "none: the instance names its answers",
            "400",
        ),
        (
            "requests behind the one being answered",
            _kib(connection._MAX_PIPELINED_BYTES),
            "they wait in the kernel",
        ),
    )
    of_engines = (
        ("interim answers (1xx)", f"{upstream.MAX_INTERIM_ANSWERS}", "502"),
        (
            "head of an answer",
            f"{_kib(http1.MAX_HEAD_BYTES)}, {http1.MAX_HEADERS} headers, no control characters",
            "502",
        ),
        ("event of a stream that is held until it is whole", _kib(sse.MAX_HELD_BYTES), "passes in parts"),
        (
            "pages that are scraped",
            f"{_kib(upstream.MAX_PAGE_BYTES)}, metrics {_kib(scrape.MAX_METRICS_BYTES)}, `scrape.timeout_s`, "
            f"{MOST_SERIES:,} lines of one metric",
            "not read; such metrics once a minute",
        ),
    )
    kept_of_clients = (
        (
            "lengths of a tenant's answers, by model",
            f"{predictor.MOST_TENANTS:,}",
            "the one with the oldest answer goes: its answers are predicted by the model's",
        ),
        ("use by tenant and model", f"{counters.MAX_ACCOUNTS:,}", "later ones count as `other`"),
        (
            "service of a tenant without requests",
            f"{fair_shares._IDLE_TENANTS:,}",
            "the one idle for longest goes: it starts level with the tenants that ask",
        ),
        (
            "prefixes and conversations that no request uses",
            f"{prefix_index.MOST_UNUSED_NODES:,}, and the room of the KV caches",
            "the one unused for longest goes",
        ),
        (
            "ids of responses that engines keep",
            f"{kept_places.MOST_IDS:,}",
            "the oldest one goes of the key with the most: no instance is known to keep it",
        ),
        ("clients that lost an answer", f"{clients._MOST_CLIENTS}", "the oldest goes"),
        (
            "kinds of requests that an instance refused; clients that asked for them",
            f"{kinds._MOST_KINDS} each",
            "the oldest goes",
        ),
    )
    first = (doors._FROM_MEMORY_S, doors._READ_AGAIN_S, doors._STARTED_S)
    least = f"at least {waker.LEAST_LATE_S:.0f} s; "
    known = f"{waker.LATE_FACTOR:.0f} times the mean so far, {least}"
    again = f"tried again after {waker._REST_FACTOR:.0f} times what it took"
    of_sleepers = (
        (
            "wake",
            known
            + "the first one {:.0f} s (level 1), {:.0f} s (level 2), {:.0f} s (command); "
            "twice, then four times as long after late ones".format(*first),
            "it is late (`wake_failed`, `no_wake`): no request waits for it, and once another of its group "
            f"is called it is put back to sleep for it; {again}",
        ),
        ("late wake, nobody else waits for the GPU", f"{waker.MOST_WAKE_S:.0f} s", again),
        (
            "sleep",
            f"{known}the first one {waker.FIRST_SLEEP_S:.0f} s",
            f"it serves on (`sleep_failed`, `no_sleep`), {again}; one that is down is taken to sleep",
        ),
        ("others use a server that is to sleep", f"{waker.OTHERS_S:.0f} s", "it serves on"),
    )
    options = dict(pick_server._OPTIONS)
    of_gateways = (
        ("connections", f"{pick_server.MAX_CONNECTIONS:,}", "closed"),
        (
            "calls of one connection, of all",
            f"{pick_server.MAX_CALLS_EACH}, {pick_server.MAX_CALLS:,}",
            "refused",
        ),
        ("head of a call", _kib(options["grpc.absolute_max_metadata_size"]), "refused"),
        ("pings", f"one in {options['grpc.http2.min_ping_interval_without_data_ms']} ms", "closed"),
        (
            "other frames without pause (SETTINGS, WINDOW_UPDATE, heads that are taken back)",
            "gRPC has none",
            "the connection goes on: on two cores 4 of them delay a pick by up to 1.2 s, 32 each pick by "
            "1.9 s. With `pick.client_ca_file` peers without a certificate get no further than the "
            "handshake: 32 of them delay no pick (median 42 ms on a busy machine, 57 without)",
        ),
    )
    of_all = [(each.reads, each.of, each.bound, each.else_) for each in READERS]
    parts = (
        "# Limits",
        "Times run from the first byte and are not restarted.",
        "## Of a client",
        "\n".join(_table(("what", "limit", "else"), of_clients)),
        "## Of an engine",
        "\n".join(_table(("what", "limit", "else"), of_engines)),
        "## Of a server that sleeps",
        "\n".join(_table(("what", "limit", "else"), of_sleepers)),
        "## Of a gateway of `hetlb pick`",
        "\n".join(_table(("what", "limit", "else"), of_gateways)),
        "## Readers of what others write",
        "Each reads in linear time and keeps a bounded number of bytes. At its bound one thing is lost, as "
        "the last column says, and nothing else.",
        "\n".join(_table(("what", "of", "bound", "at it"), of_all)),
        "## Kept of clients after their requests",
        "Memory and the work of a request do not grow with the number of tenants, sessions and request ids.",
        "\n".join(_table(("what", "most", "beyond"), kept_of_clients)),
        "## Headers of clients that engines get",
        ", ".join(f"`{name.decode()}`" for name in sorted(forward_headers._FORWARDED))
        + "; headers in `proxy.forward_headers`; `x-request-id`, the client's (with a suffix if there are "
        "keys) or a new one. Beside these the engine gets its own `Host` and, where configured, its own key.",
        "## Of one turn of the event loop",
        f"A connection reads at most 256 KiB in a turn, {_kib(request_reader.TURN_BYTES)} of a chunked body, "
        f"{_kib(upstream.TURN_BYTES)} of an answer in chunks or events. "
        "JSON is decoded in one turn (about 45 ms at most).",
    )
    return "\n\n".join(parts) + "\n"


def _diagram(
    table: Sequence[Transition[Any]], begin: str, inner: tuple[str, Sequence[Transition[Any]]] | None = None
) -> str:
    """Return a state machine as a table of its rows, with a second state's of the same thing."""

    def edges(rows: Sequence[Transition[Any]]) -> list[tuple[str, str, str]]:
        return [(", ".join(state.name for state in row.before), row.event, row.after.name) for row in rows]

    first = next(iter(cast(type[Enum], type(table[0].after))))
    lines = _table(("state", "event", "next"), [("", begin, first.name), *edges(table)])
    if inner is not None:
        name, rows = inner
        lines += ["", f"Its {name}:", "", *_table(("state", "event", "next"), edges(rows))]
    return "\n".join(lines)


def states_page() -> str:
    """docs/reference/states.md."""
    refused = [
        (f"`{reason.value}`", f"`{answer.outcome.value}`", str(answer.status))
        for reason, answer in error_responses.REJECTIONS.items()
    ]
    parts = (
        "# States",
        "The tables that the code obeys.",
        "## A request",
        "One state towards the engine and one towards the client:",
        _diagram(
            exchange_states.TRANSITIONS, "a whole request", ("response", exchange_states.RESPONSE_TRANSITIONS)
        ),
        "## What an engine owes",
        "Each attempt of a request says what it is owed, and each watch asks that:",
        "\n".join(
            _table(
                ("owed", "for", *(name for name, _ in attempt.WATCHES)),
                [
                    (
                        each.name,
                        each.of,
                        *("yes" if getattr(each, field) else "no" for _, field in attempt.WATCHES),
                    )
                    for each in attempt.OWED
                ],
            )
        ),
        "A WebSocket ends by itself if neither side says anything for `proxy.idle_timeout_s`.",
        "## A gateway's stream to `hetlb pick`",
        "What comes in a state that does not wait for it changes nothing:",
        _diagram(stream_states.TRANSITIONS, "a stream"),
        "## Health of an instance",
        "\n".join(
            _table(
                ("state", "event", "next"),
                [(", ".join(each.before), each.event, each.after) for each in evidence_table.TRANSITIONS],
            )
        ),
        "## Sleep of an instance with `wake`",
        "\n".join(
            _table(
                ("state", "event", "next"),
                [(", ".join(each.before), each.event, each.after) for each in waker.TRANSITIONS],
            )
        ),
        "## Causes",
        "What `hetlb status` and the dashboard say, in this order; `hetlb_cause` has the same names. A state "
        "is the worst of its causes.",
        "\n".join(
            _table(
                ("cause", "state", "event of the log", "alert"),
                [
                    (
                        f"`{name}`",
                        kind.severity.value,
                        f"`{kind.event}`",
                        f"`{kind.alert}`" if kind.alert else "",
                    )
                    for name, kind in causes.CAUSES.items()
                ],
            )
        ),
        "## Outcomes",
        "Every request ends in exactly one; `hetlb_requests_total` counts them with their cause, model, "
        "phase and class of status. `rate_limited`, `rejected_full`, `no_instance` and `expired_queue` "
        "have a `Retry-After`.",
        "\n".join(_table(("outcome", "cause", "when", "status", "`x-should-retry`"), _outcome_rows())),
        "Reasons for which the scheduler refuses a request, as the event log has them:",
        "\n".join(_table(("reason", "outcome", "status"), refused)),
        "## Ends of a request",
        "\n".join(
            _table(
                ("the lease ends because", "outcome of the request", "counts"),
                [
                    (end.happened, f"`{end.outcome.value}`", evidence_table.verdict(end.told).value)
                    for end in ends.ENDS
                ],
            )
        ),
        "\n".join(
            _table(
                ("an end counts", "and changes"),
                [(each.value, effect) for each, effect in EVIDENCE.EFFECTS.items()],
            )
        ),
    )
    return "\n\n".join(parts) + "\n"


def with_evidence(page: str) -> str:
    """Return docs/behaviour.md with the table of what an instance gets by its state."""
    mark, end = page.index(_EVIDENCE), page.index(_END_OF_EVIDENCE)
    rows = [
        (
            state.value,
            "; ".join(each.event for each in evidence_table.TRANSITIONS if each.after is state),
            gets,
            "; ".join(
                each.event
                for each in evidence_table.TRANSITIONS
                if state in each.before and each.after is Health.UP
            ),
        )
        for state, gets in EVIDENCE.GETS.items()
    ]
    rows += [(name, *EVIDENCE.RESTRAINTS[name]) for name in evidence_table.RESTRAINTS]
    head = page[:mark] + page[mark : page.index("\n", mark)]
    return "\n\n".join((head, "\n".join(_table(("state", "begins", "gets", "ends"), rows)), page[end:]))


PAGES = {
    "keys.md": keys_page,
    "flags.md": flags_page,
    "metrics.md": metrics_page,
    "events.md": events_page,
    "limits.md": limits_page,
    "messages.md": messages_page,
    "states.md": states_page,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, page in PAGES.items():
        (FOLDER / file).write_text(page())
    behaviour = FOLDER.parent / "behaviour.md"
    behaviour.write_text(with_evidence(behaviour.read_text()))
    MANUAL.write_text(manual_page())
