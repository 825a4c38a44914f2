"""Texts of tokens whose meaning llama.cpp knows even if a GGUF file does not name it. Knows no files.

Converters name one token that ends a text; a model ends its turn in a chat with another.

Source: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Container

# Tokens that end a turn, besides those that the file names.
TURN_ENDS = (
    "</s> <eos> [EOS] <|endoftext|> <|end_of_text|> <｜end▁of▁sentence｜> <end_of_utterance> <|im_end|> <|end|> "
    "<|eot_id|> <|eom_id|> <end_of_turn> <turn|> <EOT> _<EOT> [EOT] <|return|> <|call|> <|calls|> <|flush|> "
    "<|tool_response> [e~["
).split()
# Tokens for filling in a text, by the key that names them; without the key, the first text in the vocabulary counts.
_INFILL = {
    "fim_pre_token_id": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> <|code_prefix|> <|prefix|>",
    "fim_suf_token_id": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> <|code_suffix|> <|suffix|>",
    "fim_mid_token_id": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> <|code_middle|> <|middle|>",
    "fim_pad_token_id": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep_token_id": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep_token_id": "<|file_sep|>",
}
INFILL = {key: texts.split() for key, texts in _INFILL.items()}
# These end a text, too.
INFILL_ENDS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")


def no_ends(tokens: Container[str]) -> list[str]:
    """Returns texts of TURN_ENDS that end no text in a vocabulary.

    In the formats of gpt-oss and Solar, <|end|> ends one message of several in a turn. Gemma 4 uses no </s>.
    """
    ends_call = "<|call|>" in tokens or "<|calls|>" in tokens
    messages = ends_call and ("<|return|>" in tokens or "<|flush|>" in tokens)
    return ["<|end|>"] * messages + ["</s>"] * ("<|tool_response>" in tokens)
