"""Grammars by llguidance (MIT; the extra `structured`): compiled once each, followed token by token. No jax."""

from __future__ import annotations

import collections
import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.structured_outputs import StructuredOutputsParams
from ksana_jax.tokenizers import Tokenizer

# Compiled grammars that are kept; each takes up to 10 MB (50,000 states).
MAX_GRAMMARS = 64
# Generated white space ends, so that a bounded schema has bounded texts.
WHITESPACE = r"[ \t\n\r]{1,32}"
# Some masks of repetitions take seconds with llguidance's own limits, and are errors soon with these: after 60 ms with
# 20,000 a step, which 9 of 776 real schemas reach in their outputs (experiments/grammar/suite.py); 4 reach 50,000.
LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
# Seconds of a core that the masks of a sequence may take: these, and as many for each. SmolLM2's take up to 0.35 ms on
# average.
SPARE_S, MASK_S = 0.1, 0.005


class Grammars:
    """The grammars of a tokenizer, for any threads.

    Args:
      tokenizer: None compiles none. vocab_size: V, of the model. eos_ids: ids that end an output.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._vocabulary: Any = None
        self._compiled: collections.OrderedDict[StructuredOutputsParams, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, asked: StructuredOutputsParams) -> GrammarMatcher:
        """Returns a matcher before an output's first token; compiles its grammar unless it is kept.

        Raises:
          ValueError: a feature of the grammar is not supported, by name; or it takes too much time. ConfigError: the
            extra is not installed.
        """
        with self._lock:
            if (found := self._compiled.get(asked)) is not None:
                self._compiled.move_to_end(asked)
        if found is None:
            found = self._compile(asked)
            with self._lock:
                self._compiled[asked] = found
                if len(self._compiled) > MAX_GRAMMARS:
                    self._compiled.popitem(last=False)
        return GrammarMatcher(found.deep_copy(), functools.partial(self._drop, asked))

    def _drop(self, asked: StructuredOutputsParams) -> None:
        """Forgets a grammar after an error: all its matchers share what has reached a limit."""
        with self._lock:
            self._compiled.pop(asked, None)

    def _compile(self, asked: StructuredOutputsParams) -> Any:
        guidance = _library()
        vocabulary = self._read_vocabulary(guidance)
        try:
            text = _grammar(guidance, asked, vocabulary)
            if asked.thinking is not None:
                text = _after_thinking(text, asked.thinking, vocabulary)
        except (ValueError, AssertionError) as error:
            raise ValueError(f"structured_outputs has a {asked.kind} that cannot be read: {error}") from None
        found = guidance.LLMatcher(vocabulary, text, log_level=0, limits=guidance.LLParserLimits(**LIMITS))
        first, mask = GrammarMatcher(found.deep_copy(), lambda: None), np.zeros(-(-self._vocab_size // 32), np.int32)
        first.allow(mask, ())
        if problem := _problem(found) or first.error:
            raise ValueError(f"structured_outputs has a {asked.kind} that cannot be enforced: {problem}")
        return found

    def _read_vocabulary(self, guidance: Any) -> Any:
        if self._tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, which this engine does not have")
        if not self._eos_ids:
            raise ValueError("structured_outputs needs an end-of-sequence id, which this model does not have")
        with self._lock:
            if self._vocabulary is None:
                wrapper = guidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids[0]))
                self._vocabulary = guidance.LLTokenizer(wrapper, eos_token=self._eos_ids)
            return self._vocabulary


class GrammarMatcher:
    """The `Matcher` of a sequence; see `scheduler.step.masks`.

    Args:
      failed: called after an error.
    """

    def __init__(self, matcher: Any, failed: Callable[[], None]):
        self.error: str | None = None
        self._matcher, self._failed = matcher, failed
        self._num_read, self._left_s = 0, SPARE_S

    def follow(self, output: np.ndarray) -> None:
        if len(new := output[self._num_read :]):
            self._num_read = len(output)
            self._matcher.consume_tokens(new.tolist())

    def allow(self, mask: np.ndarray, drafts: Sequence[int]) -> None:
        matcher, began = self._matcher, time.thread_time()
        count = matcher.try_consume_tokens(list(drafts)) if drafts else 0
        if count == len(drafts):
            matcher.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], mask.nbytes)
        if count:
            matcher.rollback(count)
        self._left_s += MASK_S - (time.thread_time() - began)
        if matcher.is_error() or self._left_s < 0:
            self.error, mask[:] = _problem(matcher) or "its masks take too long", 0
            self._failed()

    def num_allowed(self, drafts: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(drafts)) if drafts else 0

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()


class _Vocabulary:
    """A tokenizer as llguidance reads it: the bytes of each token, as outputs are decoded."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int):
        pieces = [tokenizer.piece(i) for i in range(vocab_size)]
        self.tokens = [piece.data for piece in pieces]
        self.special_token_ids = [i for i, piece in enumerate(pieces) if piece.special]
        self.bos_token_id, self.eos_token_id = tokenizer.bos_id, eos_id
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """Tokenizes a text that follows another one.

        Raises:
          ValueError: the vocabulary cannot express it.
        """
        # Some tokenizers add a space to the start of a text: then a text after a line end, without that.
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text.decode(), add_special_tokens=False)
            data = [self.tokens[i] for i in ids]
            extra, first = sum(map(len, data)) - len(text), 0
            while extra > 0:
                extra, first = extra - len(data[first]), first + 1
            if b"".join(data[first:]) == text:
                return ids[first:]
        raise ValueError(f"the tokenizer cannot express {text!r:.40}")


def _problem(matcher: Any) -> str | None:
    """Returns why a matcher cannot continue, in one line; None if it can."""
    text = matcher.get_error()
    if text == "NoExtensionBias" or text.startswith("panic"):
        return "the tokenizer cannot express the text that must follow"
    return " ".join(text.removesuffix("<non-verbose/>").split())[:400] or None


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        message = "structured_outputs needs llguidance, the extra structured: pip install 'ksana-jax[structured]'"
        raise ConfigError(message) from None
    return llguidance


def _grammar(guidance: Any, asked: StructuredOutputsParams, vocabulary: Any) -> str:
    """Returns the grammar in llguidance's own format."""
    [first, *_] = asked.source
    if asked.kind in ("json", "json_object"):
        white = {"whitespace_pattern": asked.whitespace_pattern or WHITESPACE}
        options = {"whitespace_flexible": False} if asked.disable_any_whitespace else white
        return guidance.LLMatcher.grammar_from_json_schema(
            first if asked.kind == "json" else '{"type": "object"}', overrides=options
        )
    if asked.kind == "choice":
        # A character that is not ASCII stands for itself in Lark's notation.
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.source)
    if asked.kind == "structural_tag":
        return _tagged(guidance, json.loads(first), vocabulary)
    return guidance.grammar_from(asked.kind, first)


def _after_thinking(text: str, tags: Sequence[str], vocabulary: Any) -> str:
    """Returns a grammar that begins after reasoning between tags, or without any unless the first tag is empty."""
    grammars = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    grammars[0] = {**grammars[0], "name": "answer"}
    begin, end = tags
    opening, (closing, *more) = " ".join(_spelled(begin, vocabulary)), _spelled(end, vocabulary)
    thought = " ".join(["thought", *more])
    rules = [
        f"start: {thought if not begin else f'({opening} {thought})?'} SPACE @answer",
        f"thought{'' if closing.startswith('<') else '[lazy]'}: TEXT {closing}",
        "TEXT: /(.|\\n)*/",
        "SPACE: /[ \\n]{0,4}/",
    ]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *grammars]})


def _spelled(text: str, vocabulary: Any) -> list[str]:
    """Returns a text as terms of a grammar; special tokens in it are not written out as text."""
    terms, at = [], 0
    ids = [i for i in vocabulary.tokenize_str(text, parse_special=True) if vocabulary.is_special_token(i)]
    for token in ids:
        name = vocabulary.decode_str([token])
        found = text.find(name, at)
        terms += [json.dumps(text[at:found])] if found > at else []
        terms, at = [*terms, f"<[{token}]>"], found + len(name)
    return terms + ([json.dumps(text[at:])] if text[at:] else [])


def _tagged(guidance: Any, given: dict[str, Any], vocabulary: Any) -> str:
    """Returns the grammar of free text with tags."""
    try:
        triggers, structures = given["triggers"], given["structures"]
        tags = [
            guidance.StructTag(
                trigger=next(trigger for trigger in triggers if part["begin"].startswith(trigger)),
                begin=part["begin"],
                grammar=part["schema"],
                end=part["end"],
            )
            for part in structures
        ]
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"it needs triggers, and structures with begin, schema and end ({error!r})") from None
    # A trigger that is one special token is not written out as text.
    alone = [vocabulary.tokenize_str(tag.trigger, parse_special=True) for tag in tags]
    special = all(len(ids) == 1 and vocabulary.is_special_token(ids[0]) for ids in alone)
    return guidance.StructTag.to_grammar(tags, assume_special=special)
