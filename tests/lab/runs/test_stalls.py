"""A run says that no step ends, and how to end it; nothing before its first engine, or while steps end."""

import threading
import time
import types

from ksana_jax.engine import build
from ksana_jax.lab.runs.stalls import stalls_logged


def built():
    engine = types.SimpleNamespace(observers=[])
    for observe in build.observers:
        observe(engine)
    return engine


def wait_for(caplog, text):
    until = time.monotonic() + 20
    while text not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    return text in caplog.text


def test_a_run_whose_steps_do_not_end_says_so(caplog):
    with stalls_logged(after_s=0.05):
        time.sleep(0.2)
        assert not caplog.text
        engine = built()
        assert wait_for(caplog, "no step has ended for 0.05 s (")
        assert "Ctrl-C, twice" in caplog.text and len(engine.observers) == 1
    assert build.observers == []


def test_a_run_whose_steps_end_says_nothing(caplog):
    with stalls_logged(after_s=1):
        engine, ended = built(), threading.Event()

        def steps():
            while not ended.wait(0.01):
                engine.observers[0](engine)

        thread = threading.Thread(target=steps)
        thread.start()
        time.sleep(2.5)
        assert not caplog.text
        ended.set()
        thread.join()
        assert wait_for(caplog, "no step has ended for 1 s (")
