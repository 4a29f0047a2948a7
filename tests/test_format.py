"""Files of another version of the tool: refused by their format, whatever else they have."""

import json
from pathlib import Path

import pytest

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.io.manifest import read_manifest
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.workers.runner import recorded_settings
from bert_cli.errors import ConfigError
from bert_cli.files import FORMAT, verify_checkpoint, with_checksum
from bert_cli.parse.load import load_file
from bert_cli.train.checkpoint import Saved, read_settings
from bert_cli.train.history import Run

READERS = [
    ("settings.json", lambda folder: load_file(PretrainSettings, folder / "settings.json")),
    ("settings.json", lambda folder: Run(folder).settings),
    ("state.json", read_settings),
    ("state.json", lambda folder: Saved(folder).state),
    ("state.json", verify_checkpoint),
    ("corpus.json", read_corpus),
    ("manifest.json", read_manifest),
    (".done/settings.json", lambda folder: recorded_settings(folder, "tokenize")),
]  # an index: tests/data/search


@pytest.mark.parametrize("number", [FORMAT + 1, FORMAT - 1, None])
@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_file_of_another_format_is_refused_by_its_name(name, read, number, tmp_path):
    values = {"step": "tokenize"} if number is None else {"format": number}
    path: Path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(with_checksum(values)))
    found = "no format" if number is None else f"format {number}"
    with pytest.raises(ConfigError) as error:
        read(tmp_path)
    assert str(error.value) == (
        f"{path} ({found}): was made by another version of bert; make it again"
    )


def test_the_settings_of_another_version_are_refused_as_a_config(tmp_path, bert):
    path = tmp_path / "settings.json"
    for values in (with_checksum({"seed": 1}), {"format": 2, "seed": 1}):
        path.write_text(json.dumps(values))
        error = bert("pretrain", "--config", path, code=2).err
        assert f"{path} (" in error and "was made by another version of bert" in error
