"""DeepSeek's calls between tokens: V3 and R1 with the arguments in a code block, V3.1 with the name before them."""

from __future__ import annotations

from ksana_jax.serve.server.tool_parsers.base import NAME, Call, Form, Read, ToolParser, arguments_of, json_at

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def read(text: str) -> Read | None:
    """Returns the calls between the outer tokens; see `ToolParser.read`."""
    whole, end, _ = text.partition(CALLS_END)
    if not end:
        return None
    calls = [_call(part.partition(CALL_END)[0]) for part in whole.split(CALL)[1:]]
    return calls, len(whole) + len(end)


def _call(text: str) -> Call:
    name, sep, rest = text.partition(SEP)
    if name.strip() == "function":  # V3: the type, then the name in a line of its own
        name, _, rest = rest.partition("\n")
        rest = rest.removeprefix("```json")
    found = json_at(rest)
    if not sep or found is None:
        raise ValueError("a call has no separator, or no JSON")
    return Call(name.strip(), arguments_of(found[0]))


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
