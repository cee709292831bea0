"""Mutation testing of the pure modules: which small changes of the code does no test notice?

`make mutants` runs mutmut (https://mutmut.readthedocs.io) once for each target below, each in a folder of
its own under `build/mutants`, with the tests named for it and no others. The score of a target is the share
of its mutants that a test kills; one that never ends counts as killed. `--show` prints survivors as diffs.

mutmut changes plain functions and methods; it leaves decorated ones (properties, fixtures) as they are, so
the score says nothing about those.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "mutants"
SOURCES = (
    "api",
    "cli",
    "observing",
    "operator",
    "router",
    "runtime/engine",
    "runtime/prefill",
    "runtime/decode",
)
BESIDE = ("tests", "benchmarks", "docs", "crds", "charts", "examples")
"""Folders that tests read."""
KILLED = {1, 3, 36, 152, -24, 24, 255, -11}
"""Exit codes of mutmut's worker for a failed test, a limit on time that ran out, and a crash."""
TIMED_OUT = {36, 152, -24, 24, 255}


@dataclass(frozen=True, slots=True)
class Target:
    """Modules that are mutated together, and the tests that should notice."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    without: str = ""
    """Tests whose names contain this word are left out."""


TARGETS = {
    "scheduler": Target(
        ("baton_engine/scheduling/scheduler.py",),
        ("tests/engine/test_scheduler.py", "tests/engine/test_scheduler_fetches.py"),
    ),
    "block pool": Target(("baton_engine/kv/block_pool.py",), ("tests/engine/test_block_pool.py",)),
    "sampler": Target(
        ("baton_engine/sampling/sampler.py",),
        ("tests/engine/test_sampler.py", "tests/engine/test_token_masks.py"),
    ),
    "queue": Target(
        tuple(
            f"baton_router/scheduling/{name}.py"
            for name in ("queue", "priority_queue", "tenant_queue", "fair_share", "sorted_list", "wakeup")
        ),
        tuple(
            f"tests/router/test_{name}.py"
            for name in ("queue", "priority_queue", "tenant_queue", "fair_share", "queue_wakeup")
        ),
    ),
    "choice": Target(
        ("baton_router/scheduling/pair_selection.py",), ("tests/router/test_pair_selection.py",)
    ),
    "ledger": Target(("baton_batches/ledger.py",), ("tests/batches/test_ledger.py",), without="postgres"),
    "plan": Target(
        ("baton_operator/reconcilers/plan.py",),
        tuple(
            f"tests/operator/test_{name}.py"
            for name in (
                "plan",
                "http_route",
                "mutual_tls",
                "model_fetch",
                "metrics_border",
                "network_policies",
            )
        ),
    ),
    "rollout": Target(("baton_operator/rollout/decision.py",), ("tests/operator/test_rollout.py",)),
    "scaling": Target(
        ("baton_operator/scaling/decision.py", "baton_operator/scaling/sizing.py"),
        ("tests/operator/scaling/test_decision.py", "tests/operator/scaling/test_sizing.py"),
    ),
    "prefill sessions": Target(("baton_prefill/sessions.py",), ("tests/prefill/test_sessions.py",)),
    "decode sessions": Target(("baton_decode/sessions.py",), ("tests/decode/test_sessions.py",)),
}


def prepare(folder: Path, target: Target) -> None:
    """Lay the sources out as mutmut reads them: packages under `src`, tests beside it, one `setup.cfg`."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for source in SOURCES:
        for package in (ROOT / source).glob("baton_*"):
            shutil.copytree(package, folder / "src" / package.name, ignore=ignored)
    for beside in BESIDE:
        shutil.copytree(ROOT / beside, folder / beside, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    selection = ["-k", f"not {target.without}"] if target.without else []
    options = {
        "source_paths": ["src"],
        "only_mutate": [f"src/{module}" for module in target.modules],
        "also_copy": list(BESIDE),
        "pytest_add_cli_args": ["-x", "-p", "no:cacheprovider", *selection],
        "pytest_add_cli_args_test_selection": list(target.tests),
        "process_isolation": ["forkserver"],
        "track_dependencies": ["false"],
    }
    lines = [
        f"{name} =\n" + "".join(f"    {value}\n" for value in values) for name, values in options.items()
    ]
    scalars = {"process_isolation", "track_dependencies"}
    text = "[mutmut]\n" + "".join(
        f"{name} = {options[name][0]}\n" if name in scalars else line
        for name, line in zip(options, lines, strict=True)
    )
    (folder / "setup.cfg").write_text(text)


def outcomes(folder: Path) -> dict[str, int | None]:
    """Return the exit code of each mutant of the folder, by its name."""
    exit_codes: dict[str, int | None] = {}
    for meta in sorted((folder / "mutants").rglob("*.meta")):
        exit_codes |= json.loads(meta.read_text())["exit_code_by_key"]
    return exit_codes


def run(folder: Path, processes: int) -> int:
    """Run mutmut in a prepared folder; its output goes to `mutmut.log` there."""
    mutmut = Path(sys.executable).with_name("mutmut")
    with (folder / "mutmut.log").open("w") as log:
        done = subprocess.run(
            [mutmut, "run", "--max-children", str(processes)],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        )
    return done.returncode


def main() -> None:
    """Run the chosen targets, and print one row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "targets", nargs="*", help=f"of {', '.join(TARGETS)}; all by default", default=list(TARGETS)
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="mutants tried at the same time"
    )
    parser.add_argument("--show", action="store_true", help="print each survivor as a diff")
    options = parser.parse_args()
    print("| target | mutants | killed | of these timed out | survived | no test | score |")
    print("|---|---|---|---|---|---|---|")
    for name in options.targets:
        folder = FOLDER / name.replace(" ", "-")
        prepare(folder, TARGETS[name])
        if run(folder, options.processes):
            print(f"{name}: mutmut failed; see {folder / 'mutmut.log'}", file=sys.stderr)
            continue
        codes = outcomes(folder)
        counts = Counter(codes.values())
        killed = sum(counts[code] for code in KILLED)
        timed_out = sum(counts[code] for code in TIMED_OUT)
        score = f"{killed / len(codes):.1%}" if codes else "-"
        print(
            f"| {name} | {len(codes)} | {killed} | {timed_out} | {counts[0]} | {counts[33]} | {score} |",
            flush=True,
        )
        if options.show:
            for mutant in (mutant for mutant, code in codes.items() if code in (0, 33)):
                subprocess.run(
                    [Path(sys.executable).with_name("mutmut"), "show", mutant], cwd=folder, check=False
                )


if __name__ == "__main__":
    main()
