"""The nearest name, and the message about a missing package."""

import importlib.metadata
import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from packaging.requirements import Requirement

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.errors import DataError, nearest, needs_extra, printable, redact
from bert_cli.parse.load import field_paths

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "bert_cli").rglob("*.py"))
CALL = re.compile(r"(?:needs_extra|install_command)\(['\"]([\w-]+)['\"]\)")


def test_the_nearest_name_is_suggested_only_if_it_is_similar():
    for name, meant in {
        "--precison": "precision",
        "replicas": "global_batch.replicas",
        "batch-size": "global_batch.micro_batch_size",
        "max_sequence_length": "max_seq_length",
        "weight_decay": "optimizer_opts.weight_decay_rate",
        "Keep_Last_Checkpoints": "keep_checkpoints",
        "sede": "seed",
        "output_folder": None,
        "use_cls_layer": None,
        "-": None,
    }.items():
        assert nearest(name, ["+", "O", *field_paths(PretrainSettings)]) == meant, name


def test_a_message_names_the_pinned_packages_of_an_extra_or_how_to_install_it(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {extra for path in FILES for extra in CALL.findall(path.read_text())}
    assert len(extras) >= 3
    for extra in extras:
        listed = (pin.partition(";")[0] for pin in project["optional-dependencies"][extra])
        # A range is written in the order of the metadata: <6,>=5.
        pins = " ".join(sorted(f"'{Requirement(pin)}'" for pin in listed))
        assert needs_extra(extra) == f"needs the extra '{extra}'; pip install {pins}"

    def absent(name: str):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    command = needs_extra("cuda").partition("; ")[2]
    assert f"`{command}`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_message_shows_a_password_or_a_token_of_an_address():
    for text, shown in {
        "http://user:secret@host:80/a (b)": "http://***@host:80/a (b)",
        "s3://KEY:se/cret@bucket": "s3://KEY:se/cret@bucket",
        "https://host/a?token=secret&b=secret: fails": "https://host/a?*** fails",
        "mirror 'https://token@host/', which": "mirror 'https://***@host/', which",
        "user@host:/folder; did you mean a?": "user@host:/folder; did you mean a?",
    }.items():
        assert redact(text) == shown == redact(shown)
        assert str(DataError(text, text, text)) == f"{shown}: {shown}; {shown}"


def test_the_name_of_a_folder_sends_nothing_to_the_terminal():
    name = "runs/\x1b[31mred\x07\x9b\u202e\udcffé 日本"
    assert printable(name) == r"runs/\x1b[31mred\x07\x9b\u202e\udcffé 日本"
