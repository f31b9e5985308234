"""The environment of chat templates: Jinja's sandbox, with bounds on processor time and on the length of texts.

A template comes with a model, and is a program: without bounds two nested loops stop the API server. Time is checked at each
iteration of a loop and each call of a macro; lengths where a single operation can make a long text of a short one.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Sized
from datetime import datetime
from string import Formatter
from typing import Any, NoReturn

from jinja2 import Environment, nodes, pass_context, pass_environment
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

CPU_S = 2.0
"""Processor time of one rendering. A long conversation takes some milliseconds."""
MAX_CHARS = 32 << 20
"""Of one text or list, and of all that a rendering writes: as many as the bytes of the longest request."""
MAX_WIDTH = 100_000
"""Of padding, indentation and batches: a number that multiplies a text."""
MAX_DIGITS = 5
"""Of a width in a format."""
MAX_BITS = 4096
"""Of a product or a power of integers."""
_DIRECTIVE = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\d+|\*)?(?:\.(\d+|\*)?)?[hlL]?(.)", re.DOTALL)
"""Of `%`: width, precision and kind, in the order in which Python reads them."""
_DATE_FORM = re.compile(r"(?:[^%]|%%|%[-_0^#]?[a-zA-Z])*")
"""Directives without widths."""
_DATE_CHARS = 64
"""Of one directive, at most."""
_SCOPES = ("_loop_vars", "_block_vars")
"""Arguments that Jinja adds to each call inside a loop or block, for functions that take the context."""
_SIZED_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap")


_TEXT_FILTERS = tuple(
    "capitalize center e escape float forceescape indent int lower pprint string striptags title trim truncate upper urlencode "
    "urlize wordcount wordwrap xmlattr".split()
)
"""Filters that make a text of any value."""


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedContext(Context):
    """The variables of one rendering, with what it may still use."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.end_s = time.thread_time() + CPU_S
        self.chars = [MAX_CHARS]

    def derived(self, locals: dict[str, Any] | None = None) -> "BoundedContext":
        """Returns the variables of a block, with the same bounds."""
        context = super().derived(locals)
        assert isinstance(context, BoundedContext)
        context.end_s, context.chars = self.end_s, self.chars
        return context


class _Bounds(NodeTransformer):
    """Inserts a check of the time into loops and macros, and of the length into `~`."""

    def _checked(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("check_time", []), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _checked

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replaces `a ~ b` by a call."""
        self.generic_visit(node)
        return _call("joined", node.nodes)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment that Transformers gives to chat templates, bounded."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    context_class = BoundedContext

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationBlock], finalize=_count_output
        )
        self.filters |= {name: _narrow(self.filters[name]) for name in _SIZED_FILTERS if name != "tojson"}
        self.filters |= {"tojson": _narrow(_tojson), "replace": _replace, "format": _format, "join": _join, "sum": _sum}
        self.filters |= {"wordwrap": _before(_check_wordwrap, self.filters["wordwrap"])}
        self.filters |= {"indent": _before(_check_indent, self.filters["indent"])}
        self.filters |= {name: _before(_check_texts, self.filters[name]) for name in _TEXT_FILTERS}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda form: now().strftime(_date_form(form))}
        del self.globals["lipsum"]

    def _generate(self, source: nodes.Template, *args: Any, **named: Any) -> str:
        return super()._generate(_Bounds().visit(source), *args, **named)

    @staticmethod
    def check_time(context: Any) -> None:
        """Raises TemplateRuntimeError after the time of a rendering."""
        if time.thread_time() > context.end_s:
            raise TemplateRuntimeError(f"it takes more than {CPU_S:g} s of processor time")

    @staticmethod
    def joined(*values: object) -> str:
        """Returns the text of `a ~ b`."""
        texts = [_text(value) for value in values]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Returns the value of a binary operation, of bounded size."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):  # most of all
            _check_length(len(left) + len(right))
            return left + right
        match operator:
            case "*" | "**" if isinstance(left, int) and isinstance(right, int):
                bits = abs(right) * left.bit_length() if operator == "**" else left.bit_length() + right.bit_length()
                if bits > MAX_BITS:
                    raise TemplateRuntimeError(f"a number has more than {MAX_BITS} bits")
            case "*":
                sizes = [abs(value) if isinstance(value, int) else len(value) for value in (left, right) if _has_size(value)]
                _check_length(sizes[0] * sizes[1] if len(sizes) == 2 else 0)
            case "+" if isinstance(left, Sized) and isinstance(right, Sized):
                # Arguments of a tool call are added as a text.
                _check_length(sum(len(str(value)) if isinstance(value, dict) else len(value) for value in (left, right)))
            case "%" if isinstance(left, str):
                _check_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the safe function for the method `format` of a text, None for other values."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def format(*args: object, **named: object) -> str:
            _check_braces(value.__self__, (*args, *named.values()))
            return wrapped(*args, **named)

        return format

    def call(self, context: Context, obj: Any, *args: Any, **named: Any) -> Any:
        """Calls a function or method of the template."""
        if obj is BoundedEnvironment.check_time:
            return obj(context)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            for name in _SCOPES:
                named.pop(name, None)
            if obj.__name__ == "replace" and len(args) > 1:
                return _replace(owner, *args, **named)
            if obj.__name__ == "join" and args:
                return _join(self, args[0], owner)
            _check_widths(args)
            _check_widths(named.values())
            if obj.__name__ == "expandtabs":
                _check_length(len(owner) + owner.count("\t") * max([8, *args, *named.values()]))
        return super().call(context, obj, *args, **named)


def _has_size(value: object) -> bool:
    return isinstance(value, int | Sized)


def _check_length(chars: int) -> None:
    if chars > MAX_CHARS:
        raise TemplateRuntimeError(f"a text or list is longer than {MAX_CHARS} characters or items")


def _text(value: object) -> str:
    """Returns `str(value)`, of bounded length."""
    if isinstance(value, str):
        return value
    _check_length(_text_length(value))
    return str(value)


def _text_length(value: object, known: dict[int, int] | None = None) -> int:
    """Returns about how many characters `str(value)` has, without making it: lists may share their items many times."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if isinstance(value, Namespace):  # its text has its values, and a format may name them
        raise TemplateRuntimeError("a namespace cannot be used as a text")
    if not isinstance(value, list | tuple | dict):
        return 1
    known = {} if known is None else known
    if id(value) not in known:
        items = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 2 + sum(_text_length(item, known) + 2 for item in items)
    return known[id(value)]


def _check_widths(values: Any) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values):
        raise TemplateRuntimeError(f"a width is greater than {MAX_WIDTH}")


def _check_percent(form: str, values: object) -> None:
    """Checks `form % values`."""
    found = _DIRECTIVE.findall(form)
    for width, precision, kind in found:
        if kind == "(":
            raise TemplateRuntimeError("a format has a name with parentheses")
        _check_width_texts(width, precision)
    widths = sum(int(width or 0) + int(precision or 0) for width, precision, _ in found)
    each = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
    _check_length(widths + len(found) * max(map(_text_length, each), default=0))


def _check_braces(form: str, values: Iterable[object]) -> None:
    """Checks `form.format(...)`."""
    specs = [spec or "" for _, name, spec, _ in Formatter().parse(form) if name is not None]
    numbers = [number for spec in specs for number in re.findall(r"\d+|\{", spec)]
    _check_width_texts(*numbers)
    _check_length(sum(map(int, numbers)) + len(specs) * max(map(_text_length, values), default=0))


def _check_width_texts(*widths: str) -> None:
    if any(width in ("*", "{") or len(width) > MAX_DIGITS for width in widths):
        raise TemplateRuntimeError(f"a format has a width of more than {MAX_DIGITS} digits, or one in an argument")


def _date_form(form: str) -> str:
    if not _DATE_FORM.fullmatch(form):
        raise TemplateRuntimeError("the format of a date has a width or an unknown directive")
    _check_length(len(form) + form.count("%") * _DATE_CHARS)
    return form


@pass_context
def _count_output(context: BoundedContext, value: object) -> str:
    """Returns what `{{ value }}` writes."""
    text = _text(value)
    context.chars[0] -= len(text)
    _check_length(MAX_CHARS - context.chars[0])
    return text


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that refuses large numbers as arguments; it keeps what Jinja passes first."""

    def narrow(*args: Any, **named: Any) -> Any:
        _check_widths(args[1:])
        _check_widths(named.values())
        return function(*args, **named)

    narrow.__dict__.update(function.__dict__)
    return narrow


def _before(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that is checked first, with the same arguments."""

    def checked(*args: Any, **named: Any) -> Any:
        check(*args, **named)
        return function(*args, **named)

    checked.__dict__.update(function.__dict__)
    return checked


def _check_texts(*args: Any, **named: Any) -> None:
    for value in (*args, *named.values()):
        if isinstance(value, list | tuple | dict | Namespace):
            _check_length(_text_length(value))


def _check_indent(value: object, width: int | str = 4, *_: object, **__: object) -> None:
    lines = _text(value).count("\n") + 1
    _check_length(lines * (len(width) if isinstance(width, str) else width))


def _check_wordwrap(
    _: object,
    value: object,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    *__: object,
    **___: object,
) -> None:
    """A long word takes a time that is quadratic."""
    length = len(_text(value))
    if length > MAX_WIDTH:
        raise TemplateRuntimeError(f"a text to wrap has more than {MAX_WIDTH} characters")
    _check_length(length * len(wrapstring or ""))


@pass_context
def _sum(context: BoundedContext, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    environment = context.environment
    total = start
    for value in iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable):
        BoundedEnvironment.check_time(context)
        total = environment.call_binop(context, "+", total, value)  # type: ignore[attr-defined]
    return total


def _replace(value: object, old: str, new: str, count: int = -1) -> str:
    text, old, new = _text(value), _text(old), _text(new)
    _check_length(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


@pass_environment
def _join(environment: Environment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    values = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    texts, size = [], 0
    for item in values:
        texts.append(_text(item))
        size += len(texts[-1]) + len(d)
        _check_length(size)
    return d.join(texts)


def _format(value: object, *args: object, **named: object) -> str:
    form, values = _text(value), named or args
    _check_percent(form, values)
    return form % values


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRuntimeError(message)


def _tojson(value: object, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    _check_length(_text_length(value))
    if not indent:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)
    parts, size = [], 0
    for part in json.JSONEncoder(indent=indent, ensure_ascii=ensure_ascii, **options).iterencode(value):
        parts.append(part)
        size += len(part)
        _check_length(size)
    return "".join(parts)
