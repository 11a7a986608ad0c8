"""Installs what pyproject.toml asks for, each file checked against the hashes in constraints.txt.

    .venv/bin/python deploy/install.py gateway worker     into .venv: what every service needs, and these extras

Upbeat itself is not installed: a directory has no hash. Nothing is built from source, so no unchecked build tool runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
CONSTRAINTS = HERE / "constraints.txt"
#: Installed first. Older releases of pip ignore hashes in constraints; setuptools builds Upbeat itself.
TOOLS = ("pip", "setuptools")


def wanted(project: Path, extras: list[str]) -> list[str]:
    """The requirements of `project` (a pyproject.toml) and of its `extras`. Raises KeyError for an unknown extra."""
    said = tomllib.loads(project.read_text())["project"]
    found, own = list(said["dependencies"]), f"{said['name']}["
    for extra in extras:
        for each in said["optional-dependencies"][extra]:
            if each.startswith(own):
                found += wanted(project, each.removeprefix(own).rstrip("]").split(","))
            else:
                found.append(each)
    return list(dict.fromkeys(found))


def entry(constraints: str, name: str) -> str:
    """The entry of `name` in constraints: its pin with all hashes. Raises KeyError."""
    for block in constraints.replace("\\\n", "").splitlines():
        if block.startswith(f"{name}=="):
            return block
    raise KeyError(f"{name} is not in constraints.txt")


def is_installed(pin: str) -> bool:
    """Whether the pinned version is here, in any build: 2.13.0+cpu is 2.13.0."""
    name, _, version = pin.partition("==")
    try:
        return metadata.version(name).partition("+")[0] == version
    except metadata.PackageNotFoundError:
        return False


def install(extras: list[str], project: Path, constraints: Path) -> None:
    """Install the dependencies of `project` and of its `extras` into this interpreter's environment. Raises
    subprocess.CalledProcessError after pip has said why."""
    text = constraints.read_text()
    checked = ("install", "--require-hashes", "--constraint", str(constraints))
    with tempfile.TemporaryDirectory() as scratch:
        listed = Path(scratch) / "requirements.txt"
        listed.write_text("\n".join(entry(text, tool) for tool in TOOLS))
        _pip("install", "--require-hashes", "--no-deps", "--requirement", str(listed))
        names = wanted(project, extras)
        pin = entry(text, "torch").split()[0] if "torch" in names else ""
        if pin and not is_installed(pin):
            # pip prefers files whose hash an index states. So it chooses without hashes, and checks its choice after.
            _pip("download", "--no-deps", "--dest", scratch, pin)
            _pip(*checked, "--no-deps", "--no-index", "--find-links", scratch, "torch")
        listed.write_text("\n".join(names))
        _pip(*checked, "--requirement", str(listed))


def _pip(command: str, *more: str) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            command,
            "--quiet",
            "--disable-pip-version-check",
            "--only-binary",
            ":all:",
            *more,
        ],
        check=True,
        # A machine's own constraints have no hashes.
        env=os.environ | {"PIP_CONSTRAINT": ""},
    )


if __name__ == "__main__":
    try:
        install(sys.argv[1:], HERE / "pyproject.toml", CONSTRAINTS)
    except subprocess.CalledProcessError as e:
        sys.exit(e.returncode)
    except KeyError as e:
        sys.exit(f"deploy/install.py: {e.args[0]}; the extras are in pyproject.toml, the pins come from `make lock`")
