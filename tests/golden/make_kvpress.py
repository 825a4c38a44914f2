"""Makes tests/golden/kvpress: the text positions that kvpress keeps in each layer and kv head, and its defaults.

In an environment of its own, since kvpress wants older versions than `parity`:

  pip install kvpress==0.5.5 torch==2.13.0 'transformers<5.3'
  python tests/golden/make_kvpress.py                  (a minute on a CPU)

kept.jsonl has a case on each line, see `kvpress_cases.KVPressCase`. Positions are read from the cache that kvpress
leaves: each of its keys and values equals that of one position, bit by bit. No choice is a matter of rounding: the last
score that stays and the first that goes differ by LEAST_GAP of their size, or another prompt is taken. So sets of
positions can be compared exactly. defaults.json has the arguments of each class. kvpress 0.5.5 with torch 2.13.0 and
transformers 5.2.0 made the files that are committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import json
import tempfile
from pathlib import Path
from unittest import mock

import kvpress
import torch
from kvpress_asked import LENGTHS, NUM_WRITTEN, TARGET, asked
from kvpress_cases import CONFIG, FOLDER, KVPressCase, encode, statistics, weights
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

LEAST_GAP = 1e-4  # far above rounding in float32, through four layers
LEAST_LOGIT_GAP = 0.01  # between the two best tokens

# The classes of kvpress that choose as one of our methods does, or nearly.
COMPARED = (
    "SnapKVPress",
    "AdaKVPress",
    "PyramidKVPress",
    "ChunkKVPress",
    "KnormPress",
    "KeyDiffPress",
    "LagKVPress",
    "TOVAPress",
    "StreamingLLMPress",
    "ObservedAttentionPress",
    "RandomPress",
    "QFilterPress",
    "ExpectedAttentionPress",
    "ExpectedAttentionStatsPress",
    "CriticalKVPress",
    "KVzipPress",
)


@functools.cache
def model(attention: str = "eager"):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        save_file(weights(), Path(folder, "model.safetensors"), metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


class NearlyTied(Exception):
    """Rounding could decide otherwise."""


class Cache(DynamicCache):
    """Remembers keys and values of every text position, [L] lists of [K, 2 * H]; presses drop them from the layers."""

    def __init__(self):
        super().__init__()
        self.known = [[] for _ in range(CONFIG["num_hidden_layers"])]

    def update(self, key_states, value_states, layer_idx, *args, **given):
        self.known[layer_idx] += torch.cat([key_states[0], value_states[0]], -1).unbind(1)
        return super().update(key_states, value_states, layer_idx, *args, **given)

    def positions(self) -> list[list[list[int]]]:
        """Returns the text positions that are left, [L][K]."""
        return [self._positions(layer, torch.stack(known, 1)) for layer, known in zip(self.layers, self.known)]

    def _positions(self, layer, known: torch.Tensor) -> list[list[int]]:
        left = torch.cat([layer.keys[0], layer.values[0]], -1)
        same = (left[:, :, None] == known[:, None]).all(-1)  # [K, n, T]
        assert (same.sum(-1) == 1).all(), "a cached token is not that of one position"
        return [sorted(head) for head in same.to(torch.int8).argmax(-1).tolist()]


def require_gap(ordered: torch.Tensor, num_kept: int) -> None:
    """Raises `NearlyTied` if, among falling scores [..., n], the last that stays is nearly the first that goes."""
    if 0 < num_kept < ordered.shape[-1]:
        stays, goes = ordered[..., num_kept - 1], ordered[..., num_kept]
        if ((stays - goes) / torch.maximum(stays.abs(), goes.abs())).min() < LEAST_GAP:
            raise NearlyTied


def watched(press: kvpress.ScorerPress) -> kvpress.ScorerPress:
    """Has a press raise `NearlyTied` where two scores are that."""
    # kvpress gives the newest tokens, which stay, a number above the scores.
    window = 1 if isinstance(press, kvpress.TOVAPress) else getattr(press, "window_size", 0)
    if isinstance(press, kvpress.ExpectedAttentionPress):
        window = press.n_sink
    compress, score, scores = press.compress, press.score, []

    def remembered(*args):
        scores.append(score(*args))
        return scores[-1]

    def checked(*args):
        keys, values = compress(*args)
        num_kept = keys.shape[2] - window
        ordered = scores.pop()[0].sort(-1, descending=True).values[:, window:]
        assert num_kept >= 0, "of tokens with kvpress' own number, which stay is chance"
        require_gap(ordered, num_kept)
        if isinstance(press, kvpress.LagKVPress):
            # Its scores are ranks in a partition, of these.
            by_size = dataclasses.replace(press, cross_scoring=True).score(*args)[0, :, press.n_sink :]
            by_size = by_size[:, : by_size.shape[1] // press.lag_size * press.lag_size].unflatten(
                1, (-1, press.lag_size)
            )
            by_size = by_size[:, :-1].sort(-1, descending=True).values
            num_tail = args[2].shape[2] - press.n_sink - by_size[0].numel()
            require_gap(by_size, (num_kept - press.n_sink - num_tail) // by_size.shape[1])
        return keys, values

    press.score, press.compress = remembered, checked
    return press


def watched_stages(press: kvpress.CriticalKVPress) -> kvpress.CriticalKVPress:
    """Has it raise `NearlyTied` where two scores are that, in either stage."""
    window, inner, scores = press.press.window_size, press.press.score, []

    def remembered(*args):
        scores.append(inner(*args))
        # SnapKV gives its window the largest score, and topk chooses among equals by chance.
        scores[-1][..., -window:] *= 2
        return scores[-1].clone()

    press.press.score = remembered
    watched(press)
    compress = press.compress

    def checked(*args):
        keys, values = compress(*args)
        ordered = scores.pop()[0].sort(-1, descending=True).values
        require_gap(ordered, max(1, int((1 - press.compression_ratio) * args[2].shape[2] * press.first_stage_ratio)))
        return keys, values

    press.compress = checked
    return press


def made(kind: str, settings: dict) -> kvpress.ScorerPress:
    """Returns a press that stops where rounding decides, with numbers about the model that are not from a hub."""
    if kind == "CriticalKVPress":
        own = {name: settings.pop(name) for name in ("first_stage_ratio", "epsilon")}
        return watched_stages(kvpress.CriticalKVPress(kvpress.SnapKVPress(**settings), **own))
    known = {name: torch.tensor(x) for name, x in statistics().items()}
    press = getattr(kvpress, kind)(**settings)
    if kind == "QFilterPress":
        press.q_filters, press.post_init_from_model = -known["filters"], lambda model: None
    if kind == "ExpectedAttentionStatsPress":
        press.mu, press.cov = known["mean"], known["covariance"]
    return watched(press)


def watched_chunks(press: kvpress.ChunkKVPress) -> kvpress.ChunkKVPress:
    """Has it raise `NearlyTied` where two chunks are that; its SnapKV computes attention itself."""
    compress = press.compress

    def checked(*args):
        args = (*args[:4], None, *args[5:])  # it refuses weights of the model
        keys, values = compress(*args)
        by_chunk = press.press.score(*args)[0].sum(0).split(press.chunk_length)
        ordered = torch.stack([chunk.mean() for chunk in by_chunk]).sort(descending=True).values
        require_gap(ordered, -(-keys.shape[2] // press.chunk_length))
        return keys, values

    press.compress = checked
    return press


def watched_shares(press: kvpress.AdaKVPress) -> kvpress.AdaKVPress:
    """Has it raise `NearlyTied` where two scores are that, of a head or of all heads that share a budget."""
    compress, score, scores = press.compress, press.press.score, []

    def remembered(*args):
        scores.append(score(*args))
        return scores[-1].clone()  # it overwrites them

    def checked(*args):
        args = (*args[:4], None, *args[5:])
        keys, values = compress(*args)
        found, window = scores.pop()[0], getattr(press.press, "window_size", 0)
        num_kept = found.shape[1] - len(args[0].masked_key_indices[0]) // len(found)
        safe = max(int(num_kept * press.alpha_safeguard), press.alpha_safeguard > 0)
        by_head = found.sort(-1, descending=True).values[:, window:]
        if safe > window:
            require_gap(by_head, safe - window)
        by_head[:, : max(safe - window, 0)] = torch.inf
        ordered = by_head.flatten().sort(descending=True).values
        require_gap(ordered[None], (num_kept - window) * len(found))
        return keys, values

    press.press.score, press.compress = remembered, checked
    return press


class Encoder:
    """Takes the place of a tokenizer without a chat template."""

    chat_template = None

    @staticmethod
    def encode(text: str, **given) -> torch.Tensor:
        return torch.tensor([encode(text)], dtype=torch.int64)


def repeated(settings: dict, prompt: list[int], cache: Cache) -> None:
    """Runs a prompt and KVzip's second pass.

    Raises:
      NearlyTied: rounding could decide which pairs of a layer, or of the model, stay.
    """
    press = kvpress.KVzipPress(**settings)
    compress_post = press.compress_post

    def checked(network):
        scores = press.score_val if press.layerwise else press.score_val[None]
        ordered = scores.flatten(1).sort(-1, descending=True).values
        require_gap(ordered, ordered.shape[1] - int(ordered.shape[1] * press.compression_ratio))
        compress_post(network)

    press.compress_post, network = checked, model("sdpa")
    with mock.patch.object(AutoTokenizer, "from_pretrained", lambda name: Encoder), press(network):
        network(torch.tensor([prompt]), past_key_values=cache, use_cache=True)


def not_masked(length: int) -> list[list[list[int]]]:
    """Returns the text positions [L][K] that a press has not masked in the model with fused attention."""
    found = []
    for layer in model("sdpa").model.layers:
        _, heads, positions = (x.tolist() for x in layer.self_attn.masked_key_indices)
        masked = set(zip(heads, positions, strict=True))
        heads = range(CONFIG["num_key_value_heads"])
        found.append([[at for at in range(length) if (head, at) not in masked] for head in heads])
    return found


def forward(tokens: list[int], start: int, cache: Cache) -> torch.Tensor:
    """Runs tokens at their text positions; returns the logits after the last."""
    at = torch.arange(start, start + len(tokens))
    given = {"position_ids": at[None], "cache_position": at, "past_key_values": cache, "use_cache": True}
    return model()(torch.tensor([tokens]), **given).logits[0, -1]


def make(case: KVPressCase) -> KVPressCase:
    """Returns the case with what kvpress keeps.

    Raises:
      NearlyTied: with this prompt, some choice is a matter of rounding.
    """
    kind, settings, cache, tokens = getattr(kvpress, case.press), dict(case.settings), Cache(), []
    names = ("compression_interval", "target_size")
    decoding = {name: settings.pop(name) for name in names if name in settings}
    if case.press == "AdaKVPress":
        share = settings.pop("alpha_safeguard")
        inner = kvpress.SnapKVPress if "window_size" in settings else kvpress.KnormPress
        network = model("sdpa")
        with watched_shares(kvpress.AdaKVPress(inner(**settings), share))(network):
            network(torch.tensor([case.prompt]), past_key_values=cache, use_cache=True)
        return case._replace(kept=not_masked(case.length))
    if case.press == "KVzipPress":
        repeated(settings, case.prompt, cache)
        return case._replace(kept=not_masked(case.length))
    if not decoding:
        if case.press == "ChunkKVPress":
            chunk = settings.pop("chunk_length")
            press = watched_chunks(kvpress.ChunkKVPress(kvpress.SnapKVPress(**settings), chunk))
        else:
            press = made(case.press, settings)
        with press(model()):
            forward(case.prompt, 0, cache)
        return case._replace(kept=cache.positions())
    press = kvpress.PrefillDecodingPress(
        watched(kind(compression_ratio=1 - TARGET / case.length, **settings)),
        kvpress.DecodingPress(watched(kind(**settings)), **decoding, hidden_states_buffer_size=0),
    )
    with press(model()):
        logits = forward(case.prompt, 0, cache)
        for at in range(case.length, case.length + NUM_WRITTEN):
            best = logits.sort(descending=True)
            if best.values[0] - best.values[1] < LEAST_LOGIT_GAP:
                raise NearlyTied
            tokens.append(int(best.indices[0]))
            logits = forward(tokens[-1:], at, cache)
    return case._replace(tokens=tokens, kept=cache.positions())


def of_some_prompt(case: KVPressCase) -> KVPressCase:
    for seed in range(100):
        with contextlib.suppress(NearlyTied):
            return make(case._replace(seed=seed))
    raise SystemExit(f"{case.name}: no prompt keeps scores apart")


def queries_of(prompt: list[int]) -> dict[str, list]:
    """Statistics of a prompt's queries after the first 4, by kvpress, and filters by the code of Q-Filters' authors."""
    from kvpress.presses.expected_attention_with_stats import patch_rotary_embedding
    from transformers.models.llama import modeling_llama

    with patch_rotary_embedding(model()) as captured:
        model()(torch.tensor([prompt]))
    unrotated = torch.cat(captured)[:, :, 4:]
    mean = unrotated.mean(-2)
    centred = unrotated - mean[:, :, None]
    covariance = centred.transpose(-2, -1) @ centred / (unrotated.shape[2] - 1)
    cos, sin = model().model.rotary_emb(mean, torch.arange(4, len(prompt))[None])
    rotated, _ = modeling_llama.apply_rotary_pos_emb(unrotated, unrotated, cos, sin)
    u, _, vh = torch.linalg.svd(rotated)
    sign = ((u[..., 0] > 0).float().mean(-1) > 0.5).float() * 2 - 1
    filters = (sign[..., None] * vh[..., 0, :]).reshape(len(mean), CONFIG["num_key_value_heads"], -1, mean.shape[-1])
    return {"mean": mean.tolist(), "covariance": covariance[:, 5].tolist(), "filters": filters.mean(2).tolist()}


def rounded(found: dict[str, list]) -> str:
    return json.dumps(json.loads(json.dumps(found), parse_float=lambda x: round(float(x), 6))) + "\n"


@torch.no_grad()
def main() -> None:
    logging.disable_progress_bar()
    FOLDER.mkdir(exist_ok=True)
    cases = [of_some_prompt(case) for case in asked()]
    lines = [json.dumps(case._asdict(), separators=(",", ":")) for case in cases]
    (FOLDER / "kept.jsonl").write_text("".join(f"{line}\n" for line in lines))
    # ChunkKVPress and AdaKVPress have the ratio of the press that they are given.
    defaults = {name: {"compression_ratio": kvpress.ScorerPress.compression_ratio} for name in COMPARED}
    for name, found in defaults.items():
        arguments = inspect.signature(getattr(kvpress, name)).parameters.values()
        found |= {each.name: each.default for each in arguments if each.default is not inspect.Parameter.empty}
    (FOLDER / "queries.json").write_text(rounded(queries_of(cases[0]._replace(length=LENGTHS[0], seed=0).prompt)))
    versions = {name: importlib.metadata.version(name) for name in ("kvpress", "torch", "transformers")}
    (FOLDER / "defaults.json").write_text(json.dumps({"versions": versions, "defaults": defaults}, indent=2) + "\n")
    print(f"{len(cases)} cases, {sum(len(line) for line in lines):,} bytes, prompts {max(c.seed for c in cases)}")


if __name__ == "__main__":
    main()
