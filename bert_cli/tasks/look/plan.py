"""`bert plan`: estimate the memory and the idle time of a layout, or propose one.

Only arithmetic on the settings and the shape of a local model, so that a laptop can compare the layouts of a cluster.
`bert pretrain` and `parallel.layout auto` use the same estimates.
"""

import json
from dataclasses import astuple
from pathlib import Path

import numpy as np

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.tools import PlanRunSettings
from bert_cli.config.training import TrainSettings, short
from bert_cli.errors import ConfigError
from bert_cli.planning import layout
from bert_cli.planning.memory import estimate, stages_of
from bert_cli.planning.plan import describe, make_plan
from bert_cli.processes import print_line, print_table
from bert_cli.settings.settings import parse_bytes
from bert_cli.tasks.model.models import find_source
from bert_cli.tasks.run.corpora import with_rows_for_records
from bert_cli.tasks.run.resolve import with_shape_of
from bert_cli.text import count, format_bytes

KIND = "GPU"  # the kind of device of a plan: the micro-batch of a CPU has a limit
# The columns of the table, in the order of `Estimate`.
TERMS = ("weights", "accumulators", "moments", "activations", "logits")


def run(settings: PlanRunSettings) -> None:
    """Print the estimate of a layout, or choose one.

    Raises ConfigError if it does not fit, or if `auto` lacks --devices or --memory.
    """
    devices = settings.devices
    memory = None
    if settings.memory is not None:
        memory = parse_bytes(settings.memory)
    source = None
    path = settings.pretrained_ckpt_path
    # A model that is not here, or has no checkpoint yet, does not prevent a plan of the settings.
    if path is not None and any(Path(path).rglob("*config.json")):
        source = find_source(path)
    order: TrainSettings = with_shape_of(settings, source)
    if isinstance(order, PretrainSettings):
        order = with_rows_for_records(order, source)
    chosen = order
    if order.parallel.layout == "auto" and (devices is None or memory is None):
        problem = "needs the number and the memory of the devices"
        missing = "--memory" if devices else "--devices"
        raise ConfigError("parallel.layout (auto)", problem, f"pass {missing}")
    if memory is not None:
        chosen = layout.choose(order, KIND, devices or 1, memory, settings.processes)
    elif order.global_batch.examples_per_step is not None:
        print_line(
            "micro_batch_size auto: --memory chooses the micro-batch; this plan is for the smallest one"
        )
    _print_layout(chosen)
    needed = chosen.global_batch.replicas * len(estimate(chosen))
    layout.check_processes(chosen.global_batch, settings.processes)
    if devices is not None and needed > devices:
        problem = f"the layout needs {needed}, {layout.shape(chosen)}"
        remedy = "pass --parallel.layout auto to choose a layout that fits"
        raise ConfigError(f"--devices ({devices})", problem, remedy)
    if devices is not None and needed < devices:
        print_line(f"{devices - needed} of {count(devices, 'device')} unused")
    if memory is not None:
        device, fullest = layout.fullest(chosen)
        usable = f"{format_bytes(layout.USABLE * memory)} of {format_bytes(memory)} are usable"
        fit = f"device {device} needs {format_bytes(fullest.total)}; {usable}"
        if not layout.fits(chosen, memory):
            remedy = "use --parallel.layout auto with --devices, --parallel.recompute, or a smaller micro-batch"
            raise ConfigError(f"--memory ({format_bytes(memory)})", fit, remedy)
        for line in (f"fits: {fit}", *layout.idle_memory(chosen, KIND, memory)):
            print_line(line)
    if chosen is not order:
        print_line(f"as flags:\n  {_flags(chosen)}")


def _print_layout(order: TrainSettings) -> None:
    """Print the model, the plan and the memory of each device; the number of steps follows from records, if not set."""
    default = "" if "bert_config" in order.model_fields_set else " (default of --bert-config)"
    batch = order.global_batch
    epochs = order.num_epochs
    length = "a run"
    if epochs is not None:
        length = f"{epochs:g} {'epoch' if epochs == 1 else 'epochs'} of the records"
    what = "example"
    full = ""
    if order.sequences > 1:
        what = "pack"
        full = "\n  with full packs; emptier ones need more steps"
    length = f"  {length} in steps of {count(batch.examples, what)}"
    if order.total_num_train_samples is not None:
        length = describe(make_plan(order, None, order.sequences)) + full
    stages, mapping = stages_of(order)
    model = order.bert_config
    print_line(
        f"model: {model.architecture}, {count(model.num_hidden_layers, 'layer')} of {model.hidden_size}{default}, "
        f"{layout.parameters(order) / 1e6:.1f} M parameters, precision {order.precision}\n"
        f"{length}\n"
    )
    rows = []
    # Devices of `tensor` are equal, so the first stands for all.
    for device, terms in enumerate(estimate(order)[: max(mapping) + 1]):
        # Rounded sums, so that the terms of the table add up.
        sums = np.cumsum(astuple(terms)).round(-5)
        cells = [f"{size / 1e6:,.1f}" for size in (*np.diff(sums, prepend=0), sums[-1])]
        rows.append((str(device), *cells, layout.blocks_on(stages, mapping, device)))
    print_table(("device", *TERMS, "total", "stages"), rows, right=range(1, len(TERMS) + 2))
    print_line("\nin MB (10^6 bytes)")
    micro_batches = count(batch.grad_acc_steps_per_replica, "micro-batch")
    print_line(f"each replica has {micro_batches} of {batch.micro_batch_size} in a step")
    print_line("\n".join(layout.describe_layout(order)))


def _flags(order: TrainSettings) -> str:
    """Return what was chosen, as flags to add to the command line."""
    batch = order.global_batch
    (stages, mapping) = stages_of(order)
    blocks = json.dumps([short(stage) for stage in stages])
    return (
        f"--parallel.layout given --global-batch.micro-batch-size {batch.micro_batch_size} "
        f"--global-batch.replicas {batch.replicas} "
        f"--global-batch.grad-acc-steps-per-replica {batch.grad_acc_steps_per_replica} "
        f"--parallel.pipeline-stages '{blocks}' --parallel.pipeline-device-mapping '{json.dumps(mapping)}'"
    )
