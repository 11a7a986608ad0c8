"""`upbeat vllm-config`: what a vLLM server is started with so that it uses a node's store."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.options import Json, whole_option
from cli.printing import print_json
from cli.settings import Flags, layout
from runtime.config import Config


def vllm_config(
    node: Annotated[int, whole_option("The node whose store it uses.")] = 0,
    device: Annotated[int, whole_option("Its number among the node's engines.")] = 0,
    data: Annotated[Path | None, typer.Option(help="As for `upbeat up`.")] = None,
    config: Annotated[Path | None, typer.Option(help="As for `upbeat up`.")] = None,
    as_json: Json = False,
) -> None:
    """Print the flags with which `vllm serve MODEL` uses Upbeat's store (the package upbeat-vllm must be installed)."""
    found = transfer_config(layout(Flags(data=data, config=config)), node, device)
    if as_json:
        print_json(found)
    else:
        print(shlex.join(["--kv-transfer-config", json.dumps(found)]))


def transfer_config(config: Config, node: int, device: int) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config`. Raises BadParameter for a node that is not configured."""
    if not 0 <= node < config.nodes.count:
        raise typer.BadParameter(
            f"there is no node {node}; give a number from 0 to {config.nodes.count - 1}", param_hint="--node"
        )
    return {
        "kv_connector": "UpbeatConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "upbeat_vllm.connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store": config.node(node).store_address,
            "secret": str(config.data / "secret"),
            "device": device,
        },
    }
