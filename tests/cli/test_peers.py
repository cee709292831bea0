"""Launch lines of other servers: what is taken, what is refused, and in which words."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
import typer

from baton_api.errors import SetupError
from baton_cli import command, main, peers
from baton_cli.options import options_of, read_settings, with_options
from baton_cli.refusals import REFUSALS
from baton_engine.settings import WorkerSettings
from baton_router.settings import RouterSettings

OWN = {option.flag for option in options_of(WorkerSettings)} - {"--model"}
"""But for the model, which is an argument."""

ROUTERS = {option.flag for option in options_of(RouterSettings)}


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
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


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
def test_a_launch_line_from_elsewhere_means_here_what_it_means_there(
    line: str, fields: dict[str, Any]
) -> None:
    settings = serve(*line.split())
    assert {name: getattr(settings, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("serve --tp-size 2", ("--tp-size", "one device", "baton up")),
        ("serve -tp 2", ("-tp", "one device")),
        ("serve --tensor_parallel_size=2", ("--tensor_parallel_size", "one device")),
        ("serve --attention-backend fa3", ("--attention-backend", "--device")),
        ("serve --disable-cuda-graph", ("no CUDA graphs",)),
        ("serve --enforce-eager", ("no CUDA graphs",)),
        ("serve --disable-overlap-schedule", ("penalties",)),
        ("serve --disable-overlap", ("penalties",)),
        ("serve --grammar-backend xgrammar", ("llguidance",)),
        ("serve --schedule-policy lpm", ("order of their arrival",)),
        ("serve --watchdog-timeout 300", ("ends by itself",)),
        ("serve --enable-metrics", ("/metrics", "always")),
        ("serve --disaggregation-mode prefill", ("`baton prefill`", "`baton decode`", "`baton up`")),
        ("serve --kv-transfer-config {}", ("NIXL",)),
        ("serve --enable-prefix-caching", ("always",)),
        ("serve --disable-radix-cache", ("always",)),
        ("serve --quantization fp8", (".gguf",)),
        ("serve --trust-remote-code", ("no code",)),
        ("serve --enable-auto-tool-choice", ("--tool-call-parser",)),
        ("serve --generation-config vllm", ("--sampling-defaults",)),
        ("serve --base-gpu-id 1", ("--device cuda:N",)),
        ("serve --block-size 32", ("16 tokens",)),
        ("serve --enable-force-include-usage", ("--stream-include-usage",)),
        ("up --dp-size 2", ("one device", "baton up --decode")),
        ("router --pd-disaggregation", ("--prefill", "--decode")),
        ("router --model-path M", ("the workers know the model",)),
        ("prefill --no-such-thing", ("`baton prefill` has no flag --no-such-thing", "--help")),
        ("serve --max-runing 3", ("`baton serve` has no flag --max-runing", "Did you mean --max-running")),
        ("serve --mem-fraction 0.8", ("Did you mean --mem-fraction-static",)),
        ("serve M --model-path N", ("M or N", "once")),
        ("serve --max-num-seqs many", ("--max-running (--max-running-requests, --max-num-seqs): 'many'",)),
        ("serve --log-requests-level 3", ("--log-requests-level", "less than or equal to 2")),
        (
            "serve --mem-fraction-static 80",
            ("--memory-share (--mem-fraction-static", "less than or equal to 1"),
        ),
        ("serve --api-key sha256:beef", ("--api-key: after sha256: there must be 64",)),
        ("serve --allowed-origins localhost", ("'localhost' is no origin",)),
    ],
)
def test_what_has_no_meaning_here_is_refused_in_one_line_with_the_way_out(
    capsys: pytest.CaptureFixture[str], line: str, parts: tuple[str, ...]
) -> None:
    said = complaint(capsys, *line.split())
    for part in parts:
        assert part in said
    assert "beef" not in said


def test_a_value_that_looks_like_a_flag_is_a_value() -> None:
    assert serve("--chat-template", "--tp-size").chat_template == "--tp-size"


def test_every_name_of_others_stands_for_a_setting_of_ours() -> None:
    for table, own in ((peers.WORKER_ALIASES, OWN), (peers.ROUTER_ALIASES, ROUTERS)):
        for other, ours in peers.flags(table).items():
            assert ours in own | {"--model-path"}, other
            assert other not in own, other
    assert set(peers.NOTES) <= {"model", *peers.WORKER_ALIASES, *peers.ROUTER_ALIASES}


def test_no_refusal_is_out_of_reach_or_unfinished() -> None:
    seen: list[str] = []
    for refusal in REFUSALS:
        assert refusal.reason and refusal.reason[0] not in " A" and not refusal.reason.endswith(".")
        for flag in refusal.flags.split():
            assert flag not in seen, flag
            seen.append(flag)


def test_the_examples_are_true() -> None:
    assert doctest.testmod(command).failed == 0


def test_keys_may_be_repeated_and_are_hashed_as_they_are_read() -> None:
    settings = serve("--api-key", "k-one", "--api-key", "k-two")
    assert len(settings.api_key) == 2
    assert "k-one" not in repr(settings)


def test_the_environment_gives_keys_with_commas_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "k-one,k-two")
    workers, router = WorkerSettings().api_key, RouterSettings()
    assert len(workers) == 2
    assert router.api_key == workers  # who sets this one wants a key everywhere
    assert router.worker_api_key.get_secret_value() == "k-one"
    monkeypatch.setenv("BATON_ROUTER_API_KEY", "k-three")
    monkeypatch.setenv("BATON_ROUTER_WORKER_API_KEY", "k-four")
    router = RouterSettings()
    assert len(router.api_key) == 1
    assert router.worker_api_key.get_secret_value() == "k-four"
    assert "k-four" not in repr(router)


def test_a_bad_key_in_the_environment_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "my secret")
    with pytest.raises(SetupError, match="BATON_API_KEY: a key has") as caught:
        read_settings(WorkerSettings, {})
    assert "my secret" not in caught.value.message


def test_a_key_file_is_a_path_like_any_other(tmp_path: Path) -> None:
    assert serve("--api-key-file", str(tmp_path / "k")).api_key_file == str(tmp_path / "k")
