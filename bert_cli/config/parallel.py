"""The settings that spread a run: stages over devices, replicas, processes and hosts.

They decide where and in which order the work is done, its memory and its traffic. They do not change the
numbers, except that gradients reduced in 16 bits are rounded, so a run may be resumed with other values.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from bert_cli.config.settings import Positive, SettingError, Settings

BLOCKS = ("emb", "hid", "enc_out", "pool", "heads", "qa_head", "glue_head", "token_head")


class Parallel(Settings):
    """How the model is laid out over devices, and what it trades for memory."""

    NEEDS: ClassVar = {"recompute_by": "recompute"}

    layout: Literal["given", "auto"] = "given"
    """`auto` chooses replicas and stages for the devices of the machine: replicas first, stages only if
    memory requires them; it ignores the stages of the config. It does not change the micro-batch or the
    product of replicas and accumulation, so examples and results stay the same. In a file also
    `"parallel": "auto"`."""
    pipeline_stages: list[list[str]] | None = None
    """Blocks of each stage in order, such as [["emb", "hid*6"], ["hid*6", "enc_out", "pool", "heads"]]; on
    the command line the same in quotes. `hid` is one encoder layer, `hid*7` seven. Every block is in one
    stage."""
    pipeline_device_mapping: list[Annotated[int, Field(ge=0)]] | None = None
    """The device of each stage; a device may have several stages."""
    schedule: Literal["1F1B", "GPipe"] = "1F1B"
    """Order of a pipeline's work: with `1F1B`, forward and backward alternate, and stage k of p saves the
    activations of at most p - k micro-batches; `GPipe` runs all forwards first and saves all of them."""
    recompute: bool = False
    """Save only the inputs of blocks, and run the blocks again in the backward pass with the same dropout."""
    recompute_by: Literal["layer", "stage"] = "layer"
    """Save the inputs of each `layer` and recompute one layer's activations at a time, or save those of each
    `stage`: fewer inputs, but all activations of the stage at a time."""
    replicated_tensor_sharding: bool = False
    """Shard the optimizer's moments over the replicas; each updates its part (ZeRO stage 1: Rajbhandari et
    al. 2020, section 5.1)."""
    optimizer_state_offload: bool = False
    """Hold the optimizer's moments in host memory and update there, to save device memory."""
    embedding_serialization_factor: Positive = 1
    """Number of chunks of the vocabulary in the masked-LM loss. The logits of the complete vocabulary and
    their gradients are then never in memory at once, for one more product with the word embeddings.
    Pre-training only."""
    reduce_precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """Number format of the gradient all-reduce; 16 bits halve the traffic."""
    reduce_bucket_megabytes: Positive = 64
    """Size of the buckets of the gradient all-reduce (MB of 10^6 bytes in float32)."""
    trace: Path | None = None
    """Write the times of every forward and backward of the first three steps to this file, as a trace for
    chrome://tracing or Perfetto; of several processes each writes its own, NAME_rank0.json and so on."""

    @field_validator("pipeline_stages")
    @classmethod
    def _expand_repeats(cls, stages: list[list[str]] | None) -> list[list[str]] | None:
        """Return the stages with `hid*7` written as seven blocks."""
        if stages is None:
            return None
        expanded: list[list[str]] = []
        for number, stage in enumerate(stages):
            blocks: list[str] = []
            for entry in stage:
                name, star, times = entry.partition("*")
                if name not in BLOCKS or (star and not (times.isdigit() and int(times))):
                    raise SettingError(
                        "",
                        f"stage {number} names {entry!r}, which is not a block",
                        f"blocks are {', '.join(BLOCKS)}, and hid*7 stands for seven of hid",
                    )
                blocks += [name] * (int(times) if star else 1)
            if not blocks:
                problem = f"stage {number} has no block"
                raise SettingError("", problem, "leave it out, and its device")
            expanded.append(blocks)
        return expanded

    @field_validator("pipeline_device_mapping")
    @classmethod
    def _word_embeddings_are_on_one_device(
        cls, devices: list[int] | None, info: ValidationInfo
    ) -> list[int] | None:
        stages = info.data.get("pipeline_stages")
        if info.data.get("layout") == "auto" or not stages or not devices:
            return devices
        stage_of = {name: number for number, stage in enumerate(stages) for name in stage}
        first, last = stage_of.get("emb"), stage_of.get("heads")
        if len(stages) != len(devices) or first is None or last is None:
            return devices
        if devices[first] != devices[last]:
            raise SettingError(
                "",
                f'stage {first} "emb" and stage {last} "heads" share the word embeddings, and are on devices '
                f"{devices[first]} and {devices[last]}",
                "give both the same device",
            )
        return devices

    @model_validator(mode="after")
    def _each_stage_has_a_device(self) -> "Parallel":
        stages, devices = self.pipeline_stages, self.pipeline_device_mapping
        if self.layout == "auto" or (stages is None and devices is None):
            return self  # `auto` replaces both
        name = "pipeline_device_mapping"
        if stages is None or devices is None:
            one, other = ("pipeline_stages", name) if devices is None else (name, "pipeline_stages")
            raise SettingError(one, f"needs {other}", "give both or neither")
        if not stages or len(stages) != len(devices):
            raise SettingError(
                name,
                f"lists {len(devices)} devices for {len(stages)} stages",
                "give one for each stage",
            )
        if sorted(set(devices)) != list(range(max(devices) + 1)):
            raise SettingError(name, f"{devices} leaves a device out", "number them from 0")
        return self


class Cluster(Settings):
    """The processes of a run; by default those of TF_CONFIG or SLURM, or this process alone."""

    workers: list[str] = []
    """host:port of every process in the order of their ranks; `bert launch` sets it."""
    rank: Annotated[int, Field(ge=0)] | None = None
    """Rank of this process."""
    lost_after_seconds: Annotated[int, Field(ge=5, le=600)] = 20
    """A process without heartbeat for this long is lost, and the run ends on all."""
    report_waiting_after_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Print the rank that the others wait for after this long."""
    bind_address: str | None = None
    """Network interface on which this process listens: its name, or its IPv4 address on this host. By
    default loopback when all processes are on one host, otherwise every interface. Connections are not
    authenticated, so the network must be trusted."""

    @model_validator(mode="after")
    def _workers_and_rank_go_together(self) -> "Cluster":
        if bool(self.workers) != (self.rank is not None):
            name, other = ("workers", "rank") if self.workers else ("rank", "workers")
            raise SettingError(name, f"needs {other}", "give both or neither")
        if self.rank is not None and self.rank >= len(self.workers):
            problem = f"{self.rank} is not less than the number of workers, {len(self.workers)}"
            raise SettingError("rank", problem, "ranks count from 0")
        return self
