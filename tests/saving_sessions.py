"""Sessions in random simulations: saved of any request, restored into the same engine or a later one."""

from __future__ import annotations

import random
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import NamedTuple

from ksana_jax.engine import sessions
from ksana_jax.engine.session_files import SessionError
from tests.simulation import Simulation


class Saved(NamedTuple):
    """A session in a folder. made_with: what its blocks depend on. num_blocks: of the session."""

    folder: Path
    num_tokens: int
    made_with: dict[str, str]


class SavingSessions(Simulation):
    """A `Simulation` that also saves and restores sessions. Its own numbers decide about them, so that seeds keep their
    meaning."""

    def __init__(self, rng: random.Random):
        self.saved: list[Saved] = []
        self.folder = Path(tempfile.mkdtemp(prefix="ksana-sessions-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        super().__init__(rng)
        self.aside = random.Random(f"{self.pattern} {self.settings['num_blocks']} {self.settings['max_num_seqs']}")

    def meanwhile(self) -> None:
        if self.settings["caching"] and self.aside.random() < 0.15:
            (self.restore_session if self.saved and self.aside.random() < 0.6 else self.save_session)()

    def save_session(self) -> None:
        requests = [r for r in self.requests if r.beams is None]
        if not requests:
            return
        request = self.aside.choice(requests)
        named = request.output() if request.finished else request.request_id
        folder = self.folder / str(len(self.saved))
        try:
            count = sessions.save_session(self.engine, named, folder)
        except SessionError as error:
            expected = "draft model", "nothing of request", "another request is computing"
            assert any(words in str(error) for words in expected), error
            return
        self.saved.append(Saved(folder, count, sessions._made_with(self.engine)))
        self.seen["sessions saved"] += 1

    def restore_session(self) -> None:
        """Into an engine with the same settings, if enough blocks are available; another one refuses it."""
        session, device = self.aside.choice(self.saved), self.engine.memory.device
        available = device.pool.num_available
        fits = session.made_with == sessions._made_with(self.engine)
        try:
            count = sessions.restore_session(self.engine, session.folder)
        except SessionError as error:
            words = f"{available:,} of {device.pool.num_blocks:,} are available" if fits else "was saved with"
            assert words in str(error), error
            assert device.pool.num_available == available
            self.seen["sessions refused"] += 1
            return
        assert fits and count == session.num_tokens
        self.engine.scheduler.check()
        self.seen["sessions restored"] += 1
