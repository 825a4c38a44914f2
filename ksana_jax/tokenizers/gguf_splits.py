"""Splits of texts into words for byte-level BPE, by the name in `tokenizer.ggml.pre`. Knows names only.

The words equal llama.cpp's, even where a model's tokenizer.json splits differently: for tekken and gpt-4o, a letter
outside ASCII is upper and lower case at once, and no combining mark belongs to a word.
Source: llama.cpp, src/llama-vocab.cpp and src/unicode.cpp.
"""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """Splits a text into words, which BPE does not merge across.

    patterns: regular expressions in Oniguruma's syntax. Each splits the parts that the one before it left: a match is
      a part, and so is the text between two.
    ignore_merges: a word that is a token becomes that token, regardless of merges.
    add_bos: whether a text begins with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"'(?:[stmd]|re|ve|ll)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
# Spelled out: (?i) would also match the long s and other letters that fold to ASCII.
_CONTRACTION = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"


def _lines(marks: str = r"[^\s\p{L}\p{N}]", ends: str = r"[\r\n]*") -> str:
    """The rest of the newer patterns: marks with the line ends after them, line ends with the spaces before them."""
    return rf" ?{marks}+{ends}|\s*[\r\n]+|{_SPACES}"


def _words(digits: str, letter: str = r"\p{L}", lines: str = _lines()) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}|{lines}"


def _cased(digits: str, contraction: str) -> str:
    """Words that end where a capital letter follows a small one."""
    upper, lower, before = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]", r"[^\r\n\p{L}\p{N}]?"
    first, second = (f"{before}{upper}{letters}{contraction}" for letters in (f"*{lower}+", f"+{lower}*"))
    return f"{first}|{second}|{digits}|" + _lines(ends=r"[\r\n/]*")


_ASCII_MARKS = r"[!-/:-@\[-`{-~]"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    _ASCII_MARKS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|" + _lines(r"[\p{P}\p{S}]"),
)
# llama.cpp treats U+2003 and U+3000 as white space, outside these ranges.
_HAN_AND_HANGUL = r"[ࠀ-龥가-\x{d7ff}&&[^\s]]+"
# Letters of scripts with two cases, as in deepseek-llm.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ"
    "ῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓"
    "𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_LLAMA3 = _words(r"\p{N}{1,3}")

_BY_NAMES = {
    "default": Split((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat mellum modern-bert granite-docling a.x-4.0": Split((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Split((r"\p{N}", _GPT2)),
    "falcon": Split((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Split(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "glm4": Split((_LLAMA3,), ignore_merges=True),
    "dbrx smaug-bpe chatglm-bpe": Split((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo": Split((_words(r"\p{N}"),)),
    "qwen35": Split((_words(r"\p{N}", r"[\p{L}\p{M}]", _lines(r"[^\s\p{L}\p{M}\p{N}]")),)),
    "minicpm5": Split((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    "seed-coder": Split((_words(r"\p{N}", lines=_lines(r"[^\s\p{L}\p{N}\r\n]", "")),)),
    "tekken": Split((_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": Split((_cased(r"\p{N}{1,3}", f"(?:{_CONTRACTION})?"),)),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm": Split(_DEEPSEEK),
}
SPLITS = {name: split for names, split in _BY_NAMES.items() for name in names.split()}
