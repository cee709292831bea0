"""
The names on which parts agree: declared once in `baton_api`, pinned here, and imported everywhere else.

A name that two parts write down for themselves can change in one of them; then both pass their tests and do
not understand each other. Error codes, headers, labels of Kubernetes objects and metrics are public, so a
change of one is a change for users: `PINNED` is the one place that repeats them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_api import errors, headers, labels, metrics
from baton_api.errors import BatonError

ROOT = Path(__file__).parents[1]
CODE = ("api", "cli", "observing", "operator", "router", "runtime", "tests", "benchmarks", "e2e")
DECLARING = ("api/baton_api/errors.py", "api/baton_api/headers.py", "api/baton_api/labels.py")
DECLARING_FOLDERS = ("api/baton_api/metrics/",)
THIS = "tests/test_shared_names.py"

ORDINARY = {headers.BATCH_CLASS, labels.OPERATOR}
"""Words with other meanings, too: a literal does not show which one is meant."""

OF_SAMPLES = ("_bucket", "_sum", "_count", "_created")

PINNED = {
    "headers": """
        server-timing x-baton-class x-baton-decision x-baton-resumable x-baton-prefill x-baton-prompt
        x-baton-salt x-baton-state x-baton-tenant x-baton-ticket x-baton-usage x-baton-worker
        x-cached-tokens x-predicted-ttft-ms x-request-id x-should-retry x-slo-ttft-ms
    """,
    "labels": """
        app.kubernetes.io/managed-by baton.dev/engine baton.dev/revision baton.dev/role baton.dev/service
    """,
    "codes": """
        array_above_max_length content_size_limit_exceeded context_length_exceeded decimal_above_max_value
        decimal_below_min_value empty_array forbidden insufficient_quota integer_above_max_value
        integer_below_min_value internal_error invalid_api_key invalid_function_parameters invalid_type
        invalid_value missing_required_parameter model_not_found object_above_max_properties overloaded
        poison_request previous_response_not_found rate_limit_exceeded request_aborted stale_lease
        storage_full storage_unavailable string_above_max_length unsupported_parameter upstream_lost
        worker_error
    """,
    "metrics": """
        baton_autoscaler_capacity_tokens_per_second baton_autoscaler_decided_by
        baton_autoscaler_decisions_total baton_autoscaler_desired_replicas baton_autoscaler_held_down
        baton_autoscaler_input baton_autoscaler_inputs_unknown baton_autoscaler_metrics_age_seconds
        baton_autoscaler_recommended_replicas baton_batch_lines_left baton_batch_lines_total
        baton_batch_retries_total baton_batch_runners baton_batch_storage_errors_total baton_batches
        baton_batches_late baton_build_info baton_operator_api_requests_total
        baton_operator_cache_unsynced_kinds baton_operator_condition baton_operator_desired_replicas
        baton_operator_generation_weight baton_operator_leader
        baton_operator_objective_first_token_seconds baton_operator_objective_ratio
        baton_operator_objective_token_seconds baton_operator_queue_depth
        baton_operator_queue_oldest_seconds baton_operator_ready_replicas baton_operator_reconcile_seconds
        baton_operator_rollbacks_total baton_operator_watch_age_seconds
        baton_operator_watch_last_event_seconds baton_router_admission_rejects_total
        baton_router_answers_cut_total baton_router_background_errors_total
        baton_router_cache_accuracy_ratio baton_router_cache_ignored
        baton_router_certificate_end_timestamp_seconds baton_router_certificate_life_seconds
        baton_router_decisions_total baton_router_demand_tokens_total baton_router_index_bytes
        baton_router_index_chunks baton_router_index_tier_chunks baton_router_kv_event_gaps_total
        baton_router_kv_events_degraded baton_router_kv_events_lag_seconds baton_router_kv_events_total
        baton_router_loop_lag_seconds baton_router_overhead_seconds baton_router_predicted_first_token_ratio
        baton_router_prefix_tokens_total baton_router_queue_age_seconds baton_router_queue_depth
        baton_router_queued_tokens baton_router_registered_workers baton_router_request_seconds
        baton_router_requests_held baton_router_requests_in_flight baton_router_requests_total
        baton_router_response_store_errors_total baton_router_restored_tokens_total
        baton_router_resumes_total baton_router_retries_total
        baton_router_revision_first_token_seconds baton_router_revision_requests_total
        baton_router_scheduler_unavailable_total baton_router_tenant_tokens_total baton_router_tenants
        baton_router_tenants_stale baton_router_time_per_output_token_seconds
        baton_router_time_to_first_byte_seconds baton_router_transfer_seconds
        baton_router_worker_requests_in_flight baton_router_worker_state
        baton_worker_certificate_end_timestamp_seconds baton_worker_certificate_life_seconds
        baton_worker_decode_seconds baton_worker_forward_seconds baton_worker_generation_tokens_per_second
        baton_worker_generation_tokens_total baton_worker_info baton_worker_inter_token_latency_seconds
        baton_worker_kv_blocks baton_worker_kv_event_batches_total baton_worker_kv_usage_ratio
        baton_worker_local_prefills_total baton_worker_prefill_seconds
        baton_worker_prefix_cache_evictions_total baton_worker_prefix_cache_hits_total
        baton_worker_prefix_cache_queries_total baton_worker_prompt_tokens_per_second
        baton_worker_prompt_tokens_total baton_worker_quarantined_blocks_total baton_worker_queue_seconds
        baton_worker_queued_tokens baton_worker_request_generation_tokens
        baton_worker_request_prompt_tokens baton_worker_request_seconds baton_worker_requests_fetching
        baton_worker_requests_held baton_worker_requests_queued baton_worker_requests_running
        baton_worker_requests_running_limit baton_worker_requests_total baton_worker_retractions_total
        baton_worker_step_seconds baton_worker_time_to_first_token_seconds
        baton_worker_transfer_bytes_total baton_worker_transfer_failures_total
        baton_worker_transfer_seconds
    """,
}
"""
Names used by clients, dashboards and manifests of users. Change a line here together with the changelog.
"""


def _constants(module: object) -> dict[str, str]:
    return {
        value: name
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and value not in ORDINARY
    }


def _codes() -> dict[str, str]:
    """Each code, and by what it is imported."""
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, BatonError)]
    codes = {kind.code: f"{kind.__name__}.code" for kind in reversed(kinds) if isinstance(kind.code, str)}
    return {**codes, **{code: code.upper() for code in errors.CODES}}


DECLARED = {
    "headers": _constants(headers),
    "labels": _constants(labels),
    "codes": _codes(),
    "metrics": {one.name: "its Metric" for one in metrics.CONTRACT},
}
"""By group: each name, and by what it is imported."""

WHERE = {
    **{name: f"baton_api.headers.{constant}" for name, constant in DECLARED["headers"].items()},
    **{name: f"baton_api.labels.{constant}" for name, constant in DECLARED["labels"].items()},
    **{name: f"baton_api.errors.{constant}" for name, constant in DECLARED["codes"].items()},
    **dict.fromkeys(DECLARED["metrics"], "its constant in baton_api.metrics"),
}


@pytest.mark.parametrize("group", PINNED)
def test_shared_names_are_the_pinned_ones(group: str) -> None:
    """A name that has gone was renamed or removed: users' clients, dashboards and manifests still say it."""
    gone = set(PINNED[group].split()) - DECLARED[group].keys()
    assert not gone
    if group != "metrics":  # those that are new are in docs/reference/metrics.md
        assert not DECLARED[group].keys() - set(PINNED[group].split())


def repeated(source: str) -> Iterator[tuple[int, str]]:
    """Lines of literals that say a shared name, and the name; parts of f-strings are literals too."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Constant):
            continue
        value = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
        if not isinstance(value, str):
            continue
        name = next((value.removesuffix(one) for one in OF_SAMPLES if value.endswith(one)), value)
        for codes in (value, name):
            if codes in WHERE:
                yield node.lineno, codes
                break


REPEATS = {
    "a text": ('ask["x-request-id"]', ["x-request-id"]),
    "bytes": ('(b"x-request-id", b"1")', ["x-request-id"]),
    "a part of an f-string": ('f"baton_batches{labels}"', ["baton_batches"]),
    "a metric's sample": ('"baton_router_request_seconds_bucket"', ["baton_router_request_seconds"]),
    "an error's code": ('error["code"] == "overloaded"', ["overloaded"]),
    "the constant": ('ask[headers.REQUEST_ID], Overloaded.code, f"{metrics.BATCHES.name}{{}}"', []),
    "an ordinary word": ('kind == "batch"', []),
    "a sentence with a name in it": ('"Send x-request-id, and x-should-retry."', []),
}


@pytest.mark.parametrize(("source", "names"), REPEATS.values(), ids=REPEATS.keys())
def test_repeated_finds_literals_that_say_a_name(source: str, names: list[str]) -> None:
    assert [name for _, name in repeated(source)] == names


def test_shared_names_are_imported_and_not_repeated() -> None:
    repeats = []
    for path in sorted(one for root in CODE for one in (ROOT / root).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if place in (*DECLARING, THIS) or place.startswith(DECLARING_FOLDERS):
            continue
        repeats += [
            f"{place}:{line}: {name!r}; use {WHERE[name]}" for line, name in repeated(path.read_text())
        ]
    assert not repeats, "\n".join(["names that are declared in baton_api are repeated:", *repeats])
