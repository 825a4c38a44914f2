"""Calls and their arguments as tags: Qwen3-Coder, Qwen3.5, Nemotron 3; DeepSeek V3.2 to V4.1 (DSML)."""

from __future__ import annotations

import json
import re

from ksana_jax.serve.server.tool_parsers.base import Call, Read, ToolParser, arguments_of


class _Tags:
    """Patterns of the start of a block, the start of a call, an argument, and the ends of a call and of the block."""

    def __init__(self, *patterns: str):
        self.begin, self.call, self.argument, self.done, self.end = (re.compile(one, re.DOTALL) for one in patterns)

    def read(self, text: str) -> Read | None:
        """Returns the calls of a block; see `ToolParser.read`."""
        start, calls = self.begin.match(text), []
        at = 0 if start is None else start.end()
        while (call := self.call.match(text, at)) is not None:
            at, found = call.end(), {}
            while (given := self.argument.match(text, at)) is not None:
                value = given["value"]
                at, found[given["name"].strip()] = given.end(), json.loads(value) if given["text"] == "false" else value
            if (done := self.done.match(text, at)) is None:
                return None
            calls.append(Call(call[1].strip(), arguments_of(found)))
            at = done.end()
        end = self.end.match(text, at)
        return None if end is None else (calls, end.end())


QWEN3_XML = ToolParser(
    templates=("<parameter=",),
    starts=("<tool_call>", "<function="),  # Qwen3-Coder forgets the first tag at times
    end="</tool_call>",
    read=_Tags(
        r"(?:<tool_call>)?",
        r"\s*<function=([^>\n]+)>",
        r"\s*<parameter=(?P<name>[^>\n]+)>(?P<text>)\n?(?P<value>.*?)\n?</parameter>(?=\s*<(?:parameter=|/function>))",
        r"\s*</function>",
        r"\s*</tool_call>",
    ).read,
    form=None,
    typed=False,
)
DEEPSEEK_V32 = ToolParser(
    templates=("｜DSML｜",),
    starts=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>"),  # V3.2's, V4's, V4.1's
    end="calls>",
    read=_Tags(
        "<｜DSML｜(?:function_|tool_| )calls>",
        r'\s*<｜DSML｜ ?invoke name="([^"\n]+)">',
        r'\s*<｜DSML｜ ?parameter name="(?P<name>[^"\n]+)" string="(?P<text>true|false)">'
        r"(?P<value>.*?)</｜DSML｜ ?parameter>(?=\s*<(?:｜DSML｜ ?parameter |/｜DSML｜ ?invoke>))",
        r"\s*</｜DSML｜ ?invoke>",
        r"\s*</｜DSML｜(?:function_|tool_| )calls>",
    ).read,
    form=None,
)
