"""The settings of what makes a shell know this tool: `bert completion`.

A shell reads the script once; what it completes are the commands, their options, what these may be and
the names of files, as this version has them. After another version is installed it is printed anew.
"""

from typing import Literal

from pydantic_settings import CliPositionalArg

from bert_cli.config.parallel import Settings

SHELLS = ("bash", "zsh", "fish")


class CompletionSettings(Settings):
    """Print what makes a shell complete commands, options, choices and file names of `bert`.

    Example: bert completion bash > ~/.local/share/bash-completion/completions/bert
    Example: bert completion zsh > "${fpath[1]}/_bert"
    Example: bert completion fish > ~/.config/fish/completions/bert.fish
    """

    shell: CliPositionalArg[Literal[SHELLS]]  # type: ignore[valid-type]
    """The shell that is to read it."""
