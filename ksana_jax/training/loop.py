"""A training run from corpus to exported model: resumes at its newest checkpoint, logs, evaluates, ends by budget."""

from __future__ import annotations

import json
import logging
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax import interrupts
from ksana_jax.config import ConfigError
from ksana_jax.files import open_to_read, read_bytes, replacing, write_atomic
from ksana_jax.loading import export_hf
from ksana_jax.training import checkpoints
from ksana_jax.training.batches import IGNORED, Batches, TokenFiles
from ksana_jax.training.card import model_card
from ksana_jax.training.checkpoints import Progress
from ksana_jax.training.corpus import source_texts, split_texts
from ksana_jax.training.hf_tokenizer import tokenizer_files
from ksana_jax.training.optimizer import TrainState, init_state, learning_rate_scale, make_train_step
from ksana_jax.training.resume import check_same, fixed_fields, tokens_source
from ksana_jax.training.settings import TrainConfig
from ksana_jax.training.sinks import evaluate
from ksana_jax.training.tokenizer import load_tokenizer, train_tokenizer
from ksana_jax.training.trainlog import TrainLog

logger = logging.getLogger(__name__)


def prepare(config: TrainConfig) -> tuple[TokenFiles, TokenFiles]:
    """Training and held-out files as tokens, made once and kept in out_dir, so that a resumed run sees the same ones.

    out_dir then has tokenizer.model, heldout.txt (names of held-out files) and tokens.npz, which keeps what it was made
    from.

    Raises:
      ConfigError: the corpus lacks training or held-out files, or out_dir's tokens were made from something else.
    """
    out = Path(config.out_dir)
    path = out / "tokens.npz"
    if config.corpus_dir and not Path(config.corpus_dir).is_dir():
        raise ConfigError(f"corpus_dir {config.corpus_dir} is not a folder")
    texts = source_texts(Path(config.corpus_dir) if config.corpus_dir else None)
    source = tokens_source(config, texts)
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        _make_tokens(config, path, texts, source)
    with open_to_read(path) as file:
        try:
            arrays = dict(np.load(file))
            files = TokenFiles(arrays["train"], arrays["train_starts"])
            held = TokenFiles(arrays["held"], arrays["held_starts"])
            # Earlier versions left no source: their tokenizer at least says how many pieces it has.
            pieces = {"vocab_size": load_tokenizer(out / "tokenizer.model").vocab_size()}
            began = json.loads(str(arrays["source"])) if "source" in arrays else pieces
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path} cannot be read, and is made again once it is removed: {error}") from None
    check_same(path, began, source)
    return files, held


def _make_tokens(config: TrainConfig, path: Path, texts: list[tuple[str, str]], source: dict[str, Any]) -> None:
    train, held_out = split_texts(texts)
    if not train or not held_out:
        found = f"{len(train)} training and {len(held_out)} held-out files"
        raise ConfigError(f"the corpus has {found}, needs some of each")
    logger.info("training a tokenizer of %d pieces on %d files", config.vocab_size, len(train))
    model = train_tokenizer([text for _, text in train], config.vocab_size, config.tokenizer_sample_bytes, config.seed)
    write_atomic(path.with_name("tokenizer.model"), model)
    write_atomic(path.with_name("heldout.txt"), "".join(name + "\n" for name, _ in held_out))
    encode = load_tokenizer(path.with_name("tokenizer.model")).encode
    files, held = (TokenFiles.encode([text for _, text in part], encode) for part in (train, held_out))
    with replacing(path) as file:
        np.savez(file, train=files.tokens, train_starts=files.starts, held=held.tokens, held_starts=held.starts,
                 source=np.array(json.dumps(source)))  # fmt: skip


def heldout_sequences(held: TokenFiles, context: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets [count, context] of full held-out pieces, evenly spread over the files.

    Raises:
      ConfigError: no held-out file is long enough for one.
    """
    pieces = held.pieces(context)
    full = pieces[pieces[:, 1] - pieces[:, 0] == context]
    if not len(full):
        longest = int(np.max(np.diff(held.starts)))
        raise ConfigError(f"the longest held-out file has {longest} tokens, evaluation needs {context}")
    chosen = full[np.linspace(0, len(full) - 1, min(count, len(full))).astype(int)]
    return held.sequences(chosen, context)


def run(config: TrainConfig) -> None:
    """Trains, logs to out_dir/train_log.jsonl, checkpoints to out_dir/checkpoints, and exports at the end.

    A run that has reached num_steps or budget_s only exports its newest checkpoint: num_steps=1 does that at any time.

    Raises:
      ConfigError: out_dir holds a run of another configuration; see `resume`.
      FloatingPointError: the loss is no longer finite.
    """
    train_files, held_files = prepare(config)
    out = Path(config.out_dir)
    batches = Batches(train_files, context=config.context, batch_size=config.batch_size, seed=config.seed)
    held_out = heldout_sequences(held_files, config.context, config.eval_sequences)
    model = config.model_config()
    logger.info(
        "%d training tokens, %d held out, %.2f M parameters, %d steps per epoch",
        len(train_files.tokens), len(held_files.tokens), model.num_params / 1e6, batches.steps_per_epoch,
    )  # fmt: skip

    state, saved = init_state(config), Progress()
    if restored := checkpoints.restore(out / "checkpoints", state, fixed_fields(config)):
        state, saved = restored
        logger.info("resumes at step %d, %.0f s", saved.step, saved.elapsed_s)
    train_step = make_train_step(config)
    step, tokens = saved.step, saved.tokens
    start = time.monotonic() - saved.elapsed_s
    logged_s, logged_tokens, losses = saved.elapsed_s, tokens, []

    def elapsed_s() -> float:
        return time.monotonic() - start

    def over() -> bool:
        steps_done = config.num_steps is not None and step >= config.num_steps
        return steps_done or (config.budget_s is not None and elapsed_s() >= config.budget_s)

    if over():  # the log is left alone: another process may be going on with the run
        export(config, state)
        return
    log = TrainLog(out / "train_log.jsonl", saved.step)
    last = False
    while not last:
        with interrupts.deferred():
            rate = config.learning_rate * learning_rate_scale(config, step, elapsed_s())
            inputs, targets = batches[step]
            if len(losses) > 1:
                losses[-2].block_until_ready()  # the device is one step ahead of the host, not more
            state, loss = train_step(state, inputs, targets, np.float32(rate))
            losses.append(loss)
            step, tokens = step + 1, tokens + int(np.sum(targets != IGNORED))
            last = over()
            if step % config.log_every and not last:
                continue

            mean_loss = float(np.mean([float(loss) for loss in losses]))
            if not np.isfinite(mean_loss):
                raise FloatingPointError(
                    f"loss is {mean_loss} at step {step}; the last checkpoint is of step {saved.step}"
                )
            now = elapsed_s()
            record = {
                "step": step, "tokens": tokens, "loss": round(mean_loss, 5), "lr": float(f"{rate:.4g}"),
                "tokens_per_s": round((tokens - logged_tokens) / max(now - logged_s, 1e-9)), "elapsed_s": round(now, 1),
            }  # fmt: skip
            if step % config.eval_every == 0 or last:
                record |= evaluate(state.params, *held_out, config=model, batch_size=config.batch_size)
            log.write(record)
            logger.info("%s", record)
            logged_s, logged_tokens, losses = elapsed_s(), tokens, []

            every = config.checkpoint_every
            if last or elapsed_s() - saved.elapsed_s >= config.checkpoint_every_s or (every and step % every == 0):
                earlier, saved = saved, Progress(step, tokens, elapsed_s())
                checkpoints.save(out / "checkpoints", state, saved, config.keep_checkpoints, fixed_fields(config))
                if config.first_export_s and earlier.elapsed_s < config.first_export_s <= saved.elapsed_s and not last:
                    export(config, state)
    export(config, state)


def export(config: TrainConfig, state: TrainState) -> Path:
    """Writes the model as it is to the export directory, with tokenizer, log, held-out list and card.

    Each file is replaced in one step and the weights last, so that others may read the directory meanwhile.
    """
    out = Path(config.out_dir)
    directory = Path(config.export_dir) if config.export_dir else out / "export"
    directory.mkdir(parents=True, exist_ok=True)
    files = {name: read_bytes(out / name) for name in ("tokenizer.model", "heldout.txt", "train_log.jsonl")}
    files |= tokenizer_files(files["tokenizer.model"])
    files["MODEL_CARD.md"] = model_card(config, files["train_log.jsonl"].decode()).encode()
    for name, content in files.items():
        write_atomic(directory / name, content)
    export_hf(directory, config.model_config(), state.params)
    logger.info("exported to %s", directory)
    return directory
