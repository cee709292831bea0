"""A story of requests, and every figure that a scrape shows of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path

import pytest

from baton_api import headers as header_names
from baton_api import metrics
from baton_api.headers import PROMPT
from baton_api.prompt_report import PromptReport
from baton_api.workers import Role
from baton_http.sse import usage_tokens
from baton_router.metrics.registry import (
    MODEL_LABELS,
    OTHER,
    TENANT_LABELS,
    BoundedLabels,
    LoopLag,
    RequestCounters,
)
from tests.router.fake_worker import FakeWorker, saying, whole_answer
from tests.router.running import CHAT, QUESTION, STREAM, RunningRouter, anew, running_router, until
from tests.router.test_tracing import REPORT, reported

TINY = f'class="default",code="200",model="tiny",path="{CHAT}"'


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


async def page(router: RunningRouter, key: str = "") -> dict[str, float]:
    """`name{labels}` to value, as Prometheus would read it."""
    given = {"authorization": f"Bearer {key}"} if key else {}
    text = (await router.client.get("/metrics", headers=given)).text
    rows = re.finditer(r"^(baton_\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    return {row[1]: float(row[2]) for row in rows}


async def test_metrics_after_a_mixed_load_are_exact(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    listed = [{"name": name, "keys": [hashed(name)], "admin": name == "root"} for name in ("a", "b", "root")]
    file.write_text(json.dumps({"tenants": listed}))
    local = PromptReport(
        tokens=100,
        cached=0,
        held=0,
        queue_s=0.0,
        compute_s=0.01,
        transfer_s=0.0,
        remote=False,
        fallback="lost",
    )
    async with (
        FakeWorker(reported) as worker,
        FakeWorker(role=Role.PREFILL, control="127.0.0.1:1") as prefill,
        running_router([worker], [prefill], tenants_file=str(file), local_prefill_max_tokens=0) as router,
    ):

        async def ask(key: str, body: object, **headers: str) -> int:
            given = {"authorization": f"Bearer {key}", **headers}
            return (await router.client.post(CHAT, json=body, headers=given)).status_code

        assert await ask("a", STREAM) == 200
        worker.behaviour = saying(200, whole_answer(), (PROMPT, local.encode()))
        assert await ask("b", anew(QUESTION), **{header_names.CLASS: "interactive"}) == 200
        assert await ask("b", {**QUESTION, "model": "tinier"}) == 404
        assert await ask("nobody", QUESTION) == 401
        given = {"authorization": "Bearer a", "content-type": "application/json"}
        assert (await router.client.post(CHAT, content=b"{", headers=given)).status_code == 400
        await until(lambda: router.metric(metrics.ROUTER_LOOP_LAG.name + "_count") >= 2)
        shown = await page(router, "root")

        def of(name: str) -> dict[str, float]:
            """The samples of one family that are not 0, without its name."""
            return {
                key[len(name) :]: value
                for key, value in shown.items()
                if key.partition("{")[0] == name and value
            }

        assert of(metrics.ROUTER_REQUESTS.name) == {
            f"{{{TINY}}}": 1,
            f'{{class="interactive",code="200",model="tiny",path="{CHAT}"}}': 1,
            f'{{class="default",code="404",model="other",path="{CHAT}"}}': 1,
            f'{{class="other",code="401",model="other",path="{CHAT}"}}': 1,
            f'{{class="other",code="400",model="other",path="{CHAT}"}}': 1,
        }
        assert of(metrics.ROUTER_TENANT_TOKENS.name) == {
            '{kind="prompt",tenant="a"}': REPORT.tokens,
            '{kind="cached",tenant="a"}': REPORT.cached,
            '{kind="generated",tenant="a"}': 3,
            '{kind="prompt",tenant="b"}': 100,
            '{kind="generated",tenant="b"}': 7,
        }
        assert of(metrics.ROUTER_DECISIONS.name) == {
            '{path="remote",reason="cheaper"}': 2,
            '{path="fallback",reason="lost"}': 1,
        }
        assert of(metrics.ROUTER_PREFIX_TOKENS.name) == {
            '{kind="cached"}': REPORT.cached,
            '{kind="prompt"}': REPORT.tokens + 100,
        }
        assert of(metrics.ROUTER_TRANSFER.name + "_sum") == {"": REPORT.transfer_s}
        default, interactive = '{class="default"}', '{class="interactive"}'
        for name, counts in {
            "time_to_first_byte_seconds": {default: 1},
            "time_per_output_token_seconds": {default: 1},
            "request_seconds": {default: 1, interactive: 1},
            "predicted_first_token_ratio": {"": 1},
            "overhead_seconds": {"": 2},
            "transfer_seconds": {"": 1},
        }.items():
            assert of(f"baton_router_{name}_count") == counts, name
        assert 0.005 < of(metrics.ROUTER_OUTPUT_TOKEN.name + "_sum")[default] < 1
        assert of(metrics.ROUTER_LOOP_LAG.name + "_sum")[""] > 0
        chunks = of(metrics.ROUTER_INDEX_CHUNKS.name)[""]
        assert of(metrics.ROUTER_INDEX_BYTES.name)[""] == (160 + 2 * 116) * chunks
        assert of(metrics.ROUTER_TENANTS.name) == {"": 3} and not of(metrics.ROUTER_TENANTS_STALE.name)
        assert not of(metrics.ROUTER_IN_FLIGHT.name) and not of(metrics.ROUTER_RETRIES.name)

        file.write_text("tenants: [{nane: a}]")
        await asyncio.sleep(1.1)
        shown = await page(router, "root")
        assert of(metrics.ROUTER_TENANTS.name) == {"": 3} and of(metrics.ROUTER_TENANTS_STALE.name) == {"": 1}


async def test_contract_metrics_are_all_exposed(tmp_path: Path) -> None:
    """The router's metrics in `baton_api.metrics` are exposed with their labels."""
    file = tmp_path / "tenants.yaml"
    file.write_text(json.dumps({"tenants": [{"name": "a", "keys": [hashed("a")]}]}))
    async with FakeWorker() as worker, running_router([worker], tenants_file=str(file)) as router:
        families = {
            name
            for family in router.router.metrics.registry.collect()
            for name in (family.name, f"{family.name}_total")
        }
    listed = {one.name for name, one in vars(metrics).items() if name.startswith("ROUTER_")}
    assert listed - families == {metrics.ROUTER_REGISTERED_WORKERS.name}, "and that one is a front's"


async def test_client_input_creates_no_new_series() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        await router.post()
        before = None
        for number in range(20):
            await router.post({**QUESTION, "model": f"m-{number}"})
            await router.client.post(f"/v1/{number}", json=QUESTION)
            await router.client.post(CHAT, json=QUESTION, headers={header_names.CLASS: f"c-{number}"})
            series = len((await router.client.get("/metrics")).text.splitlines())
            before = before or series
            assert series == before


def test_tenant_and_model_labels_are_bounded() -> None:
    accounts = RequestCounters()
    for number in range(TENANT_LABELS + 50):
        accounts.used(f"t-{number}", REPORT.tokens, REPORT, 1)
        accounts.ended(CHAT, f"m-{number}", "default", 200, granted=True)
    requests, tokens, *_ = accounts.collect()
    assert len({sample.labels["tenant"] for sample in tokens.samples}) == TENANT_LABELS + 1
    assert len({sample.labels["model"] for sample in requests.samples}) == MODEL_LABELS + 1
    others = [one for one in tokens.samples if one.labels == {"tenant": OTHER, "kind": "generated"}]
    assert [one.value for one in others] == [50]


def test_bounded_labels_hide_unverified_and_excess_names() -> None:
    names = BoundedLabels(2)
    assert [names.existing_label("a"), names.label("a"), names.existing_label("a"), names.label("b")] == [
        OTHER,
        "a",
        "a",
        "b",
    ]
    assert [names.label("c"), names.label("a"), names.existing_label("c")] == [OTHER, "a", OTHER]


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (whole_answer(), 7),
        (b'{"output":[],"usage":{"input_tokens":3,"output_tokens":12,"total_tokens":15}}', 12),
        (b'{"usage":{"prompt_tokens":3,"total_tokens":3}}', 0),
        (json.dumps({"choices": [{"text": '"completion_tokens":99'}]}).encode(), 0),
        (b'{"usage":{"completion_tokens":null}}', 0),
        (b"", 0),
    ],
)
def test_usage_tokens_are_read_from_the_answer(answer: bytes, tokens: int) -> None:
    assert usage_tokens(answer) == tokens


async def test_blocked_event_loop_shows_lag() -> None:
    lag = LoopLag()
    watch = asyncio.create_task(lag.watch())
    await asyncio.sleep(0.05)
    loop = asyncio.get_running_loop()
    done = loop.time() + 0.2
    while loop.time() < done:  # blocks the event loop on purpose
        pass
    await asyncio.sleep(0.05)
    watch.cancel()
    (family,) = lag.collect()
    values = {sample.name: sample.value for sample in family.samples}
    assert values[metrics.ROUTER_LOOP_LAG.name + "_sum"] > 0.1
