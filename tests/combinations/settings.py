"""Settings of engines and requests, and the same few requests served under any of them together."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ksana_jax import LLM, SamplingParams, Steering
from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.recurrent import RecurrentSpec, ShortConvSpec
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.settings import engine_config
from ksana_jax.kv.codecs.registry import BLOCK_CODECS, CODECS
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.kv.eviction import EVICTION_METHODS
from ksana_jax.kv.selection import SELECTION_METHODS
from ksana_jax.loading.export import export_hf
from ksana_jax.methods.presets import PatternLike, read_patterns
from ksana_jax.models.params import OF_KEYS_AND_VALUES, init_params
from ksana_jax.scheduler.speculative import PROPOSERS, draft_lengths, draws_trees
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.ladders import make_buckets
from ksana_jax.scheduler.step.types import StepShape
from tests.engine.drafters import draft_model
from tests.engine.small import VOCAB, Letters, model
from tests.statistics_files import setting_of

NUM_TOKENS, BLOCK_SIZE = 24, 16
# Layers, query heads, kv heads and head dimension of the model.
HEADS = (2, 4, 2, 8)
STEPS = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 8, "query_tile": 1}
_RNG = np.random.default_rng(5)
_SHARED = _RNG.integers(2, VOCAB, 32)
# Short texts grow while long ones wait. One repeats itself, for drafts; two share two blocks.
PROMPTS = [
    np.tile(_RNG.integers(2, VOCAB, 5), 3)[:14],
    _RNG.integers(2, VOCAB, 12),
    np.concatenate([_SHARED, [5]]),
    np.concatenate([_SHARED, [8, 6]]),
]


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """One setting of an engine or of its requests.

    kind: settings of one kind exclude each other. engine: fields of `EngineConfig`. pattern: of the layers.
    params: of `SamplingParams`. keeps: whether tokens are promised to be those without it. repeats: whether tokens are
    promised to be the same whatever else is served. layers: that the model needs for it. kv_layers, recurrent: of the
    model.
    """

    name: str
    kind: str
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    pattern: PatternLike | Sequence[PatternLike] | None = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    keeps: bool = False
    repeats: bool = True
    layers: int = 1
    kv_layers: tuple[int, ...] | None = None
    recurrent: RecurrentSpec | None = None


def _evicts(method: str, name: str = "", num_layers: int = 1, **given: Any) -> Setting:
    # Rows hold up to 20 tokens, of texts of up to 57.
    settings = {"method": method, "budget": 20, "sinks": 4, "interval": BLOCK_SIZE, "prompts": "streamed"} | given
    if statistics := setting_of(method, HEADS):
        settings, num_layers = settings | statistics, HEADS[0]
    return Setting(name or f"kv_eviction {method}", "eviction", {"kv_eviction": settings}, layers=num_layers)


def _selects(method: str) -> Setting:
    # Two blocks of up to four.
    given = {"method": method, "budget": 2 * BLOCK_SIZE, "full_layers": 0}
    return Setting(f"kv_selection {method}", "selection", {"kv_selection": given})


def _stores(codec: str) -> Setting:
    return Setting(f"kv_cache_dtype {codec}", "codec", {"kv_cache_dtype": codec})


def _sees(name: str, pattern: Any, layers: int = 1) -> Setting:
    return Setting(f"pattern {name}", "pattern", pattern=pattern, layers=layers)


def _drafts(method: str, name: str = "", **given: Any) -> Setting:
    config = {"method": method, "num_speculative_tokens": 4} | given
    lossy = method == "bild"  # what it accepts depends on how far it has drafted
    name = f"speculative_config {name or method}"
    return Setting(name, "drafts", {"speculative_config": config}, keeps=not lossy, repeats=not lossy)


HOST, CACHE = {"host_cache_bytes": 1 << 18}, {"enable_prefix_caching": True, "prefix_report_blocks": 3}
# "f32" is the plain engine. Block codecs, and rotated ones, of fewer bits differ in how they pack their codes.
_OTHERS = [name for name in CODECS if name != "f32" and not name.startswith(("hadamard", "turboquant"))]
CODES = (*_OTHERS, "hadamard4", "turboquant4", "kivi4", "gear4", "gear_l4", "kvquant4")
PYRAMID = {"budget": 0.9, "prompts": "whole", "recent": 4, "layers": "pyramid"}
SINKS = {"window": 18, "num_sinks": 4}
# `Engines` replaces these by folders.
FOLDER, DRAFTER = "folder", "draft model"
OF_PROPOSERS = {
    "jacobi": {"window_size": 2, "ngram_size": 3, "num_speculative_tokens": 7},
    "draft_model": {"model": DRAFTER},
    "bild": {"model": DRAFTER, "fallback_threshold": 0.3, "rollback_threshold": 3.0},
}

_ALL = [
    # The oracle scores texts, and cannot generate.
    *(_evicts(name) for name in EVICTION_METHODS if name not in ("oracle", "adakv", "kvzip", "prefill_decode")),
    _evicts("kvzip", prompts="once", recent=4, instruction=[7, 3, 5]),
    _evicts("adakv", prompts="once", recent=4),
    _evicts("prefill_decode", prompts="whole", recent=4),
    _evicts("h2o", "kv_eviction simulated", memory="simulated"),
    _evicts("h2o", "kv_eviction once", prompts="once"),
    _evicts("snapkv", "kv_eviction pyramid", 2, **PYRAMID),
    *map(_selects, SELECTION_METHODS),
    *map(_stores, CODES),
    Setting("kv_full_precision_layers", "codec", {"kv_cache_dtype": "int8", "kv_full_precision_layers": [0]}, layers=2),
    _sees("window", {"window": 18}),
    _sees("dilated", {"window": 30, "stride": 2}),
    _sees("global", {"window": 18, "global_every": 8}),
    _sees("streaming_llm", SINKS | {"sink_position": "cache"}),
    _sees("lm_infinite", SINKS | {"sink_position": "ceiling"}),
    _sees("window and full", [{"window": 18}, "full"], 2),
    _sees("full heads", {"window": 18, "full_heads": [[1], [0]]}, 2),
    Setting("kv_layers", "model", layers=2, kv_layers=(0, 0)),
    Setting("recurrent layers", "model", layers=2, recurrent=ShortConvSpec((1,))),
    Setting("enable_prefix_caching", "cache", CACHE, keeps=True),
    Setting("host tier", "cache", CACHE | HOST, keeps=True),
    Setting("disk tier", "cache", CACHE | HOST | {"disk_cache_dir": FOLDER}, keeps=True),
    Setting("shared_prefix_attention", "attention", {"shared_prefix_attention": True}, keeps=True),
    *(
        Setting(f"preempt {how}", "preemption", HOST | {"preempt": how}, keeps=True)
        for how in ("swap", "recompute", "auto")
    ),
    *(_drafts(name, **OF_PROPOSERS.get(name, {})) for name in PROPOSERS),
    _drafts("trie", "branches", decoding_mode="hier"),
    _drafts("ngram", "rejection", acceptance="rejection"),
    Setting("beam_width", "completions", params={"beam_width": 2}),
    Setting("n", "completions", params={"n": 2, "temperature": 0.8, "seed": 3}),
    Setting("forced_token_ids", "forced tokens", params={"forced_token_ids": [*range(2, 2 + NUM_TOKENS)]}),
    Setting("steering", "steering", params={"steering": Steering({0: np.linspace(-1, 1, 32)}, {0: [1]})}),
    Setting("logprobs", "log-probabilities", params={"logprobs": 2, "prompt_logprobs": 1}, keeps=True),
    Setting("kept_tokens", "inspection", {"kept_tokens": True}, keeps=True),
    Setting("async_scheduling off", "asynchrony", {"async_scheduling": False}, keeps=True),
    Setting("num_scheduler_steps", "steps", {"num_scheduler_steps": 4}, keeps=True),
    Setting("tensor_parallel_size", "devices", {"tensor_parallel_size": 2}, keeps=True),
    Setting("numerics invariant", "numerics", {"numerics": "invariant"}, keeps=True),
    Setting("quantization int8", "weights", {"quantization": "int8"}),
    Setting("quantization w8a8", "weights", {"quantization": "w8a8"}),
    Setting("enable_lora", "adapters", {"enable_lora": True}, keeps=True),
    Setting("embedding_device host", "embedding", {"embedding_device": "host"}, keeps=True),
    Setting(
        "structured_outputs", "grammar", params={"structured_outputs": {"regex": "[a-m ]{99}"}, "ignore_eos": False}
    ),
]
SETTINGS = {setting.name: setting for setting in _ALL}


class OneShape(Buckets):
    """Decodes and chunks have one shape of steps: compiling is what these tests wait for."""

    def shape(self, num_decodes, counts, width, shares=False) -> StepShape:
        return super().shape(max(num_decodes, 1), list(counts) or [1], width, shares)


def of_layers(num_layers: int, made, kv_layers: tuple[int, ...] | None = None, recurrent: RecurrentSpec | None = None):
    """The first layers of a configuration and its weights, some of which may read another layer's keys and values, or
    be recurrent."""
    config, weights = made
    if recurrent is not None:
        config = dataclasses.replace(config.first_layers(num_layers), recurrent=recurrent).validate()
        return config, init_params(config, seed=3, std=0.5)
    config = dataclasses.replace(config.first_layers(num_layers), kv_layers=kv_layers).validate()
    layers = [
        weights.layers[n] if spec.attention.own_kv else weights.layers[n].replace(**dict.fromkeys(OF_KEYS_AND_VALUES))
        for n, spec in enumerate(config.layers)
    ]
    return config, weights.replace(layers=tuple(layers))


class Served(NamedTuple):
    """What PROMPTS gave. tokens: of each completion. again: the same, served in another order. logprobs: of prompts and
    tokens; None if none were asked for."""

    tokens: list[list[int]]
    again: list[list[int]]
    logprobs: list[float] | None
    num_preemptions: int


# Fields of a config on which compiled steps depend, beside layers, codec and eviction.
_compiled = operator.attrgetter(
    "kv_selection",
    "quantization",
    "kv_full_precision_layers",
    "num_blocks",
    "max_repositioned_sinks",
    "embedding_device",
    "numerics",
    "tensor_parallel_size",
    "enable_lora",
)


class Engines:
    """Makes engines under some settings. Those that compile the same steps share them.

    Args:
      folder: for disk tiers and draft models.
    """

    def __init__(self, folder: Path):
        self._folder, self._num_disks = folder, 0
        self._programs: dict[str, dict] = collections.defaultdict(dict)
        self._served: dict[Any, Served] = {}

    def serve(self, *settings: Setting, layers: int = 1) -> Served:
        """Serves PROMPTS together, and again in another order, with a pool that does not hold all of them.

        Args:
          layers: of the model, at least. What was served before is kept.

        Raises:
          ValueError: the engine or the requests are refused.
        """
        layers = max(layers, *(s.layers for s in settings))
        key = *(s.name for s in settings), layers
        if key not in self._served:
            self._served[key] = self._serve(settings, layers)
        return self._served[key]

    def forget_programs(self) -> None:
        """Frees compiled steps; what was served is kept."""
        self._programs.clear()
        jax.clear_caches()
        gc.collect()

    def _serve(self, settings: Sequence[Setting], layers: int) -> Served:
        given: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
        asked = SamplingParams(**functools.reduce(operator.or_, (s.params for s in settings), given))
        llm = self._make(settings, asked, layers)
        first = _generate(llm, PROMPTS, asked)
        again = _generate(llm, PROMPTS[::-1], asked)[::-1]
        count = llm.engine.scheduler.num_preemptions
        return Served(_tokens(first), _tokens(again), _logprobs(first) if asked.logprobs else None, count)

    def _make(self, settings: Sequence[Setting], asked: SamplingParams, num_layers: int) -> LLM:
        given = functools.reduce(operator.or_, (s.engine for s in settings), {})
        if "kv_eviction" in given and (codec := given.get("kv_cache_dtype")) in BLOCK_CODECS:
            given["kv_cache_dtype"] = {"k": codec, "v": codec, "residual": 1}  # exact tokens count in budgets
            fits = {"budget": max(given["kv_eviction"]["budget"], 40)} if given["kv_eviction"]["budget"] > 1 else {}
            given["kv_eviction"] = given["kv_eviction"] | fits
        kv_layers = next((s.kv_layers for s in settings if s.kv_layers), None)
        recurrent = next((s.recurrent for s in settings if s.recurrent), None)
        model_config, weights = of_layers(num_layers, model(), kv_layers, recurrent)
        patterns = read_patterns(next((s.pattern for s in settings if s.pattern), "full"), model_config)
        config = engine_config(STEPS | self._with_folders(given, num_layers)).for_model(model_config, patterns)
        layout = make_layout(model_config, patterns, config)
        most = max(layout.blocks_to_finish(len(prompt) + NUM_TOKENS, len(prompt)) for prompt in PROMPTS)
        if (eviction := layout.eviction) is not None and eviction.method.probes:
            twice = max(len(prompt) + len(eviction.method.probe(prompt)) for prompt in PROMPTS)
            most = max(most, -(-twice // config.block_size) * len(layout.groups))
        config = dataclasses.replace(config, num_blocks=3 * most if asked.num_sequences > 1 else most + 1)
        buckets = make_buckets(config, "cpu", draft_lengths(config), draws_trees(config))
        few = {f.name: getattr(buckets, f.name) for f in dataclasses.fields(Buckets)}
        few |= {name: few[name][-1:] for name in ("decodes", "tiles", "widths", "verifications")}
        # Calls of several steps, and draft models, have steps without chunks.
        kind = Buckets if config.num_scheduler_steps > 1 or config.speculative_config else OneShape
        groups = tuple(group.layers for group in layout.groups)
        programs = self._programs[
            repr(
                (
                    num_layers,
                    kv_layers,
                    layout.states,
                    layout.leaves,
                    groups,
                    config.kv_dtype,
                    config.kv_eviction,
                    _compiled(config),
                )
            )
        ]
        return LLM.around(
            build_engine(
                model_config,
                weights,
                config,
                patterns=patterns,
                tokenizer=Letters(),
                buckets=kind(**few),
                programs=programs,
            )
        )

    def _with_folders(self, given: dict[str, Any], num_layers: int) -> dict[str, Any]:
        found = dict(given)
        if "disk_cache_dir" in found:
            self._num_disks += 1
            found["disk_cache_dir"] = str(self._folder / f"disk {self._num_disks}")
        if "model" in (drafts := found.get("speculative_config", {})):
            found["speculative_config"] = drafts | {"model": self._drafter(num_layers)}
        return found

    def _drafter(self, num_layers: int) -> str:
        """A model near the target, which accepts most of its drafts."""
        path = self._folder / f"drafter {num_layers}"
        if not path.exists():
            export_hf(path, *of_layers(num_layers, draft_model("near")))
        return str(path)


def _generate(llm: LLM, prompts: Sequence[np.ndarray], asked: SamplingParams) -> list[RequestOutput]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked)
    scheduler = llm.engine.scheduler
    scheduler.check()
    assert not scheduler.has_work and scheduler.blocks.num_used == 0
    return outputs


def _tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [c.token_ids for o in outputs for c in o.outputs]


def _logprobs(outputs: list[RequestOutput]) -> list[float]:
    prompts = [(o.prompt_token_ids[1:], (o.prompt_logprobs or [])[1:]) for o in outputs]
    sampled = [(c.token_ids, c.logprobs or []) for o in outputs for c in o.outputs]
    return [
        entry[int(token)].logprob
        for tokens, entries in prompts + sampled
        for token, entry in zip(tokens, entries, strict=True)
        if entry is not None
    ]
