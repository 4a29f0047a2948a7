"""The estimate of memory against measured bytes, on both engines, and what divides or saves it.

TensorFlow: the bytes that the traced forward function of a block passes to its backward function, without weights,
their copies and the block's output. JAX: XLA's analysis of the compiled step. The last commit with the programs that
measure both is 56b31cc. test_plan_command compares the estimate with the peak memory of real runs.
"""

import re
from pathlib import Path

import pytest
from support.settings import RUN, merged, small_run

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.tools import PlanSettings, PlanSquadSettings
from bert_cli.facts.bert import BertConfig
from bert_cli.parse.load import load
from bert_cli.planning import memory
from bert_cli.planning.layout import fullest
from bert_cli.planning.memory import Estimate, estimate
from bert_cli.planning.targets import ACCELERATORS
from bert_cli.planning.workload import workload_of

# --- a block on TensorFlow

PRECISIONS = ("float32", "mixed_bfloat16", "float16")
SMALL = BertConfig(
    vocab_size=1009, hidden_size=64, num_hidden_layers=4, num_attention_heads=2,
    intermediate_size=256, max_position_embeddings=128,
)  # fmt: skip
GROUP = {"architecture": "groupbert"}
MODERN = {"architecture": "modernbert", "global_attn_every_n_layers": 1}
# Block, changes of the model and of the settings, are chains of operations compiled, bytes in each precision.
MEASURED = [
    ("emb", {}, {}, False, (530944, 530944, 531200)),
    ("hid", {}, {}, False, (6688844, 5771340, 5771852)),
    ("hid", {}, {}, True, (3801168, 1966160, 1966160)),
    ("hid", GROUP, {}, False, (12525692, 10985596, 11003260)),
    ("hid", GROUP, {}, True, (8331376, 5742704, 5760368)),
    ("hid", MODERN, {}, False, (6441036, 6047820, 6048076)),
    ("hid", MODERN, {}, True, (4868164, 2902084, 2902340)),
    ("hid", {}, {"scaling": "unit"}, False, (7082060, 6164556, 6165068)),
    ("hid", {}, {"scaling": "unit"}, True, (4194896, 2359888, 2359632)),
]


@pytest.mark.parametrize(("block", "model", "changes", "compiled", "measured"), MEASURED)
def test_the_saved_bytes_of_a_block_are_those_that_were_measured(
    block, model, changes, compiled, measured, monkeypatch
):
    monkeypatch.setattr(memory, "COMPILED_CHAIN_ELEMENTS", 1 if compiled else 10**9)
    for precision, expected in zip(PRECISIONS, measured, strict=True):
        settings = small_run(
            bert_config=SMALL.model_dump() | model,
            max_seq_length=128,
            global_batch={"micro_batch_size": 4},
            precision=precision,
            **changes,
        )
        saved = memory.saved_bytes(workload_of(settings), block, stashed=True)
        assert saved == pytest.approx(expected, rel=0.02), precision


def test_the_thresholds_are_those_of_the_engine():
    from bert_cli.model.fused import WORTH_COMPILING
    from bert_cli.parallel.tensorflow.update import UPDATES_WORTH_COMPILING

    assert memory.COMPILED_CHAIN_ELEMENTS == WORTH_COMPILING
    assert memory.COMPILED_UPDATE_WEIGHTS == UPDATES_WORTH_COMPILING


# --- a step on JAX

MODEL = {
    "vocab_size": 6000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
VALUES = {
    "engine": "jax",
    "generated_dataset": True,
    "bert_config": MODEL,
    "max_seq_length": 128,
    "max_predictions_per_seq": 20,
    "total_num_train_samples": 640,
}


def settings_of(
    replicas: int = 1, parallel: dict[str, object] | None = None, **more: object
) -> PretrainSettings:
    batch = {"replicas": replicas, "grad_acc_steps_per_replica": 8 // replicas}
    changes = {"global_batch": {"micro_batch_size": 8, **batch}, "parallel": parallel or {}}
    return small_run(merged(RUN, VALUES), **changes, **more)


def estimated(*layout: object, **more: object) -> Estimate:
    return estimate(workload_of(settings_of(*layout, **more)))[0]


@pytest.mark.parametrize(
    ("replicas", "parallel", "arguments", "temporaries"),
    [
        (1, {"tensor": 2, "recompute": True}, 7751920, 19893840),
        (4, {"shard_weights": True}, 3691528, 54062944),
    ],
)
def test_the_estimate_is_near_the_memory_of_the_compiled_step(
    replicas, parallel, arguments, temporaries
):
    one = estimated(replicas, parallel)
    assert one.weights + one.moments == pytest.approx(arguments, rel=0.03)
    assert one.total == pytest.approx(arguments + temporaries, rel=0.15)


PAGE = Path(__file__).parents[2] / "docs/lab/measured.md"
COMMON = [
    "--engine", "jax", "--precision", "mixed_bfloat16", "--parallel.layout", "given", "--parallel.pipeline-stages",
    "null", "--parallel.pipeline-device-mapping", "null",
]  # fmt: skip
BATCH = ("micro-batch-size", "replicas", "grad-acc-steps-per-replica")
ROW = re.compile(
    r"^\| `(.+)` \| (\w+) \| ([\dx ]+) \| ([\d.]+) GB \| ([\d.]+) GB, (\S+) % \|$", re.M
)


def test_the_estimate_is_within_10_percent_of_the_compiler_in_all_cases_of_the_table():
    rows = ROW.findall(PAGE.read_text("utf-8"))
    assert len(rows) == 27 and {"v5e", "h100"} == {target for _, target, *_ in rows}
    for flags, target, sizes, compiled, estimated, difference in rows:
        words = flags.split()
        numbers = zip(BATCH, sizes.split(" x "), strict=True)
        batch = [word for name, n in numbers for word in (f"--global-batch.{name}", n)]
        is_squad = words[0] == "squad"
        shape = PlanSquadSettings if is_squad else PlanSettings
        settings = load(shape, [*COMMON, *words[is_squad:], *batch], "plan")[0]
        needed = fullest(workload_of(settings), ACCELERATORS[target].kind)[1].total / 1e9
        assert needed == pytest.approx(float(compiled), rel=0.1), flags
        percent = f"{round(100 * (needed / float(compiled) - 1)):+d}"
        assert (f"{needed:.2f}", percent) == (estimated, difference), flags


def test_shards_divide_what_they_shard_and_nothing_else():
    one, moments, weights = (
        estimated(4, parallel)
        for parallel in ({}, {"replicated_tensor_sharding": True}, {"shard_weights": True})
    )
    assert moments.moments == weights.moments == pytest.approx(one.moments / 4, abs=8)
    assert (moments.weights, moments.accumulators) == (one.weights, one.accumulators)
    assert weights.weights == pytest.approx(one.weights / 4, abs=4)
    assert weights.accumulators == pytest.approx(one.accumulators / 4, abs=4)
    # Three replicas divide no axis of 128.
    assert estimated(3, {"shard_weights": True}).weights == one.weights


def test_tensor_divides_matrices_and_logits_along_axes_that_it_divides():
    one, two, square = (estimated(1, {"tensor": shape}) for shape in (1, 2, [2, 2]))
    # Biases, norms, the pooler and the tables of positions and segments are complete on each device.
    assert two.weights == pytest.approx(one.weights / 2, rel=0.1)
    assert square.weights < two.weights < one.weights
    assert square.total < two.total < one.total
    assert two.logits == one.logits // 2
    odd = {"bert_config": {"vocab_size": 6001}}
    assert estimated(1, {"tensor": 2}, **odd).logits == estimated(**odd).logits
    assert estimate(workload_of(settings_of(1, {"tensor": [2, 2]}))) == [square] * 4


def test_chunks_of_the_vocabulary_divide_the_logits():
    one, chunked = estimated(), estimated(1, {"embedding_serialization_factor": 4})
    assert chunked.logits == one.logits // 4 and chunked.weights == one.weights


def test_recomputation_saves_the_activations_of_all_layers_but_one():
    deep = {"bert_config": {"num_hidden_layers": 24}}
    saved, again = estimated(**deep), estimated(1, {"recompute": True}, **deep)
    assert again.weights == saved.weights and again.working < saved.working / 4


def test_of_the_stages_of_a_run_the_one_that_needs_most_counts():
    # As many positions in a micro-batch, but more of them are predicted.
    later = {"max_seq_length": 128, "max_predictions_per_seq": 40, "total_num_train_samples": 64}
    alone = estimated(max_predictions_per_seq=40)
    assert estimated(stages=[later]) == alone and alone.total > estimated().total
