"""The settings of the commands that inspect, plan, start, compare and use runs."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliPositionalArg, CliSuppress

from bert_cli.config.data import DataSettings, Masking
from bert_cli.config.settings import Positive, Settings, is_remote, is_set, parse_bytes
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
        if is_set(self, "dataset_cache") and not is_remote(self.folder):
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


class PlanSettings(PretrainSettings):
    """Say what a layout costs in memory, idle time and traffic, and propose one.

    Takes every setting of `bert pretrain`; needs no data and builds nothing.
    Example: bert plan --config configs/pretrain_base_128_phase1.json --devices 8 --memory 80GB
    Example: bert plan --config pretrain_large_512_phase2 --parallel.layout auto --devices 16 --memory 16GB
    """

    OPENS_FILES: ClassVar[bool] = False
    SAVES: ClassVar[bool] = False

    devices: Positive | None = None
    """Devices that there are, in all; by default what the layout asks for."""
    memory: str | None = None
    """Memory of a device, as 80GB, 24GiB, 640MB or 16e9; without it nothing is said about fitting."""
    processes: Positive = 1
    """Processes that the devices are divided among; a replica lives in one."""

    @field_validator("memory", mode="before")
    @classmethod
    def _is_a_size(cls, given: object) -> str | None:
        if given is not None:
            parse_bytes(str(given))
        return None if given is None else str(given)


class LaunchSettings(Settings):
    """Start a command as several processes that make one run.

    Example: bert launch --processes 2 -- pretrain --config pretrain_demo_128_phase1
    --global-batch.replicas 2
    Example: bert launch --processes 8 --hosts a,b -- pretrain --config pretrain_base_128_phase1
    --parallel.layout auto
    """

    processes: Positive = 1
    """Processes on each host; with GPUs, each gets its share of them, else its share of the cores."""
    hosts: list[str] = []
    """Hosts to start on, by ssh, as a,b or user@a,user@b; by default this one. They need the same
    folder, environment and file system."""
    port: Annotated[int, Field(ge=1024, le=LAST_PORT)] | None = None
    """First port of the processes on a host; by default free ones on this host, else 22300."""
    bind_address: str | None = None
    """Network interface of the hosts on which the processes take connections, as ib0; by default every
    one. Connections are not authenticated, so the network must be trusted. On this host alone it is
    always loopback."""
    remote_shell: str = "ssh"
    """Program that runs a command on a host, called with the host and the command; may have options
    of its own, as 'ssh -p 2222'."""
    pass_variables: list[str] = []
    """Variables of this environment that processes on hosts get too, as NCCL_DEBUG,HF_HOME. They can
    be seen there in the list of processes, so no passwords. DATASETS_DIR always goes along."""
    grace_seconds: Annotated[float, Field(gt=0.0)] = 30.0
    """After one process has failed the others are asked to end, and killed after so long."""
    dry_run: bool = False
    """Print what would be started, and start nothing."""
    command: CliSuppress[list[str]] = []
    """The command and its options: what stands after `--`."""

    @field_validator("hosts")
    @classmethod
    def _each_host_once(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not re.fullmatch(r"(?:[^\s@:/-][^\s@:/]*@)?[^\s@:/-][^\s@:/]*", host):
                raise ValueError(f"{host!r} is no host; give names, as a,b or user@a,user@b")
        names = [host.rpartition("@")[2] for host in hosts]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice} is named twice; give --processes for several on a host")
        return hosts

    @model_validator(mode="after")
    def _what_concerns_hosts_has_some(self) -> "LaunchSettings":
        for name in ("bind_address", "remote_shell", "pass_variables"):
            if name in self.model_fields_set and not self.hosts:
                raise ValueError(f"{name} has no effect without hosts; give --hosts too")
        if self.port is not None and self.port + self.processes - 1 > LAST_PORT:
            raise ValueError(
                f"port {self.port} leaves too few for {self.processes} processes; the last is {LAST_PORT}"
            )
        return self


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


class PredictSettings(Settings):
    """What a model says to texts: a JSON object a line on standard output, in the texts' order.

    The texts come from TEXT, from --input, or from standard input.
    Example: bert predict runs/base "The capital of France is [MASK]."
    Example: bert predict runs/mine --input texts.txt
    Example: bert predict runs/squad_base --question "Who was it?" --context "It was Ada."
    """

    model: CliPositionalArg[str]
    """A run's folder, a checkpoint, a Hugging Face folder or name, a TensorFlow checkpoint."""
    text: CliPositionalArg[str | None] = None
    """One text, right behind MODEL; more of them go into a file or through standard input."""
    task: Literal[PREDICT_TASKS] | None = None  # type: ignore[valid-type]
    """fill-mask, question-answering, text-classification, token-classification or embed; by default
    what the model was trained for."""
    input: Path | None = None
    """A file of texts, one a line; one whose name ends in .jsonl has an object a line, with `text` and,
    for pairs, `second`, or with `question` and `context`. Also .gz of each."""
    second: str | None = None
    """The second text of a pair, for text-classification."""
    question: str | None = None
    """A question, for question-answering; without it they come as JSON lines."""
    context: str | None = None
    """The text that holds the question's answer."""
    batch_size: Positive = 32
    """Texts that the model reads at once; those of like length go together."""
    max_seq_length: Annotated[int, Field(ge=8)] | None = None
    """Most tokens of a text; by default all places that the model has. What is longer is cut, and its
    answer says so."""
    precision: Literal["float32", "mixed_bfloat16"] = "float32"
    """Number format of the products."""
    top: Positive = 5
    """Words for each [MASK], the best first, for fill-mask."""
    pooling: Literal["mean", "cls"] = "mean"
    """What embed takes: the `mean` over all tokens, or the vector of [CLS]."""
    normalize: bool = False
    """Scale the vectors of embed to length 1."""
    doc_stride: Positive = 128
    """Tokens from the start of a window of a long context to that of the next, for
    question-answering."""
    max_query_length: Positive = 64
    """Longest question, in tokens; the rest is cut off."""
    max_answer_length: Positive = 30
    """Longest answer, in tokens."""
    version_2: bool = False
    """The model may say that the context has no answer, as one trained on SQuAD 2.0 can; the answer is
    then empty."""
    null_score_diff_threshold: float | None = None
    """With version_2, how much better no answer must score than the best one to be given; by default
    what `bert squad` chose for this model, or 0."""

    @model_validator(mode="after")
    def _one_place_for_texts(self) -> "PredictSettings":
        given = [name for name in ("text", "question", "input") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; give one of them")
        if (self.question is None) != (self.context is None):
            raise ValueError("question and context belong together; give both or neither")
        if self.second is not None and self.text is None:
            raise ValueError("second has no effect without TEXT; give both, or .jsonl as input")
        if "null_score_diff_threshold" in self.model_fields_set and not self.version_2:
            raise ValueError("null_score_diff_threshold has no effect without version_2; give both")
        return self


class ExportSettings(Settings):
    """Write a model in the form of another runtime, and compare what it says there.

    Example: bert export runs/mrpc exported/mrpc --format onnx
    Example: bert export runs/mine exported/mine --format saved-model
    """

    model: CliPositionalArg[str]
    """A run's folder, a checkpoint, a Hugging Face folder or name, a TensorFlow checkpoint."""
    out: CliPositionalArg[Path]
    """Folder that receives the export; a new one, or one that is empty."""
    format: Literal[EXPORT_FORMATS]  # type: ignore[valid-type]
    """hf (config, weights and tokenizer alone), saved-model (TensorFlow), tflite or onnx."""
    texts: bool = False
    """Of a saved-model for text-classification or of an encoder: also the signatures `texts` and `pairs`,
    which take strings. Whoever loads it has to import tensorflow_text first."""

    @model_validator(mode="after")
    def _texts_are_of_saved_models(self) -> "ExportSettings":
        if self.texts and self.format != "saved-model":
            raise ValueError(f"texts has no effect with format {self.format!r}; leave it out")
        return self


class CompletionSettings(Settings):
    """Print what makes a shell complete commands, options, choices and file names of `bert`.

    Example: bert completion bash > ~/.local/share/bash-completion/completions/bert
    Example: bert completion zsh > "${fpath[1]}/_bert"
    Example: bert completion fish > ~/.config/fish/completions/bert.fish
    """

    shell: CliPositionalArg[Literal[SHELLS]]  # type: ignore[valid-type]
    """The shell that is to read it."""
