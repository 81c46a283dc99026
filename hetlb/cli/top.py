"""`hetlb top`: live view of a fleet in a terminal, from the event stream of the dashboard."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hetlb.cli.adminclient import AdminClient, NoAnswerError, add_admin_arguments
from hetlb.cli.flags import declare
from hetlb.errors import InputError

RETRY_S = 1.0
#: An engine's report older than this is not used by the scheduler.
STALE_S = 5.0
#: Terminals of fewer lines show no curves.
_CURVES_FROM = 16
_BLOCKS = " ▁▂▃▄▅▆▇█"
_HEALTH_STYLES = {"up": "green", "suspect": "yellow", "ejected": "bold red"}
_STATE_STYLES = {"well": "green", "busy": "yellow", "degraded": "red", "down": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser, parser)
    add = declare(parser)
    add("--once", "print one frame and exit", action="store_true")
    add("--json", "one snapshot as a JSON document on stdout, and exit", action="store_true")


def run(args: argparse.Namespace) -> int:
    client = AdminClient(args.admin, args.token_env)
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
    """True for `q`, Ctrl-D and an Esc that begins no other key, such as an arrow."""
    return b"q" in keys.lower() or b"\x04" in keys or keys.endswith(b"\x1b")


# --- the picture ---


class FleetScreen:
    """Last snapshot of a fleet and its rendering."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.snapshot: dict[str, Any] | None = None
        #: Reason for which updates stopped, "" while they arrive.
        self.trouble = ""

    def render(self, width: int, height: int | None) -> Group:
        """Frame for a terminal of this size; `height` None shows everything.

        Instances that are not up or not ready come first, the others in file order.
        """
        state = self._state()
        if self.snapshot is None:
            return Group(_line(f"hetlb top  {self._url}", state, width))
        snapshot = self.snapshot
        head = f"hetlb {snapshot['version']}  {self._url}  policy {snapshot['fleet']['policy']}"
        summary, status = _summary(snapshot, width), _status(snapshot, width)
        if height is not None and height < _CURVES_FROM:
            del summary[1:], status[1:]
        lines: list[Text | Table] = [*status, _line(head, state, width), *summary, Text()]
        models = snapshot["fleet"]["models"]
        rows = [(model["name"], row) for model in models for row in model["instances"]]
        rows.sort(key=lambda pair: (pair[1]["health"] == "up") * 2 + (pair[1]["state"] == "ready"))
        troubles, decisions = _troubles([row for _, row in rows]), _decisions(snapshot)
        if height is not None:
            # Lines left after the headers go to the instances first.
            free = height - len(lines) - 2
            del troubles[3:]
            room = max(1, min(len(rows), free - len(troubles)))
            del decisions[max(0, free - room - len(troubles)) :]
            if room < len(rows):
                troubles.append(_text(f"and {len(rows) - room} more instances", "dim"))
                del rows[room:]
        return Group(*lines, _fleet(rows, width), *troubles, *(decisions if len(decisions) > 2 else ()))

    def _state(self) -> Text:
        if self.trouble:
            return Text(f"{self.trouble}; trying again", "bold red")
        return Text("waiting", "yellow") if self.snapshot is None else Text("live", "bold green")


def _text(words: str = "", style: str = "") -> Text:
    """Single line, cut at the right edge."""
    return Text(words, style, no_wrap=True, overflow="ellipsis")


def _line(left: str, right: Text, width: int) -> Text:
    """Line with text at both ends; the left one is shortened."""
    right.truncate(width - 1, overflow="ellipsis")
    text = Text(left, no_wrap=True)
    text.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis", pad=True)
    return text.append(" ").append_text(right)


def _status(snapshot: dict[str, Any], width: int) -> list[Text]:
    """Coloured status of the fleet, with its advice on the same line if it fits."""
    status = snapshot["status"]
    text = _text(f" {status['state']} ", f"bold reverse {_STATE_STYLES[status['state']]}")
    plain, advice = "default not reverse not bold", status["advice"]
    text.append(f" {status['sentence']}.", plain)
    if text.cell_len + 1 + len(advice) <= width:
        return [text.append(f" {advice}", plain)]
    return [text, _text(advice)]


def _summary(snapshot: dict[str, Any], width: int) -> list[Text]:
    fleet, series = snapshot["fleet"], snapshot["series"]
    instances = [instance for model in fleet["models"] for instance in model["instances"]]
    up = sum(row["health"] == "up" and row["state"] == "ready" for row in instances)
    queue = fleet["queue"]
    oldest = f" (oldest {seconds(queue['oldest_s'])})" if queue["requests"] else ""
    reserved = sum(row["kv_reserved_tokens"] for row in instances)
    there = sum(row["kv_cache_tokens"] for row in instances)
    counts = _text()
    counts.append(
        f"{up} of {len(instances)} up", "" if up == len(instances) else "bold red" if not up else "yellow"
    )
    counts.append(
        f"   {sum(row['in_flight'] for row in instances):,} in flight   queue {queue['requests']:,}{oldest}"
        f"   KV reserved {percent(reserved / there if there else None)} of {there:,}"
    )
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
        line = _text(f"{title:<13}{text(latest):>9}  ").append(sparkline(values, width - 46), "cyan")
        lines.append(line.append(f"  5 min, top {text(top)}", "dim"))
    return lines


def _fleet(rows: Sequence[tuple[str, dict[str, Any]]], width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), width=width, header_style="dim")
    several = len({model for model, _ in rows}) > 1 and width >= 100
    table.add_column("instance", no_wrap=True, overflow="ellipsis", ratio=1)
    names = shortened([row["name"] for _, row in rows], 13 if width < 100 else 64)
    if several:
        table.add_column("model", no_wrap=True, overflow="ellipsis", max_width=24)
    for name, fixed in (
        ("health", 7), ("state", 5), ("in", 4), ("run", 4), ("wait", 4), ("KV reserved", 11), ("", 4),
        ("rep", 5), ("work", 7), ("age", 6),
    ):  # fmt: skip
        left = name in ("health", "state", "KV reserved")
        table.add_column(name, width=fixed, no_wrap=True, justify="left" if left else "right")
    for model, row in rows:
        age = row["signal_age_s"]
        stale = age is None or age > STALE_S
        table.add_row(
            names[row["name"]],
            *([model] if several else []),
            Text(row["health"], _HEALTH_STYLES.get(row["health"], "yellow")),
            Text(row["state"], "" if row["state"] == "ready" else "yellow"),
            _count(row["in_flight"]),
            _count(row["running"]),
            _count(row["waiting"]),
            _meter(_reserved(row), 11),
            percent(_reserved(row)),
            percent(row["kv_reported"]),
            seconds(row["workload"]),
            Text(seconds(age), "yellow" if stale else ""),
        )
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


def _troubles(rows: Sequence[dict[str, Any]]) -> list[Text]:
    """Reasons of the instances that are not up."""
    return [
        _text(f"{row['name']} is {row['health']}: {row['health_reason']}", "red")
        for row in rows
        if row["health"] != "up"
    ]


def _decisions(snapshot: dict[str, Any]) -> list[Text]:
    """The last decisions, a line each, under a heading."""
    last = snapshot["decisions"]["last"]
    if not last:
        return []
    head = f"{'placed':>7} {'request':>9} {'prompt':>7} {'predicted':>9} {'actual':>9}  chosen (policy)"
    lines = [_text(), _text(head, "dim")]
    for each in last:
        actual = f"{each['output_tokens'] / each['sequences']:.0f}{'' if each['ended'] else '…'}"
        age = max(0.0, snapshot["clock_s"] - each["dispatched_at_s"])
        words = (
            f"{seconds(age):>7} {each['request_id']:>9} {each['prompt_tokens_per_sequence']:>7,} "
            f"{each['predicted_output']:>9,.0f} {actual:>9}  {each['chosen']} ({each['policy']})"
        )
        lines.append(_text(words))
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
