"""The recipe of docs/many-models.md: its file is a configuration that this version takes, and its shape is as said."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.config_file import load_config
from runtime.registered_model import RegisteredModel

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "many-models.md").read_text()


def test_the_recipes_file_names_the_models_that_its_command_makes(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml file=many.yaml\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    file = tmp_path / "many.yaml"
    file.write_text(text)
    config = load_config(file)
    (made,) = re.findall(r"for n in ([\d ]+); do \S+ -m loadtest\.random_model .* --out (\S+)\$n;", DOCUMENT)
    assert {str(model.path) for model in config.models.values()} == {
        str(Path(f"{made[1]}{n}").absolute()) for n in made[0].split()
    }
    assert config.sharing == "prism", "the default"


def test_every_key_of_a_model_is_in_the_table_and_no_other() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", DOCUMENT.split("| `models.NAME.` | |")[1], re.MULTILINE)
    named = {key for row in rows for key in re.findall(r"\w+", row)}
    assert named == set(RegisteredModel.model_fields)
