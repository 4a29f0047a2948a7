"""Processes whose results could differ are refused before the first step, and found soon after it."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.threads import on_each_rank

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.errors import CheckpointError, ConfigError, DeviceError
from bert_cli.parallel import devices
from bert_cli.tasks.run import saving


def test_every_rank_receives_the_texts_of_all():
    texts = ["", "zwölf", "a longer text"]
    assert on_each_rank(lambda group: group.gather_texts(texts[group.rank]), 3) == [texts] * 3


INSTEAD = "rank 1 (host1): has another {} than rank 0 (host0): {} instead of {}; use the same on all hosts of the run"


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("version of tensorflow", ("2.21.0", "2.20.0"), ConfigError),
        ("set of instructions", ("avx avx2 avx512f fma", "avx avx2 fma"), DeviceError),
        ("kind of accelerator", ("NVIDIA A100", "NVIDIA H100"), DeviceError),
        ("version of numpy", ("2.1.0", "2.1.0"), None),
    ],
)
def test_ranks_that_compute_differently_are_refused_on_all(name, values, kind, monkeypatch):
    order = SimpleNamespace(engine="tensorflow")
    job = SimpleNamespace(order=order, mesh=SimpleNamespace(kind="CPU"))
    number = threading.local()
    traits = lambda *_: {"version of bert_cli": "1", name: values[number.rank]}  # noqa: E731
    monkeypatch.setattr(saving, "traits_of_results", traits)
    monkeypatch.setattr(saving.socket, "gethostname", lambda: f"host{number.rank}")

    def check(group):
        number.rank = group.rank
        saving._check_same_kind(job, group)

    errors = on_each_rank(check)
    if kind is None:
        assert errors == [None, None]
    else:
        assert [type(error) for error in errors] == [kind, kind]
        message = INSTEAD.format(name, values[1], values[0])
        assert all(message in str(error) for error in errors), errors[0]


@pytest.mark.parametrize(
    ("values", "steps", "message"),
    [
        ((None, "held_out"), (0, 0), "rank 1: was started with other settings"),
        (("/1/held_out", "/2/held_out"), (0, 0), "None"),
        ((None, None), (8, 4), "rank 1 finds a checkpoint of step 4, rank 0 one of step 8"),
    ],
)
def test_ranks_have_the_same_files_and_step_but_not_the_same_paths(
    values, steps, message, monkeypatch
):
    for step in ("_check_same_kind", "_check_same_weights", "load_start"):
        monkeypatch.setattr(saving, step, lambda *_: "")

    def check(group):
        job = SimpleNamespace(
            order=PretrainSettings.model_construct(dry_run=True),
            record={"validation_dir": values[group.rank]},
            fixed={},
            task=SimpleNamespace(fingerprint="", unlabelled={}),
        )
        engine = SimpleNamespace(group=group)
        state = SimpleNamespace(step=steps[group.rank])
        run = SimpleNamespace(job=job, engine=engine, state=state)
        saving.load_state(run, None)

    assert all(message in str(error) for error in on_each_rank(check))


def test_results_depend_on_versions_and_on_instructions_that_sums_use(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: fpu avx avx2 fma md_clear amx_bf16 avx512f avx512_bf16\n")
    monkeypatch.setattr(devices, "CPUINFO", info)
    traits = devices.traits_of_results("jax", [])
    assert traits.pop("set of instructions") == "avx avx2 avx512f fma"
    assert traits["version of numpy"] == np.__version__
    names = ["keras", "numpy", "jax", "jaxlib", "bert_cli"]
    assert traits.keys() == {f"version of {name}" for name in names}
    of_gpus = devices.traits_of_results("tensorflow", ["NVIDIA H100", "NVIDIA H100"])
    assert of_gpus["kind of accelerator"] == "NVIDIA H100" and "set of instructions" not in of_gpus


def test_weights_are_compared_after_steps_1_2_4_and_8_of_a_start():
    def compared(group):
        weight = SimpleNamespace(is_sharded=False, numpy=lambda: np.zeros(3))
        state = SimpleNamespace(step=100, weights={"w": weight})
        run = SimpleNamespace(engine=SimpleNamespace(group=group), state=state)
        steps = []
        for step in range(101, 110):
            before = group.collectives
            saving.compare_weights(run, step - 100)
            steps += [step] * (group.collectives - before)
        weight.numpy = lambda: np.full(3, group.rank)
        with pytest.raises(CheckpointError, match="the weights of rank 1 differ from rank 0"):
            saving.compare_weights(run, 16)
        return steps

    assert on_each_rank(compared) == [[101, 102, 104, 108]] * 2
