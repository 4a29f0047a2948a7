"""`bert completion`: what a real shell then completes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.commands import COMMANDS
from bert_cli.config.tools import SHELLS, benchmarks


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, Path]:
    import contextlib
    import io

    folder, found = tmp_path_factory.mktemp("scripts"), {}
    for shell in SHELLS:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["completion", shell]) == 0
        found[shell] = folder / shell
        found[shell].write_text(out.getvalue())
    return found


def in_bash(script: Path, *words: str) -> set[str]:
    """What bash offers for the last of some words, by the function that it was given for `bert`."""
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
    line = " ".join(["bert", *words])
    code = f"source {script}; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True
    )
    return {row.partition("\t")[0] for row in done.stdout.splitlines()}


def needs(shell: str):
    return pytest.param(
        shell, marks=pytest.mark.skipif(shutil.which(shell) is None, reason=f"no {shell} here")
    )


OFFERS = {"bash": in_bash, "fish": in_fish}
needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")


@pytest.mark.parametrize("shell", [needs("bash"), needs("fish")])
def test_commands_options_choices_configs_and_files_are_completed(shell, scripts, tmp_path):
    def offered(*words: str) -> set[str]:
        return OFFERS[shell](scripts[shell], *words)

    assert offered("pre") >= {"preprocess", "pretrain", "predict"}
    assert offered("") >= {name.split()[0] for name in COMMANDS}
    assert offered("bench", "") >= {"pretrain", "squad", "data", *benchmarks()}
    assert offered("bench", "pretrain", "--swe") == {"--sweep"}
    options = offered("pretrain", "--opti")
    assert {"--optimizer-opts.name", "--optimizer-opts.learning-rate.warmup-frac"} <= options
    assert all(word.startswith("--opti") for word in options)
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


@needs_zsh
def test_zsh_reads_its_script(scripts, tmp_path):
    (tmp_path / "_bert").write_text(scripts["zsh"].read_text())
    code = f"""
        fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -d {tmp_path}/dump
        autoload +X -Uz _bert && print loaded $_comps[bert]
    """
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["loaded", "_bert"], done.stderr
    subprocess.run(["zsh", "-f", "-n", str(scripts["zsh"])], check=True, capture_output=True)


def test_an_unknown_shell_is_refused_with_those_that_are_known(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh' or 'fish'" in capsys.readouterr().err
