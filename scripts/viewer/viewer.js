"use strict";
// The page of scripts/view_rollouts.py, served or in one file. It has six parts: elements, where rollouts come from,
// curves, the list of rollouts, groups and rollouts, the page around them.
// INVARIANT: text of models, tools and data enters the page in `el` or `say` alone: as text, and through `seen`.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = new Set(["svg", "path", "line", "text", "g"]);

// -- 1. Elements --

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
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : seen(child))));
  return node;
}

const say = (node, text) => { node.textContent = seen(text); };

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

// With so many decimals, unless they would show nothing but zeros, or the number is large.
function number(value, digits = 2) {
  if (typeof value !== "number") return "-";
  const size = Math.abs(value), fits = size === 0 || (size >= 0.5 * 10 ** -digits && size < 1e7);
  return fits ? value.toFixed(digits) : brief(value, 2);
}

// To so many digits, as values of curves and of their axes are written.
function brief(value, digits = Math.abs(value) < 1000 ? 4 : 6) {
  const rounded = Number(value.toPrecision(digits)), size = Math.abs(rounded);
  if (size >= 1e9 || (size > 0 && size < 1e-4)) return rounded.toExponential().replace("e+", "e");
  return size >= 1e4 ? rounded.toLocaleString("en") : String(rounded);
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

// -- 2. Where rollouts come from: a server, or this page --

const parameters = (query) => new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));

async function ask(path, query = {}) {
  const response = await fetch(`${path}?${parameters(query)}`);
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
      .every((word) => item.words.includes(word.trimEnd()));
}

const PAGE = {
  info: async () => ({ runs: DATA.runs }),
  panels: async () => DATA.panels,
  table: async (query) => {
    let found = DATA.rollouts.filter((item) => item.run === Number(query.run || 0) && matches(item, query));
    if (query.groups) found = found.filter((item, i) => found.findIndex((other) => other.team === item.team) === i);
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
const state = { info: null, place: {}, filters: undefined, shown: "", colour: "advantage", view: 0 };
const main = el("main");

// -- 3. Curves --

const BOX = { width: 380, height: 190, right: 8, top: 8, bottom: 22 };

function ticks(low, high, count, least = 0) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].find((factor) => factor * power >= rough) * power, least);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, Math.min(20, last - first + 1)) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

const colourOf = (lines, line) => `var(--c${[...new Set(lines.map((each) => each.label))].indexOf(line.label) % 8})`;

function chart(panel) {
  const { lines } = panel, points = lines.flatMap((line) => line.points);
  const svg = el("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, tabindex: 0, role: "img",
    "aria-label": panel.axis ? `${panel.title}. Left and right read values.`
      : `${panel.title} over steps. Left and right read values; Enter shows the rollouts of a step.` });
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  const ends = (values) => [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const [x0, x1] = ends(xs);
  let [y0, y1] = ends(ys);
  if (y0 > 0 && y0 < y1 / 2) y0 = 0;
  const size = Math.max(Math.abs(y0), Math.abs(y1));
  if (y1 - y0 <= 1e-6 * size) [y0, y1] = size ? [y0 - size / 2, y1 + size / 2] : [0, 1];  // a constant, except for rounding
  const labels = ticks(y0, y1, 5).map((at) => [at, brief(at, 12)]);
  const left = Math.max(28, 10 + 6 * Math.max(...labels.map(([, text]) => text.length)));
  const x = (at) => left + (x1 === x0 ? 0.5 : (at - x0) / (x1 - x0)) * (BOX.width - left - BOX.right);
  const y = (at) => BOX.height - BOX.bottom - ((at - y0) / (y1 - y0)) * (BOX.height - BOX.top - BOX.bottom);
  for (const [at, text] of labels) {
    svg.append(el("line", { class: "grid", x1: left, x2: BOX.width - BOX.right, y1: y(at), y2: y(at) }),
      el("text", { x: left - 4, y: y(at) + 3, "text-anchor": "end" }, text));
  }
  for (const at of ticks(x0, x1, 5, 1)) {
    svg.append(el("text", { x: x(at), y: BOX.height - 6, "text-anchor": "middle" }, brief(at, 12)));
  }
  for (const line of lines) {
    const path = line.points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    const dot = line.points.length === 1;  // a path of one point has no length, but a round end
    svg.append(el("path", { class: "curve", d: dot ? `${path}h0` : path, "stroke-width": dot ? 5 : 1.6,
      stroke: colourOf(panel.lines, line), "stroke-dasharray": line.run ? "5 3" : null, "stroke-linecap": "round" }));
  }
  return { svg, steps: [...new Set(xs)].sort((a, b) => a - b), x };
}

function panelOf(panel) {
  const { svg, steps, x } = chart(panel), { lines } = panel, { runs } = state.info;
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  let chosen = -1;
  // Metrics of a training step are means over the rollouts that were sampled since the metrics before: `metrics.jsonl`
  // counts the optimizer step that was just made, the log of rollouts those before it.
  const sampled = () => (panel.mode === "eval_" ? [steps[chosen], steps[chosen]] : [chosen ? steps[chosen - 1] : 0, steps[chosen] - 1]);
  const read = (index) => {
    chosen = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[chosen], [from, to] = sampled();
    const values = lines.flatMap((line) => line.points.filter((point) => point[0] === step)
      .map((point) => `${runs.length > 1 ? `${runs[line.run].name} ` : ""}${line.label} ${brief(point[1])}`));
    const place = { turn: `turn ${step}`, depth: `tokens with 2^${step} or more tokens before them` }[panel.axis]
      || `step ${step} (rollouts of step ${from < to ? `${from} to ${to}` : to})`;
    say(readout, `${place}: ${values.join(", ")}`);
    svg.querySelector(".cursor")?.remove();
    svg.append(el("line", { class: "cursor", x1: x(step), x2: x(step), y1: BOX.top, y2: BOX.height - BOX.bottom }));
  };
  const open = () => {
    if (chosen < 0 || panel.axis) return;
    const run = lines[0].run || undefined, mode = panel.mode === "eval_" ? "eval" : "train", [from, to] = sampled();
    location.hash = hashOf("rollouts", { run, step_from: from, step_to: to, mode });
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), place = ((event.clientX - box.left) / box.width) * BOX.width;
    read(steps.reduce((best, step, i) => (Math.abs(x(step) - place) < Math.abs(x(steps[best]) - place) ? i : best), 0));
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
  const key = (label) => el("span", {}, el("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" },
    el("line", { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 3, stroke: colourOf(panel.lines, { label }) })), ` ${label}`);
  const labels = [...new Set(panel.lines.map((line) => line.label))];
  return el("section", { class: "panel" }, el("h2", {}, panel.title), svg, readout, el("div", { class: "keys" }, labels.map(key)));
}

async function showCurves() {
  const panels = await source.panels(), { runs } = state.info;
  return [
    panels.note && el("p", { class: "note" }, panels.note),
    runs.length > 1 && el("p", { class: "soft" }, `solid: ${runs[0].name}, dashed: ${runs[1].name}`),
    panels.panels.length ? el("div", { class: "panels" }, panels.panels.map(panelOf))
      : el("p", { class: "soft" }, "Nothing was logged yet."),
  ];
}

// -- 4. The list of rollouts --

const COLUMNS = [["step", "step", "number"], ["", "group", "number"], ["number", "rollout", "number"],
  ["reward", "reward", "number"], ["", "stop reason", ""], ["turns", "turns", "number"], ["tokens", "tokens", "number"],
  ["seconds", "seconds", "number"], ["", "tools", ""], ["", "errors", ""], ["", "prompt", ""]];
const conversationHash = (kind, run, id, { colour = state.colour, turn } = {}) =>
  hashOf(`${kind}/${run}/${id}`, { turn, colour: colour === "advantage" ? undefined : colour });
const hashOf = (view, query) => `#${view}?${parameters(query)}`.replace(/\?$/, "");

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
    const { run, sort, descending } = query, chosen = Object.fromEntries(new FormData(event.currentTarget));
    location.hash = hashOf("rollouts", { run, sort, descending, ...chosen });
  };
  const form = el("form", { onsubmit: send, onchange: send, role: "search", "aria-label": "Filters" },
    state.info.runs.length > 1 && choice("run", "run", state.info.runs.map((run, i) => [i, run.name])),
    field("text", "words", "search", { placeholder: "in messages, calls, results" }),
    field("prompt", "prompt", "search"),
    field("step_from", "first step"), field("step_to", "last step"),
    info.modes.length > 1 && choice("mode", "mode", same(info.modes), "all"),
    choice("reward_name", "reward", [["reward", "total"], ...info.rewards.map((name) => [name, short(name)])]),
    field("reward_min", "lowest reward"), field("reward_max", "highest reward"),
    choice("stop", "stop reason", same(info.stops), "all"), choice("tool", "tool", same(info.tools), "all"),
    choice("error", "error", [["any", "any"], ...same(info.errors)], "all"),
    el("button", {}, "Filter"), el("a", { href: hashOf("rollouts", { run: query.run }) }, "clear"));
  return el("details", { class: "filters", open: state.filters ?? true, ontoggle: (event) => { state.filters = event.target.open; } },
    el("summary", {}, "Filters"), form);
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
  const values = [
    [el("a", { href }, item.step), item.mode !== "train" && ` ${item.mode}`],
    groupName(item), item.number, number(item.reward), item.stop, item.turns, item.tokens,
    brief(item.seconds, 3), item.tools.join(", "), item.errors.map((error) => [el("span", { class: "tag" }, error), " "]),
    el("span", { class: "prompt" }, item.prompt.slice(0, 160)),
  ];
  return el("tr", { onclick: (event) => { if (!event.target.closest("a")) location.hash = href; } },
    values.map((value, i) => el("td", { class: COLUMNS[i][2] }, value)));
}

async function showTable(query) {
  const run = state.info.runs[Number(query.run || 0)] ? Number(query.run || 0) : 0;
  query = { ...query, run: run || undefined };
  const first = Number(query.offset || 0), limit = 50;
  const { total, rows } = await source.table({ ...query, limit });
  state.place = query;
  const page = (offset, label) => el("button", { type: "button", disabled: offset < 0 || offset >= total || null,
    onclick: () => { location.hash = hashOf("rollouts", { ...query, offset: String(offset) }); } }, label);
  return [
    filters(query),
    el("div", { class: "bar" }, page(first - limit, "◂ previous"), page(first + limit, "next ▸"),
      el("span", { class: "soft", id: "count" }, rows.length
        ? `${first + 1} to ${first + rows.length} of ${total.toLocaleString("en")} rollouts` : "No rollout matches the filters.")),
    el("table", { "aria-label": "Rollouts" },
      el("thead", {}, el("tr", {}, COLUMNS.map((column) => sortHeader(column, query)))),
      el("tbody", {}, rows.map((item) => line(item, run)))),
  ];
}

// -- 5. Groups and rollouts --

// What tokens can be coloured by: the value of a token, and the value of a turn if the log has no tokens.
// What the tokens of a turn are trained with; none of a turn that is not in the loss.
const trainedAdvantage = (row, k) => (row.turns[k]?.num_trained === 0 ? null : row.turn_advantages?.[k]);
const COLOURS = {
  none: null,
  advantage: { token: (turn, i) => turn.advantages?.[i], turn: (row, k) => trainedAdvantage(row, k),
    trained: true, plus: "0, 110, 230", minus: "235, 125, 0" },
  logprob: { token: (turn, i) => turn.logprobs?.[i], turn: (row, k) => row.turns[k].mean_logprob,
    plus: "0, 110, 230", minus: "150, 70, 220" },
  difference: { token: (turn, i) => difference(turn, i), turn: () => null, plus: "0, 140, 110", minus: "220, 40, 90" },
};

// The logprob that the trainer computes minus the one that the token was sampled with.
function difference(turn, i) {
  const [sampled, computed] = [turn.logprobs?.[i], turn.trainer_logprobs?.[i]];
  return typeof sampled === "number" && typeof computed === "number" ? computed - sampled : null;
}

const hasTokens = (item) => item.row.turns.some((turn) => Array.isArray(turn.token_texts));
const strongest = (values) => values.reduce((most, value) => (typeof value === "number" ? Math.max(most, Math.abs(value)) : most), 0);

function scaleOf(items, colour) {
  return colour ? strongest(items.flatMap((item) => item.row.turns.flatMap((turn, k) => (turn.token_texts
    ? turn.token_texts.map((_, i) => (colour.trained && turn.loss_mask?.[i] === 0 ? null : colour.token(turn, i)))
    : [colour.turn(item.row, k)])))) : 0;
}

function paint(colour, value, scale) {
  if (!colour || typeof value !== "number" || !scale || !value) return null;
  return `rgba(${value > 0 ? colour.plus : colour.minus}, ${(0.65 * Math.abs(value) / scale).toFixed(3)})`;
}

function legend(name, scale) {
  const colour = COLOURS[name];
  if (!colour) return null;
  if (!scale) return el("span", { class: "soft" }, `The log has no ${name} here, or all values are 0.`);
  const [low, high] = name === "logprob" ? [-scale, 0] : [-scale, scale];
  const shades = [low, (low + high) / 2, high].map((at) => paint(colour, at, scale) || "transparent");
  return el("span", { class: "scale" }, el("i", { background: `linear-gradient(90deg, ${shades.join(", ")})` }),
    [low, high].map((end) => el("b", {}, signed(end))));
}

function colourBar(items, kind, run, id) {
  const scales = Object.fromEntries(Object.keys(COLOURS).map((name) => [name, scaleOf(items, COLOURS[name])]));
  const button = (name) => el("button", { type: "button", "aria-pressed": String(name === state.colour), "data-colour": name,
    disabled: name !== "none" && !scales[name], title: name !== "none" && !scales[name] && "The log has no values here, or all are 0.",
    onclick: () => { location.hash = conversationHash(kind, run, id, { colour: name }); } }, name);
  return [el("span", { class: "soft" }, "colour by"), Object.keys(COLOURS).map(button), legend(state.colour, scales[state.colour])];
}

function hints(items) {
  const text = items.some(hasTokens) ? "Grey text is not in the loss. Hold the pointer over a token to read its numbers."
    : "The log has no tokens, so each turn has one colour. With log_rollout_tokens: true each token has its own.";
  return state.colour !== "none" && el("p", { class: "soft small" }, text);
}

// INVARIANT: one span of class `t` per token, and of class `out` if and only if it is not in the loss.
function tokenSpans(turn, colour, scale) {
  return turn.token_texts.map((text, i) => {
    const out = turn.loss_mask?.[i] === 0;
    const value = colour && !(colour.trained && out) ? colour.token(turn, i) : null;
    const title = `id ${turn.token_ids?.[i] ?? "?"}, in the loss ${out ? "no" : "yes"}, `
      + `advantage ${signed(turn.advantages?.[i], 4)}, logprob ${number(turn.logprobs?.[i], 4)}, `
      + `trainer's logprob ${number(turn.trainer_logprobs?.[i], 4)}, difference ${number(difference(turn, i), 6)}`;
    return el("span", { class: out ? "t out" : "t", title, background: paint(colour, value, scale) }, visible(text));
  });
}

// An advantage, what the outcome alone gives of it, and what the turn adds.
function advantageText(row, k) {
  const whole = trainedAdvantage(row, k), outcome = row.outcome_advantage;
  if (typeof whole !== "number") return null;
  return `advantage ${signed(whole)}${typeof outcome === "number" ? ` = outcome ${signed(outcome)}, turn ${signed(whole - outcome)}` : ""}`;
}

function part(kind, who, facts, ...inside) {
  return el("div", { class: `part ${kind}` }, el("div", { class: "who" }, el("b", {}, who),
    facts.filter(Boolean).map((fact) => el("span", {}, fact))), inside);
}

// What is inside, or the function that makes it when it is first opened.
function folded(title, ...inside) {
  const fill = ({ target }) => { if (target.children.length === 1) target.append(inside[0]()); };
  const lazy = typeof inside[0] === "function";
  return el("details", { ontoggle: lazy && fill }, el("summary", { class: "small soft" }, title), lazy ? [] : inside);
}

const seconds = (value) => (value ? `${brief(value, 3)} s` : null);

// (name, value) of a call's arguments; null if they are no JSON object.
function argumentsOf(call) {
  let found = call.arguments;
  try { found = typeof found === "string" ? JSON.parse(found) : found; } catch { /* what the model wrote is shown as text */ }
  return found && typeof found === "object" && !Array.isArray(found) ? Object.entries(found) : null;
}

// A text that the model read, with the images that it read there: the log names each by a digest, and has it in a file.
// INVARIANT: what the policy wrote is shown as text alone, also if it is the name of an image.
function readText(item, text) {
  const known = new Map((item.row.images || []).map((image) => [image.name, image]));
  const shown = [...textOf(text).matchAll(/<image ([0-9a-f]{12})>/g)].map((found) => known.get(found[1])).filter(Boolean);
  return [el("pre", {}, textOf(text)), shown.map(({ name, width, height, tokens }) => {
    const source = DATA.served ? `/api/image/${Number(item.run)}/${name}` : DATA.images?.[name];
    const words = `image ${name}, ${Number(width)} x ${Number(height)} pixels, ${Number(tokens)} tokens`;
    return source && el("figure", {}, el("img", { src: source, alt: words, width: Math.min(Number(width), 320), loading: "lazy",
      onerror: (event) => event.target.remove() }), el("figcaption", { class: "small soft" }, words));
  })];
}

// What the model read before a turn that begins a further record of the loss: of a sub-agent, of a history that was edited.
function contextParts(item, turn) {
  const read = Array.isArray(turn.context) ? turn.context.filter(Boolean) : [];
  const messages = read.map((message) => part("given", message.role, [],
    readText(item, message.content), message.more && el("pre", { class: "small soft" }, textOf(message.more))));
  const tools = turn.tools && part("given", "tools", [], el("pre", {}, textOf(turn.tools)));
  if (!messages.length && !tools) return null;
  const title = `record ${turn.record}: ${messages.length} messages that the model read before this turn`;
  return folded(turn.context ? title : "tools that were offered", messages, tools);
}

function turnParts(item, k, colour, scale) {
  const { row } = item, turn = row.turns[k], results = turn.results || [];
  // If another turn followed, the results were read, also if a further record begins with them.
  const unread = k === row.turns.length - 1 && turn.num_read === 0 && !turn.observation && "not read by the model: the rollout ended";
  const facts = [row.records > 1 && Number.isInteger(turn.record) && `record ${turn.record}`,
    Number.isInteger(turn.after) && turn.after !== k - 1 && `continues turn ${turn.after}`,
    `${turn.num_tokens ?? "?"} tokens`, seconds(turn.seconds), turn.finish_reason === "length" && "truncated",
    advantageText(row, k),
    typeof row.turn_rewards?.[k] === "number" && `turn reward ${number(row.turn_rewards[k])}`,
    typeof turn.reward === "number" && `environment's reward ${number(turn.reward)}`,
    typeof turn.mean_logprob === "number" && `mean logprob ${number(turn.mean_logprob)}, lowest ${number(turn.min_logprob)}`,
    turn.policy_versions?.length === 2 && turn.policy_versions[0] !== turn.policy_versions[1]
      && `policy versions ${turn.policy_versions.join(" to ")}`,
    turn.num_trained === 0 && "not in the loss"];
  // The result of a call that cannot be run says why: an unknown tool, or a wrong argument.
  const call = (each, i) => part(each.error || results[i]?.error === "call" ? "error" : "call", each.name ? `call ${each.name}` : "invalid call",
    [each.error ?? (results[i]?.error === "call" && "invalid call")],
    argumentsOf(each) ? definitions(argumentsOf(each).map(([name, value]) => [name, el("pre", {}, textOf(value))]))
      : el("pre", {}, textOf(each.arguments)));
  const result = (each) => part(each.error ? "error" : "result", "result", [each.error && `error: ${each.error}`, seconds(each.seconds), unread,
    typeof each.reward === "number" && `reward ${number(each.reward)}`], readText(item, each.text));
  const calls = (turn.calls || []).map((each, i) => [call(each, i), results[i] && result(results[i])]);
  const tokens = colour && turn.token_texts;
  return el("section", { id: `r${item.id}t${k}` }, contextParts(item, turn),
    part("policy", `turn ${k}`, facts, tokens ? el("div", { class: "mono" }, tokenSpans(turn, colour, scale))
      : el("pre", { background: paint(colour, colour?.turn(row, k), scale) }, turn.text)),
    calls, results.slice(calls.length).map(result),
    turn.observation && part("result", "observation", [], readText(item, turn.observation)),
    tokens && turn.read_texts?.length > 0 && el("details", { open: DATA.only },
      el("summary", { class: "small soft" }, `${turn.read_texts.length} tokens that the model read after this turn`),
      el("div", { class: "mono" }, turn.read_texts.map((text, i) => el("span",
        { class: "t out", title: `id ${turn.read_ids?.[i] ?? "?"}, read by the model, not in the loss` }, visible(text))))));
}

const groupName = ({ team, attempt }) => team.split("/").pop().slice(0, 6) + (attempt ? ` of batch ${attempt}` : "");
const stepText = (step, mode) => (mode === "train" ? `step ${step}` : `step ${step}, ${mode}`);
const goldAnswer = ({ answer }) => (answer === null || answer === undefined ? null
  : ["gold answer", Array.isArray(answer) ? answer.map(textOf).join(" | ") : textOf(answer)]);

function countText(count, all) {
  const [logged, sampled] = [count, all].map((value) => Number(value).toLocaleString("en"));
  return all > count ? `${logged} of ${sampled} rollouts were logged` : `${logged} ${count === 1 ? "rollout" : "rollouts"}`;
}

function about(item, withPlace) {
  const { row } = item;
  const given = ([name, value]) => value !== null || !["environment", "tool"].includes(name);  // which may give none
  const rewards = Object.entries(row.rewards || {}).filter(given).map(([name, value]) => `${short(name)} ${number(value)}`).join(", ");
  const place = `${stepText(item.step, item.mode)}, group ${groupName(item)}, rollout ${item.number}, rank ${item.rank}`;
  const records = row.records > 1 ? `${row.records} records` : "one record";
  const tokens = `${row.num_prompt_tokens ?? "?"} in the prompt, ${item.tokens} after it, in ${records} of the loss`;
  const lines = [["total reward", number(item.reward)], rewards && ["reward functions", `${rewards} (before weights)`],
    ["stop reason", item.stop], row.error && ["error", row.error]];
  if (withPlace) lines.push(goldAnswer(row), ["logged as", place], ["tokens", tokens], ["policy version", item.version]);
  return definitions(lines.filter(Boolean));
}

function promptParts(item) {
  const given = item.row.messages.slice(0, item.prompt_messages).filter(Boolean);
  return given.map((message) => part("given", message.role, [], message.role === "system"
    ? folded(textOf(message.content).slice(0, 80), el("pre", {}, textOf(message.content)))
    : message.role === "assistant" ? el("pre", {}, textOf(message.content)) : readText(item, message.content)));
}

function conversation(item, title, colour, scale, withPrompt) {
  // Rewards are of 32 bits: 0.1 is logged as 0.10000000149011612.
  const rounded = (_, value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(7)) : value);
  return el("article", {}, el("h2", {}, title), about(item, withPrompt), withPrompt && promptParts(item),
    item.row.turns.map((_, k) => turnParts(item, k, colour, scale)),
    folded("all fields of the log", () => el("pre", {}, seen(JSON.stringify(item.row, rounded, 1)))));
}

async function showRollout(run, id) {
  const item = { ...await source.rollout(run, id), run }, colour = COLOURS[state.colour], scale = scaleOf([item], colour);
  return [
    el("div", { class: "bar" }, el("a", { href: conversationHash("group", run, id) }, "◂ group"),
      el("a", { href: lastTable() }, "list"), colourBar([item], "rollout", run, id)),
    hints([item]),
    conversation(item, `${stepText(item.step, item.mode)}, rollout ${item.number}`, colour, scale, true),
  ];
}

// One turn in the table of a group: each call with its result, or the answer, or else what the model wrote.
function turnLines(turn) {
  const line = (text, kind = "") => el("span", { class: `line ${kind}` }, textOf(text).replace(/\s+/g, " ").trim().slice(0, 200));
  const [calls, results] = [turn.calls || [], turn.results || []];
  const lines = calls.map((call, i) => [line(call.name ?? "invalid call", "call"),
    line(argumentsOf(call)?.map(([name, value]) => `${name}: ${textOf(value)}`).join(", ") ?? call.arguments),
    !results[i] && call.error && line(`✗ ${call.error}`)]);
  results.forEach((result, i) => { lines[i] = [lines[i], line(`${result.error ? "✗" : "→"} ${textOf(result.text)}`)]; });
  if (typeof turn.answer === "string") lines.push(line(`answer: ${turn.answer}`, "call"));
  return [lines.length ? lines : line(turn.text), turn.observation && line(`→ ${textOf(turn.observation)}`)];
}

// The rollouts of a group as columns, their turns as cells, their rewards below.
function groupTable(items, run) {
  const scale = strongest(items.flatMap((item) => item.row.turn_advantages || []));
  const link = (item, turn, ...inside) => el(DATA.only ? "div" : "a",
    { href: conversationHash("rollout", run, item.id, { turn }), title: turn === undefined ? null : advantageText(item.row, turn) }, inside);
  const row = (head, cells) => el("tr", {}, el("th", { scope: "row" }, head), cells);
  const turnCell = (item, k) => {
    const turn = item.row.turns[k], advantage = trainedAdvantage(item.row, k);
    return el("td", { background: paint(COLOURS.advantage, advantage, scale) },
      turn && link(item, k, turnLines(turn), el("span", { class: "number" }, signed(advantage))));
  };
  const fact = (head, textOfItem) => {
    const texts = items.map(textOfItem);
    return texts.some((text) => text) && row(head, texts.map((text) => el("td", {}, text)));
  };
  const turns = Array.from({ length: Math.max(...items.map((item) => item.row.turns.length)) }, (_, k) => k);
  const rewards = [...new Set(items.flatMap((item) => Object.keys(item.rewards)))];
  const table = el("table", { class: "group", "aria-label": "Group" },
    el("thead", {}, row("", items.map((item) => el("th", { scope: "col" }, link(item, undefined, `rollout ${item.number}`))))),
    el("tbody", {}, turns.map((k) => row(`turn ${k}`, items.map((item) => turnCell(item, k))))),
    el("tfoot", {}, fact("stop reason", (item) => item.stop), fact("error", (item) => item.row.error),
      rewards.map((name) => fact(short(name), (item) => number(item.rewards[name]))),
      fact("outcome advantage", ({ row }) => typeof row.outcome_advantage === "number" && signed(row.outcome_advantage)),
      fact("turn rewards", (item) => item.row.turn_rewards?.map((value) => number(value)).join(", ")),
      fact("total reward", (item) => el("b", {}, number(item.reward)))));
  return [
    el("div", { class: "bar small soft" }, "A cell is a turn, coloured by its advantage.",
      !DATA.only && " A click opens it.", legend("advantage", scale)),
    el("div", { class: "scrolled" }, table),
  ];
}

// The choice of run, step and prompt.
async function groupChoices(item, run) {
  const { rows } = await source.table({ run, step_from: item.step, step_to: item.step, mode: item.mode, groups: "true", limit: 500 });
  const at = rows.findIndex((row) => row.team === item.team), { runs } = state.info;
  const open = (event) => { location.hash = event.currentTarget.value; };
  const choice = (name, options) => el("label", {}, name, el("select", { name, onchange: open }, options.map(([value, text, selected]) =>
    el("option", { value, selected }, text))));
  const go = (to, label) => to && el("a", { href: conversationHash("group", run, to.id) }, label);
  return el("div", { class: "choices" }, runs.length > 1 && choice("run", runs.map(({ name }, i) => [`#group/${i}`, name, i === run])),
    choice("step", runs[run].steps.map(([step, mode]) =>
      [hashOf(`group/${run}`, { step, mode }), stepText(step, mode), step === item.step && mode === item.mode])),
    choice("prompt", rows.map((row, i) =>
      [conversationHash("group", run, row.id), `group ${groupName(row)}: ${row.prompt.slice(0, 120)}`, i === at])),
    go(rows[at - 1], "previous"), go(rows[at + 1], "next"),
    el("a", { href: lastTable() }, "list"));
}

// The group of rollout `id`; without it the first group of a step, which is the newest unless the address names one.
async function showGroup(run, id, query) {
  if (id === undefined) {
    const { steps } = state.info.runs[run];
    const newest = steps.findLast((each) => each[1] === "train") ?? steps.at(-1) ?? [];
    const [step, mode] = query.step ? [query.step, query.mode] : newest;
    const { rows } = await source.table({ run, step_from: step, step_to: step, mode, limit: 1 });
    if (!rows.length) return [el("p", { class: "soft" }, "The log has no rollouts yet.")];
    id = rows[0].id;
  }
  const items = await source.group(run, id);
  items.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.number - b.number);
  const [first] = items, gold = goldAnswer(first.row);
  const colour = COLOURS[state.colour], scale = scaleOf(items, colour);
  return [
    DATA.only ? el("div", { class: "bar" }, colourBar(items, "group", run, id)) : await groupChoices(first, run),
    DATA.only && hints(items),
    el("article", {}, promptParts({ ...first, run }), gold && definitions([gold])),
    el("h2", {}, `${stepText(first.step, first.mode)}: ${countText(items.length, first.row.group_size)}, best reward first`),
    groupTable(items, run),
    DATA.only && el("div", { class: "side" },
      items.map((item) => conversation(item, `rollout ${item.number}`, colour, scale, false))),
  ];
}

// -- 6. The page --

const counts = el("span", { class: "soft", id: "total" });
const problems = el("div", { id: "notes" });
const links = [["group", "Group"], ["curves", "Curves"], ["rollouts", "Rollouts"]].map(([view, text]) =>
  el("a", { href: `#${view}`, "data-view": view }, text));

function header() {
  const runs = state.info.runs;
  const steps = (run) => (run.count ? `, step ${run.steps[0][0]} to ${run.steps.at(-1)[0]}` : "");
  say(counts, runs.map((run) => run.which || countText(run.count, run.sampled) + steps(run)).join("; "));
  const notes = runs.flatMap((run) => run.notes.map((note) => (runs.length > 1 ? `${run.name}: ${note}` : note)));
  problems.replaceChildren(...[...(DATA.notes || []), ...notes].map((note) => el("p", { class: "note" }, note)));
}

function place() {
  const start = DATA.start || (state.info.runs[0].count ? "group" : "curves");
  const [path, search] = (location.hash.slice(1) || start).split("?");
  return { parts: path.split("/"), query: Object.fromEntries(new URLSearchParams(search || "")) };
}

const lastTable = () => hashOf("rollouts", state.place);

async function show() {
  const { parts: [view, run = 0, id], query } = place();
  if (["rollout", "group"].includes(view)) {
    state.colour = Object.hasOwn(COLOURS, query.colour ?? "") ? query.colour : "advantage";
  }
  const mine = ++state.view;
  links.forEach((link) => {
    link.setAttribute("aria-current", link.dataset.view === (view === "rollout" ? "rollouts" : view) ? "page" : "false");
  });
  let content;
  try {
    content = view === "rollouts" ? await showTable(query) : view === "rollout" ? await showRollout(Number(run), Number(id))
      : view === "group" ? await showGroup(Number(run), id, query) : await showCurves();
  } catch (error) {
    content = [el("p", { class: "note", role: "alert" }, error.message)];
  }
  if (mine !== state.view) return;  // a later view is there
  main.replaceChildren(...content.flat(Infinity).filter(Boolean));
  const kind = location.hash.split("?")[0];
  if (kind !== state.shown) scrollTo(0, 0);
  state.shown = kind;
  if (view === "rollout") main.querySelector(`#r${Number(id)}t${Number(query.turn)}`)?.scrollIntoView();
  links[2].href = lastTable();
}

async function look() {  // whether a running job has added rollouts
  if (document.hidden) return;
  const before = state.info.runs;
  const changed = (...keys) => state.info.runs.some((run, i) => keys.some((key) => run[key] !== before[i][key]));
  try {
    state.info = await source.info();
  } catch {
    say(counts, "The viewer's program has ended.");
    return;
  }
  header();
  const { parts: [view, , id], query } = place();
  if (changed("generation") && id !== undefined) {  // another run began in the folder
    location.hash = "group";
    return;
  }
  const busy = main.contains(document.activeElement) && document.activeElement.matches("input, select, svg");
  const follows = { curves: true, rollouts: !query.offset, group: id === undefined && query.step === undefined }[view];
  if (!busy && changed("last", "metrics", "generation") && follows) await show();
}

(async () => {
  state.info = await source.info();
  const title = DATA.title || state.info.runs.map((run) => run.name).join(" and ");
  document.body.append(el("header", {}, el("h1", {}, title), counts), ...(DATA.about ? [definitions(DATA.about)] : []), problems,
  DATA.only ? "" : el("nav", { "aria-label": "Views" }, links), main);
  header();
  window.addEventListener("hashchange", show);
  await show();
  if (DATA.served) setInterval(look, 3000);
})();
