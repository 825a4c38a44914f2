"""The configuration of a training run: its YAML file as dataclasses. Knows no arrays."""

from __future__ import annotations

import dataclasses
import difflib
import io
import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.layer_spec import LatentSpec, RopeConfig, rotated_part
from ksana_jax.core.recurrent import DeltaRuleSpec
from ksana_jax.core.shared_kv import shared_by
from ksana_jax.core.yaml_numbers import check_numbers


@dataclasses.dataclass
class LatentShape:
    """Sizes of latents, see `ksana_jax.core.layer_spec.LatentSpec`."""

    rank: int = 56
    rotated: int = 8
    plain: int = 16
    value: int = 16


@dataclasses.dataclass
class HybridShape:
    """Gated delta rules in all layers but each `interval`-th, of num_heads heads; sizes as in
    `ksana_jax.core.recurrent.DeltaRuleSpec`."""

    interval: int = 4
    num_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64


@dataclasses.dataclass
class ModelShape:
    """Shape of the Llama model to train; names as in `ksana_jax.core.config.ModelConfig`.

    cla_share_factor: layers in a row that share the keys and values of the first of them (arXiv:2405.12981); 2 halves
    the bytes of a token.
    latent: trains multi-head latent attention, as a model of the family youtu; num_kv_heads and head_dim are then 1 and
    a latent's.
    hybrid: trains recurrent layers, as a model of the family qwen3_5_text, whose attention has norms and a gate too.
    """

    d_model: int = 192
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    d_ff: int = 512
    rope_theta: float = 10_000.0
    sinks: str | None = None
    cla_share_factor: int = 1
    latent: LatentShape | None = None
    hybrid: HybridShape | None = None


@dataclasses.dataclass
class LoraSettings:
    """The adapter to train; as in PEFT's LoraConfig, except that target_modules are ends of names and no patterns."""

    rank: int = 8
    alpha: float = 16.0
    target_modules: list[str] = dataclasses.field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclasses.dataclass
class TrainConfig:
    """Configures a training run; the YAML file mirrors these fields.

    Args:
      out_dir: folder of checkpoints, encoded corpus, tokenizer and log; a run with an existing out_dir resumes.
      export_dir: Hugging Face directory written at the end; None takes out_dir/export.
      first_export_s: training seconds after which the unfinished model is exported as well, or None.
      init_from: an embedded model, or a Hugging Face directory with a tokenizer.model: the run starts from its weights
        and has its tokenizer; with fewer num_kv_heads, from the means of heads. None starts from random weights and
        trains a tokenizer.
      lora: trains an adapter of the model of init_from, whose own weights stay as they are; the export is then a folder
        as PEFT saves it. None trains all weights. init_from may be any model of full attention, such as "smollm2";
        `model` and `vocab_size`, if they differ from their defaults, must be its own.
      corpus_dir: directory of *.py files; None takes the running interpreter's standard library.
      vocab_size: pieces of the SentencePiece tokenizer.
      tokenizer_sample_bytes: bytes of training files that the tokenizer is trained on.
      bos: whether position 0 of every sequence holds the beginning-of-text token; the exported tokenizer then adds it.
      recall_fraction: fraction of sequences that are recall examples (`ksana_jax.lab.recall`) instead of text.
      context: tokens per training sequence, including the beginning-of-text token if there is one.
      batch_size: sequences per step.
      learning_rate: peak; linear warm-up over warmup_steps, constant, linear decay to 0 in the last decay_fraction.
      num_steps: optimiser steps of the whole run, or None; budget_s: its training seconds, or None. Whichever ends
        first ends the run, and the decay follows the one that is further along.
      weight_decay: on matrices. Large values make attention sinks strong (arXiv:2410.10781, section 5).
      compute_dtype: of matrix products, "f32" or "bf16"; master weights, sums and softmax are float32.
      log_every, eval_every: steps; checkpoints are written only at multiples of log_every.
      eval_sequences: held-out sequences of `context` tokens for measuring held-out loss and Sink_1.
      checkpoint_every_s: seconds between checkpoints; checkpoint_every: steps, or None.
      keep_checkpoints: number of newest checkpoints to keep.
    """

    out_dir: str = "runs/ksana-tiny"
    export_dir: str | None = None
    first_export_s: float | None = None
    init_from: str | None = None
    lora: LoraSettings | None = None
    corpus_dir: str | None = None
    seed: int = 0
    model: ModelShape = dataclasses.field(default_factory=ModelShape)
    vocab_size: int = 1024
    tokenizer_sample_bytes: int = 6_000_000
    bos: bool = True
    recall_fraction: float = 0.0
    context: int = 256
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 200
    decay_fraction: float = 0.2
    num_steps: int | None = None
    budget_s: float | None = 6600.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.5
    clip_norm: float = 1.0
    compute_dtype: str = "bf16"
    log_every: int = 50
    eval_every: int = 500
    eval_sequences: int = 128
    checkpoint_every_s: float = 180.0
    checkpoint_every: int | None = None
    keep_checkpoints: int = 3

    def model_config(self) -> ModelConfig:
        """Returns the engine's configuration of the model.

        Raises:
          ConfigError: there is an adapter to train, and training does not compute the model of init_from.
        """
        if self.lora is not None and self.init_from is not None:
            from experiments.training.adapted_model import adapted_model

            return adapted_model(self.init_from)
        shape = dataclasses.asdict(self.model)
        theta, kv_layers = shape.pop("rope_theta"), _kv_layers(shape)
        own_format = "llama" if self.model.sinks is None else "llama_sinks"
        family, rope = own_format if kv_layers is None else "llama_cla", RopeConfig(theta=theta)
        if (sizes := shape.pop("latent")) is not None:
            latent = LatentSpec(**sizes)
            part = rotated_part(latent.rank, latent.rotated)
            family, rope = "youtu", dataclasses.replace(rope, partial_rotary_factor=part)
            scale = (latent.plain + latent.rotated) ** -0.5
            shape |= {"latent": latent, "num_kv_heads": 1, "head_dim": latent.head_dim, "attention_scale": scale}
        if (sizes := shape.pop("hybrid")) is not None:
            family, shape = "qwen3_5_text", shape | _delta_rules(shape["num_layers"], **sizes)
        return ModelConfig(
            family=family,
            kv_layers=kv_layers,
            vocab_size=self.vocab_size,
            rope=rope,
            tie_embeddings=True,
            max_position=self.context,
            bos_id=1 if self.bos else None,
            eos_ids=(2,),
            **shape,
        )

    def validate(self) -> TrainConfig:
        """Checks the fields; returns itself.

        Raises:
          ConfigError: fields are invalid; one line lists all of them.
        """
        problems: list[str | None] = []
        for name in (
            "batch_size",
            "log_every",
            "eval_every",
            "eval_sequences",
            "keep_checkpoints",
            "num_steps",
            "checkpoint_every",
            "budget_s",
            "checkpoint_every_s",
            "learning_rate",
            "clip_norm",
            "first_export_s",
            "tokenizer_sample_bytes",
        ):
            problems.append(checks.number(name, getattr(self, name), above=0, optional=True))
        problems += [
            *(checks.number(name, getattr(self, name), 0) for name in ("warmup_steps", "weight_decay")),
            *(checks.number(name, getattr(self, name), 0, below=1) for name in ("beta1", "beta2")),
            checks.number("recall_fraction", self.recall_fraction, 0, 1),
            checks.number("decay_fraction", self.decay_fraction, 0, 1),
            checks.one_of("compute_dtype", self.compute_dtype, ("f32", "bf16")),
        ]
        found = [problem for problem in problems if problem is not None]
        factor, num_layers = self.model.cla_share_factor, self.model.num_layers
        if problem := checks.integer("cla_share_factor", factor, 1, num_layers):
            found.append(problem)
        elif factor > 1 and self.model.sinks is not None:
            found.append(f"cla_share_factor {factor} does not go with sinks {self.model.sinks!r}: no family has both")
        elif problems_of_kinds := self._kind_problems():
            found += problems_of_kinds
        elif self.lora is None:
            found = self.model_config().problems() + found
        else:
            found += self._lora_problems(self.lora)
            found = found or self._adapted_problems()
        if self.num_steps is None and self.budget_s is None:
            found.append("neither num_steps nor budget_s is given: the run would never end")
        if self.vocab_size < 3 + 256 + 2:
            found.append(f"vocab_size is {self.vocab_size}, must be at least 261: 3 control pieces, 256 bytes, 2 more")
        if self.vocab_size > 2**16:
            found.append(f"vocab_size is {self.vocab_size:,}, must be at most 65,536: ids are kept in 16 bits")
        if self.context < 64:
            found.append(f"context is {self.context}, must be at least 64: Sink_1 is measured over 64 tokens")
        for name in ("eval_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and self.log_every > 0 and value % self.log_every:
                found.append(f"{name} {value} is not a multiple of log_every {self.log_every}")
        if found:
            raise ConfigError("; ".join(found))
        return self

    def _kind_problems(self) -> list[str]:
        shape = self.model
        kinds = {
            "cla_share_factor": shape.cla_share_factor > 1,
            "sinks": shape.sinks is not None,
            "latent": shape.latent is not None,
            "hybrid": shape.hybrid is not None,
        }
        given = [name for name, is_given in kinds.items() if is_given]
        if len(given) > 1 and set(given) & {"latent", "hybrid"}:
            return [f"{given[-1]} does not go with {name}: no family has both" for name in given[:-1]]
        if shape.hybrid is not None and (problem := checks.integer("hybrid interval", shape.hybrid.interval, 2)):
            return [problem]
        if shape.latent is None:
            return []
        latent = LatentSpec(**dataclasses.asdict(shape.latent))
        return latent.problems(1, latent.head_dim)

    def _lora_problems(self, lora: LoraSettings) -> list[str]:
        problems = [
            checks.integer("lora.rank", lora.rank, 1, 4096),
            checks.number("lora.alpha", lora.alpha, above=0),
            None if lora.target_modules else "lora.target_modules is empty",
            "lora needs init_from, the model that the adapter changes" if self.init_from is None else None,
        ]
        return [problem for problem in problems if problem is not None]

    def _adapted_problems(self) -> list[str]:
        """Returns where the settings differ from the model of init_from."""
        model, found = self.model_config(), []
        given = dataclasses.asdict(self.model) if self.model != ModelShape() else {}
        if self.vocab_size != TrainConfig.vocab_size:
            given["vocab_size"] = self.vocab_size
        if "cla_share_factor" in given:
            given["kv_layers"] = _kv_layers(given)
        if given.pop("hybrid", None) is not None:
            found.append(f"lora does not go with model.hybrid, which replaces layers of {self.init_from}")
        own_theta = model.layers[0].attention.rope.theta
        theta = given.pop("rope_theta", own_theta)
        own = {name: getattr(model, name) for name in given} | {"rope_theta": own_theta}
        for name, value in (given | {"rope_theta": theta}).items():
            if value != own[name]:
                found.append(f"init_from: {self.init_from} has {name} {own[name]!r}, not {value!r}")
        if self.context > model.max_position:
            found.append(f"context is {self.context:,}, {self.init_from} was trained for {model.max_position:,}")
        if self.bos and model.bos_id is None:
            found.append(f"bos is true, {self.init_from} has no beginning-of-text token")
        if self.recall_fraction and (model.bos_id, model.eos_ids[:1]) != (1, (2,)):
            found.append(f"recall_fraction is {self.recall_fraction}, and examples are written for tokens 1 and 2")
        if not model.eos_ids:
            found.append(f"{self.init_from} has no end-of-text token")
        return found


def _delta_rules(num_layers: int, interval: int, num_heads: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Returns what a model's config has for gated delta rules and for Qwen3.5's attention."""
    layers = tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
    spec = DeltaRuleSpec(layers, num_heads, num_heads, key_dim, value_dim, eps=ModelConfig.norm_eps)
    return {"recurrent": spec, "norm": "rms_plus_one", "qk_norm": "head", "out_gate": True}


def _kv_layers(shape: dict[str, Any]) -> tuple[int, ...] | None:
    """Replaces a shape's `cla_share_factor` by the layers that are read; returns them."""
    return shared_by(shape.pop("cla_share_factor"), shape["num_layers"])


def load_config(path: str | Path, overrides: list[str]) -> TrainConfig:
    """Reads a YAML file and dotted "key=value" overrides.

    out_dir and an end of the run (num_steps or budget_s) must be set: with defaults for them, an empty file would start
    two hours of work.

    Raises:
      ConfigError: the file is missing or not YAML, a key is unknown (the nearest one is named), a value is invalid, or
        a required field is not set.
    """
    path, schema = Path(path), OmegaConf.structured(TrainConfig)
    try:
        text = path.read_text(encoding="utf-8")
        loaded = OmegaConf.load(io.StringIO(text))
        check_numbers(loaded, text)
        for override in overrides:
            if "=" not in override or override.startswith("="):
                raise ConfigError(f"{override!r} is not of the form key=value")
            key, _, text = override.partition("=")
            check_numbers(OmegaConf.select(OmegaConf.from_dotlist([override]), key), text, key)
        given = OmegaConf.merge(loaded, OmegaConf.from_dotlist(overrides))
        merged = OmegaConf.merge(schema, given)
        config = OmegaConf.to_object(merged)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ConfigKeyError as error:
        raise ConfigError(f"{path}: unknown key {error.full_key!r}{_nearest(str(error.full_key))}") from None
    except OmegaConfBaseException as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"{path}: {error.full_key}: {first_line}") from None
    except ConfigError:
        raise
    except Exception as error:  # omegaconf lets the YAML parser's own exceptions through
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    assert isinstance(config, TrainConfig)
    for name in ("out_dir", "export_dir", "init_from", "corpus_dir"):
        if (given_path := getattr(config, name)) is not None:
            setattr(config, name, os.path.expanduser(given_path))
    config.validate()
    missing = ["out_dir"] * ("out_dir" not in given)
    missing += ["num_steps or budget_s"] * (config.num_steps is None and "budget_s" not in given)
    if missing:
        raise ConfigError(
            f"{path}: {' and '.join(missing)} must be set; configs/train/ksana_tiny.yaml is an example, with which "
            "`python -m experiments.training configs/train/ksana_tiny.yaml` trains the embedded model"
        )
    return config


def _nearest(key: str) -> str:
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    known += [f"model.{field.name}" for field in dataclasses.fields(ModelShape)]
    close = difflib.get_close_matches(key, known, n=1)
    return f", did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"
