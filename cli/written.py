"""What a launcher writes for its services: one configuration without secrets, and a file of secrets for each program
that needs some. All are for this user only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from cli.core.secrets import blob_options, hub_token
from contracts.errors import ConfigError
from runtime.config import Config
from runtime.config_file import dump_config
from runtime.secret_settings import public, secrets_of


def configuration_file(config: Config) -> Path:
    """The configuration of all services."""
    return config.run_dir / "config.yaml"


def secrets_file(config: Config, program: str) -> Path:
    """The secrets of a program; there may be none."""
    return config.run_dir / "secrets" / f"{program}.yaml"


def hub_token_file(config: Config) -> Path:
    """Hugging Face's token, for vLLM servers; there may be none."""
    return config.run_dir / "secrets" / "hub_token"


def write_configuration(config: Config, programs: Iterable[str], environment: Mapping[str, str]) -> None:
    """Write the files of these programs, and remove those of earlier runs. environment: the launcher's, from whose
    secrets those of the services are completed. Raises ConfigError."""
    known = _with_environment(config, environment)
    directory = secrets_file(config, "").parent
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
        for old in directory.iterdir():
            old.unlink()
        for program in sorted(set(programs)):
            if found := secrets_of(program, known):
                _write(secrets_file(config, program), yaml.safe_dump(found))
        if token := hub_token(environment):
            _write(hub_token_file(config), token)
        configuration_file(config).unlink(missing_ok=True)
        _write(configuration_file(config), dump_config(public(config)))
    except OSError as e:
        raise ConfigError(f"--run-dir {config.run_dir} cannot be written ({e}); give another one") from e


def _with_environment(config: Config, environment: Mapping[str, str]) -> Config:
    options = blob_options(config.kv.blob_url, config.kv.blob_options, environment)
    key = config.vllm.api_key or environment.get(config.vllm.api_key_env, "")
    kv, vllm = config.kv.model_copy(update={"blob_options": options}), config.vllm.model_copy(update={"api_key": key})
    return config.model_copy(update={"kv": kv, "vllm": vllm})


def _write(file: Path, text: str) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
        f.write(text)
