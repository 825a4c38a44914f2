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

from ksana_jax.serve.server import page
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


def test_what_the_server_sends_cannot_become_markup():
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
        cached = server.llm.engine.memory.device.pool.num_idle
    assert first["requests"] == {"running": 0, "waiting": 0} and first["tokens"] == {"prompt": 0, "output": 0}
    assert now["status"] == "ready" and now["time_s"] > first["time_s"]
    # The second finds the full blocks of the first, all but its last token.
    assert now["tokens"] == {"prompt": 40 - 16, "output": 12}
    assert now["blocks"] == {"total": 256, "running": 0, "cached": cached, "free": 256 - cached} and cached > 0


def test_running_requests_and_their_blocks_are_counted():
    with serving(make_llm(slow_s=0.03)) as server:
        ask = {"model": "ksana", "prompt": [5] * 40, "max_tokens": 60, "ignore_eos": True}
        asking = [threading.Thread(target=server.post, args=("/v1/completions",), kwargs=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        for _ in range(500):
            now = server.ask("GET", "/live").json
            if now["requests"]["running"] == 2 and now["tokens"]["output"] > 2:
                break
        for thread in asking:
            thread.join()
    # The nine full blocks of the prompt, which both share, count once.
    assert now["requests"]["running"] == 2 and 11 <= now["blocks"]["running"] <= 9 + 2 * 16


def test_a_server_that_loads_says_so():
    with TestClient(make_app(None, ServerSettings()), "http://localhost") as client:
        assert client.get("/live").json() == {"status": "loading"} and client.get("/").status_code == 200


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


READY = "document.querySelector('#status').textContent === 'ready'"


@soaking
def test_the_page_shows_what_the_engine_does():
    async def scenario(tab, server):
        await tab.until(READY)
        ask = {"prompt": [5] * 20, "max_tokens": 100, "ignore_eos": True}
        asking = threading.Thread(target=server.post, args=("/v1/completions",), kwargs=ask)
        asking.start()
        value = "Number(document.querySelector('#{} b').textContent)"
        await tab.until(
            f"{value.format('requests')} === 1 && {value.format('tokens')} > 5 && {value.format('blocks')} > 5"
        )
        assert (
            await tab.run("[...document.querySelectorAll('svg')].map((one) => one.childElementCount).join()") == "4,4,5"
        )
        assert re.search(r"running: 1, waiting: 0", await tab.run("document.querySelector('svg').ariaLabel"))
        await tab.until(f"{value.format('requests')} === 0")
        asking.join()

    assert browse(scenario, make_llm(slow_s=0.03)) == []


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
def test_a_server_that_goes_away_and_comes_back_is_noticed():
    async def scenario(tab, server):
        await tab.until(READY)
        server.running.app.state.serving.draining = True
        await tab.until("document.querySelector('#status').textContent === 'draining'")
        server.running.app.state.serving.draining = False
        await tab.until(READY)

    assert browse(scenario) == []


@soaking
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_a_chat_has_a_system_prompt_and_a_schema_and_shows_text_alone(width, height):
    async def scenario(tab, server):
        await tab.look(width, height)
        await tab.until(READY)
        assert await tab.run("document.querySelector('#send').getBoundingClientRect().bottom <= innerHeight")
        set_all = "for (const [id, text] of Object.entries({})) document.querySelector(`#${{id}}`).value = text;"
        given = {"system": "be kind", "message": "**hi** <b>x</b>"}
        await tab.run(set_all.format(given) + "document.querySelector('#ask').requestSubmit()")
        await tab.until("document.querySelector('#log .content') && document.querySelector('#stop').disabled")
        assert (
            await tab.run(
                "document.querySelector('#log .user').textContent + document.querySelectorAll('#log b').length"
            )
            == "**hi** <b>x</b>0"
        )
        await tab.run(
            set_all.format({"schema": "{", "message": "a"}) + "document.querySelector('#ask').requestSubmit()"
        )
        await tab.until("document.querySelector('#log .error')?.textContent.includes('JSON')")
        assert await tab.run("document.documentElement.scrollWidth <= innerWidth")

    assert browse(scenario) == []
