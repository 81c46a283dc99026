"""Picture of where splitting gains and loses: the part `regions` of the results as one picture.

python bench/split/picture.py [--results bench/results/split.json] [--out docs/img/split-regions.png]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from hetlb.tools.plots import new_figure, save_figure


def gain(split: float, whole: float) -> float:
    """The split plan over the other, log 2, cut at 2 times either way; 0 where neither serves anything."""
    if split <= 0.0 and whole <= 0.0:
        return math.nan
    if whole <= 0.0 or split <= 0.0:
        return 1.0 if whole <= 0.0 else -1.0
    return max(-1.0, min(1.0, math.log2(split / whole)))


def words(split: float, whole: float) -> str:
    """The gain in a cell."""
    if split <= 0.0 and whole <= 0.0:
        return ""
    if whole <= 0.0 or split <= 0.0:
        return "split only" if whole <= 0.0 else "whole only"
    return f"{split / whole:.2f}"


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("bench/results/split.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/img/split-regions.png"))
    args = parser.parse_args()
    panels = json.loads(args.results.read_text())["regions"]
    prompts, outputs = panels[0]["prompts"], panels[0]["outputs"]
    kinds = list(dict.fromkeys(" + ".join(panel["gpus"]) for panel in panels))
    columns = len(panels) // len(kinds)
    figure = new_figure(3.3 * columns, 3.0 * len(kinds))
    axes = figure.subplots(len(kinds), columns, squeeze=False)
    for index, panel in enumerate(panels):
        axis = axes[index // columns][index % columns]
        cells = panel["split_and_whole_req_s"]
        axis.imshow([[gain(*cell) for cell in row] for row in cells], cmap="RdBu", vmin=-1, vmax=1)
        for y, row in enumerate(cells):
            for x, cell in enumerate(row):
                colour = "white" if abs(gain(*cell)) > 0.6 else "black"
                axis.text(x, y, words(*cell), ha="center", va="center", fontsize=7, color=colour)
        axis.set_xticks(range(len(outputs)), [str(each) for each in outputs], fontsize=8)
        axis.set_yticks(range(len(prompts)), [str(each) for each in prompts], fontsize=8)
        if index // columns == 0:
            limit = "no latency limit"
            if panel["tpot_s"]:
                limit = f"{panel['ttft_s']:g} s to first token, {panel['tpot_s'] * 1e3:g} ms per token"
            axis.set_title(f"{panel['between_bytes_per_s'] * 8e-9:g} Gbit/s\n{limit}", fontsize=9)
        if index % columns == 0:
            axis.set_ylabel(f"{kinds[index // columns]}\nprompt tokens", fontsize=9)
        if index // columns == len(kinds) - 1:
            axis.set_xlabel("output tokens", fontsize=9)
    figure.suptitle(
        "Requests/s of the best split plan over the best without splitting (8B model)", fontsize=11
    )
    save_figure(figure, args.out)


if __name__ == "__main__":
    main()
