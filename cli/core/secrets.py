"""What of the launcher's environment reaches its services: no secrets. Those that a service needs are in a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_SECRET = re.compile(
    r"(^|.*_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY(_ID)?|ACCOUNT_KEY|PRIVATE_KEY|SECRET_KEY"
    r"|CLIENT_SECRET|CONNECTION_STRING|SERVICE_ACCOUNT_KEY|SAS_TOKEN)",
    re.IGNORECASE,
)
#: Scheme of `kv.blob_url` -> prefix of the variables that its client reads.
_CLIENTS = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "abfs": "AZURE_", "abfss": "AZURE_"}
#: Hugging Face's names of its token, and of a file with it.
_HUB_TOKENS, HUB_TOKEN_PATH = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), "HF_TOKEN_PATH"


def is_secret(name: str, value: str, is_file: Callable[[str], bool]) -> bool:
    """Whether a variable holds a secret, by its name. The path of a file is none."""
    return bool(value) and _SECRET.fullmatch(name) is not None and not (value.startswith("/") and is_file(value))


def passed_on(environment: Mapping[str, str], is_file: Callable[[str], bool]) -> dict[str, str]:
    """The variables that any service may have."""
    return {name: value for name, value in environment.items() if not is_secret(name, value, is_file)}


def blob_options(url: str, said: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """`kv.blob_options` with the credentials that the environment has for such a URL. Those that are `said` win."""
    prefix = _CLIENTS.get(url.partition(":")[0].lower())
    if prefix is None:
        return dict(said)
    known = {name.lower().removeprefix(prefix.lower()) for name in said}
    found = {
        name.lower(): value
        for name, value in environment.items()
        if name.startswith(prefix) and is_secret(name, value, lambda _: False)
    }
    if "access_key_id" in known or "secret_access_key" in known:  # a session's token belongs to the environment's key
        return dict(said)
    return {name: value for name, value in found.items() if name.removeprefix(prefix.lower()) not in known} | dict(said)


def hub_token(environment: Mapping[str, str]) -> str:
    """Hugging Face's token; empty: none."""
    return next((environment[name] for name in _HUB_TOKENS if environment.get(name)), "")
