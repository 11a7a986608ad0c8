"""The certificate that commands show to a fleet."""

from __future__ import annotations

import os
from pathlib import Path

from contracts.errors import ConfigError
from contracts.identity import OPERATOR
from runtime.config_file import said_config
from runtime.own_certificate import place_of
from storelink.credentials import Credentials

#: The setting `tls.directory`, for commands that read no configuration.
DIRECTORY = "UPBEAT__TLS__DIRECTORY"


def operator(directory: Path | None = None) -> Credentials | None:
    """That of `directory`, by default the one in the environment, else the one that `upbeat up` makes in the default
    data directory; None: there is none. Raises ConfigError."""
    named = directory or Path(os.environ.get(DIRECTORY) or said_config().own_certificates)
    try:
        return Credentials(place_of(named, OPERATOR))
    except OSError as e:
        if directory is None and not os.environ.get(DIRECTORY):
            return None
        raise ConfigError(f"tls.directory = {named}: no certificate of an operator: {e}") from e
