"""An engine as a process in simulated time: takes requests between two steps, and steps while it has work. No jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.request import RequestInput, SamplingParams
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.completion import Request
from ksana_jax.engine.engine import Engine
from ksana_jax.kv.disk.block_file import BlockFormat
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.lab.simulator.answers import Answers, PlannedAnswer
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.cost import Cost, Coverage, Seed
from ksana_jax.lab.simulator.executor import SimExecutor
from ksana_jax.lab.simulator.sim_adapters import NO_ADAPTERS, SimAdapters, adapter_of
from ksana_jax.lab.simulator.sim_disk import SimDisk
from ksana_jax.lab.simulator.step_size import SizeBuilder
from ksana_jax.methods.presets import PatternLike, read_patterns
from ksana_jax.scheduler.step.ladders import make_buckets
from ksana_jax.serve.workload.report import RequestTimes

if TYPE_CHECKING:
    from ksana_jax.serve.workload.items import WorkItem


@dataclasses.dataclass(eq=False)
class Served:
    """Times of one request in seconds of the simulation; NaN for events that did not happen.

    num_output: tokens of the answer. finish_reason: as of a completion, or "refused"; None while it is open.
    error: why it was refused.
    """

    item: WorkItem
    arrival_s: float
    scheduled_s: float = math.nan
    first_token_s: float = math.nan
    finished_s: float = math.nan
    num_output: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(
            self.item.index,
            self.arrival_s,
            self.first_token_s,
            self.finished_s,
            self.item.num_prompt,
            self.num_output,
            self.num_cached_tokens,
            error=None if self.finish_reason in (None, "stop", "length") else self.finish_reason,
            client=self.item.client,
        )


class SimEngine:
    """A real engine with its scheduler and KV memory; only the steps are simulated.

    The engine has a separate clock, which runs ahead of the events' while it computes a step, because nothing reaches
    an engine in the middle of one. A step takes effect at its end.

    Args:
      events: the simulation's time and events; several engines share it.
      cost: of steps; engines may share one.
      seed: of the noise of steps' times; None for none.
      patterns: None takes the model's own.
      platform: whose buckets the steps are padded to: "cpu", "gpu" or "tpu".
      answered, ended: called with each request when it has its first token, and when it has ended or was refused.
      stepped: called after each step, at its end.

    Attributes:
      open: requests that have not ended, by id. disk: None if there is no disk tier.

    Raises:
      ConfigError: config leaves num_blocks open.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        events: VirtualClock,
        cost: Cost,
        *,
        patterns: PatternLike | Sequence[PatternLike] | None = None,
        platform: str = "cpu",
        seed: Seed = None,
        ended: Callable[[Served], None] = lambda served: None,
        answered: Callable[[Served], None] = lambda served: None,
        stepped: Callable[[SimEngine], None] = lambda engine: None,
    ):
        if (num_blocks := config.num_blocks) is None:
            raise ConfigError("a simulated engine needs num_blocks: the pool's size is part of what is simulated")
        seen = read_patterns(patterns, model)
        config = config.for_model(model, seen)
        self.events, self.timer, self.clock = events, cost.start(seed), VirtualClock(events())
        self.ended, self.answered, self.stepped = ended, answered, stepped
        layout = make_layout(model, seen, config)
        of_states = layout.state_bytes_of(config.host_cache_bytes, num_blocks)
        slot_bytes = layout.states.slot_bytes if layout.states else 1
        host = (config.host_cache_bytes - of_states) // layout.block_bytes, layout.block_bytes
        self.executor = SimExecutor(self.clock, self.timer, seen, *host, of_states // slot_bytes, slot_bytes)
        self.disk: SimDisk | None = None
        tiers: dict[str, Any] = {}
        if config.disk_cache_dir is not None:  # only its presence matters
            of_states = layout.state_bytes_of(config.disk_cache_bytes, num_blocks)
            format = BlockFormat.of(layout, "simulated")
            self.disk = SimDisk(format, config.disk_cache_bytes - of_states, self.clock, cost.move)
            config, tiers = dataclasses.replace(config, disk_cache_dir=None), {"disk": self.disk}
            if layout.of_states is not None:
                format = BlockFormat.of(layout.of_states, "simulated")
                tiers["disk_states"] = SimDisk(format, of_states, self.clock, cost.move)
        self.engine: Engine = build_engine(
            model,
            None,
            dataclasses.replace(config, **NO_ADAPTERS),
            patterns=seen,
            executor=self.executor,
            clock=self.clock,
            buckets=make_buckets(config, platform, model=model),
            **tiers,
        )
        self._adapts = config.enable_lora
        if self._adapts:
            adapters: Any = SimAdapters(model, config, cost.move.loaded, self.executor.occupy)
            self.engine.factory.adapters = adapters
        self.answers = Answers(config.max_num_seqs, model.eos_ids, self.clock)
        self.engine.builder = SizeBuilder.like(self.engine.builder, self.answers, self.executor.host_works)
        self.open: dict[str, tuple[Served, PlannedAnswer, Request]] = {}
        self._stepping = False

    @property
    def busy_s(self) -> float:
        """Seconds of work of the device."""
        return self.executor.busy_s

    @property
    def coverage(self) -> Coverage:
        """Coverage of the steps by the cost model."""
        return self.timer.coverage

    def submit(self, item: WorkItem, *, cache_salt: str = "") -> Served:
        """Passes a request on to the engine, at the time of the events.

        Returns:
          The request's progress; already ended, with the reason, if the engine refuses it.
        """
        served = Served(item, self.events())
        self.enter(served, cache_salt)
        return served

    def enter(self, served: Served, cache_salt: str = "") -> None:
        """Passes on a request that has arrived, now or before."""
        now, item = self.events(), served.item
        params = SamplingParams(temperature=0, max_tokens=item.max_tokens, detokenize=False)
        adapter = adapter_of(item.client) if self._adapts else None
        asked = RequestInput(np.asarray(item.tokens(), np.int32), params, None, cache_salt, lora_request=adapter)
        try:
            [request] = self.engine.new_requests([asked])
        except ValueError as error:
            served.finished_s, served.finish_reason, served.error = now, "refused", str(error)
            self.events.at(now, lambda: self.ended(served))
            return
        request.metrics.arrival_s = served.arrival_s
        answer = PlannedAnswer(np.asarray(item.output_tokens(), np.int32))
        self.answers.expect(request.request_id, answer)
        self.open[request.request_id] = served, answer, request
        self.engine.add([request])
        if not self._stepping:
            self._stepping = True
            self.events.at(now, self._step)

    def _step(self) -> None:
        """Computes a step that begins now and takes effect at its end."""
        self.clock.advance_to(self.events())
        done = [request for request in self.engine.step() if request.finished]
        self.events.at(self.clock(), lambda: self._report(done))

    def _report(self, done: list[Request]) -> None:
        for request_id in list(self.answers.computing):
            served, _, request = self.open[request_id]
            if request.metrics.first_token_s is not None:
                del self.answers.computing[request_id]
                served.first_token_s = request.metrics.first_token_s
                self.answered(served)
        for request in done:
            served, answer, _ = self.open.pop(request.request_id)
            self.answers.forget(request.request_id)
            metrics = request.metrics
            served.scheduled_s, served.finished_s = answer.scheduled_s, self.events()
            served.num_output, served.num_preemptions = metrics.num_output_tokens, metrics.num_preemptions
            served.num_cached_tokens = metrics.num_cached_tokens
            served.finish_reason = str(request.completions[0].seq.finish_reason)
            self.ended(served)
        self.stepped(self)
        if self.engine.has_work:
            self._step()
        else:
            self._stepping = False
