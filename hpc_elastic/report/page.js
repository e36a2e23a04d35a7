// Draws charts in the theme that the reader's system prefers, and again when that changes.
"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");

const embedChart = (() => {
  const configs = JSON.parse(document.getElementById("chart-configs").textContent);

  // Tables are smaller than a list of objects; `charts.expanded` is the same in Python.
  function expanded(part) {
    if (Array.isArray(part)) return part.map(expanded);
    if (part === null || typeof part !== "object") return part;
    if (part.table) {
      const { names, rows } = part.table;
      return { values: rows.map((row) => Object.fromEntries(row.map((v, i) => [names[i], v]))) };
    }
    return Object.fromEntries(Object.entries(part).map(([key, v]) => [key, expanded(v)]));
  }

  return (element, spec) => {
    const theme = dark.matches ? "dark" : "light";
    return vegaEmbed(element, expanded(spec), {
      actions: false,
      ast: true, // interprets expressions: no eval
      config: configs[theme],
      renderer: "canvas",
      tooltip: { theme },
    });
  };
})();

(() => {
  const specs = document.getElementById("chart-specs");
  if (specs === null) return; // a live page, whose charts come later
  const charts = JSON.parse(specs.textContent);
  let views = [];

  async function draw() {
    const theme = dark.matches ? "dark" : "light";
    const old = views;
    views = [];
    for (const { name, spec } of charts) views.push(await embedChart(`#chart-${name}`, spec));
    old.forEach((view) => view.finalize());
    document.documentElement.dataset.drawn = theme;
  }

  let last = Promise.resolve();
  const redraw = () => {
    last = last.then(draw).catch((error) => {
      console.error(error);
      document.documentElement.dataset.drawn = "failed";
    });
  };
  dark.addEventListener("change", redraw);
  redraw();
})();
