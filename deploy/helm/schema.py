"""Writes the schema of the chart's values, and their table in docs/kubernetes.md.

    .venv/bin/python deploy/helm/schema.py

schema.yaml has the chart's own values. `models` and `config` are the services' configuration (runtime/config.py)
without what the chart sets itself, so a misspelt setting is refused before anything is installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from runtime.config import Config

HERE = Path(__file__).resolve().parent
SCHEMA, VALUES = HERE / "upbeat" / "values.schema.json", HERE / "upbeat" / "values.yaml"
PAGE = HERE.parent.parent / "docs" / "kubernetes.md"
BEGIN, END = "<!-- values: written by deploy/helm/schema.py -->\n", "<!-- end of values -->\n"
#: What the chart sets, by section; the empty section: the top.
OWNED: dict[str, set[str]] = {
    "": {
        "model",
        "model_name",
        "models",
        "data",
        "run_dir",
        "shm_dir",
        "log_mib",
        "log_files",
        "nodes",
        "tls",
        "finetune",
    },
    "GatewaySection": {"host", "port", "https", "processes", "api_keys", "token_secret"},
    "SchedulerSection": {"host", "port", "count", "addresses", "listen_host"},
    "KvSection": {"dram_gib", "hbm_gib", "blob_url", "blob_options", "failpoints"},
    "WorkerSection": {"images_gib", "failpoints"},
    "AutoscaleSection": {"min_nodes", "max_nodes"},
    "VllmSection": {"python", "server", "api_key_env", "api_key"},
    "RegisteredModel": {"nodes"},
}
_SAID_ELSEWHERE = ("title", "default", "format", "description")


def schema() -> dict[str, Any]:
    """The whole schema."""
    made: dict[str, Any] = yaml.safe_load((HERE / "schema.yaml").read_text())
    parts = {name: made["$defs"].pop(name)["properties"] for name in ("placement", "pooled")}
    _mix_in(made, parts)
    config = _bare(Config.model_json_schema())
    definitions = config.pop("$defs")
    for name, keys in OWNED.items():
        part = definitions[name] if name else config
        for key in keys:
            del part["properties"][key]
    kept = {
        name: part
        for name, part in definitions.items()
        if name not in ("NodesSection", "TlsSection", "FinetuneSection")
    }
    made["$defs"] |= kept
    config["description"] = "Further settings of the services, as in their YAML (docs/operating.md, docs/gateway.md)."
    made["properties"]["config"] = config | {"additionalProperties": False}
    made["properties"]["models"] = {
        "type": "object",
        "description": "Models by their names in the API, as in the services' YAML, without nodes. Empty: the demo "
        "model.",
        "patternProperties": {"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$": {"$ref": "#/$defs/RegisteredModel"}},
        "additionalProperties": False,
    }
    return made


def _mix_in(part: Any, parts: dict[str, dict[str, Any]]) -> None:
    """Replaces `mixin` by the properties of these parts, everywhere below `part`."""
    for below in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _mix_in(below, parts)
    if isinstance(part, dict) and isinstance(named := part.get("mixin"), str | list):
        without = part.pop("without", [])
        del part["mixin"]
        for name in [named] if isinstance(named, str) else named:
            part["properties"] |= {key: each for key, each in parts[name].items() if key not in without}


def _bare(part: Any) -> Any:
    """`part` without titles, defaults and formats; names of properties stay."""
    if isinstance(part, list):
        return [_bare(each) for each in part]
    if not isinstance(part, dict):
        return part
    named = ("properties", "patternProperties", "$defs")
    return {
        key: {name: _bare(each) for name, each in value.items()} if key in named else _bare(value)
        for key, value in part.items()
        if key not in _SAID_ELSEWHERE
    }


def rows(made: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, default as in values.yaml, meaning: of every value that stands for itself."""
    yield from _rows(made, made["properties"], yaml.safe_load(VALUES.read_text()), "")


def _rows(made: dict[str, Any], properties: dict[str, Any], values: Any, before: str) -> Iterator[tuple[str, str, str]]:
    for key, part in properties.items():
        target = made["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        inner, default = target.get("properties"), values.get(key) if isinstance(values, dict) else None
        if key == "global" or (default is None and key not in ("config", "models")):
            continue
        opened = inner and key not in ("config", "resources")
        if not opened or (part.get("description") and "$ref" not in part):
            shown = "" if opened else f"`{json.dumps(default)}`"
            yield before + key, shown, part.get("description", "")
        if opened:
            yield from _rows(made, inner, default, f"{before}{key}.")


def table(made: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [f"| `{key}` | {default} | {meaning} |" for key, default, meaning in rows(made)]
    return "\n".join(["| value | default | |", "| --- | --- | --- |", *lines]) + "\n"


def with_table(page: str, made: dict[str, Any]) -> str:
    """The page with a new table."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n" + table(made) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    """Entry point."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    made = schema()
    SCHEMA.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), made))


if __name__ == "__main__":
    main()
