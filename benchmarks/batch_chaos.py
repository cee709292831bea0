"""
Batches under `kill -9`, as long as one likes: runners, router and workers, at random moments.

    python -m benchmarks.batch_chaos --kills 1000
    python -m benchmarks.batch_chaos --kills 1000 --database postgres

Prints a line after each batch and one at the end. The status is 1 if any line was lost or duplicated, or if
any output differs from that of an undisturbed batch. `--database` may also be the URL of an empty
database; `postgres` starts a server. The same seed makes the same choices, not the same moments.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.batches import chaos
from tests.batches.postgres import Postgres


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", default="sqlite", help="sqlite, postgres, or a URL")
    parser.add_argument("--lines", type=int, default=600, help="of each batch")
    parser.add_argument("--pause", type=float, default=0.8, help="most seconds between two kills")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # its processes end with it
    with tempfile.TemporaryDirectory(prefix="batch-chaos-") as folder, database(given.database) as url:
        report = chaos.run(
            Path(folder),
            given.kills,
            given.seed,
            {"BATON_ROUTER_DATABASE": url},
            lines=given.lines,
            pause_s=(0.0, given.pause),
            notify=lambda report: print(report, flush=True),
        )
    print(report)
    return 1 if report.lost or report.doubled or report.different else 0


@contextlib.contextmanager
def database(which: str) -> Iterator[str]:
    """Its URL; empty for SQLite in the router's own folder."""
    if which != "postgres":
        yield "" if which == "sqlite" else which
        return
    server = Postgres()
    try:
        yield server.new_database()
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main())
