"""The gateway with a certificate of its own: clients that shake hands, badly, slowly, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from gateway_fakes import MODEL, stack, until

from contracts.errors import ConfigError
from gateway.https import https_context
from gateway.metrics import HANDSHAKES

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


def certificate(directory: Path) -> Path:
    """A directory with a new certificate of `localhost` that signs itself."""
    directory.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
    made = made.not_valid_after(now + datetime.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "tls.key").write_bytes(pem)
    (directory / "tls.crt").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return directory


@pytest.fixture
async def s(tmp_path: Path) -> Any:
    options = {"https": str(certificate(tmp_path / "https")), "max_connections": 8, "header_s": 0.5}
    async with stack(nodes=1, wait=False, **options) as running:
        yield running


def trusting(s: Any) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(s.config.gateway.https / "tls.crt"))


def url(s: Any) -> str:
    return f"https://localhost:{s.config.gateway.port}"


async def ready(s: Any) -> aiohttp.ClientSession:
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting(s)))

    async def answers() -> bool:
        async with http.get(f"{url(s)}/ready") as r:
            return r.status == 200

    try:
        await until(answers)
    except BaseException:
        await http.close()
        raise
    return http


async def failed() -> float:
    return HANDSHAKES._value.get()


async def test_clients_that_verify_it_are_answered_on_one_connection(s: Any) -> None:
    async with await ready(s) as http:
        for stream in (False, True, False):
            async with http.post(f"{url(s)}/v1/chat/completions", json={**BODY, "stream": stream}) as r:
                assert r.status == 200 and await r.read()


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_read(s: Any) -> None:
    async with await ready(s):
        pass
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusting(s).wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await asyncio.open_connection("localhost", s.config.gateway.port)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await reader.read(65_536))
    tls.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    writer.write(outgoing.read())  # the last message of the handshake and the request, at once
    answer = b""
    while b"\r\n\r\n" not in answer:
        incoming.write(await asyncio.wait_for(reader.read(65_536), 10))
        with contextlib.suppress(ssl.SSLWantReadError):
            while more := tls.read():
                answer += more
    assert answer.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_who_does_not_shake_hands_is_counted_cut_and_frees_its_place(s: Any) -> None:
    async with await ready(s):
        pass
    before = await failed()
    silent = [await asyncio.open_connection("localhost", s.config.gateway.port) for _ in range(3)]
    plain = await asyncio.open_connection("localhost", s.config.gateway.port)
    plain[1].write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for reader, _ in [*silent, plain]:
        with contextlib.suppress(ConnectionError):
            assert not (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP"), "cut within header_s"
    assert await failed() == before + 4
    for _, writer in [*silent, plain]:
        writer.close()
    for _ in range(3):  # places are free again
        async with await ready(s) as http, http.post(f"{url(s)}/v1/chat/completions", json=BODY) as r:
            assert r.status == 200


async def test_a_client_that_goes_away_before_it_is_served_frees_its_place(s: Any) -> None:
    async with await ready(s):
        pass
    for _ in range(30):
        _, writer = await asyncio.open_connection(
            "localhost", s.config.gateway.port, ssl=trusting(s), server_hostname="localhost"
        )
        writer.transport.abort()
    async with await ready(s):
        pass


async def test_more_connections_than_allowed_are_ended(s: Any) -> None:
    async with await ready(s):
        pass
    opened = []
    with contextlib.suppress(OSError):
        for _ in range(9):
            opened.append(
                await asyncio.open_connection(
                    "localhost", s.config.gateway.port, ssl=trusting(s), server_hostname="localhost"
                )
            )
    assert 0 < len(opened) < 9
    for _, writer in opened:
        writer.transport.abort()


async def test_a_new_certificate_is_shown_without_a_restart(s: Any) -> None:
    async with await ready(s):
        pass
    old = trusting(s)
    certificate(s.config.gateway.https)

    async def shown() -> bool:
        try:
            async with await ready(s):
                return True
        except aiohttp.ClientError:
            return False

    await until(shown)
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection("localhost", s.config.gateway.port, ssl=old, server_hostname="localhost")


async def test_files_that_do_not_fit_leave_the_former_ones_in_use(s: Any, tmp_path: Path) -> None:
    async with await ready(s):
        pass
    old = trusting(s)
    other = certificate(tmp_path / "other")
    (s.config.gateway.https / "tls.key").write_bytes((other / "tls.key").read_bytes())
    await asyncio.sleep(1.1)
    _, writer = await asyncio.open_connection("localhost", s.config.gateway.port, ssl=old, server_hostname="localhost")
    writer.close()


@pytest.mark.parametrize("without", ["tls.crt", "tls.key"])
def test_missing_files_stop_the_start(tmp_path: Path, without: str) -> None:
    (certificate(tmp_path / "https") / without).unlink()
    with pytest.raises(ConfigError, match=r"gateway\.https = .*tls\.crt \(the whole chain\) and tls\.key"):
        https_context(tmp_path / "https")
