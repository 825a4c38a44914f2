"""Checks requests of an engine whose rows evict. Knows no steps."""

from __future__ import annotations

from ksana_jax.core.errors import ContextLengthError
from ksana_jax.core.request import RequestInput
from ksana_jax.scheduler.scheduler import Scheduler


def check_eviction(asked: RequestInput, scheduler: Scheduler) -> RequestInput:
    """Checks that the engine's eviction method can serve a request; returns it with a question of at least one token
    if the method probes. A request that is refused anyway is returned.

    Raises:
      ValueError: the method must know the whole text, or its probe is too long.
    """
    eviction, most = scheduler.layout.eviction, scheduler.max_model_len
    assert eviction is not None
    method, ids, width = eviction.method, asked.prompt_token_ids, max(asked.params.beam_width, 1)
    if not 0 <= asked.num_question < len(ids) or width > scheduler.max_num_seqs:
        return asked
    if method.probes:
        asked = asked._replace(num_question=asked.num_question or min(len(ids) - 1, 1))
    context = ids[: len(ids) - asked.num_question]
    name = f"kv_eviction {type(method).__name__}"
    if not eviction.can_serve(len(context), asked.params.max_len(len(ids), most)):
        raise ValueError(
            f"{name} must know the whole text beforehand: it scores texts in perplexity experiments, and cannot "
            "generate"
        )
    if method.probes and eviction.first_at(len(context)) <= len(context):
        blocks, num_groups, num_probe = scheduler.blocks, len(scheduler.layout.groups), len(method.probe(context))
        twice = f"context of {len(context):,} tokens and {num_probe:,} with which {name} probes it"
        if (length := len(context) + num_probe) > most:
            raise ContextLengthError(f"{twice} exceed max_model_len, which is {most:,}")
        needed = -(-length // blocks.block_size) * num_groups * width
        if needed > blocks.num_blocks:
            raise ContextLengthError(
                f"{twice} need {needed:,} KV blocks of {blocks.block_size} tokens, the pool has {blocks.num_blocks:,}"
            )
    return asked
