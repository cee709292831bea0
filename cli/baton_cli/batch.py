"""
The options of `baton batch`: submit, watch, list, cancel and download batches.

Exit status: 0: success. 1: the batch or the service failed. 2: invalid usage. 3: the batch completed and some
lines failed. 4: the batch was cancelled or expired.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton_api.batch_jobs import DAY
from baton_api.errors import SetupError
from baton_api.exposure import DEFAULT_PORT
from baton_cli import help

if TYPE_CHECKING:
    from baton_cli.batch_commands import Commands

Url = Annotated[str, typer.Option(help="URL of the service.", metavar="URL")]
Key = Annotated[
    str, typer.Option("--api-key", help="API key of the service.", envvar="BATON_API_KEY", metavar="KEY")
]
Output = Annotated[str, typer.Option(help="Output format.", metavar="text|json")]
Window = Annotated[str, typer.Option(help="Completion window, 60s to 30d, such as 90m.", metavar="TIME")]
Id = Annotated[str, typer.Argument(help="Id of the batch: batch_...", metavar="BATCH")]

URL = f"http://127.0.0.1:{DEFAULT_PORT}"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


def submit(
    file: Annotated[
        Path, typer.Argument(help="Requests in the format of OpenAI's Batch API.", metavar="FILE")
    ],
    endpoint: Annotated[str, typer.Option(help="Endpoint of all requests.", metavar="PATH")] = ENDPOINTS[0],
    completion_window: Window = DAY,
    metadata: Annotated[
        list[str] | None, typer.Option(help="Metadata of the batch; repeatable.", metavar="KEY=VALUE")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Wait for the end and show the progress.")] = False,
    url: Url = URL,
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Upload FILE and start a batch."""
    if endpoint not in ENDPOINTS:
        raise SetupError(f"Invalid --endpoint {endpoint!r}. Expected one of {', '.join(ENDPOINTS)}.")
    _service(url, api_key, output).submit(file, endpoint, completion_window, _pairs(metadata or []), watch)


def watch(id: Id, url: Url = URL, api_key: Key = "", output: Output = "text") -> None:
    """Wait for the end of BATCH and show its progress. Lost connections are restored."""
    _service(url, api_key, output).watch(id)


def list_(
    limit: Annotated[
        int, typer.Option(help="Maximum number of batches to list (0: all).", min=0, metavar="N")
    ] = 20,
    url: Url = URL,
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """List batches, newest first."""
    _service(url, api_key, output).list_(limit)


def cancel(id: Id, url: Url = URL, api_key: Key = "", output: Output = "text") -> None:
    """Cancel BATCH. Its results so far remain available."""
    _service(url, api_key, output).cancel(id)


def download(
    id: Id,
    to: Annotated[
        Path | None, typer.Option(help="Destination (default: BATCH_output.jsonl).", metavar="FILE")
    ] = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="Download the errors instead of the results.")
    ] = False,
    url: Url = URL,
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Download the results of BATCH. An interrupted download is resumed."""
    _service(url, api_key, output).download(id, to, errors)


def run(
    router: Annotated[str, typer.Option(help="URL of the router.", metavar="URL")],
    batch: Annotated[str, typer.Option(help="Id of the batch.", metavar="BATCH")] = "",
    token: Annotated[
        str, typer.Option(help="Token of the router.", envvar="BATON_BATCH_TOKEN", hidden=True)
    ] = "",
    runner: Annotated[str, typer.Option(hidden=True)] = "",
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", hidden=True)] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token, in a pod; replaces BATON_BATCH_TOKEN.", metavar="FILE"),
    ] = None,
    input_file: Annotated[
        str,
        typer.Option(help="Id of the input file of a new batch, in a pod; replaces --batch.", metavar="ID"),
    ] = "",
    endpoint: Annotated[
        str, typer.Option(help="Endpoint of the requests in --input-file.", metavar="PATH")
    ] = ENDPOINTS[0],
    completion_window: Window = DAY,
    batch_job: Annotated[str, typer.Option(help="BatchJob of the batch, in a pod.", metavar="NAME/UID")] = "",
    concurrency: Annotated[
        int | None,
        typer.Option(help="Maximum number of requests in flight (default: adaptive).", min=1, metavar="N"),
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="BATON_API_KEY", hidden=True)] = "",
    log_format: Annotated[
        str, typer.Option(help="Log format.", metavar="auto|text|json", envvar="BATON_LOG_FORMAT")
    ] = "auto",
) -> None:
    """Process BATCH. Routers start this command themselves; Kubernetes Jobs run it too."""
    from baton_api import logs
    from baton_batches.runner_process import BatchSubmission, JobOptions, run, run_job

    logs.begin(logs.read_format(log_format), runner or "runner")
    if token_file is not None:
        arguments = (router, api_key, input_file, endpoint, batch_job, completion_window)
        submission = BatchSubmission(*arguments) if input_file else None
        work = JobOptions(
            router=router, token=token_file, batch=batch, submission=submission, max_in_flight=concurrency
        )
        raise typer.Exit(run_job(work))
    if not token or not batch:
        raise SetupError("A runner needs --batch and a token of the router in BATON_BATCH_TOKEN.")
    raise typer.Exit(run(router, batch, token, runner, exit_with_parent))


def reassign(
    owner: Annotated[
        str, typer.Argument(help="Current owner: tenant:NAME, key:NAME or sha256:HEX.", metavar="FROM")
    ],
    other: Annotated[str, typer.Argument(help="New owner, in the same form.", metavar="TO")],
    database: Annotated[
        str,
        typer.Option(
            help="The --database of the router, if set.", envvar="BATON_ROUTER_DATABASE", metavar="URL"
        ),
    ] = "",
    state: Annotated[
        str,
        typer.Option(
            help="The --state of the router, if set.", envvar="BATON_ROUTER_STATE", metavar="FOLDER"
        ),
    ] = "",
    port: Annotated[
        int, typer.Option(help="The --port of the router, which determines its default --state.", metavar="N")
    ] = DEFAULT_PORT,
) -> None:
    """Transfer the files and batches of one owner to another, in the database of a router."""
    from baton_batches.settings import BatchSettings
    from baton_batches.storage import Storage
    from baton_router.tenants.access import parse_owner

    storage = Storage(BatchSettings.model_validate({"database": database, "state": state}), port)
    try:
        if not storage.in_use:
            raise SetupError("The database does not exist. Set --database, --state or --port of the router.")
        files, batches = storage.ledger.reassign(parse_owner(owner).hex(), parse_owner(other).hex())
    finally:
        storage.close()
    typer.echo(f"{files} files and {batches} batches of {owner} now belong to {other}.")


def add_to(app: typer.Typer) -> None:
    """Add the commands to `baton`."""
    commands = typer.Typer(
        no_args_is_help=True, cls=help.Group, help="Process a file of requests asynchronously."
    )
    for command in (submit, watch, list_, cancel, download, run, reassign):
        commands.command(command.__name__.rstrip("_"), cls=help.Command)(command)
    app.add_typer(commands, name="batch", rich_help_panel="Look at a service or a machine")


def _service(url: str, api_key: str, output: str) -> Commands:
    from baton_cli.batch_commands import Commands

    if output not in ("text", "json"):
        raise SetupError(f"Invalid --output {output!r}. Expected text or json.")
    return Commands(url, api_key, as_json=output == "json")


def _pairs(given: list[str]) -> dict[str, str]:
    pairs = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise SetupError(f"Invalid --metadata {pair!r}. Expected KEY=VALUE.")
        pairs[key] = value
    return pairs
