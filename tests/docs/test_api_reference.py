"""The pages of errors, limits and metrics."""

from __future__ import annotations

from baton_api import limits
from baton_api.errors import CODES, BatonError, QuotaExceeded
from baton_api.metrics import CONTRACT
from docs.generators.reference import descendants, errors_page, limits_page, metrics_page

KINDS = {"invalid_request_error", "server_error", "requests", "tokens", QuotaExceeded.code}
"""Error types that clients of OpenAI's API know."""


def table_of(page: str, header: str) -> list[list[str]]:
    """The cells of the table that begins with `header`."""
    lines = page[page.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in lines]


def test_error_reference_has_a_row_for_every_error() -> None:
    rows = table_of(errors_page(), "| class |")
    assert [row[0] for row in rows] == [error.__name__ for error in descendants(BatonError)]
    for _, status, kind, _, _, meaning, advice in rows:
        assert 400 <= int(status) < 600
        assert kind.strip("`") in KINDS
        assert meaning and advice
    assert ["`invalid_api_key`", ""] in [row[3:5] for row in rows]


def test_error_reference_has_a_row_for_every_code() -> None:
    assert [row[0] for row in table_of(errors_page(), "| code | meaning |")] == [
        f"`{code}`" for code in CODES
    ]


def test_limit_reference_has_a_row_for_every_limit() -> None:
    rows = table_of(limits_page(), "| what |")
    assert len(rows) == len(limits.table())
    assert ["`temperature`", "chat, completions", "0", "2", "400 `decimal_above_max_value`"] in rows
    assert ["`body`", "all", "", "4,194,304 bytes", "413 `content_size_limit_exceeded`"] in rows
    (seed,) = (row for row in rows if row[0] == "`seed`")
    assert seed[2:4] == ["-2^63", "2^63 - 1"]
    (penalty,) = (row for row in rows if row[0] == "`repetition_penalty`")
    assert penalty[2:4] == ["> 0", "10,000"]


def test_metrics_reference_has_every_metric_with_its_labels() -> None:
    page = metrics_page()
    entries = [f"`{entry}" for entry in page.split("### `")[1:]]
    assert sorted(entry.partition("\n")[0] for entry in entries) == sorted(
        f"`{one.name}`" for one in CONTRACT
    )
    by_name = {entry.partition("\n")[0].strip("`"): entry for entry in entries}
    for metric in CONTRACT:
        section = by_name[metric.name]
        assert metric.help in section
        assert metric.kind in section or metric.unit == "yes or no"
        assert all(f"- `{label}`: " in section for label in metric.labels)
        assert ("Buckets: " in section) == (metric.kind == "histogram")
