"""Diagrams of the docs, as SVG: a request's path, an instance that is passed over, Kubernetes.

`python configs/site/diagrams.py docs/pictures`. The reader's scheme, light or dark, chooses their colours.
The times of the one that is passed over come from the demo's latency profiles.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hetlb.balancer.config.profile_file import load_profile

DEMO = Path(__file__).parents[2] / "hetlb" / "tools" / "demo"
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #57606a }
  .name { font-size: 14px; font-weight: 600; fill: #1f2328 }
  .box { fill: #fff; stroke: #d0d7de } .room { fill: #f6f8fa; stroke: #d8dee4 }
  .own { fill: #ddf0ff; stroke: #8fc1ee }
  .way { fill: none; stroke: #57606a; stroke-width: 1.5; marker-end: url(#tip) }
  .told { fill: none; stroke: #8c959f; stroke-width: 1.25; stroke-dasharray: 4 4; marker-end: url(#tip) }
  .fast { fill: #0a66c2 } .slow { fill: #bc4c00 } .wait { fill: #d0d7de } .faint { opacity: .45 }
  text.fast, text.slow { font-weight: 600 } .rule { stroke: #d8dee4 } .tip { fill: #57606a }
  text.on { fill: #fff }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 } .name { fill: #f0f6fc }
    .box { fill: #151b23; stroke: #3d444d } .room { fill: #0d1117; stroke: #3d444d }
    .own { fill: #10243a; stroke: #275a8d } .way { stroke: #9198a1 } .told { stroke: #656c76 }
    .tip { fill: #9198a1 }
    .fast { fill: #4493f8 } .slow { fill: #f0883e } .wait { fill: #3d444d } .rule { stroke: #3d444d }
    text.on { fill: #0d1117 }
  }
"""


def svg(width: int, height: int, label: str, *items: str, top: int = 0) -> str:
    """A picture with a label for readers who do not see it."""
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path class="tip" d="M0 .8 8 4 0 7.2z"/></marker></defs>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {top} {width} {height - top}" role="img" '
        f'aria-label="{label}">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", tip, *items, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, wide: float, high: float, name: str = "", *lines: str, kind: str = "box") -> str:
    """A rounded box with a name and lines below it, centred."""
    out = [f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="8"/>']
    top = y + high / 2 + 5 - 9 * len(lines)
    out += [text(x + wide / 2, top, name, "name", "middle")] if name else []
    out += [text(x + wide / 2, top + 18 * (n + 1), line, "", "middle") for n, line in enumerate(lines)]
    return "\n".join(out)


def way(path: str, kind: str = "way") -> str:
    """An arrow."""
    return f'<path class="{kind}" d="{path}"/>'


def bar(kind: str, start: float, end: float, y: float) -> str:
    """A stretch of time."""
    return f'<rect class="{kind}" x="{start:.1f}" y="{y:g}" width="{end - start:.1f}" height="36" rx="4"/>'


def request_path() -> str:
    """One request from its client to a server and back."""
    steps = (
        ("check", "key, limits,", "model"),
        ("predict", "length of the", "answer"),
        ("queue", "waits until one", "has room"),
        ("choose", "least cost of", "those with room"),
    )
    left, wide, gap = 160, 112, 14
    items = [
        box(10, 84, 92, 64, "client", "OpenAI API"),
        box(left - 18, 20, 4 * wide + 3 * gap + 36, 256, kind="room"),
        text(left, 46, "hetlb", "name"),
        way(f"M102 116H{left - 2}"),
    ]
    for n, (name, *lines) in enumerate(steps):
        x = left + n * (wide + gap)
        items.append(box(x, 70, wide, 92, name, *lines, kind="own" if name == "choose" else "box"))
        items += [way(f"M{x - gap} 116H{x - 2}")] if n else []
    end = left + 4 * wide + 3 * gap
    items += [
        box(740, 40, 110, 64, "slow server", "2 sequences"),
        box(740, 128, 110, 64, "fast server", "9 sequences"),
        way(f"M{end} 106C{end + 50} 106 690 72 738 72", "way faint"),
        way(f"M{end} 126C{end + 50} 126 690 160 738 160"),
        way(f"M776 192C776 212 740 218 700 218H{end + 2}"),
        box(left, 196, 4 * wide + 3 * gap, 58, "relay", "tokens as they come; the end releases its booking"),
        way(f"M{left} 225H56V150"),
        way(f"M795 40V2H{end - wide / 2}V68", "told"),
        text(640, -8, "metrics, once a second", "", "start"),
    ]
    return svg(
        860,
        280,
        "A request is checked, its length predicted, it waits, a server is chosen, tokens are relayed",
        *items,
        top=-24,
    )


def passed_over() -> str:
    """A request that waits for the faster server although the slower one is free."""
    prompt, answer, wait_s = 200, 200, 0.4
    fast, slow = (load_profile(DEMO / f"{name}.yaml") for name in ("fast", "slow"))
    seqs = fast.engine.max_num_seqs or 1
    length = prompt + answer / 2
    at_fast = fast.latency.paper_prefill_s(1, prompt) + answer * fast.latency.paper_step_s(seqs, length)
    at_slow = slow.latency.paper_prefill_s(1, prompt) + answer * slow.latency.paper_step_s(1, length)
    left, wide, most = 120, 700, 5.0
    assert wait_s + at_fast < at_slow < most

    def at(second: float) -> float:
        return left + wide * second / most

    items = [
        text(
            10,
            26,
            f"A request of {prompt} prompt and {answer} answer tokens: the fast server is full for "
            f"{wait_s:g} s, the slow one is empty.",
        )
    ]
    for second in range(int(most) + 1):
        x = at(second)
        items += [
            f'<line class="rule" x1="{x:g}" x2="{x:g}" y1="48" y2="170"/>',
            text(x, 190, f"{second} s", "", "middle"),
        ]
    for y, name, start, lasts in ((60, "fast", wait_s, at_fast), (120, "slow", 0.0, at_slow)):
        ends, chosen = start + lasts, name == "fast"
        items.append(text(10, y + 23, f"{name} server", name))
        if start:
            items += [
                bar("wait", at(0), at(start), y),
                text((at(0) + at(start)) / 2, y + 23, "waits", "", "middle"),
            ]
        items.append(bar(name if chosen else f"{name} faint", at(start), at(ends), y))
        items.append(
            text(at(ends) - 10, y + 23, f"done after {ends:.1f} s", "on" if chosen else "name", "end")
        )
    items.append(text(at(0) + 10, 143, "passed over", "name"))
    return svg(
        840, 204, "Waiting for the fast server ends sooner than starting at the slow one at once", *items
    )


def kubernetes() -> str:
    """The objects of configs/deploy/kubernetes.yaml."""
    items = [
        box(2, 96, 114, 64, "clients", "http://hetlb/v1"),
        box(150, 96, 116, 64, "Service", "hetlb :80"),
        box(310, 40, 230, 176, kind="own"),
        text(425, 66, "Deployment hetlb", "name", "middle"),
        box(330, 80, 190, 54, "pod", "one replica", kind="box"),
        text(425, 158, "ConfigMap: fleet.yaml", "", "middle"),
        text(425, 178, "read again when it changes", "", "middle"),
        text(425, 200, "Secret: admin token", "", "middle"),
        way("M116 128H148"),
        way("M266 128H308"),
        box(590, 40, 112, 64, "Service", "vllm-h100-0"),
        box(590, 152, 112, 64, "Service", "vllm-l40s-0"),
        box(748, 40, 102, 64, "vLLM", "H100"),
        box(748, 152, 102, 64, "vLLM", "L40S"),
        way("M540 108C566 108 562 72 588 72"),
        way("M540 148C566 148 562 184 588 184"),
        way("M702 72H746"),
        way("M702 184H746"),
        box(150, 236, 126, 56, "Service", "hetlb-admin :8081"),
        box(2, 236, 114, 56, "Prometheus", "and you"),
        way("M116 264H148"),
        way("M276 264H425V218"),
        text(646, 258, "a Service for each server:", "", "middle"),
        text(646, 276, "one over several would choose again", "", "middle"),
    ]
    return svg(
        860,
        304,
        "Clients reach hetlb by a Service; hetlb reaches each vLLM server by a Service of its own",
        *items,
    )


PICTURES = {"request-path.svg": request_path, "passed-over.svg": passed_over, "kubernetes.svg": kubernetes}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(sys.argv[1]) / name).write_text(draw())
