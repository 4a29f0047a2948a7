"""The settings that spread a run over devices, processes and hosts, and Weights & Biases.

They change memory and traffic of a run and not its numbers, so a run may be resumed with other values of `Parallel` and
`Cluster`.
"""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, field_validator

from bert_cli.facts.heads import LAST_BLOCKS
from bert_cli.settings.markers import Usual
from bert_cli.settings.numbers import Positive
from bert_cli.settings.settings import SettingError, Settings, Unless, as_list
from bert_cli.text import count


class Parallel(Settings):
    """Layout of the model over devices, and settings that save memory."""

    layout: Usual[Literal["given", "auto"]] = "given"
    """`auto` chooses replicas and stages for the devices of the machine: replicas first, stages only if
    memory requires them. Examples and results stay the same. In a file also `"parallel": "auto"`."""
    pipeline_stages: list[list[str]] | None = None
    """Blocks of each stage in order, such as [["emb", "hid*6"], ["hid*6", "enc_out", "pool", "heads"]], in
    quotes on the command line. `hid` is one encoder layer, `hid*7` seven."""
    pipeline_device_mapping: list[NonNegativeInt] | None = None
    """The device of each stage; a device may have several stages."""
    recompute: bool = False
    """Save only the inputs of blocks, and run the blocks again in the backward pass with the same dropout."""
    tensor: Annotated[
        list[Positive], BeforeValidator(as_list), Field(min_length=1, max_length=2)
    ] = [1]
    """Tensor parallelism: number of devices that divide each layer by attention heads and inner columns (Shoeybi et
    al. 2019, section 3); with [2, 2], the second number also divides the hidden size. Engine `jax` only."""
    shard_weights: bool = False
    """Shard weights, gradients and moments over the replicas; each replica gathers a layer when needed (ZeRO stage 3:
    Rajbhandari et al. 2020, section 5.3). Engine `jax` only."""
    replicated_tensor_sharding: bool = False
    """Shard the optimizer's moments over the replicas; each replica updates its shard (ZeRO stage 1: Rajbhandari et
    al. 2020, section 5.1)."""
    optimizer_state_offload: bool = False
    """Keep the optimizer's moments in host memory and update there, to save device memory."""
    embedding_serialization_factor: Positive = 1
    """Compute the masked-LM loss in this many chunks of the vocabulary, so that the logits are never all in memory;
    costs one more product with the word embeddings. Pre-training only."""

    @property
    def tensor_shape(self) -> tuple[int, int]:
        """Return the devices of a replica along the two axes of `tensor`."""
        first, second = [*self.tensor, 1, 1][:2]
        return first, second

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

    def _check(self) -> None:
        stages = self.pipeline_stages
        devices = self.pipeline_device_mapping
        if self.layout == "auto" or (stages is None and devices is None):
            return  # `auto` replaces both
        name = "pipeline_device_mapping"
        if stages is None:
            raise SettingError(name, "needs pipeline_stages", "set both or neither")
        if devices is None:
            raise SettingError("pipeline_stages", f"needs {name}", "set both or neither")
        if not stages or len(stages) != len(devices):
            problem = f"lists {count(len(devices), 'device')} for {count(len(stages), 'stage')}"
            raise SettingError(name, problem, "set one for each stage")
        if sorted(set(devices)) != list(range(len(set(devices)))):
            raise SettingError(name, f"{devices} leaves a device out", "number them from 0")
        readers = [name for name, block in LAST_BLOCKS.items() if block.reads_word_table]
        sharing = {"emb", *readers}
        ends = {on for stage, on in zip(stages, devices, strict=True) if sharing & {*stage}}
        if len(ends) > 1:
            problem = f"{devices} separates emb and heads, which share the word embeddings"
            raise SettingError(name, problem, "set both to the same device")


class Cluster(Settings):
    """Processes of a run; by default read from TF_CONFIG or SLURM, otherwise a single process."""

    NEEDS = {
        "workers": Unless(lambda of: of.rank is not None, "without rank", "set both or neither"),
        "rank": "workers",
    }

    workers: list[str] = []
    """host:port of every process, in the order of ranks; set by `bert launch`. A process listens on the interface of
    its host, without authentication, so the network must be trusted."""
    rank: NonNegativeInt | None = None
    """Rank of this process."""
    lost_after_seconds: Annotated[int, Field(ge=5, le=600)] = 20
    """Seconds without a heartbeat after which a process counts as lost; the run then ends on all processes."""
    start_within_seconds: Positive = 300
    """Seconds within which all processes must have started; otherwise those that have end."""

    def _check(self) -> None:
        if self.rank is not None and self.rank >= len(self.workers):
            problem = f"{self.rank} is not less than the number of workers, {len(self.workers)}"
            raise SettingError("rank", problem, "ranks count from 0")


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
