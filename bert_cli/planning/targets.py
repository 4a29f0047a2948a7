"""The accelerators for which a step can be compiled on a machine without them: one table of facts.

Sources: TPUs https://docs.cloud.google.com/tpu/docs/v5e, v5p and v6e. GPUs: NVIDIA's data sheets of A100, H100, H200
and HGX B200, FLOP/s without sparsity; cores, caches, memory and bandwidth as openxla/xla lists them in
xla/backends/gpu/target_config/specs (a100_sxm_80, h100_sxm, h200, b200).
"""

import math
import re
from dataclasses import dataclass

from bert_cli.errors import ConfigError, nearest
from bert_cli.text import count

DEVICES_OF_A_HOST = 8
"""Maximum number of GPUs of a target, which NVLink connects."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of device; sizes in bytes, speeds in bytes per second and FLOP/s."""

    title: str
    peak: float
    """FLOP/s of products of bfloat16 and of float16."""
    memory: int
    bandwidth: float
    link: float
    """Bytes per second that a device can send to the others, half of the published bidirectional speed."""
    axes: int = 0
    """Axes of the topology of a TPU slice; 0 for a GPU."""
    cores: int = 0
    lanes: int = 128
    """Float32 units of a core."""
    shared_memory: int = 233472
    """Of a core, in bytes; a block may take 1,024 less."""
    cache: int = 0
    clock: float = 0.0
    """GHz."""
    capability: int = 0
    """Major version of CUDA's compute capability."""

    @property
    def kind(self) -> str:
        """TPU or GPU."""
        return "TPU" if self.axes else "GPU"

    @property
    def description(self) -> str:
        """Return the text of XLA's GpuTargetConfigProto."""
        return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
          shared_memory_per_block_optin: {self.shared_memory - 1024}
          core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.cache}
          device_memory_size: {self.memory} cuda_compute_capability {{ major: {self.capability} }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
        }}
        platform_name: "CUDA" device_description_str: "{self.title}"
        dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 8 }}
        """


GIB = 2**30
ACCELERATORS = {
    "v5e": Accelerator(title="TPU v5e", peak=197e12, memory=16 * GIB, bandwidth=819e9, link=200e9, axes=2),
    "v5p": Accelerator(title="TPU v5p", peak=459e12, memory=95 * GIB, bandwidth=2765e9, link=600e9, axes=3),
    "v6e": Accelerator(title="TPU v6e", peak=918e12, memory=32 * GIB, bandwidth=1638e9, link=400e9, axes=2),
    "a100": Accelerator(
        title="NVIDIA A100-SXM4-80GB", peak=312e12, memory=85_100_068_864,
        bandwidth=2039e9, link=300e9, cores=108, lanes=64, shared_memory=167_936,
        cache=40 * 2**20, clock=1.41, capability=8,
    ),
    "h100": Accelerator(
        title="NVIDIA H100 80GB HBM3", peak=989.4e12, memory=84_942_979_072,
        bandwidth=3352e9, link=450e9, cores=132, cache=50 * 2**20, clock=1.98, capability=9,
    ),
    "h200": Accelerator(
        title="NVIDIA H200 141GB HBM3e", peak=989.4e12,
        memory=151_397_597_184, bandwidth=4800e9, link=450e9, cores=132, cache=50 * 2**20,
        clock=1.98, capability=9,
    ),
    "b200": Accelerator(
        title="NVIDIA B200", peak=2250e12, memory=191_514_411_008,
        bandwidth=7672e9, link=900e9, cores=148, cache=132_644_864, clock=1.965, capability=10,
    ),
}  # fmt: skip
EXAMPLES = "v5e:4x4, v5p:2x2x2, v6e:16x16, a100:8, h100:8"


@dataclass(frozen=True)
class Target:
    """Devices of a kind."""

    name: str
    accelerator: Accelerator
    devices: int

    @property
    def topology(self) -> str:
        """Return XLA's name of the topology: a TPU slice, or slices x hosts x GPUs."""
        return self.name if self.accelerator.axes else f"1x1x{self.devices}"


def find_target(name: str) -> Target:
    """Return the devices that a name such as v5e:4x4 or h100:8 describes. Raises ConfigError for another name."""
    where = f"--compile-for ({name})"
    kind, _, shape = name.partition(":")
    accelerator = ACCELERATORS.get(kind)
    if accelerator is None:
        near = nearest(kind, ACCELERATORS)
        remedy = f"did you mean {near}? " if near else ""
        raise ConfigError(where, "no such accelerator", f"{remedy}see bert plan --list-targets")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"\d+(x\d+)*", shape) else []
    if len(sizes) != max(1, accelerator.axes) or 0 in sizes:
        form = "x".join("222"[: accelerator.axes]) if accelerator.axes else "8"
        problem = f"must end with {count(max(1, accelerator.axes), 'number')} above 0"
        raise ConfigError(where, problem, f"for example {kind}:{form}")
    if accelerator.kind == "GPU" and sizes[0] > DEVICES_OF_A_HOST:
        problem = f"the table has the speed of NVLink between {DEVICES_OF_A_HOST} GPUs of a host"
        raise ConfigError(where, problem, f"use at most {kind}:{DEVICES_OF_A_HOST}")
    return Target(name, accelerator, math.prod(sizes))
