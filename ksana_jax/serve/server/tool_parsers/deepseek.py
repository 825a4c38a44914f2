"""DeepSeek's calls between tokens: V3 and R1 with the arguments in a code block, V3.1 with the name before them."""

from __future__ import annotations

import re

from ksana_jax.serve.server.tool_parsers.base import NAME, Call, Form, Read, ToolParser, arguments_of, json_at

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def read(text: str) -> Read | None:
    """Returns the calls between the outer tokens; see `ToolParser.read`."""
    calls, at = [], len(CALLS)
    while CALLS_END in (rest := text[at:]):  # which may be in an argument
        if rest.lstrip().startswith(CALLS_END):
            return calls, len(text) - len(rest.lstrip()) + len(CALLS_END)
        name, sep, _ = rest.partition(SEP)
        at += len(name) + len(sep)
        if (name := name.strip().removeprefix(CALL)) == "function":  # V3: a type, and the name in a line of its own
            name, _, _ = text[at:].partition("\n")
            at += len(name)
            at += len(text[at:]) - len(text[at:].lstrip().removeprefix("```json"))
        found = json_at(text, at)
        if not sep or found is None:
            return None
        calls.append(Call(name.strip(), arguments_of(found[0])))
        close = re.compile(r"\s*(```)?" + re.escape(CALL_END)).match(text, found[1])
        if close is None:
            raise ValueError("arguments are followed by other text")
        at = close.end()
    return None


DEEPSEEK_V3 = ToolParser(
    templates=("<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json",),
    starts=(CALLS,),
    end=CALLS_END,
    read=read,
    form=Form(f"{CALL}function{SEP}{NAME}\n```json\n", f"\n```{CALL_END}", "\n", CALLS, CALLS_END),
)
DEEPSEEK = ToolParser(
    templates=("tool▁calls▁begin",),
    starts=(CALLS,),
    end=CALLS_END,
    read=read,
    form=Form(f"{CALL}{NAME}{SEP}", CALL_END, "", CALLS, CALLS_END),
)
