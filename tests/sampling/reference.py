"""The sampler's definitions again, one row at a time in float64 NumPy: the papers' words, vLLM's fields."""

import numpy as np


def penalised(logits, generated, prompt, *, repetition=1.0, presence=0.0, frequency=0.0, bias=None) -> np.ndarray:
    """Logits [V] after a bias {id: value} and the penalties; generated and prompt are token ids."""
    out = np.array(logits, np.float64)
    for token, value in (bias or {}).items():
        out[token] += value
    for token in set(generated) | set(prompt):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in generated:
        out[token] -= frequency  # once for each time
    for token in set(generated):
        out[token] -= presence  # once
    return out


def probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """What a row [V] is drawn from: 0 for tokens that are out."""
    p = softmax(np.asarray(logits, np.float64) / temperature)
    keep = p >= np.sort(p)[::-1][min(top_k if top_k > 0 else len(p), len(p)) - 1]
    among_k = np.where(keep, p, 0.0) / p[keep].sum()
    keep &= among_k >= _nucleus_floor(among_k, top_p)
    keep &= p >= min_p * p.max()
    return np.where(keep, p, 0.0) / p[keep].sum()


def nucleus_margin(logits, *, temperature=1.0, top_k=0, top_p=1.0, **_) -> float:
    """How close some cumulative probability comes to top_p: nearer than float32's rounding, either answer is right."""
    p = np.sort(probabilities(logits, temperature=temperature, top_k=top_k))[::-1]
    return 1.0 if top_p == 1 else float(np.abs(np.cumsum(p) - top_p).min())


def _nucleus_floor(p, top_p) -> float:
    """Probability of the last token that is needed for the sum to reach top_p."""
    total = 0.0
    for value in sorted(p, reverse=True):
        total += value
        if total >= top_p:
            return value
    return 0.0


def softmax(logits) -> np.ndarray:
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()
