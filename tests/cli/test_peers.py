"""Launch lines of other servers: what is taken, what is refused, and in which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from baton_api.errors import SetupError
from baton_cli import command, main, peers
from baton_cli.options import options_of, read_settings, with_options
from baton_engine.settings import WorkerSettings
from baton_router.settings import RouterSettings

OWN = {option.flag for option in options_of(WorkerSettings)} - {"--model"}
"""But for the model, which is an argument."""

ROUTERS = {option.flag for option in options_of(RouterSettings)}


ROOT = Path(__file__).parents[2]
COMMANDS = {
    name: typer.main.get_command(main.create_app([name])).commands[name]  # type: ignore[attr-defined]
    for name in ("serve", "prefill", "decode", "router", "up", "fetch")
}


def _kind(field: str) -> Any:
    """The type of a worker's setting."""
    return WorkerSettings.model_fields[field].annotation


def serve(*arguments: str) -> WorkerSettings:
    """The settings that `baton serve` reads from these arguments."""
    seen: list[WorkerSettings] = []
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command("serve", cls=command.WorkerCommand)
    @with_options(WorkerSettings, without={"model"})
    def run(model: main.Model = None, model_path: main.ModelFlag = None, **given: Any) -> None:
        named = model or model_path
        seen.append(read_settings(WorkerSettings, given | ({"model": named} if named else {})))

    app(list(arguments), standalone_mode=False)
    return seen[0]


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main.main(list(arguments))
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (
            "--model-path M --host 0.0.0.0 --port 30000 --mem-fraction-static 0.8",
            {"model": "M", "host": "0.0.0.0", "port": 30000, "memory_share": 0.8},
        ),
        (
            "--model M --max_model_len 4096 --gpu-memory-utilization=0.9 --max-num-seqs 8",
            {"model": "M", "max_model_len": 4096, "memory_share": 0.9, "max_running": 8},
        ),
        (
            "M --context-length 1024 --max-running-requests 200 --max-total-tokens 20480",
            {"model": "M", "max_model_len": 1024, "max_running": 200, "kv_cache_tokens": 20480},
        ),
        ("--chunked-prefill-size 8192 --random-seed 7", {"chunk_tokens": 8192, "seed": 7}),
        ("--max-num-batched-tokens 512 --seed 0", {"chunk_tokens": 512, "seed": 0}),
        ("--max-queued-requests 3", {"max_queued": 3}),
        ("--served-model-name a --served-model-name b,c", {"served_model_name": ("a", "b", "c")}),
        ("--enable-cache-report --log-requests", {"cache_report": True, "log_requests": True}),
        ("--no-cache-report --enable-log-requests", {"cache_report": False, "log_requests": True}),
        ("--log-requests-level 2 --max-log-len 80", {"log_requests_level": 2, "log_requests_length": 80}),
        ("--stream-response-default-include-usage", {"stream_include_usage": True}),
        ("--allow-auto-truncate --sampling-defaults openai", {"allow_auto_truncate": True}),
        (
            '--chat-template x.jinja --default-chat-template-kwargs {"enable_thinking":false}',
            {"chat_template": "x.jinja", "default_chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            "--reasoning-parser qwen3 --tool-call-parser hermes --trust-request-chat-template",
            {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "trust_request_chat_template": True},
        ),
        ('--allowed-origins ["*"]', {"allowed_origins": ("*",)}),
    ],
)
def test_peer_launch_line_gives_the_same_settings(line: str, fields: dict[str, Any]) -> None:
    settings = serve(*line.split())
    assert {name: getattr(settings, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("serve --dp-size 2", ("--dp-size", "baton up --decode")),
        ("serve --enforce-eager", ("--graph-rows 0",)),
        ("serve --disaggregation-mode prefill", ("`baton prefill`", "`baton decode`", "`baton up`")),
        ("serve --enable_prefix_caching", ("always on",)),
        ("serve --quantization fp8", ("--quantize",)),
        ("serve --trust-remote-code", ("no code",)),
        ("up --dp-size 2", ("baton up --decode",)),
        ("router --cache-threshold 0.5", ("`baton router` has no flag --cache-threshold", "--help")),
        ("router --alone-tokens 8", ("`baton router` has no flag --alone-tokens", "--help")),
        ("prefill --no-such-thing", ("`baton prefill` has no flag --no-such-thing", "--help")),
        ("serve --max-runing 3", ("`baton serve` has no flag --max-runing", "Did you mean --max-running")),
        ("serve --mem-fraction 0.8", ("Did you mean --mem-fraction-static",)),
        ("serve M --model-path N", ("M and N", "Give one")),
        ("serve --max-num-seqs many", ("--max-running (--max-running-requests, --max-num-seqs): 'many'",)),
        ("serve --log-requests-level 3", ("--log-requests-level", "at most 2")),
        (
            "serve --mem-fraction-static 80",
            ("--memory-share (--mem-fraction-static", "at most 1"),
        ),
        ("serve --api-key sha256:beef", ("--api-key: expected 64 hexadecimal digits",)),
        ("serve --allowed-origins localhost", ("'localhost' is not an origin",)),
    ],
)
def test_peer_unsupported_flag_is_rejected_with_an_alternative(
    capsys: pytest.CaptureFixture[str], line: str, parts: tuple[str, ...]
) -> None:
    message = complaint(capsys, *line.split())
    for part in parts:
        assert part in message
    assert "beef" not in message


def test_peer_value_that_looks_like_a_flag_is_a_value() -> None:
    assert serve("--chat-template", "--tp-size").chat_template == "--tp-size"


def test_peer_aliases_name_existing_settings() -> None:
    for table, own in ((peers.WORKER_ALIASES, OWN), (peers.ROUTER_ALIASES, ROUTERS)):
        for other, ours in peers.flags(table).items():
            assert ours in own | {"--model-path"}, other
            assert other not in own, other
    assert set(peers.NOTES) <= {"model", *peers.WORKER_ALIASES, *peers.ROUTER_ALIASES}


FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def test_peer_alternatives_exist() -> None:
    """They are flags of a worker, or of the command that is named with them."""
    for instead in peers.INSTEAD.values():
        for name in re.findall(r"`baton (\w+)", instead):
            assert name in COMMANDS, instead
        for flag in FLAG.findall(instead):
            of = re.search(rf"`baton (\w+)[^`]*{flag}", instead)
            assert flag in ({option for one in COMMANDS[of[1]].params for option in one.opts} if of else OWN)
    assert peers.INSTEAD.keys().isdisjoint(OWN | ROUTERS)


def test_keys_may_be_repeated_and_are_hashed_as_they_are_read() -> None:
    settings = serve("--api-key", "k-one", "--api-key", "k-two")
    assert len(settings.api_key) == 2
    assert "k-one" not in repr(settings)


def test_environment_keys_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "k-one,k-two")
    workers, router = WorkerSettings().api_key, RouterSettings()
    assert len(workers) == 2
    assert router.api_key == workers  # this variable sets a key everywhere
    assert router.worker_api_key.get_secret_value() == "k-one"
    monkeypatch.setenv("BATON_ROUTER_API_KEY", "k-three")
    monkeypatch.setenv("BATON_ROUTER_WORKER_API_KEY", "k-four")
    router = RouterSettings()
    assert len(router.api_key) == 1
    assert router.worker_api_key.get_secret_value() == "k-four"
    assert "k-four" not in repr(router)


def test_environment_invalid_key_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "my secret")
    with pytest.raises(SetupError, match="BATON_API_KEY: expected a key") as caught:
        read_settings(WorkerSettings, {})
    assert "my secret" not in caught.value.message


def test_option_key_file_is_a_path(tmp_path: Path) -> None:
    assert serve("--api-key-file", str(tmp_path / "k")).api_key_file == str(tmp_path / "k")
