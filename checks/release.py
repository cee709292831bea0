"""
Build and check everything that a release consists of: `python -m checks.release FOLDER`.

The folder then holds the wheel and the source distribution, the chart as a package for OCI registries, the
custom resources as one file, a software bill of materials (CycloneDX) for each image, and SHA256SUMS of them.
Images are built if docker or another builder works here. Nothing is published: `make publish` does that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton_api import __version__
from baton_api.installing import DISTRIBUTION

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "baton"

IMAGES: Mapping[str, Sequence[str]] = {
    "operator": ("operator",),
    "router": ("router", "jwt", "redis", "gateway", "fetch"),
    "worker": ("runtime", "nixl", "kernels"),
}
"""Extras that `images/Dockerfile` installs into each image."""

BASE = "python:3.11-slim"
"""Base of the images, unless another one is named. A release names it by its digest."""


class ReleaseError(Exception):
    """What a release consists of is not right; the message says what to do."""


def semantic(version: str) -> str:
    """
    Return a version as Helm wants it.

    >>> semantic("0.2.0"), semantic("0.2.0.dev0"), semantic("0.2.0rc1")
    ('0.2.0', '0.2.0-dev0', '0.2.0-rc1')
    """
    return re.sub(r"^(\d+\.\d+\.\d+)\.?((?:dev|rc|a|b)\d+)$", r"\1-\2", version)


def check_versions(tag: str, version: str, chart: str, changelog: str) -> None:
    """
    Compare the versions of package, chart and changelog, and the tag of a release with them.

    Args:
        tag: Such as v0.2.0; empty between releases.
        version: Of the package.
        chart: Text of Chart.yaml.
        changelog: Text of CHANGELOG.md.
    """
    wanted = {f"version: {semantic(version)}", f"appVersion: {version}"}
    if missing := wanted - {line.partition("  #")[0] for line in chart.splitlines()}:
        raise ReleaseError(
            f"Chart.yaml has no {' and no '.join(sorted(missing))}: write the package's version there."
        )
    if not tag:
        return
    if tag != f"v{version}":
        raise ReleaseError(
            f"The tag {tag} is not of this tree, whose version is {version} (api/baton_api/__init__.py)."
        )
    if f"\n## {version}\n" not in changelog:
        raise ReleaseError(f"CHANGELOG.md has no section {version}: name the section Unreleased so.")


def of_registry(values: str, registry: str) -> str:
    """Return the text of the chart's values with the registry of the release's images as the default."""
    changed, count = re.subn(r'^  registry: ""$', f"  registry: {registry}", values, flags=re.MULTILINE)
    if count != 1:
        raise ReleaseError('values.yaml has no line `  registry: ""`, which a release sets.')
    return changed


def bill(name: str, lock: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CycloneDX bill of materials of an image: its Python packages, from a lock file (PEP 751)."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": f"baton-{name}", "version": __version__}},
        "components": [
            {
                "type": "library",
                "name": package["name"],
                "version": package["version"],
                "purl": f"pkg:pypi/{package['name']}@{package['version']}",
                "hashes": [
                    {"alg": "SHA-256", "content": file["hashes"]["sha256"]}
                    for file in (
                        *package.get("wheels", ()),
                        *([package["sdist"]] if "sdist" in package else ()),
                    )
                ],
            }
            for package in lock["packages"]
        ],
    }


def packages(folder: Path) -> None:
    """Build wheel and source distribution, and run the wheel's command line from a folder of its own."""
    run(sys.executable, "-m", "hatchling", "build", "--directory", str(folder))
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as place:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place)
        command = "from baton_cli.main import main; main(['version'])"
        printed = run(sys.executable, "-c", command, env={"PYTHONPATH": place}, cwd=place)
    with tarfile.open(source) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    if printed.strip() != __version__:
        raise ReleaseError(f"{wheel.name} says that it is {printed.strip()!r}, not {__version__}.")
    if missing := {"pyproject.toml", "LICENSE", "README.md", "api/baton_api/__init__.py"} - files:
        raise ReleaseError(f"{source.name} lacks {', '.join(sorted(missing))}.")


def chart(folder: Path, registry: str) -> None:
    """Package the chart with the release's registry as its default, and render the package."""
    helm = shutil.which("helm") or shutil.which("helm", path=str(Path.home() / ".cache/baton-cluster/bin"))
    if helm is None:
        raise ReleaseError("helm is not installed. Install it, or build it: e2e/cluster/cluster helm.")
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(CHART, Path(place, "baton")))
        if registry:
            values = copy / "values.yaml"
            values.write_text(of_registry(values.read_text(), registry))
        run(helm, "lint", "--strict", str(copy))
        run(helm, "package", str(copy), "--destination", str(folder))
    (package,) = folder.glob("baton-*.tgz")
    rendered = run(helm, "template", "baton", str(package), "--kube-version=1.34.0")
    image = f"{registry}/baton-operator:{__version__}" if registry else f"baton-operator:{__version__}"
    if f"image: {image}" not in rendered.replace('"', ""):
        raise ReleaseError(f"{package.name} does not start the image {image}.")


def resources(folder: Path) -> None:
    """Write the custom resources as one file for `kubectl apply --server-side -f`."""
    texts = [path.read_text().strip() for path in sorted((ROOT / "crds").glob("*.yaml"))]
    (folder / f"baton-crds-{__version__}.yaml").write_text("\n---\n".join(texts) + "\n")


def bills(folder: Path) -> None:
    """Resolve what each image installs, and write its bill of materials."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise ReleaseError("uv is not installed: make .venv/dev")
    for name, extras in IMAGES.items():
        wanted = [word for extra in extras for word in ("--extra", extra)]
        limits = ("--constraint", "constraints.txt", "--python-version", "3.11", "--format", "pylock.toml")
        text = run(uv, "pip", "compile", "--quiet", "pyproject.toml", *wanted, *limits)
        text_of_bill = json.dumps(bill(name, tomllib.loads(text)), indent=1)
        (folder / f"baton-{name}-{__version__}.cdx.json").write_text(f"{text_of_bill}\n")


def images(builder: str, registry: str, base: str) -> list[str]:
    """
    Build the images on a base that is named by its digest, and run each one.

    A base that was never in a registry has no digest: it is used as it is, and the result says so.

    Returns:
        A line for each image with its size and digest, or why none was built.
    """
    if shutil.which(builder) is None:
        return [f"images: not built, {builder} is not installed"]
    if subprocess.run([builder, "info"], capture_output=True, check=False).returncode:
        return [f"images: not built, {builder} reaches no daemon here"]
    refused = ""
    try:
        run(builder, "pull", base)
    except ReleaseError as error:
        refused = str(error).splitlines()[-1]
    try:
        digests = json.loads(run(builder, "image", "inspect", "--format", "{{json .RepoDigests}}", base))
    except ReleaseError:
        return [f"images: not built, {base} is not here and cannot be pulled: {refused}"]
    on = digests[0] if digests else base
    run("make", "images", f"BUILDER={builder}", f"REGISTRY={registry}", f"BASE={on}")
    origin = "" if digests else ", which has no digest because it is in no registry"
    lines = [f"images with the tag {__version__}, on {on}{origin}:"]
    for name in IMAGES:
        image = f"{registry}/baton-{name}:{__version__}".lstrip("/")
        printed = run(builder, "run", "--rm", "--network=none", image, "version").strip()
        if printed != __version__:
            raise ReleaseError(f"The image {image} says that it is {printed!r}, not {__version__}.")
        size, identity = run(builder, "image", "inspect", "--format", "{{.Size}} {{.Id}}", image).split()
        lines.append(f"{int(size):>13,}  {identity}  {image}")
    return lines


def sums(folder: Path) -> list[str]:
    """Write SHA256SUMS, as `sha256sum --check` reads it. Returns a line for each file."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / "SHA256SUMS").write_text(
        "".join(f"{digest}  {path.name}\n" for path, digest in digests.items())
    )
    return [f"{path.stat().st_size:>10,}  {digest}  {path.name}" for path, digest in digests.items()]


def run(*command: str, env: Mapping[str, str] | None = None, cwd: str | Path = ROOT) -> str:
    """Return what a command prints. Raises ReleaseError with the end of its complaints."""
    done = subprocess.run(
        command, env=os.environ | (env or {}), cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(
            f"`{' '.join(command[:4])} ...` failed: {(done.stderr or done.stdout).strip()[-2000:]}"
        )
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the release. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--registry", default="", help="of the images, such as ghcr.io/ORGANIZATION")
    parser.add_argument("--tag", default="", help="of the release, such as v0.2.0; it must fit")
    parser.add_argument("--base", default=BASE, help="of the images")
    parser.add_argument("--builder", default="docker", help="program that builds images; empty: build none")
    given = parser.parse_args(arguments)
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    try:
        check_versions(
            given.tag, __version__, (CHART / "Chart.yaml").read_text(), (ROOT / "CHANGELOG.md").read_text()
        )
        packages(given.folder)
        chart(given.folder, given.registry)
        resources(given.folder)
        bills(given.folder)
        built = ["images: not built, as asked"]
        if given.builder:
            built = images(given.builder, given.registry, given.base)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{DISTRIBUTION} {__version__} in {given.folder}:", *sums(given.folder), *built, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
