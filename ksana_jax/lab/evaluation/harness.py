"""The model "ksana" of lm-evaluation-harness. The cache policy of the engine is applied while scoring."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from ksana_jax import LLM
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.evaluation.generation import cut, prompt_room, sampling_params, stop_strings
from ksana_jax.lab.evaluation.scoring import ScoredIds, fitted, max_part_tokens, score, windows
from ksana_jax.tokenizers import render_chat

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from tqdm import tqdm
except ImportError as error:
    message = "this needs lm-evaluation-harness, the extra eval: pip install 'ksana-jax[eval]'"
    raise ImportError(message, name="lm_eval") from error

logger = logging.getLogger(__name__)


@register_model("ksana")
class KsanaLM(TemplateLM):
    """A model for lm-evaluation-harness that runs on this engine.

    Requests are given to the engine together, which batches them. A rolling log-likelihood is one pass over a text as
    far as max_model_len allows, so that a window and sinks act on all of it.

    Args:
      pretrained: an `LLM`, a Hugging Face directory, or "ksana-tiny".
      max_gen_toks: maximum number of generated tokens of tasks that do not say it.
      add_bos_token: whether texts that do not begin with BOS get one; None does as the tokenizer's files say.
      enable_thinking: of chat templates that read it; None leaves it to them.
      think_end_token: text after which an answer begins, such as "</think>"; strings of `until` end only the answer.
      batch_size, max_batch_size, device: no effect; lm-evaluation-harness passes them to every model. jax chooses the
        device.
      settings: arguments of `LLM` if `pretrained` is not one: max_model_len, pattern, dtype, ... Dotted names such as
        `pattern.window=64` set fields of an argument.

    Raises:
      ConfigError: settings were given with an `LLM`, or the model has no tokenizer, or neither BOS nor EOS, or thinking
        has no end.
    """

    def __init__(
        self,
        pretrained: str | LLM,
        *,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ):
        super().__init__()
        if not isinstance(pretrained, LLM):
            pretrained = LLM(pretrained, **read_settings(settings))
        elif settings:
            raise ConfigError(f"settings for an LLM that exists already: {', '.join(settings)}")
        if pretrained.tokenizer is None:
            raise ConfigError(f"{pretrained.name} has no tokenizer, which tasks in text need")
        self.llm, self.tokenizer, self.max_gen_toks = pretrained, pretrained.tokenizer, max_gen_toks
        self.add_bos_token, self.enable_thinking, self.think_end_token = add_bos_token, enable_thinking, think_end_token
        if (enable_thinking or think_end_token is not None) and not isinstance(think_end_token, str):
            raise ConfigError(f"think_end_token is {think_end_token!r:.60}, must be a string such as </think>")
        if self.tokenizer.bos_id is None and self.tokenizer.eos_id is None:
            raise ConfigError(f"{pretrained.name} has neither a BOS nor an EOS token to begin an empty context with")

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes an empty context: BOS, or EOS if there is none."""
        found = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        assert found is not None
        return found

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a context and its continuation."""
        return max_part_tokens(self.llm)

    @property
    def tokenizer_name(self) -> str:
        return self.llm.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:  # a chat template may have written BOS already
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos)) and self.add_bos_token is not False
        ids, bos_id = self.tokenizer.encode(string, add_special_tokens=add_special_tokens), self.tokenizer.bos_id
        if add_special_tokens and self.add_bos_token and bos_id is not None and ids[:1] != [bos_id]:
            ids = [bos_id, *ids]
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Formats a conversation; without a generation prompt, its last message is left open to be continued."""
        open_end, more = not add_generation_prompt, {"enable_thinking": self.enable_thinking}
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt,
            continue_final_message=open_end,
            chat_template_kwargs=None if self.enable_thinking is None else more,
        )

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        prefix, limit = [self.prefix_token_id], self.max_length
        parts = [fitted(context or prefix, continuation, limit) for _, context, continuation in requests]
        lengths = [len(context or prefix) + len(continuation) for _, context, continuation in requests]
        _warn_shortened([length - limit for length in lengths], f"{limit:,} tokens, continuation included,")
        found = [(result.logprob, result.greedy) for result in self._score(parts, disable_tqdm)]
        for (key, _, _), result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, result)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        parts: list[ScoredIds] = []
        owners: list[int] = []
        num_split = 0
        texts = [request.args[0] for request in requests]
        for index, text in enumerate(texts):
            ids = [self.prefix_token_id, *self.tok_encode(text, add_special_tokens=False)]
            found = list(windows(ids, self.max_length))
            parts += found
            owners += [index] * len(found)
            num_split += len(found) > 1
        if num_split:
            logger.warning(
                "%d of %d texts are longer than %s tokens and scored in parts, each without the cache of the one "
                "before; a larger max_model_len scores them in one pass",
                num_split,
                len(texts),
                f"{self.max_length:,}",
            )
        logprobs: list[list[float]] = [[] for _ in texts]
        for index, result in zip(owners, self._score(parts, disable_tqdm), strict=True):
            logprobs[index].append(result.logprob)
        totals = [math.fsum(values) for values in logprobs]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, params, dropped = [], [], []
        for request in requests:
            context, settings = request.args
            until = {"until": None} if self.think_end_token else {}
            params.append(sampling_params({**settings, **until}, self.max_gen_toks))
            assert params[-1].max_tokens is not None
            room = prompt_room(self.llm.engine.max_model_len, params[-1].max_tokens)
            ids = self.tok_encode(context) or [self.prefix_token_id]
            dropped.append(len(ids) - room)
            prompts.append({"prompt_token_ids": ids[-room:]})
        _warn_shortened(dropped, "max_model_len less max_gen_toks")
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = []
        for request, output in zip(requests, outputs, strict=True):
            text = output.check().outputs[0].text
            if self.think_end_token:
                text = text.rpartition(self.think_end_token)[2].lstrip()
            texts.append(cut(text, stop_strings(request.args[1])))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _score(self, parts: Sequence[ScoredIds], disable_tqdm: bool):
        with tqdm(total=len(parts), desc="Scoring", disable=disable_tqdm) as bar:
            return score(self.llm, parts, bar.update)


def read_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of `LLM` from arguments, some of them dotted; a preset's name and its fields combine."""
    found = {name: value for name, value in settings.items() if "." not in name}
    for name, value in settings.items():
        argument, dot, field = name.partition(".")
        if dot:
            fields = found.get(argument) or {}
            found[argument] = {**({"preset": fields} if isinstance(fields, str) else fields), field: value}
    return found


def _warn_shortened(excess: Sequence[int], limit: str) -> None:
    """Warns if contexts have more tokens than there is room for; they lost their first ones."""
    shortened = [count for count in excess if count > 0]
    if shortened:
        logger.warning(
            "%d of %d contexts are longer than %s and lost up to %s tokens at their beginning",
            len(shortened),
            len(excess),
            limit,
            f"{max(shortened):,}",
        )
