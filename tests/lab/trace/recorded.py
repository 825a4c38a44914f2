"""A recording of an engine that serves requests of every kind."""

from ksana_jax.lab import recording
from ksana_jax.lab.trace.recorder import Recorder
from tests.fakes import asking, make_engine, prompt_of, run, step

SETTINGS = {"num_blocks": 12, "host_slots": 8, "caching": True, "preempt": "swap", "max_model_len": 40}


def live(engine):
    """Requests of every kind that arrive between steps; one is aborted, and blocks run short."""
    for i in range(6):
        more = [{"n": 2, "temperature": 1.0, "seed": 3}, {"beam_width": 2}, {"temperature": 0.7}, {}][i % 4]
        engine.add_request(prompt_of(9 + i, i % 3), asking(10, **more), request_id=f"r{i}")
        step(engine)
        if i == 3:
            engine.abort("r2")
    run(engine)


def record(folder, drive=live, **settings):
    engine = make_engine(**SETTINGS | settings)
    recorder = Recorder(engine)
    drive(engine)
    recorder.stop()
    recorder.write(folder / recording.NAME)
    return recording.read_decisions(folder), engine
