"""Requests to engines on the fake device: adding them, watching running ones, and checks after all have ended."""

import numpy as np

from tests.fakes import asking, prompt_of


def add(engine, prompt, max_tokens: int = 8, *, seed: int = 0, salt: str = "", **settings):
    """Adds a greedy request; a prompt given as a number has that many random ids."""
    ids = prompt_of(prompt, seed) if isinstance(prompt, int) else np.asarray(prompt, np.int32)
    return engine.add_request(ids, asking(max_tokens, **settings), cache_salt=salt)


def tokens_of(request) -> list[int]:
    return request.output().outputs[0].token_ids


def watch_batches(engine) -> list:
    """Batches as they are scheduled: (their rows' sequences, tokens of each)."""
    scheduler, seen = engine.scheduler, []
    schedule = scheduler.schedule

    def watched():
        batch = schedule()
        if batch is not None:
            seqs = [scheduler.rows.seqs[row] for row in batch.rows]
            seen.append(dict(zip(seqs, batch.num_per_row.tolist(), strict=True)))
            assert len(seen[-1]) == len(batch.rows), "a row is scheduled twice"
        return batch

    scheduler.schedule = watched
    return seen


def expect_empty(engine) -> None:
    """Nothing has an owner: on the device, on the host, or among the waiting."""
    engine.step()  # late reads that have ended
    engine.scheduler.check()
    memory = engine.memory
    assert not engine.has_work and not engine.requests
    assert not memory.blocks.ref_count.any() and memory.blocks.num_used == 0
    if memory.host is not None:
        assert not memory.host.pool.ref_count.any()
