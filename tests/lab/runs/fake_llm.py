"""An LLM with the real interface and no model: log-probabilities count the keys of a query, blocks are counted."""

import itertools
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from ksana_jax.core.patterns import FULL, AttentionPattern, per_layer
from ksana_jax.core.request import SamplingParams
from ksana_jax.kv.visible_range import VisibleRange


class ByteTokenizer:
    bos_id = 256
    chat_template, no_template = None, ""

    def encode(self, text, add_special_tokens=True):
        return [self.bos_id] * add_special_tokens + list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class FakeLLM:
    """Context 16; each new length of step counts as one compilation. instances: those built so far."""

    instances: ClassVar[list["FakeLLM"]] = []

    def __init__(self, model, load_format="auto", pattern=None, **engine):
        self.model, self.load_format, self.given = model, load_format, engine
        self.config = EngineConfig(**engine)
        self.model_config = ModelConfig(max_position=16, num_layers=2)
        self.tokenizer = ByteTokenizer()
        self.block_bytes = 1024
        weights = np.zeros(2048 if self.config.quantization else 8192, np.uint8)
        self.runner = SimpleNamespace(params={"weights": weights})
        absent = dict.fromkeys(("selection", "eviction", "states"))
        layout = SimpleNamespace(**absent, block_bytes=self.block_bytes, leaves=(), places=(0,))
        self.engine = SimpleNamespace(scheduler=SimpleNamespace(layout=layout))
        self.num_blocks = 64
        self.kv_bytes_per_token = lambda num_tokens: self.block_bytes / self.config.block_size
        self.num_compilations = 0
        self.patterns_set = []
        self._shapes = set()
        self._clock = itertools.count()
        self.records = []
        self.built_with = pattern
        self.set_pattern(FULL)
        FakeLLM.instances.append(self)

    def set_pattern(self, pattern):
        self._patterns = per_layer(pattern or self.model_config.pattern, self.model_config.num_layers)
        self.patterns_set.append(pattern)

    def clear_records(self):
        self.records = []

    def generate(self, prompts, params):
        prompts = prompts if isinstance(prompts, list) else [prompts]
        whole = [[*p["prompt_token_ids"], *p.get("question_token_ids", ())] for p in prompts]
        return [self._generate(i, ids, params) for i, ids in enumerate(whole)]

    def _generate(self, index, ids, params):
        ids, num_prompt = list(ids), len(ids)
        assert num_prompt + params.max_tokens <= self.config.max_model_len
        arrival, first = next(self._clock) / 1000, None
        held, position = [], 0
        while len(ids) < num_prompt + params.max_tokens:
            before = len(ids)
            count = min(self.config.max_num_batched_tokens, before - position)
            held, peak = self._step(held, position, count)
            position += count
            if position == len(ids):
                ids.append(65 + index)
                first = first if first is not None else next(self._clock) / 1000
            finished = len(ids) == num_prompt + params.max_tokens
            live = 0 if finished else len(held)
            self.records.append(
                SimpleNamespace(
                    ended_s=next(self._clock) / 1000,
                    num_tokens=count,
                    num_decodes=int(count == 1),
                    num_running=1,
                    num_waiting=0,
                    blocks_in_use=live,
                    live_blocks=len(held),
                    num_new_tokens=int(len(ids) > before),
                    peak_blocks=peak,
                    num_preemptions=0,
                )
            )
        count = params.max_tokens
        metrics = RequestMetrics(arrival, first, next(self._clock) / 1000, count, longest_output=count)
        completion = CompletionOutput(0, "", ids[num_prompt:])
        scores = None if params.prompt_logprobs is None else self._scores(ids[:num_prompt])
        return RequestOutput(str(index), None, ids[:num_prompt], [completion], True, metrics, scores)

    def _step(self, held, position, count):
        if count not in self._shapes:
            self._shapes.add(count)
            self.num_compilations += 1
        size = self.config.block_size
        end = position + count
        held = sorted({*held, *range(position // size * size, end, size)})
        dead = VisibleRange.of(self._patterns).dead_blocks(np.array(held), size, end)
        return [start for start, gone in zip(held, dead, strict=True) if not gone], len(held)

    def _scores(self, ids):
        entries: list[dict[int, Logprob] | None] = [None]
        for t in range(1, len(ids)):
            seen = np.count_nonzero(self._patterns[0].visible(t - 1, np.arange(t)))
            entries.append({ids[t]: Logprob(-1 - 1 / seen, 1)})
        return entries


def fake_recompute_score(llm, ids, window, positions):
    """Like `engine.recompute.score`: a fresh run over the window before each position."""
    assert llm._patterns[0] == AttentionPattern()
    values = []
    for t in positions:
        fresh = ids[max(0, t - window) : t + 1]
        llm.generate({"prompt_token_ids": fresh}, SamplingParams(max_tokens=1))
        values.append(-1 - 1 / (len(fresh) - 1))
    return np.array(values)
