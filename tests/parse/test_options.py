"""The options of commands: their description, the help, and what the words of a command line mean."""

from typing import Any

import pytest
from pydantic import BaseModel

from bert_cli.commands import COMMANDS
from bert_cli.parse.help import help_text
from bert_cli.parse.load import field_paths, leaves
from bert_cli.parse.options import options_of, parse_words


def settings_of(name: str) -> type[BaseModel]:
    return COMMANDS[name].settings_class()


def options(name: str) -> dict[str, Any]:
    return {option.name: option for option in options_of(settings_of(name))}


# Settings without a flag, which only a file or the command itself sets.
HIDDEN = {
    "bert_config.hidden_act",
    "bert_config.classifier_activation",
    "bert_config.position_embedding_type",
    "command",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_setting_is_an_option_and_every_option_is_read(name):
    settings, described = settings_of(name), options(name)
    paths = set(field_paths(settings)) - HIDDEN
    groups = {path.rpartition(".")[0] for path in paths} - {"dataset_dir"}
    in_lists = {path for path in paths if path.startswith("dataset_dir.")}
    assert set(described) - {"config"} == paths - groups - in_lists
    flags = [option for option in described.values() if option.flags]
    words = [f"{one.flags[0]}={'1' if one.takes else 'true'}" for one in flags]
    parsed = dict(leaves(parse_words(settings, words, "bert")))
    expected = {one.name: (["1"] if one.is_list else "1") if one.takes else True for one in flags}
    assert parsed == expected


def test_help_has_usage_headings_general_options_and_examples(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for name, parts in (
        ("preprocess", ("usage: bert preprocess [options] INPUT OUT\n", "options of bert preprocess:",
                        "\nExecution:", "--log-level", "\nexamples:\n  bert pre")),
        ("doctor pretrain", ("options of bert doctor pretrain:", "options of bert pretrain:",
                             "Settings of every training run")),
        ("ner", ("--engine {tensorflow,jax}",)),
        ("pretrain", ("Settings of every training run", "\noptimizer-opts", "\nmasking")),
    ):  # fmt: skip
        text = help_text(settings_of(name), name, is_complete=True)
        assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
        assert "SUPPRESS" not in text
        assert max(map(len, text.partition("examples:")[0].splitlines())) <= 100


def test_help_of_a_run_lists_the_usual_settings_and_names_the_flag_that_lists_all(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name, shown, hidden in (
        ("pretrain", ["--config", "--dataset-dir", "--optimizer-opts.learning-rate.max"], "--scaling"),
        ("glue", ["--glue-task TASK", "tnews", "--num-epochs"], "--cache-dir"),
        ("plan squad", ["--devices", "--parallel.layout", "usual settings of a run"], "--wandb"),
    ):  # fmt: skip
        text = help_text(settings_of(name), name)
        complete = help_text(settings_of(name), name, is_complete=True)
        assert all(part in text for part in shown) and hidden not in text and hidden in complete
        assert "--help-all" in text and len(text.splitlines()) < 90
        assert max(map(len, text.splitlines() + complete.splitlines())) <= 80, name
    assert help_text(settings_of("predict"), "predict").count("--help-all") == 0


def test_the_help_has_no_default_for_a_value_that_follows_from_others():
    texts = {name: option.describe() for name, option in options("tokenize").items()}
    assert texts["mask_tokens"].endswith("rounded up.")
    assert "(default: 0.15)" in texts["masked_lm_prob"]
