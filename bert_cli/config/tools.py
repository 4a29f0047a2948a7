"""The settings of the commands that inspect, plan, start, list, compare and use runs."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from bert_cli.config.data import DataSettings, Masking
from bert_cli.config.settings import (
    Hidden,
    Positional,
    Positive,
    SettingError,
    Settings,
    check_size,
    is_remote,
    is_set,
    without_effect,
)
from bert_cli.config.training import PretrainSettings

PREDICT_TASKS = (
    "fill-mask",
    "question-answering",
    "text-classification",
    "token-classification",
    "embed",
)
EXPORT_FORMATS = ("hf", "saved-model", "tflite", "onnx")
SHELLS = ("bash", "zsh", "fish")
LAST_PORT = 65_535
JsonFile = Annotated[Path | None, Field(alias="json")]
# The required settings of `bert doctor` when it checks only the machine.
NO_RUN: dict[str, Any] = {
    "generated_dataset": True,
    "max_seq_length": 128,
    "max_predictions_per_seq": 20,
    "total_num_train_samples": 1,
    "global_batch": {"micro_batch_size": 1},
    "optimizer_opts": {"name": "AdamW", "learning_rate": {"max_learning_rate": 1e-4}},
}


class InspectSettings(DataSettings):
    """Show the contents of a folder of records, and warn of problems for training.

    Example: bert inspect data/wikipedia/128
    Example: bert inspect data/books/512 --examples 10 --masking.unit word
    Example: bert inspect data/wikipedia/128 --sample 200000 --json statistics.json
    """

    folder: Positional[str]
    """Folder of records with a corpus.json, as `bert tokenize` or `bert index` writes it, or its address
    (s3://...)."""
    dataset_cache: Path = Path("~/.cache/bert/records")
    """Folder on this machine that caches records from object storage, as for `bert pretrain`."""
    examples: int = Field(3, ge=0)
    """Examples to show as text."""
    sample: int = Field(20_000, ge=1)
    """Records to read for the statistics, spread over the folder."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the choice of records, and of the masks of dynamic ones."""
    masking: Masking = Masking()
    """How dynamic records are masked for the statistics: give the settings of the run."""
    json_file: JsonFile = None
    """Also write the statistics to this file as JSON; `-` prints the JSON instead of the text."""

    @field_validator("folder", mode="before")
    @classmethod
    def _is_a_folder_or_an_address(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, Path) else value
        is_path = isinstance(text, str) and not is_remote(text)
        return os.path.expanduser(text) if is_path else text

    @model_validator(mode="after")
    def _a_cache_needs_an_address(self) -> "InspectSettings":
        if is_set(self, "dataset_cache") and not is_remote(self.folder):
            raise without_effect(self, "dataset_cache", "on a folder of this machine")
        return self


class DoctorSettings(PretrainSettings):
    """Check this machine, and a run before it starts; prints a line for each finding, with a remedy.

    Takes every setting of `bert pretrain`; without any it checks only the machine.
    Example: bert doctor --config pretrain_base_128_phase1 --save-ckpt-path runs/base
    Example: bert doctor
    """

    OPENS_FILES: ClassVar[bool] = False

    build: bool = True
    """Build the model on the CPU and compare its initial losses with the expected ones."""
    json_file: JsonFile = None
    """Also write the findings to this file as JSON; `-` prints the JSON alone."""
    machine_only: Hidden[bool] = False
    """Whether no setting of a run was given."""

    @model_validator(mode="before")
    @classmethod
    def _a_machine_needs_no_run(cls, values: Any) -> Any:
        if isinstance(values, dict) and not set(values) - {"json", "build"}:
            return {**NO_RUN, **values, "machine_only": True}
        return values


class PlanSettings(PretrainSettings):
    """Estimate the memory, idle time and traffic of a layout, or propose one.

    Takes every setting of `bert pretrain`; needs no data and builds nothing.
    Example: bert plan --config configs/pretrain_base_128_phase1.json --devices 8 --memory 80GB
    Example: bert plan --config pretrain_large_512_phase2 --parallel.layout auto --devices 16 --memory 16GB
    """

    OPENS_FILES: ClassVar[bool] = False
    SAVES: ClassVar[bool] = False

    devices: Positive | None = None
    """Number of devices; by default that of the layout."""
    memory: str | None = None
    """Memory of a device, such as 80GB, 24GiB, 640MB or 16e9; without it the plan does not check whether the
    run fits."""
    processes: Positive = 1
    """Number of processes that the devices are divided among; a replica is in one process."""

    _check_memory = field_validator("memory", mode="before")(check_size)


class LaunchSettings(Settings):
    """Start a command as several processes of one run.

    Example: bert launch --processes 2 -- pretrain --config pretrain_demo_128_phase1
    --global-batch.replicas 2
    Example: bert launch --processes 8 --hosts a,b -- pretrain --config pretrain_base_128_phase1
    --parallel.layout auto
    """

    NEEDS: ClassVar = {name: "hosts" for name in ("bind_address", "remote_shell", "pass_variables")}

    processes: Positive = 1
    """Processes on each host. The GPUs of the host are divided among them, or its cores if it has none."""
    hosts: list[str] = []
    """Hosts to start on by ssh, such as a,b or user@a,user@b; by default this one. They need the same
    folder, environment and file system."""
    port: Annotated[int, Field(ge=1024, le=LAST_PORT)] | None = None
    """First port of the processes on a host; by default free ones on this host, and 22300 on others."""
    bind_address: str | None = None
    """Network interface of the hosts on which the processes listen, such as ib0; by default every one.
    Connections are not authenticated, so the network must be trusted. On this host alone it is always
    loopback."""
    remote_shell: str = "ssh"
    """Program that runs a command on a host, called with the host and the command; it may have options, as
    'ssh -p 2222'."""
    pass_variables: list[str] = []
    """Environment variables to pass to the processes on hosts, such as NCCL_DEBUG,HF_HOME. They are visible
    there in the list of processes, so pass no passwords. DATASETS_DIR is always passed."""
    grace_seconds: Annotated[float, Field(gt=0.0)] = 30.0
    """After a process has failed, the others are asked to stop, and killed after this long."""
    dry_run: bool = False
    """Print the command lines, and start nothing."""
    command: Hidden[list[str]] = []
    """The command and its options, after `--`."""

    @field_validator("hosts")
    @classmethod
    def _each_host_once(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not re.fullmatch(r"(?:[^\s@:/-][^\s@:/]*@)?[^\s@:/-][^\s@:/]*", host):
                problem = f"{host!r} is not the name of a host"
                raise SettingError("", problem, "give names, as a,b or user@a,user@b")
        names = [host.rpartition("@")[2] for host in hosts]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            remedy = "give --processes for several on a host"
            raise SettingError("", f"{twice} is named twice", remedy)
        return hosts

    @model_validator(mode="after")
    def _has_enough_ports(self) -> "LaunchSettings":
        if self.port is not None and self.port + self.processes - 1 > LAST_PORT:
            problem = f"{self.port} leaves fewer than {self.processes} ports up to {LAST_PORT}"
            raise SettingError("port", problem, "lower it")
        return self


class RunsSettings(Settings):
    """List the runs below some folders: progress, losses, and whether they are running.

    Reads the files that a run writes into its folder, and changes nothing.
    Example: bert runs
    Example: bert runs runs /shared/runs
    Example: bert runs runs --json -
    """

    folders: Positional[list[Path]] = [Path(".")]
    """Folders to search, with their subfolders."""
    json_file: JsonFile = None
    """Write the list to this file as JSON; `-` prints the JSON instead of the table."""


class PlotSettings(Settings):
    """Plot loss, accuracy, learning rate, throughput, gradient norm and evaluation scores over the steps.

    Writes a PNG file of each, and index.html, a page with all of them that needs no network.
    Example: bert plot runs/base_128_phase1 --output pictures
    Example: bert plot runs/lr_1e-4 runs/lr_3e-4 --output pictures --smoothing 50
    Example: bert plot runs/mrpc --output pictures
    """

    runs: Positional[list[Path]]
    """Run folders, plotted together; a folder of runs, such as those of several seeds, adds all of them."""
    output: Path
    """Folder of the pictures and the page; existing ones are replaced."""
    smoothing: Positive | None = None
    """Steps in the moving average of a bold line; by default about a fortieth of the longest run. The values
    of single steps are drawn faintly."""


class CompareSettings(Settings):
    """Show the differences between two runs in settings and results.

    A folder of several seeds (seed_1984/, ...) counts as one run, with mean and deviation.
    Example: bert compare runs/adamw runs/lamb
    Example: bert compare runs/mrpc_2e-5 runs/mrpc_5e-5 --json differences.json
    """

    first: Positional[Path]
    """Folder of a run."""
    second: Positional[Path]
    """Folder of the other run."""
    smoothing: Positive | None = None
    """Steps whose mean is compared; by default about a fortieth of the longer run."""
    json_file: JsonFile = None
    """Write the comparison to this file as JSON; `-` prints the JSON instead of the tables."""


class PredictSettings(Settings):
    """Run a model on texts; prints a JSON object for each, in their order.

    The texts are TEXT, or come from --input, or from standard input. The task, the labels and the shape are
    read from the model.
    Example: bert predict runs/base "The capital of France is [MASK]."
    Example: bert predict runs/mine --input texts.txt
    Example: bert predict runs/squad_base --question "Who was it?" --context "It was Ada."
    """

    NEEDS: ClassVar = {
        "question": "context",
        "context": "question",
        "second": "text",
        "null_score_diff_threshold": "version_2",
    }

    model: Positional[str]
    """A run folder, a checkpoint, a Hugging Face folder or name, or a TensorFlow checkpoint."""
    text: Positional[str | None] = None
    """One text; give several in a file or through standard input."""
    task: Literal[PREDICT_TASKS] | None = None  # type: ignore[valid-type]
    """fill-mask, question-answering, text-classification, token-classification or embed; by default the task
    that the model was trained for."""
    input: Path | None = None
    """A file with a text on each line, or .jsonl with an object on each line: `text` and, for pairs,
    `second`, or `question` and `context`. Also with .gz."""
    second: str | None = None
    """The second text of a pair, for text-classification."""
    question: str | None = None
    """A question, for question-answering; otherwise questions come as JSON lines."""
    context: str | None = None
    """The text that contains the answer."""
    batch_size: Positive = 32
    """Texts in a batch; texts of similar length are batched together."""
    max_seq_length: Annotated[int, Field(ge=8)] | None = None
    """Maximum tokens of a text; by default the maximum sequence length of the model. Longer texts are cut,
    and their result has a remark."""
    precision: Literal["float32", "mixed_bfloat16"] = "float32"
    """Number format of the matrix products."""
    top: Positive = 5
    """Number of predictions for each [MASK], the best first, for fill-mask."""
    pooling: Literal["mean", "cls"] = "mean"
    """The vector of embed: the `mean` over all tokens, or that of [CLS]."""
    normalize: bool = False
    """Scale the vectors of embed to length 1."""
    doc_stride: Positive = 128
    """Tokens from the start of a window of a long context to that of the next, for question-answering."""
    max_query_length: Positive = 64
    """Maximum length of a question, in tokens; the rest is cut off."""
    max_answer_length: Positive = 30
    """Maximum length of an answer, in tokens."""
    version_2: bool = False
    """Allow no answer, for a model trained on SQuAD 2.0; the answer is then empty."""
    null_score_diff_threshold: float | None = None
    """With version_2, give no answer if its score exceeds that of the best answer by more than this; by
    default the threshold that `bert squad` chose for this model, or 0."""

    @model_validator(mode="after")
    def _texts_have_one_source(self) -> "PredictSettings":
        given = [name for name in ("text", "question", "input") if getattr(self, name) is not None]
        if len(given) > 1:
            raise SettingError(given[1], f"cannot be combined with {given[0]}", "give one of them")
        return self


class ExportSettings(Settings):
    """Export a model to another runtime, and compare its outputs there.

    Example: bert export runs/mrpc exported/mrpc --format onnx
    Example: bert export runs/mine exported/mine --format saved-model
    """

    model: Positional[str]
    """A run folder, a checkpoint, a Hugging Face folder or name, or a TensorFlow checkpoint."""
    out: Positional[Path]
    """Folder of the export; new or empty."""
    format: Literal[EXPORT_FORMATS]  # type: ignore[valid-type]
    """hf (config, weights and tokenizer), saved-model (TensorFlow), tflite or onnx. hf and onnx need the extra
    `export`: PyTorch opens the written files."""
    texts: bool = False
    """For a saved-model of text-classification or of an encoder: add the signatures `texts` and `pairs`,
    which take strings. A program that loads it must import tensorflow_text first."""

    @model_validator(mode="after")
    def _texts_need_a_saved_model(self) -> "ExportSettings":
        if self.texts and self.format != "saved-model":
            raise without_effect(self, "texts", f"with format {self.format!r}")
        return self


class CompletionSettings(Settings):
    """Print a script that completes commands, options, choices and file names of `bert` in a shell.

    The script holds the options of this version; print it again after an update.
    Example: bert completion bash > ~/.local/share/bash-completion/completions/bert
    Example: bert completion zsh > "${fpath[1]}/_bert"
    Example: bert completion fish > ~/.config/fish/completions/bert.fish
    """

    shell: Positional[Literal[SHELLS]]  # type: ignore[valid-type]
    """The shell that reads the script."""
