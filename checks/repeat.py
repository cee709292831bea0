"""
Run failed tests again, alone: `python -m checks.repeat STATUS`, with pytest's exit status of the whole run.

A whole run uses all cores, so a test of real processes can fail because another test delays it. A test that
fails alone too is a failure. One that passes alone is listed as flaky: it has a race, or the product has.
With more than `LIMIT` failed tests none is repeated, because delays are no longer the likely cause.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

LIMIT = 3
"""Failed tests that are repeated at most."""

RECORD = Path(".pytest_cache", "v", "cache", "lastfailed")
"""Where pytest keeps the ids of failed tests, relative to the folder of the run."""


def to_repeat(status: int, failed: Collection[str]) -> list[str]:
    """
    Choose the tests to repeat: all failed ones, or none.

    Args:
        status: The exit status of the whole run, which must have come to its end.
        failed: Ids of tests, or of files that could not be imported.

    """
    complete = status == pytest.ExitCode.TESTS_FAILED and all("::" in test for test in failed)
    return sorted(failed) if complete and len(failed) <= LIMIT else []


def main(status: int) -> int:
    """Return the exit status: 0 if each failed test passes alone."""
    tests = to_repeat(status, json.loads(RECORD.read_text())) if RECORD.exists() else []
    if not tests:
        return status
    print(f"\nAlone, one after another: {', '.join(tests)}", flush=True)
    again = subprocess.call([sys.executable, "-m", "pytest", "-q", "-rs", *tests])
    for test in tests if again == pytest.ExitCode.OK else ():
        print(f"FLAKY {test}: failed beside other tests, passed alone")
    return again


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
