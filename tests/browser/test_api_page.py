"""`GET /docs` in a real Chromium (api_page.mjs has the scenarios), and the copy of Swagger UI that it is made of."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from browser_needs import ROOT, need
from playground_runs import named, run

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from gateway_fakes import stack

KEY = "key-of-the-operator"
PAGE = ROOT / "gateway" / "api_page"
VENDOR = PAGE / "vendor"
PACKAGE = ROOT / "web-sdk" / "node_modules" / "swagger-ui-dist"
SCENARIOS = named("scenario", "api_page.mjs")


@pytest.fixture(scope="module")
async def ran() -> AsyncIterator[dict[str, Any]]:
    async with stack(1, api_keys=[{"key": KEY}]) as s:
        yield await run("scenario", s.url, KEY, "api_page.mjs")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_page(ran: dict[str, Any], name: str) -> None:
    assert ran[name] is None, ran[name]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/docs", "text/html"),
        ("/docs/page.js", "text/javascript"),
        ("/docs/page.css", "text/css"),
        ("/docs/swagger-ui.css", "text/css"),
        ("/docs/swagger-ui-bundle.js", "text/javascript"),
    ],
)
async def test_files_come_compressed_under_a_policy_that_allows_nothing_foreign(path: str, kind: str) -> None:
    async with stack(1, wait=False) as s, s.http.get(s.url + path, headers={"Accept-Encoding": "gzip"}) as answer:
        assert answer.status == 200 and answer.content_type == kind and answer.headers["Content-Encoding"] == "gzip"
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        whole = await answer.read()
        async with s.http.get(s.url + path, headers={"Accept-Encoding": "identity"}) as plain:
            assert "Content-Encoding" not in plain.headers and await plain.read() == whole
        async with s.http.get(
            s.url + path, headers={"If-None-Match": plain.headers["ETag"], "Accept-Encoding": "identity"}
        ) as again:
            assert (again.status, await again.read()) == (304, b"")


async def test_no_other_file_is_served() -> None:
    async with stack(1, wait=False) as s:
        for name in ("nothing.js", "LICENSE", "vendor", "swagger-ui.css.gz", "..%2fapp.py", "%2e%2e%2fapp.py", ""):
            async with s.http.get(f"{s.url}/docs/{name}") as answer:
                assert answer.status == 404, name


def test_our_own_part_has_no_script_or_style_inside_and_names_no_other_host() -> None:
    page = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    for file in PAGE.iterdir():
        assert file.is_dir() or "://" not in file.read_text(), file.name


def test_the_copy_is_what_the_pinned_package_holds() -> None:
    need(PACKAGE.exists(), "web-sdk/node_modules (npm ci --prefix web-sdk)")
    pinned = json.loads((ROOT / "web-sdk" / "package.json").read_text())["devDependencies"]["swagger-ui-dist"]
    assert json.loads((PACKAGE / "package.json").read_text())["version"] == pinned, "run `npm ci --prefix web-sdk`"
    for copy in VENDOR.iterdir():
        name, content = (
            (copy.stem, gzip.decompress(copy.read_bytes())) if copy.suffix == ".gz" else (copy.name, copy.read_bytes())
        )
        assert content == (PACKAGE / name).read_bytes(), (
            f"{name}: run `make api-page` and commit gateway/api_page/vendor"
        )


def test_the_copy_has_its_licence_and_is_small() -> None:
    names = {path.name for path in VENDOR.iterdir()}
    assert names == {
        "swagger-ui-bundle.js.gz",
        "swagger-ui.css.gz",
        "LICENSE",
        "NOTICE",
        "swagger-ui-bundle.js.LICENSE.txt",
    }
    assert "Apache License" in (VENDOR / "LICENSE").read_text() and "SmartBear" in (VENDOR / "NOTICE").read_text()
    assert sum(path.stat().st_size for path in VENDOR.iterdir()) < 520_000
