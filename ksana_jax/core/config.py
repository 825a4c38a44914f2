"""Configurations of models and engines, as frozen values. Knows no arrays, no files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

from ksana_jax.core import checks, recurrent, refusals, shared_kv
from ksana_jax.core.device_setting import canonical_device
from ksana_jax.core.dtypes import canonical_dtype, canonical_kv_dtype
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import path_problem
from ksana_jax.core.hosts_setting import canonical_distributed
from ksana_jax.core.layer_spec import (
    NORM_PLACEMENTS,
    PLAIN_ROPE,
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    NormPlacement,
    NormSpec,
    QKNorm,
    RopeConfig,
    SinkLogits,
    layer_indices,
    mlp_specs,
)
from ksana_jax.core.operator_settings import AUTO, OperatorSettings
from ksana_jax.core.patterns import FAR, FULL, AttentionPattern, per_layer
from ksana_jax.core.plugins import name_of
from ksana_jax.core.units import GIB


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Configures a decoder-only transformer; `layers` gives the specification of each layer.

    Args:
      rope, pattern: rotary embedding and attention pattern, one for all layers or a tuple with one per layer.
      attention_scale: factor of the attention scores; None is 1 / sqrt(head_dim).
      soft_cap, logit_soft_cap: attention scores and logits become cap * tanh(x / cap); None for no cap.
      sinks: each head has a logit without a key or a value in the softmax's denominator: "learned", or "zero" for
        softmax-off-by-one, whose logit is fixed at 0; None for neither. See `layer_spec.AttentionSpec`.
      alibi: slope of each head, by which scores fall with distance, see `layer_spec.AttentionSpec`; None for none.
      mlp, norm: kinds of the MLPs and norms, names in `models.mlp.MLPS` and `models.layers.NORMS`.
      experts: of layers, for kinds of MLPs that have them, see `layer_spec.ExpertsSpec`; None for none.
      qk_norm, norm_placement: see `layer_spec.AttentionSpec` and `layer_spec.NormSpec`.
      embed_scale, residual_scale, logit_scale: factors of the embedding's rows, of the outputs of attention and MLP
        when they are added to hidden states, and of the logits.
      position_offset: a table with a row for each position is added to the embedding, with so many rows before that of
        position 0; None for no such table. Sequences then have no more than max_position tokens.
      max_position: context length in tokens that the model was trained for.
      kv_layers: for each layer, the one whose keys and values it reads, see `core.shared_kv`; None if each has its own.
      latent: what the pool stores of a token instead of keys and values, see `layer_spec.LatentSpec`; None for those.
      out_gate, query_growth: see `layer_spec.AttentionSpec`.
      recurrent: layers that have a state instead of keys and values, see `core.recurrent`; None for none.
      kept: weights that stay in memory in a type of their file, with `quantization: stored`: (path in Params, type).
    """

    family: str = "llama"
    vocab_size: int = 32_000
    d_model: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 8
    head_dim: int = 64
    d_ff: int = 1408
    norm_eps: float = 1e-5
    rope: RopeConfig | tuple[RopeConfig, ...] = PLAIN_ROPE
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    attention_scale: float | None = None
    soft_cap: float | None = None
    logit_soft_cap: float | None = None
    sinks: SinkLogits | None = None
    alibi: tuple[float, ...] | None = None
    mlp: str = "swiglu"
    experts: ExpertsSpec | None = None
    norm: str = "rms"
    norm_placement: NormPlacement = "before"
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    position_offset: int | None = None
    max_position: int = 2048
    pattern: AttentionPattern | tuple[AttentionPattern, ...] = FULL
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    kv_layers: tuple[int, ...] | None = None
    latent: LatentSpec | None = None
    out_gate: bool = False
    query_growth: tuple[float, int] | None = None
    recurrent: recurrent.RecurrentSpec | None = None
    kept: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)

    def problems(self) -> list[str]:
        """Returns the problems of this shape, one sentence each; empty if it is valid."""
        sizes = ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff", "max_position")
        found = [problem for name in sizes if (problem := checks.integer(name, getattr(self, name)))]
        if not found and self.num_heads % self.num_kv_heads:
            found.append(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if isinstance(self.head_dim, int) and self.head_dim % 2:
            found.append(f"head_dim is {self.head_dim}, must be even for rotary embeddings")
        for name in ("rope", "pattern"):
            if isinstance(value := getattr(self, name), tuple) and len(value) != self.num_layers:
                found.append(f"{name} has {len(value)} entries, the model has {self.num_layers} layers")
        optional = ("attention_scale", "soft_cap", "logit_soft_cap")
        names = (*optional, "norm_eps", "embed_scale", "residual_scale", "logit_scale")
        problems = [checks.number(name, getattr(self, name), above=0, optional=name in optional) for name in names]
        problems += [checks.number("alibi", slope, above=0) for slope in self.alibi or ()]
        if self.alibi is not None and len(self.alibi) != self.num_heads:
            problems.append(f"alibi has {len(self.alibi)} slopes, num_heads is {self.num_heads}")
        problems.append(checks.integer("position_offset", self.position_offset, 0, optional=True))
        kinds = {"sinks": (None, "learned", "zero"), "qk_norm": (None, "head", "projection")}
        kinds |= {"norm_placement": tuple(NORM_PLACEMENTS)}
        problems += [checks.one_of(name, getattr(self, name), values) for name, values in kinds.items()]
        found += filter(None, problems)
        found += [] if self.experts is None else self.experts.problems()
        found += [] if self.latent is None else self.latent.problems(self.num_kv_heads, self.head_dim)
        found += ["out_gate does not go with latents"] * (self.out_gate and self.latent is not None)
        for rope in dict.fromkeys(self.rope if isinstance(self.rope, tuple) else (self.rope,)):
            found += rope.problems(self.head_dim)
        if self.kv_layers is not None and not found:
            found += shared_kv.problems(self.kv_layers, self.num_layers, self.rope)
        found += recurrent.problems(self)
        return found

    def validate(self) -> ModelConfig:
        """Checks the fields; returns itself.

        Raises:
          ConfigError: fields are invalid; one line lists all problems.
        """
        if found := self.problems():
            raise ConfigError("; ".join(found))
        return self

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The specification of each layer."""
        same = "num_heads num_kv_heads head_dim soft_cap sinks qkv_bias out_bias qk_norm alibi latent out_gate"
        given: dict[str, Any] = {name: getattr(self, name) for name in (*same.split(), "query_growth")}
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        attention = functools.partial(AttentionSpec, scale=scale, **given)
        mlps = mlp_specs(self.mlp, self.d_ff, self.mlp_bias, self.experts, self.num_layers)
        norms = NormSpec(self.norm, self.norm_eps, self.norm_placement)
        ropes = self.rope if isinstance(self.rope, tuple) else (self.rope,) * self.num_layers
        patterns, own_kv = per_layer(self.pattern, self.num_layers), shared_kv.own(self.kv_layers, self.num_layers)
        states = recurrent.of_layers(self.recurrent, norms, self.num_layers)
        return tuple(
            LayerSpec(attention(rope=rope, pattern=pattern, own_kv=own), mlp, norm, self.residual_scale, state)
            for rope, pattern, own, mlp, (state, norm) in zip(ropes, patterns, own_kv, mlps, states, strict=True)
        )

    def first_layers(self, num_layers: int) -> ModelConfig:
        """Returns the config of this model truncated to its first layers."""
        cut: dict[str, Any] = {name: getattr(self, name) for name in ("rope", "pattern", "kv_layers")}
        cut = {name: v[:num_layers] if isinstance(v, tuple) else v for name, v in cut.items()}
        cut |= {"num_layers": num_layers, "recurrent": recurrent.first_layers(self.recurrent, num_layers)}
        return dataclasses.replace(self, **cut)


# Positions and numbers of blocks, which are int32, stay below FAR. The host keeps arrays with a row for each sequence.
MAX_TOKENS = FAR - 1
MAX_SEQS = 2**20
MAX_DEVICES = 1024
QUANTIZATIONS = (None, "int8", "w8a8", "stored")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Configures the engine; every default works on a laptop.

    Args:
      dtype: dtype of weights and activations: "f32", "bf16" or "f16", in any common spelling ("float32", "half",
        jnp.bfloat16). "auto" takes the checkpoint's, "f32" for a quantised GGUF file, whose values have more bits than
        bf16, and "f32" instead of "f16" on a CPU, where XLA multiplies float16 3 to 20 times slower.
      quantization: "int8" stores the matrices of layers as codes with a scale per row, and computes in `dtype`; "w8a8"
        also rounds activations to codes, with a scale per token, and multiplies integers. Weights are quantised when
        they are loaded, which needs extra memory. Embedding, output head and norms keep their dtype. "stored" keeps
        the matrices of a quantised model, GGUF or safetensors (GPTQ, AWQ, compressed-tensors, FP8), on a CPU, in 4.5 to
        10 bits a number (`models.block_matrix.FORMS`); native products round activations to int8, with a scale for each
        32, but not for FP8, and operators.linear "xla" does not. None leaves all weights in `dtype`.
      kv_cache_dtype: how keys and values are stored: "auto" in the engine's dtype; or a name in `CODECS`
        (`kv.codecs.registry`): "f32", "bf16", "f16", "int8", "fp8_e4m3" ("fp8"), "fp8_e5m2", "int4", "int3", "int2",
        "hadamard4", "turboquant4" and the same with 3 and 2 bits; "latent8", see `methods.codecs.latent`; one in
        `BLOCK_CODECS`, such as "kivi4"; or "package.module:name" of your own. int8, fp8_e4m3 and turboquant have a
        float32 scale per token and KV head, int4 to int2 and hadamard a float16 scale and zero per 64 channels.
        Block codecs ("kivi4", "gear4", "gear_l4", "kvquant4", and the same with 3 and 2 bits) encode whole blocks and
        keep recent tokens in `dtype`: see `kv.codecs.sealing`, also for what {"k": "kivi2", "v": "int4", "residual":
        128, "group": 64} may have; a codec of `CODECS` then encodes each vector of a block.
      kv_full_precision_layers: layers whose keys and values are stored in `dtype` nevertheless. Every group of layers
        (`kv.layout`) must have equally many. On a GPU, XLA then computes the attention.
      block_size: tokens per KV block.
      num_blocks: blocks in the pool, each of one group of layers (`kv.layout`); None allocates as many as max_num_seqs
        sequences need, within memory_bytes.
      max_model_len: maximum tokens of a sequence, prompt plus output; None takes the model's max_position.
      max_num_seqs: maximum number of sequences that run at once.
      max_num_batched_tokens: maximum number of tokens computed in a step.
      query_tile: tokens of one sequence that form an attention tile in a step; many short chunks get tiles of a quarter
        of it. Hopper GPUs have a separate kernel for tiles of at least 128 queries x query heads of a group.
      policy: order of the waiting requests: a name in `SCHEDULING_POLICIES` (`scheduler.policies`),
        "package.module:name" of your own, or the function itself.
      async_scheduling: schedule and submit a step while the one before it runs; tokens are the same. Sampled tokens go
        from step to step on the device. Where a step depends on them in another way (beams, penalties, several
        completions of one prompt, prefix caching under a window, a tier on the host, the embedding on the host, a pool
        that is nearly full), the engine waits for them first.
      num_scheduler_steps: number of decode steps in one compiled call, while no request waits. They are scheduled at
        once; their tokens are sampled and fed on the device, arrive together, and are the same as step by step. A
        request that comes meanwhile waits for the call to end. Steps are computed one by one where fewer are left,
        where the pool lacks blocks for them or moves some, and where async_scheduling would wait for tokens.
      max_repositioned_sinks: maximum number of sink tokens that a pattern may place at "cache" or "ceiling" positions;
        for a sweep over patterns, set it to the largest of them. None takes as many as the pattern needs.
      memory_bytes: maximum bytes of the pool, with states, if neither num_blocks nor memory_fraction is given.
      memory_fraction: fraction of the device's memory for weights, pool and a step's temporary buffers together, if
        num_blocks is None; see `planner`.
      enable_prefix_caching: keep full blocks after use and reuse them by content. Off by default, because a measurement
        that repeats its prompts would otherwise measure the cache.
      prefix_replacement: which cached blocks are replaced first: a name in `REPLACEMENT_POLICIES` (`kv.replacement`),
        "package.module:name" of your own, or the function itself.
      state_snapshots: where states of recurrent layers are cached, see `kv.state_snapshots`; None: at prompts' ends.
      prefix_report_blocks: evicted blocks remembered to explain misses in `RequestOutput.prefix_report`; 0: no report.
      kv_eviction: method by which rows evict tokens that later queries could still see, and its settings, such as
        {"method": "h2o", "budget": 0.2}: see `kv.eviction`. None evicts nothing.
      kv_selection: method by which queries select the blocks that they read, and its settings, such as
        {"method": "quest", "budget": 1024}: see `kv.selection`. None reads all blocks.
      shared_prefix_attention: attend once to blocks that several rows of a step share, and merge the results.
      speculative_config: how draft tokens are guessed, and verified by one step for all of them, such as
        {"method": "ngram", "num_speculative_tokens": 4}: see `scheduler.speculative`. None decodes token by token.
      preempt: what happens to the keys and values of a preempted sequence: "swap" moves them to the host, "recompute"
        drops them, "auto" chooses the cheaper one by measured times. Without host memory, "recompute" is used.
      host_cache_bytes: bytes of host memory, allocated at the start, for swapped sequences and cached prefixes.
      disk_cache_dir: folder of the disk tier; None for no disk tier.
      disk_cache_bytes: maximum bytes of this model's files in that folder; files of other models are not counted.
      cache_write: when cached prefixes are written to the next slower tier: "back" when they are replaced, "through"
        when they are computed, "drop" never.
      kept_tokens: tell which tokens each layer and KV head has kept (`CompletionOutput.kept_tokens`). With freed
        `kv_eviction` the pool stores a position per token, layer and head; steps are computed one by one.
      embedding_device: where the token embedding is stored and looked up.
      numerics: "invariant" gives the same request the same tokens and log-probabilities bit by bit, whatever shares the
        batch and however its prompt is chunked, preempted, cached or resumed. It takes native attention, products and
        norms, which exist for CPUs with AVX2 and a C++ compiler, and blocks of a multiple of 16 tokens. "fast" takes
        what is fastest for each shape of a step.
      operators: the implementation of each operator, such as {"attention": "xla"}, or {"prefer": "agreement"} to choose
        by measured agreement: see `operator_settings`. "auto" takes the first that supports the model on this device;
        `ksana doctor` lists them.
      tensor_parallel_size: devices that divide each matrix and the KV heads among them (`ksana_jax.sharding`). Sizes in
        bytes and fractions of memory are per device.
      data_parallel_size: engine replicas, each on its own tensor_parallel_size devices; a request goes to the one that
        has served the longest part of its prompt before, or has the least work (`engine.distributed.replicas`). Sizes
        in bytes, of host memory too, are per replica.
      enable_lora: let requests name adapters (`LoRARequest`), LoRA or DoRA, as PEFT has saved them.
      max_loras: adapters on the device at once; requests with others wait for a slot.
      max_lora_rank: maximum rank of an adapter.
      max_cpu_loras: adapters kept in host memory, besides the adapters of unfinished requests; None keeps max_loras.
      seed: seed for requests without a seed.
      device: the device of the whole process: a platform of jax, such as "cpu", "cuda" or an installed PJRT plugin's
        "npu"; or {"platform": "npu", "plugin": "installed" | PATH.so | "package.module:function", "options": {},
        "donation": true, "memory_bytes": null, "features": {}}, see `DeviceTarget`. None takes jax's default.
      distributed: processes, usually one on each host, that divide the model among all of their devices:
        {"coordinator_address": "10.0.0.1:1234", "num_processes": 2, "process_id": 0} (`HostsSetting`), or
        "auto" under Slurm, Open MPI or another launcher that jax knows. tensor_parallel_size counts the devices of all;
        host_cache_bytes is per process. Process 0 has the requests; an `LLM` in another one computes for it
        and ends with it. With "spmd", as auto, each makes the same calls.
    """

    dtype: str = "f32"
    quantization: Literal["int8", "w8a8", "stored"] | None = None
    kv_cache_dtype: Any = "auto"
    kv_full_precision_layers: tuple[int, ...] = ()
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    query_tile: int = 32
    policy: Any = "fcfs"
    async_scheduling: bool = True
    num_scheduler_steps: int = 1
    max_repositioned_sinks: int | None = None
    memory_bytes: int = 2 * GIB
    memory_fraction: float | None = None
    enable_prefix_caching: bool = False
    prefix_replacement: Any = "lru"
    state_snapshots: dict[str, Any] | None = None
    prefix_report_blocks: int = 0
    kv_eviction: dict[str, Any] | None = None
    kv_selection: dict[str, Any] | None = None
    shared_prefix_attention: bool = False
    speculative_config: dict[str, Any] | None = None
    preempt: Literal["swap", "recompute", "auto"] = "auto"
    host_cache_bytes: int = 0
    disk_cache_dir: str | None = None
    disk_cache_bytes: int = GIB
    cache_write: Literal["back", "through", "drop"] = "back"
    kept_tokens: bool = False
    embedding_device: Literal["device", "host"] = "device"
    operators: OperatorSettings = AUTO
    numerics: Literal["fast", "invariant"] = "fast"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    seed: int = 0
    device: Any = None
    distributed: Any = dataclasses.field(default=None, metadata={"place": True})

    def __post_init__(self):
        object.__setattr__(self, "distributed", canonical_distributed(self.distributed))
        object.__setattr__(self, "device", canonical_device(self.device))
        object.__setattr__(self, "operators", OperatorSettings.of(self.operators))
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype, also=("auto",)))
        object.__setattr__(self, "kv_cache_dtype", canonical_kv_dtype(self.kv_cache_dtype))
        object.__setattr__(self, "kv_full_precision_layers", layer_indices(self.kv_full_precision_layers))
        if self.kv_full_precision_layers and self.kv_cache_dtype == "auto":
            raise ConfigError('kv_full_precision_layers needs another kv_cache_dtype than "auto"')
        sizes = {name: MAX_TOKENS for name in ("block_size", "max_num_batched_tokens", "query_tile")}
        sizes |= {"max_num_seqs": MAX_SEQS, "memory_bytes": 2**63 - 1, "num_scheduler_steps": MAX_TOKENS}
        checks.require(
            *(checks.integer(name, getattr(self, name), 1, most) for name, most in sizes.items()),
            checks.integer("num_blocks", self.num_blocks, 1, MAX_TOKENS, optional=True),
            checks.integer("max_model_len", self.max_model_len, 1, MAX_TOKENS, optional=True),
            checks.integer("max_repositioned_sinks", self.max_repositioned_sinks, 0, optional=True),
            checks.integer("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_DEVICES),
            checks.integer("data_parallel_size", self.data_parallel_size, 1, MAX_DEVICES),
            *(checks.integer(name, getattr(self, name), 0) for name in ("host_cache_bytes", "disk_cache_bytes")),
            checks.integer("prefix_report_blocks", self.prefix_report_blocks, 0, MAX_TOKENS),
            checks.integer("max_loras", self.max_loras, 1, 1024),
            checks.integer("max_lora_rank", self.max_lora_rank, 1, 4096),
            checks.integer("max_cpu_loras", self.max_cpu_loras, self.max_loras, optional=True),
            checks.integer("seed", self.seed, -(2**63), 2**63 - 1),
            checks.number("memory_fraction", self.memory_fraction, above=0, high=1, optional=True),
            checks.one_of("preempt", self.preempt, ("swap", "recompute", "auto")),
            checks.one_of("cache_write", self.cache_write, ("back", "through", "drop")),
            checks.one_of("embedding_device", self.embedding_device, ("device", "host")),
            checks.one_of("numerics", self.numerics, ("fast", "invariant")),
            checks.one_of("quantization", self.quantization, QUANTIZATIONS),
            *(checks.boolean(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.type == "bool"),
            error=ConfigError,
        )
        if self.numerics == "invariant" and (problems := self.operators.not_row_by_row(self.block_size)):
            raise ConfigError(f'numerics "invariant" does not go with {", ".join(problems)}')
        refusals.check(self.used())
        if (folder := self.disk_cache_dir) is None:
            return
        if path_problem("disk_cache_dir", folder) or not str(folder):
            raise ConfigError(f"disk_cache_dir is {folder!r}, must be the path of a folder or None")
        if not (self.enable_prefix_caching and self.host_cache_bytes):
            raise ConfigError("disk_cache_dir needs enable_prefix_caching and host_cache_bytes, its way to the disk")

    def used(self) -> dict[str, object]:
        """Returns the settings in use that others exclude, see `refusals`."""
        tp, dp, prefer = self.tensor_parallel_size, self.data_parallel_size, self.operators.prefer
        found: dict[str, object] = {name: getattr(self, name) not in (None, False, ()) for name in refusals.SETTINGS}
        return found | {
            "tensor_parallel_size": tp > 1 and f"tensor_parallel_size {tp}",
            "data_parallel_size": dp > 1 and f"data_parallel_size {dp}",
            refusals.INVARIANT: self.numerics == "invariant",
            refusals.HOST_EMBEDDING: self.embedding_device == "host",
            refusals.PREFER: prefer != "speed" and f"operators.prefer {prefer!r}",
        }

    @property
    def kv_dtype(self) -> str | dict[str, Any]:
        """Storage of keys and values: `kv_cache_dtype`, or `dtype` where that is "auto"."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def num_processes(self) -> int:
        """Number of processes that divide the model."""
        return 1 if self.distributed is None else self.distributed["num_processes"]  # the launcher has been asked

    def for_model(self, model: ModelConfig, patterns: Sequence[AttentionPattern]) -> EngineConfig:
        """Returns the config with max_model_len and max_repositioned_sinks filled in where they are None.

        Raises:
          ConfigError: the patterns differ between the kv heads of a layer, and a setting knows whole layers only.
        """
        used = {refusals.BY_HEAD: len(patterns) > model.num_layers, refusals.RECURRENT: model.recurrent is not None}
        refusals.check(self.used() | used)
        rotated = max(pattern.num_repositioned_sinks for pattern in patterns)
        return dataclasses.replace(
            self,
            max_model_len=self.max_model_len or model.max_position,
            max_repositioned_sinks=rotated if self.max_repositioned_sinks is None else self.max_repositioned_sinks,
        )

    def plain(self) -> dict[str, Any]:
        """Returns the fields as JSON values for records; a custom policy is given by its name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["operators"] = dataclasses.asdict(self.operators)
        return {name: list(value) if isinstance(value, tuple) else name_of(value) for name, value in values.items()}
