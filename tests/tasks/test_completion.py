"""`bert completion`: the completions of a real shell."""

import subprocess
from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.commands import COMMANDS
from bert_cli.config.tools import SHELLS
from bert_cli.facts.optimizers import OPTIMIZERS


def completions(script: Path, *words: str) -> set[str]:
    """Return the completions of the last word, by the function that bash was given for `bert`."""
    code = f"""
        source {script}
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${{#COMP_LINE}}
        name=$(complete -p bert | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
        $name bert "${{@: -1}}" "${{@: -2:1}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    command = ["bash", "--norc", "-c", code, "bash", "bert", *words]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_has_a_script(shell, bert):
    script = bert("completion", shell).out
    assert all(name in script for name in ("pretrain", "squad_tiny", "save-ckpt"))


def test_commands_options_choices_configs_and_files_are_completed(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)

    def offered(*words: str) -> set[str]:
        return completions(script, *words)

    assert offered("pre") >= {"preprocess", "pretrain", "predict"}
    assert offered("") >= {name.split()[0] for name in COMMANDS}
    assert offered("bench", "") >= {"pretrain", "squad"}
    assert offered("bench", "pretrain", "--warmup-s") == {"--warmup-steps"}
    options = offered("pretrain", "--opti")
    assert {"--optimizer-opts.name", "--optimizer-opts.learning-rate.warmup-frac"} <= options
    assert "--mask-tokens" not in offered("pretrain", "--mask")
    assert offered("pretrain", "--optimizer-opts.name", "") == set(OPTIMIZERS)
    assert offered("completion", "") >= set(SHELLS)
    configs = offered("squad", "--config", "squad_")
    assert configs >= {"squad_base", "squad_large", "squad_tiny"} and "glue_base" not in configs
    (tmp_path / "mine.json").touch()
    begun = str(tmp_path / "mi")
    assert offered("pretrain", "--config", begun) == {f"{begun}ne.json"}
    (tmp_path / "run_of_mine").mkdir()
    begun = str(tmp_path / "run_of")
    for words in (["plot"], ["pretrain", "--save-ckpt-path"], ["compare", "x"]):
        assert {word.rstrip("/") for word in offered(*words, begun)} == {f"{begun}_mine"}, words
