"""The nearest name, and the message about a missing package."""

import importlib.metadata
import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from packaging.requirements import Requirement

from bert_cli.config.load import field_paths
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.errors import nearest, needs_extra

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
        "output_dir": None,
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
