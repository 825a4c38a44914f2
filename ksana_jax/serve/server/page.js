"use strict";
// Draws /live once a second, and chats. What the server sends, Markdown too, reaches the document as text only.

const SPAN_S = 120;
const byId = (id) => document.getElementById(id);
const format = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const number = (value) => format.format(value);
const looks = []; // contents of /live, oldest first

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  look();
});

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function look() {
  try {
    const response = await fetch("/live" + location.search, { headers: headers() });
    const now = await response.json();
    if (response.status === 401 && byId("key-form").hidden) {
      byId("key-form").hidden = false;
      byId("key").focus();
    }
    byId("status").textContent = now.error?.message ?? now.status;
    if (now.requests) add(now);
  } catch {
    byId("status").textContent = "not reachable";
  }
}

function add(now) {
  // After a restart, counts begin anew.
  if (looks.length && (now.time_s <= looks.at(-1).time_s || now.tokens.output < looks.at(-1).tokens.output)) {
    looks.length = 0;
  }
  looks.push(now);
  while (looks[0].time_s < now.time_s - SPAN_S) looks.shift();
  const line = (part, name) => looks.map((one) => one[part][name]);
  draw("requests", [line("requests", "running"), line("requests", "waiting")]);
  draw("tokens", ["output", "prompt"].map((name) => rates(line("tokens", name))));
  draw("blocks", ["running", "cached", "free"].map((name) => line("blocks", name)), now.blocks.total);
}

function rates(counts) {
  return counts.map((count, at) => {
    if (!at) return 0;
    return (count - counts[at - 1]) / (looks[at].time_s - looks[at - 1].time_s);
  });
}

// Draws series with a value for each look: lines, or areas one above the other that add up to `total`.
function draw(id, series, total) {
  const article = byId(id), svg = article.querySelector("svg");
  const names = [...article.querySelectorAll("span")].map((one) => one.textContent);
  article.querySelectorAll("b").forEach((one, at) => (one.textContent = number(series[at].at(-1))));
  const width = svg.clientWidth, height = svg.clientHeight, most = total ?? Math.max(1, ...series.flat());
  const x = (at) => width * (1 - (looks.at(-1).time_s - looks[at].time_s) / SPAN_S);
  const y = (value) => height - 2 - (value / most) * (height - 18);
  const below = looks.map(() => 0);
  const shapes = series.map((values, index) => {
    const points = values.map((value, at) => [x(at), y(value + below[at])]);
    if (total === undefined) return shape("polyline", { class: "abc"[index], points: points.join(" ") });
    const floor = below.map((value, at) => [x(at), y(value)]).reverse();
    values.forEach((value, at) => (below[at] += value));
    return shape("polygon", { class: "abc"[index], points: [...points, ...floor].join(" ") });
  });
  const limit = shape("text", { x: 0, y: 10 }, number(most));
  const span = shape("text", { x: width, y: 10, "text-anchor": "end" }, `last ${SPAN_S} seconds`);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", names.map((name, at) => `${name}: ${number(series[at].at(-1))}`).join(", "));
  svg.replaceChildren(...shapes, limit, span);
}

function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

const talk = []; // messages of the conversation
let leaving = null; // ends the answer that is written

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!leaving && byId("message").value.trim()) answer(byId("message").value);
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
byId("stop").addEventListener("click", () => leaving?.abort());
byId("clear").addEventListener("click", () => {
  leaving?.abort();
  talk.length = 0;
  byId("log").replaceChildren();
});

function say(kind, text) {
  const made = document.createElement("p");
  made.className = kind;
  made.textContent = text;
  byId("log").append(made);
  byId("log").scrollTop = byId("log").scrollHeight;
  return made;
}

async function answer(text) {
  const said = { role: "user", content: text }, found = {}, shown = {};
  const system = byId("system").value.trim(), schema = byId("schema").value.trim();
  leaving = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  say("user", text);
  try {
    const body = { messages: [...(system ? [{ role: "system", content: system }] : []), ...talk, said], stream: true };
    const model = new URLSearchParams(location.search).get("model");
    if (model) body.model = model;
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { ...headers(), "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: leaving.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    byId("message").value = "";
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      for (const kind of ["reasoning_content", "content"]) {
        const piece = event.choices[0]?.delta[kind];
        if (!piece) continue;
        found[kind] = (found[kind] ?? "") + piece;
        (shown[kind] ??= say(kind, "")).textContent = found[kind];
        byId("log").scrollTop = byId("log").scrollHeight;
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") say("error", error.message);
  }
  if (found.content) talk.push(said, { role: "assistant", content: found.content });
  leaving = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

async function keepLooking() {
  if (!document.hidden) await look();
  setTimeout(keepLooking, 1000);
}

keepLooking();
