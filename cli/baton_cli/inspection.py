"""
`baton top`, `status`, `doctor` and `bench`: how a service is, how its machine is, and how much it serves.

What each option means stands here; what is done is imported when a command runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from baton_api.errors import SetupError

Url = Annotated[str, typer.Option(help="Where the router answers.")]
Key = Annotated[str, typer.Option("--api-key", help="The service's API key.", envvar="BATON_API_KEY")]
Output = Annotated[str, typer.Option(help="text, or json for scripts.", metavar="text|json")]
Kubeconfig = Annotated[
    str,
    typer.Option(help="The cluster's, which is looked at then. kubectl's own if not said.", metavar="FILE"),
]

URL = "http://127.0.0.1:8080"


def top(
    url: Url = URL,
    interval: Annotated[float, typer.Option(help="Seconds from one look to the next.", min=0.1)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once, and end.")] = False,
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Show what each worker does now: requests, tokens, KV cache, transfers, times to the first token."""
    as_json = _as_json(output)
    with _needing("chat"):
        from baton_cli.top.command import top
    top(url, api_key, interval, once, as_json)


def status(
    name: Annotated[
        str, typer.Argument(help="An InferenceService; all of the namespace if empty.", metavar="[NAME]")
    ] = "",
    url: Url = URL,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Services of a cluster, instead of --url; as NAME does.")
    ] = False,
    kubeconfig: Kubeconfig = "",
    namespace: Annotated[str, typer.Option(help="Of the InferenceService.")] = "default",
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Say whether a service answers, what is wrong with it, and the way out; 1 if something is wrong."""
    as_json = _as_json(output)
    with _needing("chat"):
        from baton_cli.status import command
    if name or cluster or kubeconfig:
        command.of_services(name, kubeconfig, namespace, as_json)
    else:
        command.of_url(url, api_key, as_json)


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
    kubeconfig: Kubeconfig = "",
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


def bench(
    start: Annotated[
        str,
        typer.Argument(help="A model to be started here and measured, instead of --url.", metavar="[MODEL]"),
    ] = "",
    url: Url = URL,
    model: Annotated[str, typer.Option(help="Which model; the first one served if empty.")] = "",
    concurrency: Annotated[
        str, typer.Option(help="Clients that ask again once they were answered, one load each.")
    ] = "1,4,16",
    rate: Annotated[
        str, typer.Option(help="Instead: requests a second that come by chance.", metavar="X,X...")
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="Instead: requests of a Mooncake trace.", metavar="FILE")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of the trace, from its beginning.", min=0.001)] = 5.0,
    speed: Annotated[float, typer.Option(help="How much faster than it was.", min=0.001)] = 1.0,
    requests: Annotated[int, typer.Option(help="Of each load.", min=1)] = 40,
    prompt_tokens: Annotated[int, typer.Option(help="Of a request, about.", min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(help="Of an answer.", min=1)] = 64,
    shared_tokens: Annotated[int, typer.Option(help="Of a prompt, how many its group shares.", min=0)] = 0,
    groups: Annotated[int, typer.Option(help="Of requests that share the beginning.", min=1)] = 1,
    spread: Annotated[float, typer.Option(help="By what share lengths differ.", min=0, max=1)] = 0.0,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Objective: to the first token at most.", show_default=False)
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(help="Objective: each token after it at most.", show_default=False)
    ] = None,
    total_ms: Annotated[
        float | None, typer.Option(help="Objective: the whole answer at most.", show_default=False)
    ] = None,
    find: Annotated[
        Path | None,
        typer.Option(
            help="Instead: measure what a model takes, and write it here as a profile.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of each measurement of --find.", min=1)] = 3,
    warm_up: Annotated[int, typer.Option(help="Requests before the first load.", min=0)] = 4,
    timeout_s: Annotated[float, typer.Option(help="For one answer.", min=0.1)] = 600.0,
    seed: Annotated[int, typer.Option(help="Of all chance.")] = 0,
    save: Annotated[
        Path | None, typer.Option(help="Keep the figures as JSON.", metavar="FILE", show_default=False)
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw them: .svg, .png or .pdf.", metavar="FILE", show_default=False),
    ] = None,
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Measure how much a service serves, and how soon; any OpenAI-compatible one. 3 if requests failed."""
    as_json = _as_json(output)
    if rate and trace:
        raise SetupError("Either --rate or --trace, not both.")
    with _needing("chat"):
        from baton_cli.bench.command import BenchPlan, BenchTarget, bench
        from baton_cli.bench.profile_command import find as find_profile
    from baton_cli.bench.prompts import Shape
    from baton_cli.bench.report import Objective

    limits = (None if one is None else one / 1e3 for one in (ttft_ms, tpot_ms, total_ms))
    wanted = BenchPlan(
        shape=Shape(prompt_tokens, output_tokens, shared_tokens, groups, spread),
        objective=Objective(*limits),
        clients=[int(one) for one in _numbers(concurrency, "--concurrency")],
        rates=_numbers(rate, "--rate"),
        trace=trace,
        minutes=minutes,
        speed=speed,
        requests=requests,
        warm_up=warm_up,
        seed=seed,
        timeout_s=timeout_s,
    )
    where = BenchTarget(url=url, api_key=api_key, model=model, started=start)
    if find is not None:
        find_profile(where, wanted, find, repeats, as_json)
    else:
        bench(where, wanted, save, picture, as_json)


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", metavar="SHELL")],
) -> None:
    """Print what makes SHELL complete baton's commands and flags: `source <(baton completion bash)`."""
    from baton_cli import command

    typer.echo(command.script(shell))


def add_to(app: typer.Typer) -> None:
    """All of them."""
    for command in (top, status, doctor, bench, completion):
        app.command(command.__name__)(command)


def _as_json(output: str) -> bool:
    if output not in ("text", "json"):
        raise SetupError(f"--output {output!r} is neither text nor json.")
    return output == "json"


def _numbers(text: str, flag: str) -> list[float]:
    """
    >>> _numbers("1,2.5", "--rate")
    [1.0, 2.5]
    """
    try:
        found = [float(one) for one in text.split(",") if one.strip()]
    except ValueError:
        found = [0.0]
    if any(one <= 0 for one in found):
        raise SetupError(f"{flag} {text!r} is no list of numbers above 0; one looks like 1,4,16.")
    return found


@contextmanager
def _needing(extra: str) -> Iterator[None]:
    """Packages that not every image has. Raises SetupError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SetupError(f"This needs {error.name}: pip install 'baton[{extra}]'.") from error
