"""A training run from corpus to exported model: resumes from its newest checkpoint, logs, evaluates, ends by its budget."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import numpy as np

from ksana_jax.training.batches import Batches, TokenFiles
from ksana_jax.training.card import model_card
from ksana_jax.training.checkpoints import Checkpoints
from ksana_jax.training.corpus import source_texts, split_texts
from ksana_jax.training.export import export_model
from ksana_jax.training.hf_tokenizer import tokenizer_files
from ksana_jax.training.optimizer import TrainState, init_state, learning_rate_scale, make_train_step
from ksana_jax.training.settings import TrainConfig
from ksana_jax.training.sinks import evaluate
from ksana_jax.training.tokenizer import load_tokenizer, train_tokenizer
from ksana_jax.training.trainlog import TrainLog

logger = logging.getLogger(__name__)


def prepare(config: TrainConfig) -> tuple[TokenFiles, TokenFiles]:
    """Training and held-out files as tokens, made once and kept in out_dir, so that a resumed run sees the same ones.

    out_dir then has tokenizer.model, heldout.txt (names of held-out files) and tokens.npz.
    """
    out = Path(config.out_dir)
    path = out / "tokens.npz"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        train, held_out = split_texts(source_texts(Path(config.corpus_dir) if config.corpus_dir else None))
        if not train or not held_out:
            raise ValueError(
                f"the corpus has {len(train)} training and {len(held_out)} held-out files, needs at least 1 of each"
            )
        texts = [text for _, text in train]
        logger.info("training a tokenizer of %d pieces on %d files", config.vocab_size, len(texts))
        model = train_tokenizer(texts, config.vocab_size, config.tokenizer_sample_bytes, config.seed)
        _write(out / "tokenizer.model", model)
        _write(out / "heldout.txt", "".join(name + "\n" for name, _ in held_out).encode())
        encode = load_tokenizer(out / "tokenizer.model").encode
        files, held = TokenFiles.encode(texts, encode), TokenFiles.encode([text for _, text in held_out], encode)
        temporary = out / "tokens.tmp.npz"
        np.savez(temporary, train=files.tokens, train_starts=files.starts, held=held.tokens, held_starts=held.starts)
        os.replace(temporary, path)
    with np.load(path) as arrays:
        return (
            TokenFiles(arrays["train"], arrays["train_starts"]),
            TokenFiles(arrays["held"], arrays["held_starts"]),
        )


def heldout_sequences(held: TokenFiles, context: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets [count, context] of full held-out pieces, evenly spread over the files."""
    pieces = held.pieces(context)
    full = pieces[pieces[:, 1] - pieces[:, 0] == context]
    if not len(full):
        raise ValueError(f"no held-out file has {context} tokens: nothing to evaluate on")
    chosen = full[np.linspace(0, len(full) - 1, min(count, len(full))).astype(int)]
    return held.sequences(chosen, context)


def run(config: TrainConfig) -> None:
    """Trains, logs to out_dir/train_log.jsonl, checkpoints to out_dir/checkpoints, and exports at the end."""
    train_files, held_files = prepare(config)
    out = Path(config.out_dir)
    batches = Batches(train_files, context=config.context, batch_size=config.batch_size, seed=config.seed)
    held_out = heldout_sequences(held_files, config.context, config.eval_sequences)
    model = config.model_config()
    logger.info(
        "%d training tokens, %d held out, %.2f M parameters, %d steps per epoch",
        len(train_files.tokens), len(held_files.tokens), model.num_params / 1e6, batches.steps_per_epoch,
    )  # fmt: skip

    checkpoints = Checkpoints(out / "checkpoints", config.keep_checkpoints)
    state = init_state(config)
    progress = {"step": 0, "tokens": 0, "elapsed_s": 0.0, "exported": False}
    if restored := checkpoints.restore(state):
        state, progress = restored
        logger.info("resumes at step %d, %.0f s", progress["step"], progress["elapsed_s"])
    log = TrainLog(out / "train_log.jsonl", progress["step"])
    train_step = make_train_step(config)

    step, tokens, earlier_s = progress["step"], progress["tokens"], progress["elapsed_s"]
    start = time.monotonic()
    saved_s, logged_s, logged_tokens, losses = earlier_s, earlier_s, tokens, []

    def elapsed() -> float:
        return earlier_s + time.monotonic() - start

    def measure(state: TrainState) -> dict:
        return evaluate(state.params, *held_out, config=model, batch_size=config.batch_size)

    def ended() -> bool:
        return (config.num_steps is not None and step >= config.num_steps) or (
            config.budget_s is not None and elapsed() >= config.budget_s
        )

    while not ended():
        rate = config.learning_rate * learning_rate_scale(config, step, elapsed())
        inputs, targets = batches[step]
        if len(losses) > 1:
            losses[-2].block_until_ready()  # the device is one step ahead of the host, not more
        state, loss = train_step(state, inputs, targets, np.float32(rate))
        losses.append(loss)
        step, tokens = step + 1, tokens + int(np.sum(targets >= 0))
        last = ended()
        if step % config.log_every and not last:
            continue

        mean_loss = float(np.mean([float(x) for x in losses]))
        if not np.isfinite(mean_loss):
            raise FloatingPointError(f"loss is {mean_loss} at step {step}; the last checkpoint is intact")
        now = elapsed()
        record = {
            "step": step, "tokens": tokens, "loss": round(mean_loss, 5), "lr": float(f"{rate:.4g}"),
            "tokens_per_s": round((tokens - logged_tokens) / max(now - logged_s, 1e-9)), "elapsed_s": round(now, 1),
        }  # fmt: skip
        if step % config.eval_every == 0 or last:
            record |= measure(state)
        log.write(record)
        logger.info("%s", record)
        losses, logged_s, logged_tokens = [], elapsed(), tokens

        due = elapsed() - saved_s >= config.checkpoint_every_s
        if last or due or (config.checkpoint_every and step % config.checkpoint_every == 0):
            first_export = (
                config.first_export_s is not None and not progress["exported"] and elapsed() >= config.first_export_s
            )
            progress = {
                "step": step, "tokens": tokens, "elapsed_s": elapsed(),
                "exported": bool(progress["exported"] or first_export),
            }  # fmt: skip
            checkpoints.save(step, state, progress)
            saved_s = elapsed()
            if first_export and not last:
                export(config, state)
    log.close()
    checkpoints.close()
    export(config, state)


def export(config: TrainConfig, state: TrainState) -> Path:
    """Writes the model as it is to the export directory, with tokenizer, log, held-out list and card."""
    out = Path(config.out_dir)
    directory = Path(config.export_dir) if config.export_dir else out / "export"
    files = {name: (out / name).read_bytes() for name in ("train_log.jsonl", "heldout.txt", "tokenizer.model")}
    files |= tokenizer_files(out / "tokenizer.model", config.context)
    files["MODEL_CARD.md"] = model_card(config, out).encode()
    export_model(directory, state.params, config.model_config(), files)
    logger.info("exported to %s", directory)
    return directory


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
