"""Pre-training with a teacher: its states, layouts, engines, resume, and teachers that do not fit."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from support.hf_models import need, opened
from support.runs import continues_bit_for_bit, run_command
from support.tiny_models import (
    SENTENCES,
    TINY,
    metrics_of,
    pretrain_words,
    write_model,
    write_records,
)

from bert_cli.cli import main
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.facts.architectures import shape_of
from bert_cli.parse.load import load
from bert_cli.tasks.run.teacher import relations_of


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `model`, a wider `teacher`, `records`, and `run`, which learned from the teacher."""
    home = tmp_path_factory.mktemp("teacher")
    write_model(home / "model")
    wider = TINY.model_copy(update={"hidden_size": 48, "num_hidden_layers": 3})
    write_model(home / "teacher", wider, seed=5)
    write_records(home / "records", SENTENCES, home / "model")
    assert main(words_of(home, home / "run")) == 0
    return home


def words_of(home, run, *words, teacher="teacher", **changes):
    """The command line of four steps of two micro-batches that learn from a teacher."""
    flags = {"distillation__teacher": home / teacher, "total_num_train_samples": 32}
    flags |= {"global_batch__grad_acc_steps_per_replica": 2, "validation_dir": home / "records"}
    flags |= {"compile": "nothing"}  # faster to trace
    return pretrain_words(home, run, *words, **flags | changes)


def test_a_run_learns_relations_and_continues_bit_for_bit(home, capsys):
    losses = [row["relation_loss"] for row in metrics_of(home / "run") if "relation_loss" in row]
    assert len(losses) == 4 and losses[-1] < 0.9 * losses[0]
    continues_bit_for_bit(home / "run", lambda run: main(words_of(home, run)), 2)
    # Held-out examples have no teacher.
    out = capsys.readouterr().out
    assert "held out" in out and not re.search("held out.*relation", out)
    words = ["evaluate", home / "run", "--json", home / "scores.json"]
    assert main([*map(str, words)]) == 0
    assert "relation" not in (home / "scores.json").read_text()
    # Another weight or another teacher is another run.
    for changes in ({"distillation__relations": 0.5}, {"teacher": "model"}):
        more = {"total_num_train_samples": 32, "save_ckpt_path": home / "run"}
        assert main(words_of(home, home / "run", **more | changes)) == 4
        assert "relations 1.0" in capsys.readouterr().err


SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
LAYOUTS = {
    "replicas": ["--global-batch.replicas", "2", "--global-batch.grad-acc-steps-per-replica", "1"],
    "stages": [
        "--parallel.pipeline-stages", '[["emb","hid"],["hid"],["enc_out","pool","heads"]]',
        "--parallel.pipeline-device-mapping", "[0,0,0]",
    ],
    "jax": ["--engine", "jax", "--compile", "auto"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_engine_learns_the_same(layout, home):
    run = home / layout
    assert run_command(words_of(home, run, *LAYOUTS[layout])) == 0
    for ours, expected in zip(metrics_of(run), metrics_of(home / "run"), strict=True):
        assert ours.keys() == expected.keys()
        for name in expected.keys() & {"mlm_loss", "relation_loss", "gradient_norm"}:
            assert ours[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["groupbert", "modernbert"])
def test_a_student_of_another_architecture_learns_relations(architecture, home, tmp_path):
    sizes = {name: getattr(TINY, name) for name in SIZES}
    write_model(tmp_path / "student", shape_of({**sizes, "architecture": architecture}))
    records = tmp_path / "records"
    words = ["tokenize", home / "records_text", records, "--vocab", home / "model", "--no-nsp"]
    words += ["--masking", "dynamic", "--sequence-length", 32, "--mask-tokens", 5]
    assert main([*map(str, words)]) == 0
    changes = {"dataset_dir": records, "validation_dir": records}
    changes |= {"pretrained_ckpt_path": tmp_path / "student", "total_num_train_samples": 320}
    assert run_command(words_of(home, tmp_path / "run", **changes)) == 0
    losses = [row["relation_loss"] for row in metrics_of(tmp_path / "run")[1:]]
    assert np.mean(losses[-4:]) < 0.8 * losses[0]


def test_the_states_of_a_teacher_equal_pytorchs(home):
    need("torch")
    import torch

    settings, _ = load(PretrainSettings, words_of(home, home / "run")[1:], "bert pretrain")
    stream = SimpleNamespace(folder=home / "records", fingerprint="0123")
    draw = np.random.default_rng(0)
    ids = draw.integers(5, TINY.vocab_size, (2, 3, 12))
    mask = np.arange(12) < draw.integers(4, 13, (2, 3, 1))
    batch = {"input_ids": ids, "input_mask": mask, "segment_ids": ids % 2}
    added = relations_of(settings, stream)(None, batch, None)
    assert stream.fingerprint.startswith("0123, teacher ")
    assert added["relation_weight"].shape == (2, 3)
    model = opened(home / "teacher", "BertForPreTraining").bert
    for number in range(2):
        row = [torch.tensor(column[number]) for column in batch.values()]
        with torch.no_grad():
            hidden = model(*row, output_hidden_states=True).hidden_states[2]
            parts = model.encoder.layer[2].attention.self
            states = [part(hidden) for part in (parts.query, parts.key, parts.value)]
        difference = added["teacher_states"][number] - torch.stack(states, 2).numpy()
        assert np.abs(difference[mask[number]]).max() < 1e-5


def test_teachers_that_do_not_fit_are_refused(home, tmp_path, capsys):
    other = write_model(tmp_path / "other")
    for name in ("vocab.txt", "tokenizer.json"):
        if (other / name).is_file():
            (other / name).write_text((other / name).read_text().replace("film", "another"))
    short = TINY.model_copy(update={"max_position_embeddings": 16})
    write_model(tmp_path / "short", short)
    for changes, message in (
        ({"teacher": other}, "has another vocabulary than the records"),
        ({"teacher": tmp_path / "short"}, "reads at most 16 tokens"),
        ({"max_sequences_per_pack": 2}, "distillation.*has no effect with max_sequences_per_pack"),
        ({"scaling": "unit"}, "scaling.*has no effect with distillation"),
        ({"distillation__relations": 2, "distillation__teacher": False}, "no effect without teacher"),
    ):  # fmt: skip
        assert main(words_of(home, tmp_path / "run", **changes)) == 2
        assert re.search(message, capsys.readouterr().err.replace("\n", " ")), message
