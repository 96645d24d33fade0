// Small plots that follow the colours of the page and the width of their place.

import { short } from "./format.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const HEIGHT = 120;
const LEAST = 60; // seconds that a plot over time spans at least
const all = new Set();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A plot of lines over time, or over the numbers of updates with `steps`. `lines` are [label, colour's name]; `whole`
// says that the values are whole numbers, and `zero` that the axis begins there.
export class Plot {
  constructor(place, lines, { steps = false, whole = false, value = short, zero = true, group } = {}) {
    Object.assign(this, { place, lines, steps, whole, value, zero, group });
    this.data = [[], ...lines.map(() => [])];
    all.add(this);
    new ResizeObserver(() => this.resize()).observe(place);
  }

  options() {
    const faint = colour("--faint");
    const axis = { stroke: colour("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false }, gap: 4 };
    const grid = { stroke: faint, width: 1 };
    return {
      width: Math.max(120, this.place.clientWidth),
      height: HEIGHT,
      padding: [6, 4, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false }, sync: this.group ? { key: this.group } : undefined },
      scales: { x: { time: !this.steps, range: (_, low, high) => (this.steps ? [low, Math.max(high, low + 1)] : [Math.min(low, high - LEAST), high]) }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, grid: { show: false }, size: 22, space: 70, values: this.steps ? undefined : (_, ticks) => ticks.map(clock) },
        { ...axis, grid, size: 48, space: 34, incrs: this.whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] : undefined, values: (_, ticks) => ticks.map((tick) => this.value(tick)) },
      ],
      series: [
        {},
        ...this.lines.map(([label, name], i) => ({
          label,
          stroke: colour(name),
          width: 1.75,
          fill: this.zero && this.lines.length === 1 ? `${colour(name)}22` : undefined,
          points: { show: this.steps && this.data[0].length < 40, size: 4, fill: colour(name) },
        })),
      ],
      hooks: { setCursor: [() => this.point()] },
    };
  }

  range(low, high) {
    if (low === null || high === null || (this.zero && high === 0)) return [0, 1];
    const from = this.zero ? Math.min(0, low) : low;
    const room = (high - from) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [this.zero && low >= 0 ? 0 : from - room, high + room];
  }

  // Shows the values under the pointer beside the plot's title, as its tooltip.
  point() {
    const at = this.chart?.cursor.idx;
    this.place.title = at === null || at === undefined ? "" : this.lines
      .map(([label], i) => `${label} ${this.value(this.data[i + 1][at])}`)
      .join(" · ");
  }

  // Draws the columns: x, then one for each line. `label` says the same in words.
  draw(columns, label) {
    this.data = columns;
    this.place.setAttribute("aria-label", label);
    if (!this.place.clientWidth) return;
    if (this.chart && this.steps && this.marked !== columns[0].length < 40) this.drop();
    this.marked = columns[0].length < 40;
    if (this.chart) this.chart.setData(columns);
    else this.chart = new uPlot(this.options(), columns, this.place);
  }

  resize() {
    if (!this.place.clientWidth) return;
    if (this.chart) this.chart.setSize({ width: this.place.clientWidth, height: HEIGHT });
    else if (this.data[0].length) this.draw(this.data, this.place.getAttribute("aria-label"));
  }

  drop() {
    this.chart?.destroy();
    this.chart = null;
  }
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB", { minute: "2-digit", hour: "2-digit", second: seconds % 60 ? "2-digit" : undefined });
}

dark.addEventListener("change", () => {
  for (const plot of all) {
    plot.drop();
    plot.resize();
  }
});
