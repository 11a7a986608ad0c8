"""The files that browsers load: compressed as each client accepts them, and as small over the wire as the documents
say."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import brotli
import pytest
from gateway_fakes import Stack, stack

from gateway.core.encodings import choose, is_known

ROOT = Path(__file__).parents[2]
DIST = ROOT / "web-sdk" / "dist"
PLAYGROUND = ROOT / "gateway" / "playground"
FILES = {"/upbeat.js": DIST / "upbeat.js", "/upbeat.mjs": DIST / "upbeat.mjs", "/": PLAYGROUND / "index.html"} | {
    f"/playground/{path.name}": path for path in sorted(PLAYGROUND.iterdir())
}
UNDO = {None: bytes, "gzip": gzip.decompress, "br": brotli.decompress}


@pytest.fixture(scope="module")
async def s() -> AsyncIterator[Stack]:
    async with stack(1, wait=False) as running:
        yield running


async def ask(s: Stack, path: str, accepted: str | None, **headers: str) -> tuple[aiohttp.ClientResponse, bytes]:
    """The answer, and its body as it came over the wire."""
    said = headers | ({} if accepted is None else {"Accept-Encoding": accepted})
    async with (
        aiohttp.ClientSession(auto_decompress=False, skip_auto_headers=["Accept-Encoding"]) as client,
        client.get(s.url + path, headers=said) as answer,
    ):
        return answer, await answer.read()


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip, deflate, br, zstd", "br"),
        ("gzip, deflate", "gzip"),
        ("br;q=0.1, gzip", "gzip"),
        ("identity", None),
        (None, None),
        ("", None),
    ],
)
async def test_every_file_comes_as_the_browser_accepts_it(
    s: Stack, path: str, accepted: str | None, encoding: str | None
) -> None:
    content = FILES[path].read_bytes()
    answer, wire = await ask(s, path, accepted)
    assert answer.status == 200 and answer.headers.get("Content-Encoding") == encoding
    assert UNDO[encoding](wire) == content and int(answer.headers["Content-Length"]) == len(wire)
    assert encoding is None or len(wire) < len(content)
    assert answer.headers["Vary"] == "Accept-Encoding", "a cache between keeps them apart"


@pytest.mark.parametrize("path", ["/upbeat.js", "/", "/playground/playground.css"])
async def test_each_encoding_has_a_tag_of_its_own_and_is_not_sent_again(s: Stack, path: str) -> None:
    tags = {}
    for accepted in ("br", "gzip", "identity"):
        answer, _ = await ask(s, path, accepted)
        tags[accepted] = answer.headers["ETag"]
    assert len(set(tags.values())) == 3
    for accepted, tag in tags.items():
        for known in (tag, f"W/{tag}", f'"old", {tag}', "*"):
            again, wire = await ask(s, path, accepted, **{"If-None-Match": known})
            assert (again.status, wire, again.headers["ETag"]) == (304, b"", tag)
            assert again.headers["Vary"] == "Accept-Encoding"
        others = ", ".join(other for name, other in tags.items() if name != accepted)
        fresh, wire = await ask(s, path, accepted, **{"If-None-Match": others})
        assert fresh.status == 200 and wire


async def test_the_figures_of_the_documents_are_what_goes_over_the_wire(s: Stack) -> None:
    _, wire = await ask(s, "/upbeat.js", "gzip, deflate, br, zstd")
    assert json.loads((DIST / "sri.json").read_text())["upbeat.js"]["brotli_bytes"] == len(wire)
    for document in ("README.md", "docs/web-sdk.md"):
        said = re.search(r"([\d,]+) bytes over the wire", (ROOT / document).read_text())
        assert said is not None and int(said[1].replace(",", "")) == len(wire), document
    _, zipped = await ask(s, "/upbeat.js", "gzip")
    said = re.search(r"less than ([\d,]+) with gzip", (ROOT / "docs" / "web-sdk.md").read_text())
    assert said is not None and len(zipped) < int(said[1].replace(",", "")) <= len(zipped) * 1.05
    assert zlib.decompress(zipped, 31) == (DIST / "upbeat.js").read_bytes()


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("", "identity"),
        ("*", "br"),
        ("*;q=0", "identity"),
        ("br;q=0, *", "gzip"),
        ("BR", "br"),
        ("x-gzip", "gzip"),
        ("gzip;q=0.5, br;q=0.5", "br"),
        ("gzip;q=1.0, br;q=0.999", "gzip"),
        ("identity, br;q=0.5", "identity"),
        ("identity;q=0.5, br;q=0.5", "br"),
        ("identity;q=0, deflate", "identity"),
        ("br;q=nonsense, gzip", "gzip"),
        ("br;q=-1", "identity"),
        ("br;level=3", "br"),
        (",;,;q=1,br ; q = 1", "br"),
        ("br;q=²", "identity"),
    ],
)
def test_an_encoding_is_chosen_by_its_weight(accepted: str, chosen: str) -> None:
    assert choose(accepted, ("br", "gzip")) == chosen


def test_what_is_not_available_is_not_chosen() -> None:
    assert choose("br, gzip", ("gzip",)) == "gzip" and choose("br", ()) == "identity"


def test_tags_are_compared_whole() -> None:
    assert is_known('"a", W/"b"', '"b"') and not is_known('"ab"', '"b"') and not is_known("", '"b"')
