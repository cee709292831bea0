"""
Command-line options made from settings objects: one source for flag, environment, default and help.

A field `kv_cache_memory` becomes `--kv-cache-memory`, its docstring the help. Nothing is checked here:
what was given goes to the settings as it is, and what they say about it comes back in one sentence that
names the flag.
"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsError
from rich.markup import escape

from baton_api.errors import SetupError
from baton_cli import peers

Settings = TypeVar("Settings", bound=BaseSettings)


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a settings object as a flag."""

    field: str
    flag: str
    environment: str
    metavar: str
    default: str
    help: str
    repeated: bool
    switch: bool
    """Given without a value; `off` is its opposite."""
    aliases: tuple[str, ...] = ()
    """What users of other servers call it."""

    @classmethod
    def of(cls, name: str, field: FieldInfo, prefix: str, aliases: tuple[str, ...] = ()) -> Option:
        repeated = typing.get_origin(field.annotation) is tuple
        return cls(
            field=name,
            flag="--" + name.replace("_", "-"),
            environment=(prefix + name).upper(),
            metavar=REPEATED.get(name, "URL") if repeated else _metavar(field),
            default=_shown(field.get_default(call_default_factory=True)),
            help=" ".join((field.description or "").split()),
            repeated=repeated,
            switch=field.annotation is bool,
            aliases=aliases,
        )

    @property
    def off(self) -> str:
        return f"--no-{self.flag.removeprefix('--')}"

    @property
    def parameter(self) -> inspect.Parameter:
        """The same as a parameter of a Typer command; None means that it was not given."""
        default = f"  [default: {self.default}]" if self.default else ""
        also = f" Also {', '.join(self.aliases)}." if self.aliases else ""
        info = typer.Option(
            f"{self.flag}/{self.off}" if self.switch else self.flag,
            help=escape(self.help + also + default),
            metavar=None if self.switch else self.metavar,
            show_default=False,
        )
        kind: Any = bool | None if self.switch else list[str] | None if self.repeated else str | None
        return inspect.Parameter(
            self.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
        )


def options_of(settings: type[BaseSettings]) -> Iterator[Option]:
    """All fields in the order in which they were written, its own before those that it has from others."""
    prefix = settings.model_config.get("env_prefix") or ""
    fields = sorted(settings.model_fields.items(), key=lambda item: item[0] not in settings.__annotations__)
    for name, field in fields:
        yield Option.of(name, field, prefix, peers.aliases(settings, name))


def with_options(
    settings: type[BaseSettings], *, without: Collection[str] = (), only: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """
    Give a command that takes `**given` the options of `settings` after its own parameters.

    `given` holds what was said on the command line and nothing else, so that the environment and the
    defaults still have their say.
    """
    chosen = [
        option.parameter
        for option in options_of(settings)
        if option.field not in without and (only is None or option.field in only)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = {parameter.name for parameter in own}
        added = [parameter for parameter in chosen if parameter.name not in taken]

        def run(**values: Any) -> None:
            named = {name: values.pop(name) for name in taken}
            given = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
                if value is not None and value != []
            }
            command(**named, **given)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        # Typer may see this function wrapped again: another set of options comes after these.
        return run

    return decorate


def read_settings(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """Settings from what was given, the environment and the defaults. Raises SetupError."""
    try:
        return kind(**given)
    except ValidationError as error:
        prefix = (kind.model_config.get("env_prefix") or "").upper()
        raise SetupError("; ".join(_complaints(error, given, prefix, kind)) + ".") from None
    except SettingsError as error:  # the environment holds no JSON where JSON belongs
        raise SetupError(f"{error}: {error.__cause__}.") from error


SECRETS = ("_key", "_secret")
"""Ends of the names of settings that no message repeats."""


def _complaints(
    error: ValidationError, given: Mapping[str, Any], prefix: str, settings: type[BaseSettings]
) -> Iterator[str]:
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        flag = "--" + name.replace("_", "-") if name in given else prefix + name.upper()
        others = ", ".join(peers.aliases(settings, name)) if name in given else ""
        reason = problem["msg"].removeprefix("Value error, ")
        shown = repr(problem["input"])[:200]
        said = "" if reason.startswith(shown) or name.endswith(SECRETS) else f"{shown}: "
        yield f"{flag} ({others}): {said}{reason}" if others else f"{flag}: {said}{reason}"


def _shown(default: object) -> str:
    """A default as help and reference show it; nothing for what is empty."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default is None or default in ("", (), {}) else str(default)  # a secret shows nothing


REPEATED = {
    "served_model_name": "NAME",
    "api_key": "KEY",
    "allowed_origins": "ORIGIN",
    "namespaces": "NAMES",
    "decode_dns": "NAME",
    "prefill_dns": "NAME",
    "metrics_names": "vllm|sglang",
    "revision_weight": "REVISION=NUMBER",
    "profile": "FILE",
}
"""What the values of repeated flags are called, if not URL."""


def _metavar(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if isinstance(annotation, types.UnionType):  # X | None
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(str(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is dict:
        return "JSON"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "|".join(str(member.value) for member in annotation)
    if annotation is int and any(getattr(part, "func", None) is not None for part in field.metadata):
        return "SIZE"
    return {int: "N", float: "X", str: "TEXT"}.get(annotation, "TEXT")
