"""Pre-training on real records: packed, in length buckets, mixed, from an address, from a model."""

import json
import re
from shutil import copytree

import numpy as np
import pytest
from support.tiny_models import WORDS, write_model

from bert_cli.cli import main
from bert_cli.config.layout import estimate
from bert_cli.config.training import PretrainSettings
from bert_cli.data.stream.mixture import NUMBERING
from bert_cli.tasks.run import corpora
from bert_cli.train.checkpoint import MODEL
from bert_cli.train.folder import complete_checkpoints

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
def home(tmp_path_factory):
    """A model, and two corpora of dynamic records with its vocabulary."""
    home = tmp_path_factory.mktemp("corpora")
    write_model(home / "model")
    for seed, name in enumerate(("one", "two")):
        write_sentences(home / f"{name}_text", seed)
        words = ["tokenize", str(home / f"{name}_text"), str(home / name)]
        words += ["--vocab", str(home / "model"), "--sequence-length", "48", "--mask-tokens", "7"]
        words += ["--short-seq-prob", "0.5", "--masking", "dynamic", "--processes", "1"]
        assert main(words) == 0
    return home


def arguments(home, run, *more, samples=8 * STEPS):
    return [
        "pretrain", "--pretrained-ckpt-path", str(home / "model"), "--save-ckpt-path", str(run),
        "--total-num-train-samples", str(samples), *FLAGS, *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def adapted(home):
    """A run on the first corpus that starts from the model."""
    run = home / "adapted"
    assert main(arguments(home, run, "--dataset-dir", str(home / "one"))) == 0
    return run


@pytest.fixture(scope="module")
def static(home):
    """Static records of the second corpus."""
    words = ["tokenize", str(home / "two_text"), str(home / "static"), "--processes", "1"]
    words += ["--vocab", str(home / "model"), "--sequence-length", "48", "--mask-tokens", "7"]
    assert main([*words, "--short-seq-prob", "0.5"]) == 0
    return home / "static"


def settings_of(**changes):
    run = {
        "max_seq_length": 48, "max_predictions_per_seq": 7, "global_batch": {"micro_batch_size": 4},
        "optimizer_opts": {"name": "AdamW", "learning_rate": {"max_learning_rate": 0.001}},
    }  # fmt: skip
    return PretrainSettings.model_validate(run | changes)


def assert_same_model(run, other):
    last, expected = complete_checkpoints(run)[-1], complete_checkpoints(other)[-1]
    assert last.name == expected.name
    assert (last / MODEL).read_bytes() == (expected / MODEL).read_bytes()


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_continues(home, run, words):
    """A run that goes on from its third checkpoint ends with the same bytes."""
    (home / "again").mkdir(exist_ok=True)
    again = home / "again" / run.name
    third = complete_checkpoints(run)[2]
    copytree(third, again / third.name)
    words = [str(again) if word == str(run) else word for word in words]
    assert main(words) == 0
    assert_same_model(again, run)


def test_a_run_has_the_shape_of_its_model_and_starts_again_from_its_settings_or_an_address(
    home, adapted, tmp_path, capsys
):
    config = json.loads((complete_checkpoints(adapted)[-1] / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 2)
    assert [line["examples"] for line in metrics(adapted)] == [8.0] * STEPS
    again, remote = tmp_path / "again", tmp_path / "remote"
    flags = ["pretrain", "--config", str(adapted / "settings.json"), "--save-ckpt-path"]
    assert main([*flags, str(again)]) == 0
    assert f"starts from the weights in {home / 'model'}" in capsys.readouterr().out
    assert_same_model(again, adapted)
    pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
    flags += [str(remote), "--dataset-dir", f"file://{home / 'one'}"]
    assert main([*flags, "--dataset-cache", str(tmp_path / "cache")]) == 0
    assert_same_model(remote, adapted)
    assert list((tmp_path / "cache").rglob("corpus.json"))


def test_records_of_another_vocabulary_are_refused_before_the_first_step(
    home, adapted, tmp_path, capsys
):
    pieces = (home / "model" / "vocab.txt").read_text().splitlines()
    pieces[6], pieces[7] = pieces[7], pieces[6]
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    words = ["tokenize", str(home / "one_text"), str(tmp_path / "other"), "--masking", "dynamic"]
    words += ["--vocab", str(tmp_path / "vocab.txt"), "--sequence-length", "48"]
    assert main([*words, "--mask-tokens", "7", "--processes", "1"]) == 0
    flags = arguments(home, tmp_path / "run", "--dataset-dir", str(tmp_path / "other"))
    assert main(flags) == 2
    output = capsys.readouterr().err
    assert "was made with another vocabulary" in output and "token 6 is" in output
    assert not (tmp_path / "run").exists()

    # The same in the folder of a run that is continued without naming a model.
    before = sorted(path.name for path in adapted.iterdir())
    assert main(arguments(home, adapted, "--dataset-dir", str(tmp_path / "other"))) == 2
    output = capsys.readouterr().err
    assert f"save_ckpt_path ({adapted}): holds a run" in output and "another folder" in output
    assert "pretrained-ckpt-path" not in output
    assert sorted(path.name for path in adapted.iterdir()) == before


def test_a_folder_without_records_and_held_out_ones_of_another_vocabulary_are_named_by_their_setting(
    home, tmp_path, capsys
):
    flags = arguments(home, tmp_path / "run", "--dataset-dir", str(tmp_path / "non"))
    assert main(flags) == 3
    assert f"dataset_dir ({tmp_path / 'non'}): there is no such folder" in capsys.readouterr().err
    pieces = (home / "model" / "vocab.txt").read_text()
    (tmp_path / "vocab.txt").write_text(pieces + "unheard\nunseen\n")
    words = ["tokenize", str(home / "one_text"), str(tmp_path / "larger"), "--masking", "dynamic"]
    words += ["--vocab", str(tmp_path / "vocab.txt"), "--sequence-length", "48"]
    assert main([*words, "--mask-tokens", "7", "--processes", "1"]) == 0
    capsys.readouterr()
    flags = arguments(home, tmp_path / "run", "--dataset-dir", str(home / "one"))
    assert main([*flags, "--validation-dir", str(tmp_path / "larger")]) == 2
    output = capsys.readouterr().err
    assert f"validation_dir ({tmp_path / 'larger'})" in output and "of dataset_dir" in output
    assert "--bert-config.vocab-size" not in output


def test_a_packed_run_counts_sequences_and_continues(home, capsys):
    run = home / "packed"
    words = arguments(home, run, "--dataset-dir", str(home / "one"), samples=100)
    words += ["--max-sequences-per-pack", "3"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "steps of 8 packs, " in output
    lines = metrics(run)
    sequences = [line["examples"] for line in lines]
    # Short sequences share an example: fewer steps than 100 / 8 for as many sequences.
    assert len(lines) < 12 and min(sequences) > 8 and 85 < sum(sequences) < 130
    assert all(0.2 < line["nsp_loss"] < 2 for line in lines)
    assert_continues(home, run, words)


def test_length_buckets_continue(home, tmp_path):
    run = home / "buckets"
    words = arguments(home, run, "--dataset-dir", str(home / "one"), "--length-buckets", "3")
    assert main(words) == 0
    assert_continues(home, run, words)


def test_the_sizes_of_the_records_are_those_of_the_run_unless_they_are_set(home, tmp_path):
    words = ["pack", str(home / "one"), str(home / "one_packed"), "--sequence-length", "48"]
    assert main([*words, "--max-sequences-per-pack", "3"]) == 0
    folder = str(home / "one_packed")
    plain = settings_of(dataset_dir=folder)
    sized = corpora.with_sizes_of_records(plain)
    assert sized.max_sequences_per_pack == 3
    set_by_user = settings_of(dataset_dir=folder, max_sequences_per_pack=3)
    assert (
        estimate(sized) == estimate(corpora.with_sizes_of_records(set_by_user)) != estimate(plain)
    )
    stream = corpora.open_stream(sized, 8)
    assert stream.sequences_per_example > 1
    assert stream[0]["next_sentence_labels"].shape == (2, 4, 3)
    several = [{"path": str(tmp_path / "none"), "weight": 1.0}, {"path": folder, "weight": 1.0}]
    assert (
        corpora.with_sizes_of_records(settings_of(dataset_dir=several)).max_sequences_per_pack == 3
    )
    changed = settings_of(dataset_dir=folder, max_sequences_per_pack=2)
    assert corpora.with_sizes_of_records(changed).max_sequences_per_pack == 2
    (tmp_path / "corpus.json").write_text(json.dumps({"vocab_size": 4096}))
    sized = corpora.with_sizes_of_records(
        settings_of(dataset_dir=str(tmp_path), bert_config={"hidden_size": 48})
    )
    assert (sized.bert_config.vocab_size, sized.bert_config.hidden_size) == (4096, 48)
    chosen = settings_of(dataset_dir=str(tmp_path), bert_config={"vocab_size": 30400})
    assert corpora.with_sizes_of_records(chosen) is chosen
    unsized = settings_of(dataset_dir=str(tmp_path))
    for text in ("no JSON", "[]", "{}", None):
        (tmp_path / "corpus.json").unlink() if text is None else (
            tmp_path / "corpus.json"
        ).write_text(text)
        assert corpora.with_sizes_of_records(unsized) is unsized


def test_several_corpora_are_read_by_weight_and_continue(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CORPORA", str(home))
    config = {"dataset_dir": [{"path": "$CORPORA/one", "weight": 3}, {"path": "$CORPORA/two"}]}
    (tmp_path / "mixed.json").write_text(json.dumps(config))
    run = home / "mixed"
    words = arguments(home, run, "--config", str(tmp_path / "mixed.json"))
    assert main(words) == 0
    output = capsys.readouterr().out
    assert f"75.000% from {home / 'one'}" in output and f"25.000% from {home / 'two'}" in output
    assert_continues(home, run, words)
    # A run of a version that repeated examples within an epoch reads other examples: it does not continue.
    state = complete_checkpoints(run)[-1] / "state.json"
    earlier = state.read_text().replace(f", {NUMBERING}", "")
    assert earlier != state.read_text()
    state.write_text(earlier)
    capsys.readouterr()
    assert main(words) == 4
    read = json.loads(earlier)["fixed"]["corpus"]
    assert f"corpus (the examples that are read) was {read}, is {read}, {NUMBERING}" in (
        capsys.readouterr().err
    )


def test_text_without_next_sentences_trains_words_alone(home, tmp_path, capsys):
    words = ["tokenize", str(home / "one_text"), str(tmp_path / "one"), "--no-nsp"]
    words += ["--vocab", str(home / "model"), "--sequence-length", "48", "--mask-tokens", "7"]
    assert main([*words, "--masking", "dynamic", "--processes", "1"]) == 0
    run = tmp_path / "run"
    assert main(arguments(home, run, "--dataset-dir", str(tmp_path / "one"))) == 0
    assert all("nsp_loss" not in line and line["mlm_loss"] > 1 for line in metrics(run))
    assert "nsp" not in capsys.readouterr().out.split("traced in")[1]


def test_the_records_decide_the_vocabulary_and_the_run_continues(home, capsys):
    run = home / "without_vocabulary"
    model = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    words = ["pretrain", "--dataset-dir", str(home / "one"), "--save-ckpt-path", str(run), *FLAGS]
    words += ["--total-num-train-samples", str(8 * STEPS), "--bert-config", json.dumps(model)]
    assert main(words) == 0
    size = json.loads((home / "one" / "corpus.json").read_text())["vocab_size"]
    assert f"bert_config.vocab_size: {size:,}, as the records have" in capsys.readouterr().out
    assert json.loads((run / "settings.json").read_text())["bert_config"]["vocab_size"] == size
    assert_continues(home, run, words)
    assert main([*words, "--bert-config.vocab-size", str(size - 1)]) in (2, 4)


def test_masking_of_records_that_are_masked_already_is_refused(home, tmp_path, capsys):
    words = ["tokenize", str(home / "one_text"), str(tmp_path / "static"), "--processes", "1"]
    words += ["--vocab", str(home / "model"), "--sequence-length", "48", "--mask-tokens", "7"]
    assert main(words) == 0
    flags = ["--dataset-dir", str(tmp_path / "static"), "--masking.unit", "word"]
    assert main(arguments(home, tmp_path / "run", *flags)) == 2
    assert "masking: has no effect on" in capsys.readouterr().err


def test_held_out_records_without_pairs_have_no_next_sentence_score(home, tmp_path, capsys):
    words = ["tokenize", str(home / "one_text"), str(tmp_path / "single"), "--no-nsp"]
    words += ["--vocab", str(home / "model"), "--masking", "dynamic", "--sequence-length", "48"]
    assert main([*words, "--mask-tokens", "7", "--processes", "1"]) == 0
    output = "has no sentence pairs, so no next-sentence score"
    for records in ("single", home / "one"):
        held_out = str(tmp_path / records)
        words = ["--dataset-dir", str(home / "one"), "--validation-dir", held_out, "--dry-run"]
        assert main(arguments(home, tmp_path / "run", *words)) == 0
        assert (output in capsys.readouterr().out) == (records == "single")


@pytest.mark.parametrize(
    ("said", "output"),
    [
        (
            {"do_lower_case": False},
            "do_lower_case True.* do_lower_case False; make the records with --cased",
        ),
        ({"do_lower_case": True, "strip_accents": False}, "strip_accents False; train new weights"),
    ],
)
def test_records_of_another_case_than_the_models_are_refused(home, tmp_path, capsys, said, output):
    copytree(home / "model", tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(said))
    words = arguments(home, tmp_path / "run", "--dataset-dir", str(home / "one"))
    words[words.index(str(home / "model"))] = str(tmp_path / "model")
    assert main(words) == 2
    assert re.search(output, capsys.readouterr().err)


def test_settings_of_dynamic_records_fit_held_out_and_mixed_static_ones(home, static, tmp_path):
    size = json.loads((home / "one" / "corpus.json").read_text())["vocab_size"]
    usual = {"dataset_dir": str(home / "one"), "bert_config": {"vocab_size": size}}
    for changes in ({"masking": {"unit": "word"}}, {"length_buckets": 3}):
        settings = settings_of(**usual, validation_dir=str(static), **changes)
        assert corpora.open_stream(settings, 8)[0]["input_ids"].shape[:2] == (2, 4)
        assert corpora.open_held_out(settings).rows(range(9))["input_ids"].shape == (9, 48)
    both = [{"path": str(home / "one")}, {"path": str(static)}]
    mixed = settings_of(**usual | {"dataset_dir": both}, masking={"unit": "word"})
    assert corpora.open_stream(mixed, 8)[0]["input_ids"].shape == (2, 4, 48)
    words = ["--dataset-dir", str(home / "one"), "--validation-dir", str(static)]
    words += [
        "--max-sequences-per-pack",
        "3",
        "--evaluate-every-steps",
        "3",
        "--evaluation-examples",
        "32",
    ]
    assert main(arguments(home, tmp_path / "run", *words)) == 0
    lines = metrics(tmp_path / "run")
    assert any("valid" in name for line in lines for name in line), lines[-1]


def test_synthetic_examples_of_a_run_are_masked_as_it_is_set():
    streams = [
        corpora.open_stream(settings_of(generated_dataset=True, **changes), 4)
        for changes in ({"masking": {"unit": "span", "longest_span": 3}}, {})
    ]
    rows = [stream.rows(np.arange(50))["masked_lm_positions"] for stream in streams]
    assert not np.array_equal(*rows)
