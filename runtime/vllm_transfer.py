"""How the connector in a vLLM server finds its node's store: the value of `--kv-transfer-config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contracts import identity
from contracts.errors import ConfigError
from runtime.config import Config
from runtime.own_certificate import place_of
from runtime.vllm_checks import check_codecs


def transfer_config(config: Config, node: int, device: int, wake: Path) -> dict[str, Any]:
    """The value for a device's server. wake: see `runtime.vllm_places`. Raises ConfigError for a node that is not
    configured, or a codec that does not know vLLM's KV."""
    if not 0 <= node < config.nodes.count:
        raise ConfigError(
            f"--node {node}: there is no such node; give a number from 0 to {config.nodes.count - 1}, or raise --nodes "
            "(nodes.count)"
        )
    check_codecs(config, "a vLLM server")
    return {
        "kv_connector": "UpbeatConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "upbeat_vllm.connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": _certificate(config, node)
        | {
            "store": config.node(node).store_address,
            "secret": str(config.data / "secret"),
            "device": device,
            "wake": str(wake),
            "warm_up": config.vllm.warm_up,
        },
    }


def _certificate(config: Config, node: int) -> dict[str, str]:
    """What the connector needs to call a store that asks for a certificate."""
    if config.tls.directory is None:
        return {}
    who = identity.node(config.node(node).name)
    return {"node": who.name, "tls": str(place_of(config.tls.directory, who))}
