"""Command-line options made from settings classes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pytest
import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from typer.testing import CliRunner

from baton_api.errors import SetupError
from baton_api.setting_types import Bytes
from baton_cli.help import Command
from baton_cli.options import options_of, read_settings, with_options
from baton_engine.settings import WorkerSettings
from baton_operator.settings import OperatorSettings
from baton_router.settings import RouterSettings


class KitchenSettings(BaseSettings):
    GROUPS: ClassVar[Mapping[str, str]] = {"pots": "Equipment", "cooks": "People"}

    model_config = SettingsConfigDict(env_prefix="KITCHEN_", frozen=True, use_attribute_docstrings=True)

    pots: int = Field(default=2, ge=1)
    """Number
    of pots."""
    fridge: Bytes = 0
    """Capacity of the fridge."""
    cooks: tuple[str, ...] = ()
    """Names of the cooks."""
    open: bool = False
    shift_s: float = Field(default=3600.0, gt=0)


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[str, KitchenSettings | None]:
    """Run a command with these options. Return its output and the settings that it read."""
    app = typer.Typer(rich_markup_mode=None)
    read: list[KitchenSettings] = []

    @app.command(cls=Command)
    @with_options(KitchenSettings, without={"open"})
    def cook(dish: Annotated[str, typer.Argument()] = "soup", **values: Any) -> None:
        typer.echo(f"{dish} {sorted(values)}")
        read.append(read_settings(KitchenSettings, values))

    result = CliRunner().invoke(app, arguments, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output, read[0] if read else None


def test_option_has_default_and_docstring() -> None:
    pots = next(options_of(KitchenSettings))
    assert (pots.flag, pots.environment, pots.metavar, pots.default) == ("--pots", "KITCHEN_POTS", "N", "2")
    assert pots.help == "Number of pots."


def test_command_receives_given_values_only() -> None:
    output, settings = run("stew", "--pots", "3")
    assert output == "stew ['pots']\n"
    assert settings == KitchenSettings(pots=3)


def test_flag_overrides_environment() -> None:
    env = {"KITCHEN_POTS": "7", "KITCHEN_FRIDGE": "1GiB"}
    assert run(env=env)[1] == KitchenSettings(pots=7, fridge=2**30)
    assert run("--pots=4", env=env)[1] == KitchenSettings(pots=4, fridge=2**30)


def test_tuple_setting_is_repeatable() -> None:
    assert run("--cooks=ada", "--cooks=grace")[1] == KitchenSettings(cooks=("ada", "grace"))


def test_size_accepts_unit() -> None:
    assert run("--fridge", "512MiB")[1] == KitchenSettings(fridge=512 * 2**20)


def test_help_shows_defaults_of_selected_flags() -> None:
    output, _ = run("--help")
    assert "--pots" in output and "Number of pots. [default: 2, range: >= 1]" in output
    assert "SIZE" in output
    assert "--open" not in output


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pots": "0"}, "--pots: '0' must be at least 1."),
        (
            {"fridge": "big"},
            "--fridge: 'big' is not a size. Expected a size such as 512MiB",
        ),
        ({"pots": "x", "fridge": "y"}, "--pots: 'x' must be a whole number; --fridge"),
    ],
)
def test_invalid_value_names_flag_in_one_line(values: dict[str, str], message: str) -> None:
    with pytest.raises(SetupError) as caught:
        read_settings(KitchenSettings, values)
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message


def test_invalid_environment_value_names_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITCHEN_POTS", "none")
    with pytest.raises(SetupError, match=r"^KITCHEN_POTS: 'none'"):
        read_settings(KitchenSettings, {})


@pytest.mark.parametrize("settings", [WorkerSettings, RouterSettings, OperatorSettings])
def test_options_have_help_and_group(settings: type[BaseSettings]) -> None:
    for option in options_of(settings):
        assert option.help.endswith(".") and option.group, option.flag


def test_own_parameters_precede_options() -> None:
    @with_options(KitchenSettings)
    def command(pots: int = 1, **values: Any) -> None: ...

    names = list(inspect.signature(command).parameters)
    assert names == ["pots", "fridge", "cooks", "open", "shift_s"]


def test_help_shows_groups_switches_and_units() -> None:
    groups = {option.field: option.group for option in options_of(KitchenSettings)}
    assert groups["fridge"] == "Equipment" and groups["shift_s"] == "People"
    by_field = {option.field: option for option in options_of(KitchenSettings)}
    assert by_field["open"].usage == "--open/--no-open" and by_field["open"].default == "off"
    assert by_field["shift_s"].metavar == "SECONDS"
    assert (by_field["shift_s"].default, by_field["shift_s"].range) == ("3600 s (1 hour)", "> 0")


def test_groups_name_existing_settings() -> None:
    for settings in (WorkerSettings, RouterSettings, OperatorSettings):
        assert settings.GROUPS.keys() <= settings.model_fields.keys()


def test_default_of_a_secret_is_shown() -> None:
    defaults = {option.field: option.default for option in options_of(RouterSettings)}
    assert (defaults["response_store"], defaults["database"]) == ("memory", "")


def test_body_limit_is_shown_as_size() -> None:
    body = next(option for option in options_of(RouterSettings) if option.field == "max_body")
    assert (body.metavar, body.default, body.range) == ("SIZE", "4MiB", ">= 1")
