"""Parses the text of a PTX kernel into a list of instructions. Knows the syntax, no instruction."""

from __future__ import annotations

import dataclasses
import functools
import re

_BITS = {
    "pred": 1,
    "b8": 8,
    "u8": 8,
    "s8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "b64": 64,
    "u64": 64,
    "s64": 64,
    "f64": 64,
}


_REGISTERS = 1 << 16  # of a multiprocessor
PARAM_BASE = 1 << 50  # far from all memory


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
      op: with its modifiers, for example "add.s32".
      operands: text of each: "%r1", "0f3F800000", "[%rd1+16]", "{%r1, %r2}".
      predicate: register that decides for each thread whether it runs; None for all. negated: it runs where false.
      line: in the PTX, from 1.
    """

    op: str
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    line: int

    @functools.cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.op.split("."))

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.predicate} " if self.predicate else ""
        text = f"{guard}{self.op} {', '.join(self.operands)}"
        return text if len(text) <= 160 else text[:157] + "..."


@dataclasses.dataclass(frozen=True)
class Program:
    """One kernel.

    Args:
      params: names and sizes in bytes.
      num_threads: of a block, or 0 where the text does not say.
      labels: positions in `instructions`.
      widths: bits of each register; 1 for predicates.
    """

    name: str
    params: dict[str, int]
    num_threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    widths: dict[str, int]

    @property
    def num_registers(self) -> int:
        """Registers of each thread where one block has the multiprocessor to itself, as with setmaxnreg."""
        return min(_REGISTERS // max(self.num_threads, 1) // 8 * 8, 255)

    @functools.cached_property
    def num_mbarriers(self) -> int:
        """Number of mbarriers that it initialises, unless in a loop."""
        return sum(i.op.startswith("mbarrier.init") for i in self.instructions)

    def param_address(self, name: str) -> int:
        """Places of a parameter's bytes, for kernels that take its address."""
        return PARAM_BASE + (list(self.params).index(name) << 20)


def parse(text: str) -> Program:
    """The only kernel (.entry) in a PTX text.

    Raises:
      ValueError: the text has none.
    """
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", text, re.DOTALL)
    if entry is None:
        raise ValueError("no .entry in this PTX")
    name, params, directives = entry.groups()
    sizes = {}
    for kind, param, count in re.findall(
        r"\.(b8|b16|b32|b64|u32|u64|s32|s64|f32)\b[^,]*?([\w$]+)(?:\[(\d+)\])?\s*(?:,|$)", params
    ):
        sizes[param] = _BITS[kind] // 8 * int(count or 1)
    threads = re.search(r"\.(?:maxntid|reqntid)\s+([\d, ]+)", directives)
    num_threads = 1
    for n in re.findall(r"\d+", threads.group(1)) if threads else ["0"]:
        num_threads *= int(n)
    body = _Body(1 + text.count("\n", 0, entry.end()))
    body.read(text[entry.end() :])
    return Program(name, sizes, num_threads, tuple(body.instructions), body.labels, body.widths)


class _Body:
    """Reads statements; each block of inline assembly has separate registers and labels, which are renamed."""

    def __init__(self, line: int):
        self.line = line
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.widths: dict[str, int] = {}
        self.blocks = 0
        self.scopes: list[dict[str, str]] = [{}]

    def read(self, text: str) -> None:
        position = 0
        statement = re.compile(
            r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+):(?!:)|(?P<text>[^;{}]*))", re.DOTALL
        )
        while position < len(text):
            match = statement.match(text, position)
            assert match is not None
            start = match.end() - len(match.group().lstrip())
            self.line += text.count("\n", position, start)
            if match["open"]:
                self.blocks += 1
                self.scopes.append(self._locals(text, match.end()))
                end = match.end()
            elif match["close"]:
                self.scopes.pop()
                if not self.scopes:
                    return
                end = match.end()
            elif match["label"]:
                self.labels[self._rename(match["label"])] = len(self.instructions)
                end = match.end()
            else:
                end = _statement_end(text, start)
                self._statement(" ".join(text[start:end].split()))
            self.line += text.count("\n", start, end)
            position = end

    def _locals(self, text: str, start: int) -> dict[str, str]:
        """Names that a block declares, and their names outside of it."""
        end = _block_end(text, start)
        block = text[start:end]
        names = re.findall(r"^\s*([\w$]+):(?!:)", block, re.MULTILINE)
        for declared in re.findall(r"\.reg\s+\.\w+\s+([^;]*);", block):
            for name, count in re.findall(r"([%\w$]+)(?:<(\d+)>)?", declared):
                names += [f"{name}{i}" for i in range(int(count))] if count else [name]
        return {name: f"%block{self.blocks}_{name.lstrip('%')}" for name in names}

    def _rename(self, text: str) -> str:
        def renamed(match):
            for scope in reversed(self.scopes):
                if match.group() in scope:
                    return scope[match.group()]
            return match.group()

        return re.sub(r"%?[A-Za-z_$][\w$]*", renamed, text) if len(self.scopes) > 1 else text

    def _statement(self, text: str) -> None:
        text = text.rstrip("; ")
        # Directives that say where the line comes from end without a semicolon, in front of an instruction.
        while match := re.match(r"\.loc\s+\d+ \d+ \d+(?:, function_name \S+, inlined_at \d+ \d+ \d+)?\s*", text):
            text = text[match.end() :]
        if match := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text):
            for name, count in re.findall(r"([%\w$]+)(?:<(\d+)>)?", match.group(2)):
                for one in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                    self.widths[self._rename(one)] = _BITS[match.group(1)]
            return
        if not text or text.startswith("."):
            return
        match = re.match(r"(?:@(!?)\s*([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
        if match is None:
            raise ValueError(f"line {self.line}: cannot read {text!r}")
        negated, predicate, op, rest = match.groups()
        operands = tuple(self._rename(x) for x in split(rest))
        predicate = self._rename(predicate) if predicate else None
        self.instructions.append(Instruction(op, operands, predicate, bool(negated), self.line))


def split(text: str) -> list[str]:
    """Operands between commas that are not inside brackets."""
    found, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and not depth:
            found.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*found, last] if last else found


def _statement_end(text: str, start: int) -> int:
    """Index after the semicolon that ends a statement, or after the line of a directive without one."""
    if re.compile(r"\.(loc|file|section|pragma\b(?![^\n]*;))").match(text, start):
        return text.find("\n", start) + 1 or len(text)
    end = text.find(";", start)
    return len(text) if end < 0 else end + 1


def _block_end(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if not depth:
            return match.start()
    return len(text)
