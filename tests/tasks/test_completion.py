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


@pytest.mark.parametrize("shell", [needs("bash"), needs("fish")])
class TestInAShell:
    def test_commands_are_completed(self, shell, scripts):
        offer = OFFERS[shell]
        assert offer(scripts[shell], "pre") >= {"preprocess", "pretrain", "predict"}
        assert offer(scripts[shell], "") >= {name.split()[0] for name in COMMANDS}

    def test_what_can_be_measured_is_completed_with_its_options(self, shell, scripts):
        offer = OFFERS[shell]
        assert offer(scripts[shell], "bench", "") >= {"pretrain", "squad", "data", *benchmarks()}
        assert offer(scripts[shell], "bench", "pretrain", "--swe") == {"--sweep"}

    def test_options_of_the_command_are_completed(self, shell, scripts):
        found = OFFERS[shell](scripts[shell], "pretrain", "--opti")
        assert {"--optimizer-opts.name", "--optimizer-opts.learning-rate.warmup-frac"} <= found
        assert all(word.startswith("--opti") for word in found)
        assert "--mask-tokens" not in OFFERS[shell](scripts[shell], "pretrain", "--mask")

    def test_choices_are_completed(self, shell, scripts):
        offer = OFFERS[shell]
        assert offer(scripts[shell], "pretrain", "--optimizer-opts.name", "") == {"LAMB", "AdamW"}
        assert offer(scripts[shell], "glue", "--glue-task", "m") >= {"mnli", "mrpc"}
        assert offer(scripts[shell], "completion", "") >= set(SHELLS)

    def test_a_config_is_completed_by_shipped_names_and_files(self, shell, scripts, tmp_path):
        offer = OFFERS[shell]
        (tmp_path / "mine.json").touch()
        found = offer(scripts[shell], "squad", "--config", "squad_")
        assert found >= {"squad_base", "squad_large", "squad_tiny"}
        assert "glue_base" not in found
        begun = str(tmp_path / "mi")
        assert offer(scripts[shell], "pretrain", "--config", begun) == {f"{begun}ne.json"}

    def test_file_names_are_completed(self, shell, scripts, tmp_path):
        (tmp_path / "run_of_mine").mkdir()
        begun = str(tmp_path / "run_of")
        for words in (["plot"], ["pretrain", "--save-ckpt-path"], ["predict"], ["compare", "x"]):
            found = OFFERS[shell](scripts[shell], *words, begun)
            assert {word.rstrip("/") for word in found} == {f"{begun}_mine"}, words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_reads_its_script_and_completes_by_it(scripts, tmp_path):
    (tmp_path / "_bert").write_text(scripts["zsh"].read_text())
    code = f"""
        fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -d {tmp_path}/dump
        autoload +X -Uz _bert && print loaded $_comps[bert]
    """
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["loaded", "_bert"], done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_the_script_for_zsh_has_no_mistake(scripts):
    subprocess.run(["zsh", "-f", "-n", str(scripts["zsh"])], check=True, capture_output=True)


def test_a_shell_that_is_not_known_is_refused_with_those_that_are(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh' or 'fish'" in capsys.readouterr().err
