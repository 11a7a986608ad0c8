"""The directory of the requested model, checked before anything starts: a path, or a hub id, which is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

from contracts.errors import ConfigError
from runtime.elsewhere import without_weights
from runtime.model_config import load_config
from runtime.model_names import HubId, hub_id

_REMEDY = "give a Hugging Face directory with config.json, tokenizer.json and *.safetensors"
#: Of a safetensors file; its library has the same limit.
_MOST_HEADER_BYTES = 100_000_000


def named(text: str, revision: str | None = None) -> str:
    """`text` with the revision of `--revision`. Raises ConfigError when `text` has another one, or is a path."""
    if revision is None:
        return text
    model = hub_id(text) or hub_id(f"{text}@main")
    if model is None or Path(text).exists():
        raise ConfigError(f"--revision {revision}: --model {text} is no hub id but a path; leave --revision out")
    if "@" in text and model.revision != revision:
        raise ConfigError(f"--revision {revision}: --model {text} says another one; give one of them")
    if hub_id(f"{model.repo}@{revision}") is None:
        raise ConfigError(f"--revision {revision} is no branch, tag or commit; give one such as main")
    return f"{model.repo}@{revision}"


def model_directory(text: str, flag: str) -> Path:
    """The absolute directory of a model that can be served; a hub id is downloaded. flag: its name in errors.

    Raises ConfigError with the remedy.
    """
    model = hub_id(text)
    if model is not None:
        from runtime.hub import directory_of

        return directory_of(model, flag).absolute()
    path = Path(text).expanduser().absolute()
    check_directory(path, flag)
    return path


def check_directory(path: Path, flag: str) -> None:
    """Raises ConfigError when `path` is no directory of a model that can be served."""
    if path.is_file() and path.suffix == ".gguf":
        raise ConfigError(f"{flag} {path}: {without_weights([path.name])}")
    if not path.is_dir():
        raise ConfigError(
            f"{flag} {path}: no such directory; {_REMEDY}, or a hub id such as Qwen/Qwen3-0.6B{_or_the_hub(path)}"
        )
    names = [entry.name for entry in path.iterdir()]
    has_weights = any(name.endswith(".safetensors") for name in names)
    why = "" if has_weights and "config.json" in names else without_weights(names)
    if "config.json" not in names:
        raise ConfigError(f"{flag} {path}: it has no config.json; {why or _REMEDY}")
    try:
        load_config(path)
    except ConfigError as e:
        raise ConfigError(f"{flag} {path}: {str(e).removeprefix(f'{path}/')}") from None
    if not has_weights:
        raise ConfigError(f"{flag} {path}: it has no *.safetensors weights; {why or _REMEDY}")
    if "tokenizer.json" not in names:
        raise ConfigError(f"{flag} {path}: it has no tokenizer.json; {_REMEDY}")


def check_foreign_directory(path: Path, flag: str) -> None:
    """Raises ConfigError when `path` is no directory of a model for another engine, which knows itself what it runs."""
    if not path.is_dir():
        raise ConfigError(
            f"{flag} {path}: no such directory; give a Hugging Face directory, or a hub id such as Qwen/Qwen3-0.6B"
            f"{_or_the_hub(path)}"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"{flag} {path}: it has no config.json; give a Hugging Face directory")


def weight_bytes(directory: Path) -> int:
    """Bytes of the safetensors files in `directory`."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def floating_bytes(directory: Path) -> int:
    """Bytes of the tensors in `directory` that have a floating type of 16 bits or more, by the files' headers. Raises
    ConfigError."""
    found = 0
    for file in directory.glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                if length > _MOST_HEADER_BYTES:
                    raise ValueError("its header is too long")
                tensors = json.loads(opened.read(length))
            for name, tensor in tensors.items():
                if name != "__metadata__" and tensor["dtype"] in ("F16", "BF16", "F32"):
                    begin, end = tensor["data_offsets"]
                    found += end - begin
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as e:
            raise ConfigError(f"{file} is not a readable safetensors file: {e}; download it again") from None
    return found


def _or_the_hub(path: Path) -> str:
    """A suggestion, if the path could also be meant as a hub id."""
    model: HubId | None = hub_id(f"{path.parent.name}/{path.name}@main")
    beside = model is not None and path.parent.is_dir() and path.parent.parent == Path.cwd()
    return f" ({model} if {path.parent.name} is an owner on the hub)" if beside and model else ""
