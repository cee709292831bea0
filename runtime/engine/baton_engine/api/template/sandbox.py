"""
The sandbox of chat templates: jinja's, configured as in `transformers`, with limits of steps, time and size.

A template is a program. Each loop iteration and macro call is a step. Steps and time are limited, and so is
the size of every string, list and number. A runaway template therefore fails after a few seconds. The cost of
a single call of Python's library is not limited; `rendering.render_apart` runs untrusted templates in a
separate process.

This module has few imports, so that such a process starts quickly.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_STEPS = 200_000
"""Maximum steps of a rendering, about a second. A conversation of 2,048 messages needs about 10,000."""
MOST_SECONDS = 5.0
MOST_CHARACTERS = 16 * 1024 * 1024
"""Maximum length of the prompt and of each intermediate string or list: four times the maximum body."""
MOST_DIGITS = 4096
"""Maximum bits of an integer."""
MOST_ARGUMENT = 100_000
"""Maximum numeric argument of a method of strings or lists, or of a filter in `WIDENING`."""
WIDENING = ("batch", "center", "format", "indent", "round", "slice", "tojson", "wordwrap")
MOST_SOURCE = 1024 * 1024
"""Maximum characters of a template."""

CLOCK_STEPS = 64
"""Number of steps between two time checks."""
METER = " meter"
"""Variable with the meter of a rendering. The space makes it inaccessible to templates."""

_WIDE = re.compile(r"\d{6}|\*")
"""Matches large widths in format strings."""


class TemplateError(ValueError):
    """A template is invalid, fails, or exceeds its limits. The message is for the client."""


class Exhausted(TemplateError):
    """A template exceeded its limits."""


@dataclass(slots=True)
class Meter:
    """Remaining steps and time of one rendering."""

    deadline: float
    """Time of `time.monotonic`."""
    steps: int = MOST_STEPS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise Exhausted(f"it takes more than {MOST_STEPS} steps")
        if self.steps % CLOCK_STEPS == 0 and time.monotonic() > self.deadline:
            raise Exhausted(f"it takes more than {MOST_SECONDS:g} s")


class GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks text for training. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of all templates. It keeps no state of renderings."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = _to_json
        for name in WIDENING:
            self.filters[name] = _measured(self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]  # generates large texts

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, and add a step to the body of each loop and macro."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            if loop.test is not None:
                loop.test = nodes.And(self._metered(), loop.test, lineno=loop.lineno)
        bodies = [loop.body for loop in tree.find_all(nodes.For)]
        bodies += [macro.body for macro in tree.find_all(nodes.Macro)]
        bodies += [block.body for block in tree.find_all(nodes.CallBlock)]
        for body in bodies:
            body.insert(0, nodes.ExprStmt(self._metered()))
        return self._joined(tree)

    def _metered(self) -> nodes.Expr:
        return self._called("step", [nodes.ContextReference()])

    def _joined(self, tree: nodes.Template) -> nodes.Template:
        """Replace `a ~ b` by a call, because jinja2 does not allow to intercept this operator."""
        for parent in list(tree.find_all(nodes.Node)):
            for name, value in list(parent.iter_fields()):
                if isinstance(value, nodes.Concat):
                    setattr(parent, name, self._join(value))
                elif isinstance(value, list):
                    value[:] = [
                        self._join(item) if isinstance(item, nodes.Concat) else item for item in value
                    ]
        return tree

    def _join(self, concat: nodes.Concat) -> nodes.Expr:
        return self._called("join", concat.nodes)

    def _called(self, method: str, arguments: list[nodes.Expr]) -> nodes.Expr:
        """Return a call of a method of this class."""
        call = nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)
        call.set_environment(self)
        return call

    def step(self, context: Context) -> bool:
        context.parent[METER].step()
        return True

    def join(self, *texts: object) -> str:
        joined = "".join(map(str, texts))
        _check_size(joined)
        return joined

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateError("it formats a text with too great a width")
        value = self.binop_table[operator](left, right)
        _check_size(value)
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, types.BuiltinMethodType):
            _check_arguments(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE.search(value.__self__):
            raise TemplateError("it formats a text with too great a width")
        return wrapped


@dataclass(frozen=True, slots=True)
class Program:
    """A parsed template."""

    source: str
    template: jinja2.Template
    variables: frozenset[str]
    """Names that the template uses without defining them."""

    def run(self, variables: Mapping[str, Any]) -> str:
        """Return the output of the template. Raises TemplateError."""
        written = 0
        chunks: list[str] = []
        meter = Meter(time.monotonic() + MOST_SECONDS)
        try:
            for chunk in self.template.generate({**variables, METER: meter}):
                written += len(chunk)
                if written > MOST_CHARACTERS:
                    raise Exhausted(f"it writes more than {MOST_CHARACTERS} characters")
                chunks.append(chunk)
        except TemplateError:
            raise
        except MemoryError as error:
            raise TemplateError("it takes too much memory") from error
        except Exception as error:  # a template is a program and may fail in any way
            raise TemplateError(_shown(error)) from error
        return "".join(chunks)


@functools.lru_cache(maxsize=64)
def read(source: str) -> Program:
    """Parse a template. Raises TemplateError if it is invalid."""
    if len(source) > MOST_SOURCE:
        raise TemplateError(f"it has more than {MOST_SOURCE} characters")
    try:
        template = SANDBOX.from_string(source)
        variables = jinja2.meta.find_undeclared_variables(SANDBOX.parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{_shown(error)} (line {error.lineno})") from error
    except Exception as error:  # Python's compiler has further limits: depth, digits, names
        raise TemplateError(_shown(error)) from error
    return Program(source, template, frozenset(variables))


def _shown(error: Exception) -> str:
    """Return an error's message as one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that validates its arguments."""

    @functools.wraps(function)
    def measured(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        if function is do_format and _WIDE.search(str(value)):
            raise TemplateError("it formats a text with too great a width")
        return function(value, *args, **kwargs)

    return measured


def _check_arguments(args: Iterable[object], kwargs: Mapping[str, object]) -> None:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, int) and value > MOST_ARGUMENT:
            raise TemplateError(f"it calls a function with a number over {MOST_ARGUMENT}")


def _check_size(value: object) -> None:
    if isinstance(value, str | list | tuple) and len(value) > MOST_CHARACTERS:
        raise TemplateError(f"it creates a value longer than {MOST_CHARACTERS}")


def _check_product(left: object, right: object) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int):
            if isinstance(many, str | list | tuple) and len(many) * times > MOST_CHARACTERS:
                raise TemplateError(f"it creates a value longer than {MOST_CHARACTERS}")
            if isinstance(many, int) and many.bit_length() + times.bit_length() > MOST_DIGITS:
                raise TemplateError("it computes with too great numbers")


def _check_power(base: object, exponent: object) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MOST_DIGITS:
        raise TemplateError("it computes with too great numbers")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize as JSON. Jinja2's filter would escape characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    if _WIDE.search(form):
        raise TemplateError("it formats a date with too great a width")
    return datetime.datetime.now().strftime(form)


class _Dict:
    """`dict(...)` without access to the class and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)` without names that give access to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"a namespace cannot have {name[:60]!r}: names begin with a letter")


SANDBOX = Sandbox()
