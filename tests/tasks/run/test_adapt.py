"""Go on from a model with more words: its vocabulary is extended, and its other weights stay."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.runs import run_command
from support.tiny_models import PIECES, metrics_of, pretrain_words, write_model, write_records

from bert_cli.cli import main
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.examples.reader import shuffled
from bert_cli.data.examples.source import Records
from bert_cli.data.records.corpus import RecordFiles
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.tasks.model import models
from bert_cli.train.checkpoint import MODEL, complete_checkpoints

WORDS = "word_embeddings.weight"
TEXT = [
    "The good plot was not gnocchi.",
    "Bad gnocchi is very bad, and fine gnocchis are not.",
] * 40


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, text with words that it lacks, an extended vocabulary and records with it."""
    home = tmp_path_factory.mktemp("adapt")
    write_model(home / "model")
    write_records(home / "plain", TEXT, home / "model")
    extend = ["vocab", str(home / "plain_text"), "--extend", str(home / "model"), "--size"]
    assert main([*extend, "+3", str(home / "vocab")]) == 0
    assert main([*extend, "+0", str(home / "same")]) == 0
    write_records(home / "records", TEXT, home / "vocab")
    return home


def pretrain(home, run="run", *flags):
    changes = {"validation_dir": home / "records", "total_num_train_samples": 40}
    return run_command(pretrain_words(home, run, *flags, **changes))


def by_pytorch(home):
    """Return the bits per byte of all records under the run's last checkpoint."""
    import torch
    import transformers

    (*_, saved) = complete_checkpoints(home / "run")
    model = transformers.BertForPreTraining.from_pretrained(saved).eval()
    pieces = (saved / "vocab.txt").read_text(encoding="utf-8").split()
    source = Records(
        RecordFiles(home / "records"), seed=PretrainSettings.model_fields["seed"].default
    )
    rows = shuffled(source, np.arange(len(source)))
    nats = text_bytes = 0.0
    for row in range(len(source)):
        names = ("input_ids", "input_mask", "segment_ids")
        columns = (torch.tensor(rows[name][row : row + 1].astype(np.int64)) for name in names)
        with torch.no_grad():
            logits = model(*columns).prediction_logits[0].log_softmax(-1)
        is_label = rows["masked_lm_weights"][row] > 0
        positions, labels = (
            rows[f"masked_lm_{name}"][row][is_label] for name in ("positions", "ids")
        )
        nats -= sum(float(logits[at, label]) for at, label in zip(positions, labels, strict=True))
        text_bytes += sum(len(pieces[label].removeprefix("##").encode()) for label in labels)
    return nats / np.log(2) / text_bytes


def test_a_new_row_is_the_mean_of_those_that_its_piece_replaces_and_all_else_stays(home):
    import transformers

    source = models.find_source(str(home / "model"))
    old, new = source.tensors(), models.extended(source, TokenizerFolder(home / "vocab")).tensors()
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "model")
    pieces = (home / "vocab/vocab.txt").read_text().split()[len(PIECES) :]
    for name in old:
        if not name.endswith((WORDS, "predictions.bias")):
            assert np.array_equal(old[name], new[name])
            continue
        assert np.array_equal(new[name][: len(PIECES)], old[name])
        for row, piece in zip(new[name][len(PIECES) :], pieces, strict=True):
            # transformers splits no lone continuation: a word before it that is one piece.
            ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(f"a{piece[2:]}"))[1:]
            if not piece.startswith("##"):
                ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(piece))
            np.testing.assert_allclose(row, old[name][ids].mean(0), rtol=1e-6)
    assert models.extended(source, TokenizerFolder(home / "same")) is source  # the same bytes


@pytest.mark.slow
def test_a_run_takes_its_shape_from_the_model_and_its_vocabulary_from_the_records(home, capsys):
    assert pretrain(home) == 0
    out = capsys.readouterr().out
    assert f"bert_config.vocab_size: {len(PIECES) + 3}, as in the records" in out
    mean = "the mean of the embeddings of the pieces it replaces"
    assert f"3 new pieces, each starting as {mean}" in out
    tensors = load_file(complete_checkpoints(home / "run")[-1] / MODEL)
    assert tensors[f"bert.embeddings.{WORDS}"].shape == (len(PIECES) + 3, 32)
    first, *lines = metrics_of(home / "run")
    assert first["step"] == 0 and len(lines) == 10
    bits = lines[-1]["validation_bits_per_byte"]
    assert bits != first["validation_bits_per_byte"] > 0 and "step 0: held out" in out
    assert f"bits_per_byte {bits:.4f}" in out
    assert bits == pytest.approx(by_pytorch(home), rel=1e-5)
    # A run's folder has a vocabulary as a model's has.
    again = ["vocab", str(home / "plain_text"), "--extend", str(home / "run"), "--size", "+0"]
    assert main([*again, str(home / "vocab_of_run")]) == 0
    assert (home / "vocab_of_run/vocab.txt").read_bytes() == (home / "vocab/vocab.txt").read_bytes()
    # The run is continued as any other.
    assert pretrain(home) == 0
    assert "continues from" in capsys.readouterr().out
