"""The idle time and traffic of a layout, and the choice of a layout: replicas first, then more devices per replica.

Replicas communicate only in the all-reduce, so the search tries one device per replica, then two, and so on. With JAX
only the number of replicas is chosen.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, groupby

from bert_cli.config.training import GlobalBatch, Order, TrainSettings, short
from bert_cli.errors import ConfigError
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.planning.flops import forward_flops
from bert_cli.planning.memory import (
    Estimate,
    Stages,
    estimate,
    laid_stages,
    on_device,
    stages_of,
    weights_of,
)
from bert_cli.processes import cpu_count
from bert_cli.text import count, format_bytes

Shape = tuple[int, int]  # replicas, devices of each

# Fraction of a device's memory that a run may fill, besides the runtime and the error of the estimate.
USABLE = 0.8
# Additional fraction of a step that a pipeline may be idle with a larger micro-batch.
MORE_IDLE = 0.05
# Positions of a micro-batch above which a CPU gets no faster: BERT-base on one core trains 4.3 examples/s with 4 x 128,
# 5.3 with 8 x 128 and with larger micro-batches. Narrower models need more positions.
CPU_POSITIONS = 4096
AUTO = "pass --parallel.layout auto to choose a layout that fits, with the same results"


def flops_of(order: TrainSettings) -> dict[str, float]:
    """Return the floating-point operations of each block for one forward of a micro-batch."""
    config = order.bert_config
    width = config.hidden_size
    shape = order.shape
    positions = shape.examples * shape.positions
    flops = {
        # A stage with the embeddings alone, as in the configs of Graphcore, still has some time.
        "emb": 10.0 * positions * width,  # element by element
        "hid": forward_flops(config, (), shape) / config.num_hidden_layers,
    }
    for name, block in ARCHITECTURES[config.architecture].last_blocks.items():
        flops[name] = float(sum(product.flops for product in block.products(config, shape)))
    return flops


def bubble(times: Sequence[float], mapping: Sequence[int], micro_batches: int) -> float:
    """Return the fraction of a step in which the devices of a pipeline are idle, on average.

    `times` are the times of the stages for a micro-batch, `mapping` their devices. For p equal stages on p devices
    and m micro-batches the result is (p - 1) / (m + p - 1) (Narayanan et al. 2021, section 2.2.1).
    """
    # A device with two stages, the first and the last, is busy for both.
    busy = [0.0] * (max(mapping) + 1)
    for time, device in zip(times, mapping, strict=True):
        busy[device] += time
    step = sum(times) + (micro_batches - 1) * max(busy)
    return max(0.0, 1.0 - micro_batches * sum(times) / (len(busy) * step))


def idle(order: TrainSettings) -> float:
    """Return the bubble of a layout."""
    flops = flops_of(order)
    stages, mapping = stages_of(order)
    times = [sum(flops[block] for block in stage) for stage in stages]
    return bubble(times, mapping, order.global_batch.grad_acc_steps_per_replica)


def parameters(order: TrainSettings) -> int:
    """Return the number of weights of the model."""
    elements = weights_of(order.bert_config)
    (stages, _) = stages_of(order)
    blocks = chain.from_iterable(stages)
    return elements["final_norm"] + sum(elements[block] for block in blocks)


def fullest(order: TrainSettings) -> tuple[int, Estimate]:
    """Return the device with the highest estimate, and the estimate."""
    return max(enumerate(estimate(order)), key=lambda pair: pair[1].total)


def fits(order: TrainSettings, memory: int) -> bool:
    """Return whether the layout fits on devices with this memory."""
    return fullest(order)[1].total <= USABLE * memory


def propose(order: Order, devices: int, memory: int, processes: int = 1) -> Order:
    """Return the order with the fitting layout of the fewest devices per replica, then the most replicas.

    `memory` is the memory of one device in bytes. The micro-batches of a step stay the same; all devices of a
    replica are in one process. Raises ConfigError, with the smallest sufficient memory, when no layout fits.
    """
    shapes = _shapes(order, devices, processes)
    for shape in shapes:
        laid = _laid_out(order, shape, USABLE * memory)
        if fits(laid, memory):
            return laid
    least = min(fullest(_laid_out(order, shape, 0.0))[1].total for shape in shapes)
    offload = "shard_weights" if order.engine == "jax" else "optimizer_state_offload"
    unset = [name for name in ("recompute", offload) if not getattr(order.parallel, name)]
    flags = [f"--parallel.{name.replace('_', '-')}" for name in unset]
    raise ConfigError(
        f"parallel.layout ({count(devices, 'device')} of {format_bytes(memory)})",
        f"no layout fits: the run needs {format_bytes(least / USABLE)} on each device, with {1 - USABLE:.0%} left free",
        f"use {' or '.join([*flags, 'a smaller global_batch.micro_batch_size with more accumulation'])}",
    )


def check_processes(batch: GlobalBatch, processes: int, *, is_auto: bool = False) -> None:
    """Raise ConfigError if processes cannot divide the replicas, with flags that keep the examples of a step.

    If the layout `is_auto`, it chooses the replicas, up to the micro-batches of a step.
    """
    # An automatic layout may make a replica of each micro-batch.
    replicas = batch.replicas
    if is_auto:
        replicas *= batch.grad_acc_steps_per_replica
    if replicas % processes == 0:
        return
    examples_each, rest = divmod(batch.examples, processes)
    if rest:
        where = f"global_batch ({count(batch.examples, 'example')} a step)"
        remedy = "choose a number of processes that divides the batch, or change the batch"
    else:
        micro_batch = max(n for n in range(1, batch.micro_batch_size + 1) if examples_each % n == 0)
        numbers = {"micro-batch-size": micro_batch, "replicas": processes}
        numbers["grad-acc-steps-per-replica"] = examples_each // micro_batch
        flags = " ".join(f"--global-batch.{name} {number}" for name, number in numbers.items())
        counted = count(replicas, "micro-batch" if is_auto else "replica")
        where = f"global_batch ({counted} a step)"
        remedy = f"pass {flags}"
    raise ConfigError(where, f"cannot be divided among {processes} processes", remedy)


def choose(order: Order, device_kind: str, devices: int, memory: int, processes: int = 1) -> Order:
    """Return the order with a layout and a micro-batch, if it leaves them open; `device_kind` is CPU, GPU or TPU.

    The layout is chosen for the smallest micro-batch. Raises ConfigError when no layout fits.
    """
    is_auto = order.parallel.layout == "auto"
    laid = order
    if is_auto:
        laid = propose(order, devices, memory, processes)
    if laid.global_batch.examples_per_step is None:
        return laid
    return _larger(laid, device_kind, memory) or with_micro_batch(laid, 1)


def with_micro_batch(order: Order, size: int) -> Order:
    """Return the order with this micro-batch and the same examples per step."""
    batch = order.global_batch
    examples = batch.micro_batch_size * batch.grad_acc_steps_per_replica
    changes = {"micro_batch_size": size, "grad_acc_steps_per_replica": examples // size}
    return order.with_batch(**changes, examples_per_step=None)


def _larger(order: Order, device_kind: str, memory: int) -> Order | None:
    """Return the order with the largest micro-batch that fits, at least twice as large and at least as fast.

    The devices of a pipeline may be idle for a fraction MORE_IDLE longer.
    """
    batch = order.global_batch
    allowed = idle(order) + MORE_IDLE
    examples = batch.micro_batch_size * batch.grad_acc_steps_per_replica
    limit = examples
    if device_kind == "CPU":
        limit = min(examples, CPU_POSITIONS // order.max_seq_length)
    for size in range(limit, 2 * batch.micro_batch_size - 1, -1):
        if examples % size == 0:
            larger = with_micro_batch(order, size)
            if fits(larger, memory) and idle(larger) <= allowed:
                return larger
    return None


def idle_memory(order: TrainSettings, device_kind: str, memory: int) -> list[str]:
    """Return a line about memory that a larger micro-batch of the same step would use, if one fits."""
    larger = _larger(order, device_kind, memory)
    if larger is None:
        return []
    number = larger.global_batch.micro_batch_size
    steps = larger.global_batch.grad_acc_steps_per_replica
    flags = f"--global-batch.micro-batch-size {number} --global-batch.grad-acc-steps-per-replica {steps}"
    return [
        f"memory: {format_bytes(fullest(order)[1].total)} of {format_bytes(memory)}; "
        f"micro-batch {number} would fit, with the same batch ({flags})"
    ]


def _shapes(order: TrainSettings, devices: int, processes: int) -> list[Shape]:
    batch = order.global_batch
    parallel = order.parallel
    process_devices = devices // processes
    micro_batches = batch.replicas * batch.grad_acc_steps_per_replica
    tensor_devices = math.prod(parallel.tensor_shape)
    if process_devices < tensor_devices:
        problem = f"are fewer than the {count(processes, 'process')}"
        if tensor_devices > 1:
            problem += f" times the {tensor_devices} of parallel.tensor"
        remedy = f"start at most {devices // tensor_devices}"
        raise ConfigError(f"devices ({devices})", problem, remedy)
    check_processes(batch, processes, is_auto=True)
    # A stage for each layer, and one for both ends of the model.
    limit = order.bert_config.num_hidden_layers + 1
    sizes: Sequence[int] = range(1, min(process_devices, limit) + 1)
    if order.engine == "jax":
        sizes = [tensor_devices]
    replicas = process_devices // sizes[0]
    # Only numbers that divide a step into complete micro-batches.
    divisors = [n for n in range(1, replicas + 1) if micro_batches % (processes * n) == 0]
    counts = [divisors[bisect_right(divisors, process_devices // size) - 1] for size in sizes]
    return [(processes * number, size) for number, size in zip(counts, sizes, strict=True)]


def _laid_out(order: Order, shape: Shape, memory: float) -> Order:
    (replicas, devices) = shape
    batch = order.global_batch
    accumulation = batch.replicas * batch.grad_acc_steps_per_replica // replicas
    laid = order.with_batch(replicas=replicas, grad_acc_steps_per_replica=accumulation)
    # The last stage returns to device 0, which has the word embeddings that the head scores with.
    mapping = [0]
    if devices > 1 and order.engine != "jax":
        mapping = [*range(devices), 0]
    stages = {"pipeline_stages": _divide(laid, mapping, memory), "pipeline_device_mapping": mapping}
    return laid.model_copy(
        update={"parallel": order.parallel.model_copy(update={"layout": "given", **stages})}
    )


def _divide(order: TrainSettings, mapping: Sequence[int], memory: float) -> list[list[str]]:
    """Return the blocks of each stage: each layer goes to the least busy device with enough memory.

    The first and the last stage are on device 0, because they share the token embedding. If no device has
    enough memory, the layer goes to the device that is the least full with it.
    """
    flops = flops_of(order)
    # Device 0 needs no layer besides the ends of the model; the stages between have at least one.
    layers = [0, *[1] * (len(mapping) - 2), 0][: len(mapping)]
    for _ in range(order.bert_config.num_hidden_layers - sum(layers)):
        choices = []
        for number, device in enumerate(mapping):
            larger = [n + (stage == number) for stage, n in enumerate(layers)]
            stages = laid_stages(larger, order.head.last_blocks)
            full = on_device(order, stages, mapping, device).total
            numbers = [n for n, on in enumerate(mapping) if on == device]
            blocks = chain.from_iterable(stages[n] for n in numbers)
            busy = sum(flops[block] for block in blocks)
            # Among equal devices the later device, which has fewer micro-batches in flight.
            key = (0, busy, full) if full <= memory else (1, full, busy)
            choices.append((*key, -number))
        *_, later = min(choices)
        layers[-later] += 1
    return laid_stages(layers, order.head.last_blocks)


# --- text


def describe_layout(order: TrainSettings) -> list[str]:
    """Return the layout as text, with a line for each setting that has no effect in it."""
    batch = order.global_batch
    parallel = order.parallel
    stages, mapping = stages_of(order)
    again = "no recomputation"
    if parallel.recompute:
        again = "recomputes each layer"
    lines = [
        f"layout: {shape(order).replace(' of ', ' x ')}, {again}, about "
        f"{format_bytes(fullest(order)[1].total)} on the fullest device"
    ]
    if len(stages) > 1:
        devices = range(max(mapping) + 1)
        words = []
        for blocks, group in groupby(devices, lambda device: blocks_on(stages, mapping, device)):
            first, *rest = group
            name = f"device {first}"
            if rest:
                name = f"devices {first} to {rest[-1]}"
            words.append(f"{name}: {blocks}")
        lines.append("; ".join(words))
        lines.append(f"devices are idle for {idle(order):.1%} of a step")
    if batch.replicas > 1:
        often = "micro-batch" if parallel.shard_weights else "step"
        # 4 bytes each: gradients are added in float32.
        sums = f"{format_bytes(4 * parameters(order))} of gradients with the others once a {often}"
        return [*lines, f"each replica adds up {sums}"]
    for name in ("replicated_tensor_sharding", "shard_weights"):
        if getattr(parallel, name):
            lines.append(f"parallel.{name} has no effect in this layout")
    return lines


def simulated(devices: int) -> str:
    """Return a message that a CPU simulates several devices of a process."""
    return f"{devices} devices are simulated on the CPU, and share its {count(cpu_count(), 'core')}"


def shape(order: TrainSettings) -> str:
    """Return the replicas, the devices per replica and the sharding of weights as text."""
    devices = count(len(estimate(order)), "device")
    if math.prod(order.parallel.tensor_shape) > 1:
        devices += " in tensor parallelism"
    if order.parallel.shard_weights:
        devices += ", sharded weights"
    return f"{count(order.global_batch.replicas, 'replica')} of {devices}"


def blocks_on(stages: Stages, mapping: Sequence[int], device: int) -> str:
    """Return the blocks on one device, its stages separated by a bar."""
    on_device = [stage for stage, on in zip(stages, mapping, strict=True) if on == device]
    return " | ".join(" ".join(short(stage)) for stage in on_device)
