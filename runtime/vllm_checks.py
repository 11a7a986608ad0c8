"""Checks of a configuration with vLLM servers: what a server shares a device with, its arguments, and what of the store
fits its KV."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.errors import ConfigError
from runtime.config import Config
from runtime.registry import models_of, registered

#: Every backend of vLLM takes blocks of a multiple of so many tokens; a block is a chunk.
BLOCK_TOKENS = 16
#: Arguments that the node's sidecar relies on, by what sets them instead.
_TAKEN = {
    "--model": "models.NAME.path",
    "--served-model-name": "the model's name in models",
    "--uds": "run_dir",
    "--host": "run_dir",
    "--port": "run_dir",
    "--api-key": "nothing: it has a key of its own",
    "--root-path": "nothing",
    "--ssl-keyfile": "nothing: it listens on a socket of this user",
    "--ssl-certfile": "nothing: it listens on a socket of this user",
    "--disable-fastapi-docs": "nothing: its routes are read from /openapi.json",
    "--headless": "nothing",
    "--grpc": "nothing",
    "--block-size": "kv.chunk_tokens",
}


def vllm_models(config: Config) -> list[str]:
    """The models that run in vLLM servers."""
    return [name for name, model in registered(config).items() if model.engine == "vllm"]


def vllm_nodes(config: Config) -> list[int]:
    """The nodes whose devices each have a vLLM server."""
    theirs = set(vllm_models(config))
    return [number for number in config.nodes.numbers if theirs & set(models_of(config, number))]


def model_of(config: Config, number: int) -> str:
    """The model of node `number`'s vLLM servers. Raises ConfigError when it has none."""
    if number not in config.nodes.numbers:
        raise ConfigError(
            f"--node {number}: the configuration has {config.nodes.count} nodes; give a smaller number, or raise "
            "nodes.count"
        )
    names = [name for name in models_of(config, number) if name in vllm_models(config)]
    if not names:
        raise ConfigError(
            f"--node {number}: none of its models ({', '.join(models_of(config, number))}) runs in vLLM; set "
            "models.NAME.engine: vllm, or give another node"
        )
    return names[0]


def check_vllm(config: Config) -> None:
    """Raises ConfigError for the first problem."""
    _check_arguments("vllm.args", config.vllm.args)
    for name, model in config.models.items():
        key = f"models.{name}.vllm_args"
        if model.vllm_args and model.engine != "vllm":
            raise ConfigError(
                f"{key} = {model.vllm_args}: its engine is {model.engine}; set models.{name}.engine: vllm"
            )
        _check_arguments(key, model.vllm_args)
    names = vllm_models(config)
    if not names:
        return
    for number in config.nodes.numbers:
        there = models_of(config, number)
        both = [name for name in there if name in names]
        if both and len(there) > 1:
            other = next(name for name in there if name != both[0])
            raise ConfigError(
                f"node {number} serves {' and '.join(there)}: a model whose engine is vllm has its devices for itself; "
                f"give each its own nodes (nodes.count: 2 or more), such as models.{both[0]}.nodes: [0] and "
                f"models.{other}.nodes: [1]"
            )
    if config.kv.cache and config.kv.chunk_tokens % BLOCK_TOKENS:
        raise ConfigError(
            f"kv.chunk_tokens = {config.kv.chunk_tokens}: {names[0]} runs in vLLM, whose blocks are multiples of "
            f"{BLOCK_TOKENS} tokens; give one, such as 64"
        )
    if config.kv.cache:
        check_codecs(config, names[0])


def check_codecs(config: Config, who: str) -> None:
    """Raises ConfigError for a codec of a slow tier that would misread KV as vLLM lays it out. who: has such KV."""
    for key in ("ssd_codec", "blob_codec"):
        codec = getattr(config.kv, key)
        if codec != "raw":
            raise ConfigError(
                f"kv.{key} = {codec!r}: it encodes K and V as Upbeat's engine orders them, and {who} has them in "
                f"vLLM's order; set kv.{key}: raw"
            )


def _check_arguments(key: str, arguments: Sequence[str]) -> None:
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in _TAKEN:
            raise ConfigError(f"{key} = [..., {argument!r}, ...]: {flag} is set by {_TAKEN[flag]}; remove it")
