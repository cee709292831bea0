"""
`baton`: which command does what, and with which options.

Nothing heavy is imported before a command runs, and only the named command's options are made from its
settings, so that help is there at once. A person's mistake ends with status 2 and one line that names the
way out; what broke by itself ends with status 1.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from baton_api.errors import BatonError, SetupError
from baton_cli import batch, command, inspection

FAILED = 1
SETUP_FAILED = 2

Model = Annotated[
    str | None,
    typer.Argument(
        help="A Hugging Face folder, a .gguf file, a hub id, or smollm2, the default.",
        metavar="MODEL",
        show_default=False,
    ),
]
ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model-path", help="The same as MODEL. Also --model.", metavar="MODEL", show_default=False
    ),
]
AnnounceFd = Annotated[int | None, typer.Option("--announce-fd", hidden=True)]
Url = Annotated[str, typer.Option(help="Where the service answers.")]


def serve(
    model: Model = None, model_path: ModelFlag = None, announce_fd: AnnounceFd = None, **given: Any
) -> None:
    """Serve MODEL by one process that computes prompts and generates (role both)."""
    from baton_cli import processes

    processes.worker("both", _given(given, model, model_path), announce_fd)


def prefill(
    model: Model = None, model_path: ModelFlag = None, announce_fd: AnnounceFd = None, **given: Any
) -> None:
    """Start a prefill worker: it computes prompts for decode workers."""
    from baton_cli import processes

    processes.worker("prefill", _given(given, model, model_path), announce_fd)


def decode(
    model: Model = None, model_path: ModelFlag = None, announce_fd: AnnounceFd = None, **given: Any
) -> None:
    """Start a decode worker: it has prompts computed elsewhere, and generates."""
    from baton_cli import processes

    processes.worker("decode", _given(given, model, model_path), announce_fd)


def router(announce_fd: AnnounceFd = None, **given: Any) -> None:
    """Start a router before workers that run already."""
    from baton_cli import processes

    processes.router(given, announce_fd)


def operator(announce_fd: AnnounceFd = None, **given: Any) -> None:
    """Run InferenceServices in a Kubernetes cluster."""
    from baton_cli import processes

    processes.operator(given, announce_fd)


def up(
    model: Model = None,
    model_path: ModelFlag = None,
    prefill: Annotated[int, typer.Option(help="Prefill workers.", min=0)] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.", min=1)] = 1,
    **given: Any,
) -> None:
    """Start router, prefill workers and decode workers on this machine; Ctrl-C ends them."""
    from baton_cli import up as local

    front = {name: given.pop(name) for name in LOCAL_ROUTER_FIELDS if name in given}
    local.up(prefill, decode, front, _given(given, model, model_path))


def chat(
    url: Url = "http://127.0.0.1:8080",
    model: Annotated[str, typer.Option(help="Which model; the first one served if empty.")] = "",
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    api_key: Annotated[str, typer.Option(help="The service's API key.", envvar="BATON_API_KEY")] = "",
) -> None:
    """Talk to a service in the terminal: Ctrl-C stops an answer, Ctrl-D ends."""
    from baton_cli import conversation

    conversation.chat(url, model, system, api_key)


def demo(
    model: Model = None,
    model_path: ModelFlag = None,
    verbose: Annotated[bool, typer.Option(help="Show the processes' logs.")] = False,
    **given: Any,
) -> None:
    """Start everything, ask two questions, and show what happened to their prompts."""
    from baton_cli import up as local

    local.demo(verbose, _given(given, model, model_path))


def fetch(
    uri: Annotated[
        str,
        typer.Argument(help="hf://ORGANISATION/NAME, s3://BUCKET/PATH, gs://BUCKET/PATH, builtin://smollm2."),
    ],
    folder: Annotated[
        str, typer.Argument(help="Where its files are to lie. Several may fetch into it at once.")
    ],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit; the newest commit if empty.")] = "",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Only files whose names match, such as *.safetensors; repeatable.", show_default=False
        ),
    ] = None,
) -> None:
    """Fetch a model's files into a folder, unless they are there already."""
    from baton_cli import processes

    processes.fetch(uri, folder, revision, allow or [])


def version() -> None:
    """Print the version."""
    import baton_api

    typer.echo(baton_api.__version__)


def _given(given: dict[str, Any], model: str | None, model_path: str | None) -> dict[str, Any]:
    """What was said on the command line: the environment and the defaults fill in the rest."""
    if model is not None and model_path is not None:
        raise SetupError(f"Which model: {model} or {model_path}? Give it once, as MODEL or by --model-path.")
    chosen = model if model is not None else model_path
    return given if chosen is None else given | {"model": chosen}


def main(arguments: list[str] | None = None) -> None:
    """The way in."""
    _take_interrupts()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        create_app(arguments)(arguments)
    except SetupError as error:
        complain(error)
        raise SystemExit(SETUP_FAILED) from None
    except BatonError as error:
        complain(error)
        raise SystemExit(FAILED) from None


def _take_interrupts() -> None:
    """Let SIGINT end the command even if it was started with the signal ignored, as a script's `&` does."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def complain(error: BatonError) -> None:
    """One line, red in a terminal."""
    typer.secho(error.message, fg=typer.colors.RED, err=True)


def create_app(arguments: list[str]) -> typer.Typer:
    """The commands; the one that `arguments` name has its options."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        help="Serves large language models with prefill and decode on separate workers.",
    )
    typed = arguments or command.words()
    named = next((argument for argument in typed if not argument.startswith("-")), "")
    for function in (serve, up, chat, demo, router, prefill, decode, operator, fetch, version):
        name = function.__name__
        if name == named and name in SERVERS:
            kind = command.OF.get(name, command.WorkerCommand)
            app.command(name, cls=kind)(_with_options(function))
        else:
            app.command(name)(function)
    inspection.add_to(app)
    batch.add_to(app)
    return app


SERVERS = frozenset({"serve", "prefill", "decode", "router", "operator", "up", "demo"})
"""Commands whose options are settings."""

LOCAL_ROUTER_FIELDS = frozenset({"host", "port", "dashboard", "api_key", "api_key_file", "allowed_origins"})
"""Settings that `up` gives to its router."""

WORKER_FIELDS = frozenset({"role", "name", "control_host", "control_port", "ticket_secret"})
"""Settings of single workers, which `up` and `demo` choose themselves."""


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    match command.__name__:
        case "serve" | "prefill" | "decode":
            from baton_cli.options import with_options
            from baton_engine.settings import WorkerSettings

            return with_options(WorkerSettings, without={"model", "role"})(command)
        case "up" | "demo":
            from baton_cli.options import with_options
            from baton_cli.up import LocalRouterSettings
            from baton_engine.settings import WorkerSettings

            every = with_options(WorkerSettings, without={"model"} | WORKER_FIELDS | LOCAL_ROUTER_FIELDS)(
                command
            )
            return (
                with_options(LocalRouterSettings, only=LOCAL_ROUTER_FIELDS)(every) if command is up else every
            )
        case "router":
            from baton_cli.options import with_options
            from baton_router.settings import RouterSettings

            return with_options(RouterSettings)(command)
        case "operator":
            from baton_cli.options import with_options
            from baton_operator.settings import OperatorSettings

            return with_options(OperatorSettings)(command)
        case name:
            raise AssertionError(f"{name} starts no server")


if __name__ == "__main__":
    main()
