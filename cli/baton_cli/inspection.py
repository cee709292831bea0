"""
The options of `baton status`, `doctor`, `bench` and `completion`.

Their implementations are imported when a command runs, so that `--help` is fast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from baton_api.errors import SetupError
from baton_api.exposure import DEFAULT_PORT
from baton_cli import help

Url = Annotated[str, typer.Option(help="URL of the router.", metavar="URL", rich_help_panel="Service")]
Key = Annotated[
    str,
    typer.Option(
        "--api-key",
        help="API key of the service.",
        envvar="BATON_API_KEY",
        metavar="KEY",
        rich_help_panel="Service",
    ),
]
Output = Annotated[str, typer.Option(help="Output format.", metavar="text|json", rich_help_panel="Output")]
Kubeconfig = Annotated[
    str,
    typer.Option(
        help="kubeconfig file of the cluster (default: that of kubectl).",
        metavar="FILE",
        rich_help_panel="Cluster",
    ),
]

URL = f"http://127.0.0.1:{DEFAULT_PORT}"

Flags = TypeVar("Flags")
"""A dataclass whose fields are the options of a command."""


def status(
    name: Annotated[
        str,
        typer.Argument(help="Name of an InferenceService. Default: all of the namespace.", metavar="NAME"),
    ] = "",
    url: Url = URL,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Check the services of a cluster instead of --url. NAME implies it.",
            rich_help_panel="Cluster",
        ),
    ] = False,
    kubeconfig: Kubeconfig = "",
    namespace: Annotated[
        str,
        typer.Option(help="Namespace of the InferenceService.", metavar="NAME", rich_help_panel="Cluster"),
    ] = "default",
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Report whether a service is healthy, and how to fix problems. Exit status 1: a problem was found."""
    from baton_cli import status as reports

    as_json = _as_json(output)
    if name or cluster or kubeconfig:
        reports.of_services(name, kubeconfig, namespace, as_json)
    else:
        reports.of_url(url, api_key, as_json)


def doctor(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a router or worker to check, with its workers: clocks, and the settings of vLLM "
            "and SGLang. Repeatable.",
            metavar="URL",
            show_default=False,
            rich_help_panel="Service",
        ),
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Also check permissions and custom resources of the cluster.",
            rich_help_panel="Cluster",
        ),
    ] = False,
    kubeconfig: Kubeconfig = "",
    namespace: Annotated[
        str,
        typer.Option(help="Namespace in which services will run.", metavar="NAME", rich_help_panel="Cluster"),
    ] = "default",
    api_key: Key = "",
    output: Output = "text",
) -> None:
    """Check this machine, and optionally a cluster, for problems. Exit status 1: an error was found."""
    as_json = _as_json(output)
    from baton_cli.doctor.command import doctor

    account = kubeconfig if cluster or kubeconfig else None
    doctor(url or [], api_key, account, namespace, as_json)


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """The options of `baton bench`."""

    start: Annotated[
        str,
        typer.Argument(help="Model to start on this machine and measure, instead of --url.", metavar="MODEL"),
    ] = ""
    url: Url = URL
    model: Annotated[
        str,
        typer.Option(
            help="Model name (default: the first one that the service lists).",
            metavar="NAME",
            rich_help_panel="Service",
        ),
    ] = ""
    concurrency: Annotated[
        str,
        typer.Option(
            help="Closed loop: numbers of concurrent clients, one load level each.",
            metavar="X,X...",
            rich_help_panel="Load",
        ),
    ] = "1,4,16"
    rate: Annotated[
        str,
        typer.Option(
            help="Open loop instead: requests per second with Poisson arrivals, one load level each.",
            metavar="X,X...",
            rich_help_panel="Load",
        ),
    ] = ""
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay a Mooncake trace instead.", metavar="FILE", rich_help_panel="Load"),
    ] = None
    minutes: Annotated[
        float,
        typer.Option(
            help="Minutes of the trace to replay, from its beginning.",
            min=0.001,
            metavar="X",
            rich_help_panel="Load",
        ),
    ] = 5.0
    speed: Annotated[
        float,
        typer.Option(
            help="Speed of the replay, relative to the trace.", min=0.001, metavar="X", rich_help_panel="Load"
        ),
    ] = 1.0
    requests: Annotated[
        int, typer.Option(help="Requests per load level.", min=1, metavar="N", rich_help_panel="Load")
    ] = 40
    prompt_tokens: Annotated[
        int,
        typer.Option(
            help="Approximate prompt tokens per request.", min=1, metavar="N", rich_help_panel="Requests"
        ),
    ] = 256
    output_tokens: Annotated[
        int, typer.Option(help="Output tokens per request.", min=1, metavar="N", rich_help_panel="Requests")
    ] = 64
    shared_tokens: Annotated[
        int,
        typer.Option(
            help="Prompt tokens that all requests of a group share.",
            min=0,
            metavar="N",
            rich_help_panel="Requests",
        ),
    ] = 0
    groups: Annotated[
        int,
        typer.Option(
            help="Groups of requests with a shared prefix.", min=1, metavar="N", rich_help_panel="Requests"
        ),
    ] = 1
    spread: Annotated[
        float,
        typer.Option(
            help="Relative variation of prompt and output lengths (0-1).",
            min=0,
            max=1,
            metavar="X",
            rich_help_panel="Requests",
        ),
    ] = 0.0
    ttft_ms: Annotated[
        float | None,
        typer.Option(
            help="Objective: maximum time to first token in milliseconds.",
            show_default=False,
            metavar="MS",
            rich_help_panel="Objectives",
        ),
    ] = None
    tpot_ms: Annotated[
        float | None,
        typer.Option(
            help="Objective: maximum time per output token in milliseconds.",
            show_default=False,
            metavar="MS",
            rich_help_panel="Objectives",
        ),
    ] = None
    total_ms: Annotated[
        float | None,
        typer.Option(
            help="Objective: maximum request duration in milliseconds.",
            show_default=False,
            metavar="MS",
            rich_help_panel="Objectives",
        ),
    ] = None
    find: Annotated[
        Path | None,
        typer.Option(
            help="Measure the performance of the model instead, and write a profile to FILE.",
            metavar="FILE",
            show_default=False,
            rich_help_panel="Profile",
        ),
    ] = None
    repeats: Annotated[
        int,
        typer.Option(
            help="Repetitions of each measurement of --find.", min=1, metavar="N", rich_help_panel="Profile"
        ),
    ] = 3
    warm_up: Annotated[
        int,
        typer.Option(
            help="Warm-up requests before the first load level.", min=0, metavar="N", rich_help_panel="Load"
        ),
    ] = 4
    timeout_s: Annotated[
        float,
        typer.Option(
            help="Timeout per request in seconds.", min=0.1, metavar="SECONDS", rich_help_panel="Requests"
        ),
    ] = 600.0
    seed: Annotated[int, typer.Option(help="Random seed.", metavar="N", rich_help_panel="Requests")] = 0
    save: Annotated[
        Path | None,
        typer.Option(
            help="Write the results to FILE as JSON.",
            metavar="FILE",
            show_default=False,
            rich_help_panel="Output",
        ),
    ] = None
    api_key: Key = ""
    output: Output = "text"


def bench(flags: BenchFlags) -> None:
    """Measure throughput and latency of an OpenAI-compatible service. Exit status 3: requests failed."""
    as_json = _as_json(flags.output)
    if flags.rate and flags.trace:
        raise SetupError("--rate and --trace exclude each other. Set only one of them.")
    from baton_cli.bench.command import BenchPlan, BenchTarget, bench
    from baton_cli.bench.load import Shape
    from baton_cli.bench.profiler import find as find_profile
    from baton_cli.bench.report import Objective

    limits = (flags.ttft_ms, flags.tpot_ms, flags.total_ms)
    lengths = flags.prompt_tokens, flags.output_tokens, flags.shared_tokens
    wanted = BenchPlan(
        shape=Shape(*lengths, flags.groups, flags.spread),
        objective=Objective(*(None if limit is None else limit / 1e3 for limit in limits)),
        clients=[int(number) for number in _numbers(flags.concurrency, "--concurrency")],
        rates=_numbers(flags.rate, "--rate"),
        trace=flags.trace,
        minutes=flags.minutes,
        speed=flags.speed,
        requests=flags.requests,
        warm_up=flags.warm_up,
        seed=flags.seed,
        timeout_s=flags.timeout_s,
    )
    where = BenchTarget(url=flags.url, api_key=flags.api_key, model=flags.model, started=flags.start)
    if flags.find is not None:
        find_profile(where, wanted, flags.find, flags.repeats, as_json)
    else:
        bench(where, wanted, flags.save, as_json)


def completion(
    shell: Annotated[str, typer.Argument(help="Shell: bash, zsh or fish.", metavar="SHELL")],
) -> None:
    """Print the completion script for SHELL. Usage: `source <(baton completion bash)`."""
    from baton_cli import command

    typer.echo(command.script(shell))


def add_to(app: typer.Typer) -> None:
    """Add the commands to `baton`."""
    for command in (status, doctor, bench, completion):
        title = "Other" if command is completion else "Look at a service or a machine"
        run = _with_flags(BenchFlags, bench) if command is bench else command
        app.command(command.__name__, cls=help.Command, rich_help_panel=title)(run)


def _with_flags(flags: type[Flags], run: Callable[[Flags], None]) -> Callable[..., None]:
    """Return `run` with the fields of the dataclass `flags` as its parameters, as typer reads them."""

    def command(**values: Any) -> None:
        run(flags(**values))

    command.__doc__ = run.__doc__
    command.__signature__ = inspect.signature(flags, eval_str=True)  # type: ignore[attr-defined]
    return command


def _as_json(output: str) -> bool:
    if output not in ("text", "json"):
        raise SetupError(f"Invalid --output {output!r}. Expected text or json.")
    return output == "json"


def _numbers(text: str, flag: str) -> list[float]:
    """
    >>> _numbers("1,2.5", "--rate")
    [1.0, 2.5]
    """
    try:
        numbers = [float(number) for number in text.split(",") if number.strip()]
    except ValueError:
        numbers = [0.0]
    if any(number <= 0 for number in numbers):
        raise SetupError(f"Invalid {flag} {text!r}. Expected numbers above 0, such as 1,4,16.")
    return numbers
