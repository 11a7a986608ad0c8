"""What the connector is told in `kv_connector_extra_config`, and which vLLM it runs in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.ids import DEFAULT_TENANT
from storelink import credentials

#: Minor versions that the connector was tested with.
VERSIONS = ("0.32", "0.33")
_KEYS = {"store", "secret", "model", "device", "tenant", "digest", "cache", "wake", "warm_up", "tls", "node"}
_ADDRESS = re.compile(r"[^\s:/]+:[0-9]{1,5}")


class Refused(ValueError):
    """The connector cannot work as it is configured; the message says what to do."""


@dataclass(frozen=True)
class Settings:
    """store: host:port of this node's store. secret: file of the cluster secret, the same on every node. model: its
    name in Upbeat. device: this server's number on the node. digest: of the weights, in hex, where it should not be
    computed from files. wake: socket of the node's sidecar, which makes an idle engine step; None: there is none.
    warm_up: sessions' tokens are kept with them, so that the sidecar can bring hinted ones into vLLM's own cache. tls,
    node: directory of this node's certificate, and its name; None and empty: the store asks for none."""

    store: str
    secret: Path
    model: str
    device: int = 0
    tenant: str = DEFAULT_TENANT
    digest: str = ""
    cache: Path = Path.home() / ".cache" / "upbeat"
    wake: Path | None = None
    warm_up: bool = False
    tls: Path | None = None
    node: str = ""

    @classmethod
    def read(cls, said: Mapping[str, Any], model: str) -> Settings:
        """From the extra configuration. Raises Refused naming the key."""
        unknown = set(said) - _KEYS
        if unknown:
            raise Refused(
                f"kv_connector_extra_config.{sorted(unknown)[0]} is unknown; `upbeat vllm-config` prints what works"
            )
        store, secret = said.get("store"), said.get("secret")
        if not isinstance(store, str) or not _ADDRESS.fullmatch(store):
            raise Refused(
                "kv_connector_extra_config.store must be host:port of this node's store, such as 127.0.0.1:8100"
            )
        if not isinstance(secret, str):
            raise Refused("kv_connector_extra_config.secret must name the file of the cluster secret (DATA/secret)")
        device = said.get("device", 0)
        if isinstance(device, bool) or not isinstance(device, int) or device < 0:
            raise Refused("kv_connector_extra_config.device must be the server's number on its node, from 0")
        digest = str(said.get("digest", ""))
        if digest and not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise Refused("kv_connector_extra_config.digest must be 64 hexadecimal digits, or left out")
        cache = Path(str(said["cache"])) if said.get("cache") else cls.cache
        wake = said.get("wake")
        if wake is not None and not (isinstance(wake, str) and wake.startswith("/")):
            raise Refused("kv_connector_extra_config.wake must be the path of the sidecar's socket, or left out")
        warm_up = said.get("warm_up", False)
        if not isinstance(warm_up, bool):
            raise Refused("kv_connector_extra_config.warm_up must be true or false")
        tls, node = said.get("tls"), said.get("node", "")
        if (tls is None) != (node == "") or not isinstance(tls, str | None) or not isinstance(node, str):
            raise Refused(
                "kv_connector_extra_config.tls and .node go together: the directory of this node's certificate, and "
                "its name, such as node-0"
            )
        return cls(
            store,
            Path(secret),
            str(said.get("model") or model),
            device,
            str(said.get("tenant") or DEFAULT_TENANT),
            digest,
            cache,
            Path(wake) if wake else None,
            warm_up,
            Path(tls) if tls else None,
            node,
        )

    def use_certificate(self) -> None:
        """The process calls its store with the node's certificate from now on. Raises Refused."""
        if self.tls is None:
            return
        try:
            credentials.use(self.tls)
        except OSError as e:
            raise Refused(f"kv_connector_extra_config.tls = {str(self.tls)!r} holds no certificate: {e}") from e

    def read_secret(self) -> bytes:
        """The cluster secret, 32 bytes. Raises Refused when the file does not hold one."""
        try:
            secret = bytes.fromhex(self.secret.read_text().strip())
        except (OSError, ValueError) as e:
            raise Refused(f"kv_connector_extra_config.secret = {str(self.secret)!r} is not readable: {e}") from e
        if len(secret) != 32:
            raise Refused(f"kv_connector_extra_config.secret = {str(self.secret)!r} must hold 64 hexadecimal digits")
        return secret


def check_version(version: str) -> None:
    """Raises Refused for a vLLM that this connector was not tested with."""
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise Refused(
            f"upbeat-vllm works with vLLM {' and '.join(VERSIONS)}, this is {version}: install one of those or a newer "
            "upbeat-vllm"
        )
