"""
Make command-line options from settings classes: flag, environment variable, default, help and group.

A field `kv_cache_memory` becomes `--kv-cache-memory`, and its docstring becomes the help. Values are passed
to the settings class unchecked; its validation errors are reported with the name of the flag.
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
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsError

from baton_api.errors import SetupError
from baton_api.setting_types import parse_size
from baton_cli import help, peers

Settings = TypeVar("Settings", bound=BaseSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A field of a settings class as a flag."""

    field: str
    flag: str
    environment: str
    metavar: str
    default: str
    """With its unit. Empty without a default."""
    range: str
    help: str
    group: str
    repeated: bool
    switch: bool
    """A boolean: `--flag` or `--no-flag`, without a value."""
    aliases: tuple[str, ...] = ()
    """Names of the flag in other servers."""

    @classmethod
    def of(cls, name: str, field: FieldInfo, prefix: str, group: str, aliases: tuple[str, ...]) -> Option:
        repeated = typing.get_origin(field.annotation) is tuple
        return cls(
            field=name,
            flag="--" + name.replace("_", "-"),
            environment=(prefix + name).upper(),
            metavar=REPEATED.get(name, "URL") if repeated else _metavar(name, field),
            default=_default(name, field),
            range=_range(field),
            help=" ".join((field.description or "").split()),
            group=group,
            repeated=repeated,
            switch=field.annotation is bool,
            aliases=aliases,
        )

    @property
    def negated(self) -> str:
        return f"--no-{self.flag.removeprefix('--')}"

    @property
    def usage(self) -> str:
        """The flag as help and reference show it."""
        return f"{self.flag}/{self.negated}" if self.switch else self.flag

    @property
    def parameter(self) -> inspect.Parameter:
        """The option as a parameter of a Typer command. None means that it was not given."""
        alias = f" Alias: {', '.join(self.aliases)}." if self.aliases else ""
        facts = [f"default: {self.default}"] if self.default else []
        facts += [f"range: {self.range}"] if self.range else []
        info = typer.Option(
            self.usage,
            help=self.help + alias + (f" [{', '.join(facts)}]" if facts else ""),
            metavar="" if self.switch else self.metavar,
            show_default=False,
            rich_help_panel=self.group or None,
        )
        kind: Any = bool | None if self.switch else list[str] | None if self.repeated else str | None
        return inspect.Parameter(
            self.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
        )


def options_of(settings: type[BaseSettings]) -> Iterator[Option]:
    """Yield the options of a settings class in the order of its fields, its own before inherited ones."""
    prefix = settings.model_config.get("env_prefix") or ""
    groups = _groups(settings)
    fields = sorted(settings.model_fields.items(), key=lambda item: item[0] not in settings.__annotations__)
    for name, field in fields:
        yield Option.of(name, field, prefix, groups[name], peers.aliases(settings, name))


def _groups(settings: type[BaseSettings]) -> dict[str, str]:
    """Return the group of each field. `GROUPS` of a class names the first field of each group."""
    starts: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        starts |= vars(base).get("GROUPS", {})
    groups, group = {}, ""
    for name in settings.model_fields:
        group = starts.get(name, group)
        groups[name] = group
    return groups


def with_options(
    settings: type[BaseSettings], *, without: Collection[str] = (), only: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """
    Add the options of `settings` to a command that takes `**values`.

    `values` contains only what the command line sets, so that environment variables and defaults apply.
    """
    selected = [
        option.parameter
        for option in options_of(settings)
        if option.field not in without and (only is None or option.field in only)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        declared = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        declared_names = {parameter.name for parameter in declared}
        added = [parameter for parameter in selected if parameter.name not in declared_names]

        def run(**values: Any) -> None:
            declared_values = {name: values.pop(name) for name in declared_names}
            set_values = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
                if value is not None and value != []
            }
            command(**declared_values, **set_values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in declared] + added
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        # The function may be decorated again with the options of a second class.
        return run

    return decorate


def read_settings(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Return settings from the command line, the environment and the defaults. Raises SetupError."""
    try:
        return kind(**values)
    except ValidationError as error:
        prefix = (kind.model_config.get("env_prefix") or "").upper()
        raise SetupError("; ".join(_problems(error, values, prefix, kind)) + ".") from None
    except SettingsError as error:  # a variable does not contain the JSON that its type needs
        raise SetupError(f"{error}: {error.__cause__}.") from error


SECRETS = ("_key", "_secret")
"""Suffixes of settings whose values no message repeats."""


def _problems(
    error: ValidationError, values: Mapping[str, Any], prefix: str, settings: type[BaseSettings]
) -> Iterator[str]:
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        source = "--" + name.replace("_", "-") if name in values else prefix + name.upper()
        aliases = ", ".join(peers.aliases(settings, name)) if name in values else ""
        reason = help.plain_words(problem["msg"].removeprefix("Value error, "))
        value = repr(problem["input"])[:200]
        between = " " if reason.startswith(help.MUST_BE) else ": "
        shown = "" if reason.startswith(value) or name.endswith(SECRETS) else value + between
        yield f"{source} ({aliases}): {shown}{reason}" if aliases else f"{source}: {shown}{reason}"


DAY_S, HOUR_S = 86_400, 3_600
SIZE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def readable_size(count: int) -> str:
    """
    Return a number of bytes in the largest binary unit that divides it.

    >>> readable_size(64 * 2**20), readable_size(1536), readable_size(1000), readable_size(0)
    ('64MiB', '1536', '1000', '0')
    """
    for factor, unit in SIZE_UNITS:
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)


def readable_seconds(seconds: float) -> str:
    """
    Return a duration with its unit.

    >>> readable_seconds(5.0), readable_seconds(0.5), readable_seconds(86_400), readable_seconds(3600.0)
    ('5 s', '0.5 s', '86400 s (1 day)', '3600 s (1 hour)')
    """
    for unit_s, unit in ((DAY_S, "day"), (HOUR_S, "hour")):
        if seconds and seconds % unit_s == 0:
            number = int(seconds // unit_s)
            return f"{seconds:.15g} s ({number} {unit}{'s' if number > 1 else ''})"
    return f"{seconds:.15g} s"


def _default(name: str, field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, SecretStr):
        value = value.get_secret_value()  # a default is no secret
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, (int, float)) and name.endswith("_s"):
        return readable_seconds(value)
    if isinstance(value, int) and not isinstance(value, enum.Enum) and _is_size(field):
        return readable_size(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _range(field: FieldInfo) -> str:
    """Return the accepted numbers, such as `1-64` or `>= 1`."""
    bounds = {
        kind: getattr(part, kind)
        for part in field.metadata
        for kind in ("ge", "gt", "le", "lt")
        if getattr(part, kind, None) is not None
    }
    show = readable_size if _is_size(field) else str
    if "ge" in bounds and "le" in bounds:
        return f"{show(bounds['ge'])}-{show(bounds['le'])}"
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return ", ".join(f"{signs[kind]} {show(bound)}" for kind, bound in bounds.items())


REPEATED = {
    "served_model_name": "NAME",
    "api_key": "KEY",
    "admin_api_key": "KEY",
    "lora_modules": "NAME=PATH",
    "allowed_origins": "ORIGIN",
    "namespaces": "NAMES",
    "hold_models": "NAMES",
    "decode_dns": "NAME",
    "prefill_dns": "NAME",
    "metrics_names": "vllm|sglang",
    "revision_weight": "REVISION=NUMBER",
    "profile": "FILE",
    "jwt_algorithms": "ALGORITHM",
}
"""Metavariables of repeatable flags other than URL."""

METAVARS_BY_SUFFIX = {
    "_folder": "FOLDER",
    "_file": "FILE",
    "_host": "ADDRESS",
    "_url": "URL",
    "_namespace": "NAMESPACE",
}
"""Metavariables by the suffix of a field."""


def _metavar(name: str, field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if isinstance(annotation, types.UnionType):  # X | None
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(str(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is dict:
        return "JSON"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "|".join(str(member.value) for member in annotation)
    if _is_size(field):
        return "SIZE"
    if name.endswith("_s"):
        return "SECONDS"
    if annotation is str:
        return next(
            (metavar for suffix, metavar in METAVARS_BY_SUFFIX.items() if f"_{name}".endswith(suffix)), "TEXT"
        )
    return {int: "N", float: "X"}.get(annotation, "TEXT")


def _is_size(field: FieldInfo) -> bool:
    parts = [*field.metadata]
    for arg in typing.get_args(field.annotation):  # X | None
        parts += getattr(arg, "__metadata__", ())
    return any(getattr(part, "func", None) is parse_size for part in parts)
