"""
`baton top`, `status`, `doctor` and `bench`: how a service is, how its machine is, and how much it serves.

What each option means stands here; what is done is imported when a command runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from baton_api.errors import SetupError

Url = Annotated[str, typer.Option(help="Where the router answers.")]
Key = Annotated[str, typer.Option("--api-key", help="The service's API key.", envvar="BATON_API_KEY")]
Output = Annotated[str, typer.Option(help="text, or json for scripts.", metavar="text|json")]

URL = "http://127.0.0.1:8080"


def doctor(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="A router or worker whose clock is compared, with those of its workers; repeated.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        list[int] | None,
        typer.Option(
            help="A port that is wanted here; repeated. 8080 and 8000 if not said.", show_default=False
        ),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Look at the cluster too: rights, custom resources.")
    ] = False,
    kubeconfig: Annotated[
        str,
        typer.Option(
            help="The cluster's, which is looked at then. kubectl's own if not said.", metavar="FILE"
        ),
    ] = "",
    namespace: Annotated[str, typer.Option(help="In which services are to run.")] = "default",
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Find what on this machine, or in a cluster, keeps Baton from running well; 1 if something does."""
    as_json = _as_json(output)
    with _needing("chat"):
        from baton_cli.doctor.command import doctor
    from baton_cli.doctor.machine import Port

    wanted = [Port(number, "service") for number in port or ()] or [
        Port(8080, "router"),
        Port(8000, "worker"),
    ]
    asked = kubeconfig if cluster or kubeconfig else None
    doctor(url or [], api_key, wanted, asked, namespace, as_json)


def add_to(app: typer.Typer) -> None:
    """All of them."""
    for command in (doctor,):
        app.command(command.__name__)(command)


def _as_json(output: str) -> bool:
    if output not in ("text", "json"):
        raise SetupError(f"--output {output!r} is neither text nor json.")
    return output == "json"


@contextmanager
def _needing(extra: str) -> Iterator[None]:
    """Packages that not every image has. Raises SetupError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SetupError(f"This needs {error.name}: pip install 'baton[{extra}]'.") from error
