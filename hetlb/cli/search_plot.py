"""The picture of `hetlb search`: a bar for every degree of every kind of machine, or why it has none.

The chosen degree stands out by colour, the reason of one that does not fit is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetlb.plan.tp_search import MachinePlan
from hetlb.plots import new_figure, save_figure

_BEST, _OTHER = "#1f6feb", "#a8b4c4"


def write_plot(path: Path, plans: Sequence[MachinePlan], estimate: str) -> None:
    """Draw one panel per kind of machine. Raises `InputError`."""
    kinds = {plan.machine.kind: plan for plan in reversed(plans)}
    panels = list(reversed(kinds.values()))
    figure = new_figure(8, 1.2 + 0.42 * sum(len(plan.ranking) + 1.5 for plan in panels))
    heights = [len(plan.ranking) + 1 for plan in panels]
    rows = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for (axis,), plan in zip(rows, panels, strict=True):
        options = sorted(plan.ranking, key=lambda option: option.tensor_parallel_size, reverse=True)
        most = max((option.throughput_tok_s for option in options), default=0.0) or 1.0
        for place, option in enumerate(options):
            color = _BEST if option is plan.best else _OTHER
            axis.barh(place, option.throughput_tok_s, color=color, height=0.65)
            said = f"{option.throughput_tok_s:,.0f} tokens/s" if option.feasible else option.reason
            inside = option.throughput_tok_s > 0.7 * most
            axis.annotate(
                said,
                (option.throughput_tok_s, place),
                xytext=(-5 if inside else 5, 0),
                textcoords="offset points",
                ha="right" if inside else "left",
                va="center",
                fontsize=8,
                color="white" if inside and option is plan.best else "#24292f",
            )
        labels = [f"{o.instances} × TP {o.tensor_parallel_size}" for o in options]
        axis.set_yticks(range(len(options)), labels)
        alike = sum(other.machine.kind == plan.machine.kind for other in plans)
        also = f" and {alike - 1} alike" if alike > 1 else ""
        axis.set_title(f"{plan.machine.name}{also}", loc="left", fontsize=10, fontweight="bold")
        axis.set_xlim(0, 1.05 * most)
        axis.grid(axis="x", alpha=0.3, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    rows[-1][0].set_xlabel(f"tokens/s of the machine, prompt and output ({estimate} estimate)")
    save_figure(figure, path)
