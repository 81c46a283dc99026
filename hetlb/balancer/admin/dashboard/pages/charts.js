// Charts of the dashboard and of the load test's report, as SVG: lines over an axis, and predictions against
// what came. Readable with the keyboard, by a screen reader and without colour. Colours are classes of theme.css.
"use strict";

import { draw, make, say, set } from "./dom.js";

/** Colours there are; further lines repeat them in other dashes. */
const LINE_COLOURS = 8;
const DASHES = 4;
const TOP = 8;
const RIGHT = 10;
const SAMPLE = "M0 3h22";

/** Classes of the line at `index`: neighbours differ in their dashes too. */
export function lineClass(index) {
  return `k${index % LINE_COLOURS} d${(index + Math.floor(index / LINE_COLOURS)) % DASHES}`;
}

/** Multiples of 1, 2 or 5 times a power of 10 from `low` to `high`, in about `steps` steps; with `whole` the next one as well. */
function linearTicks(low, high, steps, least = 0, whole = false) {
  const rough = Math.max(least, (high - low) / steps);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  const last = whole ? Math.ceil(high / step - 1e-9) : high / step + 1e-9;
  for (let index = Math.ceil(low / step - 1e-9); index <= last; index += 1) ticks.push(index * step + 0); // + 0: no -0
  return ticks;
}

/** Powers of 10 from `low` to `high`; where there are few, 2 and 5 times them as well, else round values. */
function logTicks(low, high) {
  const factors = high / low > 1000 ? [1] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of factors) ticks.push(factor * 10 ** power);
  }
  const shown = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return shown.length > 2 ? shown : linearTicks(low, high, 4);
}

/** Share of a line's values that an axis always has room for, and how far above them the rest may reach before it is cut off. */
const USUAL = 0.95;
const OUTLIER = 3;
/** Fewer values than this show no outlier. */
const ENOUGH = 20;

/** Highest value of a line that an axis shows: a few outliers must not flatten all other values. */
function ceilingOf(points) {
  const sorted = points.flatMap(([, value]) => (value > 0 ? [value] : [])).sort((a, b) => a - b);
  const most = sorted.at(-1) ?? 0;
  const usual = sorted[Math.floor(USUAL * (sorted.length - 1))];
  return sorted.length >= ENOUGH && most > OUTLIER * usual ? usual * 1.5 : most;
}

/**
 * Values of an axis to pixels between `start` and `end`.
 * An axis is `{label, log, least, most, steps, ticks, format, counts}`: `counts` are whole numbers, `least` and `most` are shown at least, `ticks` are
 * fixed values, `format` makes text of a value. A `log` axis leaves out what is not above 0.
 */
function scaleOf(axis, values, start, end) {
  const format = axis.format ?? plainNumber;
  const shows = (value) => Number.isFinite(value) && (value > 0 || !axis.log);
  const usable = [...values.filter(shows), ...[axis.least, axis.most].filter((bound) => Number.isFinite(bound))];
  let low = usable.reduce((a, b) => Math.min(a, b), Infinity);
  let high = usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (low > high) [low, high] = axis.log ? [1, 10] : [0, 1];
  if (axis.counts) high = Math.max(1, high);
  if (low === high) {
    if (axis.log) [low, high] = [low / 2, high * 2];
    else [low, high] = [low === axis.least ? low : low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  }
  const whole = axis.whole && !axis.log && !axis.ticks && axis.most === undefined;
  const ticks = axis.ticks ?? (axis.log ? logTicks(low, high) : linearTicks(low, high, axis.steps ?? 5, axis.counts ? 1 : 0, whole));
  if (whole) high = Math.max(high, ticks.at(-1));
  // Values that look alike beside the axis are no scale.
  if (axis.least === 0 && !axis.log && !axis.ticks) {
    const texts = new Set();
    const distinct = ticks.filter((tick) => !texts.has(format(tick)) && texts.add(format(tick)));
    if (distinct.length < 2) {
      for (let top = 10 ** Math.ceil(Math.log10(Math.max(high, 1e-6))); format(high) === format(low) && top < 1e12; top *= 10) high = top;
      distinct.splice(0, 2, low, high);
    }
    ticks.splice(0, ticks.length, ...distinct);
  }
  const share = axis.log
    ? (value) => Math.log(value / low) / Math.log(high / low)
    : (value) => (value - low) / (high - low);
  return { at: (value) => start + share(value) * (end - start), shows, ticks, format, low, high, start, end };
}

/** Value beside an axis: `20k`, `0.25`. */
export function plainNumber(value) {
  const size = Math.abs(value);
  const short = (number, digits) => String(Number(number.toPrecision(digits)));
  if (size >= 1e6) return `${short(value / 1e6, 4)}M`;
  return size >= 1e4 ? `${short(value / 1e3, 4)}k` : short(value, 4);
}

/** `1 s` at an axis where a figure would be `1.00 s`. */
const tickText = (text) => text.replace(/\.0+(?=\D|$)/, "");

/** Width of a letter of a tick in pixels. */
const LETTER = 6.5;

/** Grid, ticks and labels of two scales. */
function grid(x, y, labels) {
  const items = [];
  for (const value of y.ticks) {
    const at = y.at(value).toFixed(1);
    items.push(
      draw("line", { class: "rule", x1: x.start, x2: x.end, y1: at, y2: at }),
      draw("text", { x: x.start - 6, y: at, dy: 4, "text-anchor": "end", text: tickText(y.format(value)) }),
    );
  }
  let free = -Infinity; // where the next label may begin
  for (const value of [...x.ticks].sort((a, b) => a - b)) {
    const at = x.at(value);
    const text = tickText(x.format(value));
    // At the ends of the axis a label stands inside: beside it are those of the other axis.
    const [anchor, before] = at > x.end - 12 ? ["end", 1] : at < x.start + 12 && labels ? ["start", 0] : ["middle", 0.5];
    const begins = at - text.length * LETTER * before;
    if (labels) items.push(draw("line", { class: "rule", x1: at, x2: at, y1: y.end, y2: y.start }));
    if (begins < free) continue;
    free = begins + (text.length + 1) * LETTER;
    items.push(draw("text", { x: at, y: y.start + 15, "text-anchor": anchor, text }));
  }
  if (labels) {
    const middle = (y.start + y.end) / 2;
    items.push(
      draw("text", { x: (x.start + x.end) / 2, y: y.start + 34, "text-anchor": "middle", text: labels[0] }),
      draw("text", { x: 0, y: 0, transform: `translate(11 ${middle}) rotate(-90)`, "text-anchor": "middle", text: labels[1] }),
    );
  }
  return items;
}

/** The width that a picture has on the page (`width` while it has none): drawn at it, all text is of one size. */
function fitted(svg, width, height) {
  const wide = svg.clientWidth || width;
  if (wide !== width) set(svg, "viewBox", `0 0 ${wide} ${height}`);
  return wide;
}

/** Call `redraw` with each new width of a picture on the page: what is shown may not change for long. */
function whenResized(svg, redraw) {
  let drawn = 0;
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (!svg.clientWidth || svg.clientWidth === drawn) return;
    drawn = svg.clientWidth;
    redraw();
  })).observe(svg);
}

/** Sample of a line, for a legend. */
function sample(kind) {
  return draw("svg", { viewBox: "0 0 22 6", class: "sample", "aria-hidden": "true" }, draw("path", { class: `line ${kind}`, d: SAMPLE }));
}

/**
 * Lines over one axis. The pointer and the arrow keys move a cursor; the legend shows the values at it.
 * `lines` are `[name, class]`, `x` and `y` axes (`scaleOf`). Options: `width`, `height`; `labelled` writes the axes'
 * labels; `marks` shows each point; `newest` shows the last values while there is no cursor; `robust` ends the axis below an
 * outlier and writes its value.
 */
export class LineChart {
  #lines;
  #x;
  #y;
  #options;
  #across = null;
  #paths;
  #keys;
  #axes = draw("g");
  #cursor;
  #peak = draw("text", { class: "peak", y: TOP + 3, visibility: "hidden" });
  #svg;
  #name;
  #title;
  #points = [];
  #bounds = {};
  #stops = [];
  #at = null;

  constructor(title, lines, x, y, options = {}) {
    this.#title = title;
    this.#lines = lines;
    this.#x = x;
    this.#y = { whole: true, ...y };
    this.#options = { width: 310, height: 132, left: 50, bottom: 20, ...options };
    const { width, height, bottom } = this.#options;
    this.#cursor = draw("line", { class: "cursor", y1: TOP, y2: height - bottom, visibility: "hidden" });
    this.#paths = lines.map(([, kind]) => draw("path", { class: `line ${kind}` }));
    const dots = options.marks ? lines.map(([, kind]) => draw("path", { class: `dots ${kind}` })) : [];
    this.#options.dots = dots;
    this.#svg = draw(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": title },
      this.#axes, ...this.#paths, ...dots, this.#peak, this.#cursor,
    );
    this.#name = make("b", { text: title });
    this.#keys = lines.map(([name]) => make("span", { text: name }));
    const keys = lines.map(([, kind], index) => make("span", { class: "key" }, sample(kind), " ", this.#keys[index]));
    this.element = make("figure", { class: "chart" }, make("figcaption", {}, this.#name, ...keys), this.#svg);
    this.#svg.addEventListener("pointermove", (event) => this.#point(event));
    this.#svg.addEventListener("pointerleave", () => this.#move(null));
    this.#svg.addEventListener("blur", () => this.#move(null));
    this.#svg.addEventListener("keydown", (event) => this.#key(event));
    whenResized(this.#svg, () => this.#points.length && this.update(this.#points, this.#bounds));
  }

  /** Draw `points`: `[x, y]` in order of x for each line; a y of null is a gap. */
  update(points, bounds = {}) {
    this.#options.width = fitted(this.#svg, this.#options.width, this.#options.height);
    const { width, height, left, bottom, labelled, dots } = this.#options;
    this.#points = points;
    this.#bounds = bounds;
    this.#stops = [...new Set(points.flat().map(([x]) => x))].sort((a, b) => a - b);
    const values = points.flat().flatMap(([, value]) => (value === null ? [] : [value]));
    const x = scaleOf({ ...this.#x, ...bounds }, this.#stops, left, width - RIGHT);
    const ceiling = this.#options.robust ? Math.max(...points.map(ceilingOf)) : Infinity;
    const y = scaleOf(this.#y, values.filter((value) => value <= ceiling), height - bottom, TOP);
    this.#across = x;
    this.#showPeak(points.flat(), x, y);
    this.#paths.forEach((path, line) => {
      const text = pathOf(points[line].map(([at, value]) => [at, value === null ? null : Math.min(value, y.high)]), x, y);
      set(path, "d", text || "M0 0");
      set(path, "visibility", text ? "visible" : "hidden");
      if (dots.length) set(dots[line], "d", dotsOf(points[line], x, y) || "M0 0");
    });
    const state = JSON.stringify([width, x.ticks, x.low, x.high, y.ticks]);
    if (this.#axes.dataset.state !== state) {
      this.#axes.dataset.state = state;
      this.#axes.replaceChildren(...grid(x, y, labelled ? [this.#x.label, this.#y.label] : null));
    }
    this.#show();
  }

  /** Write the highest value where the axis ends below it. */
  #showPeak(points, x, y) {
    const [at, most] = points.reduce((peak, point) => ((point[1] ?? -Infinity) > peak[1] ? point : peak), [0, -Infinity]);
    const above = most > y.high;
    set(this.#peak, "visibility", above ? "visible" : "hidden");
    if (!above) return;
    const place = x.at(at);
    set(this.#peak, "x", place.toFixed(1));
    set(this.#peak, "text-anchor", place > (x.start + x.end) / 2 ? "end" : "start");
    say(this.#peak, `▲ ${y.format(most)}`);
  }

  /** The value of a line at `at` (its last point up to there); the newest one where `at` is null. */
  #value(line, at) {
    const points = this.#points[line];
    if (at === null) return points.findLast(([, value]) => value !== null)?.[1] ?? null;
    return points.findLast(([x]) => x <= at)?.[1] ?? null;
  }

  #show() {
    const { newest } = this.#options;
    const text = this.#y.format ?? plainNumber;
    const where = this.#x.where ?? ((x) => `at ${(this.#x.format ?? plainNumber)(x)} ${this.#x.label}`);
    const at = this.#at === null ? null : this.#stops[Math.min(this.#at, this.#stops.length - 1)];
    const words = this.#lines.map(([name], line) => {
      const shown = at !== null || newest;
      const value = shown ? text(this.#value(line, at)) : "";
      say(this.#keys[line], shown ? `${name} ${value}` : name);
      const highest = text(this.#points[line].reduce((most, [, each]) => Math.max(most, each ?? most), 0));
      return `${name}: ${shown ? `${value} ${at === null ? "latest" : where(at)}, ` : ""}at most ${highest}`;
    });
    say(this.#name, at === null ? this.#title : `${this.#title}, ${where(at)}`);
    // A label that changes under the focus is read again: only where the reader moved.
    if (document.activeElement !== this.#svg || at !== null) {
      set(this.#svg, "aria-label", `${this.#title}. ${words.join("; ")}. Arrow keys move along the axis.`);
    }
    set(this.#cursor, "visibility", at === null ? "hidden" : "visible");
    if (at !== null) {
      const place = this.#across.at(at).toFixed(1);
      set(this.#cursor, "x1", place);
      set(this.#cursor, "x2", place);
    }
  }

  #move(index) {
    this.#at = index;
    if (this.#stops.length) this.#show();
  }

  #point(event) {
    if (!this.#stops.length) return;
    const box = this.#svg.getBoundingClientRect();
    const pixel = ((event.clientX - box.left) / box.width) * this.#options.width;
    const { start, end, at, shows } = this.#across;
    if (pixel < start || pixel > end) {
      this.#move(null);
      return;
    }
    let nearest = 0;
    this.#stops.forEach((stop, index) => {
      if (shows(stop) && Math.abs(at(stop) - pixel) < Math.abs(at(this.#stops[nearest]) - pixel)) nearest = index;
    });
    this.#move(nearest);
  }

  #key(event) {
    const last = this.#stops.length - 1;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -15, PageDown: 15, Home: -last - 1, End: last };
    if (event.key === "Escape") this.#move(null);
    else if (event.key in steps && last >= 0) {
      event.preventDefault();
      this.#move(Math.min(last, Math.max(0, (this.#at ?? last + 1) + steps[event.key])));
    }
  }
}

/** Path of a line; a value without neighbours is a short dash. */
function pathOf(points, x, y) {
  let text = "";
  let joined = false;
  points.forEach(([at, value], index) => {
    if (value === null || !x.shows(at) || !y.shows(value)) {
      joined = false;
      return;
    }
    text += `${joined ? "L" : "M"}${x.at(at).toFixed(1)} ${y.at(value).toFixed(1)}`;
    if (!joined && (points[index + 1]?.[1] ?? null) === null) text += "m-2 0h4";
    joined = true;
  });
  return text;
}

/** Path of round dots, one at each point. */
function dotsOf(points, x, y) {
  const shown = points.filter(([at, value]) => value !== null && x.shows(at) && y.shows(value));
  return shown.map(([at, value]) => `M${x.at(at).toFixed(1)} ${y.at(value).toFixed(1)}h0`).join("");
}

const MINUTE_S = 60;

/** Lines over the last minutes, newest at the right; `lines` are `[column, name, class]`, `format` of a value. */
export class TimeChart {
  #columns;
  #chart;

  constructor(title, lines, format, counts = false) {
    this.#columns = lines.map(([column]) => column);
    const x = {
      format: (s) => (s === 0 ? "now" : `−${Math.round(-s / MINUTE_S)} min`),
      where: (s) => `${Math.round(-s)} s ago`,
    };
    const named = lines.map(([, name, kind]) => [name, kind]);
    this.#chart = new LineChart(title, named, x, { least: 0, steps: 2, format, counts }, { newest: true, robust: true });
    this.element = this.#chart.element;
  }

  /** Draw the columns of `series`: a value for every `bin_s`. */
  update(series) {
    const bins = series[this.#columns[0]].length;
    const span = bins * series.bin_s;
    const ticks = [];
    for (let at = 0; at <= span; at += 2 * MINUTE_S) ticks.push(-at);
    const points = this.#columns.map((column) =>
      series[column].map((value, index) => [(index + 0.5 - bins) * series.bin_s, value]));
    this.#chart.update(points, { least: -span, most: 0, ticks });
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
  #points = null;
  #wide = WIDE;

  constructor(title, format) {
    this.#title = title;
    this.#format = format;
    this.#svg = draw("svg", { viewBox: `0 0 ${WIDE} ${SIDE}`, role: "img", "aria-label": title }, this.#axes, this.#dots);
    this.#words = make("p", { class: "soft" });
    this.element = make("figure", {}, make("figcaption", {}, make("b", { text: title })), this.#svg, this.#words);
    whenResized(this.#svg, () => this.#points && this.update(this.#points));
  }

  /** `points` are `[colour, predicted, actual]`. */
  update(points) {
    this.#points = points;
    this.#wide = fitted(this.#svg, this.#wide, SIDE);
    const good = points.filter(([, predicted, actual]) => predicted > 0 && actual > 0);
    if (!good.length) {
      this.#dots.replaceChildren();
      this.#axes.replaceChildren(draw("text", { x: this.#wide / 2, y: SIDE / 2, "text-anchor": "middle", text: "nothing to compare yet" }));
      say(this.#words, "");
      set(this.#svg, "aria-label", `${this.#title}: nothing to compare yet`);
      return;
    }
    const powers = good.flatMap(([, predicted, actual]) => [Math.log10(predicted), Math.log10(actual)]);
    let low = Math.floor(Math.min(...powers) * 2) / 2;
    let high = Math.ceil(Math.max(...powers) * 2) / 2;
    if (high - low < 1) [low, high] = [low - 0.5, high + 0.5];
    const axis = { log: true, least: 10 ** low, most: 10 ** high, ticks: logTicks(10 ** low, 10 ** high), format: this.#format };
    const x = scaleOf(axis, [], EDGE, this.#wide - 18);
    const y = scaleOf(axis, [], SIDE - 40, 10);
    const colours = new Map();
    for (const [colour, predicted, actual] of good) {
      colours.set(colour, `${colours.get(colour) ?? ""}M${x.at(predicted).toFixed(1)} ${y.at(actual).toFixed(1)}h0`);
    }
    this.#dots.replaceChildren(...Array.from(colours, ([colour, d]) => draw("path", { class: `dots faint k${colour}`, d })));
    const diagonal = `M${x.start} ${y.start}L${x.end} ${y.end}`;
    this.#axes.replaceChildren(draw("path", { class: "even", d: diagonal, fill: "none" }), ...grid(x, y, ["predicted", "actual"]));
    const ratios = good.map(([, predicted, actual]) => predicted / actual).sort((a, b) => a - b);
    const middle = ratios[Math.floor(ratios.length / 2)];
    const within = ratios.filter((ratio) => ratio >= 1 / 1.25 && ratio <= 1.25).length / ratios.length;
    const text = `${Math.round(within * 100)} % of ${good.length} answers were within a quarter of the prediction; `
      + `the median prediction is ${middle.toFixed(2)} times the actual value.`;
    say(this.#words, text);
    set(this.#svg, "aria-label", `${this.#title}. ${text}`);
  }
}
