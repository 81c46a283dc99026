// Draws the charts of a load test's report from the data in the page.
"use strict";

import { LineChart, lineClass } from "./charts.js";
import { percent } from "./dom.js";

const FORMATS = { percent };

const axisOf = (axis) => ({ ...axis, format: FORMATS[axis.format] });

for (const place of document.querySelectorAll("[data-chart]")) {
  const { title, x, y, marks, lines } = JSON.parse(place.dataset.chart);
  const named = lines.map(([name], index) => [name, lineClass(index)]);
  const size = { width: 420, height: 260, left: 58, bottom: 42 };
  const chart = new LineChart(title, named, axisOf(x), axisOf(y), { ...size, labelled: true, marks });
  chart.update(lines.map(([, points]) => points));
  place.replaceWith(chart.element);
}
