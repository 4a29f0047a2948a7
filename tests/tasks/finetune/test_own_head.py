"""A task with its own head is one file and one record: nothing else of the package knows the head."""

import json
import math
import shutil

import pytest
from safetensors.numpy import load_file
from support.tiny_models import PIECES, metrics_of, write_model

from bert_cli.cli import main
from bert_cli.facts import heads
from bert_cli.parse.load import load
from bert_cli.planning import layout, memory
from bert_cli.planning.workload import workload_of
from bert_cli.train.history import Run

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 32, "vocab_size": len(PIECES)}


@pytest.mark.tensorflow
def test_a_task_of_one_file_and_one_record_trains_resumes_plans_and_predicts(
    tmp_path, monkeypatch, capsys
):
    from support import toy_task

    monkeypatch.setitem(heads.LAST_BLOCKS, toy_task.RECORD.name, toy_task.RECORD)
    run = tmp_path / "run"
    stages = '[["emb","hid"],["hid","mean_pool","length_head"]]'
    words = ["--generated-dataset", "--tokenizer-path", str(write_model(tmp_path / "model"))]
    words += ["--bert-config", json.dumps(SIZES), "--save-ckpt-path", str(run)]
    words += ["--parallel.pipeline-stages", stages, "--parallel.pipeline-device-mapping", "[0,0]"]
    words += ["--global-batch.micro-batch-size", "4", "--total-num-train-samples", "8"]
    settings, _ = load(toy_task.LengthSettings, [*words, "--checkpoint-every-steps", "1"], "length")
    toy_task.run(settings)
    assert [line["step"] for line in metrics_of(run)] == [1, 2]
    last = run / "step_00000002"
    trained = load_file(last / "model.safetensors")
    assert {"regressor.weight", "regressor.bias"} < set(trained)
    assert json.loads((last / "config.json").read_text())["architectures"] == ["BertForTextLength"]
    assert Run(run).kind == "length"
    assert layout.parameters(workload_of(settings)) == sum(
        math.prod(w.shape) for w in trained.values()
    )
    assert all(device.total > 0 for device in memory.estimate(workload_of(settings)))
    assert "mean_pool length_head" in " ".join(layout.describe_layout(workload_of(settings)))

    shutil.rmtree(last)
    toy_task.run(settings)
    assert "continues from" in capsys.readouterr().out
    resumed = load_file(last / "model.safetensors")
    assert {name: value.tobytes() for name, value in resumed.items()} == {
        name: value.tobytes() for name, value in trained.items()
    }

    assert main(["predict", str(run), "the film was good"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["text"] == "the film was good" and math.isfinite(row["length"])
