"""Scheduling policies other than order of arrival (`scheduler.waiting.fcfs`): sequences of lower rank run earlier."""

from __future__ import annotations

from ksana_jax.scheduler.sequence import Sequence


def shortest_first(seq: Sequence) -> float:
    """Serves the shortest prompt first: lower mean latency, but under sustained load a long prompt may starve."""
    return seq.num_prompt


def fewest_tokens_left(seq: Sequence) -> float:
    """Serves the request with the fewest prompt tokens plus max_tokens first."""
    return seq.max_len


class LongestPrefix:
    """Runs requests that share a prefix together, so that it is computed once; groups in order of their first request.

    Within a group prompts are in lexicographic order, which puts the longest common prefixes next to each other. A
    group accepts at most `patience` requests after its first one, so no request is overtaken by more than that many.
    The default is four times the number of rows.

    Source: KsanaLLM's scheduling by longest common prefix; SGLang's depth-first order, arXiv:2312.07104.
    """

    def __init__(self, max_num_seqs: int, *, patience: int | None = None, prefix: int = 32):
        self._patience = 4 * max_num_seqs if patience is None else patience
        self._prefix = prefix
        self._first: dict[tuple[str, bytes], int] = {}

    def rank(self, seq: Sequence) -> tuple[int, bytes]:
        # Big endian: bytes then sort as the numbers do.
        tokens = seq.token_ids.astype(">i4").tobytes()
        group = (seq.kv.salt, tokens[: 4 * self._prefix])
        first = self._first.get(group)
        if first is None or seq.seq_id - first > self._patience:
            if len(self._first) > 4096:
                self._first = {g: f for g, f in self._first.items() if seq.seq_id - f <= self._patience}
            self._first[group] = first = seq.seq_id
        return (first, tokens)
