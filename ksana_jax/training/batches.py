"""Cuts files into training sequences; a batch is a pure function of seed and step. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ksana_jax.training.tokenizer import BOS_ID, EOS_ID

IGNORED = -1  # target of a position that is not scored


class TokenFiles:
    """Encoded files, concatenated, each followed by the end-of-text token.

    tokens: uint16 ids of all files; starts: [files + 1] offsets at which they begin.
    """

    def __init__(self, tokens: np.ndarray, starts: np.ndarray):
        self.tokens, self.starts = tokens, starts

    @classmethod
    def encode(cls, texts: Sequence[str], encode: Callable[[str], list[int]]) -> TokenFiles:
        """Encodes texts one by one; ids fit in 16 bits."""
        files = [np.asarray([*encode(text), EOS_ID], np.uint16) for text in texts]
        starts = np.concatenate([[0], np.cumsum([len(file) for file in files])]).astype(np.int64)
        return cls(np.concatenate(files), starts)

    def pieces(self, length: int, shift: int = 0) -> np.ndarray:
        """Returns [pieces, 2] begin and end in `tokens` of pieces of at most `length` tokens; none crosses a file.

        shift: length of the first piece of each file, so that epochs are cut differently; 0 for full pieces only.
        """
        found = []
        for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True):
            cuts = np.arange(begin + shift, end, length)
            cuts = np.concatenate([[begin], cuts[cuts > begin], [end]])
            found.append(np.stack([cuts[:-1], cuts[1:]], axis=1))
        return np.concatenate(found)

    def sequences(self, pieces: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets [len(pieces), length] int32; each input begins with the beginning-of-text token.

        Target i of a sequence follows input i; targets beyond the end of a piece are IGNORED.
        """
        inputs = np.full((len(pieces), length), EOS_ID, np.int32)
        targets = np.full((len(pieces), length), IGNORED, np.int32)
        inputs[:, 0] = BOS_ID
        for row, (begin, end) in enumerate(pieces):
            piece = self.tokens[begin:end]
            targets[row, : len(piece)] = piece
            inputs[row, 1 : len(piece)] = piece[:-1]
        return inputs, targets


class Batches:
    """An endless series of batches that depend only on seed and step, so a resumed run sees the same batches."""

    def __init__(self, files: TokenFiles, *, context: int, batch_size: int, seed: int):
        self.files, self.context, self.batch_size, self.seed = files, context, batch_size, seed
        # Shift 0 gives the fewest pieces, so all epochs have at least this many steps, and a step determines its epoch.
        self.steps_per_epoch = max(1, len(files.pieces(context)) // batch_size)
        self._epoch, self._pieces = -1, np.zeros((0, 2), np.int64)

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets [batch_size, context] of a step, counted from 0."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self.seed, epoch])
            pieces = self.files.pieces(self.context, int(rng.integers(self.context)))
            self._epoch, self._pieces = epoch, rng.permutation(pieces)
        rows = np.arange(index * self.batch_size, (index + 1) * self.batch_size) % len(self._pieces)
        return self.files.sequences(self._pieces[rows], self.context)
