"""What the images are made of is there, and is what the chart and the operator take them for."""

from __future__ import annotations

import re
import tomllib
from pathlib import PurePosixPath

import yaml

from baton_operator.manifests.pods import USER
from tests.charts.helm import CHART, ROOT

DOCKERFILE = (ROOT / "images" / "Dockerfile").read_text().replace("\\\n", " ")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def test_there_is_a_target_for_each_image_of_the_chart() -> None:
    images = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
    wanted = {name for name, image in images.items() if isinstance(image, dict)}
    assert wanted == {"operator", "router", "worker"}
    assert wanted <= set(re.findall(r"^FROM run AS (\w+)$", DOCKERFILE, re.MULTILINE))


def test_every_extra_that_is_installed_exists() -> None:
    named = set(re.findall(r"--extra (\S+)", DOCKERFILE))
    assert named and named <= set(PROJECT["project"]["optional-dependencies"])


def test_every_file_that_is_copied_exists_and_is_let_in() -> None:
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    sources = [source for line in lines for source in line.split()[:-1] if source != "."]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        whole = f"!{PurePosixPath(source).parts[0]}"
        assert {whole, f"!{source}"} & set(IGNORED), source


def test_all_that_the_package_is_built_from_is_let_in() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {PurePosixPath(package).parts[0] for package in packages} | {"README.md", "LICENSE"}
    assert {f"!{name}" for name in needed} <= set(IGNORED)


def test_they_run_as_who_pods_run_as() -> None:
    assert f"USER {USER}:{USER}" in DOCKERFILE.splitlines()
    assert DOCKERFILE.count("USER ") == 1
