"""What a release consists of, and the workflows that check changes and publish releases."""

from __future__ import annotations

import doctest
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_api import __version__
from checks import release
from checks.release import ReleaseError, bill, check_versions, of_registry, semantic

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHART = "version: 0.2.0  # why\nappVersion: 0.2.0\n"
CHANGELOG = "# Changelog\n\n## 0.2.0\n\n## 0.1.0\n"


def test_release_examples_in_docstrings() -> None:
    assert doctest.testmod(release).failed == 0


def test_release_of_this_tree_has_one_version() -> None:
    check_versions("", __version__, (release.CHART / "Chart.yaml").read_text(), "")


@pytest.mark.parametrize(
    ("tag", "version", "chart", "changelog", "says"),
    [
        ("", "0.3.0.dev0", CHART, "", "no appVersion: 0.3.0.dev0 and no version: 0.3.0-dev0"),
        ("v0.2.1", "0.2.0", CHART, CHANGELOG, "v0.2.1 is not of this tree"),
        ("v0.2.0", "0.2.0", CHART, "## Unreleased\n", "no section 0.2.0"),
    ],
    ids=["chart", "tag", "changelog"],
)
def test_release_refuses_versions_that_differ(
    tag: str, version: str, chart: str, changelog: str, says: str
) -> None:
    with pytest.raises(ReleaseError, match=re.escape(says)):
        check_versions(tag, version, chart, changelog)


def test_release_of_a_tag_with_equal_versions() -> None:
    check_versions("v0.2.0", "0.2.0", CHART, CHANGELOG)


def test_release_sets_the_registry_of_the_charts_images() -> None:
    values = (release.CHART / "values.yaml").read_text()
    before, after = yaml.safe_load(values), yaml.safe_load(of_registry(values, "ghcr.io/example"))
    assert (before["images"].pop("registry"), after["images"].pop("registry")) == ("", "ghcr.io/example")
    assert before == after
    with pytest.raises(ReleaseError, match="registry"):
        of_registry("images: {}\n", "ghcr.io/example")


def test_release_bill_of_materials_names_packages_and_their_hashes() -> None:
    wheel = {"url": "https://index/a.whl", "hashes": {"sha256": "ab" * 32}}
    lock: dict[str, Any] = {
        "packages": [
            {"name": "a", "version": "1.0", "wheels": [wheel]},
            {"name": "b", "version": "2.0", "sdist": wheel},
        ]
    }
    components = bill("router", lock)["components"]
    assert [one["purl"] for one in components] == ["pkg:pypi/a@1.0", "pkg:pypi/b@2.0"]
    assert all(one["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}] for one in components)


def test_release_bills_list_what_the_images_install() -> None:
    text = (ROOT / "images" / "Dockerfile").read_text().replace("\\\n", " ")
    stages = re.findall(r"FROM build AS (\w+)-needs\n(.*?)(?=\nFROM |\Z)", text, re.DOTALL)
    installed = {name: tuple(re.findall(r"--extra (\w+)", stage)) for name, stage in stages}
    assert installed == dict(release.IMAGES)


BUILDER = """#!/bin/sh
echo "$*" >>"$0.log"
case "$1 $2" in
  pull*) echo "no route to the registry" >&2; exit {pull} ;;
  "image inspect")
    case "$*" in *RepoDigests*) echo '{digests}'; exit {inspect} ;; *) echo 1234567 sha256:12 ;; esac ;;
  run*) echo {version} ;;
esac
"""


@pytest.mark.parametrize(
    ("pull", "inspect", "digests", "base", "says"),
    [
        (0, 0, '["python@sha256:ab"]', "python@sha256:ab", "on python@sha256:ab:"),
        (1, 0, "[]", "own/base:1", "on own/base:1, which has no digest"),
        (1, 1, "", "", "not built, own/base:1 is not here and cannot be pulled: `"),
    ],
    ids=["pulled", "made here", "neither"],
)
def test_release_builds_images_on_the_base_that_there_is(
    tmp_path: Path, pull: int, inspect: int, digests: str, base: str, says: str
) -> None:
    builder = tmp_path / "builder"
    builder.write_text(BUILDER.format(pull=pull, inspect=inspect, digests=digests, version=__version__))
    builder.chmod(0o755)
    first, *lines = release.images(str(builder), "", "own/base:1")
    assert says in first
    calls = Path(f"{builder}.log").read_text().splitlines()
    built = [one for one in calls if one.startswith("build")]
    assert len(built) == len(lines) == (3 if base else 0)
    assert all(f"BASE={base}" in one for one in built)
    if not base:
        assert "no route to the registry" in first


def test_release_refuses_an_image_of_another_version(tmp_path: Path) -> None:
    builder = tmp_path / "builder"
    builder.write_text(BUILDER.format(pull=0, inspect=0, digests="[]", version="0.1.0"))
    builder.chmod(0o755)
    with pytest.raises(ReleaseError, match="says that it is"):
        release.images(str(builder), "", "own/base:1")


@pytest.mark.slow
def test_release_is_built_and_its_sums_are_right(tmp_path: Path) -> None:
    if not (shutil.which("helm") or (Path.home() / ".cache/baton-cluster/bin/helm").exists()):
        pytest.skip("helm is not installed: e2e/cluster/cluster helm")
    assert release.main([str(tmp_path), "--registry", "ghcr.io/example", "--builder", ""]) == 0
    names = {
        f"baton-{semantic(__version__)}.tgz",
        f"baton-crds-{__version__}.yaml",
        f"batonserve-{__version__}-py3-none-any.whl",
        f"batonserve-{__version__}.tar.gz",
        *(f"baton-{image}-{__version__}.cdx.json" for image in release.IMAGES),
    }
    sums = {f"{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}  {name}" for name in names}
    assert set((tmp_path / "SHA256SUMS").read_text().splitlines()) == sums


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_steps_are_targets_of_the_makefile(workflow: Path) -> None:
    """So that each of them can be tried on any machine."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert commands
    assert [line for line in commands if line.removeprefix("make ") not in targets] == []


def test_workflows_are_what_actions_run() -> None:
    path = f"{os.environ['PATH']}:{Path.home() / 'go/bin'}"
    if (actionlint := shutil.which("actionlint", path=path)) is None:
        pytest.skip("actionlint is missing: go install github.com/rhysd/actionlint/cmd/actionlint@latest")
    done = subprocess.run([actionlint, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
