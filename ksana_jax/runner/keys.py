"""Lists the programs that an engine's requests can need, by their keys in the runner."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from ksana_jax.core.request import MAX_LOGPROBS, SamplingParams
from ksana_jax.runner.decode_loop import LoopKey, only_decodes
from ksana_jax.runner.state_program import StatesKey
from ksana_jax.runner.token_programs import bucket_of_top
from ksana_jax.runner.verification import VerificationKey
from ksana_jax.sampling.acceptance import rule_of
from ksana_jax.scheduler.step.settings import num_logprobs
from ksana_jax.scheduler.step.types import StepShape


def keys_for(
    shapes: Sequence[StepShape],
    num_sampled: Sequence[int],
    asked: Sequence[SamplingParams],
    loops: Collection[int],
    vocab_size: int,
    verifying: Sequence[StepShape] = (),
    acceptance: str = "sampled",
    drawn_shapes: Sequence[tuple[int, int]] = (),
    states: bool = False,
) -> list[Any]:
    """Returns the keys of all programs that steps of some shapes can need; see `Runner.programs`.

    Args:
      num_sampled: buckets of the tokens that are sampled in a step.
      asked: features that requests will use, in any mixture; plain greedy tokens are always provided for.
      loops: numbers of decodes that are one program with the choice of their tokens; with 1 among them, programs of
        layers alone are only for requests that such programs do not serve.
      verifying: shapes of steps with drafts, besides `shapes`. acceptance, drawn_shapes: of their
        drafts, see `VerificationKey`. states: True for a model with recurrent layers.
    """
    counts = [MAX_LOGPROBS if p.beam_width else num_logprobs(p) for p in asked]  # beams ask for candidates
    tops = {None} | {bucket_of_top(count, vocab_size) for count in counts if count >= 0}
    prompt_tops = {bucket_of_top(p.prompt_logprobs, vocab_size) for p in asked if p.prompt_logprobs is not None}
    kinds = {(False, False)} | {(True, False) for p in asked if not p.greedy or p.forced_token_ids}
    kinds |= {(True, True) for p in asked if p.penalised or p.min_tokens}
    masked = sorted({False} | {p.structured_outputs is not None for p in asked})
    serves_all = 1 in loops and not prompt_tops and not any(dense for _, dense in kinds) and not any(masked)
    keys: dict[Any, None] = dict.fromkeys(itertools.filterfalse(only_decodes, shapes) if serves_all else shapes)
    for tokens in {shape.num_tokens for shape in shapes}:
        keys |= dict.fromkeys(("score", tokens, top) for top in prompt_tops)
    for most, count in itertools.product({shape.max_sampled for shape in shapes}, num_sampled):
        keys |= dict.fromkeys(
            ("sample", most, count, *kind, masks, top) for kind in kinds for masks in masked for top in tops
        )
    keys |= dict.fromkeys(verifying)
    tree = any(shape.tree for shape in verifying)
    for shape in verifying:
        for (samples, dense), top, masks in itertools.product(kinds, tops, masked):
            rule = rule_of(acceptance, samples)
            drawn = [sizes for sizes in drawn_shapes if sizes[0] >= shape.parts[0].width] if samples else []
            of_shape = functools.partial(VerificationKey.of, shape, samples, dense, top, rule, tree=tree, masks=masks)
            found = [of_shape(sizes) for sizes in drawn or [None]]
            keys |= dict.fromkeys(found + [StatesKey.of(shape, key) for key in found if states])
    asked_of_loops = itertools.product(filter(only_decodes, shapes), loops, {samples for samples, _ in kinds}, tops)
    keys |= dict.fromkeys(LoopKey(*of_loop) for of_loop in asked_of_loops)
    return list(keys)
