"""Launch lines of other servers: what is taken, what is refused, and in which words."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import baton_engine
from baton_api import headers, limits, openapi
from baton_api.errors import SetupError
from baton_cli import command, main, peers
from baton_cli.options import options_of, read_settings, with_options
from baton_cli.refusals import REFUSALS, Refusal
from baton_engine import failures
from baton_engine.api import generate
from baton_engine.kv.cache import BLOCK_SIZE
from baton_engine.model import resolve
from baton_engine.sampling.state import uniform
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
        ("serve --pp-size 2", ("--pp-size", "--tensor-parallel-size", "baton up")),
        ("serve --dp 2", ("--dp", "divides layers only")),
        ("serve --attention-backend fa3", ("--attention-backend", "--device")),
        ("serve --disable-cuda-graph", ("--graph-rows 0",)),
        ("serve --enforce-eager", ("--graph-rows 0",)),
        ("serve --disable-overlap-schedule", ("penalties",)),
        ("serve --disable-overlap", ("penalties",)),
        ("serve --grammar-backend xgrammar", ("llguidance",)),
        ("serve --schedule-policy lpm", ("order of their arrival", headers.CLASS)),
        ("serve --watchdog-timeout 300", ("a worker exits",)),
        ("serve --enable-metrics", ("/metrics", "always")),
        ("serve --disaggregation-mode prefill", ("`baton prefill`", "`baton decode`", "`baton up`")),
        ("serve --kv-transfer-config {}", ("NIXL",)),
        ("serve --enable-prefix-caching", ("always",)),
        ("serve --disable-radix-cache", ("always",)),
        ("serve --quantization fp8", ("--quantize",)),
        ("serve --trust-remote-code", ("no code",)),
        ("serve --enable-auto-tool-choice", ("--tool-call-parser",)),
        ("serve --generation-config vllm", ("--sampling-defaults",)),
        ("serve --base-gpu-id 1", ("--device cuda:N",)),
        ("serve --block-size 32", ("16 tokens",)),
        ("serve --enable-force-include-usage", ("--stream-include-usage",)),
        ("up --dp-size 2", ("divides layers only", "baton up --decode")),
        ("router --pd-disaggregation", ("--prefill", "--decode")),
        ("router --model-path M", ("set it on the workers",)),
        ("prefill --no-such-thing", ("`baton prefill` has no flag --no-such-thing", "--help")),
        ("serve --max-runing 3", ("`baton serve` has no flag --max-runing", "Did you mean --max-running")),
        ("serve --mem-fraction 0.8", ("Did you mean --mem-fraction-static",)),
        ("serve M --model-path N", ("M and N", "Give one")),
        ("serve --max-num-seqs many", ("--max-running (--max-running-requests, --max-num-seqs): 'many'",)),
        ("serve --log-requests-level 3", ("--log-requests-level", "less than or equal to 2")),
        (
            "serve --mem-fraction-static 80",
            ("--memory-share (--mem-fraction-static", "less than or equal to 1"),
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


def test_peer_refusals_are_reachable_and_complete() -> None:
    seen: list[str] = []
    for refusal in REFUSALS:
        assert refusal.reason and refusal.reason[0] not in " A" and not refusal.reason.endswith(".")
        for flag in refusal.flags.split():
            assert flag not in seen, flag
            seen.append(flag)


FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
SOURCES = "\n".join(path.read_text() for path in Path(baton_engine.__file__).parent.rglob("*.py"))
SETTINGS = WorkerSettings, RouterSettings
WORKER, ROUTER = set(WorkerSettings.model_fields), set(RouterSettings.model_fields)
WORDS = {word for field in WORKER | ROUTER for word in field.split("_")}
PATHS = set(openapi.document(("m",), "worker", keyed=False)["paths"])


def test_refusals_name_flags_that_exist() -> None:
    """Alternatives are flags of a worker or a router, or of the command that is named with them."""
    commands = {name: {option.name for option in command.params} for name, command in COMMANDS.items()}
    existing = WORKER | ROUTER | {"chunked_prefill_size", "help"}
    for refusal in REFUSALS:
        for quoted in re.findall(r"`baton (\w+)", refusal.reason):
            assert quoted in commands, refusal.reason
        for flag in FLAG.findall(refusal.reason):
            field = flag.removeprefix("--").replace("-", "_")
            of = re.search(rf"`baton (\w+)[^`]*{flag}", refusal.reason)
            assert field in (commands[of[1]] if of else existing), refusal.reason


FACTS: dict[str, bool] = {
    "--pp-size": WORDS.isdisjoint({"pp", "pipeline", "nnodes"}),
    "--base-gpu-id": "cuda:N" in str(WorkerSettings.model_fields["device"].description),
    "--numa-node": "numa" not in WORDS,
    "--disable-cuda-graph*": {"graph_rows", "graph_memory", "graph_seconds"} <= WORKER,
    "--disable-overlap*": WorkerSettings().overlap,
    "--grammar-backend": "from llguidance import" in SOURCES and "import xgrammar" not in SOURCES,
    "--attention-backend": WORDS.isdisjoint({"attention", "backend", "compile"}),
    "--enable-deterministic-inference": [*inspect.signature(uniform).parameters] == ["seed", "position"],
    "--enable-priority-scheduling": headers.CLASS == headers.CLASS and headers.BATCH_CLASS == "batch",
    "--enable-mixed-chunk": "mixed_chunk_tokens" in WORKER,
    "--max-prefill-tokens": "--chunked-prefill-size" in peers.WORKER_ALIASES["chunk_tokens"],
    "--watchdog-timeout": failures.FAILURES_LIMIT > 0,
    "--enable-metrics*": all(
        f'("GET", "{path}",' in SOURCES for path in ("/metrics", "/load", "/debug/requests")
    ),
    "--disable-log-requests": not WorkerSettings().log_requests and not RouterSettings().log_requests,
    "--log-level*": "log_requests" in WORKER & ROUTER and "log_level" not in WORKER | ROUTER,
    "--disaggregation-mode": {"prefill", "decode", "up"} <= main.SERVERS,
    "--disaggregation-*": "disaggregation" not in WORDS and "nixl" in get_args(_kind("transfer")),
    "--kv-events-config": {"kv_events", "kv_replay"} <= WORKER,
    "--enable-prefix-caching": WORDS.isdisjoint({"prefix", "radix"}),
    "--hicache-*": WORDS.isdisjoint({"offload", "swap", "hicache", "lmcache", "sleep"}),
    "--page-size": BLOCK_SIZE == 16,
    "--num-gpu-blocks-override": BLOCK_SIZE == 16,
    "--calculate-kv-scales": "kv_cache_dtype" in WORKER and WORDS.isdisjoint({"scale", "scales"}),
    "--download-dir": "HF_HOME" in str(resolve.__doc__),
    "--quantization*": "quantize" in WORKER and WORDS.isdisjoint({"quantization", "loader"}),
    "--revision": "HF_TOKEN" in str(resolve.__doc__) and "revision" not in WORKER,
    "--tokenizer-path": "tokenizer" not in WORDS,
    "--trust-remote-code": "trust_remote_code=True" not in SOURCES,
    "--hf-overrides": WORDS.isdisjoint({"rope", "overrides"}),
    "--generation-config": get_args(_kind("sampling_defaults")) == ("model", "openai"),
    "--preferred-sampling-params": '"generation_config.json"' in SOURCES,
    "--max-loras-per-batch": {"max_loras", "max_lora_rank"} <= WORKER,
    "--speculative-*": {"speculation", "speculation_tokens"} <= WORKER,
    "--enable-multimodal": WORDS.isdisjoint({"multimodal", "image", "media", "mm"}),
    "--is-embedding": "/v1/embeddings" in PATHS and {"mean", "last"} <= {*get_args(_kind("pooling"))},
    "--enable-auto-tool-choice": "tool_call_parser" in WORKER and "auto_tool_choice" not in WORKER,
    "--tool-parser-plugin": "plugin" not in WORDS,
    "--exclude-tools-when-tool-choice-none": "exclude" not in WORDS,
    "--max-logprobs": limits.TOP_LOGPROBS.most == limits.LOGPROBS.most == 20,
    "--max-num-queued-tokens": "max_queued" in WORKER,
    "--sse-keep-alive-interval": generate.KEEP_ALIVE_S == 15,
    "--h11-*": (ROOT / "docs/reference/limits.md").is_file(),
    "--disable-fastapi-docs": PATHS.isdisjoint({"/docs", "/redoc", "/tokenizer_info"}),
    "--enable-reasoning": "reasoning_parser" in WORKER,
    "--response-role": "response_role" not in WORKER,
    "--chat-template-content-format": "content" not in WORDS,
    "--completion-template": 'reject_unsupported(fields, ("suffix"' in SOURCES,
    "--enable-force-include-usage": "stream_include_usage" in WORKER,
    "--enable-request-id-headers": headers.REQUEST_ID == headers.REQUEST_ID,
    "--return-tokens-as-token-ids": '"return_token_ids"' in SOURCES,
    "--stream-interval": "stream_interval" not in WORKER,
    "--ssl-*": "tls_folder" in WORKER & ROUTER and "ssl" not in WORDS,
    "--skip-server-warmup": "await worker.warm_up()" in SOURCES,
    "--config": all(kind.model_config["env_prefix"].startswith("BATON_") for kind in SETTINGS),
    "--allow-credentials": "allowed_origins" in WORKER & ROUTER and "middleware" not in WORDS,
    "--enable-custom-logit-processor": WORDS.isdisjoint({"processor", "processors", "embeds", "hidden"}),
    "--enable-trace": "tracing_endpoint" in WORKER & ROUTER,
    "--model-path": ROUTER.isdisjoint({"model", "chat_template", "reasoning_parser", "tool_call_parser"}),
    "--load-balance-method": "router" in main.SERVERS,
    "--pd-disaggregation": {"prefill", "decode"} <= ROUTER,
    "--prefill-policy": "policy" in ROUTER and WORDS.isdisjoint({"threshold", "balance", "eviction"}),
    "--selector": "of the Service"
    in " ".join(str(RouterSettings.model_fields["kubernetes_selector"].description).split()),
    "--max-concurrent-requests": {"queue_requests", "queue_bytes", "wait_s", "tenants_file"} <= ROUTER,
    "--retry-*": {field for field in ROUTER if field.startswith(("retr", "health", "breaker"))}
    == {"retries", "retry_ratio", "health_interval_s", "health_misses"},
    "--jwt-*": {"jwt_jwks", "jwt_issuer", "jwt_audience"} <= ROUTER,
    "--control-plane-*": {"api_key", "api_key_file"} <= ROUTER and "plane" not in WORDS,
    "--history-backend": {"responses_kept", "database"} <= ROUTER,
    "--mcp-config-path": WORDS.isdisjoint({"mcp", "igw", "backend"}),
}
"""By the first flag of each refusal: what must be so for its reason to be true."""


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flags.split()[0])
def test_refusals_reasons_are_true(refusal: Refusal) -> None:
    """A feature that is added here must change the words that say it is not there."""
    assert FACTS[refusal.flags.split()[0]], refusal.reason


def test_refusals_facts_belong_to_refusals() -> None:
    assert FACTS.keys() == {refusal.flags.split()[0] for refusal in REFUSALS}


def test_command_doctests_pass() -> None:
    assert doctest.testmod(command).failed == 0


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


def test_router_flags_of_0_1_0_are_read_by_new_names() -> None:
    """For one version: the changelog names the new ones."""
    flags = {"--local-prefill-max-tokens": True, "--dashboard": False, "--no-dashboard": False}
    given = ["--alone-tokens=7", "--alone-tokens", "8", "--page", "--no-page"]
    assert list(command.translate(given, flags, peers.DEPRECATED, "router")) == [
        *("--local-prefill-max-tokens=7", "--local-prefill-max-tokens", "8"),
        *("--dashboard", "--no-dashboard"),
    ]
    for name in ("up", "router"):
        existing = {flag for one in COMMANDS[name].params for flag in (*one.opts, *one.secondary_opts)}
        assert {"--dashboard", "--no-dashboard"} <= existing
    assert {"--local-prefill-max-tokens", "--scheduler-timeout-s"} <= set(ROUTERS)
    assert peers.DEPRECATED["--scheduler-patience-s"] == "--scheduler-timeout-s"


@pytest.mark.parametrize("prefix", ["ALONE_TOKENS", "LOCAL_PREFILL_MAX_TOKENS"])
def test_router_variable_is_read_by_both_names(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.setenv(f"BATON_ROUTER_{prefix}", "9")
    assert RouterSettings(decode=("http://127.0.0.1:1",)).local_prefill_max_tokens == 9


@pytest.mark.parametrize("name", ["SCHEDULER_PATIENCE_S", "SCHEDULER_TIMEOUT_S"])
def test_scheduler_timeout_is_read_by_both_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"BATON_ROUTER_{name}", "9")
    assert RouterSettings(decode=("http://127.0.0.1:1",)).scheduler_timeout_s == 9
