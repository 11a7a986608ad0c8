"""`upbeat certs`: what it makes, keeps and renews."""

from __future__ import annotations

import shutil
import ssl
import stat
import time
from pathlib import Path

import pytest
from cryptography import x509

from cli import doctor
from cli.authority import Authority
from contracts.errors import ConfigError
from contracts.identity import SCHEDULER, node
from runtime import telemetry
from runtime.config_file import load_config
from runtime.own_certificate import use_certificate
from storelink import credentials
from tests.cli.upbeat_here import upbeat


def test_init_makes_what_is_missing_and_keeps_the_rest(tmp_path: Path) -> None:
    place = tmp_path / "certs"
    first = upbeat("certs", "init", str(place), "--nodes", "1")
    assert first.returncode == 0 and all(
        name in first.stdout for name in ("gateway", "scheduler", "operator", "node-0")
    )
    before = {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in before)
    second = upbeat("certs", "init", str(place), "--nodes", "2")
    assert second.stdout.count("valid until") == 1 and "node-1" in second.stdout
    assert all(file.read_bytes() == content for file, content in before.items())
    assert "nothing was missing" in upbeat("certs", "init", str(place), "--nodes", "2").stdout
    for name in ("gateway", "node-1"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(place / name / "tls.crt", place / name / "tls.key")


def test_what_expires_soon_is_renewed(tmp_path: Path) -> None:
    place = tmp_path / "certs"
    authority = Authority(place)
    authority.issue(node("node-0"), 1)
    authority.issue(node("node-1"), 300)
    said = upbeat("certs", "renew", str(place))
    assert "node-0" in said.stdout and "node-1" not in said.stdout
    assert "none expires soon" in upbeat("certs", "renew", str(place)).stdout
    assert "node-1" in upbeat("certs", "renew", str(place), "--all").stdout


def test_a_node_gets_another_certificate(tmp_path: Path) -> None:
    place = tmp_path / "certs"
    upbeat("certs", "init", str(place), "--nodes", "1")
    before = (place / "node-0" / "tls.crt").read_bytes()
    assert upbeat("certs", "node", str(place), "node-0", "--days", "2").returncode == 0
    after = x509.load_pem_x509_certificate((place / "node-0" / "tls.crt").read_bytes())
    assert before != (place / "node-0" / "tls.crt").read_bytes()
    assert (after.not_valid_after_utc - after.not_valid_before_utc).days == 2


@pytest.mark.parametrize("name", ["node", "node-", "node-01", "../x", "gateway", ""])
def test_a_node_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    said = upbeat("certs", "node", str(tmp_path / "certs"), name)
    assert said.returncode == 2 and "NODE" in said.stderr and not (tmp_path / "certs").exists()


def test_half_an_authority_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "certs"
    upbeat("certs", "init", str(place), "--nodes", "1")
    (place / "ca" / "ca.key").unlink()
    said = upbeat("certs", "renew", str(place), "--all")
    assert said.returncode == 2 and "ca.key is missing" in said.stderr


def test_the_doctor_finds_those_that_are_missing_expire_or_are_anothers(tmp_path: Path) -> None:
    place = tmp_path / "certs"
    upbeat("certs", "init", str(place), "--nodes", "2")
    upbeat("certs", "node", str(place), "node-0", "--days", "3")
    shutil.copytree(place / "gateway", place / "node-1", dirs_exist_ok=True)
    (place / "scheduler" / "tls.crt").unlink()
    config = load_config(None, {"tls": {"directory": str(place)}, "nodes": {"count": 2}})
    found = list(doctor._certificates(config))
    assert [finding.level for finding in found] == ["ok", "fail", "warn", "fail"]
    assert "scheduler" in found[1].detail and "certs" in found[1].remedy
    assert "node-0" in found[2].detail and "renew" in found[2].remedy
    assert "of gateway, and this is node-1" in found[3].detail
    (own,) = doctor._certificates(load_config(None, {}))
    assert own.level == "ok" and "`upbeat up` makes them" in own.detail
    assert not list(doctor._certificates(load_config(None, {"tls": {"automatic": False}})))


def test_a_process_does_not_start_with_a_wrong_certificate(tmp_path: Path) -> None:
    place = tmp_path / "certs"
    upbeat("certs", "init", str(place), "--nodes", "1")
    config = load_config(None, {"tls": {"directory": str(place)}})
    (place / "node-0" / "tls.key").write_bytes((place / "gateway" / "tls.key").read_bytes())
    for who, why in ((node("node-0"), "do not fit"), (node("node-7"), "no certificate of node-7")):
        with pytest.raises(ConfigError, match=why):
            use_certificate(config, who)
    one = load_config(None, {"tls": {"directory": str(place / "gateway")}})
    with pytest.raises(ConfigError, match="of gateway, and this is scheduler"):
        use_certificate(one, SCHEDULER)


def test_metrics_say_when_it_expires_and_outlive_its_file(tmp_path: Path) -> None:
    upbeat("certs", "init", str(tmp_path), "--nodes", "1")
    try:
        use_certificate(load_config(None, {"tls": {"directory": str(tmp_path)}}), node("node-0"))
        assert telemetry.samples()["upbeat_certificate_expires_timestamp_seconds"] > time.time()
        (tmp_path / "node-0" / "tls.crt").unlink()
        assert telemetry.samples()["upbeat_certificate_expires_timestamp_seconds"] == 0
    finally:
        credentials.use(None)
