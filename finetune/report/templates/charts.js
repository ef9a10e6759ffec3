// Draws the charts of curves.py, which stand in #curves as JSON. All of a page share cursor and zoom,
// but those along the values of a key.
"use strict";
(() => {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue("--" + name).trim();
  const COLOURS = ["blue", "orange", "green", "pink", "gold", "sky"];
  const HEIGHT = 260;
  const number = (options) => new Intl.NumberFormat("en", options).format;
  const FORMS = {
    fixed: number({ minimumFractionDigits: 4, maximumFractionDigits: 4 }),
    digits: number({ maximumSignificantDigits: 4 }),
    whole: number({ maximumFractionDigits: 0 }),
    exponent: (value) => value.toExponential(2),
  };
  const AXES = { ...FORMS, fixed: FORMS.digits, exponent: (value) => (value ? value.toExponential(1) : "0") };

  // How a series looks. The loss of each step, its range and its mean share the first colour.
  function look(series, at, all) {
    const none = { points: { show: false } };
    const lines = all.slice(0, at).filter((one) => ["line", "points"].includes(one.style)).length;
    const stroke = () => colour(COLOURS[lines % COLOURS.length]);
    switch (series.style) {
      case "points": return { stroke, width: 1, dash: [3, 3], points: { show: true, size: 8, fill: stroke } };
      case "faint": return { stroke, width: 1, alpha: 0.5, points: { size: 5 } };
      case "hollow": return { stroke: () => colour("orange"), paths: () => null, points: { show: true, size: 10, width: 2, fill: () => colour("ground") } };
      case "beyond": return { stroke: () => colour("warning"), paths: () => null, points: { show: true, size: 12, fill: () => colour("warning") } };
      case "high": case "low": return { stroke, width: 0, ...none };
      case "layer": return { stroke: series.colour, fill: series.colour, width: 0, paths: uPlot.paths.stepped({ align: 1 }), ...none };
      case "limit": return { stroke: () => colour(series.name === "budget" ? "warning" : "text"), width: 1.5, dash: [6, 4], ...none };
      default: return { stroke, width: 2, points: { size: 5 } };
    }
  }

  // The square of a series in the legend: filled for a line, dashed for points, thin for the loss of each step, and in
  // the colour of the band for the ends of its range, the lower one dotted. No two of a chart look the same.
  function square(all) {
    const style = (u, at) => all[at - 1]?.style;
    return {
      width: (u, at) => (style(u, at) === "faint" ? 1 : 2),
      dash: (u, at) => ({ points: "dashed", low: "dotted" })[style(u, at)] ?? "solid",
      stroke: (u, at) => { const series = u.series[at]; return typeof series.stroke === "function" ? series.stroke(u, at) : series.stroke; },
      fill: (u, at) => ({ line: u.series[at].stroke, layer: u.series[at].fill, high: () => colour("band"), low: () => colour("band"), beyond: () => colour("warning") })[style(u, at)]?.(u, at),
    };
  }

  const drawn = [];

  // Shows the steps from `low` to `high` in every chart, by default all.
  const show = (low = -Infinity, high = Infinity) => drawn.forEach((u) => {
    const [first, last] = ends(u);
    u.setScale("x", { min: Math.max(first, low), max: Math.min(last, high) });
  });
  const ends = (u) => [u.data[0][0], u.data[0].at(-1)];

  // Two fingers zoom and move what is shown: the step under each stays there. One finger scrolls the page.
  function pinch(u) {
    const places = (event) => [...event.targetTouches].map((one) => one.clientX - u.over.getBoundingClientRect().left);
    let steps = [];
    u.over.addEventListener("touchstart", (event) => { steps = places(event).map((place) => u.posToVal(place, "x")); });
    u.over.addEventListener("touchmove", (event) => {
      const [one, other] = places(event);
      const each = (steps[1] - steps[0]) / (other - one);
      if (event.targetTouches.length !== 2 || !(each > 0 && each < Infinity)) return;
      event.preventDefault();
      show(steps[0] - one * each, steps[0] + (u.over.clientWidth - one) * each);
    }, { passive: false });
  }

  function draw(place, chart) {
    const whole = place.parentElement.querySelector("button");
    whole.addEventListener("click", () => show());
    const zoomed = (u) => ends(u)[0] < u.scales.x.min || u.scales.x.max < ends(u)[1];
    const form = (value) => (value == null ? "–" : FORMS[chart.form](value));
    const all = chart.tables.flatMap((table) => table.series);
    const data = uPlot.join(chart.tables.map((table) => [table.steps, ...table.series.map((one) => one.values)]));
    // Layers lie on each other; what a reader wants is the height of one.
    const value = (one, at) => (one.texts ? (u, shown, own, point) => one.texts[point] || "–" : one.style !== "layer" ? (u, shown) => form(shown)
      : (u, shown, own, point) => form(shown == null ? null : shown - (all[at + 1]?.style === "layer" ? data[own + 1][point] : 0)));
    const phase = (step) => chart.marks.findLast(([start]) => start <= step)[1];
    const named = (place) => chart.labels[data[0].indexOf(place)];
    const label = (place) => named(place)?.replace(/^(.{11}).{2,}$/s, "$1…") ?? "";
    // Of names that would lie over each other, the first.
    const apart = (u, at) => { let last = -Infinity; return at.filter((place) => (place - last) * u.width / at.length > 60 && ((last = place), true)); };
    const steps = chart.labels ? { splits: () => data[0], values: (u, at) => { const some = apart(u, at); return at.map((place) => (some.includes(place) ? label(place) : "")); } } : chart.marks
      ? { splits: () => chart.marks.map(([start], at) => (start + (chart.marks[at + 1]?.[0] ?? 1)) / 2), values: (u, at) => at.map(phase), grid: { show: false } }
      : { values: (u, at) => at.map((step) => (Number.isInteger(step) ? FORMS.whole(step) : "")) };
    const axis = { stroke: () => colour("soft"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false } };
    const width = () => Math.max(200, place.clientWidth);
    const made = new uPlot({
      width: width(), height: HEIGHT,
      series: [
        { label: chart.along ?? (chart.marks ? "phase" : "step"), value: (u, step) => (step == null ? "–" : chart.labels ? named(step) : chart.marks ? phase(step) : FORMS.whole(step)) },
        ...all.map((one, at) => ({ label: one.name, value: value(one, at), ...look(one, at, all), spanGaps: Boolean(chart.labels) })),
      ],
      bands: all[0].style === "high" ? [{ series: [1, 2], fill: () => colour("band") }] : [],
      scales: {
        x: { time: false, range: (u, low, high) => (chart.labels ? [-0.5, chart.labels.length - 0.5] : low === high ? [low - 1, high + 1] : [low, high]) },
        ...(chart.marks && { y: { range: (u, low, high) => [0, high * 1.08] } }),
        ...(chart.top && { y: { range: (u, low) => [low - 0.05 * (chart.top - low), chart.top] } }),
      },
      axes: [
        { ...axis, ...steps, size: 30 },
        { ...axis, values: (u, at) => at.map(AXES[chart.form]),
          size: (u, values) => 16 + 7 * Math.max(4, ...(values || []).map((text) => text.length)) },
      ],
      legend: { markers: square(all) },
      cursor: chart.labels ? { drag: { x: false }, points: { show: false } } : { sync: { key: "step" } },
      // Without a cursor there are no values to read beside the names.
      hooks: { setCursor: [(u) => place.classList.toggle("idle", u.cursor.idx == null)], setScale: [(u) => { whole.hidden = !zoomed(u); }] },
    }, data, place);
    place.classList.add("idle");
    if (!chart.labels) {
      drawn.push(made);
      pinch(made);
    }
    new ResizeObserver(() => made.setSize({ width: width(), height: HEIGHT })).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => made.redraw(false));
  }

  const places = document.querySelectorAll(".chart");
  JSON.parse(document.getElementById("curves").textContent).forEach((chart, at) => draw(places[at], chart));
})();
