"""The division of weights over a grid of devices with the axes `replica`, `tensor` and `tensor_2`: a table of names.

With one tensor axis the first product of a pair is divided by columns, complete heads together, and the second by rows
(Shoeybi et al. 2019, section 3). With two axes, weights are divided over both, and hidden states over the second axis.
"""

import re
from collections import defaultdict

import jax
import numpy as np
from jax.sharding import Mesh as Grid
from jax.sharding import PartitionSpec

from bert_cli.parallel.runtime import Mesh

AXES = ("replica", "tensor", "tensor_2")
# Pattern of a weight's name -> for each axis of the weight, the axis of the grid that divides it. The first match
# counts.
SPECS: dict[str, tuple[str | None, ...]] = {
    r"emb/word/embeddings": ("tensor", "tensor_2"),
    r"emb/(position|segment)/embeddings": (None, "tensor_2"),
    r"\w+/masked_lm/bias": ("tensor",),
    r"hid_\d+/.*/(query|key|value|inner|gate)/kernel": ("tensor_2", "tensor"),
    r"hid_\d+/.*/(query|key|value|inner|gate)/bias": ("tensor",),
    r"hid_\d+/.*/output/(dense/)?kernel": ("tensor", "tensor_2"),
    r"(emb|hid_\d+)/.*(bias|gamma|beta)": ("tensor_2",),
    r".*": (),
}


def device_grid(mesh: Mesh) -> Grid:
    """Return the devices of all processes; each process has consecutive replicas."""
    each = mesh.replicas // mesh.processes.count * mesh.layout.devices_of_replica
    of_process: dict[int, list[jax.Device]] = defaultdict(list)
    for device in jax.devices(mesh.kind.lower()):
        of_process[device.process_index].append(device)
    devices = [device for rank in sorted(of_process) for device in of_process[rank][:each]]
    return Grid(np.array(devices).reshape(mesh.replicas, *mesh.layout.tensor_shape), AXES)


def spec_of(name: str, shape: tuple[int, ...], grid: Grid) -> PartitionSpec:
    """Return the division of a weight: not along an axis whose size the devices do not divide."""
    axes = next(axes for pattern, axes in SPECS.items() if re.fullmatch(pattern, name))
    return PartitionSpec(
        *(
            axis if axis and grid.shape[axis] > 1 and size % grid.shape[axis] == 0 else None
            for axis, size in zip(axes, shape, strict=False)
        )
    )


def over_replicas(spec: PartitionSpec, shape: tuple[int, ...], grid: Grid) -> PartitionSpec:
    """Return the specification with the longest undivided axis divided over the replicas, if its size allows it."""
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    free = [
        n for n, axis in enumerate(axes) if axis is None and shape[n] % grid.shape["replica"] == 0
    ]
    if free:
        axes[max(free, key=lambda n: shape[n])] = "replica"
    return PartitionSpec(*axes)
