"""
`baton batch`: a file of requests, answered while nobody waits.

What a person or a script needs of it: send a file, see how far it is, and have the answers. The exit status
says how it ended: 0, all is well; 1, the batch failed, or the service did; 2, something has to be changed
first; 3, it is through and some lines failed; 4, it was cancelled or its time ran out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton_api.errors import SetupError

if TYPE_CHECKING:
    from baton_cli.batch_commands import Commands

Url = Annotated[str, typer.Option(help="Where the service answers.")]
Key = Annotated[str, typer.Option("--api-key", help="The service's API key.", envvar="BATON_API_KEY")]
Output = Annotated[str, typer.Option(help="text, or json for scripts.", metavar="text|json")]
Window = Annotated[
    str, typer.Option(help="How long the batch may take: from 60s to 30d, such as 90m.", metavar="TIME")
]
Id = Annotated[str, typer.Argument(help="Of the batch: batch_...", metavar="BATCH")]

URL = "http://127.0.0.1:8080"
DAY = "24h"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


def submit(
    file: Annotated[Path, typer.Argument(help="Requests as OpenAI's Batch API has them.", metavar="FILE")],
    endpoint: Annotated[str, typer.Option(help="What all of them are for.")] = ENDPOINTS[0],
    completion_window: Window = DAY,
    metadata: Annotated[
        list[str] | None, typer.Option(help="Kept with the batch; repeated for several.", metavar="KEY=VALUE")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Wait for the end, and show how far it is.")] = False,
    url: Url = URL,
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Upload FILE and have its requests answered."""
    if endpoint not in ENDPOINTS:
        raise SetupError(f"--endpoint {endpoint!r} is none of {', '.join(ENDPOINTS)}.")
    _service(url, api_key, output).submit(file, endpoint, completion_window, _pairs(metadata or []), watch)


def watch(id: Id, url: Url = URL, api_key: Key = "", output: Output = "text") -> None:
    """Wait for the end of BATCH and show how far it is; a connection that is lost meanwhile is made anew."""
    _service(url, api_key, output).watch(id)


def list_(
    limit: Annotated[int, typer.Option(help="Most batches to show; 0: all.", min=0)] = 20,
    url: Url = URL,
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Show batches, the newest first."""
    _service(url, api_key, output).list_(limit)


def cancel(id: Id, url: Url = URL, api_key: Key = "", output: Output = "text") -> None:
    """Have BATCH start no more requests; what is answered already stays readable."""
    _service(url, api_key, output).cancel(id)


def download(
    id: Id,
    to: Annotated[
        Path | None, typer.Option(help="Where to; BATCH_output.jsonl if not said.", metavar="FILE")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The lines that failed, not the answers.")] = False,
    url: Url = URL,
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Fetch the answers of BATCH. What broke off, here or in an earlier call, goes on where it was."""
    _service(url, api_key, output).download(id, to, errors)


def run(
    router: Annotated[str, typer.Option(help="The router's address.", metavar="URL")],
    batch: Annotated[str, typer.Option(help="Which batch.", metavar="BATCH")] = "",
    token: Annotated[
        str, typer.Option(help="The router's word for it.", envvar="BATON_BATCH_TOKEN", hidden=True)
    ] = "",
    runner: Annotated[str, typer.Option(hidden=True)] = "",
    leash: Annotated[bool, typer.Option("--leash", hidden=True)] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="In a pod: the file with its token, in place of BATON_BATCH_TOKEN.", metavar="FILE"
        ),
    ] = None,
    input_file: Annotated[
        str,
        typer.Option(help="In a pod: the file of which a batch is made, in place of --batch.", metavar="ID"),
    ] = "",
    endpoint: Annotated[str, typer.Option(help="What the requests of --input-file are for.")] = ENDPOINTS[0],
    completion_window: Window = DAY,
    batch_job: Annotated[
        str, typer.Option(help="In a pod: the BatchJob, by which its batch is known.", metavar="NAME/UID")
    ] = "",
    concurrency: Annotated[
        int | None, typer.Option(help="Most requests at once; as many as help if not said.", min=1)
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="BATON_API_KEY", hidden=True)] = "",
    log_format: Annotated[
        str, typer.Option(help="How the log is written.", metavar="auto|text|json", envvar="BATON_LOG_FORMAT")
    ] = "auto",
) -> None:
    """Work through BATCH for a router, who starts this by itself, or as a Job of Kubernetes."""
    from baton_api import logs
    from baton_batches.runner_process import JobOptions, run, run_job
    from baton_batches.submission import BatchSubmission

    logs.begin(logs.read_format(log_format), runner or "runner")
    if token_file is not None:
        asked = (router, api_key, input_file, endpoint, batch_job, completion_window)
        made = BatchSubmission(*asked) if input_file else None
        work = JobOptions(
            router=router, token=token_file, batch=batch, submission=made, max_in_flight=concurrency
        )
        raise typer.Exit(run_job(work))
    if not token or not batch:
        raise SetupError("A runner needs --batch and the router's token: set BATON_BATCH_TOKEN.")
    raise typer.Exit(run(router, batch, token, runner, leash))


def reassign(
    owner: Annotated[str, typer.Argument(help="tenant:NAME, key:NAME or sha256:HEX.", metavar="FROM")],
    other: Annotated[str, typer.Argument(help="The same for the new owner.", metavar="TO")],
    database: Annotated[
        str,
        typer.Option(help="The router's --database, if it has one.", envvar="BATON_ROUTER_DATABASE"),
    ] = "",
    state: Annotated[
        str, typer.Option(help="The router's --state, if it has one.", envvar="BATON_ROUTER_STATE")
    ] = "",
    port: Annotated[int, typer.Option(help="The router's --port: it names the default state folder.")] = 8080,
) -> None:
    """Give the files and batches of one owner to another, in the database of a router."""
    from baton_batches.settings import BatchSettings
    from baton_batches.storage import Storage
    from baton_router.tenants.access import parse_owner

    storage = Storage(BatchSettings.model_validate({"database": database, "state": state}), port)
    try:
        if not storage.in_use:
            raise SetupError("There is no such database. Give the router's --database, --state or --port.")
        files, batches = storage.ledger.reassign(parse_owner(owner).hex(), parse_owner(other).hex())
    finally:
        storage.close()
    typer.echo(f"{files} files and {batches} batches of {owner} now belong to {other}.")


def add_to(app: typer.Typer) -> None:
    """`baton batch` and its commands."""
    commands = typer.Typer(no_args_is_help=True, help="Have a file of requests answered while nobody waits.")
    for command in (submit, watch, list_, cancel, download, run, reassign):
        commands.command(command.__name__.rstrip("_"))(command)
    app.add_typer(commands, name="batch")


def _service(url: str, api_key: str, output: str) -> Commands:
    try:
        from baton_cli.batch_commands import Commands
    except ModuleNotFoundError as error:
        raise SetupError("`baton batch` needs one package more: pip install 'baton[chat]'.") from error
    if output not in ("text", "json"):
        raise SetupError(f"--output {output!r} is neither text nor json.")
    return Commands(url, api_key, as_json=output == "json")


def _pairs(given: list[str]) -> dict[str, str]:
    pairs = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not key or not equals:
            raise SetupError(f"--metadata {one!r} is not of the form KEY=VALUE.")
        pairs[key] = value
    return pairs
