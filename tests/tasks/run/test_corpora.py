"""Pre-training on real records however they are read: packed, by length, mixed, from an address, from a model."""

import json
import re
from shutil import copytree

import numpy as np
import pytest
from support.tiny_models import OTHERS, WORDS, write_model

from bert_cli.cli import main
from bert_cli.config.data import Masking
from bert_cli.config.training import PretrainSettings
from bert_cli.data.stream.mixture import NUMBERING
from bert_cli.tasks.run import corpora
from bert_cli.train.checkpoint import MODEL, whole_checkpoints

STEPS = 6
FLAGS = [
    "--max-seq-length", "48", "--max-predictions-per-seq", "7", "--global-batch.micro-batch-size", "4",
    "--global-batch.grad-acc-steps-per-replica", "2", "--checkpoint-every-steps", "1", "--keep-checkpoints", "9",
    "--optimizer-opts.learning-rate.max-learning-rate", "0.003", "--optimizer-opts.name", "AdamW",
]  # fmt: skip


def write_sentences(folder, seed, documents=80):
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    for number in range(2):
        texts = []
        for _ in range(documents):
            lines = [
                " ".join(draw.choice(WORDS, int(draw.integers(2, 12))))
                for _ in range(int(draw.integers(2, 9)))
            ]
            texts.append("\n".join(lines) + "\n")
        (folder / f"{number}.txt").write_text("\n".join(texts))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, and two corpora of dynamic records with its vocabulary."""
    place = tmp_path_factory.mktemp("corpora")
    write_model(place / "model")
    for seed, name in enumerate(("one", "two")):
        write_sentences(place / f"{name}_text", seed)
        words = ["tokenize", str(place / f"{name}_text"), str(place / name)]
        words += ["--vocab", str(place / "model"), "--sequence-length", "48", "--mask-tokens", "7"]
        words += ["--short-seq-prob", "0.5", "--masking", "dynamic", "--processes", "1"]
        assert main(words) == 0
    return place


def arguments(place, run, *more, samples=8 * STEPS):
    return [
        "pretrain", "--pretrained-ckpt-path", str(place / "model"), "--save-ckpt-path", str(run),
        "--total-num-train-samples", str(samples), *FLAGS, *more,
    ]  # fmt: skip


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_continues(place, run, words):
    """A run that goes on from its third checkpoint ends with the same bytes."""
    (place / "again").mkdir(exist_ok=True)
    again = place / "again" / run.name
    third = whole_checkpoints(run)[2]
    copytree(third, again / third.name)
    words = [str(again) if word == str(run) else word for word in words]
    assert main(words) == 0
    last, expected = whole_checkpoints(again)[-1], whole_checkpoints(run)[-1]
    assert last.name == expected.name
    assert (last / MODEL).read_bytes() == (expected / MODEL).read_bytes()


def test_a_model_gives_its_shape_and_its_words_to_the_run(place, capsys):
    run = place / "adapted"
    words = arguments(place, run, "--dataset-dir", str(place / "one"))
    assert main(words) == 0
    assert f"starts from the weights in {place / 'model'}" in capsys.readouterr().out
    config = json.loads((whole_checkpoints(run)[-1] / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 2)
    assert [line["examples"] for line in metrics(run)] == [8.0] * STEPS


def test_records_of_another_vocabulary_are_refused_before_the_first_step(place, tmp_path, capsys):
    pieces = (place / "model" / "vocab.txt").read_text().splitlines()
    pieces[6], pieces[7] = pieces[7], pieces[6]
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    words = ["tokenize", str(place / "one_text"), str(tmp_path / "other"), "--masking", "dynamic"]
    words += ["--vocab", str(tmp_path / "vocab.txt"), "--sequence-length", "48"]
    assert main([*words, "--mask-tokens", "7", "--processes", "1"]) == 0
    flags = arguments(place, tmp_path / "run", "--dataset-dir", str(tmp_path / "other"))
    assert main(flags) == 2
    told = capsys.readouterr().err
    assert "was made with another vocabulary" in told and "word 6 is" in told
    assert not (tmp_path / "run").exists()

    # The same in the folder of a run, which nobody has named as the model to start from.
    run = tmp_path / "other_run"
    assert main(arguments(place, run, "--dataset-dir", str(place / "one"))) == 0
    capsys.readouterr()
    before = sorted(path.name for path in run.iterdir())
    assert main(arguments(place, run, "--dataset-dir", str(tmp_path / "other"))) == 2
    told = capsys.readouterr().err
    assert f"save_ckpt_path ({run}): holds a run" in told and "a folder of its own" in told
    assert "pretrained-ckpt-path" not in told
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_folder_without_records_and_held_out_ones_of_another_vocabulary_are_named_by_their_setting(
    place, tmp_path, capsys
):
    flags = arguments(place, tmp_path / "run", "--dataset-dir", str(tmp_path / "non"))
    assert main(flags) == 3
    assert f"dataset_dir ({tmp_path / 'non'}): there is no such folder" in capsys.readouterr().err
    pieces = (place / "model" / "vocab.txt").read_text()
    (tmp_path / "vocab.txt").write_text(pieces + "unheard\nunseen\n")
    words = ["tokenize", str(place / "one_text"), str(tmp_path / "larger"), "--masking", "dynamic"]
    words += ["--vocab", str(tmp_path / "vocab.txt"), "--sequence-length", "48"]
    assert main([*words, "--mask-tokens", "7", "--processes", "1"]) == 0
    capsys.readouterr()
    flags = arguments(place, tmp_path / "run", "--dataset-dir", str(place / "one"))
    assert main([*flags, "--validation-dir", str(tmp_path / "larger")]) == 2
    told = capsys.readouterr().err
    assert f"validation_dir ({tmp_path / 'larger'})" in told and "of dataset_dir" in told
    assert "--bert-config.vocab-size" not in told


def test_a_packed_run_counts_sequences_and_continues(place, capsys):
    run = place / "packed"
    words = arguments(place, run, "--dataset-dir", str(place / "one"), samples=100)
    words += ["--max-sequences-per-pack", "3"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "steps of 8 packs, " in told
    lines = metrics(run)
    sequences = [line["examples"] for line in lines]
    # Short sequences share an example: fewer steps than 100 / 8 for as many sequences.
    assert len(lines) < 12 and min(sequences) > 8 and 85 < sum(sequences) < 130
    assert all(0.2 < line["nsp_loss"] < 2 for line in lines)
    assert_continues(place, run, words)


def test_a_packed_folder_is_read_like_one_that_is_packed_as_it_is_read(place, capsys):
    words = ["pack", str(place / "one"), str(place / "one_packed"), "--sequence-length", "48"]
    assert main([*words, "--max-sequences-per-pack", "3"]) == 0
    capsys.readouterr()
    run = place / "from_packs"
    flags = arguments(place, run, "--dataset-dir", str(place / "one_packed"), samples=100)
    assert main(flags) == 0
    assert "steps of 8 packs, " in capsys.readouterr().out
    assert min(line["examples"] for line in metrics(run)) > 8


def test_batches_by_length_are_shorter_and_continue(place, tmp_path):
    run = place / "bins"
    words = arguments(place, run, "--dataset-dir", str(place / "one"), "--length-bins", "3")
    assert main(words) == 0
    assert_continues(place, run, words)


def test_several_corpora_are_read_by_weight_and_continue(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CORPORA", str(place))
    config = {"dataset_dir": [{"path": "$CORPORA/one", "weight": 3}, {"path": "$CORPORA/two"}]}
    (tmp_path / "mixed.json").write_text(json.dumps(config))
    run = place / "mixed"
    words = arguments(place, run, "--config", str(tmp_path / "mixed.json"))
    assert main(words) == 0
    told = capsys.readouterr().out
    assert f"75.000% from {place / 'one'}" in told and f"25.000% from {place / 'two'}" in told
    assert_continues(place, run, words)
    # A run of a version that repeated examples within an epoch reads other examples: it does not continue.
    state = whole_checkpoints(run)[-1] / "state.json"
    earlier = state.read_text().replace(f", {NUMBERING}", "")
    assert earlier != state.read_text()
    state.write_text(earlier)
    capsys.readouterr()
    assert main(words) == 4
    read = json.loads(earlier)["fixed"]["corpus"]
    assert f"corpus (the examples that are read) was {read}, is {read}, {NUMBERING}" in (
        capsys.readouterr().err
    )


def test_records_at_an_address_are_read_through_a_copy(place, tmp_path):
    pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
    run, local = tmp_path / "run", place / "adapted"
    flags = ["--dataset-dir", f"file://{place / 'one'}", "--dataset-cache", str(tmp_path / "cache")]
    assert main(arguments(place, run, *flags)) == 0
    # There already, when the whole file is run.
    assert main(arguments(place, local, "--dataset-dir", str(place / "one"))) == 0
    last, expected = whole_checkpoints(run)[-1], whole_checkpoints(local)[-1]
    assert (last / MODEL).read_bytes() == (expected / MODEL).read_bytes()
    assert list((tmp_path / "cache").rglob("corpus.json"))


def test_text_without_next_sentences_trains_words_alone(place, tmp_path, capsys):
    words = ["tokenize", str(place / "one_text"), str(tmp_path / "one"), "--no-nsp"]
    words += ["--vocab", str(place / "model"), "--sequence-length", "48", "--mask-tokens", "7"]
    assert main([*words, "--masking", "dynamic", "--processes", "1"]) == 0
    run = tmp_path / "run"
    assert main(arguments(place, run, "--dataset-dir", str(tmp_path / "one"))) == 0
    assert all("nsp_loss" not in line and line["mlm_loss"] > 1 for line in metrics(run))
    assert "nsp" not in capsys.readouterr().out.split("traced in")[1]


def test_the_records_decide_the_vocabulary_and_the_run_continues(place, capsys):
    run = place / "without_vocabulary"
    model = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    words = ["pretrain", "--dataset-dir", str(place / "one"), "--save-ckpt-path", str(run), *FLAGS]
    words += ["--total-num-train-samples", str(8 * STEPS), "--bert-config", json.dumps(model)]
    assert main(words) == 0
    size = json.loads((place / "one" / "corpus.json").read_text())["vocab_size"]
    assert f"bert_config.vocab_size: {size:,}, as the records have" in capsys.readouterr().out
    assert json.loads((run / "settings.json").read_text())["bert_config"]["vocab_size"] == size
    assert_continues(place, run, words)
    assert main([*words, "--bert-config.vocab-size", str(size - 1)]) in (2, 4)


def test_masking_of_records_that_are_masked_already_is_refused(place, tmp_path, capsys):
    words = ["tokenize", str(place / "one_text"), str(tmp_path / "static"), "--processes", "1"]
    words += ["--vocab", str(place / "model"), "--sequence-length", "48", "--mask-tokens", "7"]
    assert main(words) == 0
    flags = ["--dataset-dir", str(tmp_path / "static"), "--masking.unit", "word"]
    assert main(arguments(place, tmp_path / "run", *flags)) == 2
    assert "masking: has no effect on" in capsys.readouterr().err


def test_words_of_the_made_up_text_are_those_of_the_vocabulary():
    assert set(OTHERS) <= set(WORDS)


@pytest.fixture(scope="module")
def static(place):
    """Static records of the second corpus."""
    words = ["tokenize", str(place / "two_text"), str(place / "static"), "--processes", "1"]
    words += ["--vocab", str(place / "model"), "--sequence-length", "48", "--mask-tokens", "7"]
    assert main([*words, "--short-seq-prob", "0.5"]) == 0
    return place / "static"


@pytest.mark.parametrize(
    "flags",
    [["--masking.unit", "word"], ["--max-sequences-per-pack", "3"], ["--length-bins", "3"]],
    ids=lambda flags: flags[0],
)
def test_settings_of_dynamic_records_go_with_static_ones_that_are_held_out(
    place, static, tmp_path, flags
):
    words = ["--dataset-dir", str(place / "one"), "--validation-dir", str(static), *flags]
    words += ["--evaluate-every-steps", "3", "--evaluation-examples", "32"]
    assert main(arguments(place, tmp_path / "run", *words)) == 0
    scored = [line for line in metrics(tmp_path / "run") if any("valid" in name for name in line)]
    assert scored, metrics(tmp_path / "run")[-1]


def test_held_out_records_without_pairs_are_told_to_give_no_next_sentence_score(
    place, tmp_path, capsys
):
    words = ["tokenize", str(place / "one_text"), str(tmp_path / "single"), "--no-nsp"]
    words += ["--vocab", str(place / "model"), "--masking", "dynamic", "--sequence-length", "48"]
    assert main([*words, "--mask-tokens", "7", "--processes", "1"]) == 0
    told = "has no pairs, so no next-sentence score"
    for records in ("single", place / "one"):
        held_out = str(tmp_path / records)
        words = ["--dataset-dir", str(place / "one"), "--validation-dir", held_out, "--dry-run"]
        assert main(arguments(place, tmp_path / "run", *words)) == 0
        assert (told in capsys.readouterr().out) == (records == "single")


def test_a_way_of_masking_is_for_the_dynamic_records_of_a_mixture(place, static, tmp_path):
    words = ["--dataset-dir", str(place / "one"), "--dataset-dir", str(static)]
    assert main(arguments(place, tmp_path / "run", *words, "--masking.unit", "word")) == 0


def test_settings_that_a_run_has_written_start_it_again(place, static, tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    assert main(arguments(place, run, "--dataset-dir", str(static))) == 0
    words = ["pretrain", "--config", str(run / "settings.json"), "--save-ckpt-path", str(again)]
    assert main(words) == 0
    last, expected = whole_checkpoints(again)[-1], whole_checkpoints(run)[-1]
    assert (last / MODEL).read_bytes() == (expected / MODEL).read_bytes()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            {"do_lower_case": False},
            "do_lower_case True.* do_lower_case False; make the records with --cased",
        ),
        ({"do_lower_case": True, "strip_accents": False}, "strip_accents False; train new weights"),
    ],
)
def test_records_of_another_case_than_the_models_are_refused(place, tmp_path, capsys, said, told):
    copytree(place / "model", tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(said))
    words = arguments(place, tmp_path / "run", "--dataset-dir", str(place / "one"))
    words[words.index(str(place / "model"))] = str(tmp_path / "model")
    assert main(words) == 2
    assert re.search(told, capsys.readouterr().err)


def test_made_up_examples_of_a_run_are_masked_as_it_says(place):
    said = {
        "bert_config": {},
        "max_seq_length": 32,
        "max_predictions_per_seq": 5,
        "generated_dataset": True,
    }
    said |= {
        "global_batch": {"micro_batch_size": 4},
        "masking": {"unit": "span", "longest_span": 3},
    }
    adam = {"name": "AdamW", "learning_rate": {"max_learning_rate": 1e-3}}
    settings = PretrainSettings.model_validate(said | {"optimizer_opts": adam})
    plain = settings.model_copy(update={"masking": Masking()})
    readers = [corpora.open_reader(one, 4) for one in (settings, plain)]
    rows = [reader.rows(np.arange(50))["masked_lm_positions"] for reader in readers]
    assert not np.array_equal(*rows)
