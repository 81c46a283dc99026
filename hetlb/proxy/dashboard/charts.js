// The dashboard's pictures: lines over time and points on a diagonal, as SVG, readable with keys and aloud.
"use strict";

import { draw, make, say, set } from "./dom.js";

const WIDTH = 310;
const HEIGHT = 132;
const LEFT = 50;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;

/** A value at an axis: `1 s` where a figure would be `1.00 s`. */
const tick = (text) => text.replace(/\.0+(?=\D|$)/, "");

/** The next of 1, 2, 5, 10, … that is not below `value`. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const digit = value / power;
  return power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
}

/** One picture of some lines over the same stretch of time. */
export class TimeChart {
  #lines;
  #format;
  #paths;
  #keys;
  #axis;
  #cursor;
  #svg;
  #title;
  #columns = [];
  #binS = 1;
  #index = null;

  /** `lines` are `[column, name, class]`; `format` makes text of a value. */
  constructor(title, lines, format) {
    this.#title = title;
    this.#lines = lines;
    this.#format = format;
    this.#axis = draw("g");
    this.#cursor = draw("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.#paths = lines.map(([, , kind]) => draw("path", { class: `line ${kind}` }));
    this.#svg = draw(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": title },
      this.#axis, ...this.#paths, this.#cursor,
    );
    this.#keys = lines.map(() => make("span"));
    this.element = make(
      "figure",
      {},
      make(
        "figcaption",
        {},
        make("b", { text: title }),
        ...lines.map(([, , kind], index) => make("span", { class: "key" }, make("i", { class: kind }), this.#keys[index])),
      ),
      this.#svg,
    );
    this.#svg.addEventListener("pointermove", (event) => this.#point(event));
    this.#svg.addEventListener("pointerleave", () => this.#move(null));
    this.#svg.addEventListener("blur", () => this.#move(null));
    this.#svg.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Draw the columns of `series`. */
  update(series) {
    this.#columns = this.#lines.map(([column]) => series[column]);
    this.#binS = series.bin_s;
    const top = Math.max(...this.#columns.flat().map((value) => value ?? 0));
    const full = top > 0 ? roundUp(top * 1.02) : 1;
    const bins = this.#columns[0].length;
    const x = (index) => LEFT + ((index + 0.5) / bins) * (WIDTH - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / full) * (HEIGHT - TOP - BOTTOM);
    this.#paths.forEach((path, line) => {
      let pen = "M";
      let before = null;
      let text = "";
      this.#columns[line].forEach((value, index) => {
        // Where nothing ended there is nothing to show; a lone value is a dot.
        if (value === null) pen = "M";
        else {
          text += `${pen}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
          const next = this.#columns[line][index + 1];
          if (pen === "M" && (next === null || next === undefined) && before === null) text += "h.1";
          pen = "L";
        }
        before = value;
      });
      set(path, "d", text || "M0 0");
      set(path, "visibility", text ? "visible" : "hidden");
    });
    this.#drawAxis(full, bins, y);
    this.#tell();
  }

  #drawAxis(full, bins, y) {
    const marks = [0, full / 2, full];
    const minutes = (bins * this.#binS) / 60;
    const items = marks.map((value) =>
      draw("g", {},
        draw("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
        draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end", text: tick(this.#format(value)) })));
    for (let minute = 0; minute <= minutes; minute += 2) {
      const x = WIDTH - RIGHT - (minute / minutes) * (WIDTH - LEFT - RIGHT);
      const anchor = minute === 0 ? "end" : "middle";
      items.push(draw("text", { x, y: HEIGHT - 5, "text-anchor": anchor, text: minute === 0 ? "now" : `−${minute} min` }));
    }
    const state = JSON.stringify([full, bins, this.#binS]);
    if (this.#axis.dataset.state !== state) {
      this.#axis.dataset.state = state;
      this.#axis.replaceChildren(...items);
    }
  }

  /** The values at the cursor, else the newest there are. */
  #tell() {
    const bins = this.#columns[0].length;
    const index = this.#index;
    const values = this.#columns.map((column) => (index === null ? column.findLast((value) => value !== null) : column[index]));
    this.#lines.forEach(([, name], line) => say(this.#keys[line], `${name} ${this.#format(values[line] ?? null)}`));
    const when = index === null ? "latest" : `${Math.round((bins - index - 0.5) * this.#binS)} s ago`;
    const words = this.#lines.map(([, name], line) => {
      const peak = Math.max(...this.#columns[line].map((value) => value ?? 0));
      return `${name}: ${this.#format(values[line] ?? null)} ${when}, at most ${this.#format(peak)}`;
    });
    // A label that changes under the focus is read again: only where the reader moved.
    if (document.activeElement !== this.#svg || index !== null) {
      set(this.#svg, "aria-label", `${this.#title}. ${words.join("; ")}. Arrow keys move through time.`);
    }
  }

  #move(index) {
    this.#index = index;
    if (index !== null) {
      const x = LEFT + ((index + 0.5) / this.#columns[0].length) * (WIDTH - LEFT - RIGHT);
      set(this.#cursor, "x1", String(x));
      set(this.#cursor, "x2", String(x));
    }
    set(this.#cursor, "visibility", index === null ? "hidden" : "visible");
    if (this.#columns.length) this.#tell();
  }

  #point(event) {
    const box = this.#svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const bins = this.#columns[0]?.length ?? 0;
    const index = Math.floor(((x - LEFT) / (WIDTH - LEFT - RIGHT)) * bins);
    this.#move(index >= 0 && index < bins ? index : null);
  }

  #key(event) {
    const bins = this.#columns[0]?.length ?? 0;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -15, PageDown: 15, Home: -bins, End: bins };
    if (event.key === "Escape") this.#move(null);
    else if (event.key in steps && bins) {
      event.preventDefault();
      this.#move(Math.min(bins - 1, Math.max(0, (this.#index ?? bins) + steps[event.key])));
    }
  }
}

const SIDE = 250;
const WIDE = 560;
const EDGE = 66;

/** Predictions against what came, both axes logarithmic, one colour an instance. */
export class Scatter {
  #dots = draw("g");
  #axes = draw("g");
  #words;
  #svg;
  #title;
  #format;

  constructor(title, format) {
    this.#title = title;
    this.#format = format;
    this.#svg = draw("svg", { viewBox: `0 0 ${WIDE} ${SIDE}`, role: "img", "aria-label": title }, this.#axes, this.#dots);
    this.#words = make("p", { class: "soft" });
    this.element = make("figure", {}, make("figcaption", {}, make("b", { text: title })), this.#svg, this.#words);
  }

  /** `points` are `[colour, predicted, actual]`. */
  update(points) {
    const good = points.filter(([, predicted, actual]) => predicted > 0 && actual > 0);
    if (!good.length) {
      this.#dots.replaceChildren();
      this.#axes.replaceChildren(draw("text", { x: WIDE / 2, y: SIDE / 2, "text-anchor": "middle", text: "nothing to compare yet" }));
      say(this.#words, "");
      set(this.#svg, "aria-label", `${this.#title}: nothing to compare yet`);
      return;
    }
    const values = good.flatMap(([, predicted, actual]) => [predicted, actual]);
    let low = Math.floor(Math.log10(Math.min(...values)) * 2) / 2;
    let high = Math.ceil(Math.log10(Math.max(...values)) * 2) / 2;
    if (high - low < 1) [low, high] = [low - 0.5, high + 0.5];
    const x = (value) => EDGE + ((Math.log10(value) - low) / (high - low)) * (WIDE - EDGE - 18);
    const y = (value) => SIDE - 34 - ((Math.log10(value) - low) / (high - low)) * (SIDE - 44);
    const colours = new Map();
    for (const [colour, predicted, actual] of good) {
      colours.set(colour, `${colours.get(colour) ?? ""}M${x(predicted).toFixed(1)} ${y(actual).toFixed(1)}h0`);
    }
    this.#dots.replaceChildren(...Array.from(colours, ([colour, d]) => draw("path", { class: `dots k${colour}`, d })));
    this.#drawAxes(low, high, x, y);
    const ratios = good.map(([, predicted, actual]) => predicted / actual).sort((a, b) => a - b);
    const middle = ratios[Math.floor(ratios.length / 2)];
    const within = ratios.filter((ratio) => ratio >= 1 / 1.25 && ratio <= 1.25).length / ratios.length;
    const text = `Of ${good.length} answers ${Math.round(within * 100)} % came within a quarter of the prediction; `
      + `the median prediction is ${middle.toFixed(2)} times what came.`;
    say(this.#words, text);
    set(this.#svg, "aria-label", `${this.#title}. ${text}`);
  }

  #drawAxes(low, high, x, y) {
    const items = [draw("path", { class: "even", d: `M${x(10 ** low)} ${y(10 ** low)}L${x(10 ** high)} ${y(10 ** high)}`, fill: "none" })];
    for (let power = Math.ceil(low); power <= high; power += 1) {
      const value = 10 ** power;
      items.push(
        draw("line", { class: "rule", x1: EDGE, x2: WIDE - 18, y1: y(value), y2: y(value) }),
        draw("line", { class: "rule", x1: x(value), x2: x(value), y1: 10, y2: SIDE - 34 }),
        draw("text", { x: EDGE - 5, y: y(value) + 4, "text-anchor": "end", text: tick(this.#format(value)) }),
        draw("text", { x: x(value), y: SIDE - 19, "text-anchor": "middle", text: tick(this.#format(value)) }),
      );
    }
    items.push(
      draw("text", { x: (EDGE + WIDE) / 2, y: SIDE - 4, "text-anchor": "middle", text: "predicted" }),
      draw("text", { x: 0, y: 0, transform: `translate(11 ${SIDE / 2 - 12}) rotate(-90)`, "text-anchor": "middle", text: "actual" }),
    );
    this.#axes.replaceChildren(...items);
  }
}
