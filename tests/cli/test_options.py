"""Flags made from settings objects."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import pytest
import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from typer.testing import CliRunner

from baton_api.errors import SetupError
from baton_api.sizes import Bytes
from baton_cli.options import options_of, read_settings, with_options
from baton_engine.settings import WorkerSettings
from baton_router.settings import RouterSettings


class KitchenSettings(BaseSettings):
    """A small one."""

    model_config = SettingsConfigDict(env_prefix="KITCHEN_", frozen=True, use_attribute_docstrings=True)

    pots: int = Field(default=2, ge=1)
    """How many pots
    there are."""
    fridge: Bytes = 0
    """How much fits in."""
    cooks: tuple[str, ...] = ()
    """Who cooks."""
    open: str = ""


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[str, KitchenSettings | None]:
    """What a command with these options prints, and the settings that it read."""
    app = typer.Typer(rich_markup_mode="rich")
    read: list[KitchenSettings] = []

    @app.command()
    @with_options(KitchenSettings, without={"open"})
    def cook(dish: Annotated[str, typer.Argument()] = "soup", **given: Any) -> None:
        typer.echo(f"{dish} {sorted(given)}")
        read.append(read_settings(KitchenSettings, given))

    result = CliRunner().invoke(app, arguments, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output, read[0] if read else None


def test_a_flag_carries_default_and_docstring() -> None:
    pots = next(options_of(KitchenSettings))
    assert (pots.flag, pots.environment, pots.metavar, pots.default) == ("--pots", "KITCHEN_POTS", "N", "2")
    assert pots.help == "How many pots there are."


def test_only_what_was_given_is_passed_on() -> None:
    output, settings = run("stew", "--pots", "3")
    assert output == "stew ['pots']\n"
    assert settings == KitchenSettings(pots=3)


def test_the_environment_fills_in_and_a_flag_wins() -> None:
    env = {"KITCHEN_POTS": "7", "KITCHEN_FRIDGE": "1GiB"}
    assert run(env=env)[1] == KitchenSettings(pots=7, fridge=2**30)
    assert run("--pots=4", env=env)[1] == KitchenSettings(pots=4, fridge=2**30)


def test_a_flag_of_many_values_is_repeated() -> None:
    assert run("--cooks=ada", "--cooks=grace")[1] == KitchenSettings(cooks=("ada", "grace"))


def test_a_size_may_be_written_with_a_unit() -> None:
    assert run("--fridge", "512MiB")[1] == KitchenSettings(fridge=512 * 2**20)


def test_help_shows_flags_with_their_defaults_and_not_those_left_out() -> None:
    output, _ = run("--help")
    assert "--pots" in output and "How many pots there are." in output and "[default: 2]" in output
    assert "SIZE" in output
    assert "--open" not in output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pots": "0"}, "--pots: '0': Input should be greater than or equal to 1."),
        ({"fridge": "big"}, "--fridge: 'big' is no size; one looks like 512MiB, 4GB or 1073741824."),
        ({"pots": "x", "fridge": "y"}, "--pots: 'x': Input should be a valid integer"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_the_flag(given: dict[str, str], message: str) -> None:
    with pytest.raises(SetupError) as caught:
        read_settings(KitchenSettings, given)
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message


def test_a_bad_value_from_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITCHEN_POTS", "none")
    with pytest.raises(SetupError, match=r"^KITCHEN_POTS: 'none'"):
        read_settings(KitchenSettings, {})


@pytest.mark.parametrize("settings", [WorkerSettings, RouterSettings])
def test_every_setting_explains_itself(settings: type[BaseSettings]) -> None:
    for option in options_of(settings):
        assert option.help.endswith("."), option.flag


def test_a_command_keeps_its_own_parameters_first() -> None:
    @with_options(KitchenSettings)
    def command(pots: int = 1, **given: Any) -> None: ...

    names = list(inspect.signature(command).parameters)
    assert names == ["pots", "fridge", "cooks", "open"]
