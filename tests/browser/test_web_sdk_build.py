"""web-sdk/dist is what the build makes of web-sdk/src, small, and hashed."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from browser_needs import need

SDK = Path(__file__).parents[2] / "web-sdk"
DIST = SDK / "dist"
SRI: dict[str, dict[str, object]] = json.loads((DIST / "sri.json").read_text())
#: What the core may weigh on the wire, and the hook.
BUDGET_BYTES = {"upbeat.js": 1200, "upbeat.mjs": 1200, "react.mjs": 400}


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    node = need(shutil.which("node"), "node")
    need((SDK / "node_modules" / "esbuild").exists(), "web-sdk/node_modules (npm ci --prefix web-sdk)")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([node, SDK / "build.mjs", out], check=True, capture_output=True, timeout=120)
    return out


def test_what_is_committed_is_what_the_build_makes(rebuilt: Path) -> None:
    made = {path.name: path.read_text() for path in rebuilt.iterdir()}
    assert {path.name: path.read_text() for path in DIST.iterdir()} == made, "run `make web` and commit web-sdk/dist"


@pytest.mark.parametrize("name", BUDGET_BYTES)
def test_a_file_keeps_to_its_budget_and_has_its_hash(name: str) -> None:
    digest = base64.b64encode(hashlib.sha384((DIST / name).read_bytes()).digest()).decode()
    assert SRI[name]["integrity"] == f"sha384-{digest}"
    weight = SRI[name]["brotli_bytes"]
    assert isinstance(weight, int) and 100 < weight <= BUDGET_BYTES[name]


def test_a_budget_is_checked_with_what_brotli_really_makes(rebuilt: Path) -> None:
    script = (
        "const "
        "z=require('zlib'),f=require('fs');process.stdout.write(''+z.brotliCompressSync(f.readFileSync(process.argv[1])).length)"
    )
    for name in BUDGET_BYTES:
        done = subprocess.run(["node", "-e", script, DIST / name], check=True, capture_output=True, text=True)
        assert int(done.stdout) == SRI[name]["brotli_bytes"]


def test_it_depends_on_nothing() -> None:
    package = json.loads((SDK / "package.json").read_text())
    assert "dependencies" not in package
    assert list(package["peerDependenciesMeta"]) == list(package["peerDependencies"]) == ["react"]
    assert "import" not in (DIST / "upbeat.mjs").read_text().split("export")[0]


def test_its_types_let_through_what_works_and_nothing_else() -> None:
    node = need(shutil.which("node"), "node")
    compiler = SDK / "node_modules" / "typescript" / "bin" / "tsc"
    need(compiler.exists(), "web-sdk/node_modules (npm ci --prefix web-sdk)")
    done = subprocess.run(
        [node, compiler, "-p", SDK / "tsconfig.types.json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
