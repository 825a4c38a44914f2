"""Runs steps on the device by compiled programs, the KV pool donated. Knows no requests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ksana_jax.kv.moves import Moves
from ksana_jax.models.params import check_undeleted
from ksana_jax.runner.decode_loop import LoopKey, Stop, report_of, serves
from ksana_jax.runner.late_choice import LateChoice
from ksana_jax.runner.programs import ModelPrograms
from ksana_jax.runner.prompt_scores import scores_packing
from ksana_jax.runner.state_program import verify_step
from ksana_jax.runner.step_runs import ends_of
from ksana_jax.runner.token_programs import bucket_of_top, report_packing, settings_packing
from ksana_jax.runner.transfer import Fetched, started
from ksana_jax.scheduler.step.settings import SamplingArrays
from ksana_jax.scheduler.step.types import StepArrays, StepInput, StepOutput, StepShape


class Runner(ModelPrograms):
    """An `Executor` that runs a model; arguments as `ModelPrograms`."""

    # Tokens [J] that the last step samples, on the device.
    _sampled: Any = None
    # The last step's choice of tokens, if its mask was not known yet.
    _late: LateChoice | None = None

    @property
    def chooses_in_step(self) -> bool:
        """True if a step and the choice of its tokens are one program, where `decode_loop.serves` the step."""
        return self._tuning.chooses_in_step and not self.embeds_on_host

    @property
    def host_blocks(self) -> np.ndarray:
        """The host's blocks; see `step.executor.Executor`."""
        return self.mover.host_blocks

    @property
    def host_states(self) -> np.ndarray | None:
        return self.mover.states and self.mover.states.host_blocks

    def reset(self) -> None:
        """Reallocates the pool and the host's blocks; see `step.executor.Executor`."""
        num_blocks = self.cache.num_blocks
        for leaf in jax.tree.leaves(self.cache):
            leaf.delete()  # first: two may not fit
        self.cache, self._sampled, self._late = self.placement.pool(self.layout, num_blocks), None, None
        self.mover.reset()

    def submit(self, step: StepInput) -> StepOutput:
        """Starts one step; see `step.executor.Executor`. New shapes are compiled first."""
        if self.chooses_in_step and serves(step):
            return self.submit_together([step])[0]
        try:
            return self._run(step)
        except Exception:
            check_undeleted(self.params)
            raise

    def submit_together(self, steps: Sequence[StepInput]) -> list[StepOutput]:
        """Starts several steps in one call; see `step.executor.Executor`."""
        try:
            return self.run_loop(steps)[0]
        except Exception:
            check_undeleted(self.params)
            raise

    def _run(self, step: StepInput) -> StepOutput:
        self._choose_late()
        before, shape, sampling = len(self._compiled), step.shape, step.sampling
        finish, move_s, compiled = self._start_moves(step.moves)
        run, vector = self.compile_step(shape), self.packed(shape, step.arrays, sampling)
        given = self.params.embed[step.arrays.tokens] if self.embeds_on_host else self._fed(shape)
        self.cache, hidden, sampled, settings = run(self.params, self.cache, vector, given, self._patterns.arrays)
        if inputs := self.cache.inputs:
            self.cache = self.cache.replace(inputs=())  # pyright: ignore[reportAttributeAccessIssue]
        tokens, prompt_scores, ends = None, None, ends_of(self.params)
        if step.targets is not None:
            count, top = shape.num_tokens, bucket_of_top(step.num_prompt_logprobs, self.config.vocab_size)
            score_prompt = self._program(("score", count, top))
            prompt_scores = Fetched(score_prompt(ends, hidden, step.targets), scores_packing(count, top)).result
        dense = None if sampling is None or sampling.counts is None else tuple(sampling[-3:])
        asked = None if sampling is None else settings, dense
        num_top = None if step.num_logprobs is None else bucket_of_top(step.num_logprobs, self.config.vocab_size)
        if step.drafts is not None:
            tokens = verify_step(self, step, inputs, sampled, asked, num_top)
        elif step.num_sampled:
            kinds = sampling is not None, dense is not None, step.mask is not None
            choose = self.compile_sampler(sampled, step.num_sampled, *kinds, num_top)
            packing = report_packing(step.num_sampled, num_top)
            if callable(step.mask):
                self._late = LateChoice(functools.partial(choose, ends, sampled, *asked), step.mask, packing)
                tokens = self._late.result
            else:
                self._sampled, report = choose(ends, sampled, *asked, step.mask)
                tokens = Fetched(report, packing).result
        output = started(tokens, prompt_scores, finish, move_s, compiled or len(self._compiled) > before)
        if step.pools:
            hidden.copy_to_host_async()
            output.hidden = hidden
        return output

    def _choose_late(self) -> None:
        """Starts the choice of the last step's tokens, if it has not been."""
        if self._late is not None:
            (self._sampled, _), self._late = self._late.chosen, None

    def run_loop(
        self, steps: Sequence[StepInput], distributions: bool = False, stop: Stop | None = None
    ) -> tuple[list[StepOutput], Any]:
        """Starts several steps in one call.

        Args:
          distributions: whether to return those that tokens are drawn from. stop: ends the loop early.

        Returns:
          The outputs; and the distributions of all steps on the device, see `LoopKey`, or None.
        """
        self._choose_late()
        before, key = len(self._compiled), LoopKey.of(steps, self.config.vocab_size, distributions, stop)
        finish, move_s, compiled = self._start_moves(steps[0].moves)
        vectors = np.stack([self.packed(each.shape, each.arrays, each.sampling) for each in steps])
        run, given = self._program(key), self._fed(key.shape)
        made = run(self.params, self.cache, vectors, given, self._patterns.arrays, stop)
        self.cache, self._sampled, reports, drawn_from = made
        fetched = Fetched(reports, report_packing(key.shape.num_tokens, key.num_top))
        compiled |= len(self._compiled) > before
        first, *others = (functools.partial(report_of, fetched, at) for at in range(len(steps)))
        return [started(first, None, finish, move_s, compiled), *map(started, others)], drawn_from

    def packed(self, shape: StepShape, arrays: StepArrays, sampling: SamplingArrays | None = None) -> np.ndarray:
        """Returns a step's arrays and sampling settings as the vector that its program takes."""
        if self.embeds_on_host:
            arrays = arrays._replace(tokens=None)
        settings = None
        if sampling is not None:
            settings = settings_packing(shape.max_sampled).pack(sampling[:-3])
        return (self._packings.get(shape) or self._packing_of(shape)).pack((arrays, settings))

    def _fed(self, shape: StepShape) -> Any:
        """Returns the tokens that a step takes from the previous one."""
        if self._sampled is None or len(self._sampled) != shape.max_sampled:
            self._sampled = self.placement.everywhere(np.zeros(shape.max_sampled, np.int32))
        return self._sampled

    def move(self, moves: Moves) -> None:
        """Makes moves outside a step; see `step.executor.Executor`."""
        if (finish := self._start_moves(moves)[0]) is not None:
            finish()

    def _start_moves(self, moves: Moves | None) -> tuple[Callable[[], None] | None, float, bool]:
        """Starts moves on the device; returns a function that finishes them on the host, or None, the seconds they took
        if the host waited, and whether a program was compiled for them."""
        if moves is None:
            return None, 0.0, False
        before, early, num_saved, checks = self.num_compilations, [], 0, []
        if self.evictor is not None:
            for evictions, until in zip(moves.evictions, moves.num_early, strict=True):
                early += self.mover.save(self.cache, moves.saves[num_saved:until])
                self.cache, num_saved = self.evictor.start(self.cache, evictions, checks), until
        self.cache, saved, move_s = self.mover.start(self.cache, moves, early, num_saved)
        return functools.partial(self.mover.finish, saved, checks), move_s, self.num_compilations > before

    def _program(self, key: Any) -> Callable:
        return self._compiled[key] if key in self._compiled else self._compile(key)

    def compile_step(self, shape: StepShape) -> Callable:
        """The network on a step of one shape; see `step_program.lower_whole`."""
        return self._program(shape)

    def compile_sampler(
        self, hidden, count: int, samples: bool, dense: bool, masks: bool, num_top: int | None
    ) -> Callable:
        """Logits and the choice of tokens; takes (params, hidden, settings, dense, mask), see `choose_tokens`.

        Args:
          hidden: [J, D], or its shape. count: number of chosen tokens, after the first ones of hidden.
          samples: True with settings. dense: True with penalties or biases. masks: True with a mask.
          num_top: most probable tokens to score; None scores nothing.
        """
        return self._program(("sample", hidden.shape[0], count, samples, dense, masks, num_top))
