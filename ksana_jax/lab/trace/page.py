"""The page of a trace: one HTML file without scripts that loads nothing. Made of plain values alone."""

from __future__ import annotations

import string
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from ksana_jax.core.units import byte_size
from ksana_jax.lab.trace import drawing
from ksana_jax.lab.trace.parts import OTHER, PARTS
from ksana_jax.lab.trace.watch import PHASES

# Of the parts of the model, in their order, and of the rest of the device's time.
COLOURS = "#7f7f7f #bcbd22 #1f77b4 #17becf #ff7f0e #2ca02c #9467bd #8c564b #e377c2 #d62728 #a9b8b1".split()
PART_COLOURS: dict[str, str] = dict(zip((*PARTS, OTHER), COLOURS, strict=True))
Rows = Sequence[Mapping[str, Any]]


def render(content: Mapping[str, Any], steps: Sequence[Rows], requests: Sequence[Rows]) -> str:
    """Returns the page.

    Args:
      content: of trace.json. steps, requests: of each engine, the lines of their files; none for an absent machine.
    """
    template = string.Template(resources.files("ksana_jax").joinpath("assets/trace.html").read_text("utf-8"))
    if "target" in content:
        sections = [_bounds(about, content["target"]["chip"]) for about in content["engines"]]
    else:
        sections = [_engine(*of) for of in zip(content["engines"], steps, requests, strict=True)]
    sections += [_functions(content["functions"], content["compilations"]), _machine(content)]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(content["time"]))
    about = content["environment"]
    return template.substitute(
        title=escape(content["command"] or "Trace"),
        subtitle=escape(f"{when}, {about['device']} ({about['backend']}), {about['cores']} cores"),
        body="\n".join(sections),
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table; columns whose head begins with ">" are numbers."""
    classes = [' class="n"' if head.startswith(">") else "" for head in heads]
    top = "".join(f"<th{c}>{escape(h.lstrip('>'))}</th>" for c, h in zip(classes, heads, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{cell}</td>" for c, cell in zip(classes, row, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def tiles(values: Mapping[str, str]) -> str:
    found = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in values.items())
    return f'<dl class="tiles">{found}</dl>'


def legend(colours: Mapping[str, str]) -> str:
    found = "".join(f'<span><i style="background:{c}"></i>{escape(label)}</span>' for label, c in colours.items())
    return f'<p class="legend">{found}</p>'


def _heading(about: Mapping[str, Any]) -> str:
    model, dtype = about["model"], about["config"]["dtype"]
    name = f"Engine {about['engine']}: {model['family']}, {model['num_layers']} layers, {dtype}"
    attention = f"attention: {about['implementation']} on {about['platform']}; patterns: {about['patterns']}"
    return f"<h2>{escape(name)}</h2><p>{escape(attention)}</p>"


def _bounds(about: Mapping[str, Any], chip: Mapping[str, Any]) -> str:
    num_devices = about["num_devices"]
    several = num_devices > 1
    rows = [
        (
            escape(s["name"]),
            escape(s["label"]),
            f"{s['context']:,}",
            f"{s['flops']:.4g}",
            byte_size(s["weight_bytes"]),
            byte_size(s["kv_bytes"]),
            f"{1e3 * s['compute_s']:.4f}",
            f"{1e3 * s['memory_s']:.4f}",
            s["bound"],
            byte_size(s["argument_bytes"]),
            byte_size(s["temp_bytes"]),
            *([_crossing(s["collectives"])] * several),
            f"{s['compile_s']:.1f}",
        )
        for s in about["steps"]
    ]
    rate = chip["flops_per_s"][about["config"]["dtype"]]
    note = (
        f"Computed, not measured: the least time of a step on {chip['name']} at {rate / 1e12:,.0f} TFLOP/s and "
        f"{chip['bytes_per_s'] / 1e9:,.0f} GB/s, every row with the given context and every tile full. Weights are "
        "read once, and so are the keys and values that a tile sees. Arguments are weights and the pool of "
        f"{about['num_blocks']:,} blocks; a device has {byte_size(about['memory_bytes'])}."
    )
    if several:
        note += (
            f" {num_devices} devices divide the model, and all numbers are those of each; times leave out what they "
            "exchange."
        )
    heads = [
        "step",
        "pattern",
        ">context",
        ">FLOPs",
        ">weights",
        ">KV",
        ">computed: compute ms",
        ">computed: memory ms",
    ]
    heads += ["bound by", ">arguments", ">temporaries", *["exchanged"] * several, ">compile s"]
    return _heading(about) + f"<p>{escape(note)}</p>" + table(heads, rows)


def _crossing(collectives: Rows) -> str:
    return "; ".join(f"{c['number']} {escape(c['kind'])} of {byte_size(c['bytes'])}" for c in collectives)


def _engine(about: Mapping[str, Any], steps: Rows, requests: Rows) -> str:
    parts = [_heading(about)]
    if not steps:
        return "".join([*parts, "<p>No step was computed.</p>"])
    median, idle = about["median_ms"], about["device_idle"]
    parts.append(
        tiles(
            {
                "steps": f"{about['num_steps']:,}",
                "from first to last step": f"{about['seconds']:.3f} s",
                "median step": "-" if median is None else f"{median:.2f} ms",
                "device idle, at least": "-" if idle is None else f"{idle:.1%}",
                "requests": f"{len(requests):,}",
                "padding": f"{about['padding']:.1%} of tokens",
                "pool": f"{about['num_blocks']:,} blocks, {byte_size(about['num_blocks'] * about['block_bytes'])}",
                "steps that compiled": f"{about['compiling_steps']:,}",
            }
        )
    )
    return "".join([*parts, _time(about), _timeline(about, steps, requests), _buckets(about["buckets"])])


def _time(about: Mapping[str, Any]) -> str:
    spent = about["time_s"]
    drawn = {k: s for k, s in spent.items() if k not in ("compile", "profiler", "between steps")}
    whole = sum(spent.values()) or 1.0
    rows = [(escape(k), f"{s:.4f}", f"{s / whole:.1%}") for k, s in sorted(spent.items(), key=lambda item: -item[1])]
    if about["profiled_steps"]:
        note = f"The wait for the device is divided as in the {about['profiled_steps']} steps that were profiled."
    else:
        note = "No step was profiled, so the wait for the device is not divided by parts of the model."
    note += (
        f" At most {about['padding_s']:.4f} s of the device's time computed padding: each step's share of padding "
        "tokens, which attention skips."
    )
    return (
        "<h3>Where time went</h3>"
        + "<p>Without compilation, the profiler and the time between steps:</p>"
        + drawing.bar(drawn, {k: _colour(k) for k in drawn}, f"time-{about['engine']}")
        + legend({k: _colour(k) for k in drawn})
        + table(["", ">seconds", ">share"], rows)
        + f"<p>{escape(note)}</p>"
    )


def _colour(key: str) -> str:
    place, _, what = key.partition(": ")
    return f"var(--{what})" if place == "host" else PART_COLOURS.get(what, "var(--wait)")


def _timeline(about: Mapping[str, Any], steps: Rows, requests: Rows) -> str:
    begin = min([steps[0]["began_s"], *(r["arrival_s"] for r in requests)])
    axis = drawing.Axis(begin, steps[-1]["ended_s"], drawing.width_of(len(steps)))
    number = about["engine"]
    shown = min(len(requests), drawing.MOST_REQUESTS)
    which = "" if shown == len(requests) else f", the first {shown} of {len(requests):,}"
    return (
        "<h3>Steps</h3>"
        + legend({phase: f"var(--{phase})" for phase in PHASES})
        + drawing.steps_drawing(steps, axis, f"steps-{number}")
        + f"<h3>Requests{which}</h3>"
        + legend({"until the first token": "var(--waiting)", "until the last": "var(--wait)"})
        + drawing.requests_drawing(requests, axis, f"requests-{number}")
        + "<h3>KV pool</h3>"
        + legend({"held": "var(--wait)", "cached": "var(--cached)"})
        + drawing.pool_drawing(steps, about["num_blocks"], axis, f"pool-{number}")
    )


def _buckets(buckets: Rows) -> str:
    rows = [
        (
            escape(b["name"]),
            f"{b['num_steps']:,}",
            f"{b['num_tokens']:,}",
            f"{b['padding']:.1%}",
            "" if b["median_ms"] is None else f"{b['median_ms']:.2f}",
            f"{b['device_s']:.3f}",
        )
        for b in buckets
    ]
    heads = ["shape", ">steps", ">tokens", ">padding", ">median ms", ">device s"]
    return "<h3>Shapes of steps</h3>" + table(heads, rows)


def _functions(functions: Rows, counted: Mapping[str, Any]) -> str:
    rows = []
    for f in functions:
        links = " ".join(
            f'<a href="{escape(path)}">{escape(kind)}</a>' for p in f["programs"] for kind, path in p["files"].items()
        )
        temp = max((p["memory"].get("temp_bytes", 0) for p in f["programs"]), default=0)
        late = "" if f["step"] is None else f"step {f['step']} of engine {f['engine']} waited: {f['reason']}"
        rows.append(
            (
                escape(f["name"]),
                _count(f["flops"]),
                _count(f["bytes_accessed"]),
                byte_size(temp),
                f"{f['traced_s'] + f['compiled_s']:.2f}",
                escape(late),
                links,
            )
        )
    heads = ["function", ">FLOPs", ">bytes", ">temporaries", ">compile s", "compiled in a step", "texts"]
    line = (
        f"{counted['functions']} functions: traced in {counted['traced_s']:.2f} s, compiled in "
        f"{counted['compiled_s']:.2f} s; steps waited for {counted['in_steps']} of them. FLOPs and bytes are XLA's, "
        "which counts none for custom calls."
    )
    return f"<h2>Compiled functions</h2><p>{escape(line)}</p>" + table(heads, rows)


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _machine(content: Mapping[str, Any]) -> str:
    about = content["environment"]
    rows = [(escape(str(k)), escape(str(v))) for k, v in about.items() if k != "packages"]
    rows += [(escape(name), escape(version)) for name, version in about["packages"].items()]
    rows += [(escape(name), escape(value)) for name, value in content["variables"].items()]
    return "<h2>Machine, versions and flags</h2>" + table(["", ""], rows)
