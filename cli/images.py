"""Images of weights in `shm_dir`, from which models that share a device are activated, and layers that lend memory are
copied: the memory that they take."""

from __future__ import annotations

from cli import machine
from cli.settings import weights_gib
from runtime import weight_images
from runtime.adopted_models import with_adopted
from runtime.config import Config
from runtime.registry import models_of, registered, weights_stay
from runtime.sections import GIB
from runtime.vllm_checks import vllm_models


def images_bytes(config: Config) -> int:
    """Most bytes that images take on this machine, those of adopted models included; 0 where no weights come and go and
    no layers are lent. Weights that are not on this machine yet count nothing. Raises ConfigError when `shm_dir` does
    not exist."""
    config = with_adopted(config)
    if weights_stay(config):
        return 0
    shared = {tuple(models_of(config, n)) for n in config.nodes.numbers}
    if config.worker.remap == "off":
        shared = {names for names in shared if len(names) > 1}
    theirs = set(vllm_models(config))
    shared = {names for names in shared if not theirs & set(names)}
    paths = {name: registered(config)[name].path for names in shared for name in names}
    weights = sum(weights_gib(config, name, path) for name, path in paths.items() if path.is_dir())
    return int(min(weights * GIB, _limit_bytes(config, len(shared))))


def _limit_bytes(config: Config, lists: int) -> float:
    """What the workers allow themselves; those of one list of models share their images. lists: number of them."""
    if config.worker.images_gib is not None:
        return config.worker.images_gib * GIB * lists
    arenas, free = machine.shared_memory_bytes(config)
    rest = max(free + left_bytes(config) - arenas, 0)
    return rest / 2 if lists == 1 else rest


def left_bytes(config: Config) -> int:
    """Bytes of images that are there already: workers open them again, or delete them."""
    found = 0
    for path in config.shm_dir.glob(f"{weight_images.PREFIX}*"):
        try:
            found += path.stat().st_size
        except OSError:  # deleted meanwhile
            continue
    return found
