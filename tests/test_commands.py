"""`bert completion`: what a real shell then completes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.commands import COMMANDS
from bert_cli.config.tools import SHELLS, benchmarks


@pytest.fixture
def script(request, tmp_path, capsys) -> Path:
    """The script of a shell, as `bert completion` prints it."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    assert main(["completion", shell]) == 0
    path = tmp_path / f"_{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def in_bash(script: Path, *words: str) -> set[str]:
    """Return the completions of the last word, by the function that bash was given for `bert`."""
    code = f"""
        source {script}
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${{#COMP_LINE}}
        name=$(complete -p bert | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
        $name bert "${{@: -1}}" "${{@: -2:1}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", code, "bash", "bert", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def in_fish(script: Path, *words: str) -> set[str]:
    code = f"source {script}; complete -C '{' '.join(['bert', *words])}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True
    )
    return {row.partition("\t")[0] for row in done.stdout.splitlines()}


@pytest.mark.parametrize("script", ["bash", "fish"], indirect=True)
def test_commands_options_choices_configs_and_files_are_completed(script, tmp_path):
    def offered(*words: str) -> set[str]:
        return (in_bash if script.name == "_bash" else in_fish)(script, *words)

    assert offered("pre") >= {"preprocess", "pretrain", "predict"}
    assert offered("") >= {name.split()[0] for name in COMMANDS}
    assert offered("bench", "") >= {"pretrain", "squad", "data", *benchmarks()}
    assert offered("bench", "pretrain", "--swe") == {"--sweep"}
    options = offered("pretrain", "--opti")
    assert {"--optimizer-opts.name", "--optimizer-opts.learning-rate.warmup-frac"} <= options
    assert "--mask-tokens" not in offered("pretrain", "--mask")
    assert offered("pretrain", "--optimizer-opts.name", "") == {"LAMB", "AdamW"}
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


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_reads_its_script(script, tmp_path):
    script.rename(tmp_path / "_bert")
    code = f"""
        fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -d {tmp_path}/dump
        autoload +X -Uz _bert && print loaded $_comps[bert]
    """
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["loaded", "_bert"], done.stderr
