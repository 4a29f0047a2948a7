"""What a run is resolved from: an order, the model that it starts from, and other processes."""

from types import SimpleNamespace

from support.tiny_models import TINY

from bert_cli.config.finetune import ClassifySettings
from bert_cli.parallel.cluster import Processes
from bert_cli.tasks.run import resolve


def test_a_dropout_that_is_set_wins_over_that_of_the_model():
    model = SimpleNamespace(config=TINY.model_copy(update={"hidden_dropout_prob": 0.5}))
    shape = {"hidden_dropout_prob": 0.2}
    order = ClassifySettings.model_validate({"train_file": "a.csv", "bert_config": shape})
    found = resolve.with_shape_of(order, model).bert_config
    assert found == TINY.model_copy(update=shape)


def test_the_processes_of_a_run_are_joined_as_its_settings_say(monkeypatch):
    calls = []
    module = SimpleNamespace(
        configure_runtime=lambda *given: calls.append(given),
        open_mesh=lambda *given: calls.append(given),
    )
    monkeypatch.setattr(resolve, "runtime", lambda engine: calls.append(engine) or module)
    waits = {"lost_after_seconds": 50, "start_within_seconds": 7}
    parallel = {"recompute": True, "replicated_tensor_sharding": True}
    values = {"train_file": "a.csv", "cluster": waits, "parallel": parallel}
    values |= {"precision": "mixed_bfloat16", "compile": "nothing", "deterministic": True}
    values["global_batch"] = {"micro_batch_size": 1, "replicas": 2, "grad_acc_steps_per_replica": 3}
    order = ClassifySettings.model_validate(values)
    processes = Processes(("a:1", "b:1"))
    resolve.open_mesh(order, processes, stop := lambda: True)
    engine, configured, (joined, layout, rendezvous) = calls
    assert (engine, configured, joined) == ("tensorflow", ("mixed_bfloat16", True), processes)
    assert (rendezvous.lost_after_seconds, rendezvous.register_seconds) == (50, 7)
    assert rendezvous.stop_requested is stop
    assert (layout.replicas, layout.accumulation, layout.compile) == (2, 3, "nothing")
    assert layout.recomputes and layout.shard_moments
    assert not layout.shard_weights and not layout.offload_moments
    assert (layout.stage_lengths, layout.stage_devices) == (None, [0])
