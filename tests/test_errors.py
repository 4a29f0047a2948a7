"""The nearest name, and the message about a missing package."""

import importlib.metadata
import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from bert_cli.config.load import field_paths
from bert_cli.config.training import PretrainSettings
from bert_cli.errors import nearest, needs_extra

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "bert_cli").rglob("*.py"))
NAMED = sorted(
    set(
        re.findall(
            r"(?:needs_extra|install_command)\(['\"]([\w-]+)['\"]\)",
            "".join(path.read_text() for path in FILES),
        )
    )
)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("precison", "precision"),
        ("--precison", "precision"),
        ("replicas", "global_batch.replicas"),
        ("batch-size", "global_batch.micro_batch_size"),
        ("max_sequence_length", "max_seq_length"),
        ("weight_decay", "optimizer_opts.weight_decay_rate"),
        ("Keep_Last_Checkpoints", "keep_checkpoints"),
        ("wandb_name", "wandb.name"),
        ("output_dir", None),
        ("use_cls_layer", None),
        ("total_num_train_steps", "total_num_train_samples"),
        ("save_dir", None),
        ("-", None),
        ("!", None),
    ],
)
def test_the_nearest_name_is_suggested_only_if_it_is_similar(name, meant):
    assert nearest(name, ["+", "O", *field_paths(PretrainSettings)]) == meant


@pytest.mark.parametrize("extra", NAMED)
def test_a_message_names_the_pinned_packages_of_an_extra(extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = " ".join(f"'{pin}'" for pin in sorted(project["optional-dependencies"][extra]))
    assert needs_extra(extra) == f"needs the extra '{extra}'; pip install {pins}"


def test_an_extra_is_installed_from_the_checkout_where_the_tool_itself_is_not(monkeypatch):
    def absent(name: str):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    command = needs_extra("cuda").partition("; ")[2]
    assert f"`{command}`" in (ROOT / "README.md").read_text(encoding="utf-8")
