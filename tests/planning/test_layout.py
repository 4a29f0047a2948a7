"""Weights, idle time and traffic of a layout against the real model and the literature, and proposals."""

import math
import re
from itertools import product

import pytest
from support.settings import small_run

from bert_cli.config.embed import EmbedSettings
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.shipped import configs_folder
from bert_cli.config.training import TrainSettings
from bert_cli.errors import ConfigError
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.groupbert import GroupBertConfig
from bert_cli.parse.load import load
from bert_cli.planning import layout, memory
from bert_cli.planning.layout import bubble, idle, propose
from bert_cli.planning.memory import estimate, stages_of
from bert_cli.planning.plan import Plan, make_plan

GB = 10**9
SHIPPED = sorted(path.stem for path in configs_folder().glob("pretrain_*.json"))
BASE, LARGE = "pretrain_base_128_phase1", "pretrain_large_512_phase2"
TINY = BertConfig(
    vocab_size=1009, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=256, max_position_embeddings=128,
)  # fmt: skip
STAGES = [["emb"], ["hid*2"], ["hid*2"], ["enc_out", "pool", "heads"]]
GROUP = GroupBertConfig(**{**TINY.model_dump(), "architecture": "groupbert"})
ON_THREE = {"pipeline_stages": STAGES, "pipeline_device_mapping": [0, 1, 2, 0]}


@pytest.fixture(autouse=True)
def corpora(monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")


def planned(work: TrainSettings) -> Plan:
    return make_plan(work.model_copy(update={"total_num_train_samples": 10**6}), 10**6)


def shipped(name: str, *flags: str) -> TrainSettings:
    return load(PretrainSettings, ["--config", name, *flags], "bert pretrain")[0]


def settings(
    replicas: int = 1, accumulation: int = 8, config: BertConfig = TINY, **parallel: object
) -> TrainSettings:
    batch = {"replicas": replicas, "grad_acc_steps_per_replica": accumulation}
    run = small_run(
        bert_config={**config.model_dump(), "num_hidden_layers": 4},
        max_seq_length=128,
        max_predictions_per_seq=20,
        global_batch={"micro_batch_size": 4, **batch},
        parallel=parallel,
    )
    return run


@pytest.mark.parametrize("config", [TINY, GROUP, GROUP.model_copy(update={"ffn_groups": 1})])
def test_the_weights_are_those_of_the_real_model(config):
    from bert_cli.model.build import build_blocks, named_weights

    blocks = build_blocks(config, seed=1, policy="float32")
    counted = memory.weights_of(config)
    for name, block in blocks:
        own = [w for path, w in named_weights([(name, block)]).items() if path.startswith(name)]
        kind = "hid" if name.startswith("hid_") else name
        extra = counted["final_norm"] if name == "hid_1" else 0
        assert sum(math.prod(weight.shape) for weight in own) == counted[kind] + extra, name
    total = sum(math.prod(weight.shape) for weight in named_weights(blocks).values())
    # Four layers, not two.
    assert layout.parameters(settings(config=config)) == total + 2 * counted["hid"]


def test_the_published_groupbert_has_its_weights():
    # In 16 bits the 321.7 MB of the published file.
    parameters = layout.parameters(shipped("pretrain_groupbert_base_128_phase1"))
    assert parameters == pytest.approx(160.85e6, abs=5e4)


def test_the_bubble_is_that_of_the_literature():
    for stages, micro_batches in ((1, 7), (4, 4), (4, 64), (2, 1), (5, 510)):
        expected = (stages - 1) / (micro_batches + stages - 1)
        assert bubble([1.0] * stages, range(stages), micro_batches) == pytest.approx(expected)
    # Device 0 works 2 of every 4 units, device 1 all of them.
    assert bubble([1.0, 4.0, 1.0], [0, 1, 0], 10**6) == pytest.approx(0.25, abs=1e-5)
    # Both stages of device 0 take 4 units, the slowest stage takes 3.
    assert bubble([2.0, 3.0, 2.0], [0, 1, 0], 10**6) == pytest.approx(0.125, abs=1e-5)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_proposal_has_the_same_examples_and_fits(name):
    given = shipped(name)
    for devices, gigabytes in ((1, 80), (7, 10)):
        chosen = propose(given, devices, gigabytes * GB)
        before, after = planned(given), planned(chosen)
        assert after.examples_per_step == before.examples_per_step
        assert after.micro_batches_per_step == before.micro_batches_per_step
        same = {"global_batch": given.global_batch, "parallel": given.parallel}
        assert chosen.model_copy(update=same) == given
        assert chosen.global_batch.replicas * len(estimate(chosen)) <= devices
        assert all(one.total <= layout.USABLE * gigabytes * GB for one in estimate(chosen))
        assert all(stage.count("hid") for stage in stages_of(chosen)[0][1:-1])


def fullest(order: TrainSettings, stages: list[list[str]], mapping: list[int]) -> float:
    return max(memory.on_device(order, stages, mapping, device).total for device in mapping)


DIVIDED = [(BASE, 2, 6), (BASE, 3, 4), (LARGE, 3, 8)]


@pytest.mark.parametrize(("name", "devices", "layers"), DIVIDED)
def test_layers_are_divided_evenly_in_the_least_memory_that_allows_it(name, devices, layers):
    given = shipped(name)
    mapping = [*range(devices), 0]
    even = layout._divide(given, mapping, math.inf)
    assert even[1:devices] == [["hid"] * layers] * (devices - 1)
    least = fullest(given, even, mapping)
    assert layout._divide(given, mapping, least) == even
    assert layout._divide(given, mapping, least - 1) != even


@pytest.mark.parametrize(("name", "devices"), [row[:2] for row in DIVIDED])
def test_layers_fit_wherever_a_division_of_them_does(name, devices):
    given = shipped(name)
    mapping = [*range(devices), 0]
    layers = given.bert_config.num_hidden_layers
    counts = (row for row in product(range(layers + 1), repeat=devices + 1) if sum(row) == layers)
    divisions = [layout.laid_stages(row, given.head.last_blocks) for row in counts]
    least = min(fullest(given, stages, mapping) for stages in divisions)
    assert least < fullest(given, layout._divide(given, mapping, math.inf), mapping)
    assert fullest(given, layout._divide(given, mapping, least), mapping) == least


def test_too_little_memory_is_refused_with_the_least_that_is_enough():
    given = shipped(LARGE)
    with pytest.raises(ConfigError, match=r"no layout fits.*--parallel.recompute") as caught:
        propose(given, 4, 10**9)
    least = float(re.search(r"the run needs ([\d.]+) GB", str(caught.value))[1])
    propose(given, 4, int((least + 0.06) * GB))
    with pytest.raises(ConfigError, match="no layout fits"):
        propose(given, 4, int((least - 0.06) * GB))


def test_a_larger_micro_batch_is_no_faster_on_a_cpu_beyond_4096_positions():
    given = shipped(BASE, "--global-batch.micro-batch-size", "auto", "--parallel.layout", "auto")
    sizes = [layout.choose(given, kind, 1, 80 * GB).global_batch for kind in ("CPU", "GPU")]
    assert sizes[0].micro_batch_size == 32 < sizes[1].micro_batch_size
    assert sizes[0].examples == sizes[1].examples == 65_280


def test_a_larger_micro_batch_leaves_a_pipeline_hardly_more_idle():
    given = settings(accumulation=64, **ON_THREE)
    (line,) = layout.idle_memory(given, "GPU", 80 * GB)
    assert "micro-batch 16 would fit" in line
    more = [idle(layout.with_micro_batch(given, size)) - idle(given) for size in (16, 32)]
    assert more[0] < 0.05 < more[1]


# --- engine jax


def with_jax(*flags: str) -> TrainSettings:
    return shipped(BASE, "--engine", "jax", "--parallel.layout", "auto", *flags)


def test_a_proposal_for_jax_chooses_the_replicas_alone_and_keeps_what_is_set():
    given = with_jax()
    chosen = propose(given, 8, 80 * GB)
    parallel = chosen.parallel
    assert len(parallel.pipeline_stages) == 1 and parallel.pipeline_device_mapping == [0]
    assert planned(chosen).examples_per_step == planned(given).examples_per_step
    assert chosen.global_batch.replicas == 8 and chosen.precision == given.precision
    assert propose(given, 8, 80 * GB, 4).global_batch.replicas % 4 == 0
    flags = "--parallel.tensor", "2", "--parallel.recompute", "--parallel.shard-weights"
    divided = propose(with_jax(*flags), 8, 80 * GB)
    assert divided.global_batch.replicas == 4 and divided.parallel.tensor == [2]
    assert divided.parallel.recompute and divided.parallel.shard_weights


def test_a_proposed_layout_has_the_blocks_of_the_model():
    values = {"pooling": "cls", "parallel": {"layout": "auto"}, "train_file": "pairs.tsv"}
    work = EmbedSettings(bert_config=TINY, **values)
    ((blocks,), _) = stages_of(propose(work, 1, 100 * GB))
    assert blocks == ["emb", "hid", "hid", "embed_head"]
