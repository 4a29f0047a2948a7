"""The settings of what looks: before a run at records and the machine, afterwards at what runs have left.

None changes anything but the files that it is told to write. `bert doctor` takes every setting of
`bert pretrain`, so a run's own command line with another first word is its check.
"""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliPositionalArg, CliSuppress

from bert_cli.config.data import DataSettings, Masking, is_remote
from bert_cli.config.mistakes import is_said
from bert_cli.config.parallel import Positive, Settings
from bert_cli.config.schema import PretrainSettings

# What a run is taken for where only the machine is looked at: the least that its settings demand.
NO_RUN: dict[str, Any] = {
    "generated_dataset": True,
    "max_seq_length": 128,
    "max_predictions_per_seq": 20,
    "total_num_train_samples": 1,
    "global_batch": {"micro_batch_size": 1},
    "optimizer_opts": {"name": "AdamW", "learning_rate": {"max_learning_rate": 1e-4}},
}


class InspectSettings(DataSettings):
    """Show what is in a folder of records, and warn of what will hurt a training.

    Example: bert inspect data/wikipedia/128
    Example: bert inspect data/books/512 --examples 10 --masking.unit word
    Example: bert inspect data/wikipedia/128 --sample 200000 --json figures.json
    """

    folder: CliPositionalArg[str]
    """Folder of records with a corpus.json, as `bert tokenize` or `bert index` leaves it, or the address of
    one (s3://...)."""
    dataset_cache: Path = Path("~/.cache/bert/records")
    """Where records from object storage are kept on this machine's disk, as for `bert pretrain`."""
    examples: int = Field(3, ge=0)
    """Examples to show as text."""
    sample: int = Field(20_000, ge=1)
    """Records to read for the figures, spread over the whole folder; all of them where there are
    fewer."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Which records are read and shown, and how dynamic ones are masked."""
    masking: Masking = Masking()
    """How dynamic records are masked for the figures: give what the run will have."""
    json_file: Path | None = Field(None, alias="json")
    """Also write every figure to this file, as JSON; `-` prints that, instead of the text."""

    @field_validator("folder", mode="before")
    @classmethod
    def _is_a_folder_or_an_address(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, Path) else value
        is_path = isinstance(text, str) and not is_remote(text)
        return os.path.expanduser(text) if is_path else text

    @model_validator(mode="after")
    def _a_cache_has_something_to_keep(self) -> "InspectSettings":
        if is_said(self, "dataset_cache") and not is_remote(self.folder):
            raise ValueError(
                f"dataset_cache ({self.dataset_cache}) has no effect on a folder of this machine; leave it out"
            )
        return self


class DoctorSettings(PretrainSettings):
    """Look at this machine, and at a run before it is started; a line each, and what to do.

    Takes every setting of `bert pretrain`; without any only the machine is looked at.
    Example: bert doctor --config pretrain_base_128_phase1 --save-ckpt-path runs/base
    Example: bert doctor
    """

    OPENS_FILES: ClassVar[bool] = False

    build: bool = True
    """Build the model on the CPU and compare its first losses with what they must be."""
    json_file: Annotated[Path | None, Field(alias="json")] = None
    """Also write every finding, with its figures, to this file, as JSON; `-` prints that alone."""
    machine_only: CliSuppress[bool] = False
    """There is no run to look at: no setting of one was given."""

    @model_validator(mode="before")
    @classmethod
    def _a_machine_needs_no_run(cls, given: Any) -> Any:
        if isinstance(given, dict) and not set(given) - {"json", "build"}:
            return {**NO_RUN, **given, "machine_only": True}
        return given


class RunsSettings(Settings):
    """List the runs below some folders: how far each is, its losses, whether it is alive.

    Reads what a run writes into its folder, and changes nothing there.
    Example: bert runs
    Example: bert runs runs /shared/runs
    Example: bert runs runs --json -
    """

    folders: CliPositionalArg[list[Path]] = [Path(".")]
    """Folders to look in, with all below them."""
    json_file: Path | None = Field(None, alias="json")
    """Write the list to this file as JSON; `-` prints it, instead of the table."""


class PlotSettings(Settings):
    """Draw loss, accuracy, learning rate, throughput, gradient norm and held-out scores over the steps.

    Writes a PNG file of each, and index.html, one page that holds all of them and needs no network.
    Example: bert plot runs/base_128_phase1 --output pictures
    Example: bert plot runs/lr_1e-4 runs/lr_3e-4 --output pictures --smoothing 50
    Example: bert plot runs/mrpc --output pictures
    """

    runs: CliPositionalArg[list[Path]]
    """Folders of runs, drawn over one another; one that holds runs (as of several seeds) gives all."""
    output: Path
    """Folder that receives the pictures and the page; what it has by their names is replaced."""
    smoothing: Positive | None = None
    """Steps that a point of a bold line is the mean of; by default about a fortieth of the longest
    run. The steps themselves are drawn faintly behind it."""


class CompareSettings(Settings):
    """Tell what differs between two runs: in their settings, and in what came of them.

    A folder of several seeds (seed_1984/, ...) stands for all of them, with mean and deviation.
    Example: bert compare runs/adamw runs/lamb
    Example: bert compare runs/mrpc_2e-5 runs/mrpc_5e-5 --json differences.json
    """

    first: CliPositionalArg[Path]
    """Folder of a run."""
    second: CliPositionalArg[Path]
    """Folder of the other."""
    smoothing: Positive | None = None
    """Steps whose mean is taken for a figure; by default about a fortieth of the longer run."""
    json_file: Path | None = Field(None, alias="json")
    """Write it to this file as JSON; `-` prints it, instead of the tables."""
