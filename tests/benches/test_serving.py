"""`ksana bench serving`: what is sent when, what is made of the answers, and what goes wrong."""

import asyncio
import dataclasses
import json
import time

import numpy as np
import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench import command, core, serving
from ksana_jax.lab.bench.serving import AT_ONCE, ServingBench
from ksana_jax.lab.bench.serving_load import Arriving, RequestFailed, send_all
from ksana_jax.lab.bench.serving_targets import EngineTarget, HTTPTarget, events
from ksana_jax.lab.runs.tasks.results import of_metric
from ksana_jax.serve.workload import read_workload

VOCAB = 100


def made(kind="synthetic", **settings):
    size = {"prompt" if kind == "synthetic" else "user": 8, "output": 3}
    return read_workload({"kind": kind, **size, **settings}).make(VOCAB)


@dataclasses.dataclass
class Slow:
    """A target that takes `seconds` for each of an answer's tokens, and notes what was open when."""

    seconds: float = 0.0
    fails: frozenset = frozenset()
    open: int = 0
    most_open: int = 0
    began: list = dataclasses.field(default_factory=list)

    def prepare(self, item):
        return item

    async def send(self, item, arriving):
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.began.append(item.index)
        try:
            for _ in range(item.num_output):
                await asyncio.sleep(self.seconds)
                if item.index in self.fails:
                    raise RequestFailed("HTTP 429 queue_full")
                arriving.piece()
            arriving.num_cached = 5
        finally:
            self.open -= 1


def sent(workload, target, **settings):
    return asyncio.run(send_all(workload, target, **settings))


def test_requests_are_sent_at_their_times_however_slow_the_answers_are():
    workload, target = made(num_requests=10, rate=50.0), Slow(0.15)
    found = sent(workload, target)
    due = np.array([one.sent_s for one in found.times])
    assert due - due[0] == pytest.approx([item.arrival_s for item in workload.items])
    assert target.most_open == 10 and found.lags_s.max() < 0.1
    one = found.times[3]
    assert (one.num_output, one.num_cached_tokens, len(one.gaps_s), one.error) == (3, 5, 2, None)
    assert 0.15 <= one.ttft_s < one.e2e_s and one.tpot_s >= 0.15


def test_no_more_than_max_concurrency_are_open_and_times_begin_when_there_is_room():
    target = Slow(0.02)
    found = sent(made(num_requests=9, rate=None), target, max_concurrency=3)
    assert target.most_open == 3 and max(one.e2e_s for one in found.times) < 0.5
    due = sorted(one.sent_s for one in found.times)
    assert due[8] - due[0] >= 2 * 0.06


def test_a_turn_is_sent_after_the_one_before_and_the_time_to_think():
    workload = made("sessions", num_requests=12, rate=None, turns=4, think_s=0.05, system=4)
    found = sent(workload, Slow(0.01))
    later = [item for item in workload.items if item.after is not None]
    assert later
    for item in later:
        # Due at the end of the answer before, which is noted a moment later, and the time to think.
        wait = found.times[item.index].sent_s - found.times[item.after].finished_s
        assert item.think_s <= wait < item.think_s + 0.1


def test_a_request_that_fails_is_named_and_the_turns_after_it_are_sent():
    workload = made("sessions", num_requests=12, rate=None, turns=4, think_s=0, system=4)
    first = next(item.after for item in workload.items if item.after is not None)
    found = sent(workload, Slow(fails=frozenset([first])))
    assert found.times[first].error == "HTTP 429 queue_full" and not found.times[first].finished
    assert [one.index for one in found.times if one.finished] == [i for i in range(12) if i != first]


def test_an_answer_that_takes_too_long_is_a_failure():
    [one] = sent(made(num_requests=1), Slow(10.0), timeout_s=0.05).times
    assert one.error == "no answer within 0.05 s" and np.isnan(one.first_token_s)


def test_an_error_of_the_benchmark_itself_ends_it():
    class Broken(Slow):
        async def send(self, item, arriving):
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        sent(made(num_requests=2), Broken())


# ---------------------------------------------------------------------- over HTTP


def test_events_are_the_same_wherever_the_stream_is_cut():
    stream = b': ping\n\ndata: {"a": 1}\n\ndata: {"b": "\xc3\xa9"}\r\n\r\ndata: [DONE]\n\n'

    async def read(pieces):
        async def arriving():
            for piece in pieces:
                yield piece

        return [event async for event in events(arriving())]

    expected = ['{"a": 1}', '{"b": "é"}', "[DONE]"]
    for cut in range(len(stream)):
        assert asyncio.run(read([stream[:cut], stream[cut:]])) == expected
    assert asyncio.run(read([stream[i : i + 1] for i in range(len(stream))])) == expected


def chunk(text="", usage=None):
    return {"choices": [{"index": 0, "text": text}] if usage is None else [], "usage": usage}


COUNTED = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
ANSWERS = {
    "good": [chunk("a"), chunk(""), chunk("bc"), chunk(usage=COUNTED)],
    "dies": [chunk("a"), {"error": {"code": None, "type": "internal_error"}}],
    "ends": [chunk("a")],
    "empty": [chunk(usage={"completion_tokens": 0})],
}


class FakeServer:
    """Answers the n-th completion as the n-th of `script` says: a key of ANSWERS, or a status."""

    def __init__(self, script, key=None):
        self.script, self.key, self.asked = list(script), key, []

    async def __aenter__(self):
        web = pytest.importorskip("aiohttp.web")
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/tokenizer_info", self.info)
        app.router.add_post("/v1/completions", self.complete)
        self.web, self.runner = web, web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def models(self, request):
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            error = {"error": {"code": "invalid_api_key", "type": "invalid_request_error"}}
            return self.web.json_response(error, status=401)
        return self.web.json_response({"data": [{"id": "m", "max_model_len": 64}, {"id": "n"}]})

    async def info(self, request):
        return self.web.json_response({"vocab_size": 50})

    async def complete(self, request):
        self.asked.append(await request.json())
        act = self.script.pop(0)
        if isinstance(act, int):
            return self.web.json_response({"error": {"code": "queue_full"}}, status=act)
        response = self.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in ANSWERS[act]:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if act != "ends":
            await response.write(b"data: [DONE]\n\n")
        return response


def test_answers_of_a_server_are_counted_and_its_errors_named():
    async def run():
        async with FakeServer(["good", 429, "dies", "ends", "empty"]) as server:
            target = HTTPTarget(server.url + "/v1/")
            about = await target.open(None)
            try:
                found = await send_all(made(num_requests=5, rate=None), target, max_concurrency=1)
            finally:
                await target.close()
        return about, server.asked, found.times

    about, asked, times = asyncio.run(run())
    assert about == ("m", 50, 64)
    assert asked[0]["prompt"] == made(num_requests=5).items[0].tokens().tolist()
    assert (asked[0]["max_tokens"], asked[0]["ignore_eos"], asked[0]["stream"]) == (3, True, True)
    assert (times[0].num_output, times[0].num_cached_tokens, len(times[0].gaps_s)) == (3, 2, 1)
    assert [one.error for one in times] == [
        None,
        "HTTP 429 queue_full",
        "error in the stream: internal_error",
        "the stream ended without [DONE]",
        "empty answer",
    ]


def test_a_server_that_goes_away_is_an_error_with_a_name():
    async def run():
        async with FakeServer([]) as server:
            target = HTTPTarget(server.url)
            await target.open("n")
        try:
            return (await send_all(made(num_requests=1), target)).times
        finally:
            await target.close()

    assert asyncio.run(run())[0].error.startswith("connection: Client")


@pytest.mark.parametrize(
    "key, model, message",
    [
        (None, None, "GET .*/v1/models: HTTP 401 invalid_api_key"),
        ("secret", "x", "has no model 'x', it serves m, n"),
    ],
)
def test_what_a_server_refuses_is_said_before_anything_is_sent(key, model, message):
    async def run():
        async with FakeServer([], key="secret") as server:
            target = HTTPTarget(server.url, key)
            try:
                await target.open(model)
            finally:
                await target.close()

    with pytest.raises(ConfigError, match=message):
        asyncio.run(run())


def test_a_server_that_is_not_there_is_one_error():
    bench = ServingBench(url="http://127.0.0.1:9", requests=1)
    with pytest.raises(ConfigError, match=r"GET http://127\.0\.0\.1:9/v1/models: Cannot connect"):
        core.run(bench, 1)


# ---------------------------------------------------------------------- the benchmark


@dataclasses.dataclass
class Faked(ServingBench):
    """Measures a target that answers at once."""

    def _open_engine(self):
        self.target = Slow()
        return serving.TargetModel("fake", VOCAB, 256)


def test_every_rate_has_the_same_requests_with_other_texts():
    bench = Faked(requests=6, rate="50, 100,inf", slo="ttft=0.2")
    records, _ = core.run(bench, repeats=2)
    report = command.report_of(bench, records)
    assert [row.point["rate"] for row in report.rows] == [50.0, 100.0, AT_ONCE]
    turns = of_metric(report.rows, "repetition")
    assert len({tuple(m["requests"]["num_prompt"]) for m in turns}) == 1 and len({m["seed"] for m in turns}) == 1
    slow, fast = turns[0]["requests"]["sent_s"], turns[2]["requests"]["sent_s"]
    assert np.array(slow) == pytest.approx(2 * np.array(fast), abs=1e-5)
    assert not any(turns[4]["requests"]["sent_s"])
    assert report.rows[0].mean("goodput_share") == 1.0 and report.rows[0].mean("num_finished") == 6
    assert "90% of the requests meet TTFT 0.2 s at up to 100 requests/s" in report.conclusion
    texts = [bench._made(50.0).items[0].tokens().tobytes() for _ in range(2)]
    assert texts[0] != texts[1]


def test_a_seed_repeats_a_run_and_none_gives_a_new_one():
    def first(seed):
        bench = Faked(requests=3, seed=seed, rate="inf")
        records, _ = core.run(bench, 1)
        [row] = command.report_of(bench, records).rows
        return row.trials[0][-1]["requests"]["num_prompt"], bench._made(1.0).items[0].tokens().tolist()

    assert first(5) == first(5) and first(5) != first(6)
    assert first(None) != first(None)


def test_the_option_goes_before_the_workload_and_100_requests_after_both():
    own = "{kind: synthetic, num_requests: 7}"
    assert [ServingBench(workload=own, requests=n)._settings().num_requests for n in (None, 3)] == [7, 3]
    assert ServingBench()._settings().num_requests == ServingBench(workload="orca")._settings().num_requests == 100


def test_burstiness_is_the_shape_of_the_gaps():
    assert ServingBench(burstiness=0.25)._settings().cv == 2.0
    with pytest.raises(ConfigError, match="'azure' has no setting 'cv'"):
        ServingBench(workload="{kind: azure, path: x}", burstiness=1.0).cases()


@pytest.mark.parametrize("rate", ["50", "inf"])
def test_a_late_sender_voids_a_run_unless_all_requests_come_at_once(monkeypatch, rate):
    monkeypatch.setattr(serving, "MAX_LAG_S", -1.0)
    bench = Faked(requests=3, rate=rate, slo="e2e=10")
    bench.url = "http://a"  # lateness is judged where the sender is a process of its own
    monkeypatch.setattr(Faked, "_open_server", lambda self, url: _about(self))
    report = command.report_of(bench, core.run(bench, 1)[0])
    assert ("void: the sender was" in " ".join(report.notes)) == (rate == "50") and report.conclusion == ""
    assert ("void" in [column.key for column in report.columns]) == (rate == "50")


async def _about(bench):
    return bench._open_engine()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rate": "4,fast"}, "rate is '4,fast', must be positive numbers separated by commas, or inf"),
        ({"rate": "0"}, "rate is '0', must be positive"),
        ({"slo": "tfft=1"}, "the nearest of ttft, tpot, e2e is 'ttft'"),
        ({"url": "localhost:8000"}, "url is 'localhost:8000', must begin with http:// or https://"),
        ({"url": "http://a", "engine": {}}, "url is 'http://a', does not go with --engine"),
        ({"workload": "gama"}, "workload kind is 'gama'"),
        ({"requests": 0}, "requests is 0"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_built(options, message):
    with pytest.raises(ConfigError, match=message):
        Faked(**options).cases()


def test_requests_longer_than_the_model_are_refused_with_their_numbers():
    with pytest.raises(ConfigError, match=r"request 0 has 300 \+ 8 tokens, max_model_len is 256: set max_prompt"):
        core.run(Faked(workload="{kind: synthetic, prompt: 300, output: 8}", requests=2), 1)


SHORT = "{kind: synthetic, prompt: [8, 40], output: [2, 9]}"


@pytest.mark.soak
def test_a_request_is_not_sent_on_a_connection_that_the_server_has_closed():
    served = pytest.importorskip("tests.serve.server.serving")

    async def send(url):
        target = HTTPTarget(url)
        await target.open(None)
        time.sleep(5.5)  # uvicorn closes idle connections after 5 s, and this loop does not notice
        (item,) = made(num_requests=1).items
        arriving = Arriving(lambda: 0.0)
        await target.send(target.prepare(item), arriving)
        await target.close()
        return arriving.num_output

    with served.serving() as server:
        assert asyncio.run(send(f"http://127.0.0.1:{server.port}")) == 3


def test_a_server_of_ours_gives_every_token_that_is_asked_for():
    served = pytest.importorskip("tests.serve.server.serving")
    with served.serving() as server:
        bench = ServingBench(url=f"http://127.0.0.1:{server.port}", workload=SHORT, requests=8, rate="200", seed=1)
        records, _ = core.run(bench, 1)
        [row] = command.report_of(bench, records).rows
        [turn] = of_metric([row], "repetition")
        wanted = [item.num_output for item in bench._made(1.0).items]
    assert turn["requests"]["num_output"] == wanted and turn["report"]["num_failed"] == 0
    assert turn["report"]["num_cached_tokens"] == 0  # texts differ from those that have warmed it up


def test_an_engine_in_this_process_gives_every_token_and_names_what_it_refuses():
    served = pytest.importorskip("tests.serve.server.serving")
    workload = read_workload(
        {"kind": "sessions", "system": 16, "user": 8, "output": 6, "turns": 3}, think_s=0, rate=None
    )
    workload = dataclasses.replace(workload, num_requests=10, max_prompt=100).make(served.VOCAB)

    async def run():
        async with served.make_llm() as llm:
            found = await send_all(workload, EngineTarget(llm, detokenize=False))
            await llm.drain()
            return found, await send_all(made(num_requests=1), EngineTarget(llm, detokenize=False))

    found, refused = asyncio.run(run())
    assert [one.num_output for one in found.times] == [item.num_output for item in workload.items]
    later = [one.num_cached_tokens for one in found.times if workload.items[one.index].after is not None]
    assert later and min(later) >= 16
    assert refused.times[0].error.startswith("NotServing: the engine is draining")


@pytest.mark.soak
def test_an_engine_of_its_own_is_measured(tmp_path):
    lengths, engine = "{kind: synthetic, prompt: 16, output: 4}", {"max_num_seqs": 2, "max_model_len": 32}
    bench = ServingBench(requests=6, rate="20", workload=lengths, engine=engine)
    made = command.run_and_show(bench, repeats=1, out=tmp_path, as_json=True)
    [row] = made.rows
    assert row.mean("num_finished") == 6 and row.mean("num_output_tokens") == 24 and row.mean("ttft_p50_s") > 0
    assert (tmp_path / "figure.png").is_file()
