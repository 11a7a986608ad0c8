"""Everything that the documents name exists: targets, commands, flags, paths, pins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
_help: dict[str, str] = {}


def help_of(*command: str) -> str:
    """What `upbeat COMMAND --help` prints."""
    key = " ".join(command)
    if key not in _help:
        program = str(Path(sys.executable).with_name("upbeat"))
        _help[key] = subprocess.run(
            [program, *command, "--help"], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
    return _help[key]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_that_is_named_exists(document: str) -> None:
    for target in re.findall(r"`?make ([a-z-]+)[` \n]", (ROOT / document).read_text()):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"{document}: make {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_and_flag_that_is_named_exists(document: str) -> None:
    for code in re.findall(r"`([^`\n]+)`|^    (.+)$", (ROOT / document).read_text(), re.MULTILINE):
        words = re.search(r"\bupbeat ([a-z]+)(.*)", " ".join(code))
        if words is None or "curl" in " ".join(code):
            continue
        assert re.search(rf"^  {words[1]}\b", help_of(), re.MULTILINE), f"{document}: upbeat {words[1]}"
        for flag in re.findall(r"--[a-z-]+", words[2]):
            assert flag in help_of(words[1]), f"{document}: upbeat {words[1]} {flag}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`([a-z_.]+(?:/[A-Za-z0-9_.-]+)*/?)`", text)
    tops = {path.name for path in ROOT.iterdir()}
    paths = [name for name in named if "/" in name and name.split("/")[0] in tops]
    made_later = ("data/", ".cache/", ".venv")
    for path in paths:
        assert path.startswith(made_later) or (ROOT / path).exists(), f"{document}: {path}"


@pytest.mark.parametrize("document", ["README.md", "docs/api.md", "docs/hints.md"])
def test_where_a_reader_meets_hints_it_says_that_the_api_calls_one_an_advisory(document: str) -> None:
    text = " ".join((ROOT / document).read_text().replace("*", "").split())
    assert re.search(
        r"API calls a hint an advisory|In the API its name is advisory|a hint, which the API calls an advisory", text
    )


COMMANDS = [
    (path.relative_to(ROOT).as_posix(), " ".join(filter(None, code)))
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*/README.md")])
    for code in re.findall(r"`([^`\n]+)`|^    (\S.+)$", path.read_text(), re.MULTILINE)
    if re.search(r"\bpython3? (-m |\S+\.py)", " ".join(code))
]


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=lambda part: part[:60])
def test_a_documented_python_command_works_outside_an_activated_environment(document: str, command: str) -> None:
    """It names the environment's interpreter, and its program exists with these flags."""
    found = re.search(r"(\S*)\bpython3? (?:-m (\S+)|(\S+\.py))([^#|]*)", command)
    assert found is not None and re.fullmatch(r"(PYTHONPATH=\. )?(\S*/)?\.venv/bin/", found[1]), (
        f"{document}: {command}"
    )
    if found[2] in ("pip", "pytest"):
        return
    program = [found[3]] if found[3] else ["-m", found[2]]
    help_text = subprocess.run(
        [sys.executable, *program, "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
    ).stdout
    for flag in re.findall(r"(?<!\S)--[a-z-]+", found[4]):
        assert flag in help_text, f"{document}: {command}"


def test_programs_print_commands_that_name_their_interpreter() -> None:
    """What is printed is pasted: `pip` and `python` on somebody's path are others than this environment's."""
    bare = re.compile(r"""["'`\s;,](pip install|python3? -m [a-z_.]+)""")
    for package in ("cli", "worker", "sidecar", "kvstore", "gateway", "scheduler", "runtime", "storelink", "loadtest"):
        for path in (ROOT / package).rglob("*.py"):
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                printed = re.search(r"""f?["'].*["']""", line)
                if printed is None or line.lstrip().startswith(('"""', "#")):
                    continue
                assert not bare.search(re.sub(r"\.venv/bin/python -m|\{\S+\} -m pip install", "", printed[0])), (
                    f"{path}:{number}: {line}"
                )


def test_a_command_without_its_environment_says_which_one_has_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "loadtest.random_model", "--shape", "tiny", "--out", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "has no module torch; run .venv/bin/python -m loadtest.random_model" in done.stderr


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for package in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert f"`{package.partition('.')[0].rstrip('*')}/" in text


def test_the_changelog_knows_this_version_or_what_comes_next() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text or f"## [{PROJECT['project']['version']}]" in text


def test_everything_that_is_installed_for_us_is_pinned() -> None:
    pins = {canonicalize_name(name) for name in PINS}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    wanted += [Requirement(text) for listed in extras.values() for text in listed]
    # installed only where torch is built for CUDA
    elsewhere = {canonicalize_name(Requirement(text).name) for text in extras["cuda"]}
    seen: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or name == PROJECT["project"]["name"]:
            continue
        seen.add(name)
        assert name in pins, f"{name} is not in constraints.txt"
        if f"--no-deps {name}" in MAKEFILE or name in elsewhere:
            continue
        found: Distribution = distribution(name)
        for text in found.requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                wanted.append(needed)
    assert seen >= {"torch", "aiohttp", "nixl-cu12", "pytest"}


def test_no_pin_carries_a_build_that_only_one_machine_has() -> None:
    assert not [name for name, version in PINS.items() if "+" in version]


def test_every_program_has_its_entry_point() -> None:
    assert set(PROJECT["project"]["scripts"]) == {
        "upbeat",
        "upbeat-gateway",
        "upbeat-scheduler",
        "upbeat-kvstore",
        "upbeat-worker",
        "upbeat-sidecar",
        "upbeat-vllm-server",
    }


def test_a_make_target_without_tests_does_not_pass() -> None:
    assert re.search(r"= 5 \]; then .* exit 1", MAKEFILE), "pytest's status 5 means that nothing was selected"


def test_every_pin_has_hashes() -> None:
    for file in ("constraints.txt", "deploy/tools.txt"):
        entries = (ROOT / file).read_text().replace("\\\n", "").splitlines()
        pinned = [entry for entry in entries if entry and not entry.startswith("#")]
        assert pinned and all("==" in entry and "--hash=sha256:" in entry for entry in pinned), file


def test_both_builds_of_torch_are_pinned() -> None:
    (torch,) = (
        entry
        for entry in (ROOT / "constraints.txt").read_text().replace("\\\n", "").splitlines()
        if entry.startswith("torch==")
    )
    listed = [line.split() for line in (ROOT / "deploy" / "torch-cpu.sha256").read_text().splitlines()]
    assert listed and all(digest in torch and f"torch-{PINS['torch']}+cpu-" in name for digest, name in listed)


def test_all_packages_have_one_version() -> None:
    said = {
        json.loads((ROOT / "web-sdk" / "package.json").read_text())["version"],
        tomllib.loads((ROOT / "vllm-plugin" / "pyproject.toml").read_text())["project"]["version"],
        tomllib.loads((ROOT / "integrations/langchain-upbeat/pyproject.toml").read_text())["project"]["version"],
        *re.findall(r'^VERSION = "(.+)"', (ROOT / "python-sdk/src/upbeat/version.py").read_text(), re.MULTILINE),
    }
    assert said == {PROJECT["project"]["version"]}
