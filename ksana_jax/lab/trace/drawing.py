"""Drawings of a trace as SVG text: steps by phase, requests, pool use, and a bar of where time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ksana_jax.lab.trace.watch import PHASES

LEFT, RIGHT, ROW = 10, 10, 6
# Steps and requests that are drawn one by one; neighbouring steps beyond that are drawn as one.
MOST_STEPS, MOST_REQUESTS = 1500, 120


class Axis:
    """Maps times in seconds from begin to end to pixels."""

    def __init__(self, begin_s: float, end_s: float, width: int):
        self.begin_s, self.end_s, self.width = begin_s, max(end_s, begin_s + 1e-9), width

    def x(self, time_s: float) -> float:
        inside = self.width - LEFT - RIGHT
        at = (time_s - self.begin_s) / (self.end_s - self.begin_s)
        return round(LEFT + inside * min(max(at, 0.0), 1.0), 2)

    def ticks(self, y: int) -> str:
        """Draws ten ticks with seconds from the begin."""
        found = []
        for i in range(11):
            x, seconds = LEFT + (self.width - LEFT - RIGHT) * i / 10, (self.end_s - self.begin_s) * i / 10
            found.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{seconds:.3g} s</text>')
        return "".join(found)


def box(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """Draws a rectangle with a tooltip."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{max(width, 0.3):.2f}" height="{height:g}" fill="{fill}">{inner}</rect>'


def svg(width: int, height: int, name: str, content: str) -> str:
    return (
        f'<div class="wide"><svg id="{name}" role="img" aria-label="{name}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{content}</svg></div>'
    )


def width_of(num_steps: int) -> int:
    """Returns the pixels in which that many steps are legible."""
    return min(max(1140, 4 * num_steps), 6000)


def grouped(steps: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Returns steps one by one, or neighbours together if there are too many."""
    size = -(-len(steps) // MOST_STEPS) or 1
    return [list(steps[i : i + size]) for i in range(0, len(steps), size)]


def steps_drawing(steps: Sequence[Mapping[str, Any]], axis: Axis, name: str) -> str:
    """Draws each step from its begin to its end, divided by phase."""
    found = []
    for some in grouped(steps):
        first, last = some[0], some[-1]
        seconds = {phase: sum(s[f"{phase}_s"] for s in some) for phase in PHASES}
        x0, x1 = axis.x(first["began_s"]), axis.x(last["ended_s"])
        whole = sum(seconds.values()) or 1.0
        numbers = f"step {first['step']}" if len(some) == 1 else f"steps {first['step']} to {last['step']}"
        tokens, padded = sum(s["num_tokens"] for s in some), sum(s["padded_tokens"] for s in some)
        title = f"{numbers}: {first['num_rows']} rows, {tokens} tokens padded to {padded}; " + ", ".join(
            f"{phase} {1e3 * s:.2f} ms" for phase, s in seconds.items() if s
        )
        for phase, s in seconds.items():
            if s:
                width = (x1 - x0) * s / whole
                found.append(box(x0, 0, width, 46, f"var(--{phase})", title))
                x0 += width
    return svg(axis.width, 64, name, "".join(found) + axis.ticks(60))


def requests_drawing(requests: Sequence[Mapping[str, Any]], axis: Axis, name: str) -> str:
    """Draws each request as a line: until its first token, and from there to its end."""
    found = []
    for i, request in enumerate(requests[:MOST_REQUESTS]):
        arrival, first, end = (request[k] for k in ("arrival_s", "first_token_s", "finished_s"))
        end = axis.end_s if end is None else end
        first = end if first is None else first
        title = (
            f"{request['request_id']}: {request['num_prompt_tokens']} + {request['num_output_tokens']} tokens, first "
            f"token after {1e3 * (first - arrival):.1f} ms, ended after {1e3 * (end - arrival):.1f} ms, "
            f"{request['num_cached_tokens']} cached, preempted {request['num_preemptions']} times"
        )
        y = i * (ROW + 1)
        found.append(box(axis.x(arrival), y, axis.x(first) - axis.x(arrival), ROW, "var(--waiting)", title))
        found.append(box(axis.x(first), y, axis.x(end) - axis.x(first), ROW, "var(--wait)", title))
    return svg(axis.width, min(len(requests), MOST_REQUESTS) * (ROW + 1) + 4, name, "".join(found))


def pool_drawing(steps: Sequence[Mapping[str, Any]], num_blocks: int, axis: Axis, name: str) -> str:
    """Draws the fraction of the pool that is held during each step, and above it what is cached."""
    height, found = 70, []
    for some in grouped(steps):
        x0, x1 = axis.x(some[0]["began_s"]), axis.x(some[-1]["ended_s"])
        held, cached = max(s["peak_blocks"] for s in some), some[-1]["cached_blocks"]
        title = f"step {some[0]['step']}: {held} of {num_blocks} blocks held, {cached} cached"
        held_y, cached_y = height * held / num_blocks, height * min(held + cached, num_blocks) / num_blocks
        found.append(box(x0, height - cached_y, x1 - x0, cached_y - held_y, "var(--cached)", title))
        found.append(box(x0, height - held_y, x1 - x0, held_y, "var(--wait)", title))
    inside = axis.width - LEFT - RIGHT
    frame = f'<rect x="{LEFT}" y="0" width="{inside}" height="{height}" fill="none" stroke="var(--line)"/>'
    return svg(axis.width, height + 2, name, "".join(found) + frame)


def bar(parts: Mapping[str, float], colours: Mapping[str, str], name: str, width: int = 1140) -> str:
    """Draws shares of a whole as one bar."""
    whole, x, found = sum(parts.values()) or 1.0, float(LEFT), []
    for label, seconds in parts.items():
        wide = (width - LEFT - RIGHT) * seconds / whole
        found.append(box(x, 0, wide, 26, colours[label], f"{label}: {seconds:.3f} s, {seconds / whole:.1%}"))
        x += wide
    return svg(width, 28, name, "".join(found))
