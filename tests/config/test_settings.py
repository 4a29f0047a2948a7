"""What settings write into files, and the settings of a measurement."""

import json
from pathlib import Path

import pytest
from support.orders import order
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


def test_a_manifest_records_the_marked_settings():
    values = {"input": "a", "out": "b", "vocab": "c", "processes": 7, "nsp": False}
    manifest = recorded(TokenizeSettings.model_validate(values))
    assert manifest["masking"] == "static" and manifest["random_seed"] == 12345
    assert manifest["nsp"] is False and manifest["cased"] is False
    assert not {"input", "out", "vocab", "processes", "executor"} & {*manifest}


WHERE = {"dump", "input", "folder", "out", "processes", "executor", "scheduler"}
NOT_MARKED = {
    "download": set(),
    # Written into the manifest by their content or their result.
    "extract": {"keep_damaged", "templates", "with_program"},
    "preprocess": {"language", "sentence_splitter", "strict"},
    "vocab": {"extend", "split_chinese", "strip_accents"},
    "tokenize": {"vocab"},
    "index": {"check"},
}


@pytest.mark.parametrize("command", NOT_MARKED)
def test_a_setting_of_a_data_step_is_recorded_unless_it_changes_no_byte(command):
    kind = COMMANDS[command].settings_class()
    assert {*kind.model_fields} - marked(kind, RECORDED) - WHERE == NOT_MARKED[command]


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
