"""Pre-training on real records: packed, mixed, from an address, from a model."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support.runs import continues_bit_for_bit
from support.settings import RUN, merged, small_run
from support.tiny_models import TINY, WORDS, metrics_of, write_model

from bert_cli.cli import main
from bert_cli.tasks.run import corpora, pretrain
from bert_cli.train import health
from bert_cli.train.checkpoint import complete_checkpoints

NO_PAIRS = "has no sentence pairs, so no next-sentence score"
FLAGS = [
    "--max-seq-length", "48", "--max-predictions-per-seq", "7", "--global-batch.micro-batch-size", "4",
    "--global-batch.grad-acc-steps-per-replica", "2", "--checkpoint-every-steps", "1", "--keep-checkpoints", "99",
    "--optimizer-opts.learning-rate.max-learning-rate", "0.003", "--optimizer-opts.name", "AdamW",
]  # fmt: skip


def write_sentences(folder, seed):
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    for name in ("0.txt", "1.txt"):
        # Every fifth line is empty and ends a document.
        counts = draw.integers(2, 12, 550) * (draw.random(550) > 0.2)
        lines = [" ".join(draw.choice(WORDS, count)) for count in counts]
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def tokenize(texts, records, vocab, *more):
    words = ["tokenize", str(texts), str(records), "--vocab", str(vocab), "--sequence-length", "48"]
    assert main([*words, "--mask-tokens", "7", "--processes", "1", *more]) == 0
    return records


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, two corpora of dynamic records with its vocabulary, one without pairs, and a static one."""
    home = tmp_path_factory.mktemp("corpora")
    model = write_model(home / "model", TINY.model_copy(update={"num_hidden_layers": 1}))
    dynamic = ["--masking", "dynamic"]
    for seed, name in enumerate(("one", "two")):
        texts = write_sentences(home / f"{name}_text", seed)
        tokenize(texts, home / name, model, "--short-seq-prob", "0.5", *dynamic)
    tokenize(home / "one_text", home / "single", model, "--no-nsp", *dynamic)
    tokenize(home / "two_text", home / "static", model, "--short-seq-prob", "0.5")
    return home


def arguments(home, run, *more, samples=32):
    return [
        "pretrain", "--pretrained-ckpt-path", str(home / "model"), "--save-ckpt-path", str(run),
        "--total-num-train-samples", str(samples), *FLAGS, *map(str, more),
    ]  # fmt: skip


SIZES = {"max_seq_length": 48, "max_predictions_per_seq": 7}
SIZES |= {"global_batch": {"micro_batch_size": 4, "grad_acc_steps_per_replica": 2}}
settings_of = partial(small_run, merged(RUN, SIZES))


@pytest.mark.slow
def test_packed_corpora_are_read_by_weight_and_continue(home, tmp_path, monkeypatch, bert):
    monkeypatch.setenv("CORPORA", str(home))
    monkeypatch.setattr(health, "TOKENS", 0)  # so that a run of 12 steps is compared
    monkeypatch.setattr(health, "STEPS", 2)
    config = {"dataset_dir": [{"path": "$CORPORA/one", "weight": 3}, {"path": "$CORPORA/two"}]}
    (tmp_path / "mixed.json").write_text(json.dumps(config))
    run = tmp_path / "mixed"
    words = arguments(home, run, "--config", tmp_path / "mixed.json", samples=100)
    words += ["--max-sequences-per-pack", "3", "--validation-dir", str(home / "static")]
    words += ["--evaluation-examples", "16"]
    output = bert(*words).out
    assert f"75.000% from {home / 'one'}" in output and f"25.000% from {home / 'two'}" in output
    assert "steps of 8 packs, " in output
    assert output.count("is not below the unigram entropy of the records") == 1
    assert NO_PAIRS not in output
    _, *lines = metrics_of(run)
    assert "validation_nsp_loss" in lines[-1]
    sequences = [line["examples"] for line in lines]
    # Short sequences share an example: fewer steps than 100 / 8 for as many sequences.
    assert len(lines) < 12 and min(sequences) > 8 and 85 < sum(sequences) < 130
    assert all(0.2 < line["nsp_loss"] < 2 for line in lines)
    resume = lambda folder: main([*words, "--save-ckpt-path", str(folder)])  # noqa: E731
    again = continues_bit_for_bit(run, resume, 3)
    (entropy,) = {line["unigram_entropy"] for line in (*lines, *metrics_of(again)[1:])}
    assert 1 < entropy < lines[0]["mlm_loss"]
    before = (run / "settings.json").read_bytes()
    error = bert(*words, "--dataset-dir", home / "two", "--seed", "7", code=4).err
    assert "corpus (the examples that are read) was" in error and "seed was 1984, is 7" in error
    assert (run / "settings.json").read_bytes() == before


def test_text_without_next_sentences_decides_vocabulary_and_losses(home, tmp_path, bert):
    run = tmp_path / "run"
    model = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32
    }  # fmt: skip
    words = ["pretrain", "--dataset-dir", str(home / "single"), "--save-ckpt-path", str(run)]
    words += [*FLAGS, "--total-num-train-samples", "16", "--bert-config", json.dumps(model)]
    output = bert(*words).out
    size = json.loads((home / "single" / "corpus.json").read_text())["vocab_size"]
    assert f"bert_config.vocab_size: {size:,}, as in the records" in output
    assert json.loads((run / "settings.json").read_text())["bert_config"]["vocab_size"] == size
    assert all("nsp_loss" not in line and line["mlm_loss"] > 1 for line in metrics_of(run))
    assert "nsp" not in output.split("built in")[1]
    vocab = complete_checkpoints(run)[-1] / "vocab.txt"
    assert vocab.read_bytes() == (home / "single" / "vocab.txt").read_bytes()


@pytest.mark.slow
def test_a_packed_run_is_scored_without_packs_or_next_sentences(home, tmp_path, bert):
    words = ["--dataset-dir", home / "one", "--validation-dir", home / "single"]
    words += ["--max-sequences-per-pack", "3", "--evaluation-examples", "16"]
    assert NO_PAIRS in bert(*arguments(home, tmp_path, *words, samples=16)).out
    assert "validation_nsp_loss" not in metrics_of(tmp_path)[-1]


def test_the_vocabulary_of_the_records_is_that_of_the_run(home, tmp_path):
    sized_by = corpora.with_rows_for_records
    own = tmp_path / "corpus.json"
    described = json.loads((home / "one" / "corpus.json").read_text())
    own.write_text(json.dumps(described | {"vocab_size": 4096}))
    model = sized_by(settings_of(dataset_dir=str(tmp_path), bert_config={"hidden_size": 48}))
    assert (model.bert_config.vocab_size, model.bert_config.hidden_size) == (4096, 48)
    # The original's configs have 30,400 tokens: more are padding, and too few become those of the records.
    chosen = settings_of(dataset_dir=str(tmp_path), bert_config={"vocab_size": 30400})
    assert sized_by(chosen) is chosen
    smaller = settings_of(dataset_dir=str(tmp_path), bert_config={"vocab_size": 3000})
    assert sized_by(smaller).bert_config.vocab_size == 4096
    unsized = settings_of(dataset_dir=str(tmp_path))
    for text in ("no JSON", '{"format": 1}'):
        own.write_text(text)
        assert sized_by(unsized) is unsized


def test_settings_of_dynamic_records_fit_held_out_and_mixed_static_ones(home, capsys):
    size = json.loads((home / "one" / "corpus.json").read_text())["vocab_size"]
    usual = {"dataset_dir": str(home / "one"), "bert_config": {"vocab_size": size}}
    for changes in ({"masking": {"unit": "word"}}, {"max_sequences_per_pack": 3}):
        settings = settings_of(**usual, validation_dir=str(home / "static"), **changes)
        batch = corpora.open_stream(settings)[0]
        assert batch["input_ids"].shape[:2] == (2, 4)
        assert ("next_sentence_positions" in batch) == ("max_sequences_per_pack" in changes)
        held_out = corpora.open_held_out(settings, "validation_dir")
        rows = held_out.rows(range(9))
        assert rows["input_ids"].shape == (9, 48) and "next_sentence_positions" not in rows
    both = [{"path": str(home / "one")}, {"path": str(home / "static")}]
    mixed = settings_of(**usual | {"dataset_dir": both}, masking={"unit": "word"})
    assert corpora.open_stream(mixed)[0]["input_ids"].shape == (2, 4, 48)
    # Of a mixture, one part may be what is held out.
    assert "warning" not in capsys.readouterr().err
    mixed = settings_of(**usual | {"dataset_dir": both}, validation_dir=str(home / "static"))
    corpora.open_held_out(mixed, "validation_dir")
    assert "has the records that the run trains on" in capsys.readouterr().err


def test_masked_copies_do_not_count_as_more_text(home):
    for_each = []
    for name in ("two", "static"):
        settings = settings_of(dataset_dir=str(home / name), bert_config={"vocab_size": 400})
        *_, check = corpora.text_checks(corpora.open_stream(settings), new_pieces=400)
        for_each.append(check.values["tokens_for_each"])
    assert for_each[0] == pytest.approx(for_each[1], rel=0.1)


def test_synthetic_examples_of_a_run_are_masked_as_it_is_set():
    rows = []
    for changes in ({"masking": {"unit": "word"}}, {}):
        stream = corpora.open_stream(settings_of(generated_dataset=True, **changes))
        rows.append(stream.rows(np.arange(50))["masked_lm_positions"])
    assert not np.array_equal(*rows)


def test_an_evaluation_reads_each_example_once_also_those_of_a_partial_micro_batch(home):
    reads = []
    batching = SimpleNamespace(micro_batch_size=3)
    stream = SimpleNamespace(epoch_size=9, folder=home / "one", batching=batching, fingerprint="")
    columns = dict.fromkeys(("masked_lm_ids", "masked_lm_weights"), np.zeros([1, 2], np.int32))
    columns["input_mask"] = np.ones([1, 2])
    stream.rows = lambda numbers: reads.extend(numbers) or columns
    engine = SimpleNamespace(evaluate=lambda _: {}, gather_weights=lambda: None)
    engine.head = SimpleNamespace(COUNTS={}, MEANS={})
    for rank in (0, 1):
        engine.group = SimpleNamespace(rank=rank, world_size=2, all_reduce=list)
        pretrain.evaluate(stream, 7, engine)
    assert sorted(reads) == list(range(7))
