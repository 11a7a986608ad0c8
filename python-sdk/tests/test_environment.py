"""This environment is the pinned one, and what the documents name exists."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

import upbeat

ROOT = Path(__file__).parents[1]
DOCUMENTS = tuple(ROOT.parent / name for name in ("python-sdk/README.md", "docs/python-sdk.md", "docs/frameworks.md"))
HOOKS = ("openai_agents", "langgraph", "agent_framework", "mcp")
#: Hooks whose frameworks have environments of their own, and their classes.
ELSEWHERE = {
    "crewai": {"UpbeatListener", "UpbeatInterceptor"},
    "litellm": {"UpbeatCallback"},
    "llama_index": {"UpbeatEventHandler"},
}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_everything_that_is_installed_here_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonical(line.split("==")[0]): line.split("==")[1] for line in lines if line and not line.startswith("#")}
    ours = {"pip", "setuptools", "upbeat-sdk"}
    here = {canonical(found.name): found.version for found in importlib.metadata.distributions()}
    assert {f"{name}=={version}" for name, version in here.items() if name not in ours} <= {
        f"{n}=={v}" for n, v in pins.items()
    }


def test_the_distribution_asks_for_nothing() -> None:
    requires = importlib.metadata.requires("upbeat-sdk") or []
    assert all("extra ==" in requirement for requirement in requires)
    assert importlib.metadata.version("upbeat-sdk") == upbeat.__version__


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_the_documents_name_exists(document: Path) -> None:
    text = document.read_text()
    modules = {name: importlib.import_module(f"upbeat.{name}") for name in HOOKS}
    for name in set(re.findall(r"\bupbeat\.([A-Za-z_]+)\b", text)) - set(ELSEWHERE):
        assert hasattr(upbeat, name) or name in modules, f"upbeat.{name}"
    for name in set(re.findall(r"\b(Upbeat[A-Z]\w+)", text)) - set().union(*ELSEWHERE.values()):
        assert any(hasattr(module, name) for module in modules.values()), name
    for name in re.findall(r"\bclient\.([a-z_]+)\(", text):
        assert hasattr(upbeat.AdvisoryClient, name), f"client.{name}"
