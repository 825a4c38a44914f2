"""A training run from corpus to exported model: resumes from its newest checkpoint, logs, evaluates, ends by budget."""

from __future__ import annotations

import json
import logging
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.training import checkpoints
from experiments.training.batches import IGNORED, Batches, TokenFiles
from experiments.training.card import model_card
from experiments.training.checkpoints import Progress
from experiments.training.hf_tokenizer import tokenizer_files
from experiments.training.lora import export_trained, first_adapter
from experiments.training.optimizer import TrainState, init_state, learning_rate_scale, make_train_step, weights_of
from experiments.training.recall_mix import RecallMix
from experiments.training.resume import TrainLog, check_same, fixed_fields, tokens_source
from experiments.training.settings import TrainConfig
from experiments.training.sinks import evaluate, recall_accuracy
from experiments.training.start import encoder, ends_of, first_params, tokenizer_model
from ksana_jax.core.config import ConfigError
from ksana_jax.core.files import open_to_read, read_bytes, replacing, write_atomic
from ksana_jax.lab.runs.stdlib_corpus import source_texts, split_texts
from ksana_jax.loading import export_hf
from ksana_jax.models.params import num_params

logger = logging.getLogger(__name__)


def prepare(config: TrainConfig) -> tuple[TokenFiles, TokenFiles]:
    """Encodes training and held-out files once and keeps them in out_dir, so that a resumed run uses the same tokens.

    Writes tokenizer.model, unless an adapter is trained, heldout.txt (names of held-out files), and tokens.npz, which
    records its sources.

    Raises:
      ConfigError: the corpus lacks training or held-out files, or out_dir's tokens have other sources.
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
            files = TokenFiles(arrays["train"], arrays["train_starts"], ends_of(config))
            held = TokenFiles(arrays["held"], arrays["held_starts"], ends_of(config))
            began = json.loads(str(arrays["source"]))
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path} cannot be read; remove it to have it created again: {error}") from None
    check_same(path, began, source)
    return files, held


def _make_tokens(config: TrainConfig, path: Path, texts: list[tuple[str, str]], source: dict[str, Any]) -> None:
    train, held_out = split_texts(texts)
    if not train or not held_out:
        found = f"{len(train)} training and {len(held_out)} held-out files"
        raise ConfigError(f"the corpus has {found}, needs some of each")
    if config.lora is None:
        write_atomic(path.with_name("tokenizer.model"), tokenizer_model(config, [text for _, text in train]))
    write_atomic(path.with_name("heldout.txt"), "".join(name + "\n" for name, _ in held_out))
    encode, ends = encoder(config), ends_of(config)
    files, held = (TokenFiles.encode([text for _, text in part], encode, ends) for part in (train, held_out))
    with replacing(path) as file:
        np.savez(
            file,
            train=files.tokens,
            train_starts=files.starts,
            held=held.tokens,
            held_starts=held.starts,
            source=np.array(json.dumps(source)),
        )


def heldout_sequences(held: TokenFiles, context: int, count: int, bos: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets [count, context] of full held-out pieces, evenly spread over the files.

    Raises:
      ConfigError: no held-out file has `context` tokens.
    """
    pieces = held.pieces(context)
    full = pieces[pieces[:, 1] - pieces[:, 0] == context]
    if not len(full):
        longest = int(np.max(np.diff(held.starts)))
        raise ConfigError(f"the longest held-out file has {longest} tokens, evaluation needs {context}")
    chosen = full[np.linspace(0, len(full) - 1, min(count, len(full))).astype(int)]
    return held.sequences(chosen, context, bos)


def run(config: TrainConfig) -> None:
    """Trains, logs to out_dir/train_log.jsonl, checkpoints to out_dir/checkpoints, and exports at the end.

    A run that has reached num_steps or budget_s only exports its newest checkpoint: num_steps=1 does that at any time.
    Ctrl-C ends it; it resumes from the newest checkpoint.

    Raises:
      ConfigError: out_dir holds a run with another configuration; see `resume`.
      FloatingPointError: the loss is no longer finite.
    """
    training = _Run(config)
    if not training.is_over:  # otherwise the log is left alone, because another process may be continuing the run
        training.open_log()
    while not training.is_over:
        training.step()
    export(config, training.state)


class _Run:
    """The state of a training run between steps, restored from the newest checkpoint in out_dir."""

    def __init__(self, config: TrainConfig):
        train_files, held_files = prepare(config)
        self._config, self._out, self._model = config, Path(config.out_dir), config.model_config()
        self._batches = Batches(
            train_files, context=config.context, batch_size=config.batch_size, seed=config.seed, bos=config.bos
        )
        self._mix = self._recall_mix()
        self._held_out = heldout_sequences(held_files, config.context, config.eval_sequences, config.bos)
        logger.info(
            "%d training tokens, %d held out, %.2f M parameters, %d steps per epoch",
            len(train_files.tokens),
            len(held_files.tokens),
            num_params(self._model) / 1e6,
            self._batches.steps_per_epoch,
        )
        params, self._base = first_params(config, self._batches), None
        if config.lora is not None:
            self._base, params = params, first_adapter(config.lora, self._model, config.seed)
        self.state, self._saved = init_state(config, params), Progress()
        if restored := checkpoints.restore(self._out / "checkpoints", self.state, fixed_fields(config)):
            self.state, self._saved = restored
            logger.info("resuming at step %d, %.0f s", self._saved.step, self._saved.elapsed_s)
        self._train_step = make_train_step(config)
        self._num_steps, self._num_tokens = self._saved.step, self._saved.tokens
        self._start = time.monotonic() - self._saved.elapsed_s
        self._logged_s, self._logged_tokens = self._saved.elapsed_s, self._num_tokens
        self._losses: list[Any] = []  # of steps since the last line of the log
        self.is_over = self._reached_end()

    def _recall_mix(self) -> RecallMix | None:
        config = self._config
        if not config.recall_fraction:
            return None
        mix = RecallMix(
            encoder(config), context=config.context, bos=config.bos, fraction=config.recall_fraction, seed=config.seed
        )
        self._questions = mix.held_out(config.batch_size)
        return mix

    def open_log(self) -> None:
        self._log = TrainLog(self._out / "train_log.jsonl", self._saved.step)

    def step(self) -> None:
        """Computes one step; logs, evaluates and checkpoints when due."""
        config = self._config
        rate = config.learning_rate * learning_rate_scale(config, self._num_steps, self._elapsed_s())
        inputs, targets = self._batches[self._num_steps]
        if self._mix:
            inputs, targets = self._mix.mixed(self._num_steps, inputs, targets)
        if len(self._losses) > 1:
            self._losses[-2].block_until_ready()  # at most one step runs ahead on the device
        self.state, loss = self._train_step(self.state, inputs, targets, np.float32(rate), self._base)
        self._losses.append(loss)
        self._num_steps, self._num_tokens = self._num_steps + 1, self._num_tokens + int(np.sum(targets != IGNORED))
        self.is_over = self._reached_end()
        if self._num_steps % config.log_every == 0 or self.is_over:
            self._report(rate)
            every = config.checkpoint_every
            is_due = self._elapsed_s() - self._saved.elapsed_s >= config.checkpoint_every_s
            if self.is_over or is_due or (every and self._num_steps % every == 0):
                self._checkpoint()

    def _report(self, rate: float) -> None:
        mean_loss = float(np.mean([float(loss) for loss in self._losses]))
        if not np.isfinite(mean_loss):
            raise FloatingPointError(
                f"loss is {mean_loss} at step {self._num_steps}; the last checkpoint is of step {self._saved.step}"
            )
        now, tokens = self._elapsed_s(), self._num_tokens - self._logged_tokens
        record = {
            "step": self._num_steps,
            "tokens": self._num_tokens,
            "loss": round(mean_loss, 5),
            "lr": float(f"{rate:.4g}"),
            "tokens_per_s": round(tokens / max(now - self._logged_s, 1e-9)),
            "elapsed_s": round(now, 1),
        }
        if self._num_steps % self._config.eval_every == 0 or self.is_over:
            params = weights_of(self._config, self.state.params, self._base)
            record |= evaluate(params, *self._held_out, config=self._model, batch_size=self._config.batch_size)
            if self._mix:
                record["recall_accuracy"] = recall_accuracy(params, self._questions, config=self._model)
        self._log.write(record)
        logger.info("%s", record)
        self._logged_s, self._logged_tokens, self._losses = self._elapsed_s(), self._num_tokens, []

    def _checkpoint(self) -> None:
        config, before_s = self._config, self._saved.elapsed_s
        self._saved = Progress(self._num_steps, self._num_tokens, self._elapsed_s())
        folder = self._out / "checkpoints"
        checkpoints.save(folder, self.state, self._saved, config.keep_checkpoints, fixed_fields(config))
        if config.first_export_s and before_s < config.first_export_s <= self._saved.elapsed_s and not self.is_over:
            export(config, self.state)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def _reached_end(self) -> bool:
        config = self._config
        steps_done = config.num_steps is not None and self._num_steps >= config.num_steps
        return steps_done or (config.budget_s is not None and self._elapsed_s() >= config.budget_s)


def export(config: TrainConfig, state: TrainState) -> Path:
    """Exports the current model with tokenizer, log, held-out list and model card; of an adapter, it with log and list.

    Each file is replaced atomically, the weights last, so other processes may read the directory in the meantime.
    """
    out = Path(config.out_dir)
    directory = Path(config.export_dir) if config.export_dir else out / "export"
    directory.mkdir(parents=True, exist_ok=True)
    files = {name: read_bytes(out / name) for name in ("heldout.txt", "train_log.jsonl")}
    if config.lora is None:
        files["tokenizer.model"] = read_bytes(out / "tokenizer.model")
        files |= tokenizer_files(files["tokenizer.model"], config.bos)
        files["MODEL_CARD.md"] = model_card(config, files["train_log.jsonl"].decode()).encode()
    for name, content in files.items():
        write_atomic(directory / name, content)
    if config.lora is None:
        export_hf(directory, config.model_config(), state.params)
    else:
        export_trained(directory, config, state.params)
    logger.info("exported to %s", directory)
    return directory
