"""What people and shells are told of a command is what its command line takes."""

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field
from pydantic_settings import BaseSettings, CliSettingsSource

from bert_cli.commands import COMMANDS
from bert_cli.config.data import PreprocessSettings
from bert_cli.config.finetune import GlueSettings
from bert_cli.config.options import examples_of, purpose_of, sections_of
from bert_cli.config.settings import Settings
from bert_cli.config.tools import DoctorSettings
from bert_cli.config.training import PretrainSettings


def settings_of(name: str) -> type[Settings]:
    return COMMANDS[name].settings_class()


def told(settings: type[Settings], name: str) -> dict[str, Any]:
    return {
        option.name: option for section in sections_of(settings, name) for option in section.options
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_that_is_read_is_told_and_every_flag_that_is_told_is_read(name):
    settings = settings_of(name)
    described = type("Described", (settings, BaseSettings), {})
    parser = CliSettingsSource(
        described, cli_kebab_case=True, cli_implicit_flags=True, cli_hide_none_type=True,
        cli_avoid_json=True, cli_enforce_required=False, cli_exit_on_error=False,
    ).root_parser  # fmt: skip
    # The flag's name of before is read too, and not told.
    hidden = {"--splitter"}
    read = {
        flag
        for action in parser._actions
        if action.help != "==SUPPRESS=="
        for flag in action.option_strings
    }
    shown = {flag for option in told(settings, name).values() for flag in option.flags}
    assert shown - {"--config"} == read - {"-h", "--help"} - hidden
    places = [action.metavar for action in parser._actions if not action.option_strings]
    assert [option.takes for option in told(settings, name).values() if not option.flags] == places


def test_a_commands_own_options_come_before_those_that_it_shares():
    titles = [section.title for section in sections_of(PretrainSettings, "pretrain")]
    assert titles[:2] == ["options of bert pretrain", "What every run that trains has"]
    assert titles.index("masking") < titles.index("optimizer-opts")
    first = sections_of(PretrainSettings, "pretrain")[0]
    assert [option.name for option in first.options][:2] == ["config", "dataset_dir"]


def test_a_command_that_takes_all_of_anothers_says_whose_they_are():
    titles = [section.title for section in sections_of(DoctorSettings, "doctor")]
    assert titles[:2] == ["options of bert doctor", "options of bert pretrain"]


def test_what_stands_by_its_place_comes_first():
    first = sections_of(PreprocessSettings, "preprocess")[0]
    assert [option.takes for option in first.options] == ["INPUT", "OUT"]
    assert all(option.is_path and option.is_required for option in first.options)


def test_the_default_of_a_group_is_the_commands_and_not_the_classes():
    own = told(GlueSettings, "glue")
    assert own["global_batch.micro_batch_size"].text.endswith("(default: 32)")
    assert own["optimizer_opts.learning_rate.max_learning_rate"].text.endswith("(default: 2e-05)")
    pretrain = told(PretrainSettings, "pretrain")
    assert pretrain["global_batch.micro_batch_size"].text.endswith("(required)")


def test_what_a_group_demands_is_required_only_where_the_group_is():
    own = told(PretrainSettings, "pretrain")
    assert "required" not in own["about.what"].text
    assert own["optimizer_opts.name"].is_required


class Odd(Settings):
    """A command with options of every kind.

    It has two lines of purpose.
    Example: bert odd --size 3
    --rate 0.5
    Example: bert odd
    """

    size: int = 3
    """A number."""
    rate: float | Literal["auto"] = "auto"
    """A number or a word."""
    on: bool = True
    """A switch."""
    files: list[Path] = Field([])
    """Several paths."""
    nothing: str | None = None
    """No default to tell."""
    json_file: Path | None = Field(None, alias="json")
    """Another name than the field's."""
    kind: Literal["a", "b"] = "a"
    """A choice."""


def test_an_option_says_what_it_takes_and_what_it_is_without():
    own = told(Odd, "odd")
    assert own["size"].takes == "INT" and own["size"].text == "A number. (default: 3)"
    assert own["rate"].takes == "NUMBER|auto"
    assert own["on"].flags == ("--on", "--no-on") and own["on"].text.endswith("(default: yes)")
    assert own["files"].takes == "PATH" and own["files"].is_path and own["files"].is_list
    assert own["nothing"].text == "No default to tell."
    assert own["json"].flags == ("--json",)
    assert own["kind"].choices == ("a", "b") and own["kind"].takes == "{a,b}"


def test_examples_and_purpose_are_those_of_the_docstring():
    assert examples_of(Odd) == ["bert odd --size 3 --rate 0.5", "bert odd"]
    assert (
        purpose_of(Odd) == "A command with options of every kind.\n\nIt has two lines of purpose."
    )
