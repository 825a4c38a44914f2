"""Measured agreement of implementations with a reference (`ksana align --choose`), and the choice among them.
Knows neither how agreement is measured nor speed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import shlex
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ksana_jax.core.compilation_cache import cache_folder
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.files import read_bytes, write_atomic
from ksana_jax.core.processor import machine
from ksana_jax.devices.capabilities import capabilities
from ksana_jax.devices.platforms import platform_of
from ksana_jax.kv.layout import KVLayout
from ksana_jax.loading.load import array_dtype
from ksana_jax.ops.requirements import Requirements
from ksana_jax.ops.table import serving

# Two implementations agree equally long if the mean difference between their texts is within this many standard errors.
NUM_ERRORS = 2
# Share of the processors' time, taken by other programs, above which the choice by speed says so.
BUSY = 0.1


class Pair(NamedTuple):
    """Names of an implementation of attention and one of products with weights."""

    attention: str
    linear: str

    def __str__(self) -> str:
        return f"attention {self.attention}, products {self.linear}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measured agreement of a pair of implementations.

    agreed: of each text, the generated tokens before the first that the reference would not have chosen.
    mean_difference, max_difference: absolute, between the log-probabilities of these tokens.
    tokens_per_s: generated tokens, all texts at once; prompts take part of the time.
    """

    attention: str
    linear: str
    agreed: tuple[int, ...]
    mean_difference: float
    max_difference: float
    tokens_per_s: float

    @property
    def pair(self) -> Pair:
        return Pair(self.attention, self.linear)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Measurements for one model, dtype, device and version.

    conditions: see `conditions_of`; an engine uses a verdict only if they are its own. model, reference: for readers.
    num_tokens: generated in all texts. others_busy: share of the processors' time that other programs took.
    """

    conditions: dict[str, str]
    model: str
    reference: str
    num_tokens: int
    others_busy: float | None
    measured: tuple[Measured, ...]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def choose(self, serving: Collection[Pair]) -> tuple[Pair, str]:
        """Returns the best measured pair among some, and why: of those that agree with the reference as long as the one
        that agrees longest, the fastest.

        Raises:
          ConfigError: none of them was measured.
        """
        measured = [m for m in self.measured if m.pair in serving]
        if not measured:
            names = "; ".join(str(m.pair) for m in self.measured)
            raise ConfigError(f"measured were: {names}; what may serve here was not: {'; '.join(map(str, serving))}")
        longest = max(measured, key=lambda m: sum(m.agreed))
        equal = [m for m in measured if not is_longer(longest.agreed, m.agreed)]
        best = max(equal, key=lambda m: m.tokens_per_s)
        reason = f"agrees with {self.reference} for {sum(best.agreed):,} of {self.num_tokens:,} tokens"
        if best is not longest:
            reason += f" ({longest.pair} for {sum(longest.agreed):,}: not resolved)"
        if len(equal) > 1:
            reason += f", and is the fastest of {len(equal)} that agree as long"
            if (self.others_busy or 0) > BUSY:
                reason += f", measured while other programs took {self.others_busy:.0%} of the processors' time"
        elif others := [m for m in measured if m is not best]:
            reason += f", longer than any other ({max(sum(m.agreed) for m in others):,})"
        elif len(serving) > 1:
            reason += f", the only one measured of {len(serving)} that may serve"
        return best.pair, reason


def is_longer(a: Sequence[int], b: Sequence[int]) -> bool:
    """True if one implementation agrees longer with the reference than another on the same texts, beyond the noise."""
    apart = [x - y for x, y in zip(a, b, strict=True)]
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
    return statistics.fmean(apart) > NUM_ERRORS * error


def read_verdict(path: Path) -> Verdict:
    """Reads what `Verdict.write` has written.

    Raises:
      ConfigError: there is no such file, or it is not a verdict.
    """
    try:
        content = json.loads(read_bytes(path))
        measured = tuple(Measured(**{**m, "agreed": tuple(m["agreed"])}) for m in content.pop("measured"))
        return Verdict(**content, measured=measured)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not a verdict of `ksana align --choose`: {error}") from error


def default_path(conditions: dict[str, str]) -> Path:
    """Returns the file of a verdict in the user's cache directory."""
    return verdict_folder() / f"{_digest(conditions)}.json"


def verdict_folder() -> Path:
    return cache_folder("verdicts")


def verdicts_here() -> list[Verdict]:
    """Returns the verdicts in the user's cache directory that hold for this device and these versions, the newest
    first."""
    here, found, paths = device_and_versions(), [], []
    with contextlib.suppress(OSError):  # there is no such folder, or it may not be read
        paths = sorted(verdict_folder().glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        with contextlib.suppress(ConfigError):
            verdict = read_verdict(path)
            found += [verdict] * (here.items() <= verdict.conditions.items())
    return found


def conditions_of(model: ModelConfig, config: EngineConfig) -> dict[str, str]:
    """Returns what must be the same for a verdict to hold: the model's shape, how numbers are stored, device, versions.

    Weights are not among them: a verdict for a model holds for one of the same shape that was trained further.
    """
    return {
        "model's shape": _digest(str(model)),
        "dtype": config.dtype,
        "quantization": str(config.quantization),
        "KV": f"{config.kv_dtype}"
        + (f", not in {config.kv_full_precision_layers}" * bool(config.kv_full_precision_layers)),
        **device_and_versions(),
    }


def device_and_versions() -> dict[str, str]:
    """Returns those conditions of a verdict that all engines of a process share."""
    from jaxlib.version import __version__ as jaxlib_version

    device, native = jax.local_devices()[0], "none"
    is_processor = capabilities(device).shares_host_memory
    kind = machine() if is_processor else device.device_kind
    if is_processor:
        from ksana_jax.native.build import library, why_missing

        native = native if why_missing() else library().stem
    return {"device": f"{platform_of(device)} {kind}", "jax": jax.__version__, "jaxlib": jaxlib_version, "C++": native}


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def serving_pairs(model: ModelConfig, config: EngineConfig, layout: KVLayout) -> list[Pair]:
    """Returns the implementations that serve an engine and that its settings allow, in order of preference."""
    dtype = array_dtype(config.dtype).name
    needs = Requirements.of(model, layout, num_repositioned_sinks=config.max_repositioned_sinks or 0, query_dtype=dtype)
    found = serving(model, needs, dtype)
    asked = {"attention": config.operators.attention, "linear": config.operators.linear}
    names = ([i.name for i in found[operator] if name in ("auto", i.name)] for operator, name in asked.items())
    return list(itertools.starmap(Pair, itertools.product(*names)))


def preferred(model: ModelConfig, config: EngineConfig, layout: KVLayout) -> tuple[EngineConfig, str | None]:
    """Returns the config with the names of the implementations that `prefer` chooses, and why; the same config, and
    None, where it prefers speed or only one pair may serve.

    Raises:
      ConfigError: there is no verdict for these conditions; the message says which command makes it.
    """
    if config.operators.prefer == "speed" or len(pairs := serving_pairs(model, config, layout)) < 2:
        return config, None
    conditions, remedy = conditions_of(model, config), f"`{command(config)}` makes one"
    path, where = default_path(conditions), "for this model's shape, dtype, KV, device and versions"
    if config.operators.prefer != "agreement":
        path = Path(config.operators.prefer).expanduser()
        where = f"at {path}"
    if not path.exists():
        raise ConfigError(f"operators.prefer {config.operators.prefer!r}: there is no verdict {where}; {remedy}")
    verdict = read_verdict(path)
    for name, value in conditions.items():
        if (other := verdict.conditions.get(name)) != value:
            raise ConfigError(
                f"operators.prefer: {path} was measured with {name} {other}, this engine has {value}; {remedy}"
            )
    pair, reason = verdict.choose(pairs)
    operators = dataclasses.replace(config.operators, attention=pair.attention, linear=pair.linear)
    return dataclasses.replace(config, operators=operators), f"{pair}: {reason} ({path})"


def command(config: EngineConfig) -> str:
    """Returns the command that makes a verdict for an engine's settings."""
    names = ("dtype", "quantization", "kv_cache_dtype", "kv_full_precision_layers")
    default = EngineConfig()
    given = {n: value for n in names if (value := getattr(config, n)) != getattr(default, n)}
    settings = [f"{n}={v if isinstance(v, str) else json.dumps(v, separators=(',', ':'))}" for n, v in given.items()]
    prefer = config.operators.prefer
    out = "" if prefer in ("speed", "agreement") else f" --out {shlex.quote(prefer)}"
    return f"ksana align {shlex.quote(' '.join(settings) or '-')} --choose --model MODEL{out}"
