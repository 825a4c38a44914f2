"use strict";
// Draws /live once a second. What the server sends reaches the document as text only.

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

async function look() {
  try {
    const key = sessionStorage.getItem("key");
    const response = await fetch("/live" + location.search, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
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

async function keepLooking() {
  if (!document.hidden) await look();
  setTimeout(keepLooking, 1000);
}

keepLooking();
