"""A Jinja sandbox for chat templates that counts all work and limits single operations.

The sandbox keeps a template from Python's internals and from changing its inputs. All of a template's computations pass
through it: calls, filters and operators by Jinja's own hooks; loops, macros, `~`, slices, literals and comparisons by
rewriting the parsed template with calls to `_Counted`. Filters whose time is out of proportion to the length of their
text (wordwrap, pprint, urlize, ...), and which no chat format needs, are not available.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ksana_jax.tokenizers.template_budget import ITEM, MAX_INTEGER_BITS, STEP, current

MAX_RESULT_CHARS = 2**20
MAX_RANGE_STEPS = 100_000
# Largest number that methods and filters accept: str.ljust, indent and the like allocate such a width at once.
MAX_ARGUMENT = 2**20
MAX_FORMAT_WIDTH = 10_000
# About ten times the size of published templates; compiling this many nodes takes a second.
MAX_NODES = 20_000
# Units of work per node in a loop's body; looking up a name that does not exist is the slowest.
NODE = 5
MAX_JSON_INDENT = 8
_KEPT_GLOBALS = ("namespace", "cycler", "joiner")
# Filters that read at most one item, or a length.
_CONSTANT = frozenset(("attr", "count", "d", "default", "first", "items", "last", "length"))
# Filters that iterate over items without reading them; a filter or test that they apply to each is charged separately.
_SHALLOW = frozenset("batch list map reject rejectattr reverse select selectattr slice".split())
_FILTERS = (_CONSTANT | _SHALLOW).union(
    """
    abs capitalize dictsort e escape float format groupby indent int join lower max min replace round safe sort
    string sum title tojson trim truncate unique upper
    """.split()
)
_STRING_METHODS = frozenset(
    """
    capitalize casefold count endswith find format format_map index isalnum isalpha isascii isdecimal isdigit
    islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace
    rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
    """.split()
)
# Filters that split a string into one string per character.
_ITEMWISE = frozenset(
    "batch dictsort groupby join list map max min reject rejectattr select selectattr slice sort sum unique".split()
)
MAX_ITEMWISE_CHARS = 2**16
# Methods whose worst case compares every character of one text with every character of another.
_PAIRWISE = frozenset(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"))


class _Counted(jinja2.ext.Extension):
    """Functions called by rewritten templates, through a Jinja node that templates themselves cannot name."""

    tags = {"generation"}  # noqa: RUF012  declared by the base class, which Jinja reads

    def parse(self, parser: Any) -> list[nodes.Node]:
        """Parses {% generation %} ... {% endgeneration %}, which marks training targets and has no effect here."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def step(self, units: int) -> bool:
        current().charge(units)
        return True

    def concat(self, *values: Any) -> str:
        if sum(map(current().size, values)) > MAX_RESULT_CHARS:
            raise SecurityError(f"it joins more than {MAX_RESULT_CHARS:,} characters")
        return current().made("".join(map(str, values)))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return current().made(value[start:stop:step])

    def built(self, value: Any) -> Any:
        current().size(value)
        return current().made(value)

    def compared(self, value: Any) -> Any:
        current().charge(current().read(value))
        return value


class _Rewriting(NodeTransformer):
    """Inserts calls to `_Counted` into a parsed template."""

    def _call(self, node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Expr:
        target = nodes.ExtensionAttribute(_Counted.identifier, name)
        return nodes.Call(target, list(args), [], None, None, lineno=node.lineno)

    def _step(self, node: nodes.Node, units: int) -> nodes.ExprStmt:
        return nodes.ExprStmt(self._call(node, "step", nodes.Const(units)), lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            units = STEP + NODE * _num_nodes([node.test])
            node.test = nodes.And(self._call(node, "step", nodes.Const(units)), node.test, lineno=node.lineno)
        node.body.insert(0, self._step(node, STEP + NODE * _num_nodes(node.body)))
        return node

    def visit_Macro(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._step(node, STEP + NODE * _num_nodes(node.body)))
        return node

    visit_CallBlock = visit_Macro

    def visit_Output(self, node: nodes.Output) -> Any:
        self.generic_visit(node)
        size = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        return [self._step(node, size), node] if size else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call(node, "concat", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return self._call(node, "sliced", node.node, *(end or nodes.Const(None) for end in ends))

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else self._call(node, "built", node)

    visit_Tuple = visit_Dict = visit_List

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for side in (node, *node.ops):
            if not isinstance(side.expr, nodes.Const):
                side.expr = self._call(node, "compared", side.expr)
        return node


def _num_nodes(body: list[Any]) -> int:
    return sum(1 + _num_nodes(list(node.iter_child_nodes())) for node in body)


class Environment(ImmutableSandboxedEnvironment):
    """The sandboxed environment; see the module's docstring."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        if (count := _num_nodes([parsed])) > MAX_NODES:
            raise SecurityError(f"it has {count:,} statements and expressions; supported: at most {MAX_NODES:,}")
        return _Rewriting().visit(parsed)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget, sized = current(), [v for v in (left, right) if isinstance(v, (str, bytes, list, tuple))]
        budget.charge(STEP)
        if operator == "+" and sum(map(len, sized)) > MAX_RESULT_CHARS:
            raise SecurityError(f"it joins more than {MAX_RESULT_CHARS:,} characters")
        if (
            operator == "*"
            and sized
            and any(isinstance(n, int) and n * budget.size(s) > MAX_RESULT_CHARS for s in sized for n in (left, right))
        ):
            raise SecurityError(f"it repeats to more than {MAX_RESULT_CHARS:,} characters")
        if operator == "*" and sum(n.bit_length() for n in (left, right) if isinstance(n, int)) > MAX_INTEGER_BITS:
            raise SecurityError(f"it multiplies to more than {MAX_INTEGER_BITS:,} bits")
        if operator == "%" and isinstance(left, str):
            _check_format(left, (right,), percent=True)
        if operator == "**" and not (isinstance(left, (int, float)) and abs(right) <= 64 and abs(left) <= MAX_ARGUMENT):
            raise SecurityError("its powers are too large")
        result = budget.made(super().call_binop(context, operator, left, right))
        if sized:
            budget.size(result)
        return result

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)  # None for what only keeps its arguments: namespace, dict, macros
        if isinstance(owner, _Counted):
            return obj(*args)
        budget, name = current(), getattr(obj, "__name__", "a method")
        values = (*args, *kwargs.values())
        budget.charge(STEP + sum(map(budget.read, args)))
        if isinstance(owner, str):
            if name not in _STRING_METHODS:
                raise SecurityError(f"it calls {name} of a string, which no chat template needs")
            budget.charge(budget.read(owner))
            _check_result(name, owner, args)
        if owner is not None:
            _check_numbers(name, values)
        return budget.made(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the sandbox's replacement for str.format, which checks widths before it formats."""
        stand_in = super().wrap_str_format(value)
        if stand_in is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (*args, *kwargs.values()))
            _check_numbers("format", (*args, *kwargs.values()))
            return stand_in(*args, **kwargs)

        return checked


def _check_numbers(name: str, values: Any) -> None:
    limit = {"round": 100, "tojson": MAX_JSON_INDENT}.get(name, MAX_ARGUMENT)
    for value in values:
        if isinstance(value, int) and abs(value) > limit:
            raise SecurityError(f"it calls {name} with {value if value.bit_length() < 64 else 'a huge number'}")


def _check_format(form: str, values: tuple[Any, ...], percent: bool = False) -> str:
    if re.search(r"\d{5}", form) or (percent and "*" in form):
        raise SecurityError(f"it formats with {form!r:.40}, a width of {MAX_FORMAT_WIDTH:,} or more")
    widest = max([MAX_FORMAT_WIDTH if re.search(r"\d", form) else 64, *map(current().size, values)])
    fields = form.count("%" if percent else "{")
    if fields * widest > MAX_RESULT_CHARS + widest:
        raise SecurityError(f"it formats {fields:,} fields of up to {widest:,} characters")
    return form


def _check_result(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Rejects calls whose result would be far longer than their input, and charges for those that take far longer."""
    if name in _PAIRWISE and isinstance(value, str):
        current().charge(sum(len(value) * len(arg) // 100 for arg in args if isinstance(arg, str)))
    most = 0
    if name == "replace" and isinstance(value, str) and len(args) >= 2:
        most = len(value) + value.count(str(args[0])) * len(str(args[1]))
    elif (
        name == "join" and isinstance(value, str) and args and hasattr(args[0], "__len__")
    ):  # the method of a separator
        most = current().size(args[0]) + len(value) * len(args[0])
    elif name == "indent" and args and isinstance(value, str):
        width = args[0] if isinstance(args[0], int) else len(str(args[0]))
        most = len(value) + (value.count("\n") + 1) * width
    if most > MAX_RESULT_CHARS:
        raise SecurityError(f"{name} makes up to {most:,} characters; supported: at most {MAX_RESULT_CHARS:,}")


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)  # also takes over what Jinja notes on a filter's function
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget, given = current(), args[takes_context:]
        _check_numbers(name, (*given[1:], *kwargs.values()))
        if not given:
            return function(*args, **kwargs)
        value, rest = given[0], (*given[1:], *kwargs.values())
        if name == "join" and not isinstance(value, str):
            value = [item for item in value if budget.charge(STEP) is None]  # of a generator as well
            _check_result("join", str(rest[0]) if rest else "", (value,))
            args = (*args[:takes_context], value, *given[1:])
        if name == "format":
            _check_format(str(value), rest, percent=True)
        _check_result(name, value, rest)
        if name == "sum" and isinstance(kwargs.get("start", (*given, None, 0)[2]), (str, list, tuple)):
            raise SecurityError("it sums what are not numbers")
        by_items = name in (_ITEMWISE if isinstance(value, str) else _SHALLOW)
        if by_items and isinstance(value, str) and len(value) > MAX_ITEMWISE_CHARS:
            raise SecurityError(f"{name} takes {len(value):,} characters one by one; supported: {MAX_ITEMWISE_CHARS:,}")
        if name in _CONSTANT:
            cost = 0
        elif by_items:
            cost = ITEM * len(value) if hasattr(value, "__len__") else 0  # a generator's items are counted on their way
        else:
            cost = budget.read(value)
        # The filter, unlike the method, runs a regular expression over each word.
        cost *= 4 if name == "title" else 1
        budget.charge(STEP + cost + sum(map(budget.read, rest)))
        return budget.made(function(*args, **kwargs))

    return counted


def _counted_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any) -> Any:
        current().charge(STEP // 5 + sum(map(current().read, args)))
        return function(*args)

    return counted


@jinja2.pass_context
def _written(context: Any, value: Any) -> Any:
    """Counts text that is written out. It takes the context so that Jinja does not evaluate it at compile time."""
    current().charge(current().size(value))
    return value


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def counted_range(*args: int) -> range:
    steps = range(*args)
    if len(steps) > MAX_RANGE_STEPS:
        raise SecurityError(f"its ranges have more than {MAX_RANGE_STEPS:,} steps")
    current().charge(ITEM * len(steps))
    return steps


def strftime(now: Any, form: str) -> str:
    return now.strftime(_check_format(form, (), percent=True))


@functools.cache
def environment() -> Environment:
    """Returns the environment of all templates."""
    made = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Counted],
        autoescape=False,
        optimized=False,
        finalize=_written,
    )
    made.globals = {name: made.globals[name] for name in _KEPT_GLOBALS}
    made.globals["raise_exception"] = _raise_exception
    made.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    filters = {**{name: made.filters[name] for name in _FILTERS}, "tojson": _tojson}
    made.filters = {name: _counted_filter(name, function) for name, function in filters.items()}
    made.tests = {name: _counted_test(function) for name, function in made.tests.items()}
    return made
