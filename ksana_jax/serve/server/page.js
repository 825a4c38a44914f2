"use strict";
// The page of a ksana server. Texts reach the document as textContent only: what a model writes is never markup.

const PERIOD_MS = 1000; // between two looks at the engine
const SPAN = 120, MINUTE = 60, SHORT = 10; // seconds: of charts, and over which counts are compared
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const number = (value) => (Math.abs(value) < 100 ? tenths : whole).format(value);
const percent = (share) => `${tenths.format(100 * share)} %`;

// ---------------------------------------------------------------------- the API

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) askForKey();
  throw new Refused(response.status, body.error?.message ?? `status ${response.status}`);
}

function askForKey() {
  byId("key-button").hidden = false;
  if (!byId("key-form").hidden) return;
  byId("key-form").hidden = false;
  byId("key").focus();
}

byId("key-button").addEventListener("click", askForKey);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  model = null;
  look();
});

const looks = []; // contents of /live, oldest first
let model = null;

// ---------------------------------------------------------------------- charts

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((limit) => limit >= value);
}

// Draws series with a value for each look, null where there is none: lines, or areas one above the other.
function draw(svg, series, { top, stacked = false, label, unit = "" }) {
  const height = svg.clientHeight, width = svg.clientWidth;
  const values = series.flat().filter((value) => value !== null);
  const most = top ?? ceiling(Math.max(...values, 0) || 1);
  const x = (at) => (1 - (looks.at(-1).time_s - looks[at].time_s) / SPAN) * width;
  const y = (value) => height - 2 - (value / most) * (height - 18);
  const parts = [shape("line", { class: "axis", x1: 0, x2: width, y1: height - 1, y2: height - 1 })];
  const below = series[0].map(() => 0);
  series.forEach((line, index) => {
    const kind = "abc"[index];
    const points = line.map((value, at) => (value === null ? null : [x(at), y(value + below[at])]));
    if (stacked) {
      const floor = line.map((_, at) => [x(at), y(below[at])]).reverse();
      parts.push(shape("polygon", { class: `area ${kind}`, points: [...points, ...floor].join(" ") }));
      line.forEach((value, at) => (below[at] += value));
    } else {
      for (const run of runs(points)) parts.push(shape("polyline", { class: `line ${kind}`, points: run.join(" ") }));
    }
  });
  parts.push(shape("text", { x: 0, y: 10 }, `${number(most)}${unit}`));
  parts.push(shape("text", { x: width, y: 10, "text-anchor": "end" }, "last 2 minutes"));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", label);
  svg.replaceChildren(...parts);
}

function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((run) => run.length);
}

// ---------------------------------------------------------------------- what the engine does

function show(id, values) {
  const tile = byId(id);
  for (const [name, text] of Object.entries(values)) tile.querySelector(`[data-value="${name}"]`).textContent = text;
}

function chart(id, series, options) {
  draw(byId(id).querySelector("svg"), series, options);
}

// What a count has grown by in so many seconds before a look.
function growth(count, at, seconds) {
  const from = looks.findIndex((look) => look.time_s >= looks[at].time_s - seconds);
  return count(looks[at]) - count(looks[from]);
}

function rates(count) {
  return looks.map((now, at) => {
    const before = looks[at - 1];
    return at ? (count(now) - count(before)) / (now.time_s - before.time_s) : null;
  });
}

function showEngine() {
  const now = looks.at(-1);
  const { requests, pool } = now;
  show("requests", {
    running: number(requests.running),
    waiting: number(requests.waiting),
    finished: `${number(requests.finished)} finished, ${number(requests.failed)} failed since this page was first open`,
  });
  chart("requests", [looks.map((look) => look.requests.running), looks.map((look) => look.requests.waiting)], {
    label: `${requests.running} requests running, ${requests.waiting} waiting`,
  });
  const output = rates((look) => look.tokens.output), prompt = rates((look) => look.tokens.prompt);
  show("tokens", { output: number(output.at(-1) ?? 0), prompt: number(prompt.at(-1) ?? 0) });
  chart("tokens", [output, prompt], { label: `${number(output.at(-1) ?? 0)} output tokens per second` });
  for (const name of ["ttft", "tpot"]) showLatency(name, now[`${name}_s`]);
  showPrefixes(now.prefix_cache);
  const preempted = growth((look) => look.preemptions, looks.length - 1, MINUTE);
  show("preemptions", {
    recent: number(preempted),
    total: `Since the start of the engine: ${number(now.preemptions)}`,
  });
  chart("preemptions", [rates((look) => look.preemptions)], {
    unit: " / s",
    label: `${preempted} preemptions in the last minute`,
  });
  showPool(pool);
}

function showPrefixes(cache) {
  const share = (at, seconds) => {
    const queried = growth((look) => look.prefix_cache.queried_tokens, at, seconds);
    return queried ? growth((look) => look.prefix_cache.hit_tokens, at, seconds) / queried : null;
  };
  const recent = share(looks.length - 1, MINUTE);
  const text = !cache.enabled ? "off" : recent === null ? "-" : percent(recent);
  const total = cache.queried_tokens ? percent(cache.hit_tokens / cache.queried_tokens) : "none looked up";
  const note = `In the last minute. Since the start of the engine: ${total}`;
  show("prefix", { recent: text, total: cache.enabled ? note : "enable_prefix_caching=true turns it on" });
  const line = looks.map((_, at) => share(at, SHORT)).map((value) => (value === null ? null : 100 * value));
  chart("prefix", [line], { top: 100, unit: " %", label: `prefix cache hits in the last minute: ${text}` });
}

function showLatency(id, recent) {
  const ms = (value) => number(1000 * value);
  const texts = recent ? { p50: ms(recent.p50), p90: ms(recent.p90) } : { p50: "-", p90: "-" };
  show(id, { ...texts, count: `Of ${recent ? number(recent.count) : "no"} requests in the last minute` });
  const line = (name) => looks.map((look) => (look[`${id}_s`] ? 1000 * look[`${id}_s`][name] : null));
  const label = `median ${texts.p50} ms, 90th percentile ${texts.p90} ms`;
  chart(id, [line("p50"), line("p90")], { unit: " ms", label });
}

function showPool(pool) {
  const names = ["running", "cached", "free"];
  const shares = names.map((name) => percent(pool[name] / (pool.blocks || 1)));
  show("pool", {
    ...Object.fromEntries(names.map((name, at) => [name, shares[at]])),
    blocks: `${number(pool.blocks)} blocks: ${names.map((name) => `${number(pool[name])} ${name}`).join(", ")}`,
  });
  chart("pool", names.map((name) => looks.map(({ pool }) => (100 * pool[name]) / (pool.blocks || 1))), {
    top: 100, unit: " %", stacked: true,
    label: `running requests ${shares[0]}, cached prefixes ${shares[1]}, free ${shares[2]}`,
  });
  byId("owners").replaceChildren(...pool.owners.map(({ blocks, tokens }) => {
    const [line, room, bar, text] = ["li", "span", "div", "span"].map((name) => document.createElement(name));
    room.className = "room";
    bar.className = "bar";
    bar.style.width = `${(100 * blocks) / pool.blocks}%`;
    text.textContent = `${number(blocks)} blocks, ${number(tokens)} tokens`;
    room.append(bar);
    line.append(room, text);
    return line;
  }));
}

function showStatus(text, kind) {
  if (byId("status-text").textContent !== text) byId("status-text").textContent = text;
  byId("status").className = kind;
}

async function look() {
  try {
    const now = await (await ask("/live" + location.search)).json();
    showStatus(now.status, now.status === "ready" ? "ready" : "wrong");
    if (now.requests === undefined) return;
    const last = looks.at(-1);
    const restarted = last && (now.time_s <= last.time_s || now.requests.finished < last.requests.finished);
    if (restarted) looks.length = 0;
    looks.push(now);
    while (looks[0].time_s < now.time_s - SPAN) looks.shift();
    showEngine();
    if (model === null) await showModel();
  } catch (error) {
    showStatus(error instanceof Refused ? error.message : "not reachable", "wrong");
  }
}

async function keepLooking() {
  if (!document.hidden) await look();
  setTimeout(keepLooking, PERIOD_MS);
}

async function showModel() {
  const models = (await (await ask("/v1/models")).json()).data;
  const name = new URLSearchParams(location.search).get("model");
  model = models.find(({ id }) => id === name) ?? models[0];
  byId("model").textContent = model.id;
  const continued = "Text to be continued (the model has no chat template)";
  byId("prompt-label").textContent = model.has_chat_template ? "Message" : continued;
}

// ---------------------------------------------------------------------- the box to try the model

let messages = []; // of the conversation, as the API takes them
let asking = null; // the AbortController of the answer under way

function say(kind, who, text) {
  const box = document.createElement("div"), name = document.createElement("p"), said = document.createElement("p");
  box.className = kind;
  name.className = "who";
  said.className = "text";
  name.textContent = who;
  said.textContent = text;
  if (kind === "error") box.setAttribute("role", "alert");
  box.append(name, said);
  const log = byId("log");
  log.append(box);
  log.scrollTop = log.scrollHeight;
  return { name, said };
}

// Yields the JSON of server-sent events; an error among them is thrown.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection has ended before the answer");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function answer(text) {
  const chat = model.has_chat_template, began = performance.now();
  if (chat) messages.push({ role: "user", content: text });
  const settings = { max_tokens: byId("max-tokens").valueAsNumber, temperature: byId("temperature").valueAsNumber };
  const body = { model: model.id, stream: true, stream_options: { include_usage: true }, ...settings };
  const { name, said } = say("model", model.id, "");
  let first = null, usage = null, whole = "";
  try {
    const response = await ask(chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, ...(chat ? { messages } : { prompt: text }) }),
      signal: asking.signal,
    });
    for await (const event of events(response)) {
      usage = event.usage ?? usage;
      const [choice] = event.choices;
      const piece = choice && (chat ? choice.delta.content : choice.text);
      if (!piece) continue;
      first ??= performance.now() - began;
      whole += piece;
      said.textContent = whole;
      byId("log").scrollTop = byId("log").scrollHeight;
    }
  } finally {
    const seconds = (performance.now() - began) / 1000;
    const count = usage?.completion_tokens;
    const tokens = usage ? `${number(count)} tokens, ${number(count / seconds)} per second` : "not completed";
    name.textContent = `${model.id}: ${tokens}${first === null ? "" : `, first after ${number(first)} ms`}`;
    if (chat && whole) messages.push({ role: "assistant", content: whole });
    else if (chat) messages.pop();
  }
}

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = byId("prompt").value;
  if (asking || !text) return;
  asking = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  say("user", "you", text);
  byId("prompt").value = "";
  try {
    if (model === null) await showModel();
    await answer(text);
  } catch (error) {
    if (error.name !== "AbortError") say("error", "error", error.message || String(error));
  } finally {
    asking = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => asking?.abort());
byId("clear").addEventListener("click", () => {
  asking?.abort();
  messages = [];
  byId("log").replaceChildren();
});

keepLooking();
