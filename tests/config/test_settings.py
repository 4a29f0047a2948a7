"""What settings write into files, and the settings of a measurement."""

import json
from pathlib import Path

import pytest
from support.orders import order, refusal
from support.settings import RUN

from bert_cli.commands import COMMANDS
from bert_cli.config.data import TokenizeSettings
from bert_cli.planning.layout import propose
from bert_cli.settings.markers import RECORDED, marked, recorded
from bert_cli.settings.settings import Settings


def test_a_run_writes_the_settings_of_its_architecture_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dumps = []
    for architecture in ("bert", "groupbert"):
        config = {"architecture": architecture, "num_hidden_layers": 2}
        settings, _ = order("pretrain", RUN | {"bert_config": config})
        assert settings.model_dump(exclude_unset=True)["bert_config"] == config
        dumps.append(settings.model_dump(mode="json")["bert_config"])
    plain, grouped = dumps
    assert grouped.keys() - plain.keys() == {"conv_kernel_size", "conv_group_size", "ffn_groups"}


def test_a_chosen_layout_keeps_the_other_settings_of_a_measurement():
    given, _ = order("bench pretrain --config bench_tiny_128 --json x.json")
    chosen = propose(given, 1, 10**11, 1)
    assert str(chosen.json_file) == "x.json" and chosen.generated_dataset


def test_a_path_is_utf_8():
    text = refusal("pretrain --save-ckpt-path runs/\udcff")
    assert "save_ckpt_path (--save-ckpt-path): 'runs/\\udcff' is not UTF-8; rename it" in text


def test_a_manifest_records_the_marked_settings():
    values = {"input": "a", "out": "b", "vocab": "c", "processes": 7, "nsp": False}
    manifest = recorded(TokenizeSettings.model_validate(values))
    assert manifest["masking"] == "static" and manifest["random_seed"] == 12345
    assert manifest["nsp"] is False and manifest["cased"] is False
    assert not {"input", "out", "vocab", "processes", "executor"} & {*manifest}


WITHOUT_EFFECT = {
    "dump", "input", "folder", "out", "processes", "executor", "scheduler", "keep_damaged", "strict", "check",
}  # fmt: skip
"""They change no byte of the output, or are in the manifest as the files that were read."""
BY_THE_STEP = {
    "download": set(),
    "extract": {"templates", "with_program"},
    "preprocess": {"language", "sentence_splitter"},
    "vocab": {"extend", "split_chinese", "strip_accents"},
    "tokenize": {"vocab"},
    "index": set(),
}
"""The step adds them to its manifest itself, such as the checksum of a file."""


@pytest.mark.parametrize("command", BY_THE_STEP)
def test_a_data_step_records_every_setting_that_changes_its_output(command):
    kind = COMMANDS[command].settings_class()
    assert {*kind.model_fields} - marked(kind, RECORDED) - WITHOUT_EFFECT == BY_THE_STEP[command]


def test_numbers_switches_and_texts_of_all_settings_have_their_defaults():
    """A changed default changes every run that does not set it: the changelog calls it Breaking."""
    for command in COMMANDS.values():
        if command.module:
            command.settings_class()
    kinds = [Settings]
    found = {}
    for kind in kinds:
        kinds += kind.__subclasses__()
        fields = kind.model_fields.items() if kind.__module__.startswith("bert_cli.") else ()
        own = {name: field.default for name, field in fields if name in kind.__annotations__}
        values = {n: v for n, v in own.items() if isinstance(v, bool | int | float | str)}
        if values and not kind.__module__.startswith("bert_cli.tasks."):  # of requests to a server
            found[kind.__name__] = values
    assert found == json.loads(Path(__file__).with_name("defaults.json").read_text())
