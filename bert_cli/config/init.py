"""The settings of `bert init`: a text, the machine's hours, and what the model is for."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat

from bert_cli.config.data import DocumentSettings, TextInputSettings, TextSettings
from bert_cli.settings.markers import PathOrName, Positional
from bert_cli.settings.settings import (
    DryRunSettings,
    EngineSettings,
    OutSettings,
    SettingError,
    Settings,
)


class InitSettings(
    DryRunSettings,
    EngineSettings,
    DocumentSettings,
    OutSettings,
    TextInputSettings,
    TextSettings,
):
    """Choose a training run for a text and this machine, and write its configs and commands.

    Reads how much text there is, measures how fast this machine trains, and prints what it chooses with the reason.
    OUT gets the text, divided for training and scoring, the config of the run, and commands.sh, the commands that it
    prints. With --for search these make an index and ask it; nothing is trained.
    Example: bert init articles.jsonl mine --from bert-base-uncased --hours 8
    Example: bert init 'reports/*.txt' mine --documents files --from sentence-transformers/all-MiniLM-L6-v2
        --for search
    """

    NEEDS = dict.fromkeys(("hours", "speed"), ("goal", "labels", "fill-mask"))

    start: PathOrName | None = Field(None, alias="from")
    """Model to continue, or to search with: a run, a checkpoint, a Hugging Face folder or a name on its hub. By default
    a new model is trained."""
    hours: PositiveFloat = 8.0
    """Hours that all its commands may take on this machine."""
    speed: PositiveFloat | None = None
    """Examples that the machine trains in a second, as an earlier `bert init` printed them; by default it is measured,
    which a busy machine makes too low."""
    goal: Literal["search", "labels", "fill-mask"] = Field("fill-mask", alias="for")
    """Purpose of the model: `search` makes an index with the model of --from as published; your own `labels`, or
    `fill-mask`, a base for every other task, train one."""

    def _check(self) -> None:
        if self.goal == "search" and self.start is None:
            remedy = "name one that compares texts, such as sentence-transformers/all-MiniLM-L6-v2"
            raise SettingError("from", "names no model, which --for search needs", remedy)


class VerdictSettings(Settings):
    """Judge the trained model of a folder of `bert init` against its start: WIN, NO DIFFERENCE or REGRESSION.

    Both are scored on the test, documents of your text that neither trained nor chose anything. Writes
    OUT/report.html, and prints the same.
    Example: bert verdict mine
    Example: bert verdict runs/manuals
    """

    out: Positional[Path]
    """Folder that `bert init` wrote, after its commands."""
