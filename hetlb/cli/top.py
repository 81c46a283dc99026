"""`hetlb top`: live view of a fleet in a terminal, from the event stream of the dashboard."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hetlb.cli.adminclient import AdminClient, NoAnswerError, add_admin_argument
from hetlb.cli.flags import declare
from hetlb.errors import InputError
from hetlb.tools.tables import Console

RETRY_S = 1.0
#: Age of an engine's report, in seconds, beyond which the scheduler does not use it.
STALE_S = 30.0
#: Least lines of a terminal that shows curves.
_CURVES_LINES = 16
#: Columns of the widest curve: series have about as many values.
_WIDEST_CURVE = 100
#: Least columns for the state and its advice to fit in three lines.
_WIDE = 80
_BLOCKS = " ▁▂▃▄▅▆▇█"
_HEALTH_STYLES = {"up": "green", "suspect": "yellow", "ejected": "bold red"}
_STATE_STYLES = {"well": "green", "busy": "yellow", "degraded": "red", "down": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_argument(parser)
    add = declare(parser)
    add("--once", "print one frame and exit", action="store_true")
    add("--json", "one snapshot as a JSON document on stdout, and exit", action="store_true")


def run(args: argparse.Namespace) -> int:
    client = AdminClient(args.admin)
    view, console = FleetScreen(client.url), Console()
    if args.json or args.once or not sys.stdout.isatty():
        view.snapshot = next(client.snapshots())
        if args.json:
            print(json.dumps(view.snapshot))
        else:
            console.print(view.render(console.width, None))
        return 0
    news: queue.SimpleQueue[dict[str, Any] | InputError | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(client, news.put), daemon=True).start()
    with _quit_key(lambda: news.put(None)), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view.render(console.width, console.height), refresh=True)
            match news.get():
                case None:
                    return 0
                case NoAnswerError() as error:
                    view.trouble = error.why
                case InputError() as error:
                    raise error
                case snapshot:
                    view.snapshot, view.trouble = snapshot, ""


def _listen(client: AdminClient, tell: Callable[[dict[str, Any] | InputError], None]) -> None:
    """Pass on snapshots and errors until an error that a retry cannot fix."""
    while True:
        try:
            for snapshot in client.snapshots():
                tell(snapshot)
        except InputError as error:
            tell(error)
            if not isinstance(error, NoAnswerError):
                return
        time.sleep(RETRY_S)


@contextlib.contextmanager
def _quit_key(leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave` on `q`, Ctrl-D, Esc or end of input; restores the terminal's settings afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    fd = sys.stdin.fileno()

    def read() -> None:
        while (keys := os.read(fd, 1024)) and not quits(keys):
            pass
        leave()

    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        threading.Thread(target=read, daemon=True).start()
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def quits(keys: bytes) -> bool:
    """Return True for `q`, Ctrl-D and an Esc that begins no other key, such as an arrow."""
    return b"q" in keys.lower() or b"\x04" in keys or keys.endswith(b"\x1b")


# --- the picture ---


class FleetScreen:
    """Last snapshot of a fleet and its rendering."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.snapshot: dict[str, Any] | None = None
        #: Reason for missing updates, "" while they arrive.
        self.trouble = ""

    def render(self, width: int, height: int | None) -> Group:
        """Return the frame for a terminal of this size; `height` None shows everything.

        Instances not up or not ready come first, the others in file order.
        """
        state = self._state()
        if self.snapshot is None:
            return Group(_line(["hetlb top", self._url], state, width))
        snapshot = self.snapshot
        head = [f"hetlb {snapshot['version']}", self._url, f"policy {snapshot['fleet']['policy']}"]
        low = height is not None and height < _CURVES_LINES
        most = 1 if low else 3 if width >= _WIDE else 4
        summary, status = _summary(snapshot, width), _status(snapshot, width, most)
        if low:
            del summary[1:]
        lines: list[Text | Table] = [*status, _line(head, state, width), *summary, Text()]
        models = snapshot["fleet"]["models"]
        rows = [(model["name"], row) for model in models for row in model["instances"]]
        rows.sort(key=lambda pair: (pair[1]["health"] == "up") * 2 + (pair[1]["state"] == "ready"))
        troubles, decisions = _troubles([row for _, row in rows], width), _decisions(snapshot, width)
        if height is not None:
            # Lines left after the headers go to the instances first.
            free = height - len(lines) - 2
            del troubles[min(4, max(0, free - 2)) :]
            room = max(1, min(len(rows), free - len(troubles)))
            del decisions[max(0, free - room - len(troubles)) :]
            del rows[room:]
        every = sum(model["totals"]["instances"] for model in models)
        if len(rows) < every:
            troubles.append(_text(f"and {every - len(rows)} more instances", "dim"))
        return Group(*lines, _fleet(rows, width), *troubles, *(decisions if len(decisions) > 2 else ()))

    def _state(self) -> Text:
        if self.trouble:
            return Text(f"{self.trouble}; trying again", "bold red")
        return Text("waiting", "yellow") if self.snapshot is None else Text("live", "bold green")


def _text(words: str = "", style: str = "") -> Text:
    """Return a line, cut at the right edge: for words, never for figures."""
    return Text(words, style, no_wrap=True, overflow="ellipsis")


def _line(parts: Sequence[str], right: Text, width: int) -> Text:
    """Return a line of the parts that fit whole beside a text at the right end."""
    right.truncate(width - 1, overflow="ellipsis")
    text = Text(_fitting(parts, width - right.cell_len - 1, "  "), no_wrap=True)
    text.truncate(max(0, width - right.cell_len - 1), pad=True)
    return text.append(" ").append_text(right)


def _fitting(parts: Sequence[str], width: int, between: str) -> str:
    """Return as many of the first parts as fit whole, joined."""
    line = ""
    for part in parts:
        longer = f"{line}{between}{part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line


def _status(snapshot: dict[str, Any], width: int, most: int) -> list[Text]:
    """Return the coloured state of the fleet with its sentence and advice, on at most `most` lines."""
    status = snapshot["status"]
    badge = f" {status['state']} "
    words = f"{status['sentence']}. {status['advice']}"
    first, *others = _wrapped(words, width, most, indent=len(badge) + 1) or [""]
    text = Text(badge, f"bold reverse {_STATE_STYLES[status['state']]}", no_wrap=True)
    text.append(first[len(badge) :], "default not reverse not bold")
    return [text, *map(_text, others)]


def _wrapped(words: str, width: int, most: int, indent: int = 0) -> list[str]:
    """Return words on at most `most` lines; "…" replaces words without room."""
    return textwrap.wrap(words, width, max_lines=most, placeholder=" …", initial_indent=" " * indent)


def _summary(snapshot: dict[str, Any], width: int) -> list[Text]:
    fleet, series = snapshot["fleet"], snapshot["series"]
    totals: Counter[str] = Counter()
    for model in fleet["models"]:
        totals.update(model["totals"])
    up, every, there = totals["able"], totals["instances"], totals["kv_cache_tokens"]
    queue = fleet["queue"]
    oldest = f" (oldest {seconds(queue['oldest_s'])})" if queue["requests"] else ""
    counts = _text()
    ready = f"{up} of {every} up"
    counts.append(ready, "" if up == every else "bold red" if not up else "yellow")
    parts = (
        f"{totals['in_flight']:,} in flight",
        f"queue {queue['requests']:,}{oldest}",
        f"KV reserved {percent(totals['kv_reserved_tokens'] / there if there else None)} of {there:,}",
    )
    if fitting := _fitting(parts, width - len(ready) - 3, "   "):
        counts.append(f"   {fitting}")
    lines = [counts]
    for title, column, text in (
        ("requests/s", "ok_per_s", _rate),
        ("tokens/s", "output_tokens_per_s", _rate),
        ("TTFT median", "ttft_p50_s", seconds),
        ("E2E median", "e2e_p50_s", seconds),
    ):
        values = series[column]
        latest = next((value for value in reversed(values) if value is not None), None)
        top = max((value for value in values if value is not None), default=0.0)
        curve = sparkline(values, min(width, _WIDEST_CURVE + 46) - 46)
        line = _text(f"{title:<13}{text(latest):>9}  ").append(curve, "cyan")
        lines.append(line.append(f"  5 min, top {text(top)}", "dim"))
    return lines


class _Column(NamedTuple):
    """A column of the table of instances: its heading, its width, its place in the order of removal.

    Columns of place 0 are always there; on a narrow terminal the highest place goes first.
    """

    title: str
    width: int
    place: int
    cell: Callable[[dict[str, Any]], Text | str]


def _age(row: dict[str, Any]) -> Text:
    age = row["signal_age_s"]
    return Text(seconds(age), "yellow" if age is None or age > STALE_S else "")


_COLUMNS = (
    _Column("health", 7, 0, lambda row: Text(row["health"], _HEALTH_STYLES.get(row["health"], "yellow"))),
    _Column("state", 5, 0, lambda row: Text(row["state"], "" if row["state"] == "ready" else "yellow")),
    _Column("in", 4, 0, lambda row: _count(row["in_flight"])),
    _Column("run", 4, 2, lambda row: _count(row["running"])),
    _Column("wait", 4, 1, lambda row: _count(row["waiting"])),
    _Column("KV reserved", 11, 6, lambda row: _meter(_reserved(row), 11)),
    _Column("KV", 4, 0, lambda row: percent(_reserved(row))),
    _Column("rep", 5, 4, lambda row: percent(row["kv_reported"])),
    _Column("work", 7, 3, lambda row: seconds(row["workload"])),
    _Column("age", 6, 5, _age),
)


def _fleet(rows: Sequence[tuple[str, dict[str, Any]]], width: int) -> Table:
    """Return the table of instances, as wide as its columns, with the columns that fit whole."""
    several = len({model for model, _ in rows}) > 1 and width >= 100
    names = shortened([row["name"] for _, row in rows], max(13, width // 4) if width < 100 else 64)
    name_width = max(len("instance"), *map(len, names.values()))
    model_width = min(24, max((len(model) for model, _ in rows), default=0)) if several else 0
    columns = list(_COLUMNS)
    while (
        name_width + 1 + (model_width + 1 if several else 0) + sum(each.width + 1 for each in columns) > width
        and (last := max(columns, key=lambda each: each.place)).place
    ):
        columns.remove(last)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("instance", no_wrap=True, overflow="ellipsis")
    if several:
        table.add_column("model", no_wrap=True, overflow="ellipsis", max_width=24)
    for each in columns:
        left = each.title in ("health", "state", "KV reserved")
        table.add_column(each.title, width=each.width, no_wrap=True, justify="left" if left else "right")
    for model, row in rows:
        cells = [each.cell(row) for each in columns]
        table.add_row(names[row["name"]], *([model] if several else []), *cells)
    return table


def shortened(names: Sequence[str], most: int) -> dict[str, str]:
    """Shorten names to at most `most` characters, dropping their common prefix to keep them distinct."""
    if len(names) > 1 and max(map(len, names)) > most:
        alike = max(0, len(os.path.commonprefix(list(names))) - 2)  # noqa: RUF071 - no paths
        begun = "…" if alike else ""
    else:
        alike, begun = 0, ""
    head = most // 2
    short: dict[str, str] = {}
    for name in names:
        text = name if len(name) <= most else begun + name[alike:]
        short[name] = text if len(text) <= most else f"{text[:head]}…{text[head + 1 - most :]}"
    return short


def _troubles(rows: Sequence[dict[str, Any]], width: int) -> list[Text]:
    """Return the reasons of the instances that are not up."""
    words = [
        f"{row['name']} is {row['health']}: {row['health_reason']}"
        for row in rows
        if row["health"] != "up" and not row.get("sleep")
    ]
    return [_text(line, "red") for each in words for line in _wrapped(each, width, 2)]


def _decisions(snapshot: dict[str, Any], width: int) -> list[Text]:
    """Return the last decisions, a line each, under a heading; the policy if it fits."""
    last = snapshot["decisions"]["last"]
    if not last:
        return []
    head = f"{'placed':>7} {'request':>9} {'prompt':>7} {'predicted':>9} {'actual':>9}  chosen"
    chosen = [f"{each['chosen']} ({each['policy']})" for each in last]
    room = width - len(head) + len("chosen")
    if max(map(len, chosen)) > room:
        names = shortened(list(dict.fromkeys(each["chosen"] for each in last)), room)
        chosen = [names[each["chosen"]] for each in last]
    else:
        head += " (policy)"
    lines = [_text(), _text(head, "dim")]
    for each, name in zip(last, chosen, strict=True):
        actual = f"{each['output_tokens'] / each['sequences']:.0f}{'' if each['ended'] else '…'}"
        age = max(0.0, snapshot["clock_s"] - each["dispatched_at_s"])
        lines.append(
            _text(
                f"{seconds(age):>7} {each['request_id']:>9} {each['prompt_tokens_per_sequence']:>7,} "
                f"{each['predicted_output']:>9,.0f} {actual:>9}  {name}"
            )
        )
    return lines


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw values as block characters, newest at the right, averaged to fit; None is a gap."""
    if width <= 0 or not values:
        return ""
    places = []
    for index in range(min(width, len(values))):
        count = min(width, len(values))
        part = [
            v
            for v in values[index * len(values) // count : (index + 1) * len(values) // count]
            if v is not None
        ]
        places.append(sum(part) / len(part) if part else None)
    top = max((place for place in places if place is not None), default=0.0)
    # Any value above 0 gets at least the second block.
    return "".join(
        " " if place is None else _BLOCKS[max(2, round(place / top * 8))] if place > 0 else _BLOCKS[1]
        for place in places
    )


def _meter(share: float, width: int) -> Text:
    full = min(width, round(share * width + (0.5 if 0 < share < 0.5 / width else 0)))
    style = "red" if share > 1 else "yellow" if share > 0.9 else "green"
    return Text("█" * full, style).append("░" * (width - full), "dim")


def _reserved(row: dict[str, Any]) -> float:
    return float(row["kv_reserved_tokens"] / row["kv_cache_tokens"])


def _count(value: int | None) -> str:
    return "-" if value is None else str(value) if value < 10_000 else f"{value / 1000:.0f}k"


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def percent(share: float | None) -> str:
    """Format a share as a percentage."""
    return "-" if share is None else f"{100 * share:.0f}%"


def seconds(value: float | None) -> str:
    """Format seconds in at most 6 characters."""
    if value is None:
        return "-"
    if value == 0:
        return "0 s"
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 599.5:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 36_000 else f"{value / 3600:.0f} h"
