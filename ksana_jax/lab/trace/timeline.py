"""The timeline of a trace as Chrome trace events, which Perfetto opens. Built from plain values alone.

Source: "Trace Event Format" of the Chromium project; slices (X), asynchronous slices (b, e), counters (C), names (M).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ksana_jax.lab.recording import Event, events_of

HOST, DEVICE = 1, 2


def timeline(engines: Sequence[Sequence[Event]]) -> str:
    """Returns the timeline of recorded engines as the text of a JSON file, an event a line.

    An engine is a process, the host's phases and the device's steps are its threads, a request is an asynchronous
    slice. Times are microseconds from the first event.

    Args:
      engines: events of each.
    """
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(map(json.dumps, _events(engines))) + "\n]}\n"


def _events(engines: Sequence[Sequence[Event]]) -> Iterator[dict[str, Any]]:
    rows = [(events_of("step", events), events_of("request", events)) for events in engines]
    begins = [step["slices"]["schedule"][0] for steps, _ in rows for step in steps]
    begins += [request["arrival_s"] for _, requests in rows for request in requests]
    begin_s = min(begins, default=0.0)
    for number, (steps, requests) in enumerate(rows, 1):
        last_s = sum(steps[-1]["slices"]["finish"]) if steps else begin_s
        for event in itertools.chain(_names(number), _steps(steps), _requests(number, requests, last_s)):
            if "ts" in event:
                event["ts"] = _microseconds(event["ts"] - begin_s)
            yield {"pid": number, **event}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _names(number: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "args": {"name": f"engine {number}"}}
    for thread, name in ((HOST, "host"), (DEVICE, "device")):
        yield {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": name}}


def _steps(steps: Sequence[Event]) -> Iterator[dict[str, Any]]:
    for step in steps:
        shape = " + ".join(f"{count}x{width}" for count, width in step["shape"][0])
        counts = {name: step[name] for name in ("num_rows", "num_tokens", "padded_tokens", "functions", "moved_bytes")}
        for phase, (begin_s, seconds) in step["slices"].items():
            thread, name, more = (DEVICE, shape, counts) if phase == "device" else (HOST, phase, {})
            of = {"ph": "X", "tid": thread, "name": name, "args": {"step": step["step"], **more}}
            yield {**of, "ts": begin_s, "dur": _microseconds(seconds)}
        counters = {
            "KV blocks": {"held": step["peak_blocks"], "cached": step["cached_blocks"]},
            "sequences": {"running": step["num_running"], "waiting": step["num_waiting"]},
        }
        for name, values in counters.items():
            yield {"ph": "C", "name": name, "ts": step["slices"]["schedule"][0], "args": values}


def _requests(number: int, requests: Sequence[Event], last_s: float) -> Iterator[dict[str, Any]]:
    """Yields each request with its waiting and its decoding inside; unfinished ones last until the end."""
    for request in requests:
        arrival_s, first_s, end_s = (request[name] for name in ("arrival_s", "first_token_s", "finished_s"))
        end_s = last_s if end_s is None else end_s
        first_s = end_s if first_s is None else first_s
        whole = {"cat": "request", "id": f"{number}/{request['request_id']}", "name": request["request_id"]}
        yield {"ph": "b", "ts": arrival_s, "args": dict(request), **whole}
        for name, begin_s, ends_s in (("waiting", arrival_s, first_s), ("decoding", first_s, end_s)):
            yield {"ph": "b", "ts": begin_s, **whole, "name": name}
            yield {"ph": "e", "ts": ends_s, **whole, "name": name}
        yield {"ph": "e", "ts": end_s, **whole}
