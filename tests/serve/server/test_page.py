"""The web page at / and the numbers that it shows; in a browser, where there is one (soak)."""

import asyncio
import base64
import hashlib
import html.parser
import re
import threading
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ksana_jax.serve.server import live, page
from ksana_jax.serve.server.app import make_app
from ksana_jax.serve.server.settings import ServerSettings
from tests.serve.server.browser import browsing, find_chromium
from tests.serve.server.serving import make_llm as make_fake
from tests.serve.server.serving import serving

FILES = {
    kind: (Path(page.__file__).parent / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
}
KEY = "secret-key"


def make_llm(slow_s=0.0):
    """An engine with a fake executor, and a clock that shows seconds."""
    llm = make_fake(slow_s)
    llm.engine.clock = time.perf_counter
    return llm


class Elements(html.parser.HTMLParser):
    """All start tags with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


# ---------------------------------------------------------------------- the document


def test_the_page_is_one_document_that_needs_no_key_and_no_network():
    with serving(api_keys=(KEY,)) as server:
        reply = server.ask("GET", "/")
        assert server.ask("GET", "/page.js").status == 401
    assert reply.status == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    text = reply.body.decode()
    assert set(re.findall(r"\w+://[^\"'`\s]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.findall(r"@import|\burl\(|\bsrc=", text)
    links = [attrs for tag, attrs in Elements(text).found if "href" in attrs or "src" in attrs or "action" in attrs]
    assert links == [{"rel": "icon", "href": "data:,"}]


def test_the_policy_allows_this_script_and_this_style_and_requests_to_this_server_only():
    text, policy = page.document()
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert allowed.pop(name) == f"'sha256-{digest}'"
    assert allowed.pop("connect-src") == "'self'" and allowed.pop("img-src") == "data:"
    assert set(allowed) == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert set(allowed.values()) == {"'none'"}


def test_what_a_model_writes_cannot_become_markup():
    script = FILES["js"]
    for word in "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( localStorage cookie".split():
        assert word not in script
    names = {name for _, attrs in Elements(FILES["html"]).found for name in attrs}
    assert not [name for name in names if name.startswith("on") or name == "style"]


def test_everything_that_takes_input_or_shows_a_chart_has_a_name():
    found = Elements(FILES["html"]).found
    named = {attrs["for"] for tag, attrs in found if tag == "label"}
    assert {attrs["id"] for tag, attrs in found if tag in ("input", "textarea")} == named
    assert all(attrs.get("role") == "img" for tag, attrs in found if tag == "svg")
    assert found[0] == ("html", {"lang": "en"})
    ids = [attrs["id"] for _, attrs in found if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'byId\("([\w-]+)"\)', FILES["js"])) <= set(ids)


def test_the_files_of_the_page_come_with_the_package():
    settings = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"serve/server/page.{kind}"' in settings for kind in FILES)


# ---------------------------------------------------------------------- the numbers


def test_numbers_are_behind_the_key():
    with serving(api_keys=(KEY,)) as server:
        assert server.ask("GET", "/live").status == 401
        reply = server.ask("GET", "/live", authorization=f"Bearer {KEY}")
    assert reply.status == 200 and reply.headers["cache-control"] == "no-store"


def test_numbers_are_those_of_the_requests_served():
    with serving(make_llm()) as server:
        first = server.ask("GET", "/live").json
        for _ in range(2):
            server.post("/v1/completions", model="ksana", prompt=[5] * 20, max_tokens=6, ignore_eos=True)
        assert server.settled()
        now = server.ask("GET", "/live").json
        pool, blocks = now["pool"], server.llm.engine.memory.device.pool
    assert first["requests"] == {"running": 0, "waiting": 0, "open": 0, "finished": 0, "failed": 0}
    assert first["ttft_s"] is None and first["tokens"] == {"prompt": 0, "output": 0}
    assert now["status"] == "ready" and now["requests"]["finished"] == 2 and now["time_s"] > first["time_s"]
    assert now["tokens"]["output"] == 12
    # The second finds the full blocks of the first, all but its last token.
    assert now["tokens"]["prompt"] == 40 - now["prefix_cache"]["hit_tokens"] and now["prefix_cache"]["hit_tokens"] == 16
    assert now["prefix_cache"]["queried_tokens"] == 40
    assert now["ttft_s"]["count"] == now["tpot_s"]["count"] == 2 and now["ttft_s"]["p90"] >= now["ttft_s"]["p50"] > 0
    assert pool["blocks"] == 256 == pool["running"] + pool["cached"] + pool["free"]
    assert (pool["running"], pool["cached"], pool["owners"]) == (0, blocks.num_idle, []) and pool["cached"] > 0


def test_running_requests_are_shown_with_their_blocks():
    with serving(make_llm(slow_s=0.03)) as server:
        ask = {"model": "ksana", "prompt": [5] * 40, "max_tokens": 60, "ignore_eos": True}
        asking = [threading.Thread(target=server.post, args=("/v1/completions",), kwargs=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        for _ in range(500):
            now = server.ask("GET", "/live").json
            owners = now["pool"]["owners"]
            if len(owners) == 2 and min(one["tokens"] for one in owners) > 40:
                break
        for thread in asking:
            thread.join()
    assert now["requests"]["running"] == len(owners) == 2
    assert all(one["blocks"] == -(-one["tokens"] // 4) or one["blocks"] == -(-one["tokens"] // 4) + 1 for one in owners)
    # The prompt's blocks, which both have, count once in the pool.
    assert now["pool"]["running"] <= sum(one["blocks"] for one in owners) - 9


def test_nothing_is_counted_before_somebody_looks():
    def counting(server):
        return sum(isinstance(getattr(one, "__self__", None), live.Live) for one in server.llm.observers)

    with serving() as server:
        assert counting(server) == 0
        for _ in range(3):
            server.ask("GET", "/live")
        assert counting(server) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_whether_prefixes_are_cached_is_among_the_numbers(enabled):
    with serving(make_fake(caching=enabled)) as server:
        assert server.ask("GET", "/live").json["prefix_cache"]["enabled"] is enabled


def test_a_server_that_loads_says_so():
    with TestClient(make_app(None, ServerSettings()), "http://localhost") as client:
        assert client.get("/live").json() == {"status": "loading"} and client.get("/").status_code == 200


def test_latencies_of_more_than_a_minute_ago_are_forgotten(monkeypatch):
    with serving(make_llm()) as server:
        server.ask("GET", "/live")
        server.post("/v1/completions", model="ksana", prompt=[5] * 20, max_tokens=6, ignore_eos=True)
        assert server.ask("GET", "/live").json["ttft_s"]["count"] == 1
        monkeypatch.setattr(live, "RECENT_S", 0.0)
        assert server.ask("GET", "/live").json["ttft_s"] is None


# ---------------------------------------------------------------------- in a browser

CHROMIUM = find_chromium()
in_browser = [pytest.mark.soak, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as apt's chromium")]


def browse(scenario, llm=None, **settings):
    """Runs a scenario with a tab on the page of a server; there must be no error in its console but those expected."""

    async def run(server):
        async with browsing(CHROMIUM) as tab:
            await tab.look(1000, 900)
            await tab.open(f"http://127.0.0.1:{server.port}/")
            await scenario(tab, server)
            await tab.run("0")  # what was reported meanwhile
            origins = await tab.run("performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)")
            assert set(origins) <= {f"http://127.0.0.1:{server.port}"}
            return tab.problems

    with serving(llm or make_llm(), **settings) as server:
        return asyncio.run(run(server))


def soaking(test):
    for mark in in_browser:
        test = mark(test)
    return test


READY = "document.querySelector('#model').textContent && document.querySelector('#status').className === 'ready'"


@soaking
def test_the_page_shows_what_the_engine_does_and_streams_an_answer():
    async def scenario(tab, server):
        await tab.until(READY)
        await tab.type("#prompt", "hello there")
        await tab.click("#send")
        await tab.until("document.querySelector('#log .model .text').textContent.length > 3")
        assert not await tab.run("document.querySelector('#stop').disabled")  # it is still under way
        await tab.until("document.querySelector('#pool #owners li')")
        await tab.until("document.querySelector('#stop').disabled")
        said = await tab.run("document.querySelector('#log .model .who').textContent")
        assert re.fullmatch(r"\S+: 100 tokens, [\d.,]+ per second, first after [\d.,]+ ms", said)
        await tab.until(
            "document.querySelector('#requests [data-value=finished]').textContent.startsWith('1 finished')"
        )
        await tab.until("document.querySelector('#ttft [data-value=p50]').textContent !== '-'")
        assert await tab.run("document.querySelectorAll('svg polyline, svg polygon').length") >= 8
        assert await tab.run("[...document.querySelectorAll('svg')].every((one) => one.getAttribute('aria-label'))")

    llm = make_llm(slow_s=0.03)
    assert browse(set_max_tokens(100, scenario), llm) == []


def set_max_tokens(count, scenario):
    async def changed(tab, server):
        await tab.run(f"document.querySelector('#max-tokens').value = {count}")
        await scenario(tab, server)

    return changed


@soaking
def test_stop_ends_the_request_and_the_conversation_goes_on():
    async def scenario(tab, server):
        await tab.until(READY)
        await tab.type("#prompt", "hello")
        await tab.press("Enter", 13)
        await tab.until("document.querySelector('#log .model .text').textContent")
        assert server.llm.stats().num_requests == 1
        await tab.click("#stop")
        await tab.until("document.querySelector('#stop').disabled")
        assert server.settled()  # its blocks are free
        assert "not completed" in await tab.run("document.querySelector('#log .model .who').textContent")
        assert await tab.run("document.querySelector('#log .error') === null")
        await tab.run("document.querySelector('#max-tokens').value = 3")
        await tab.type("#prompt", "more")
        await tab.press("Enter", 13)
        await tab.until(
            "document.querySelectorAll('#log .model').length === 2 && document.querySelector('#stop').disabled"
        )
        assert "3 tokens" in await tab.run("document.querySelectorAll('#log .model .who')[1].textContent")
        # The second message comes with the first and its answer as far as it went.
        assert await tab.run("messages.map((one) => one.role).join()") == "user,assistant,user,assistant"

    assert browse(set_max_tokens(90, scenario), make_llm(slow_s=0.05)) == []


@soaking
def test_markup_is_shown_as_text_and_errors_as_what_the_server_says():
    async def scenario(tab, server):
        await tab.until(READY)
        evil = "<img src=x onerror=document.title=1><b>b</b>"
        await tab.type("#prompt", evil)
        await tab.press("Enter", 13)
        await tab.until(
            "document.querySelector('#stop').disabled && document.querySelector('#log .model .text').textContent"
        )
        assert await tab.run("document.querySelector('#log .user .text').textContent") == evil
        assert await tab.run("document.querySelectorAll('#log img, #log b').length") == 0
        assert await tab.run("document.title") == "ksana"
        await tab.type("#prompt", "x" * 500)
        await tab.press("Enter", 13)
        await tab.until("document.querySelector('#log .error[role=alert]')")
        assert "max_model_len" in await tab.run("document.querySelector('#log .error .text').textContent")

    problems = browse(set_max_tokens(4, scenario), make_llm())
    assert len(problems) == 1 and "400" in problems[0]  # the browser notes the refused request


@soaking
def test_the_key_is_asked_for_and_kept_in_the_tab_alone():
    async def scenario(tab, server):
        await tab.until("!document.querySelector('#key-form').hidden")
        assert await tab.run("document.activeElement.id") == "key"
        await tab.type("#key", KEY)
        await tab.press("Enter", 13)
        await tab.until(READY)
        assert await tab.run(
            "document.querySelector('#key-form').hidden && document.querySelector('#key').value === ''"
        )
        assert await tab.run("[sessionStorage.getItem('key'), localStorage.length, document.cookie]") == [KEY, 0, ""]
        assert KEY not in await tab.run("location.href + document.documentElement.outerHTML")

    problems = browse(scenario, api_keys=(KEY,))
    assert problems and all("401" in problem for problem in problems)


@soaking
@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window(width, tmp_path):
    async def scenario(tab, server):
        await tab.until(READY)
        colours = []
        for dark in (False, True):
            await tab.look(width, 900, dark=dark)
            await tab.until("document.querySelector('svg polyline')")
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
            colours.append(await tab.run("getComputedStyle(document.body).backgroundColor"))
        assert len(set(colours)) == 2
        await tab.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000

    assert browse(scenario) == []


@soaking
def test_the_chat_is_above_the_fold_numbers_are_whole_and_a_cache_that_is_off_says_so():
    async def scenario(tab, server):
        await tab.look(1280, 900)
        await tab.until(READY)
        await tab.until("document.querySelector('#prefix [data-value=recent]').textContent === 'off'")
        bottom = "document.querySelector('#send').getBoundingClientRect().bottom"
        assert await tab.run(f"{bottom} <= innerHeight")
        broken = "[...document.querySelectorAll('.value')].filter((one) => one.getClientRects().length > 1).length"
        assert await tab.run(broken) == 0

    assert browse(scenario, make_fake(caching=False)) == []


@soaking
def test_a_server_that_goes_away_and_comes_back_is_noticed():
    async def scenario(tab, server):
        await tab.until(READY)
        server.running.app.state.serving.draining = True
        await tab.until("document.querySelector('#status-text').textContent === 'draining'")
        server.running.app.state.serving.draining = False
        await tab.until(READY)

    assert browse(scenario) == []
