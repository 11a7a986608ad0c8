"""`upbeat vllm-config`: what a vLLM server is started with so that it uses a node's store."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from cli.options import Json, whole_option
from cli.own_certificates import joined_certificates
from cli.printing import print_json
from cli.settings import Flags, join_run_dir, layout
from runtime.vllm_places import vllm_places
from runtime.vllm_transfer import transfer_config


def vllm_config(
    node: Annotated[int, whole_option("The node whose store it uses.")] = 0,
    device: Annotated[int, whole_option("Its number among the node's engines.")] = 0,
    nodes: Annotated[int | None, whole_option("As for `upbeat up`.")] = None,
    port: Annotated[int | None, whole_option("As for `upbeat up` or `upbeat join`.")] = None,
    data: Annotated[Path | None, typer.Option(help="As for `upbeat up`.")] = None,
    config: Annotated[Path | None, typer.Option(help="As for `upbeat up`.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="As for `upbeat join`.")] = None,
    as_json: Json = False,
) -> None:
    """Print the flags with which `vllm serve MODEL` uses Upbeat's store (the package upbeat-vllm must be installed)."""
    flags = Flags(nodes=nodes, port=port, data=data, config=config, run_dir=join_run_dir(config, run_dir, node))
    found = joined_certificates(layout(flags), node)
    transfer = transfer_config(found, node, device, vllm_places(found, node, device).wake)
    if as_json:
        print_json(transfer)
    else:
        line = ["--block-size", str(found.kv.chunk_tokens), "--scheduling-policy", "priority"]
        print(shlex.join([*line, "--kv-transfer-config", json.dumps(transfer)]))
