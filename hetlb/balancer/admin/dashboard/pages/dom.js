// Small helpers of the dashboard: elements, text that is written only where it changed, figures for the eye.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes (`text`, `on`: listeners, `false` and null left out) and children. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Write text only where it differs: selections, live regions and the browser's layout stay undisturbed. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function set(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Options of a select, kept as they are while they are the same. */
export function choices(select, values, chosen) {
  const now = Array.from(select.options, (option) => option.value);
  if (now.length !== values.length || now.some((value, index) => value !== values[index])) {
    const kept = select.value;
    select.replaceChildren(...values.map((value) => make("option", { value, text: value })));
    select.value = values.includes(kept) ? kept : (chosen ?? values[0] ?? "");
  }
}

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A count: 12,345 or 1.2 M. */
export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 999_500) return `${(value / 1e6).toPrecision(3)} M`; // 1000 k would be 1.00e+3 k
  if (value >= 1e5) return `${(value / 1e3).toPrecision(3)} k`;
  return grouped.format(value);
}

/** A rate: three digits at most. */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return value >= 99.5 ? count(value) : value.toPrecision(value >= 9.95 ? 2 : 1 + (value >= 0.995));
}

/** Seconds: 8 ms, 1.25 s, 3 min. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.0095) return `${(value * 1e3).toPrecision(2)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1e3)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  if (value < 600) return `${Math.round(value)} s`;
  if (value < 36000) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

/** How long ago, in whole seconds or more. */
export const age = (value) => (value < 60 ? `${Math.max(0, Math.round(value))} s` : seconds(value));

/** A share: 7 %. */
export function percent(value) {
  if (value === null || value === undefined) return "–";
  return `${value > 0 && value < 0.0095 ? "<1" : Math.round(value * 100)} %`;
}

/** How much more or less `value` is than `base`, with its sign. */
export function difference(value, base) {
  if (!base || value === null || value === undefined) return "";
  const change = (value / base - 1) * 100;
  if (Math.abs(change) < 0.5) return "±0 %";
  return `${change > 0 ? "+" : "−"}${Math.abs(change) >= 1000 ? ">999" : Math.round(Math.abs(change))} %`;
}

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
