"""An image archive as `docker save` writes it, with one file: what a pod's sandbox is made of."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def image(binary: Path, tag: str) -> bytes:
    """Return the archive of an image that runs `binary` as an unprivileged user."""
    layer = tar({binary.name: binary.read_bytes()}, 0o755)
    digest = hashlib.sha256(layer).hexdigest()
    machine = platform.machine()
    configuration = {
        "architecture": ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": {"Entrypoint": [f"/{binary.name}"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    return tar(
        {
            "layer.tar": layer,
            "config.json": json.dumps(configuration).encode(),
            "manifest.json": json.dumps(manifest).encode(),
        }
    )


def tar(files: Mapping[str, bytes], mode: int = 0o644) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


if __name__ == "__main__":
    sys.stdout.buffer.write(image(Path(sys.argv[1]), sys.argv[2]))
