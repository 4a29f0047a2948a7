"""What a layout costs in time and traffic, and which one is proposed."""

import re

import pytest

from bert_cli.config.layout import (
    USABLE,
    bubble,
    describe_layout,
    fits,
    fullest,
    idle,
    propose,
    reduced_bytes,
    size,
)
from bert_cli.config.load import configs_folder, load
from bert_cli.config.memory import estimate, stages_of
from bert_cli.config.plan import make_plan
from bert_cli.config.tools import DoctorSettings, PlanSettings
from bert_cli.config.training import PretrainSettings
from bert_cli.errors import ConfigError

GB = 10**9
SHIPPED = sorted(path.stem for path in configs_folder().glob("pretrain_*.json"))


@pytest.fixture(autouse=True)
def corpora(monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")


def shipped(name: str, *flags: str) -> PretrainSettings:
    return load(PretrainSettings, ["--config", name, *flags], "bert pretrain")[0]


def layers(settings: PretrainSettings) -> list[int]:
    return [stage.count("hid") for stage in stages_of(settings)[0]]


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 4), (4, 64), (2, 1), (5, 510)])
def test_equal_stages_on_a_device_each_have_the_bubble_of_the_literature(stages, micro_batches):
    found = bubble([1.0] * stages, range(stages), micro_batches)
    assert found == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_one_device_is_never_idle_whatever_its_stages():
    assert bubble([1.0], [0], 7) == 0.0
    assert bubble([1.0, 5.0, 2.0], [0, 0, 0], 3) == pytest.approx(0.0)


def test_two_stages_on_a_device_count_as_its_work():
    # Device 0 works 2 of every 4, device 1 the whole time: 3 of 8, but for the first one's way.
    assert bubble([1.0, 4.0, 1.0], [0, 1, 0], 10**6) == pytest.approx(0.25, abs=1e-5)


def test_the_busiest_device_sets_the_pace_of_the_shipped_layouts():
    as_shipped = shipped("pretrain_base_128_phase1", "--parallel.recompute")
    # Nothing but embeddings and heads on device 0 leaves it idle most of the time.
    assert 0.15 < idle(as_shipped) < 0.25
    evened = propose(as_shipped, 4, 2 * GB)
    assert len(estimate(evened)) == 2
    assert idle(evened) < 0.1


def test_gradients_are_reduced_once_between_replicas_in_the_chosen_format():
    one = shipped("pretrain_base_128_phase1", "--global-batch.replicas", "1")
    assert reduced_bytes(one) == 0
    four = shipped("pretrain_base_128_phase1")
    half = shipped("pretrain_base_128_phase1", "--parallel.reduce-precision", "bfloat16")
    assert reduced_bytes(four) == 2 * reduced_bytes(half)
    assert reduced_bytes(four) == pytest.approx(4 * 110.1e6, rel=1e-3)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("devices", "gigabytes"), [(1, 80), (5, 8), (7, 10)])
def test_a_proposal_keeps_the_examples_and_fits(name, devices, gigabytes):
    given = shipped(name)
    chosen = propose(given, devices, gigabytes * GB)
    before, after = make_plan(given, None), make_plan(chosen, None)
    assert after.examples_per_step == before.examples_per_step
    assert after.micro_batches_per_step == before.micro_batches_per_step
    assert chosen.global_batch.micro_batch_size == given.global_batch.micro_batch_size
    assert chosen.parallel.layout == "given"
    assert chosen.global_batch.replicas * len(estimate(chosen)) <= devices
    assert all(one.total <= USABLE * gigabytes * GB for one in estimate(chosen))
    stages, mapping = stages_of(chosen)
    assert sum(layers(chosen)) == given.bert_config.num_hidden_layers
    ends = [mapping[n] for n, blocks in enumerate(stages) if {"emb", "heads"} & set(blocks)]
    assert set(ends) == {0}
    assert all(count > 0 for count in layers(chosen)[1:-1])


def test_replicas_come_first_and_stages_only_for_want_of_memory():
    given = shipped("pretrain_large_512_phase2")
    shapes = {}
    for gigabytes in (80, 16, 7, 6):
        chosen = propose(given, 8, gigabytes * GB)
        shapes[gigabytes] = chosen.global_batch.replicas, len(estimate(chosen))
    assert shapes[80] == shapes[16] == (8, 1)
    assert shapes[7][1] > 1 and shapes[7][0] * shapes[7][1] <= 8


@pytest.mark.parametrize("recompute", [[], ["--parallel.recompute"]], ids=["kept", "recomputed"])
def test_more_memory_never_gives_more_stages_nor_fewer_replicas(recompute):
    given = shipped("pretrain_large_512_phase2", *recompute)
    before = (10**3, 0)
    answered = 0
    for tenths in range(10, 160, 15):
        try:
            chosen = propose(given, 8, tenths * GB // 10)
        except ConfigError:
            assert not answered, "less memory was enough"
            continue
        answered += 1
        now = len(estimate(chosen)), chosen.global_batch.replicas
        assert now[0] <= before[0] and now[1] >= before[1]
        before = now
    assert answered > 4


def test_replicas_divide_the_micro_batches_and_devices_may_be_left_over():
    given = shipped("pretrain_tiny_128_phase1")
    assert propose(given, 7, 80 * GB).global_batch.replicas == 6
    assert propose(given, 11, 80 * GB).global_batch.replicas == 10
    assert propose(given, 7, 80 * GB).global_batch.grad_acc_steps_per_replica == 100


def test_a_replica_lives_in_one_process():
    given = shipped("pretrain_large_512_phase2")
    alone = propose(given, 8, 7 * GB)
    assert len(estimate(alone)) == 2
    four = propose(given, 8, 7 * GB, processes=4)
    assert (four.global_batch.replicas, len(estimate(four))) == (4, 2)
    with pytest.raises(ConfigError, match="nothing fits"):
        propose(given, 8, 7 * GB, processes=8)


def test_micro_batches_that_the_processes_cannot_share_are_refused():
    with pytest.raises(ConfigError, match=r"600 micro-batches a step.*among 7 processes"):
        propose(shipped("pretrain_tiny_128_phase1"), 7, 80 * GB, processes=7)
    with pytest.raises(ConfigError, match="fewer than the 4 processes"):
        propose(shipped("pretrain_tiny_128_phase1"), 3, 80 * GB, processes=4)


@pytest.mark.parametrize("devices", [1, 4])
def test_too_little_memory_is_refused_with_the_least_that_is_enough(devices):
    given = shipped("pretrain_large_512_phase2")
    with pytest.raises(ConfigError, match="nothing fits") as caught:
        propose(given, devices, 10**9)
    told = float(re.search(r"takes devices of ([\d.]+) GB", str(caught.value))[1])
    assert propose(given, devices, int((told + 0.06) * GB))
    with pytest.raises(ConfigError, match="nothing fits"):
        propose(given, devices, int((told - 0.06) * GB))


def test_the_refusal_says_whether_recomputation_would_help():
    given = shipped("pretrain_base_128_phase1")
    with pytest.raises(ConfigError) as caught:
        propose(given, 1, 4 * GB)
    needed = fullest(propose(given, 1, 80 * GB))[1].total
    assert f"needs {size(needed)}" in str(caught.value)
    assert re.search(r"--parallel.recompute \([\d.]+ GB, which fits\)", str(caught.value))
    assert "micro_batch_size" in str(caught.value)
    again = shipped("pretrain_base_128_phase1", "--parallel.recompute")
    assert fits(propose(again, 1, 4 * GB), 4 * GB)
    with pytest.raises(ConfigError) as caught:
        propose(again, 1, GB)
    assert "--parallel.recompute" not in str(caught.value)


def test_a_proposal_keeps_the_kind_of_settings_and_all_that_is_not_the_layout():
    flags = ["--config", "pretrain_base_128_phase1", "--devices", "8", "--memory", "80GB"]
    given = load(PlanSettings, flags, "bert plan")[0]
    chosen = propose(given, 8, 80 * GB)
    assert isinstance(chosen, PlanSettings)
    changed = {"global_batch", "parallel"}
    assert chosen.model_dump(exclude=changed) == given.model_dump(exclude=changed)
    assert chosen.parallel.schedule == given.parallel.schedule


@pytest.mark.parametrize("name", SHIPPED)
def test_a_layout_is_told_in_a_few_lines(name):
    given = shipped(name)
    lines = describe_layout(given)
    assert 1 <= len(lines) <= 4
    assert f"{given.global_batch.replicas} replica" in lines[0]
    assert size(fullest(given)[1].total) in lines[0]
    if len(stages_of(given)[0]) > 1:
        assert "device 0: emb" in lines[1] and "heads" in lines[1]
        assert "1F1B" in lines[2]


def test_the_layout_of_the_original_reads_as_it_is_written():
    lines = describe_layout(shipped("pretrain_base_128_phase1"))
    assert lines[0].startswith("layout: 4 replicas x 4 devices, no recomputation, about ")
    assert lines[1] == "device 0: emb | enc_out pool heads; devices 1 to 3: hid*4"


def test_what_a_command_has_beside_a_run_outlives_the_choice_of_a_layout(tmp_path):
    # `--json` is the flag of a setting of another name.
    flags = ["--config", "pretrain_base_128_phase1", "--json", str(tmp_path / "findings.json")]
    asked = load(DoctorSettings, [*flags, "--parallel.layout", "auto"], "bert doctor")[0]
    chosen = propose(asked, 2, 80 * GB, 1)
    assert (chosen.json_file, chosen.global_batch.replicas) == (tmp_path / "findings.json", 2)
