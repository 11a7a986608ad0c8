"""`/v1/files`: the official client, and uploads that are hostile: in name, form, size and pace."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import unicodedata
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from finetune_harness import DATA, KEYS, Tuning, tuning
from gateway_fakes import until
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import uploads as limits
from gateway.core.uploads import Pace, shown_name
from gateway.finetune import files as module
from gateway.finetune.files import Files

MIB = 1 << 20


@pytest.fixture
async def t(tmp_path: Path, free_ports: Callable[[int], int]) -> AsyncIterator[Tuning]:
    async with tuning(tmp_path, free_ports, file_mib=1.0, files_gib=4 / 1024) as running:
        yield running


async def post(t: Tuning, body: bytes, kind: str = "multipart/form-data; boundary=XX", **more: str) -> tuple[int, Any]:
    said = {"Authorization": f"Bearer {KEYS['a']}", "Content-Type": kind} | more
    async with t.http.post(f"{t.url}/v1/files", data=body, headers=said) as r:
        return r.status, (await r.json())["error"]


def part(name: str, content: bytes, more: str = "", filename: str = "") -> bytes:
    named = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
    return f"--XX\r\nContent-Disposition: {named}\r\n{more}\r\n".encode() + content + b"\r\n"


FILE, PURPOSE, END = part("file", DATA, filename="d.jsonl"), part("purpose", b"fine-tune"), b"--XX--\r\n"


async def test_a_file_is_uploaded_listed_read_and_deleted(t: Tuning) -> None:
    made = await t.a.files.create(file=("train.jsonl", DATA), purpose="fine-tune")
    assert (made.bytes, made.filename, made.purpose, made.object) == (len(DATA), "train.jsonl", "fine-tune", "file")
    assert (await t.a.files.retrieve(made.id)) == made
    content = await t.a.files.content(made.id)
    assert content.content == DATA and content.response.headers["X-Content-Type-Options"] == "nosniff"
    assert content.response.headers["Content-Disposition"] == "attachment"
    assert [f.id async for f in t.a.files.list()] == [made.id]
    assert not (await t.a.files.list(purpose="batch")).data
    assert (await t.a.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError) as error:
        await t.a.files.retrieve(made.id)
    assert error.value.code == "file_not_found" and not t.kept()


async def test_lists_come_page_by_page_in_either_order(t: Tuning) -> None:
    made = [await t.file(name=f"{n}") for n in range(5)]
    assert [f.id async for f in t.a.files.list(limit=2)] == made[::-1]
    assert [f.id async for f in t.a.files.list(limit=2, order="asc")] == made
    for wrong in ({"limit": 0}, {"order": "up"}, {"after": "file-x"}):
        with pytest.raises(openai.BadRequestError):
            await t.a.files.list(**wrong)  # type: ignore[arg-type]


async def test_the_order_of_a_forms_fields_does_not_matter(t: Tuning) -> None:
    for body in (FILE + PURPOSE + END, PURPOSE + FILE + END):
        said = {"Authorization": f"Bearer {KEYS['a']}", "Content-Type": "multipart/form-data; boundary=XX"}
        async with t.http.post(f"{t.url}/v1/files", data=body, headers=said) as r:
            assert r.status == 200 and (await r.json())["bytes"] == len(DATA)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (PURPOSE + END, "file"),
        (FILE + END, "purpose"),
        (FILE + part("purpose", b"batch") + END, "purpose"),
        (FILE + part("purpose", b"x" * 5000) + END, "purpose"),
        (FILE + PURPOSE + PURPOSE + END, "purpose"),
        (FILE + FILE + PURPOSE + END, "file"),
        (FILE + PURPOSE + part("expires_after[anchor]", b"created_at") + END, "expires_after"),
        (FILE + PURPOSE + part("path", b"/etc/passwd") + END, "path"),
        (part("file", b"") + PURPOSE + END, "file"),
        (END, "file"),
        (b"", None),
        (b"no form", None),
        (FILE + PURPOSE, None),
        (FILE[:-20], None),
        (b"--XX\r\n" + b"A: b\r\n" * 5000 + b"\r\n", None),
        (b"--XX\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", None),
        (part("file", b"eA==", "Content-Transfer-Encoding: base64\r\n") + PURPOSE + END, None),
        (part("file", b"x", "Content-Encoding: gzip\r\n") + PURPOSE + END, None),
        (part("file", b"--YY--", "Content-Type: multipart/mixed; boundary=YY\r\n") + PURPOSE + END, None),
        (b"--XX\r\n\r\nnameless\r\n" + END, None),
        (part("a", b"") * 50 + END, "a"),
    ],
)
async def test_a_form_that_is_wrong_is_refused_and_leaves_nothing(t: Tuning, body: bytes, param: str | None) -> None:
    status, error = await post(t, body)
    assert status in (400, 413) and error["message"], error
    assert param is None or error["param"] == param, error
    assert not t.kept()


async def test_other_types_of_bodies_are_refused(t: Tuning) -> None:
    assert (await post(t, b"{}", "application/json"))[0] == 415
    assert (await post(t, FILE, "multipart/form-data"))[0] == 400
    assert (await post(t, FILE, "multipart/form-data; boundary=" + "x" * 200))[0] == 400
    status, error = await post(t, FILE + PURPOSE + END, **{"Content-Encoding": "gzip"})
    assert (status, error["param"]) == (400, "Content-Encoding")


async def test_a_file_that_is_too_large_is_refused_however_it_is_sent(t: Tuning) -> None:
    large = part("file", b"x" * (MIB + 1), filename="l") + PURPOSE + END
    assert (await post(t, large))[0] == 413

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(large), 64 << 10):
            yield large[at : at + (64 << 10)]

    said = {"Authorization": f"Bearer {KEYS['a']}", "Content-Type": "multipart/form-data; boundary=XX"}
    async with t.http.post(f"{t.url}/v1/files", data=pieces(), headers=said) as r:
        assert r.status == 413

    status, error = await post(t, b"nothing of a form\r\n" * 100)
    assert status == 400 and "begin with its boundary" in error["message"], "the rest is not read"

    async def preamble() -> AsyncIterator[bytes]:
        for _ in range(3000):
            yield b"nothing of a form\r\n" * 100

    try:
        async with t.http.post(f"{t.url}/v1/files", data=preamble(), headers=said) as r:
            assert r.status in (400, 413)
    except aiohttp.ClientError:
        pass  # the connection may be closed before all is sent
    assert not t.kept()


async def test_a_tenants_files_have_a_limit_together_and_anothers_do_not_count(t: Tuning) -> None:
    for _ in range(4):
        await t.file(b"x" * (MIB - 1000))
    with pytest.raises(openai.BadRequestError) as error:
        await t.file(b"x" * (MIB - 1000))
    assert error.value.code == "storage_quota_exceeded" and "delete files" in error.value.message
    await t.file(b"x" * 1000, client=t.b)
    first = (await t.a.files.list()).data[-1]
    await t.a.files.delete(first.id)
    await t.file(b"x" * (MIB - 1000))


async def test_the_name_that_a_client_gives_is_never_a_path(t: Tuning) -> None:
    names = [
        "../../../etc/cron.d/x",
        "/etc/passwd",
        "..",
        "a\0b",
        "C:\\x\\y.jsonl",
        "x" * 5000,
        "\u202egnp.x",
        "é.jsonl",
    ]
    for name in names:
        made = await t.a.files.create(file=(name, DATA), purpose="fine-tune")
        assert "/" not in made.filename and "\0" not in made.filename and 0 < len(made.filename) <= 255
        assert "\u202e" not in made.filename
    assert all(path.startswith("files/a/file-") for path in t.kept()) and len(t.kept()) == 2 * len(names)


@pytest.mark.parametrize(
    "file_id", ["..", "%2e%2e%2fsecret", "file-" + "0" * 31, "file-" + "g" * 32, "%00", "x" * 3000, "%ff", "\ud800"]
)
async def test_an_id_that_was_not_drawn_here_is_unknown(t: Tuning, file_id: str) -> None:
    said = {"Authorization": f"Bearer {KEYS['a']}"}
    for method, tail in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        path = file_id.encode("utf-8", "surrogatepass").decode("latin-1")
        async with t.http.request(method, f"{t.url}/v1/files/{path}{tail}", headers=said) as r:
            assert r.status in (400, 404, 405), await r.text()


async def test_an_upload_that_rests_is_given_up_and_leaves_nothing(t: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REST_S", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(t.url.rpartition(":")[2]))
    head = [
        "POST /v1/files HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {KEYS['a']}",
        "Content-Type: multipart/form-data; boundary=XX",
        "Content-Length: 100000",
        "",
        "",
    ]
    writer.write("\r\n".join(head).encode() + FILE[:200])
    async with asyncio.timeout(20):
        assert b"408" in await reader.readline()
    writer.close()
    assert not t.kept()


async def test_a_client_that_leaves_in_between_leaves_nothing(t: Tuning) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(t.url.rpartition(":")[2]))
    writer.write(
        f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEYS['a']}\r\n"
        "Content-Type: multipart/form-data; boundary=XX\r\nContent-Length: 500000\r\n\r\n".encode()
        + FILE[:200]
        + b"x" * 100_000
    )
    await writer.drain()
    await until(lambda: bool(t.kept()))
    writer.close()
    await until(lambda: not t.kept())


async def test_a_tenant_has_so_many_uploads_at_a_time_and_others_have_theirs(t: Tuning) -> None:
    writers = []
    for _ in range(4):
        _, writer = await asyncio.open_connection("127.0.0.1", int(t.url.rpartition(":")[2]))
        writer.write(
            f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEYS['a']}\r\n"
            "Content-Type: multipart/form-data; boundary=XX\r\nContent-Length: 500000\r\n\r\n".encode()
        )
        writers.append(writer)
    async with asyncio.timeout(20):
        while True:
            status, error = await post(t, FILE + PURPOSE + END) if await _full(t) else (0, None)
            if status:
                break
    assert (status, error["code"]) == (503, "overloaded")
    await t.file(client=t.b)
    for writer in writers:
        writer.close()


async def _full(t: Tuning) -> bool:
    await asyncio.sleep(0.01)
    assert t.gateway.parts is not None
    return t.gateway.parts.fine_tuning.uploads._shares.held == 4


async def test_routes_need_a_key(t: Tuning) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/fine_tuning/jobs")):
        async with t.http.request(method, t.url + path) as r:
            assert r.status == 401


# ---- parts ---------------------------------------------------------------------------------------------------------
@given(st.text(max_size=600))
def test_any_name_can_be_shown(name: str) -> None:
    shown = shown_name(name)
    assert 0 < len(shown) <= 255 and not {"/", "\\"} & set(shown)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
    shown.encode()


def test_an_upload_must_keep_its_pace() -> None:
    pace = Pace(0.0)
    assert pace.due_s(0.0) == limits.REST_S
    assert pace.due_s(1000.0) == limits.BEGIN_S, "nothing has come"
    pace.bytes_ = limits.LEAST_BYTES_PER_S * 1000
    assert pace.due_s(1000.0) == 1000.0 + limits.REST_S


def test_what_a_killed_process_left_goes_when_it_is_old_and_files_stay(tmp_path: Path) -> None:
    files = Files(tmp_path, MIB, 0.0)
    _, left = files.begin("t")
    left.write(b"half")
    left.close()
    file_id, content = files.begin("t")
    content.write(b"whole")
    info = files.commit("t", file_id, content, "n", "fine-tune")
    folder = tmp_path / "files" / "t"
    assert len(list(folder.iterdir())) == 3
    for path in folder.iterdir():
        os.utime(path, (time.time() - 10_000,) * 2)
    _, new = files.begin("t")
    new.close()
    assert files.listed("t") == [info] and len(list(folder.glob("*.part"))) == 1


def test_results_are_kept_once_however_many_ask(tmp_path: Path) -> None:
    files, source = Files(tmp_path, MIB, 0.0), tmp_path / "adapter_model.safetensors"
    source.write_bytes(b"weights")
    first = files.keep_results("t", "ftjob-1", {"adapter_model.safetensors": source, "m.csv": b"step\n"})
    again = files.keep_results("t", "ftjob-1", {"adapter_model.safetensors": source, "m.csv": b"step\n"})
    assert first == again == files.results("t", "ftjob-1") and len(files.listed("t")) == 2
    source.unlink()
    assert files.content("t", first[0]).read_bytes() == b"weights"


def test_a_tenants_directory_is_its_own_whatever_its_name(tmp_path: Path) -> None:
    files = Files(tmp_path, MIB, 0.0)
    for tenant in (".", "..", ".a", "a"):
        file_id, content = files.begin(tenant)
        content.write(b"x")
        files.commit(tenant, file_id, content, "n", "fine-tune")
        assert [i.id for i in files.listed(tenant)] == [file_id] and files.used(tenant) > 0
    assert {path.parent.parent.name for path in tmp_path.rglob("*.bin")} == {"files"}


def put(files: Files, name: str, content: bytes = b"x") -> str:
    """A new file of tenant t."""
    file_id, to = files.begin("t")
    to.write(content)
    return files.commit("t", file_id, to, name, "fine-tune").id


def test_a_list_reads_a_file_once_and_sees_what_another_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, other, read = Files(tmp_path, MIB, 0.0), Files(tmp_path, MIB, 0.0), list[Path]()
    found = module._read
    monkeypatch.setattr(module, "_read", lambda path: read.append(path) or found(path))  # type: ignore[func-returns-value]
    made = [put(files, f"{n}") for n in range(20)]
    for _ in range(5):
        assert {info.id for info in files.listed("t")} == set(made)
    assert len(read) == 20
    more = put(other, "more")
    other.delete("t", made[0])
    assert {info.id for info in files.listed("t")} == {more, *made[1:]}


def test_room_is_found_without_a_look_at_each_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, other, looked = Files(tmp_path, MIB, 0.0), Files(tmp_path, MIB, 0.0), list[str]()
    size = module._size
    monkeypatch.setattr(module, "_size", lambda entry: looked.append(entry.name) or size(entry))  # type: ignore[func-returns-value]
    made = [put(files, f"{n}", b"x" * 1000) for n in range(20)]
    before = files.used("t")
    looked.clear()
    _, part = other.begin("t")
    for length in (1000, 5000):
        part.write(b"y" * (length - part.tell()))
        part.flush()
        assert files.used("t") == before + length, "what arrives is counted as it is"
    assert len(looked) == 2 and all(name.endswith(".part") for name in looked)
    other.delete("t", made[0])
    assert 1000 < before + 5000 - files.used("t") < 1500
    part.close()


async def test_one_tenants_lists_wait_for_each_other_and_delay_anothers_by_a_turn(
    t: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, listed, begun = threading.Event(), Files.listed, list[str]()

    def slow(self: Files, tenant: str) -> Any:
        begun.append(tenant)
        go.wait(10)
        return listed(self, tenant)

    monkeypatch.setattr(Files, "listed", slow)
    asks = [asyncio.ensure_future(t.a.files.list()) for _ in range(10)]
    await until(lambda: t.gateway.parts.fine_tuning.turns._refusable.total() == 10)
    asks.append(asyncio.ensure_future(t.b.files.list()))
    await until(lambda: t.gateway.parts.fine_tuning.turns._refusable.total() == 11)
    assert len(begun) == 1
    go.set()
    await asyncio.gather(*asks)
    assert len(begun) == 11 and len(set(begun[:3])) == 2
