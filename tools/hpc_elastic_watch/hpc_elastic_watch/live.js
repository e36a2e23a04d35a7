// Live pages: the list of runs, and one run with its report and its logs. A module.
const $ = (id) => document.getElementById(id);
const { root, run: runNumber } = document.body.dataset;
const base = runNumber === "" ? root : `${root}/runs/${runNumber}`;

function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// ---- numbers and times as text, as `_util.duration` and `charts.number`

const UNKNOWN = "–";
function duration(s) {
  if (s === null || s === undefined) return UNKNOWN;
  if (s < 120) return `${Math.round(s)} s`;
  const both = (n, size, large, small) =>
    `${Math.floor(n / size)} ${large}` + (n % size ? ` ${n % size} ${small}` : "");
  if (s < 600) return both(Math.round(s), 60, "min", "s");
  const minutes = Math.round(s / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 1440) return both(minutes, 60, "h", "min");
  return both(Math.round(s / 3600), 24, "d", "h");
}
function number(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
const share = (part) => (part === null || part === undefined ? UNKNOWN : `${(100 * part).toFixed(1)} %`);
const pace = (row) => (row.steps_per_s === null ? UNKNOWN : `${number(row.steps_per_s)}/s`);
const nodes = (row) =>
  row.max_nodes === null ? UNKNOWN : row.ended !== null ? `${row.max_nodes}` : `${number(row.nodes)} of ${row.max_nodes}`;
const label = (row, names = Object.keys(row.params ?? {})) =>
  names.filter((name) => name in (row.params ?? {})).map((name) => `${name}=${row.params[name]}`).join(" ") || row.id;

// ---- the stream of news; a hidden page closes it, so that nothing is read for it

function listen(path, onNews) {
  let source = null;
  let isStopped = false;
  const open = () => {
    if (source !== null || document.hidden || isStopped) return;
    source = new EventSource(path());
    source.onopen = () => { $("lost").hidden = true; };
    source.onmessage = (event) => onNews(JSON.parse(event.data));
    source.onerror = () => {
      $("lost").hidden = false;
      if (source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      close();
      setTimeout(open, 3000);
    };
  };
  const close = () => { source?.close(); source = null; };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  open();
  return { again: () => { close(); open(); }, stop: () => { isStopped = true; close(); } };
}

// A new chart is drawn unseen, and then takes the place of the old one. One whose values alone are
// other ones, which are not in its spec, gets these.
const drawn = new Map();
let drawing = Promise.resolve();
function draw(name, spec, values = null) {
  const text = JSON.stringify(spec);
  drawing = drawing.then(async () => {
    const place = $(`chart-${name}`);
    if (place === null) return;
    const old = drawn.get(name);
    if (old && old.text === text && old.dark === dark.matches && old.place === place) {
      if (values !== null) await old.view.view.data(name, (old.values = values)).runAsync();
      return;
    }
    const fresh = place.cloneNode(false);
    fresh.removeAttribute("id");
    const cover = element("div", "", { class: "unseen" });
    cover.append(fresh);
    place.after(cover);
    try {
      const view = await embedChart(fresh, values === null ? spec : { ...spec, data: { name, values } });
      if (place.isConnected) place.replaceWith(fresh);
      fresh.id = `chart-${name}`;
      old?.view.finalize();
      drawn.set(name, { view, text, spec, values, dark: dark.matches, place: fresh });
    } finally {
      cover.remove();
    }
    document.documentElement.dataset.drawn = dark.matches ? "dark" : "light";
  }).catch((error) => console.error(name, error));
}
dark.addEventListener("change", () => drawn.forEach(({ spec, values }, name) => draw(name, spec, values)));

// ---- the list of runs

function showList() {
  const runs = new Map(); // number -> { row, tr, cells, curve }
  const body = $("runs").tBodies[0];
  const phases = ["training", "waiting", "starting", "requeued", "queued", "succeeded", "failed", "cancelled", "lost"];
  let columns = [];
  let now = 0;
  let sorted = { by: "", down: false };

  const fixed = [
    { name: "run", value: (run) => run.row.id, order: (run) => run.number },
    { name: "state", value: (run) => run.row.phase, order: (run) => phases.indexOf(run.row.phase) },
    { name: "nodes", value: (run) => nodes(run.row), order: (run) => run.row.nodes, num: true },
    { name: "step", value: (run) => number(run.row.step), order: (run) => run.row.step, num: true },
    { name: "loss", value: (run) => number(run.row.loss), order: (run) => run.row.loss, num: true },
    { name: "pace", title: "optimizer steps a second", value: (run) => pace(run.row), order: (run) => run.row.steps_per_s, num: true },
    { name: "left", title: "time left at this pace", value: ({ row }) => (row.ended === null ? duration(row.remaining_s) : ""), order: (run) => run.row.remaining_s, num: true },
    { name: "ended", value: ({ row }) => (row.ended === null ? "" : `${duration(now - row.ended).split(" ", 2).join(" ")} ago`), order: (run) => run.row.ended, num: true },
    { name: "goodput", value: (run) => share(run.row.goodput), order: (run) => run.row.goodput, num: true },
  ];

  function makeColumns() {
    const found = [...fixed];
    const constant = [];
    for (const [group, title] of [["params", "parameter"], ["results", "result"]]) {
      const names = new Set();
      for (const { row } of runs.values()) Object.keys(row[group] ?? {}).forEach((name) => names.add(name));
      for (const name of names) {
        const values = new Set([...runs.values()].map(({ row }) => row[group]?.[name]));
        if (group === "params" && values.size === 1 && runs.size > 1) {
          constant.push(`${name}=${[...values][0]}`);
          continue;
        }
        const value = (run) => run.row[group]?.[name] ?? null;
        const text = group === "params" ? String : number;
        found.push({
          name: group === "params" || name === "result" ? name : `result.${name}`, title, group, num: group === "results",
          value: (run) => (value(run) === null ? "" : text(value(run))), order: (run) => plain(value(run)),
        });
      }
    }
    $("common").textContent = constant.length ? `All runs: ${constant.join(" ")}` : "";
    const same = found.length === columns.length && found.every((c, i) => c.name === columns[i].name && c.group === columns[i].group);
    if (same) return;
    columns = found;
    const named = columns.filter((c) => c.group === "params").map((c) => c.name);
    const chosen = $("colour").value;
    $("colour").replaceChildren(element("option", "each run", { value: "" }), ...named.map((name) => element("option", name, { value: name })));
    $("colour").value = named.includes(chosen) ? chosen : "";
    const head = $("runs").tHead.rows[0];
    head.replaceChildren(...columns.map((column) => {
      const th = element("th", "", { scope: "col", class: column.num ? "num" : "" });
      const button = element("button", column.name, { title: column.title ?? "" });
      button.onclick = () => sortBy(column);
      th.append(button);
      return th;
    }));
    $("sort").replaceChildren(...columns.flatMap((c) => [false, true].map((down) =>
      element("option", `${c.name} ${down ? "↓" : "↑"}`, { value: `${down ? "-" : ""}${key(c)}` }))));
    for (const run of runs.values()) {
      run.cells = null;
      run.tr.replaceChildren();
    }
    markSorted();
  }
  const key = (column) => `${column.group ?? ""}.${column.name}`;
  const plain = (value) => (typeof value === "string" && value.trim() !== "" && !Number.isNaN(Number(value)) ? Number(value) : value);

  function sortBy(column, down = null) {
    sorted = { by: key(column), down: down ?? (sorted.by === key(column) ? !sorted.down : false) };
    markSorted();
    arrange();
  }
  function markSorted() {
    const by = columns.find((c) => key(c) === sorted.by) ?? columns[0];
    [...$("runs").tHead.rows[0].cells].forEach((th, i) =>
      th.setAttribute("aria-sort", columns[i] !== by ? "none" : sorted.down ? "descending" : "ascending"));
    $("sort").value = `${sorted.down ? "-" : ""}${key(by)}`;
  }
  $("sort").onchange = () => {
    const chosen = $("sort").value;
    sortBy(columns.find((c) => key(c) === chosen.replace(/^-/, "")), chosen.startsWith("-"));
  };
  $("filter").oninput = () => {
    arrange();
    drawCurves();
  };

  const collator = new Intl.Collator("en", { numeric: true });
  let order = [];
  function arrange() {
    const by = columns.find((c) => key(c) === sorted.by) ?? columns[0];
    const sign = sorted.down ? -1 : 1;
    const unknown = (value) => value === null || value === undefined || value === "";
    const list = [...runs.values()].sort((a, b) => {
      const [x, y] = [by.order(a), by.order(b)];
      if (unknown(x) || unknown(y)) return unknown(x) - unknown(y) || a.number - b.number;
      const least = typeof x === "number" && typeof y === "number" ? x - y : collator.compare(String(x), String(y));
      return sign * least || a.number - b.number;
    });
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    if (list.length !== order.length || list.some((run, i) => run !== order[i])) {
      body.replaceChildren(...list.map((run) => run.tr));
      order = list;
    }
    list.forEach((run) => {
      const text = words.length ? searched(run.row) : "";
      run.tr.hidden = !words.every((word) => text.includes(word));
      shown += !run.tr.hidden;
    });
    $("count").textContent = shown === runs.size ? `${shown} ${shown === 1 ? "run" : "runs"}` : `${shown} of ${runs.size} runs`;
  }
  const searched = (row) =>
    [row.id, row.phase, row.directory, ...["params", "results"].flatMap((g) => Object.entries(row[g] ?? {}).map(([k, v]) => `${k}=${v}`))].join(" ").toLowerCase();

  function fill(run) {
    const { row, tr } = run;
    if (run.cells === null) {
      run.cells = columns.map((column) => {
        const td = element("td", "", { class: column.num ? "num" : "", "data-name": column.name });
        tr.append(td);
        return td;
      });
      run.mark = element("button", "", { class: "mark", "aria-pressed": String(run.isChosen === true), title: "draw the runs with pressed marks alone" });
      run.mark.onclick = () => {
        run.isChosen = !run.isChosen;
        run.mark.setAttribute("aria-pressed", String(run.isChosen));
        drawCurves();
      };
      tr.onpointerenter = () => light(run);
      tr.onpointerleave = () => light(null);
      run.link = element("a", "", { href: `${root}/runs/${run.number}` });
      run.cells[0].append(run.mark, run.link, element("small"));
      run.cells[1].append(element("span", "", { class: "badge" }));
      run.cells[4].append(element("span"));
      drawSpark(run);
    }
    columns.forEach((column, i) => {
      const text = column.value(run);
      const cell = i === 0 ? run.link : i === 1 || i === 4 ? run.cells[i].firstChild : run.cells[i];
      if (cell.textContent !== text) cell.textContent = text;
    });
    const badge = run.cells[1].firstChild;
    badge.className = `badge ${row.phase}`;
    const why = row.problem ?? row.why ?? "";
    badge.title = why;
    tr.classList.toggle("failed", row.phase === "failed");
    tr.classList.toggle("lost", row.phase === "lost");
    const small = run.cells[0].lastChild;
    if (small.textContent !== why) small.textContent = why;
    run.link.title = row.directory;
    const done = row.step !== null && row.total_steps ? Math.min(1, row.step / row.total_steps) : 0;
    run.cells[3].style.setProperty("--done", `${(100 * done).toFixed(1)}%`);
    run.cells[3].title = row.total_steps ? `of ${number(row.total_steps)}` : "";
  }

  const SVG = "http://www.w3.org/2000/svg";
  function drawSpark(run) {
    if (run.cells === null) return;
    const cell = run.cells[4];
    cell.querySelector("svg")?.remove();
    if (run.curve.length < 2) return;
    const [xs, ys] = [points(run).map((p) => p[0]), points(run).map((p) => p[1])];
    const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const path = points(run).map(([x, y]) =>
      `${(60 * (x - x0) / (x1 - x0 || 1)).toFixed(1)},${(15 - 14 * (y - y0) / (y1 - y0 || 1)).toFixed(1)}`);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 60 16");
    svg.setAttribute("class", "spark");
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", path.join(" "));
    svg.append(line);
    cell.append(svg);
  }

  function showPhases() {
    const counts = new Map();
    for (const { row } of runs.values()) counts.set(row.phase, (counts.get(row.phase) ?? 0) + 1);
    const order = [...counts].sort(([a], [b]) => phases.indexOf(a) - phases.indexOf(b));
    $("phases").replaceChildren(...order.map(([phase, count]) => {
      const button = element("button", `${count} ${phase}`, { class: `badge ${phase}` });
      button.onclick = () => {
        $("filter").value = $("filter").value === phase ? "" : phase;
        $("filter").oninput();
      };
      return button;
    }));
    document.title = `${runs.size} runs: ${order.map(([phase, count]) => `${count} ${phase}`).join(", ")}`;
  }

  // ---- the curves of the listed runs, or of those whose marks are pressed

  const PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#8c8c8c"];
  const FORMATS = { step: ",d", hours: "~r", samples: "~s" };
  const MOST_NAMED = 12; // longer legends hide the chart: the marks in the table are one, too
  let [lit, litAt] = [null, null]; // a run, and the point of its curve at the pointer
  let rows = [];

  const points = ({ curve, row }) => {
    const last = curve.at(-1);
    const isNewer = row.phase === "training" && row.loss !== null && row.step > last[0];
    return isNewer ? [...curve, [row.step, row.loss, now, row.samples]] : curve;
  };
  function shownRuns() {
    const listed = [...runs.values()].filter((run) => !run.tr.hidden && run.curve.length > 1);
    const chosen = listed.filter((run) => run.isChosen);
    return chosen.length ? chosen : listed;
  }
  function rowsOf(run, colour) {
    const begin = Math.min(...run.curve.map((p) => p[2]));
    const rest = Number($("smooth").value);
    let mean = null;
    return points(run).map(([step, loss, time, samples]) => {
      mean = mean === null ? loss : rest * mean + (1 - rest) * loss;
      const x = { step, hours: (time - begin) / 3600, samples }[$("x").value];
      return { run: run.number, colour, x, y: mean };
    }).filter(({ x, y }) => x !== null && x !== undefined && ($("y").value !== "log" || y > 0));
  }

  function drawCurves() {
    const shown = shownRuns();
    if (shown.length > 1) $("curves").hidden = false;
    if (shown.length === 0 || $("curves").hidden) return;
    const by = $("colour").value;
    const named = columns.filter((c) => c.group === "params").map((c) => c.name);
    const isNamed = new Set(shown.map(({ row }) => label(row, named))).size === shown.length;
    const nameOf = (row) => (isNamed ? label(row, named) : row.id);
    const colourOf = ({ row }) => (by === "" ? nameOf(row) : String(row.params?.[by] ?? UNKNOWN));
    const domain = [...new Set(shown.map(colourOf))].sort((a, b) => plain(a) - plain(b) || collator.compare(a, b));
    const range = domain.map((_, i) =>
      domain.length <= PALETTE.length ? PALETTE[i] : `hsl(${Math.round((330 * i) / domain.length)}, 65%, 50%)`);
    rows = shown.flatMap((run) => rowsOf(run, colourOf(run)));
    for (const run of runs.values()) {
      run.mark.style.background = shown.includes(run) ? range[domain.indexOf(colourOf(run))] : "none";
      drawSpark(run);
    }
    if (rows.length === 0) return light(null);
    const ys = rows.map((row) => row.y);
    const [low, high] = [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))];
    const isLog = $("y").value === "log" || ($("y").value === "" && low > 0 && high / low > 30);
    const isNarrow = innerWidth < 800;
    const legend = { title: by || null, orient: isNarrow ? "bottom" : "right", columns: 1, labelLimit: 260, symbolType: "stroke" };
    draw("curves", {
      params: [{ name: "lit", value: -1 }],
      width: "container", height: 240,
      mark: "line",
      encoding: {
        x: { field: "x", type: "quantitative", title: $("x").value, axis: { format: FORMATS[$("x").value], tickCount: { expr: "max(3, width / 110)" } } },
        y: { field: "y", type: "quantitative", title: "loss", scale: isLog ? { type: "log", nice: false } : { zero: false }, axis: { format: "~r", tickCount: 5 } },
        color: { field: "colour", type: "nominal", scale: { domain, range }, legend: domain.length <= MOST_NAMED ? legend : null },
        detail: { field: "run", type: "nominal" },
        opacity: { condition: { test: "lit >= 0 && datum.run !== lit", value: 0.12 }, value: shown.length > 50 ? 0.6 : 0.9 },
        size: { condition: { test: "datum.run === lit", value: 3 }, value: 1.3 },
      },
    }, rows);
    light(lit, litAt);
  }

  // The row and the curve of a run light up together, wherever the pointer is.
  function light(run, at = null) {
    lit?.tr.classList.remove("lit");
    [lit, litAt] = [run, at];
    lit?.tr.classList.add("lit");
    const value = at === null ? "" : `: ${$("x").value} ${number(at.x)}, loss ${number(at.y)}`;
    $("lit").textContent = lit === null
      ? "A run's mark in the table has the colour of its curve. Press marks to compare those runs alone; point at a row or at a curve to see which belong together."
      : `${lit.row.id} ${label(lit.row)}${value}`;
    drawing = drawing.then(() => drawn.get("curves")?.view.view.signal("lit", lit?.number ?? -1).runAsync());
  }
  function nearest(event) {
    const view = drawn.get("curves")?.view.view;
    if (!view || rows.length === 0) return null;
    const [left, top] = view.origin();
    const frame = view.container().getBoundingClientRect();
    const [px, py] = [event.clientX - frame.left - left, event.clientY - frame.top - top];
    const [x, y] = [view.scale("x"), view.scale("y")];
    let best = null;
    let least = 20;
    for (const row of rows) {
      const away = Math.hypot(x(row.x) - px, y(row.y) - py);
      if (away < least) [best, least] = [row, away];
    }
    return best;
  }
  $("curves").onpointermove = (event) => {
    const at = nearest(event);
    if (at !== null || lit !== null) light(at === null ? null : runs.get(String(at.run)), at);
  };
  $("curves").onpointerleave = () => light(null);
  $("curves").onclick = (event) => {
    const at = nearest(event);
    if (at !== null) runs.get(String(at.run)).tr.scrollIntoView({ block: "center" });
  };
  for (const name of ["x", "y", "smooth", "colour"]) $(name).oninput = drawCurves;
  addEventListener("resize", drawCurves);

  function download(name, url) {
    element("a", "", { href: url, download: name }).click();
  }
  $("png").onclick = async () => download("runs.png", await drawn.get("curves").view.view.toImageURL("png", 2));
  $("csv").onclick = () => {
    const names = [...new Set(shownRuns().flatMap(({ row }) => Object.keys(row.params ?? {})))];
    const lines = shownRuns().flatMap((run) => points(run).map(([step, loss, time, samples]) =>
      [run.row.id, ...names.map((name) => run.row.params?.[name] ?? ""), step, time, samples ?? "", loss]));
    const quoted = (value) => `"${String(value).replaceAll('"', '""')}"`;
    const text = [["run", ...names, "step", "time", "samples", "loss"], ...lines].map((line) => line.map(quoted).join()).join("\n");
    const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    download("runs.csv", url);
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  };

  listen(() => `${base}/news`, (news) => {
    now = news.now;
    for (const [name, row] of Object.entries(news.rows)) {
      const run = runs.get(name);
      if (run) run.row = row;
      else runs.set(name, { number: Number(name), row, curve: [], cells: null, tr: element("tr") });
    }
    const changed = Object.keys(news.rows);
    if (changed.length) {
      makeColumns();
      for (const run of runs.values()) if (run.cells === null || String(run.number) in news.rows) fill(run);
      arrange();
      showPhases();
    }
    for (const [name, curve] of Object.entries(news.curves)) {
      const run = runs.get(name);
      if (!run) continue;
      run.curve = curve;
      drawSpark(run);
    }
    drawCurves();
    document.documentElement.dataset.runs = runs.size;
  });
}

// ---- one run

function showRun() {
  // The report is older than the row, so its step and loss are those of the row while it trains.
  let newest = null;
  function freshen() {
    if (newest?.phase !== "training") return;
    const { step, total_steps: total, remaining_s: left, loss } = newest;
    const more = [total ? `of ${number(total)}` : "", left === null ? "" : `${duration(left)} to go`];
    const fresh = { Step: [step, more.filter(Boolean).join(", ")], Loss: [loss, null] };
    for (const dt of document.querySelectorAll("#report .tiles dt")) {
      const [value, small] = fresh[dt.textContent] ?? [null, null];
      if (value !== null) dt.nextElementSibling.textContent = number(value);
      if (small) dt.parentElement.lastElementChild.textContent = small;
    }
  }
  function showNow(row) {
    newest = row;
    freshen();
    document.title = `${label(row)}: ${row.phase}`;
    $("title").textContent = label(row);
    $("title").title = row.id;
    $("phase").textContent = row.phase;
    $("phase").className = `badge ${row.phase}`;
    const parts = [`${nodes(row)} nodes`];
    if (row.step !== null) parts.push(`step ${number(row.step)}${row.total_steps ? ` of ${number(row.total_steps)}` : ""}`);
    if (row.loss !== null) parts.push(`loss ${number(row.loss)}`);
    if (row.steps_per_s !== null) parts.push(`${number(row.steps_per_s)} steps/s`);
    if (row.remaining_s !== null) parts.push(`${duration(row.remaining_s)} to go`);
    if (row.why) parts.push(row.why);
    $("numbers").textContent = parts.join(" · ");
    $("progress").hidden = row.step === null || !row.total_steps;
    if (!$("progress").hidden) $("progress").value = Math.min(1, row.step / row.total_steps);
    const select = $("node");
    const members = row.members.map((task) => [task, row.hosts[task] ? `${row.hosts[task]} (${task})` : task]);
    if (select && select.dataset.members !== String(members)) {
      select.dataset.members = String(members);
      select.replaceChildren(...members.map(([value, text]) => element("option", text, { value })));
    }
  }

  // Sections are replaced where they differ; unfolded lists stay so, and charts stay drawn.
  const shown = new Map();
  const keyOf = (part, i) => part.querySelector("h2")?.textContent.replace(/\(.*/, "") ?? `${part.localName} ${i}`;
  function replaceReport(html) {
    const parsed = new DOMParser().parseFromString(html, "text/html").body;
    const main = parsed.querySelector("main");
    const parts = [...parsed.children].flatMap((e) => (e === main ? [...main.children] : [e]));
    if ($("report").dataset.is !== "report") {
      $("report").replaceChildren();
      $("report").dataset.is = "report";
    }
    let before = null;
    const present = new Set();
    parts.forEach((part, i) => {
      const name = keyOf(part, i);
      present.add(name);
      const known = shown.get(name);
      const text = part.outerHTML;
      if (known?.text === text) {
        before = known.part;
        return;
      }
      if (known) {
        for (const folded of part.querySelectorAll("details")) {
          const title = (e) => e.querySelector("summary")?.textContent.replace(/[\d,]+/g, "");
          const twin = [...known.part.querySelectorAll("details")].find((e) => title(e) === title(folded));
          if (twin) folded.open = twin.open;
        }
        for (const chart of part.querySelectorAll(".chart")) {
          const old = known.part.querySelector(`#${chart.id}`);
          if (old) chart.replaceWith(old);
        }
        known.part.replaceWith(part);
      } else if (before) before.after(part);
      else $("report").prepend(part);
      shown.set(name, { text, part });
      before = part;
    });
    for (const [name, { part }] of shown) {
      if (present.has(name)) continue;
      part.remove();
      shown.delete(name);
    }
  }

  let wanted = 0;
  let loading = false;
  async function load() {
    if (loading) return;
    loading = true;
    try {
      for (let version = -1; version !== wanted; ) {
        version = wanted;
        const answer = await fetch(`${base}/report`);
        if (!answer.ok) throw new Error(await answer.text());
        const { html, charts } = await answer.json();
        replaceReport(html);
        freshen();
        charts.forEach(({ name, spec }) => draw(name, spec));
        await drawing;
        document.documentElement.dataset.version = version;
      }
    } catch (error) {
      console.error(error);
    } finally {
      loading = false;
    }
  }

  listen(() => `${base}/news`, (news) => {
    const row = news.rows[runNumber];
    if (row) showNow(row);
    if (news.page !== undefined) {
      wanted = news.page;
      load();
    }
  });
  showLogs();
  showControl();
}

// ---- logs

const MOST_LINES = 5000;
function showLogs() {
  const list = $("lines").querySelector("ol");
  let lines = [];
  let stream = null;

  const query = () => new URLSearchParams({ rank: $("rank").value, text: $("search").value, agents: $("agents").checked ? 1 : 0 });
  const clock = (s) => {
    const t = new Date(1000 * s);
    const two = (n) => String(n).padStart(2, "0");
    return `${two(t.getMonth() + 1)}-${two(t.getDate())} ${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
  };
  function item([time, host, origin, kind, text]) {
    const li = element("li", "", { class: kind });
    li.append(element("time", clock(time)), element("b", `${host} ${origin}`));
    const sought = $("search").value.toLowerCase();
    const at = sought ? text.toLowerCase().indexOf(sought) : -1;
    if (at < 0) li.append(text);
    else li.append(text.slice(0, at), element("mark", text.slice(at, at + sought.length)), text.slice(at + sought.length));
    return li;
  }
  function problem(text) {
    $("log-problem").hidden = !text;
    $("log-problem").textContent = text ?? "";
  }
  function add(news) {
    problem(news.error);
    if (news.first || news.error) {
      lines = [];
      list.replaceChildren();
      $("older").hidden = !news.more;
    }
    if (news.ranks) {
      const chosen = $("rank").value;
      const old = [...$("rank").options].slice(1).map((o) => o.value).join();
      if (old !== news.ranks.join()) {
        $("rank").replaceChildren(element("option", "all", { value: "" }), ...news.ranks.map((r) => element("option", r, { value: r })));
        $("rank").value = chosen;
      }
    }
    if (news.left_out) news.lines.unshift([news.lines[0]?.[0] ?? 0, "", "", "agent", `... ${news.left_out} lines were left out ...`]);
    for (const line of news.lines ?? []) {
      lines.push(line);
      list.append(item(line));
    }
    while (lines.length > MOST_LINES) {
      lines.shift();
      list.firstChild.remove();
      $("older").hidden = false;
    }
    if ($("follow").checked) $("lines").scrollTop = $("lines").scrollHeight;
    document.documentElement.dataset.lines = lines.length;
  }
  $("older").onclick = async () => {
    if (!lines.length) return;
    $("follow").checked = false;
    const seen = lines.findIndex((line) => line[0] !== lines[0][0]);
    const asked = query();
    asked.set("before", lines[0][0]);
    asked.set("seen", seen < 0 ? lines.length : seen);
    const found = await (await fetch(`${base}/logs?${asked}`)).json();
    problem(found.error);
    const height = $("lines").scrollHeight;
    lines = [...(found.lines ?? []), ...lines];
    list.prepend(...(found.lines ?? []).map(item));
    $("lines").scrollTop += $("lines").scrollHeight - height;
    $("older").hidden = !found.more;
    document.documentElement.dataset.lines = lines.length;
  };
  let typing;
  $("search").oninput = () => {
    clearTimeout(typing);
    typing = setTimeout(() => stream?.again(), 300);
  };
  $("rank").onchange = $("agents").onchange = () => stream?.again();

  const choose = () => {
    const on = location.hash === "#logs";
    $("logs").hidden = !on;
    $("report").hidden = on;
    if (on && stream === null) stream = listen(() => `${base}/logs/new?${query()}`, add);
    if (!on) {
      stream?.stop();
      stream = null;
    }
  };
  addEventListener("hashchange", choose);
  choose();
}

// ---- commands

function showControl() {
  if ($("control") === null) return;
  for (const button of $("control").querySelectorAll("button")) {
    button.onclick = async () => {
      const command = button.dataset.command;
      const asked = { command };
      if (command === "resume") asked.nodes = $("nodes").value.trim();
      if (command === "preempt" || command === "kill") asked.node = $("node").value;
      if (!confirm(button.dataset.ask.replace("NODE", $("node").selectedOptions[0]?.text ?? ""))) return;
      $("answer").hidden = false;
      $("answer").textContent = `${command} ...`;
      try {
        const answer = await fetch(`${base}/control`, { method: "POST", body: JSON.stringify(asked) });
        const { output, error } = await answer.json();
        $("answer").textContent = error ?? output;
      } catch (e) {
        $("answer").textContent = String(e);
      }
    };
  }
}

if (runNumber === "") showList();
else showRun();
