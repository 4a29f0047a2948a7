"""The base class of all settings, their shared types, and the groups that other packages use.

`Parallel` and `Cluster` spread a run over devices, processes and hosts: they change its memory and traffic, and not
its numbers, except that gradients reduced in 16 bits are rounded. So a run may be resumed with other values of these
two.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from bert_cli.config.heads import LAST_BLOCKS
from bert_cli.config.markers import Engine, OnlyWith, Usual, is_path, kinds_of, markers_of
from bert_cli.files import is_utf8
from bert_cli.text import count

Positive = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=10**7)]
"""A size for which memory is allocated before any other check could reject it."""
Depth = Annotated[int, Field(ge=1, le=1000)]
"""A number of layers; each layer costs milliseconds before the memory of a run is checked."""
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
JSON_TEXT = "Write the results to this file as JSON; `-` prints the JSON instead of the text."
JsonFile = Annotated[Path | None, Field(alias="json", description=JSON_TEXT)]
RUN_LENGTHS = ("total_num_train_samples", "num_epochs")
"""Alternative settings for the length of a run."""
Need = str | tuple[Any, ...]
"""A setting that must be given, or a setting and the values that it may have."""
INTEGERS = 2**63
"""Bound of the absolute value of integers, as for int64."""


class SettingError(ValueError):
    """An invalid value, or values that contradict each other; a validator of a single field leaves `name` empty."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        super().__init__(name, problem, remedy)
        self.name = name
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.name} {self.problem}; {self.remedy}".strip()


class Settings(BaseModel):
    """Frozen settings that refuse unknown keys and infinity; the docstring of a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    NEEDS: ClassVar[Mapping[str, Need | list[Need]]] = {}
    """Setting -> what it needs to have an effect; classes add to the needs of their bases."""
    FORMER: ClassVar[tuple[str, ...]] = ()
    """Former settings of a command without configs, which accepts the value that they always have now."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Keep the markers of a setting that a class declares again."""
        for name, about in cls.model_fields.items():
            for base in cls.__mro__[1:]:
                for marker in getattr(base, "model_fields", {}).get(name, about).metadata:
                    if isinstance(marker, str | OnlyWith) and marker not in about.metadata:
                        about.metadata.append(marker)

    @field_validator("*", mode="wrap")
    @classmethod
    def _check_value(
        cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        """Reject values that pydantic would convert: booleans to 1, an empty path to the current folder."""
        about = cls.model_fields[info.field_name or ""]
        kinds = kinds_of(about.annotation)
        values = value if isinstance(value, list) else [value]
        if bool not in kinds and any(isinstance(item, bool) for item in values):
            raise SettingError("", "got a boolean", "--help shows what it takes")
        if "" in values and is_path(about):
            raise SettingError("", "is empty", "give a path, '.' for the current folder")
        if not all(map(is_utf8, values)):
            raise SettingError("", f"{value!r} is not UTF-8", "rename it, or write it in UTF-8")
        checked = handler(value)
        for number in (value, checked):
            if isinstance(number, int) and abs(number) >= INTEGERS:
                raise SettingError("", "has too many digits", "give a number below 2^63")
        return checked

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        for kind in type(self).__mro__:
            for name, needs in vars(kind).get("NEEDS", {}).items():
                if not is_set(self, name):
                    continue
                listed = needs if isinstance(needs, list) else [needs]
                for need in listed:
                    self._check_need(name, need)
        return self

    def _check_need(self, name: str, need: Need) -> None:
        if isinstance(need, str):
            if not getattr(self, need):
                raise without_effect(
                    self, name, f"without {need}", f"give {need} too, or leave it out"
                )
            return
        needed, *values = need
        value = getattr(self, needed)
        if value not in values:
            shown = f"{needed} {value!r}" if isinstance(value, str) else needed
            raise without_effect(self, name, f"with {shown}", f"leave it out or change {needed}")


def is_set(settings: BaseModel, name: str) -> bool:
    """Return whether a setting was given and differs from its default.

    A default that was given counts as not set, because the settings.json of a run lists every setting.
    """
    default = type(settings).model_fields[name].get_default(call_default_factory=False)
    return name in settings.model_fields_set and getattr(settings, name) != default


def without_effect(
    settings: BaseModel, name: str, condition: str, remedy: str = "leave it out"
) -> SettingError:
    """Return the error for a setting that has no effect under a condition."""
    shown = type(settings).model_fields[name].alias or name
    return SettingError(shown, f"has no effect {condition}", remedy)


def is_remote(name: str) -> bool:
    """Return whether the name of a folder is an address such as `s3://bucket/records`."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*(::|://)", name) is not None


def parse_bytes(text: str) -> int:
    """Return the bytes of a memory size such as 80GB, 24GiB, 640MB or 16e9.

    Raises SettingError, a ValueError, for other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*(?:([kMGT])(i?)B|B?)", text.strip())
    unit = (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " ") if match else 0
    size = int(float(match[1]) * unit) if match else 0
    if size < 10**6:
        problem = f"{text!r} is not a memory size of at least 1 MB"
        raise SettingError("", problem, "write it as 80GB, 24GiB, 640MB or 16e9")
    return size


def _check_size(value: Any) -> str:
    parse_bytes(str(value))
    return str(value)


MemorySize = Annotated[str, BeforeValidator(_check_size)]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class Parallel(Settings):
    """Layout of the model over devices, and settings that save memory."""

    NEEDS: ClassVar = {"recompute_by": "recompute"}

    layout: Usual[Literal["given", "auto"]] = "given"
    """`auto` chooses replicas and stages for the devices of the machine: replicas first, stages only if
    memory requires them. Examples and results stay the same. In a file also `"parallel": "auto"`."""
    pipeline_stages: Annotated[list[list[str]] | None, OnlyWith("tensorflow")] = None
    """Blocks of each stage in order, such as [["emb", "hid*6"], ["hid*6", "enc_out", "pool", "heads"]], in
    quotes on the command line. `hid` is one encoder layer, `hid*7` seven."""
    pipeline_device_mapping: list[Annotated[int, Field(ge=0)]] | None = None
    """The device of each stage; a device may have several stages."""
    schedule: Annotated[Literal["1F1B", "GPipe"], OnlyWith("tensorflow")] = "1F1B"
    """Order of forward and backward passes in a pipeline. `1F1B` alternates them, and stage k of p saves the
    activations of at most p - k micro-batches; `GPipe` runs all forward passes first and saves all activations."""
    recompute: bool = False
    """Save only the inputs of blocks, and run the blocks again in the backward pass with the same dropout."""
    recompute_by: Annotated[Literal["layer", "stage"], OnlyWith("tensorflow")] = "layer"
    """Save the input of each `layer`, or only of each `stage`, whose activations are then recomputed at once."""
    tensor: Annotated[
        list[Positive],
        BeforeValidator(_as_list),
        Field(min_length=1, max_length=2),
        OnlyWith("jax"),
    ] = [1]
    """Tensor parallelism: number of devices that divide each layer by attention heads and inner columns (Shoeybi et
    al. 2019, section 3); with [2, 2], the second number also divides the hidden size. Engine `jax` only."""
    shard_weights: Annotated[bool, OnlyWith("jax")] = False
    """Shard weights, gradients and moments over the replicas; each replica gathers a layer when needed (ZeRO stage 3:
    Rajbhandari et al. 2020, section 5.3). Engine `jax` only."""
    replicated_tensor_sharding: bool = False
    """Shard the optimizer's moments over the replicas; each replica updates its shard (ZeRO stage 1: Rajbhandari et
    al. 2020, section 5.1)."""
    optimizer_state_offload: Annotated[bool, OnlyWith("tensorflow")] = False
    """Keep the optimizer's moments in host memory and update there, to save device memory."""
    embedding_serialization_factor: Positive = 1
    """Compute the masked-LM loss in this many chunks of the vocabulary, so that the logits are never all in memory;
    costs one more product with the word embeddings. Pre-training only."""
    reduce_precision: Annotated[
        Literal["float32", "float16", "bfloat16"], OnlyWith("tensorflow")
    ] = "float32"
    """Number format of the gradient all-reduce; 16 bits halve the traffic."""
    reduce_bucket_megabytes: Annotated[Positive, OnlyWith("tensorflow")] = 64
    """Size of the buckets of the gradient all-reduce (MB of 10^6 bytes in float32)."""
    trace: Annotated[Path | None, OnlyWith("tensorflow")] = None
    """Write the times of all forward and backward passes of the first three steps to this file, a trace for
    chrome://tracing or Perfetto. With several processes, each writes its own file, NAME_rank0.json and so on."""

    @property
    def tensor_shape(self) -> tuple[int, int]:
        """Return the devices of a replica along the two axes of `tensor`."""
        first, second = [*self.tensor, 1, 1][:2]
        return first, second

    def check_engine(self, engine: Engine, model: Settings | None) -> None:
        """Raise SettingError for a setting that the engine does not have, or that the model's sizes do not fit."""
        first, second = self.tensor_shape
        sizes = {"num_attention_heads": first, "intermediate_size": first, "hidden_size": second}
        for name, shards in sizes.items():
            if model is not None and getattr(model, name) % shards:
                problem = f"{shards} does not divide bert_config.{name} ({getattr(model, name)})"
                raise SettingError("parallel.tensor", problem, "choose a number that does")
        has_one_stage = self.layout == "auto" or len(self.pipeline_stages or ()) == 1
        for name, marker in markers_of(Parallel):
            is_refused = isinstance(marker, OnlyWith) and marker.engine != engine
            if not is_refused or not is_set(self, name):
                continue
            instead = "leave it out"
            if name == "pipeline_stages":
                if has_one_stage:
                    continue
                instead = "give --parallel.layout auto"
            remedy = f"{instead}, or give --engine {marker.engine}"
            problem = f"is not supported by engine {engine}"
            raise SettingError(f"parallel.{name}", problem, remedy)

    @field_validator("pipeline_stages")
    @classmethod
    def _expand_repeats(cls, stages: list[list[str]] | None) -> list[list[str]] | None:
        if stages is None:
            return None
        blocks = ("emb", "hid", *LAST_BLOCKS)
        expanded: list[list[str]] = [[] for _ in stages]
        for number, stage in enumerate(stages):
            for entry in stage or [""]:
                name, star, times = entry.partition("*")
                if name not in blocks or (star and not re.fullmatch(r"0*[1-9]\d{0,3}", times)):
                    raise SettingError(
                        "",
                        f"stage {number} names {entry!r}, which is not a block",
                        f"blocks are {', '.join(blocks)}, and hid*7 stands for seven of hid",
                    )
                expanded[number] += [name] * int(times or 1)
        return expanded

    @model_validator(mode="after")
    def _each_stage_has_a_device(self) -> "Parallel":
        stages = self.pipeline_stages
        devices = self.pipeline_device_mapping
        if self.layout == "auto" or (stages is None and devices is None):
            return self  # `auto` replaces both
        name = "pipeline_device_mapping"
        if stages is None:
            raise SettingError(name, "needs pipeline_stages", "give both or neither")
        if devices is None:
            raise SettingError("pipeline_stages", f"needs {name}", "give both or neither")
        if not stages or len(stages) != len(devices):
            problem = f"lists {count(len(devices), 'device')} for {count(len(stages), 'stage')}"
            raise SettingError(name, problem, "give one for each stage")
        if set(devices) != set(range(max(devices) + 1)):
            raise SettingError(name, f"{devices} leaves a device out", "number them from 0")
        readers = [name for name, block in LAST_BLOCKS.items() if block.reads_word_table]
        sharing = {"emb", *readers}
        ends = {on for stage, on in zip(stages, devices, strict=True) if sharing & {*stage}}
        if len(ends) > 1:
            problem = f"{devices} separates emb and heads, which share the word embeddings"
            raise SettingError(name, problem, "give both the same device")
        return self


class Cluster(Settings):
    """Processes of a run; by default read from TF_CONFIG or SLURM, otherwise a single process."""

    workers: list[str] = []
    """host:port of every process, in the order of ranks; set by `bert launch`."""
    rank: Annotated[int, Field(ge=0)] | None = None
    """Rank of this process."""
    lost_after_seconds: Annotated[int, Field(ge=5, le=600)] = 20
    """Seconds without a heartbeat after which a process counts as lost; the run then ends on all processes."""
    report_waiting_after_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Seconds after which the processes print the rank that they are waiting for."""
    bind_address: str | None = None
    """Network interface on which this process listens, by name or IPv4 address; by default loopback on one
    host, otherwise every interface. Connections are not authenticated, so the network must be trusted."""

    @model_validator(mode="after")
    def _workers_and_rank_go_together(self) -> "Cluster":
        if self.workers and self.rank is None:
            raise SettingError("workers", "needs rank", "give both or neither")
        if self.rank is not None and not self.workers:
            raise SettingError("rank", "needs workers", "give both or neither")
        if self.rank is not None and self.rank >= len(self.workers):
            problem = f"{self.rank} is not less than the number of workers, {len(self.workers)}"
            raise SettingError("rank", problem, "ranks count from 0")
        return self


class Wandb(Settings):
    """Weights & Biases; WANDB_MODE=offline stores the metrics on this machine."""

    enabled: bool = False
    """Log the run."""
    project: str = "bert"
    """Project of the run."""
    entity: str | None = None
    """Team or user that owns the project; by default the login's."""
    name: str | None = None
    """Name of the run; by default the name of its folder."""
    tags: list[str] = []
    """Tags of the run."""
