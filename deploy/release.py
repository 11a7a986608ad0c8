"""Builds and checks what is published, into dist/: wheels, sdists, the npm package, SBOMs, and constraints.txt with the
wheels' own hashes.

    make dist       then docs/releasing.md
    make sbom       the SBOMs alone

Nothing is built from what the indexes offer at that moment: build tools come from deploy/tools.txt.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
#: Folders of Python distributions, and whether each has an sdist. The connector's sources lie outside its folder.
PYTHON = {".": True, "python-sdk": True, "vllm-plugin": False}


def build(folder: Path) -> None:
    """Fill `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    for source, sdist in PYTHON.items():
        kinds = ["--sdist", "--wheel"] if sdist else ["--wheel"]
        # What an earlier build left there would get into the wheel.
        shutil.rmtree(HERE / source / "build", ignore_errors=True)
        _python("build", "--no-isolation", *kinds, "--outdir", str(folder), str(HERE / source))
    _run(["npm", "pack", "--silent", "--pack-destination", str(folder)], HERE / "web-sdk")
    wheels = sorted(folder.glob("*.whl"))
    _python("twine", "check", "--strict", *map(str, [*wheels, *folder.glob("upbeat_*.tar.gz")]))
    sbom(folder)
    (folder / "constraints.txt").write_text((HERE / "constraints.txt").read_text() + "".join(map(pin, wheels)))


def pin(wheel: Path) -> str:
    """A wheel's line of constraints: version and hash."""
    name, version = wheel.name.split("-")[:2]
    return f"{name.replace('_', '-')}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def sbom(folder: Path) -> None:
    """Write the SBOMs (CycloneDX): what the server's environment may hold, and what builds the web SDK."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "upbeat-server.cdx.json"
    _python(
        *("cyclonedx_py", "requirements", "--pyproject", "pyproject.toml", "--output-reproducible"),
        *("--output-file", str(made), "constraints.txt"),
    )
    command = ["npm", "sbom", "--sbom-format", "cyclonedx", "--package-lock-only", "--sbom-type", "library"]
    listed = _run(command, HERE / "web-sdk")
    (folder / "upbeat-web.cdx.json").write_text(json.dumps(json.loads(listed), indent=1) + "\n")


def _python(module: str, *arguments: str) -> None:
    _run([sys.executable, "-W", "ignore", "-m", module, *arguments], HERE)


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    what, *where = sys.argv[1:]
    target = Path(*where).resolve() if where else HERE / "dist"
    {"build": build, "sbom": sbom}[what](target)
    print("\n".join(str(path) for path in sorted(target.iterdir())))
