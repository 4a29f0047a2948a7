"""The options of commands: their description, the help, and what the words of a command line mean."""

from typing import Any

import pytest
from pydantic import BaseModel

from bert_cli.commands import COMMANDS
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
