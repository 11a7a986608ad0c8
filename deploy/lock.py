"""Writes constraints.txt: version and hashes of each package that an installation may hold, on any platform; and
deploy/tools.txt, the same for what makes a release.

    make lock                       keeps the versions that still fit pyproject.toml
    make lock ARGS=--upgrade        takes the newest (also: ARGS="--upgrade-package aiohttp")

uv resolves. PyTorch's own CPU builds are not on PyPI: deploy/torch-cpu.sha256 has their hashes, read from PyTorch's
index when torch's version changes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path
from urllib.parse import unquote

HERE = Path(__file__).resolve().parent.parent
CONSTRAINTS, RELEASE = HERE / "constraints.txt", HERE / "deploy" / "tools.txt"
TORCH = HERE / "deploy" / "torch-cpu.sha256"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
HEAD = """\
# Exact versions and hashes of everything that `make` installs into .venv, transitive packages included; `make lock`
# writes it, deploy/install.py reads it. torch has PyPI's hashes (CUDA on Linux) and those of PyTorch's CPU builds.
"""
#: What no extra asks for: see TOOLS in deploy/install.py.
MORE = "pip\nsetuptools>=77\n"
#: It pins older versions than the services need, and is installed without what it asks for (docs/design/0006).
ALONE = "lmcache"
#: Builds, checks, lists what is in, locks.
TOOLS = "build\nsetuptools>=77\ncyclonedx-bom\ntwine\nuv\n"
_COMPILE = (
    "pip",
    "compile",
    "--quiet",
    "--universal",
    "--python-version",
    "3.11",
    "--generate-hashes",
    "--no-header",
    "--no-annotate",
)
_BUILD = re.compile(r"torch-([0-9.]+)\+cpu-cp31[1-9]-cp31[1-9]-manylinux_\d+_\d+_(x86_64|aarch64)\.whl")


def builds(page: str, version: str) -> str:
    """Lines as of sha256sum for the CPU builds of torch `version` on `page`, an index's HTML."""
    found = (
        (unquote(name), digest) for name, digest in re.findall(r'href="[^"]*?([^"/]+)#sha256=([0-9a-f]{64})"', page)
    )
    return "".join(
        f"{digest}  {name}\n" for name, digest in sorted(found) if (m := _BUILD.fullmatch(name)) and m[1] == version
    )


def with_builds(constraints: str, listed: str) -> str:
    """`constraints` with the hashes of `listed`, lines as of sha256sum, added to torch's, each once."""
    hashes = "".join(
        f"    --hash=sha256:{digest} \\\n"
        for digest in (line.split()[0] for line in listed.splitlines())
        if digest not in constraints
    )
    return re.sub(r"^(torch==.*\\\n)", lambda m: m[1] + hashes, constraints, count=1, flags=re.MULTILINE)


def resolved(asked: str, kept: str, *more: str) -> str:
    """What uv chooses for `asked`, with hashes; versions in `kept` stay where possible. Raises CalledProcessError."""
    uv = str(Path(sys.executable).with_name("uv"))
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "made.txt"
        made.write_text(kept)
        command = [uv, *_COMPILE, "--output-file", str(made), *more, "-"]
        subprocess.run(command, input=asked, text=True, check=True, cwd=HERE, stdout=subprocess.DEVNULL)
        return made.read_text()


def main(flags: list[str]) -> None:
    """Write the two files again."""
    kept = CONSTRAINTS.read_text()
    extras = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (alone,) = extras.pop(ALONE)
    asked = [flag for extra in extras for flag in ("--extra", extra)]
    every = resolved(MORE, kept, "pyproject.toml", *asked, *flags) + resolved(alone, kept, "--no-deps", *flags)
    found = re.search(r"^torch==(\S+)", every, re.MULTILINE)
    assert found is not None
    if f"torch-{found[1]}+cpu-" not in TORCH.read_text():
        with urllib.request.urlopen(TORCH_INDEX, timeout=60) as page:
            TORCH.write_text(builds(page.read().decode(), found[1]))
    CONSTRAINTS.write_text(HEAD + with_builds(every, TORCH.read_text()))
    RELEASE.write_text(resolved(TOOLS, RELEASE.read_text() if RELEASE.exists() else "", *flags))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as e:
        sys.exit(e.returncode)
