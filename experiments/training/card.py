"""The model card of a training run: data, settings and measurements."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from pathlib import Path

from experiments.training.recall_mix import KINDS
from experiments.training.settings import ModelShape, TrainConfig
from experiments.training.sink_measures import EPSILON, SPAN
from ksana_jax.models.params import num_params

_ROWS = 12
_SINKS = {
    None: "",
    "learned": " Each head has a learned sink logit.",
    "zero": " Each head has a sink logit of 0 (softmax-off-by-one).",
}


def model_card(config: TrainConfig, log: str) -> str:
    """Returns the card as Markdown, from a run's config and the lines of its train_log.jsonl."""
    records = [json.loads(line) for line in log.splitlines()]
    measured = [record for record in records if "heldout_loss" in record]
    shape, model = config.model_config(), config.model
    steps, tokens, seconds = (records[-1][name] if records else 0 for name in ("step", "tokens", "elapsed_s"))
    facts = [
        f"Shape: {model.num_layers} layers, width {model.d_model}, {_heads(model)}, SwiGLU {model.d_ff}, RoPE "
        f"{model.rope_theta:g}, tied embeddings." + _shared(model.cla_share_factor),
        f"Context: {config.context} tokens. The beginning-of-text token is at position 0 of "
        f"{'every' if config.bos else 'no'} training sequence, and no sequence crosses a file.{_SINKS[model.sinks]}",
        f"Tokenizer: SentencePiece BPE with {config.vocab_size} pieces and byte fallback; encoding is lossless. "
        "tokenizer.json has the same pieces and ids as tokenizer.model.",
        "Data: the *.py files of the standard library, tests included, without duplicates. The files of heldout.txt, "
        "chosen by a hash of their names, were never trained on." + _recall(config),
        f"Optimiser: AdamW, peak rate {config.learning_rate:g}, betas {config.beta1:g} and {config.beta2:g}, weight "
        f"decay {config.weight_decay:g} on matrices, clip {config.clip_norm:g}; {config.warmup_steps} steps of "
        f"warm-up, then constant, then linear to 0 in the last {config.decay_fraction:.0%}.",
        f"Run: {steps:,} steps of {config.batch_size} sequences, {tokens / 1e6:.1f}M tokens, {seconds / 60:.0f} "
        f"minutes; products in {config.compute_dtype}, sums and master weights in float32." + _start(config),
    ]
    lines = [f"# {Path(config.out_dir).name}", ""]
    lines += _wrapped(
        f"A {_kind(model)} model of {num_params(shape):,} parameters, trained by "
        "ksana_jax on the source files of the Python standard library, to show on any machine how windows, sinks and "
        "eviction affect a trained model. It generates text that looks like Python, and has no other use."
    )
    lines.append("")
    for fact in facts:
        lines += _wrapped(fact, "- ")
    lines.append("")
    if measured:
        lines += [*_measurements(measured), ""]
    lines += _wrapped(
        "The training text is the Python Software Foundation's, under the PSF License; none of it is included here."
    )
    return "\n".join(lines) + "\n"


def _kind(model: ModelShape) -> str:
    if model.hybrid is not None:
        return "Qwen3.5"
    return "Llama" if model.latent is None else "Youtu-LLM"


def _heads(model: ModelShape) -> str:
    if (hybrid := model.hybrid) is not None:
        attention = _heads(dataclasses.replace(model, hybrid=None))
        sizes = f"{hybrid.num_heads} heads of keys of {hybrid.key_dim} and values of {hybrid.value_dim}"
        return f"in one of {hybrid.interval} layers {attention}, in the others gated delta rules of {sizes}"
    if (latent := model.latent) is None:
        return f"{model.num_heads} query and {model.num_kv_heads} key/value heads of {model.head_dim}"
    sizes = f"{latent.plain} plain and {latent.rotated} rotated numbers, values of {latent.value}"
    return f"{model.num_heads} heads of {sizes}, latents of {latent.rank} and {latent.rotated} numbers"


def _shared(factor: int) -> str:
    return f" Each {factor} layers share the keys and values of the first of them." if factor > 1 else ""


def _recall(config: TrainConfig) -> str:
    if not config.recall_fraction:
        return ""
    return f" {config.recall_fraction:.0%} of the sequences are generated recall examples instead ({', '.join(KINDS)})."


def _start(config: TrainConfig) -> str:
    return "" if config.init_from is None else f" It started from the weights and the tokenizer of {config.init_from}."


def _measurements(measured: list[dict]) -> list[str]:
    last = measured[-1]
    layers = ", ".join(f"{layer:.2f}" for layer in last["first_token_attention"])
    uniform = sum(1 / count for count in range(1, SPAN + 1)) / SPAN
    lines = _wrapped(
        f"Held-out loss {last['heldout_loss']:.3f} nats per token within the context (perplexity "
        f"{math.exp(last['heldout_loss']):.2f}), Sink_1 {last['sink_1']:.3f} at step {last['step']:,}. Mean attention "
        f"to the first token by layer: {layers}; uniform attention would give {uniform:.3f}. Sink_1 (arXiv:2410.10781) "
        f"is the fraction of (layer, head, held-out sequence) whose first token receives more than {EPSILON} of the "
        f"attention, averaged over the first {SPAN} tokens. All measurements are in train_log.jsonl."
    )
    lines += ["", "| step | tokens (M) | held-out loss | Sink_1 |", "|---:|---:|---:|---:|"]
    for index in sorted({round(i * (len(measured) - 1) / (_ROWS - 1)) for i in range(_ROWS)}):
        record = measured[index]
        cells = (
            f"{record['step']:,}",
            f"{record['tokens'] / 1e6:.1f}",
            f"{record['heldout_loss']:.3f}",
            f"{record['sink_1']:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _wrapped(text: str, bullet: str = "") -> list[str]:
    return textwrap.wrap(text, 118, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False)
