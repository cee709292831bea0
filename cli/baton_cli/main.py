"""
`baton`: the commands and their options.

Only the named command builds its options and imports its implementation, so that `--help` is fast. Errors
of usage exit with status 2 and one line that names the solution; other errors exit with status 1.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from baton_api import installing
from baton_api.errors import BatonError, SetupError
from baton_api.exposure import DEFAULT_PORT
from baton_cli import batch, cache, command, help, inspection

FAILED = 1
SETUP_FAILED = 2

Model = Annotated[
    str | None,
    typer.Argument(
        help="Hugging Face folder, .gguf file, Hugging Face Hub id, or smollm2 (default).",
        metavar="MODEL",
        show_default=False,
    ),
]
ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model-path",
        help="Same as MODEL. Alias: --model.",
        metavar="MODEL",
        show_default=False,
        rich_help_panel="Model",
    ),
]
AnnounceFd = Annotated[int | None, typer.Option("--announce-fd", hidden=True)]
Url = Annotated[str, typer.Option(help="URL of the service.", metavar="URL")]


def serve(
    model: Model = None, model_path: ModelFlag = None, announce_fd: AnnounceFd = None, **given: Any
) -> None:
    """Start a worker that computes prompts and generates tokens, without a router (role both)."""
    from baton_cli import processes

    processes.worker("both", _given(given, model, model_path), announce_fd)


def prefill(
    model: Model = None, model_path: ModelFlag = None, announce_fd: AnnounceFd = None, **given: Any
) -> None:
    """Start a prefill worker, which computes prompts for decode workers."""
    from baton_cli import processes

    processes.worker("prefill", _given(given, model, model_path), announce_fd)


def decode(
    model: Model = None, model_path: ModelFlag = None, announce_fd: AnnounceFd = None, **given: Any
) -> None:
    """Start a decode worker, which generates tokens and gets prompts from prefill workers."""
    from baton_cli import processes

    processes.worker("decode", _given(given, model, model_path), announce_fd)


def router(announce_fd: AnnounceFd = None, **given: Any) -> None:
    """Start a router for running workers."""
    from baton_cli import processes

    processes.router(given, announce_fd)


def operator(announce_fd: AnnounceFd = None, **given: Any) -> None:
    """Start the Kubernetes operator, which manages InferenceServices."""
    from baton_cli import processes

    processes.operator(given, announce_fd)


def up(
    model: Model = None,
    model_path: ModelFlag = None,
    prefill: Annotated[
        int, typer.Option(help="Number of prefill workers.", min=0, metavar="N", rich_help_panel="Processes")
    ] = 1,
    decode: Annotated[
        int, typer.Option(help="Number of decode workers.", min=1, metavar="N", rich_help_panel="Processes")
    ] = 1,
    prefill_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the cores that prefill workers get while both prefill and decode workers compute. "
            "A higher one computes prompts sooner and streams more slowly. Default: by their number.",
            show_default=False,
            min=0.1,
            max=0.9,
            metavar="SHARE",
            rich_help_panel="Processes",
        ),
    ] = None,
    verbose: Annotated[
        bool | None,
        typer.Option(
            help="Show the logs of the processes here. In a terminal they go to files unless this is set.",
            show_default=False,
            rich_help_panel="Processes",
        ),
    ] = None,
    **given: Any,
) -> None:
    """Start a router, prefill workers and decode workers on this machine. Ctrl-C stops them."""
    from baton_cli import up as local

    router = {name: given.pop(name) for name in LOCAL_ROUTER_FIELDS if name in given}
    local.up(prefill, decode, prefill_share, verbose, router, _given(given, model, model_path))


def chat(
    url: Url = f"http://127.0.0.1:{DEFAULT_PORT}",
    model: Annotated[
        str, typer.Option(help="Model name (default: the first one that the service lists).", metavar="NAME")
    ] = "",
    system: Annotated[str, typer.Option(help="System message.", metavar="TEXT")] = "",
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of a response.", metavar="N", min=1)] = 1000,
    api_key: Annotated[
        str, typer.Option(help="API key of the service.", envvar="BATON_API_KEY", metavar="KEY")
    ] = "",
) -> None:
    """Chat with a service in the terminal. Ctrl-C stops a response, Ctrl-D exits."""
    from baton_cli import conversation

    conversation.chat(url, model, system, max_tokens, api_key)


def demo(
    model: Model = None,
    model_path: ModelFlag = None,
    verbose: Annotated[bool, typer.Option(help="Show the logs of the processes.")] = False,
    **given: Any,
) -> None:
    """Start a service, send two requests, and show where their prompts were computed."""
    from baton_cli import demo as demonstration

    demonstration.demo(verbose, _given(given, model, model_path))


def fetch(
    uri: Annotated[
        str,
        typer.Argument(
            help="hf://ORGANISATION/NAME, s3://BUCKET/PATH, gs://BUCKET/PATH, builtin://smollm2.",
            metavar="URI",
        ),
    ],
    folder: Annotated[
        str,
        typer.Argument(
            help="Destination folder. Several processes may fetch into it at once.", metavar="FOLDER"
        ),
    ],
    revision: Annotated[
        str, typer.Option(help="Branch, tag or commit (default: the newest commit).", metavar="NAME")
    ] = "",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of file names to fetch, such as *.safetensors; repeatable.",
            show_default=False,
            metavar="PATTERN",
        ),
    ] = None,
) -> None:
    """Download the files of a model into a folder, unless they exist."""
    from baton_cli import processes

    processes.fetch(uri, folder, revision, allow or [])


def version() -> None:
    """Print the version."""
    import baton_api

    typer.echo(baton_api.__version__)


def _given(given: dict[str, Any], model: str | None, model_path: str | None) -> dict[str, Any]:
    """Return the settings of the command line, with the model."""
    if model is not None and model_path is not None:
        raise SetupError(
            f"Two models are given: {model} and {model_path}. Give one, as MODEL or by --model-path."
        )
    chosen = model if model is not None else model_path
    return given if chosen is None else given | {"model": chosen}


def main(arguments: list[str] | None = None) -> None:
    """Run a command."""
    _take_interrupts()
    of_process, arguments = arguments is None, sys.argv[1:] if arguments is None else arguments
    if of_process and not set(help.NAMES).intersection(arguments) and COMPUTING.intersection(arguments[:1]):
        _begin_kernels()
    try:
        create_app(arguments)(arguments, prog_name="baton")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("baton_"):
            raise
        extras = EXTRAS.get(arguments[0] if arguments else "", "chat")
        complain(SetupError(f"The package {error.name} is missing. Install it: {installing.command(extras)}"))
        raise SystemExit(SETUP_FAILED) from None
    except SetupError as error:
        complain(error)
        raise SystemExit(SETUP_FAILED) from None
    except BatonError as error:
        complain(error)
        raise SystemExit(FAILED) from None


def _begin_kernels() -> None:
    """Compile the native kernels at the first start, beside the imports of torch. GPUs do not need them."""
    if any(os.path.exists(path) for path in ACCELERATORS):
        return
    from baton_engine.ops.native import library

    builder = library.begin_build(os.environ)
    if builder is not None:
        threading.Thread(target=builder.wait, daemon=True).start()  # it would remain as a zombie


def _take_interrupts() -> None:
    """Handle SIGINT even if the parent ignores it, as a shell does for commands started with `&`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def complain(error: BatonError) -> None:
    """Print an error, red in a terminal."""
    typer.secho(error.message, fg=typer.colors.RED, err=True)


def create_app(arguments: list[str]) -> typer.Typer:
    """Return the commands. Only the one that `arguments` name has its options."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        cls=help.Group,
        context_settings={"help_option_names": list(help.NAMES)},
        help="Serve large language models with prefill and decode on separate workers.",
    )
    typed = arguments or command.words()
    named = next((argument for argument in typed if not argument.startswith("-")), "")
    for title, functions in COMMANDS.items():
        for function in functions:
            _add(app, title, function, function.__name__ == named)
    inspection.add_to(app)
    batch.add_to(app)
    cache.add_to(app)
    for function in (fetch, version):
        _add(app, "Other", function, False)
    return app


def _add(app: typer.Typer, title: str, function: Callable[..., None], named: bool) -> None:
    """Add a command under a title of the help, with its settings as options if it is the `named` one."""
    name = function.__name__
    if named and name in SERVERS:
        kind = command.OF.get(name, command.WorkerCommand)
        app.command(name, cls=kind, rich_help_panel=title)(_with_options(function))
    else:
        app.command(name, cls=help.Command, rich_help_panel=title)(function)


COMMANDS: Mapping[str, tuple[Callable[..., None], ...]] = {
    "On this machine": (up, serve, demo, chat),
    "Single processes, on several machines": (router, prefill, decode, operator),
}
"""The first commands of the help, by title."""

SERVERS = frozenset({"serve", "prefill", "decode", "router", "operator", "up", "demo"})
"""Commands whose options are settings."""

EXTRAS = {
    **dict.fromkeys(("serve", "prefill", "decode"), "runtime,nixl"),
    **dict.fromkeys(("up", "demo"), "runtime,nixl,chat"),
    "fetch": "fetch",
    "cache": "runtime",
    "router": "router",
    "operator": "operator",
}
"""Extras of the distribution with the packages that a command imports; `chat` for the others."""

COMPUTING = frozenset({"serve", "prefill", "decode", "up", "demo"})
"""Commands that need the native kernels."""

ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")
"""Files of the drivers for GPUs of NVIDIA and AMD."""

LOCAL_ROUTER_FIELDS = frozenset(
    {"host", "port", "dashboard", "api_key", "api_key_file", "tenants_file", "allowed_origins"}
)
"""Settings that `up` passes to its router."""

WORKER_FIELDS = frozenset({"role", "name", "control_host", "control_port", "ticket_secret", "compute_share"})
"""Settings that `up` and `demo` set for each worker."""


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    match function.__name__:
        case "serve" | "prefill" | "decode":
            from baton_cli.options import with_options
            from baton_engine.settings import WorkerSettings

            return with_options(WorkerSettings, without={"model", "role"})(function)
        case "up" | "demo":
            from baton_cli.options import with_options
            from baton_cli.up import LocalRouterSettings
            from baton_engine.settings import WorkerSettings

            every = with_options(WorkerSettings, without={"model"} | WORKER_FIELDS | LOCAL_ROUTER_FIELDS)(
                function
            )
            return (
                with_options(LocalRouterSettings, only=LOCAL_ROUTER_FIELDS)(every)
                if function is up
                else every
            )
        case "router":
            from baton_cli.options import with_options
            from baton_router.settings import RouterSettings

            return with_options(RouterSettings)(function)
        case "operator":
            from baton_cli.options import with_options
            from baton_operator.settings import OperatorSettings

            return with_options(OperatorSettings)(function)
        case name:
            raise AssertionError(f"{name} is not a server")


if __name__ == "__main__":
    main()
