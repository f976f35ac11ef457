"use strict";
// The page of scripts/view_rollouts.py, served or in one file. It has five parts: elements, where rollouts come from,
// curves, the table, conversations.
// INVARIANT: text of models, tools and data enters the page in `el` or `say` alone: as text, and through `seen`.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = new Set(["svg", "path", "line", "text", "g"]);

// ---------------------------------------------------------------------------------------------------------------------
// 1. Elements
// ---------------------------------------------------------------------------------------------------------------------

function el(name, attributes = {}, ...children) {
  const node = SVG.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "background") node.style.background = value;  // an attribute `style` is against the page's policy
    else if (key === "title" || key === "aria-label") node.setAttribute(key, seen(value));
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : seen(child))));
  return node;
}

function say(node, text) {
  node.textContent = seen(text);
}

// A character that cannot be seen, or turns the direction of a line, as one that can be seen and does nothing.
function seen(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/(?![\t\n])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}\u115f\u1160\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0]/gu,
      (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

// A token with its white space made visible; a line break also breaks the line.
function visible(text) {
  if (text === "") return "∅";
  if (/^ +$/.test(text)) return "·".repeat(text.length);
  return seen(text).replaceAll("\n", "↵\n").replaceAll("\t", "⇥");
}

function number(value, digits = 2) {
  return value === null || value === undefined || Number.isNaN(value) ? "-" : Number(value).toFixed(digits);
}

function signed(value, digits = 2) {
  const text = number(value, digits);
  return text === "-" ? text : Number(text) > 0 ? `+${text}` : Number(text) === 0 ? (0).toFixed(digits) : text;
}

// A message's content, or a call's arguments, as text: the parts of a multimodal message by their own.
function textOf(content) {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  if (Array.isArray(content) && content.every((part) => part && typeof part === "object")) {
    return content.map((part) => textOf(part.text || `[${part.type}]`)).join("\n");
  }
  return JSON.stringify(content);
}

const short = (name) => name.replace(/_reward_func$/, "");
const definitions = (pairs) => el("dl", {}, pairs.map(([term, text]) => [el("dt", {}, term), el("dd", {}, text)]));

// ---------------------------------------------------------------------------------------------------------------------
// 2. Where rollouts come from: a server, or this page
// ---------------------------------------------------------------------------------------------------------------------

async function ask(path, query = {}) {
  const used = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined);
  const response = await fetch(`${path}?${new URLSearchParams(used)}`);
  const answer = await response.json().catch(() => ({ error: `status ${response.status}` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

const SERVER = {
  info: () => ask("/api/info"),
  panels: () => ask("/api/panels"),
  table: ({ run = 0, ...query }) => ask(`/api/rollouts/${Number(run)}`, query),
  rollout: (run, id) => ask(`/api/rollout/${run}/${id}`),
  group: (run, id) => ask(`/api/group/${run}/${id}`),
};

// Words as scripts/viewer/log.py has them: lower case, without accents, parted by everything that is no letter or digit.
const plain = (text) => ` ${text.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase()
  .replace(/[^\p{L}\p{N}]+/gu, " ").trim()} `;

function saidText(item) {
  const row = item.row;
  const calls = row.turns.flatMap((turn) => (turn.calls || []).map((call) => call.arguments));
  const results = row.turns.flatMap((turn) => (turn.results || []).map((result) => result.text));
  const read = row.turns.flatMap((turn) => (Array.isArray(turn.context) ? turn.context : []));
  const said = [...row.messages, ...read].filter(Boolean).map((message) => message.content);
  item.said ??= plain([...said, ...calls, ...results, row.answer, row.error].map(textOf).join("\n"));
  return item.said;
}

function matches(item, query) {
  const reward = query.reward_name && query.reward_name !== "reward" ? item.rewards[query.reward_name] : item.reward;
  const given = (value) => value !== undefined && value !== "";
  const inside = (value, low, high) => (!given(low) || (value !== null && value >= Number(low)))
    && (!given(high) || (value !== null && value <= Number(high)));
  return inside(item.step, query.step_from, query.step_to) && inside(reward ?? null, query.reward_min, query.reward_max)
    && (!query.mode || item.mode === query.mode) && (!query.stop || item.stop === query.stop)
    && (!query.prompt || item.prompt.toLowerCase().includes(query.prompt.toLowerCase()))
    && (!query.tool || item.tools.includes(query.tool))
    && (!query.error || (query.error === "any" ? item.errors.length > 0 : item.errors.includes(query.error)))
    && (query.text || "").split(/\s+/).map(plain).filter((word) => word.trim())
      .every((word) => saidText(item).includes(word.trimEnd()));
}

const PAGE = {
  info: async () => ({ runs: DATA.runs }),
  panels: async () => DATA.panels,
  table: async (query) => {
    const found = DATA.rollouts.filter((item) => item.run === Number(query.run || 0) && matches(item, query));
    const key = query.sort || "step", sign = query.descending === "true" ? -1 : 1;
    found.sort((a, b) => sign * ((a[key] ?? -Infinity) - (b[key] ?? -Infinity) || a.id - b.id));
    const first = Number(query.offset || 0);
    return { total: found.length, rows: found.slice(first, first + Number(query.limit || 50)) };
  },
  rollout: async (run, id) => {
    const found = DATA.rollouts.find((item) => item.run === Number(run) && item.id === Number(id));
    if (!found) throw new Error(`There is no rollout ${id}.`);
    return found;
  },
  group: async (run, id) => {
    const one = await PAGE.rollout(run, id);
    return DATA.rollouts.filter((item) => item.run === one.run && item.team === one.team);
  },
};

const source = DATA.served ? SERVER : PAGE;
const state = { info: null, place: null, filters: undefined, shown: "", colour: "advantage", hiddenLines: new Set(), view: 0 };
const main = el("main");

// ---------------------------------------------------------------------------------------------------------------------
// 3. Curves
// ---------------------------------------------------------------------------------------------------------------------

const BOX = { width: 380, height: 190, left: 40, right: 8, top: 8, bottom: 22 };

function ticks(low, high, count, least = 0) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].find((factor) => factor * power >= rough) * power, least);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, Math.min(20, last - first + 1)) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

const colourOf = (lines, line) => `var(--c${[...new Set(lines.map((each) => each.label))].indexOf(line.label) % 8})`;
const dashOf = (line) => (line.run ? "5 3" : null);

function chart(panel) {
  const lines = panel.lines.filter((line) => !state.hiddenLines.has(`${panel.title}/${line.label}`));
  const points = lines.flatMap((line) => line.points);
  const svg = el("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, tabindex: 0, role: "img",
    "aria-label": `${panel.title} over steps. Left and right read values; Enter shows the rollouts of a step.` });
  if (!points.length) return svg;
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  const [x0, x1] = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
  let [y0, y1] = [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))];
  if (y0 > 0 && y0 < y1 / 2) y0 = 0;
  if (y0 === y1) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  const x = (at) => BOX.left + (x1 === x0 ? 0.5 : (at - x0) / (x1 - x0)) * (BOX.width - BOX.left - BOX.right);
  const y = (at) => BOX.height - BOX.bottom - ((at - y0) / (y1 - y0)) * (BOX.height - BOX.top - BOX.bottom);
  for (const at of ticks(y0, y1, 4)) {
    svg.append(el("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: y(at), y2: y(at) }),
      el("text", { x: BOX.left - 4, y: y(at) + 3, "text-anchor": "end" }, String(at)));
  }
  for (const at of ticks(x0, x1, 5, 1)) {
    svg.append(el("text", { x: x(at), y: BOX.height - 6, "text-anchor": "middle" }, String(at)));
  }
  for (const line of lines) {
    const path = line.points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    const dot = line.points.length === 1;  // a path of one point has no length, but a round end
    svg.append(el("path", { class: "curve", d: dot ? `${path}h0` : path, "stroke-width": dot ? 5 : 1.6, stroke: colourOf(panel.lines, line), "stroke-dasharray": dashOf(line),
      "stroke-linecap": "round" }));
  }
  svg.at = { steps: [...new Set(xs)].sort((a, b) => a - b), x, lines };
  return svg;
}

function panelOf(panel) {
  let svg = chart(panel), chosen = -1;
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const runs = state.info.runs.length > 1;
  const read = (index) => {
    if (!svg.at) return;
    chosen = Math.max(0, Math.min(svg.at.steps.length - 1, index));
    const step = svg.at.steps[chosen];
    const values = svg.at.lines.flatMap((line) => line.points.filter((point) => point[0] === step)
      .map((point) => `${runs ? `${state.info.runs[line.run].name} ` : ""}${line.label} ${Number(point[1].toPrecision(3))}`));
    say(readout, `step ${step}: ${values.join(", ")}`);
    svg.querySelector(".cursor")?.remove();
    svg.append(el("line", { class: "cursor", x1: svg.at.x(step), x2: svg.at.x(step), y1: BOX.top,
      y2: BOX.height - BOX.bottom }));
  };
  const open = () => {  // a metric of step s is a mean over what was logged since the one before it
    if (chosen < 0) return;
    const steps = svg.at.steps;
    const mode = panel.mode === "eval_" ? "eval" : "train";
    const [from, to] = [mode === "train" && chosen ? steps[chosen - 1] + 1 : mode === "train" ? 0 : steps[chosen], steps[chosen]];
    const run = svg.at.lines[0].run;
    location.hash = hashOf("rollouts", { ...(run && { run }), step_from: from, step_to: to, mode });
  };
  const listen = () => {
    svg.addEventListener("pointermove", (event) => {
      if (!svg.at) return;
      const box = svg.getBoundingClientRect(), place = ((event.clientX - box.left) / box.width) * BOX.width;
      const near = svg.at.steps.map((step, i) => [Math.abs(svg.at.x(step) - place), i]).sort((a, b) => a[0] - b[0])[0];
      read(near[1]);
    });
    svg.addEventListener("click", open);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "ArrowRight") read(chosen + 1);
      else if (event.key === "ArrowLeft") read(chosen - 1);
      else if (event.key === "Enter") open();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  };
  const labels = [...new Set(panel.lines.map((line) => line.label))];
  const key = (label) => el("button", {
    type: "button", "aria-pressed": String(!state.hiddenLines.has(`${panel.title}/${label}`)),
    onclick: (event) => {
      const name = `${panel.title}/${label}`;
      if (!state.hiddenLines.delete(name)) state.hiddenLines.add(name);
      event.currentTarget.setAttribute("aria-pressed", String(!state.hiddenLines.has(name)));
      const fresh = chart(panel);
      svg.replaceWith(fresh);
      svg = fresh;
      chosen = -1;
      listen();
    } },
  el("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" },
    el("line", { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 3, stroke: colourOf(panel.lines, { label }) })), ` ${label}`);
  listen();
  return el("section", { class: "panel" }, el("h2", {}, panel.title), svg, readout,
    el("div", { class: "keys" }, labels.map(key)));
}

// Two runs side by side: the last value of each curve, and the settings that differ.
function compared({ panels, differences }, runs) {
  const last = (panel, label, run) => panel.lines.find((line) => line.label === label && line.run === run)?.points.at(-1);
  const value = (point) => (point ? `${Number(point[1].toPrecision(3))} (step ${point[0]})` : "-");
  const rows = panels.flatMap((panel) => [...new Set(panel.lines.map((line) => line.label))]
    .map((label) => [`${panel.title}: ${label}`, ...runs.map((_, run) => value(last(panel, label, run)))]));
  const table = (name, lines) => el("table", { "aria-label": name }, el("thead", {}, el("tr", {}, [name, ...runs.map((run) => run.name)].map((text) => el("th", {}, text)))),
    el("tbody", {}, lines.map((line) => el("tr", {}, line.map((text) => el("td", {}, String(text)))))));
  return el("details", { class: "compared", open: true }, el("summary", {}, "Side by side"), table("last values", rows),
    differences === null ? el("p", { class: "soft" }, "The settings of one of them are not known: they are written with a checkpoint, and at the end of a run.")
      : differences.length ? table("settings that differ", differences) : el("p", { class: "soft" }, "Their settings are the same."));
}

async function showCurves() {
  const panels = await source.panels();
  const runs = state.info.runs;
  return [
    panels.note && el("p", { class: "note" }, panels.note),
    runs.length > 1 && el("p", { class: "soft" }, `solid: ${runs[0].name}, dashed: ${runs[1].name}`),
    runs.length > 1 && compared(panels, runs),
    panels.panels.length ? el("div", { class: "panels" }, panels.panels.map(panelOf))
      : el("p", { class: "soft" }, "Nothing was logged yet."),
  ];
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. The table of rollouts
// ---------------------------------------------------------------------------------------------------------------------

const COLUMNS = [["step", "step", "number"], ["", "group", "number wide"], ["reward", "reward", "number"],
  ["", "ended by", ""], ["turns", "turns", "number wide"], ["tokens", "tokens", "number wide"],
  ["seconds", "seconds", "number wide"], ["", "tools", "wide"], ["", "errors", ""], ["", "prompt", ""]];
const conversationHash = (kind, run, id, colour = state.colour) => `#${kind}/${run}/${id}${colour === "advantage" ? "" : `?colour=${colour}`}`;
const hashOf = (view, query) => `#${view}?${new URLSearchParams(Object.entries(query).filter(([, v]) => v !== "" && v !== undefined))}`;

function filters(query) {
  const info = state.info.runs[Number(query.run || 0)];
  const choice = (name, label, values, all) => el("label", {}, label, el("select", { name },
    all && el("option", { value: "" }, all),
    values.map(([value, text]) => el("option", { value, selected: String(query[name] ?? "") === String(value) }, text))));
  const same = (values) => values.map((value) => [value, value]);
  const field = (name, label, type = "number", more = {}) => el("label", {}, label,
    el("input", { name, type, value: query[name] ?? "", step: "any", ...more }));
  const send = (event) => {
    event.preventDefault();
    const form = event.currentTarget.closest("form");
    const { run, sort, descending } = { ...query };
    location.hash = hashOf("rollouts", { run, sort, descending, ...Object.fromEntries(new FormData(form)) });
  };
  const form = el("form", { onsubmit: send, onchange: send, role: "search", "aria-label": "Filters" },
    state.info.runs.length > 1 && choice("run", "run", state.info.runs.map((run, i) => [i, run.name])),
    field("text", "words in it", "search", { placeholder: "of messages, calls, results, answer" }),
    field("prompt", "prompt", "search"),
    field("step_from", "from step"), field("step_to", "to step"),
    info.modes.length > 1 && choice("mode", "of", same(info.modes), "all"),
    choice("reward_name", "reward", [["reward", "weighted sum"], ...info.rewards.map((name) => [name, short(name)])]),
    field("reward_min", "from"), field("reward_max", "to"),
    choice("stop", "ended by", same(info.stops), "all"), choice("tool", "tool", same(info.tools), "all"),
    choice("error", "error", [["any", "any"], ...same(info.errors)], "all"),
    el("button", {}, "Filter"), el("a", { href: hashOf("rollouts", { run: query.run }) }, "clear"));
  const used = Object.entries(query).filter(([name, value]) => value && !["sort", "descending", "offset", "run"].includes(name));
  const open = state.filters ?? (!matchMedia("(max-width: 45rem)").matches || used.length > 0);
  const box = el("details", { class: "filters", open }, el("summary", {}, "Filters"), form);
  box.addEventListener("toggle", () => { state.filters = box.open; });
  return box;
}

function sortHeader([key, label, classes], query) {
  if (!key) return el("th", { class: classes }, label);
  const active = (query.sort || "step") === key, down = query.descending === "true";
  // The first click shows the bad ones first: low rewards, and many turns, tokens, seconds.
  const next = { ...query, sort: key, descending: String(active ? !down : key !== "reward" && key !== "step"), offset: "" };
  return el("th", { class: classes, "aria-sort": active ? (down ? "descending" : "ascending") : null },
    el("button", { type: "button", onclick: () => { location.hash = hashOf("rollouts", next); } },
      label + (active ? (down ? " ▾" : " ▴") : "")));
}

function line(item, run) {
  const href = conversationHash("rollout", run, item.id);
  const cells = [
    [el("a", { href }, String(item.step)), item.mode === "train" ? null : ` ${item.mode}`],
    [item.team.split("/").pop().slice(0, 6)], [number(item.reward)], [item.stop], [item.turns], [item.tokens],
    [number(item.seconds, 1)], [item.tools.join(", ")],
    item.errors.map((error) => [el("span", { class: "tag error" }, error), " "]),
    [el("span", { class: "prompt" }, item.prompt.slice(0, 160))],
  ];
  return el("tr", { onclick: (event) => { if (!event.target.closest("a")) location.hash = href; } },
    cells.map((cell, i) => el("td", { class: COLUMNS[i][2] }, cell.map((part) => (typeof part === "number" ? String(part) : part)))));
}

// What "back", "next" and "previous" mean, also behind a reload. (Files may have no storage.)
function remember(place) {
  state.place = place;
  try { sessionStorage.setItem("place", JSON.stringify(place)); } catch { /* without it a reload forgets */ }
}

async function showTable(query) {
  const run = state.info.runs[Number(query.run || 0)] ? Number(query.run || 0) : 0;
  query = { ...query, run: run || undefined };
  const first = Number(query.offset || 0), limit = 50;
  let answer;
  try {
    answer = await source.table({ ...query, limit });
  } catch (error) {
    return [filters(query), el("p", { class: "note", role: "alert" }, error.message)];
  }
  const { total, rows } = answer;
  remember({ run, query, list: rows.map((item) => item.id), last: first + rows.length >= total });
  const page = (offset, label) => el("button", { type: "button", disabled: offset < 0 || offset >= total || null,
    onclick: () => { location.hash = hashOf("rollouts", { ...query, offset: String(offset) }); } }, label);
  return [
    filters(query),
    el("div", { class: "bar" }, page(first - limit, "◂ before"), page(first + limit, "next ▸"),
      el("span", { class: "soft", id: "count" },
        rows.length ? `${first + 1} to ${first + rows.length} of ${total.toLocaleString("en")} rollouts` : "no rollout is like that")),
    el("table", { "aria-label": "Rollouts" }, el("thead", {}, el("tr", {}, COLUMNS.map((column) => sortHeader(column, query)))),
      el("tbody", {}, rows.map((item) => line(item, run)))),
  ];
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Conversations
// ---------------------------------------------------------------------------------------------------------------------

// What tokens can be coloured by: the value of a token, and the one of a turn where the log has no tokens.
const COLOURS = {
  none: null,
  advantage: { token: (turn, i) => turn.advantages?.[i], turn: (row, k) => row.turn_advantages?.[k],
    trained: true, plus: "0, 110, 230", minus: "235, 125, 0" },
  logprob: { token: (turn, i) => turn.logprobs?.[i], turn: (row, k) => row.turns[k].mean_logprob,
    plus: "0, 110, 230", minus: "150, 70, 220" },
  difference: { token: (turn, i) => difference(turn, i), turn: () => null, plus: "0, 140, 110", minus: "220, 40, 90" },
};

// The logprob that the trainer computes minus the one it was sampled with.
function difference(turn, i) {
  const [sampled, computed] = [turn.logprobs?.[i], turn.trainer_logprobs?.[i]];
  return typeof sampled === "number" && typeof computed === "number" ? computed - sampled : null;
}

const hasTokens = (item) => item.row.turns.some((turn) => Array.isArray(turn.token_texts));

function scaleOf(items, colour) {
  if (!colour) return 0;
  const values = items.flatMap((item) => item.row.turns.flatMap((turn, k) => (turn.token_texts
    ? turn.token_texts.map((_, i) => (colour.trained && turn.loss_mask?.[i] === 0 ? null : colour.token(turn, i)))
    : [colour.turn(item.row, k)])));
  return values.reduce((most, value) => (typeof value === "number" ? Math.max(most, Math.abs(value)) : most), 0);
}

function paint(colour, value, scale) {
  if (!colour || typeof value !== "number" || !scale || !value) return null;
  return `rgba(${value > 0 ? colour.plus : colour.minus}, ${(0.65 * Math.abs(value) / scale).toFixed(3)})`;
}

function legend(colour, scale, name) {
  if (!colour) return null;
  if (!scale) return el("span", { class: "soft", id: "scale" }, name === "difference"
    ? "No difference is known: it needs log_rollout_tokens, and a backend that gives logprobs." : `No ${name} is known, or all are 0.`);
  const [low, high] = name === "logprob" ? [-scale, 0] : [-scale, scale];
  return el("span", { class: "scale", id: "scale" }, el("i", { background:
    `linear-gradient(90deg, ${[low, (low + high) / 2, high].map((at) => paint(colour, at, scale) || "transparent").join(", ")})` }),
  [low, high].map((end) => el("b", {}, end && Math.abs(end) < 0.01 ? end.toExponential(1) : signed(end))));
}

function tokenNumbers(turn, i) {
  return [`token ${turn.token_ids?.[i] ?? "?"}`, turn.loss_mask?.[i] === 0 ? "out of the loss" : `advantage ${signed(turn.advantages?.[i], 4)}`,
    `logprob ${number(turn.logprobs?.[i], 4)}`, `the trainer's ${number(turn.trainer_logprobs?.[i], 4)}`,
    `difference ${number(difference(turn, i), 6)}`].join(", ");
}

// INVARIANT: one span of class `t` per token, and of class `out` if and only if it is out of the loss.
function tokenSpans(turn, colour, scale) {
  return turn.token_texts.map((text, i) => {
    const out = turn.loss_mask?.[i] === 0;
    const value = colour && !(colour.trained && out) ? colour.token(turn, i) : null;
    return el("span", { class: out ? "t out" : "t", title: tokenNumbers(turn, i), background: paint(colour, value, scale) },
      visible(text));
  });
}

function readSpans(turn) {
  return turn.read_texts.map((text, i) => el("span",
    { class: "t out", title: `token ${turn.read_ids?.[i] ?? "?"}, read, out of the loss` }, visible(text)));
}

function tokenTable(turn) {
  const box = el("details", {}, el("summary", { class: "small soft" }, `${turn.token_texts.length} tokens as a table`));
  box.addEventListener("toggle", () => {
    if (!box.open || box.querySelector("table")) return;
    const rows = turn.token_texts.map((text, i) => [visible(text), turn.token_ids?.[i] ?? "-", turn.loss_mask?.[i] === 0 ? "no" : "yes",
      signed(turn.advantages?.[i], 4), number(turn.logprobs?.[i], 4), number(turn.trainer_logprobs?.[i], 4), number(difference(turn, i), 6)]);
    box.append(el("div", { class: "tokens-table" }, el("table", {}, el("tr", {}, ["token", "id", "in the loss", "advantage", "logprob",
      "the trainer's", "difference"].map((text) => el("th", {}, text))),
    rows.map((row) => el("tr", {}, row.map((text) => el("td", { class: "mono" }, String(text))))))));
  });
  return box;
}

// An advantage, and what of it the outcome alone gives; the rest is the turn's.
function advantageText(row, k) {
  const whole = row.turn_advantages?.length > k ? row.turn_advantages[k] : null, outcome = row.outcome_advantage;
  if (typeof whole !== "number") return null;
  return `advantage ${signed(whole)}${typeof outcome === "number" ? ` = outcome ${signed(outcome)}, turn ${signed(whole - outcome)}` : ""}`;
}

function part(kind, who, facts, ...inside) {
  return el("div", { class: `part ${kind}` }, el("div", { class: "who" }, el("b", {}, who),
    facts.filter(Boolean).map((fact) => el("span", {}, fact))), inside);
}

const seconds = (value) => (value ? `${number(value, 2)} s` : null);

// A text that the model read, with the images that it read there: the log names each by a digest, and has it in a file.
// INVARIANT: what the policy wrote is shown as text alone, also where it is such a name.
function readText(item, text) {
  return [el("pre", {}, textOf(text)), readImages(item, text)];
}

function readImages(item, text) {
  const known = new Map((item.row.images || []).map((image) => [image.name, image]));
  const shown = [...textOf(text).matchAll(/<image ([0-9a-f]{12})>/g)].map((found) => known.get(found[1])).filter(Boolean);
  return shown.map(({ name, width, height, tokens }) => {
    const source = DATA.served ? `/api/image/${Number(item.run)}/${name}` : DATA.images?.[name];
    const words = `image ${name}, ${Number(width)} x ${Number(height)} pixels, ${Number(tokens)} tokens`;
    return source && el("figure", {}, el("img", { src: source, alt: words, width: Math.min(Number(width), 320), loading: "lazy",
      onerror: (event) => event.target.remove() }), el("figcaption", { class: "small soft" }, words));
  });
}

// What the model read before a turn that begins a further record of the loss: of a sub-agent, of a history that was edited.
function contextParts(item, turn) {
  const read = Array.isArray(turn.context) ? turn.context.filter(Boolean) : [];
  const messages = read.map((message) => part("given", message.role, [],
    readText(item, message.content), message.more && el("pre", { class: "small soft" }, textOf(message.more))));
  const tools = turn.tools && part("given", "tools", [], el("pre", {}, textOf(turn.tools)));
  if (!messages.length && !tools) return [];
  const title = turn.context ? `record ${turn.record}: ${messages.length} messages that were read before this turn` : "the tools that were offered";
  return [el("details", {}, el("summary", { class: "small soft" }, title), messages, tools)];
}

function turnParts(item, k, colour, scale) {
  return [...contextParts(item, item.row.turns[k]), ...sampledParts(item, k, colour, scale)];
}

function sampledParts(item, k, colour, scale) {
  const { row } = item, turn = row.turns[k];
  // Behind a turn that was followed by another they were read, also where a further record begins with them.
  const unread = k === row.turns.length - 1 && turn.results?.length > 0 && turn.num_read === 0 && !turn.observation && "never read: the rollout ended";
  const results = (whole) => (turn.results || []).map((result) => part(result.error ? "error" : "result", "result",
    [result.error && `error: ${result.error}`, seconds(result.seconds), unread,
      typeof result.reward === "number" && `reward ${number(result.reward)}`], whole && readText(item, result.text)));
  // A call of a tool that is not there, or with a wrong argument, has its error in its result.
  const calls = (whole) => (turn.calls || []).map((call, i) => part(call.error || turn.results?.[i]?.error === "call" ? "error" : "call", `call ${call.name ?? "without a name"}`,
    [call.error, !call.error && turn.results?.[i]?.error === "call" && "it cannot be run"], whole && el("pre", {}, textOf(call.arguments))));
  const facts = [row.records > 1 && Number.isInteger(turn.record) && `record ${turn.record}`,
    Number.isInteger(turn.after) && turn.after !== k - 1 && `goes on from turn ${turn.after}`,
    `${turn.num_tokens ?? "?"} tokens`, seconds(turn.seconds), turn.finish_reason === "length" && "cut off",
    advantageText(row, k),
    typeof row.turn_rewards?.[k] === "number" && `turn reward ${number(row.turn_rewards[k])}`,
    typeof turn.reward === "number" && `the environment's ${number(turn.reward)}`,
    typeof turn.mean_logprob === "number" && `logprob ${number(turn.mean_logprob)}, least ${number(turn.min_logprob)}`,
    turn.policy_versions?.length === 2 && turn.policy_versions[0] !== turn.policy_versions[1]
      && `weights ${turn.policy_versions[0]} to ${turn.policy_versions[1]}`,
    turn.num_trained === 0 && "out of the loss"];
  if (colour && turn.token_texts) {
    return [
      part("policy", `policy, turn ${k}`, facts, el("div", { class: "mono" }, tokenSpans(turn, colour, scale)), tokenTable(turn)),
      calls(false), results(false),
      turn.read_texts?.length > 0 && part("result", "read", [`${turn.read_texts.length} tokens`, "out of the loss"],
        el("div", { class: "mono" }, readSpans(turn)), (turn.results || []).map((result) => readImages(item, result.text))),
    ];
  }
  const text = el("pre", { background: paint(colour, colour?.turn(row, k), scale) }, turn.text);
  return [
    part("policy", `policy, turn ${k}`, facts, text),
    calls(true), results(true),
    turn.observation && part("result", "read", [], readText(item, turn.observation)),
  ];
}

function about(item, brief) {
  const { row } = item;
  const answer = Array.isArray(row.answer) ? row.answer.join(" | ") : row.answer;
  const given = ([name, value]) => value !== null || !["environment", "tool"].includes(name);  // which may give none
  const rewards = Object.entries(row.rewards || {}).filter(given).map(([name, value]) => `${short(name)} ${number(value)}`).join(", ");
  return definitions([["reward", number(item.reward)],
    rewards && ["functions", `${rewards} (without their weights)`], ["ended by", item.stop],
    !brief && answer !== null && answer !== undefined && ["gold answer", typeof answer === "object" ? JSON.stringify(answer) : answer],
    row.error && ["error", row.error],
    !brief && ["place", `step ${item.step}, ${item.mode}, rollout ${item.number} of rank ${item.rank}${item.attempt ? `, attempt or batch ${item.attempt + 1}` : ""}`],
    !brief && ["tokens", `${row.num_prompt_tokens ?? "?"} of the prompt, ${item.tokens} behind it, in ${row.records ?? 1} ${row.records > 1 ? "rows" : "row"} of the loss`],
    !brief && ["weights", `version ${item.version}`]].filter(Boolean));
}

// How many messages stand before the first turn, as scripts/viewer/rows.py counts them.
function promptLength({ messages, turns, num_prompt_messages: logged }) {
  if (Number.isInteger(logged)) return logged;
  const said = messages.flatMap((message, m) => (message?.role === "assistant" ? [m] : []));
  const text = turns[0]?.text;
  if (text === undefined) return messages.length;
  return said.find((m) => messages[m].content === text) ?? said[0] ?? messages.length;
}

const SHOWN_OF_A_PROMPT = 5;  // messages; of more, those before the question are folded: examples, or a history

function promptParts(item) {
  const given = item.row.messages.slice(0, promptLength(item.row)).filter(Boolean);
  const parts = given.map((message) => part("given", message.role, [], message.role === "system"
    ? el("details", {}, el("summary", { class: "small soft" }, textOf(message.content).slice(0, 80)), el("pre", {}, textOf(message.content)))
    : message.role === "assistant" ? el("pre", {}, textOf(message.content)) : readText(item, message.content)));
  const asked = given.findLastIndex((message) => message.role === "user");
  const instructions = given.findIndex((message) => !["system", "developer"].includes(message.role));
  if (parts.length <= SHOWN_OF_A_PROMPT || asked <= instructions) return parts;
  const folded = parts.slice(instructions, asked);
  return [...parts.slice(0, instructions), el("details", {}, el("summary", { class: "small soft" }, `${folded.length} messages of the prompt before the question, such as examples`), folded), ...parts.slice(asked)];
}

// A group on one screen: a line for each rollout, a cell for each turn with its advantage.
function overview(items, colour) {
  const most = Math.max(...items.map((item) => item.row.turns.length)), scale = scaleOf(items.map(withoutTokens), COLOURS.advantage);
  const cell = (item, k) => el("td", { class: "number", title: advantageText(item.row, k),
    background: colour && paint(COLOURS.advantage, item.row.turn_advantages?.[k], scale) }, item.row.turns[k] ? signed(item.row.turn_advantages?.[k]) : "");
  const jump = (item) => el("button", { type: "button", class: "plain", onclick: () => document.getElementById(`r${item.id}`).scrollIntoView({ block: "start" }) }, String(item.number));
  return el("table", { class: "overview", "aria-label": "The group" }, el("thead", {}, el("tr", {},
    ["rollout", "reward", "ended by", ...Array.from({ length: Math.min(most, 12) }, (_, k) => `turn ${k}`), ...(most > 12 ? [`${most - 12} more`] : [])].map((text, i) => el("th", { class: i === 1 || i > 2 ? "number" : "" }, text)))),
  el("tbody", {}, items.map((item) => el("tr", {}, el("td", {}, jump(item)), el("td", { class: "number" }, number(item.reward)), el("td", {}, item.stop),
    Array.from({ length: Math.min(most, 12) }, (_, k) => cell(item, k))))));
}

const withoutTokens = (item) => ({ row: { ...item.row, turns: item.row.turns.map(() => ({})) } });

// The rollouts of the same prompt in another run: of the group whose step is nearest.
async function sameIn(run, item) {
  // From its step on and back from it: a run may have more rollouts of a prompt than one answer has room for.
  const wanted = { run, prompt: item.prompt.slice(0, 1000), mode: item.mode, limit: 200 };
  const found = await Promise.all([{ step_from: item.step }, { step_to: item.step, descending: "true" }].map((part) => source.table({ ...wanted, ...part })));
  const same = found.flatMap((each) => each.rows).filter((other) => other.prompt === item.prompt).sort((a, b) => Math.abs(a.step - item.step) - Math.abs(b.step - item.step));
  return same.length ? byReward(await source.group(run, same[0].id)) : [];
}

const byReward = (items) => [...items].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.number - b.number);

function conversation(item, title, colour, scale, withPrompt) {
  const fields = el("details", {}, el("summary", { class: "small soft" }, "all fields"));
  fields.addEventListener("toggle", () => {
    if (fields.open && !fields.querySelector("pre")) fields.append(el("pre", {}, JSON.stringify(item.row, null, 1)));
  });
  return el("article", { id: `r${item.id}` }, el("h2", {}, title), about(item, !withPrompt), withPrompt && promptParts(item),
    item.row.turns.map((_, k) => turnParts(item, k, colour, scale)), fields);
}

async function showConversations(kind, run, id) {
  const items = (kind === "rollout" ? [await source.rollout(run, id)] : byReward(await source.group(run, id)))
    .map((item) => ({ ...item, run }));
  const other = 1 - run, runs = state.info.runs;
  const others = (kind === "both" ? await sameIn(other, items[0]) : []).map((item) => ({ ...item, run: other }));
  const name = state.colour, colour = COLOURS[name], scale = scaleOf([...items, ...others], colour);
  const known = state.place?.run === run ? state.place : { list: [], query: { run: run || undefined }, last: true };
  const at = known.list.indexOf(Number(id));
  const go = (to, label, key) => (to === undefined ? null : el("a", { href: conversationHash("rollout", run, to), "data-key": key }, label));
  const end = at >= 0 && at === known.list.length - 1 && !known.last && el("span", { class: "soft" }, "the last of its page");
  const chosen = el("div", { class: "readout", "aria-live": "polite" });
  const buttons = Object.keys(COLOURS).map((each) => el("button", { type: "button", "aria-pressed": String(each === name),
    disabled: each !== "none" && !scaleOf([...items, ...others], COLOURS[each]), "data-colour": each,
    title: each !== "none" && !scaleOf([...items, ...others], COLOURS[each]) && "The log has none here, or all are 0.",
    onclick: () => { location.hash = conversationHash(kind, run, id, each); } }, each));
  const pick = (event) => {  // a finger has no pointer that hovers
    const token = event.target.closest(".t");
    if (!token) return;
    main.querySelector(".t.chosen")?.classList.remove("chosen");
    token.classList.add("chosen");
    say(chosen, `${token.textContent.slice(0, 40)}: ${token.title}`);
  };
  const bar = el("div", { class: "bar" },
    !DATA.only && el("a", { href: hashOf("rollouts", known.query), "data-key": "Escape" }, "◂ rollouts"),
    kind === "rollout" && go(known.list[at - 1], "previous", "p"),
    kind === "rollout" && go(at < 0 ? undefined : known.list[at + 1], "next", "n"), kind === "rollout" && end,
    kind === "rollout" ? el("a", { href: conversationHash("group", run, id), "data-key": "g" }, "its group side by side")
      : !DATA.only && el("a", { href: conversationHash("rollout", run, id), "data-key": "g" }, "one of them"),
    runs.length > 1 && kind !== "both" && el("a", { href: conversationHash("both", run, id) }, `the same prompt in ${runs[other].name}`),
    el("span", { class: "soft" }, "colour by"), buttons, legend(colour, scale, name));
  const hint = colour && scale > 0 && !items.every(hasTokens) && el("p", { class: "soft small" },
    "The log has no tokens, so a turn has one colour: log_rollout_tokens: true gives one to each token.");
  const struck = colour && items.some(hasTokens) && el("p", { class: "soft small" },
    "Grey text: not sampled by the policy, or masked, and so out of the loss. Hold the pointer over a token, or tap it, for its numbers.");
  const title = (item) => (kind === "rollout" ? `step ${item.step}, rollout ${item.number}` : `rollout ${item.number}`);
  const articles = (of) => el("div", { class: kind === "rollout" ? "" : "side", onclick: pick },
    of.map((item) => conversation(item, title(item), colour, scale, kind === "rollout")));
  if (kind === "rollout") return [bar, hint, struck, chosen, articles(items)];
  const size = items[0].row.group_size;
  const head = (of, name) => el("h2", {}, `${name}step ${of[0].step}: ${of.length}${size > of.length ? ` of ${size}` : ""} rollouts${size > of.length ? " were logged" : ""}, the best first`);
  const gold = items[0].row.answer ?? null;
  const shared = el("article", {}, promptParts(items[0]), gold !== null && definitions([["gold answer", textOf(Array.isArray(gold) ? gold.join(" | ") : gold)]]));
  const group = (of, name) => [head(of, name), overview(of, colour), articles(of)];
  return [bar, hint, struck, chosen, shared, ...group(items, kind === "both" ? `${runs[run].name}, ` : ""),
    ...(kind !== "both" ? [] : others.length ? group(others, `${runs[other].name}, `)
      : [el("p", { class: "note" }, `The log of ${runs[other].name} has no rollout of this prompt.`)])];
}

// ---------------------------------------------------------------------------------------------------------------------
// The page
// ---------------------------------------------------------------------------------------------------------------------

const KEYS = [["/", "search"], ["j, k", "down and up in the table"], ["Enter", "open"], ["n, p", "next and previous rollout"],
  ["g", "its group, and back"], ["c", "the next colour"], ["Esc", "back to the table"], ["1, 2", "curves, rollouts"], ["?", "this list"]];
const help = el("dialog", { "aria-label": "Keys" }, el("h2", {}, "Keys"),
  el("dl", {}, KEYS.map(([key, text]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, text)])),
  el("form", { method: "dialog" }, el("button", {}, "Close")));
const follow = el("input", { type: "checkbox", id: "follow", checked: true });
const counts = el("span", { class: "soft", id: "total" });
const problems = el("div", { id: "notes" });
const links = [["curves", "Curves"], ["rollouts", "Rollouts"]].map(([view, text]) => el("a", { href: `#${view}`, "data-view": view }, text));

function header() {
  const runs = state.info.runs;
  say(counts, runs.map((run) => run.which || `${run.count.toLocaleString("en")}${run.sampled > run.count ? ` of ${run.sampled.toLocaleString("en")}` : ""} rollouts${run.sampled > run.count ? " were logged" : ""}, step ${run.steps[0] ?? "-"} to ${run.steps[1] ?? "-"}`).join("; "));
  const notes = [...(DATA.notes || []), ...runs.flatMap((run) => run.notes.map((note) => (runs.length > 1 ? `${run.name}: ${note}` : note)))];
  problems.replaceChildren(...notes.map((note) => el("p", { class: "note" }, note)));
}

function place() {
  const [path, search] = (location.hash.slice(1) || DATA.start || "curves").split("?");
  return { parts: path.split("/"), query: Object.fromEntries(new URLSearchParams(search || "")) };
}

const lastTable = () => hashOf("rollouts", state.place?.query || {});

// An element of a view as it is found again when the view is drawn anew, so that the keyboard stays where it was.
function trace(node) {
  if (!main.contains(node)) return null;
  const name = node.getAttribute("name"), href = node.getAttribute("href"), text = node.textContent;
  return () => [...main.querySelectorAll(node.tagName)].find((other) => (name ? other.name === name
    : href ? other.getAttribute("href") === href : other.textContent.replace(/ [▾▴]$/, "") === text.replace(/ [▾▴]$/, "")));
}

async function show() {
  const { parts: [view, run, id], query } = place();
  if (["rollout", "group", "both"].includes(view)) state.colour = Object.hasOwn(COLOURS, query.colour ?? "") ? query.colour : "advantage";
  const mine = ++state.view, found = trace(document.activeElement);
  links.forEach((link) => {
    const here = link.dataset.view === (view === "curves" ? "curves" : "rollouts");
    if (here) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  });
  let content;
  try {
    content = view === "rollouts" ? await showTable(query)
      : ["rollout", "group", "both"].includes(view) ? await showConversations(view, Number(run), Number(id)) : await showCurves();
  } catch (error) {
    content = [el("p", { class: "note", role: "alert" }, error.message)];
  }
  if (mine !== state.view) return;  // a later view is there
  main.replaceChildren(...content.flat().filter(Boolean));
  const kind = location.hash.split("?")[0];
  if (kind !== state.shown) scrollTo(0, 0);
  state.shown = kind;
  links[1].href = lastTable();
  const again = state.search ? main.querySelector("input[name=text]") : found?.();
  state.search = false;
  again?.focus({ preventScroll: true });
  again?.closest("tbody tr")?.setAttribute("aria-selected", "true");
}

async function look() {  // whether a running job has added rollouts
  if (document.hidden) return;
  const now = () => state.info.runs.map((run) => `${run.last} ${run.metrics} ${run.generation}`).join();
  const generations = () => state.info.runs.map((run) => run.generation).join();
  const before = now(), generation = generations();
  try {
    state.info = await source.info();
  } catch {
    say(counts, "The viewer's program has ended.");
    return;
  }
  header();
  const { parts: [view], query } = place();
  if (generations() !== generation && ["rollout", "group", "both"].includes(view)) {  // another run began in the folder
    location.hash = "rollouts";
    return;
  }
  const busy = main.contains(document.activeElement) && document.activeElement.matches("input, select, svg");
  if (follow.checked && !busy && now() !== before
      && (view === "curves" || (view === "rollouts" && !query.offset))) await show();
}

function move(by) {
  const rows = [...main.querySelectorAll("tbody tr")];
  if (!rows.length) return;
  const now = rows.findIndex((row) => row.getAttribute("aria-selected") === "true");
  const next = Math.max(0, Math.min(rows.length - 1, now + by));
  rows[now]?.removeAttribute("aria-selected");
  rows[next].setAttribute("aria-selected", "true");
  rows[next].querySelector("a").focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key !== "Escape") return;
    event.preventDefault();  // a search field would be emptied
    event.target.blur();
    return;
  }
  const names = Object.keys(COLOURS);
  const link = main.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (link) link.click();
  else if (event.key === "/" && !DATA.only) {
    state.search = true;
    state.filters = true;
    if (place().parts[0] === "rollouts") show(); else location.hash = lastTable();
  } else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "c" && main.querySelector("article")) {
    const usable = names.filter((name) => !main.querySelector(`[data-colour="${name}"]`).disabled);
    main.querySelector(`[data-colour="${usable[(usable.indexOf(state.colour) + 1) % usable.length]}"]`).click();
  } else if (event.key === "1" && !DATA.only) location.hash = "curves";
  else if (event.key === "2" && !DATA.only) location.hash = lastTable();
  else if (event.key === "?") help.showModal();
  else return;
  event.preventDefault();
});

(async () => {
  state.info = await source.info();
  try { state.place = JSON.parse(sessionStorage.getItem("place")); } catch { /* as in `remember` */ }
  const title = DATA.title || state.info.runs.map((run) => run.name).join(" and ");
  document.body.append(el("header", {}, el("h1", {}, title), counts,
    DATA.served && el("label", { class: "small" }, follow, " follow the run"),
    el("button", { type: "button", onclick: () => help.showModal(), "aria-label": "Keys" }, "?")),
  ...(DATA.about ? [definitions(DATA.about)] : []), problems,
  DATA.only ? "" : el("nav", { "aria-label": "Views" }, links), main, help);
  header();
  window.addEventListener("hashchange", show);
  await show();
  if (DATA.served) setInterval(look, 3000);
})();
