"""The images' sources exist, and the images match the chart's and the operator's expectations."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest
import yaml

from baton_operator.manifests.pods import USER
from tests.charts.helm import CHART, ROOT

DOCKERFILE = (ROOT / "images" / "Dockerfile").read_text().replace("\\\n", " ")
VLLM = ROOT / "e2e" / "vllm"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()

DOCKER = """#!/bin/sh
case "$1" in
  --version) echo "Docker version {version}, build 0" ;;
  buildx) exit {without_buildx} ;;
  info) exit 0 ;;
  *) echo "$0" ;;
esac
"""
"""A client whose daemon answers; everything but `--version`, `buildx` and `info` prints its own path."""

APT = """#!/bin/sh
[ "$1" = install ] || exit 0
for package in "$@"; do
  echo "$package" >>"{home}/installed"
  for program in "{home}/$package"/*; do [ ! -f "$program" ] || cp "$program" "{home}/debian/"; done
done
"""
"""An apt-get whose packages are the folders of `home`, and which installs into its folder `debian`."""

BOOKWORM, NEWER, WITH_BUILDX = ("20.10.24+dfsg1", 1), ("28.2.2", 1), ("28.2.2", 0)
"""Clients: their version, and the exit status of `docker buildx`."""


def test_images_have_a_target_for_each_image_of_the_chart() -> None:
    images = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
    wanted = {name for name, image in images.items() if isinstance(image, dict)}
    assert wanted == {"operator", "router", "worker"}
    assert wanted <= set(re.findall(r"^FROM run AS (\w+)$", DOCKERFILE, re.MULTILINE))


def test_images_contain_all_bytecode() -> None:
    """Containers write none, and the base image has none of the standard library."""
    stage = DOCKERFILE[DOCKERFILE.index("FROM ${BASE} AS run") : DOCKERFILE.index("USER 65532")]
    assert "PYTHONDONTWRITEBYTECODE=1" in stage and "UV_COMPILE_BYTECODE=1" in DOCKERFILE
    assert re.search(r"python3 -m compileall -q -x '\S+' +\"\$\(python3 -c '.*get_path\(\"stdlib\"\)", stage)


def test_images_installed_extras_exist() -> None:
    named = set(re.findall(r"--extra (\S+)", DOCKERFILE))
    assert named and named <= set(PROJECT["project"]["optional-dependencies"])


def test_images_copied_files_exist_and_are_not_ignored() -> None:
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    sources = [source for line in lines for source in line.split()[:-1] if source != "."]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        whole = f"!{PurePosixPath(source).parts[0]}"
        assert {whole, f"!{source}"} & set(IGNORED), source


def test_vllm_image_copied_files_exist_and_are_not_ignored() -> None:
    allowed = (VLLM / "Dockerfile.dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(.+)$", (VLLM / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for line in copied for source in line.split()[:-1]]
    assert sources
    for source in sources:
        assert list(ROOT.glob(source)), source
        assert f"!{source}" in allowed, source


def test_vllm_image_pins_its_requirements() -> None:
    pinned = (VLLM / "constraints.txt").read_text()
    for file in ("requirements.txt", "overrides.txt"):
        exact = {line for line in (VLLM / file).read_text().splitlines() if "==" in line and ";" not in line}
        assert exact and exact <= set(pinned.splitlines()), file


def test_all_that_the_package_is_built_from_is_let_in() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {PurePosixPath(package).parts[0] for package in packages} | {"README.md", "LICENSE"}
    assert {f"!{name}" for name in needed} <= set(IGNORED)


@pytest.mark.parametrize(
    ("stage", "module"),
    [("model", "baton_engine.model.builtin"), ("kernels", "baton_engine.ops.native.library")],
)
def test_stage_has_every_module_that_it_imports(tmp_path: Path, stage: str, module: str) -> None:
    """A stage copies single files, so that a change elsewhere does not fetch the model or compile again."""
    (body,) = re.findall(
        rf"^FROM \S+ AS {stage}\n(.*?)(?=^FROM |^# ---)", DOCKERFILE, re.MULTILINE | re.DOTALL
    )
    copied = re.findall(r"^COPY (.+)$", body, re.MULTILINE)
    assert copied
    for line in copied:
        *sources, target = line.split()
        folder = tmp_path / target.removeprefix(f"/{stage}").strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / source, folder)
    # -S: neither the packages of this environment nor Baton itself can be imported.
    command = [sys.executable, "-S", "-c", f"import {module}"]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_they_run_as_who_pods_run_as() -> None:
    assert f"USER {USER}:{USER}" in DOCKERFILE.splitlines()
    assert DOCKERFILE.count("USER ") == 1


@pytest.mark.parametrize(
    ("first", "packages", "chosen", "installed"),
    [
        pytest.param(NEWER, {"docker.io": BOOKWORM}, "debian", ["docker.io"], id="a client without buildx"),
        pytest.param(None, {"docker.io": BOOKWORM}, "debian", ["docker.io"], id="no client"),
        pytest.param(WITH_BUILDX, {}, "first", [], id="a client with buildx"),
        pytest.param(BOOKWORM, {}, "first", [], id="a client that needs no buildx"),
        pytest.param(
            NEWER,
            {"docker.io": None, "docker-cli": WITH_BUILDX},
            "debian",
            ["docker.io", "docker-cli", "docker-buildx"],
            id="a release that packages the client by itself",
        ),
    ],
)
def test_images_client_chosen_after_installing(
    tmp_path: Path,
    first: tuple[str, int] | None,
    packages: dict[str, tuple[str, int] | None],
    chosen: str,
    installed: list[str],
) -> None:
    """The first run on a machine uses the client that it has just installed, and installs only if it must."""
    answer = _images_docker(tmp_path, first, packages)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == str(tmp_path / chosen / "docker")
    seen = tmp_path / "installed"
    words = seen.read_text().split() if seen.exists() else []
    assert [word for word in words if word.startswith("docker")] == installed


def test_images_without_buildkit_says_what_to_install(tmp_path: Path) -> None:
    answer = _images_docker(tmp_path, NEWER, {"docker.io": NEWER})
    assert answer.returncode == 1
    assert "install its plug-in buildx" in answer.stderr


def _images_docker(
    home: Path, first: tuple[str, int] | None, packages: dict[str, tuple[str, int] | None]
) -> subprocess.CompletedProcess[str]:
    """`e2e/images docker` where PATH has `first`, and apt-get has `packages`."""
    for name in ("first", "debian"):
        (home / name).mkdir()
    _program(home / "first" / "apt-get", APT.format(home=home))
    for place, client in {"first": first, **packages}.items():
        (home / place).mkdir(exist_ok=True)
        if client is not None:
            version, without_buildx = client
            _program(home / place / "docker", DOCKER.format(version=version, without_buildx=without_buildx))
    tools = home / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "cp"):
        tool = shutil.which(name)
        assert tool
        (tools / name).symlink_to(tool)
    environment = {"PATH": f"{home / 'first'}:{home / 'debian'}:{tools}", "HOME": str(home)}
    command = [str(tools / "bash"), str(ROOT / "e2e" / "images"), "docker", "where"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
