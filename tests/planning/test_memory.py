"""The estimate of memory against measured bytes and against the compiler; transcripts have the parts of many layouts.

TensorFlow: the bytes that the traced forward function of a block passes to its backward function, without weights,
their copies and the block's output. JAX: XLA's analysis of the compiled step. The last commit with the programs that
measure both is 56b31cc. Moments and growth of a process: scripts/bench_parallel.py, as in docs/lab/measured.md.
test_plan_command compares the estimate with the peak memory of real runs.
"""

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from support.settings import RUN

from bert_cli.commands import COMMANDS
from bert_cli.config.parallel import Parallel
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import GlobalBatch
from bert_cli.facts.modernbert import ModernBertConfig
from bert_cli.parse.load import Loaded, load, validate
from bert_cli.planning import memory
from bert_cli.planning.layout import fullest
from bert_cli.planning.memory import estimate, saved_by_layer

# The settings of a row have no groups.
KINDS = {"bert_config": ModernBertConfig, "parallel": Parallel, "global_batch": GlobalBatch}
GROUPS = {name: group for group, kind in KINDS.items() for name in kind.model_fields}
SMALL = {
    "vocab_size": 1009, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 256,
    "max_position_embeddings": 128, "max_seq_length": 128, "micro_batch_size": 4, "grad_acc_steps_per_replica": 8,
}  # fmt: skip
TF = SMALL | {"optimizer_opts": RUN["optimizer_opts"], "max_predictions_per_seq": 20}
GROUPBERT = {"architecture": "groupbert"}
MODERN = {"architecture": "modernbert", "global_attn_every_n_layers": 1}
LAYER = {"recompute": True}
BENCH = TF | {
    "vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 1024,
    "max_position_embeddings": 512, "micro_batch_size": 8, "grad_acc_steps_per_replica": 16,
}  # fmt: skip
BENCH_PIPE = BENCH | {
    "pipeline_stages": [["emb", "hid*2"], ["hid*2"], ["hid*2"], ["hid*2", "enc_out", "pool", "heads"]],
    "pipeline_device_mapping": [0, 1, 2, 0],
}  # fmt: skip
BENCH_TWO = BENCH | {"replicas": 2}
JAX = TF | {
    "engine": "jax", "generated_dataset": True, "total_num_train_samples": 640, "micro_batch_size": 8,
    "vocab_size": 6000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512,
}  # fmt: skip
FOUR = JAX | {"replicas": 4}
TWO = {"tensor": 2}
MOMENTS = {"replicated_tensor_sharding": True}
WEIGHTS = {"shard_weights": True}
PRECISIONS = ("float32", "mixed_bfloat16", "float16")
# Settings, what is read, the measured bytes in the first of these precisions or in each, relative tolerance.
MEASURED = [
    # What TensorFlow saves for a layer: what the count leaves out are masks, gates and, without XLA, float32 copies.
    (TF, "hid", (6688844, 5771340, 5771852), 0.28),
    (TF, "compiled hid", (3801168, 1966160, 1966160), 0.07),
    (TF | GROUPBERT, "hid", (12525692, 10985596, 11003260), 0.31),
    (TF | GROUPBERT, "compiled hid", (8331376, 5742704, 5760368), 0.35),
    (TF | MODERN, "hid", (6441036, 6047820, 6048076), 0.36),
    (TF | MODERN, "compiled hid", (4868164, 2902084, 2902340), 0.33),
    (BENCH_TWO, "moments", (56.8e6,), 0.001),
    (BENCH_TWO | MOMENTS, "moments", (28.4e6,), 0.001),
    (BENCH_TWO | {"optimizer_state_offload": True}, "moments", (0,), 0),
    # Growth of a process. Recomputation is not a row: 24 to 39 % of its growth is outside the estimate.
    (BENCH_PIPE, "all devices", (1194e6,), 0.2),
    (JAX | TWO | LAYER, "weights + moments", (7751920,), 0.06),
    (JAX | TWO | LAYER, "total", (7751920 + 19893840,), 0.15),
    (FOUR | WEIGHTS, "weights + moments", (3691528,), 0.03),
    (FOUR | WEIGHTS, "total", (3691528 + 54062944,), 0.37),
]  # fmt: skip


def read(what: str, settings: dict[str, Any]) -> float:
    """Return the saved bytes of a block, or parts of the estimate of the fullest device."""
    values: dict[str, Any] = {group: {} for group in KINDS}
    for name, value in settings.items():
        (values[GROUPS[name]] if name in GROUPS else values)[name] = value
    work = validate(PretrainSettings, Loaded(values, {}))
    if what.removeprefix("compiled ") == "hid":
        return saved_by_layer(work)
    if what == "all devices":
        return sum(each.total for each in estimate(work))
    chosen = fullest(work)[1]
    return sum(getattr(chosen, part) for part in what.split(" + "))


@pytest.mark.parametrize(("settings", "what", "measured", "tolerance"), MEASURED)
def test_the_estimate_is_near_the_measured_bytes(settings, what, measured, tolerance, monkeypatch):
    if what.startswith("compiled"):
        monkeypatch.setattr(memory, "COMPILED_CHAIN_ELEMENTS", 1)
    # A row of a single number was measured in float32 alone.
    for precision, expected in zip(PRECISIONS, measured, strict=False):
        estimated = read(what, settings | {"precision": precision})
        assert estimated == pytest.approx(expected, rel=tolerance), precision


def test_the_threshold_is_that_of_the_engine():
    from bert_cli.model.arithmetic.fused import WORTH_COMPILING

    assert memory.COMPILED_CHAIN_ELEMENTS == WORTH_COMPILING


PAGE = Path(__file__).parents[2] / "docs/lab/measured.md"
COMMON = [
    "--engine", "jax", "--precision", "mixed_bfloat16", "--parallel.layout", "given", "--parallel.pipeline-stages",
    "null", "--parallel.pipeline-device-mapping", "null",
]  # fmt: skip
BATCH = ("micro-batch-size", "replicas", "grad-acc-steps-per-replica")
ROW = re.compile(r"(?m)^\| `(.+)` \| (\w+) \| ([\dx ]+) \| ([\d.]+) GB \| ([\d.]+) GB, (\S+) % \|$")


def test_the_estimate_is_within_a_quarter_of_the_compiler_and_9_percent_off_on_average():
    errors = []
    rows = ROW.findall(PAGE.read_text("utf-8"))
    assert len(rows) == 27
    for flags, _, sizes, compiled, estimated, difference in rows:
        words = flags.split()
        numbers = zip(BATCH, sizes.split(" x "), strict=True)
        batch = [word for name, n in numbers for word in (f"--global-batch.{name}", n)]
        is_squad = words[0] == "squad"
        name = "plan squad" if is_squad else "plan pretrain"
        settings = load(
            COMMANDS[name].settings_class(), [*COMMON, *words[is_squad:], *batch], "plan"
        )[0]
        needed = fullest(settings)[1].total / 1e9
        errors.append(needed / float(compiled) - 1)
        percent = f"{round(100 * errors[-1]):+d}"
        assert (f"{needed:.2f}", percent) == (estimated, difference), flags
    assert statistics.fmean(map(abs, errors)) < 0.09
    assert min(errors) > -0.23 and max(errors) < 0.22
