"""The architecture is a test: who may import whom, and what a core may touch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "contracts",
    "storelink",
    "runtime",
    "gateway",
    "scheduler",
    "kvstore",
    "worker",
    "sidecar",
    "cli",
    "loadtest",
)
#: Everything that is kept small and safe: the services, and what others install.
SOURCES = (
    *PACKAGES,
    "python-sdk/src/upbeat",
    "vllm-plugin/src/upbeat_vllm",
    "integrations/langchain-upbeat/langchain_upbeat",
)
#: What a hook of the SDK may import beside Python and the SDK itself: its framework.
FRAMEWORKS = {
    "openai_agents": {"agents"},
    "langgraph": {"langchain_core"},
    "crewai": {"crewai"},
    "agent_framework": {"agent_framework"},
    "litellm": {"litellm"},
    "llama_index": {"llama_index", "pydantic"},
    "mcp": {"mcp", "mcp_types", "pydantic"},
}
EFFECTS = {
    "asyncio",
    "time",
    "random",
    "os",
    "grpc",
    "aiohttp",
    "torch",
    "socket",
    "subprocess",
    "threading",
    "secrets",
    "runtime",
}
CORES = sorted(path for package in PACKAGES for path in ROOT.glob(f"{package}/core/**/*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, lazily or not, in full."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            found |= {node.module or ""}
    return found


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout and "5 kept" in done.stdout


def modules() -> dict[str, Path]:
    """Every module of the packages and of the connector, by its full name."""
    found = {}
    for root, packages in ((ROOT, PACKAGES), (ROOT / "vllm-plugin" / "src", ("upbeat_vllm",))):
        for package in packages:
            for path in root.glob(f"{package}/**/*.py"):
                found[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, lazily and for types too; empty when there is none."""
    done: set[str] = set()
    for first in arrows:
        path: list[str] = []
        ahead = [iter([first])]
        while ahead:
            name = next(ahead[-1], None)
            if name is None:
                ahead.pop()
                if path:
                    done.add(path.pop())
            elif name in path:
                return [*path[path.index(name) :], name]
            elif name not in done:
                path.append(name)
                ahead.append(iter(sorted(arrows[name])))
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = modules()
    arrows: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                arrows[name] |= {alias.name for alias in node.names if alias.name in paths}
            elif isinstance(node, ast.ImportFrom) and node.module in paths:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                arrows[name] |= inner & paths.keys() or {node.module}
    assert len(arrows) > 400 and sum(map(len, arrows.values())) > 1000
    assert not circle(arrows)


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_every_service_has_a_core() -> None:
    assert {path.parts[len(ROOT.parts)] for path in CORES} >= {"gateway", "scheduler", "kvstore", "worker", "sidecar"}


@pytest.mark.parametrize("path", CORES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_core_module_reaches_nothing_that_waits_stamps_draws_or_computes_on_devices(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        first = name.partition(".")[0]
        assert first not in EFFECTS, f"{path} imports {name}"
        if first in PACKAGES:
            known = first == "contracts" or name.startswith((f"{package}.core", "storelink.core"))
            assert known, f"{path} imports {name}; a core knows contracts, what engines share, and itself"


@pytest.mark.parametrize("package", SOURCES)
def test_files_stay_small_enough_to_read(package: str) -> None:
    for path in sorted(ROOT.glob(f"{package}/**/*.py")):
        if "v1" not in path.parts:
            assert len(path.read_text().splitlines()) <= 400, f"{path} is over 400 lines; split it by decision"


@pytest.mark.parametrize("package", SOURCES)
def test_no_code_unpickles_or_evaluates(package: str) -> None:
    for path in sorted(ROOT.glob(f"{package}/**/*.py")):
        if "v1" in path.parts:
            continue
        assert not imports(path) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "torch.load"}, f"{path}:{node.lineno} calls {called}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("python-sdk/src/upbeat/*.py")), ids=lambda path: path.stem)
def test_the_sdk_needs_nothing_but_python_and_a_hook_nothing_but_its_framework(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, "upbeat"} | FRAMEWORKS.get(path.stem, set())
    assert {name.partition(".")[0] for name in imports(path)} <= allowed
    if path.stem not in FRAMEWORKS:
        assert not imports(path) & {f"upbeat.{hook}" for hook in FRAMEWORKS}, "hooks are imported by who wants them"
