"""Settings of how a run is spread: stages over devices, replicas, processes, hosts.

What stands here decides where and in which order the work is done, how much memory it takes and
what is sent, and nothing about the numbers, but for the rounding of gradients that travel in 16 bits:
a run may go on with other ones. `pipeline_stages` lists blocks by their names, `hid` for one encoder
layer and `hid*7` for seven; the word table is in the first and in the last stage, so those two share
a device.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from bert_cli.config.settings import Positive, Settings, is_set

BLOCKS = ("emb", "hid", "enc_out", "pool", "heads", "qa_head", "glue_head", "token_head")


class Parallel(Settings):
    """How the model is laid out over devices, and what it trades for memory."""

    layout: Literal["given", "auto"] = "given"
    """`auto` chooses replicas and stages for the devices there are: replicas first, stages only when
    memory demands them; the stages of the config are ignored. It keeps the micro-batch and the product
    of replicas and accumulation, so examples and numbers stay the same. In a file also
    `"parallel": "auto"`."""
    pipeline_stages: list[list[str]] | None = None
    """Blocks of each stage in order, as [["emb", "hid*6"], ["hid*6", "enc_out", "pool", "heads"]]; on the
    command line the same in quotes. `hid` is one encoder layer, and every block is in one stage."""
    pipeline_device_mapping: list[Annotated[int, Field(ge=0)]] | None = None
    """The device of each stage; a device may have several stages."""
    schedule: Literal["1F1B", "GPipe"] = "1F1B"
    """Order of a pipeline's work: `1F1B` alternates, and stage k of p keeps at most p - k
    micro-batches; `GPipe` runs all forwards first and keeps every micro-batch."""
    recompute: bool = False
    """Keep only the inputs of blocks and run the blocks again in the backward pass, with the same
    dropout."""
    recompute_by: Literal["layer", "stage"] = "layer"
    """Whose inputs recomputation keeps: those of each `layer` (one layer's activations at a time), or
    those of each `stage` (fewer inputs, but all activations of the stage at a time)."""
    replicated_tensor_sharding: bool = False
    """Each replica keeps and updates its share of the optimizer's moments (ZeRO stage 1: Rajbhandari
    et al. 2020, section 5.1)."""
    optimizer_state_offload: bool = False
    """Keep the optimizer's moments in host memory and update there, to save device memory."""
    embedding_serialization_factor: Positive = 1
    """Chunks of the vocabulary in the masked-LM loss: the scores of all words, and their gradients, are
    never in memory as a whole, for one more product with the word table. Pre-training only."""
    reduce_precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """Number format in which replicas add up their gradients; 16 bits halve what is sent."""
    reduce_bucket_megabytes: Positive = 64
    """Gradients are sent in buckets of about this size (MB of 10^6 bytes in float32)."""
    trace: Path | None = None
    """Write the times of every forward and backward of the first three steps here, as a trace for
    chrome://tracing or Perfetto; of several processes each writes its own, NAME_rank0.json and so on."""

    @field_validator("pipeline_stages")
    @classmethod
    def _write_out_short_forms(cls, stages: list[list[str]] | None) -> list[list[str]] | None:
        if stages is None:
            return None
        written: list[list[str]] = []
        for number, stage in enumerate(stages):
            blocks: list[str] = []
            for entry in stage:
                name, star, times = entry.partition("*")
                if name not in BLOCKS or (star and not (times.isdigit() and int(times))):
                    raise ValueError(
                        f"stage {number} names {entry!r}; blocks are {', '.join(BLOCKS)}, "
                        "and hid*7 stands for seven of hid"
                    )
                blocks += [name] * (int(times) if star else 1)
            if not blocks:
                raise ValueError(f"stage {number} has no block; leave it out, and its device")
            written.append(blocks)
        return written

    @model_validator(mode="after")
    def _recompute_by_has_an_effect(self) -> "Parallel":
        if is_set(self, "recompute_by") and not self.recompute:
            raise ValueError(
                f"recompute_by ({self.recompute_by}) has no effect without recompute; give both or neither"
            )
        return self

    @model_validator(mode="after")
    def _each_stage_has_a_device(self) -> "Parallel":
        stages, devices = self.pipeline_stages, self.pipeline_device_mapping
        if self.layout == "auto":
            return self  # which replaces both
        if (stages is None) != (devices is None):
            raise ValueError(
                "pipeline_stages and pipeline_device_mapping go together; give both or neither"
            )
        if stages is None or devices is None:
            return self
        if not stages or len(stages) != len(devices):
            raise ValueError(
                f"pipeline_device_mapping names {len(devices)} devices for {len(stages)} stages; give one each"
            )
        if sorted(set(devices)) != list(range(max(devices) + 1)):
            raise ValueError(
                f"pipeline_device_mapping {devices} leaves a device out; number them from 0"
            )
        return self

    @field_validator("pipeline_device_mapping")
    @classmethod
    def _the_word_table_is_on_one_device(
        cls, devices: list[int] | None, info: ValidationInfo
    ) -> list[int] | None:
        stages = info.data.get("pipeline_stages")
        if (
            info.data.get("layout") == "auto"
            or stages is None
            or devices is None
            or len(stages) != len(devices)
        ):
            return devices
        where = {name: number for number, stage in enumerate(stages) for name in stage}
        first, last = where.get("emb"), where.get("heads")
        if first is not None and last is not None and devices[first] != devices[last]:
            raise ValueError(
                f'stage {first} "emb" and stage {last} "heads" share the word table, so they need one '
                f"device; got {devices[first]} and {devices[last]}"
            )
        return devices


class Cluster(Settings):
    """The processes of a run. By default as TF_CONFIG or SLURM say, else this process alone."""

    workers: list[str] = []
    """host:port of every process in the order of their ranks; `bert launch` fills it in."""
    rank: Annotated[int, Field(ge=0)] | None = None
    """Number of this process among the workers."""
    lost_after_seconds: Annotated[int, Field(ge=5, le=600)] = 20
    """A process that gives no sign of life for so long is lost, and the run ends on all."""
    say_waiting_after_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Say which rank the others wait for when they have waited for so long."""

    bind_address: str | None = None
    """Network interface on which this process takes connections: its name, or its IPv4 address on this
    host. By default loopback when all processes are on one host, else every interface. Connections are
    not authenticated, so the network must be trusted."""

    @model_validator(mode="after")
    def _workers_and_rank_go_together(self) -> "Cluster":
        if bool(self.workers) != (self.rank is not None):
            raise ValueError("workers and rank go together; give both or neither")
        if self.rank is not None and self.rank >= len(self.workers):
            raise ValueError(
                f"rank {self.rank} is not one of {len(self.workers)} workers, which count from 0"
            )
        return self
