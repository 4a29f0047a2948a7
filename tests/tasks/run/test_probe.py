"""`--probe`: minimal pairs of sentences, scored while the model trains."""

import json
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from support.tiny_models import metrics_of, pretrain_words, write_model, write_records

from bert_cli.cli import main
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.tables import json_lines, read_lines
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.tasks.run import probe
from bert_cli.train.checkpoint import complete_checkpoints

PAIRS = [
    ("The plot was good.", "The plot was was."),
    ("It is not a bad film, and the music is fine.", "It is not a bad film, and the music is and."),
    ("Who is the actor?", "Who is is actor?"),
    ("The film and the plot was awful", "The film and the plot was what"),
]
TEXT = ["The good plot was not bad.", "Bad music is very bad, and fine actors are not."] * 40
# Called with a command line, prints the likelihoods of each evaluation as a line of JSON.
PRINTING = """
import json, sys
from bert_cli.cli import main
from bert_cli.tasks.run import probe
score = probe.log_likelihoods
def printed(*args):
    result = score(*args)
    print("likelihoods", json.dumps(result.tolist()))
    return result
probe.log_likelihoods = printed
sys.exit(main(sys.argv[1:]))
"""
STAGES = '[["emb", "hid"], ["hid", "enc_out", "pool", "heads"]]'
LAYOUTS = {
    "stages": ["--parallel.pipeline-stages", STAGES, "--parallel.pipeline-device-mapping", "[0, 0]"],
    "packs": ["--max-sequences-per-pack", "3", "--parallel.embedding-serialization-factor", "2"],
    "jax": ["--engine", "jax"],
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, records with its vocabulary, and pairs of sentences."""
    home = tmp_path_factory.mktemp("probe")
    write_model(home / "model")
    write_records(home / "records", TEXT, home / "model")
    lines = [json.dumps({"good": good, "bad": bad}) for good, bad in PAIRS]
    (home / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return home


@pytest.fixture
def train(home, monkeypatch, capsys):
    """Return a function that trains, and returns the likelihoods [n, 2] of the last evaluation and the output."""
    scored, score = [], probe.log_likelihoods

    def train(run, *flags):
        changes = {"total_num_train_samples": 32, "evaluate_every_steps": 4}
        changes |= {"probe": home / "pairs.jsonl", "validation_dir": home / "records"}
        words = pretrain_words(home, run, *flags, **changes)
        if "jax" in flags:  # a process has one engine
            command = [sys.executable, "-c", PRINTING, *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            lines = [line for line in done.stdout.splitlines() if line.startswith("likelihoods")]
            return np.array(json.loads(lines[-1].partition(" ")[2])), done.stdout
        monkeypatch.setattr(
            probe, "log_likelihoods", lambda *args: scored.append(score(*args)) or scored[-1]
        )
        assert main(words) == 0
        return scored[-1], capsys.readouterr().out

    return train


def by_pytorch(saved):
    """Return the likelihoods [n, 2] of the pairs under a checkpoint."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    model = transformers.AutoModelForMaskedLM.from_pretrained(saved).eval()
    likelihoods = []
    for sentence in (sentence for pair in PAIRS for sentence in pair):
        ids = tokenizer(sentence, return_tensors="pt").input_ids[0]
        total = 0.0
        for position in range(1, len(ids) - 1):
            masked = ids.clone()
            masked[position] = tokenizer.mask_token_id
            with torch.no_grad():
                logits = model(masked[None]).logits[0, position]
            total += float(logits.log_softmax(-1)[ids[position]])
        likelihoods.append(total)
    return np.array(likelihoods).reshape(-1, 2)


@pytest.mark.parametrize("layout", ["stages", "packs", pytest.param("jax", marks=pytest.mark.slow)])
def test_likelihoods_and_accuracy_equal_those_of_pytorch_on_every_layout(
    home, layout, train, capsys
):
    likelihoods, out = train(layout, *LAYOUTS[layout])
    expected = by_pytorch(complete_checkpoints(home / layout)[-1])
    np.testing.assert_allclose(likelihoods, expected, rtol=1e-4)
    rows = [row for row in metrics_of(home / layout) if "validation_probe_accuracy" in row]
    assert [row["step"] for row in rows] == [0, 4, 8]
    score = rows[-1]["validation_probe_accuracy"]
    assert score == np.mean(expected[:, 0] > expected[:, 1])
    # Beside the losses on held-out records, and in `bert runs`.
    (line,) = re.findall("step 8: held out, .*", out)
    assert f"bits_per_byte {rows[-1]['validation_bits_per_byte']:.4f} [" in line
    assert f"]  probe_accuracy {score:.4f} [" in line
    assert main(["runs", str(home / layout), "--json", "-"]) == 0
    (described,) = json.loads(capsys.readouterr().out)
    assert described["held_out"]["probe_accuracy"] == score


class Scorer:
    """An engine whose scores of a row are a function of its tokens and of its masked position."""

    def __init__(self, rank, world_size, all_reduce):
        self.group = SimpleNamespace(rank=rank, world_size=world_size, all_reduce=all_reduce)

    def gather_weights(self):
        pass

    def predict(self, columns):
        ids, positions = columns["input_ids"], columns["masked_lm_positions"]
        assert (np.take_along_axis(ids, positions, 1) == 4).all()
        seeds = np.concatenate([ids, positions], axis=1).tolist()
        return np.stack([np.random.default_rng(seed).random((1, 20)) for seed in seeds]), None


def test_the_rows_of_all_sentences_are_divided_among_the_processes():
    """Each token but [CLS] and [SEP] is masked once, whatever the number of processes and the size of a batch."""
    sentences = [[2, 7, 8, 3], [2, 9, 3], [2, 7, 9, 10, 11, 3], [2, 12, 3]]
    tokens, lengths = np.concatenate(sentences).astype(np.int32), [len(one) for one in sentences]
    features = Features(tokens, np.zeros_like(tokens, np.int8), np.cumsum(lengths))
    minimal_pairs = probe.Probe(features, mask=4, sequence_length=8, batch_size=3)
    expected = np.zeros(len(sentences))
    for number, sentence in enumerate(sentences):
        for position in range(1, len(sentence) - 1):
            row = [*sentence, *[0] * (8 - len(sentence))]
            row[position] = 4
            scores = np.random.default_rng([*row, position]).random(20)
            expected[number] += scores[sentence[position]] - np.log(np.exp(scores).sum())
    for world_size in (1, 2, 3):
        parts = []
        for rank in range(world_size):
            scorer = Scorer(rank, world_size, lambda part, parts=parts: parts.append(part) or part)
            probe.log_likelihoods(scorer, minimal_pairs)
        np.testing.assert_allclose(sum(parts), expected, rtol=1e-6)
        assert world_size == 1 or all(not np.allclose(part, expected) for part in parts)


def test_a_tie_counts_half():
    assert probe.accuracy(np.array([[-1.0, -2.0], [-2.0, -1.0], [-1.0, -1.0]])).value == 0.5


def test_the_shipped_pairs_differ_in_a_word_or_the_order_and_name_their_phenomenon(home):
    rows = [row for _, row in json_lines(read_lines(probe.SHIPPED), "shipped")]
    assert all(set(row) == {"good", "bad", "phenomenon"} for row in rows)
    sentences = [row[name] for row in rows for name in probe.NAMES]
    assert len(rows) > 150 and len(set(sentences)) == len(sentences)
    for row in rows:
        good, bad = (row[name].lower().strip(".?").split() for name in probe.NAMES)
        differing = sum(a != b for a, b in zip(good, bad, strict=True))
        assert differing == 1 or Counter(good) == Counter(bad), row
    assert set(Counter(row["phenomenon"] for row in rows)) == {
        "subject_verb_agreement", "agreement_across_distractor", "determiner_noun_agreement",
        "reflexive", "irregular_form", "argument_structure", "negative_polarity_item",
        "quantifier", "gap_and_question", "pronoun_case", "word_order",
    }  # fmt: skip
    # Also with a vocabulary of little but letters.
    pairs = probe.read_probe("english", TokenizerFolder(home / "records"), 64, 4)
    assert len(pairs.sentences) == 2 * len(rows)
