"""Cuts files into training sequences; a batch is a pure function of seed and step. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from experiments.training.tokenizer import BOS_ID, EOS_ID

IGNORED = -1  # target of a position that is not scored


class TokenFiles:
    """Encoded files, concatenated, each followed by the end-of-text token.

    tokens: uint16 ids of all files, or uint32; starts: [files + 1] offsets at which they begin. ends: ids of the
    beginning-of-text token, any number if there is none, and of the end-of-text token.
    """

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, ends: tuple[int, int] = (BOS_ID, EOS_ID)):
        self.tokens, self.starts = tokens, starts
        self.bos_id, self.eos_id = ends

    @classmethod
    def encode(
        cls, texts: Sequence[str], encode: Callable[[str], list[int]], ends: tuple[int, int] = (BOS_ID, EOS_ID)
    ) -> TokenFiles:
        """Encodes texts one by one."""
        files = [np.asarray([*encode(text), ends[1]], np.uint32) for text in texts]
        starts = np.concatenate([[0], np.cumsum([len(file) for file in files])]).astype(np.int64)
        tokens = np.concatenate(files)
        return cls(tokens.astype(np.uint16) if tokens.max() < 2**16 else tokens, starts, ends)

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

    def sequences(self, pieces: np.ndarray, length: int, bos: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets [len(pieces), length] int32; target i of a sequence follows input i.

        Args:
          bos: inputs begin with the beginning-of-text token, and the targets are the pieces. Otherwise, the inputs are
            the pieces, and a file's first token is never a target. Targets beyond the end of a piece, or of its file,
            are IGNORED.
        """
        inputs = np.full((len(pieces), length), self.eos_id, np.int32)
        targets = np.full((len(pieces), length), IGNORED, np.int32)
        for row, (begin, end) in enumerate(pieces):
            piece = self.tokens[begin:end]
            if bos:
                inputs[row, 0], inputs[row, 1 : len(piece)], targets[row, : len(piece)] = self.bos_id, piece[:-1], piece
            else:
                following = self.tokens[begin + 1 : end + 1]  # one less at the very end
                inputs[row, : len(piece)], targets[row, : len(following)] = piece, following
                targets[row, : len(piece)][piece == self.eos_id] = IGNORED
        return inputs, targets


class Batches:
    """An endless series of batches that depend only on seed and step, so a resumed run sees the same batches."""

    def __init__(self, files: TokenFiles, *, context: int, batch_size: int, seed: int, bos: bool):
        self.files, self.context, self.batch_size, self.seed, self.bos = files, context, batch_size, seed, bos
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
        return self.files.sequences(self._pieces[rows], self.context, self.bos)
