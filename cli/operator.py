"""The certificate that commands show to a fleet."""

from __future__ import annotations

import os
from pathlib import Path

from contracts.errors import ConfigError
from contracts.identity import OPERATOR
from runtime.own_certificate import place_of
from storelink.credentials import Credentials

#: The setting `tls.directory`, for commands that read no configuration.
DIRECTORY = "UPBEAT__TLS__DIRECTORY"


def operator() -> Credentials | None:
    """That of the directory in the environment; None: it names none. Raises ConfigError."""
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return None
    try:
        return Credentials(place_of(Path(directory), OPERATOR))
    except OSError as e:
        raise ConfigError(f"{DIRECTORY} = {directory!r}: no certificate of an operator: {e}") from e
