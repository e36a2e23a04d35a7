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
  row.max_nodes === null ? UNKNOWN : row.nodes === null ? `${row.max_nodes}` : `${row.nodes} of ${row.max_nodes}`;

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

// A new chart is drawn unseen, and then takes the place of the old one.
const drawn = new Map();
let drawing = Promise.resolve();
function draw(name, spec) {
  const text = JSON.stringify(spec);
  drawing = drawing.then(async () => {
    const place = $(`chart-${name}`);
    if (place === null) return;
    const old = drawn.get(name);
    if (old && old.text === text && old.dark === dark.matches && old.place === place) return;
    const fresh = place.cloneNode(false);
    fresh.removeAttribute("id");
    const cover = element("div", "", { class: "unseen" });
    cover.append(fresh);
    place.after(cover);
    try {
      const view = await embedChart(fresh, spec);
      if (place.isConnected) place.replaceWith(fresh);
      fresh.id = `chart-${name}`;
      old?.view.finalize();
      drawn.set(name, { view, text, spec, dark: dark.matches, place: fresh });
    } finally {
      cover.remove();
    }
    document.documentElement.dataset.drawn = dark.matches ? "dark" : "light";
  }).catch((error) => console.error(name, error));
}
dark.addEventListener("change", () => drawn.forEach(({ spec }, name) => draw(name, spec)));

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
    { name: "left", title: "time left, or since the end", value: (run) => timeLeft(run.row), order: (run) => run.row.remaining_s, num: true },
    { name: "goodput", value: (run) => share(run.row.goodput), order: (run) => run.row.goodput, num: true },
  ];
  const timeLeft = (row) =>
    row.ended !== null ? `${duration(now - row.ended)} ago` : duration(row.remaining_s);

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
          name: group === "params" ? name : `result.${name}`, title, group, num: group === "results",
          value: (run) => (value(run) === null ? "" : text(value(run))), order: (run) => plain(value(run)),
        });
      }
    }
    $("common").textContent = constant.length ? `All runs: ${constant.join(" ")}` : "";
    const same = found.length === columns.length && found.every((c, i) => c.name === columns[i].name && c.group === columns[i].group);
    if (same) return;
    columns = found;
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
    [curvesAt, curvesChanged] = [-Infinity, true];
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
      const link = element("a", "", { href: `${root}/runs/${run.number}` });
      run.cells[0].append(link, element("small"));
      run.cells[1].append(element("span", "", { class: "badge" }));
      run.cells[4].append(element("span"));
      drawSpark(run);
    }
    columns.forEach((column, i) => {
      const text = column.value(run);
      const cell = i === 0 || i === 1 || i === 4 ? run.cells[i].firstChild : run.cells[i];
      if (cell.textContent !== text) cell.textContent = text;
    });
    const badge = run.cells[1].firstChild;
    badge.className = `badge ${row.phase}`;
    const why = row.problem ?? row.why ?? "";
    badge.title = why;
    const small = run.cells[0].lastChild;
    if (small.textContent !== why) small.textContent = why;
    run.cells[0].firstChild.title = row.directory;
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
    const [xs, ys] = [run.curve.map((p) => p[0]), run.curve.map((p) => p[1])];
    const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const points = run.curve.map(([x, y]) =>
      `${(60 * (x - x0) / (x1 - x0 || 1)).toFixed(1)},${(15 - 14 * (y - y0) / (y1 - y0 || 1)).toFixed(1)}`);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 60 16");
    svg.setAttribute("class", "spark");
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", points.join(" "));
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

  let curvesAt = -Infinity;
  let curvesChanged = false;
  function drawCurves() {
    const at = performance.now();
    if (!curvesChanged || at - curvesAt < 10000) return;
    [curvesAt, curvesChanged] = [at, false];
    const rows = [];
    for (const run of runs.values()) {
      const what = Object.entries(run.row.params ?? {}).map(([k, v]) => `${k}=${v}`).join(" ");
      if (run.curve.length > 1 && !run.tr.hidden) for (const [step, loss] of run.curve) rows.push([run.row.id, what, step, loss]);
    }
    const num = new Set(rows.map((row) => row[0])).size;
    if (num > 1) $("curves").hidden = false;
    if (num === 0 || $("curves").hidden) return;
    const losses = rows.map((row) => row[3]);
    const [low, high] = [losses.reduce((a, b) => Math.min(a, b)), losses.reduce((a, b) => Math.max(a, b))];
    draw("curves", {
      data: { table: { names: ["run", "parameters", "step", "loss"], rows } },
      width: "container", height: 200,
      mark: { type: "line", opacity: Math.max(0.25, Math.min(0.9, 12 / num)), tooltip: true, strokeWidth: 1 },
      encoding: {
        x: { field: "step", type: "quantitative", axis: { format: ",d", tickCount: { expr: "max(3, width / 110)" } } },
        y: { field: "loss", type: "quantitative", scale: low > 0 && high / low > 30 ? { type: "log", nice: false } : { zero: false }, axis: { format: "~r", tickCount: 5 } },
        detail: { field: "run", type: "nominal" },
        tooltip: ["run", "parameters", "step", "loss"].map((field) => ({ field })),
      },
    });
  }

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
      curvesChanged = true;
    }
    drawCurves();
    document.documentElement.dataset.runs = runs.size;
  });
  setInterval(drawCurves, 2000);
}

// ---- one run

function showRun() {
  function showNow(row) {
    document.title = `${row.id}: ${row.phase}`;
    $("run-id").textContent = row.id;
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
      if (!confirm(`${button.textContent}${asked.node ? ` (${asked.node})` : ""}?`)) return;
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
