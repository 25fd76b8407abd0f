"""The jinja2 environment of chat templates: jinja's own sandbox, and bounds on what rendering takes in time and memory.

Made by `chat.py`, once per template. A template comes with a model, from a stranger, and a few characters of it can
ask for terabytes of text or years of work. So every rendering has a `Meter`, and all that makes something larger is
charged to it before or right after it is made: loops and macros by what their body holds, operators, filters, methods
and literals by the size of their results.

A value's size counts everything in it as often as it occurs there. So lists that hold a list many times over are paid
for in full when they are made, and comparing or printing them later cannot take more than was paid.
"""

import re
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, Namespace, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0  # of this thread's own time
MAX_CHARS = 1 << 26  # made on the way, rendered or not
MAX_COPIES = 32  # as many more characters for each character of the conversation

_STEP = 64  # an iteration, a call; also one entry of a list
_CLOCK_STEP = 64 * _STEP
_MAX_BITS = 1 << 16  # of an integer
_MAX_PATTERN_CHARS = 256  # of strftime_now, which tries larger and larger buffers

# Filters that can make much of little, and those that hand on what is there already.
_GROWING_FILTERS = frozenset("batch center indent replace round slice tojson truncate urlize wordwrap xmlattr".split())
_PASSING_FILTERS = frozenset("attr d default first last max min random".split())
_FREE_FILTERS = frozenset("abs count length float int".split())  # numbers come of these
_GROWING_METHODS = frozenset("center expandtabs join ljust replace rjust to_bytes translate zfill".split())

_CONVERSION_OF_GIVEN_WIDTH = re.compile(r"%[^%a-zA-Z]*\*")
_NUMBER = re.compile(r"\d+")

# How the changes to a template's tree are spelled: as filters, which a template's author could not write.
_TICK = "<tick>"
_LITERAL = "<literal>"
_SLICE = "<slice>"
_ADD = "<add>"
_CONCAT = "<concat>"
_OUTPUT = "<output>"


class TooMuchError(jinja2.TemplateRuntimeError):
    """The template takes too long or makes too much."""


class Meter:
    """What one rendering may still take."""

    __slots__ = ("_clock_at", "_deadline", "_left", "_started")

    def __init__(self, num_chars: int) -> None:
        """`num_chars`: of the conversation."""
        self._left = MAX_CHARS + MAX_COPIES * num_chars
        self._clock_at = self._left  # how much is left when the clock is read next
        self._deadline = time.monotonic() + MAX_SECONDS
        self._started = time.thread_time()

    def charge(self, amount: int) -> None:
        self._left -= amount
        if self._left < self._clock_at:
            self._clock_at = self._left - _CLOCK_STEP
            if self._left < 0:
                raise TooMuchError("it makes too much text")
            # The second clock does not count while other threads run, but takes longer to read.
            if time.monotonic() > self._deadline and time.thread_time() - self._started > MAX_SECONDS:
                raise TooMuchError(f"it takes over {MAX_SECONDS:.0f} s")

    def need(self, amount: int) -> None:
        """Call before something is made that may be this large."""
        if amount > self._left:
            raise TooMuchError("it makes too much text")

    def size(self, value: Any) -> int:
        """Characters in a value, with some for each entry."""
        if isinstance(value, (str, bytes)):
            return len(value)
        total, rest = 0, [value]
        while rest:
            value = rest.pop()
            if isinstance(value, (str, bytes)):
                total += len(value) + _STEP
                continue
            total += _STEP
            if isinstance(value, Mapping):
                rest += value.keys()
                rest += value.values()
            elif isinstance(value, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
                rest += value
            elif isinstance(value, int):
                total += value.bit_length()
            self.need(total + _STEP * len(rest))
        return total

    def charged(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.charge(self.size(item))
            yield item


class _Context(Context):
    meter: Meter

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        return _with_meter(super().derived(locals), self.meter)


def _with_meter(context: Context, meter: Meter) -> Context:
    if isinstance(context, _Context):  # always: it is the `context_class` of the environment
        context.meter = meter
    return context


class _Namespace(Namespace):
    def __repr__(self) -> str:  # the only object that can hold itself, or others without having paid for them
        return "<Namespace>"


class Sandbox(ImmutableSandboxedEnvironment):
    context_class = _Context
    intercepted_binops = frozenset({"*", "**", "%"})  # "+" is a filter below

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals["namespace"] = _Namespace
        self.globals["lipsum"] = _no_lipsum
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.filters |= {
            _TICK: _tick,
            _LITERAL: _literal,
            _SLICE: _slice,
            _ADD: _add,
            _CONCAT: _concat,
            _OUTPUT: _output,
        }
        self.filters |= {"join": _joined(self.filters["join"]), "format": _format, "sum": _summed(self.filters["sum"])}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _metered(name, function)

    def render(self, template: jinja2.Template, variables: dict[str, Any], num_chars: int) -> Iterator[str]:
        """The text in pieces; `num_chars`: of the conversation."""
        context = _with_meter(template.new_context(variables), Meter(num_chars))
        return template.root_render_func(context)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Rewrite().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    # The signatures of these two say what the environment makes: every context is a _Context.

    def call_binop(self, context: _Context, operator: str, left: Any, right: Any) -> Any:  # type: ignore[override]
        if operator == "%":
            return _percent(context.meter, left, right) if isinstance(left, str) else left % right
        if isinstance(left, int) and isinstance(right, int):
            _check_integers(operator, left, right)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
                    context.meter.charge(context.meter.size(value) * max(times, 0))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: _Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        meter = __context.meter
        meter.charge(_STEP)
        if type(__obj) is not BuiltinMethodType:
            result = super().call(__context, __obj, *args, **kwargs)
            if __obj is dict or isinstance(result, str):
                meter.charge(meter.size(result))
            return result
        if kwargs:  # jinja adds these two, for functions that want the context
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
        owner = __obj.__self__
        if __obj.__name__ in _GROWING_METHODS:
            if __obj.__name__ == "join" and args:
                args = (list(meter.charged(args[0])), *args[1:])
            width = len(owner) + 1 if isinstance(owner, (str, bytes)) else 1
            meter.need(width * (_weight(meter, (*args, *kwargs.values())) + 1))
        result = __obj(*args, **kwargs)  # of a built-in type: nothing for jinja to look at
        if type(result) is str:
            meter.charge(len(result) if isinstance(owner, str) else 0)
        elif isinstance(owner, (str, bytes)) or owner is dict:
            meter.charge(meter.size(result))
        return result

    def call_test(
        self, name: str, value: Any, args: Any = None, kwargs: Any = None, context: Any = None, eval_ctx: Any = None
    ) -> Any:
        if context is not None:
            context.meter.charge(_STEP)
        return super().call_test(name, value, args, kwargs, context, eval_ctx)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        is_method = isinstance(value, (BuiltinMethodType, MethodType)) and value.__name__ in ("format", "format_map")
        if not is_method or not isinstance(value.__self__, str):
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def format_text(*args: Any, **kwargs: Any) -> str:
            if is_map:
                (kwargs,), args = args, ()
            return type(text)(_Formatter(self).vformat(text, args, kwargs))

        return format_text


class _Formatter(SandboxedFormatter):
    """str.format: for one call."""

    def __init__(self, environment: Sandbox) -> None:
        super().__init__(environment)
        self._meter = Meter(0)

    def format_field(self, value: Any, format_spec: str) -> Any:
        _check_widths(self._meter, format_spec)
        text = super().format_field(value, format_spec)
        self._meter.charge(len(text))
        return text


def _weight(meter: Meter, values: tuple[Any, ...]) -> int:
    """How much arguments can make of each character: integers are widths, counts and the like."""
    return sum(abs(value) if isinstance(value, int) else meter.size(value) for value in values)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is charged for."""
    if name in _FREE_FILTERS:
        return function
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    grows, passes = name in _GROWING_FILTERS, name in _PASSING_FILTERS

    @pass_context
    def run(context: _Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = context.meter
        meter.charge(_STEP)
        if hasattr(type(value), "__next__"):
            value = meter.charged(value)
            value = list(value) if grows else value
        arguments = (*args, *kwargs.values())
        if grows and arguments:
            meter.need((meter.size(value) + 1) * (_weight(meter, arguments) + 1))
        if passed is None:
            result = function(value, *args, **kwargs)
        else:
            result = function(_passed(passed, context), value, *args, **kwargs)
        if isinstance(result, str):
            meter.charge(len(result))
        elif not passes and isinstance(result, (list, tuple, dict)):
            meter.charge(meter.size(result))
        return result

    return run


def _passed(passed: str, context: _Context) -> Any:
    """What a filter asks for beside its value, by jinja's own names."""
    if passed == "context":
        return context
    return context.eval_ctx if passed == "eval_context" else context.environment


def _joined(join: Callable[..., str]) -> Callable[..., str]:
    @pass_context
    def run(context: _Context, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        items = map(make_attrgetter(context.environment, attribute), value) if attribute is not None else iter(value)
        parts = list(context.meter.charged(items))
        context.meter.need((len(parts) + 1) * len(str(d)))
        return join(context, parts, d)

    return run


def _summed(add_up: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def run(context: _Context, value: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, (int, float)):  # a sum of lists copies what it has so far for every list it adds
            raise TooMuchError("it adds up something other than numbers")
        return add_up(context, value, attribute, start)

    return run


@pass_context
def _format(context: _Context, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise jinja2.TemplateRuntimeError("can't handle positional and keyword arguments at the same time")
    return _percent(context.meter, value if isinstance(value, str) else str(value), kwargs or args)


def _percent(meter: Meter, pattern: str, values: Any) -> str:
    if _CONVERSION_OF_GIVEN_WIDTH.search(pattern):
        raise TooMuchError("it formats with widths from arguments")
    _check_widths(meter, pattern)
    meter.need(pattern.count("%") * meter.size(values))
    text = pattern % values
    meter.charge(len(text))
    return text


def _check_widths(meter: Meter, pattern: str) -> None:
    meter.need(sum(int(digits[:12]) for digits in _NUMBER.findall(pattern)))


def _check_integers(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() * (max(right, 0) if operator == "**" else 1)
    if bits + right.bit_length() > _MAX_BITS and left not in (-1, 0, 1):
        raise TooMuchError("it makes too large a number")


def check_pattern(pattern: Any) -> str:
    """The pattern of a date, unless it is too long."""
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise TooMuchError("it gives a date in too many characters")
    return pattern


def _no_lipsum(*_: Any, **__: Any) -> str:
    raise TooMuchError("it asks for filler text")


@pass_context
def _tick(context: _Context, cost: int) -> bool:
    context.meter.charge(cost)
    return True


@pass_context
def _literal(context: _Context, value: Any) -> Any:
    context.meter.charge(context.meter.size(value))
    return value


@pass_context
def _slice(context: _Context, value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)):
        context.meter.charge(len(value) * (_STEP if isinstance(value, (list, tuple)) else 1))
    return value


@pass_context
def _add(context: _Context, values: tuple[Any, ...]) -> Any:
    if {*map(type, values)} == {str}:
        context.meter.charge(sum(map(len, values)))
        return "".join(values)
    total = values[0]
    for value in values[1:]:
        if isinstance(total, (str, bytes, list, tuple)):
            context.meter.charge(context.meter.size(total) + context.meter.size(value))
        elif isinstance(total, int) and isinstance(value, int):
            _check_integers("+", total, value)
        total = total + value
    return total


@pass_context
def _concat(context: _Context, values: tuple[Any, ...]) -> str:
    text = (markup_join if context.eval_ctx.autoescape else str_join)(values)
    context.meter.charge(len(text))
    return text


@pass_context
def _output(context: _Context, value: Any) -> Any:
    context.meter.charge(len(value) if isinstance(value, str) else context.meter.size(value))
    return value


class _Rewrite(NodeTransformer):
    """Puts a charge wherever a template repeats, collects or cuts."""

    def __init__(self) -> None:
        self._keeps_output = False  # whether what is written here becomes a value; else the renderer counts it

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._visit_body(node, keeps_output=node.recursive)
        node.body.insert(0, nodes.ExprStmt(_charge(node), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_charge(node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self._visit_body(node)
        node.body.insert(0, nodes.ExprStmt(_charge(node), lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro

    def _visit_body(self, node: nodes.Node, keeps_output: bool = True) -> nodes.Node:
        outer = self._keeps_output
        self._keeps_output = outer or keeps_output
        self.generic_visit(node)
        self._keeps_output = outer
        return node

    visit_AssignBlock = visit_FilterBlock = visit_Block = _visit_body

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        values: list[nodes.Expr] = []
        first: nodes.Expr = node
        while isinstance(first, nodes.Add):  # a + b + c at once
            values.append(self.visit(first.right))
            first = first.left
        values.append(self.visit(first))
        return _filtered(_ADD, nodes.Tuple(values[::-1], "load", lineno=node.lineno))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(_CONCAT, nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_List(self, node: nodes.List | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if all(isinstance(item, nodes.Const) for item in node.items) else _filtered(_LITERAL, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(_LITERAL, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(_SLICE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        if self._keeps_output:
            fixed = (nodes.TemplateData, nodes.Const)
            node.nodes = [child if isinstance(child, fixed) else _filtered(_OUTPUT, child) for child in node.nodes]
        return node


def _filtered(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _charge(node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Filter:
    """For one pass through a body: the text in it, and the entries of its lists."""
    cost = _STEP
    for part in node.body:
        for found in part.find_all((nodes.TemplateData, nodes.Const, nodes.List, nodes.Tuple, nodes.Dict)):
            if isinstance(found, nodes.TemplateData):
                cost += len(found.data)
            elif isinstance(found, nodes.Const):
                cost += len(found.value) if isinstance(found.value, str) else 1
            elif isinstance(found, (nodes.List, nodes.Tuple, nodes.Dict)):
                cost += _STEP // 8 * len(found.items)
    return _filtered(_TICK, nodes.Const(cost, lineno=node.lineno))
