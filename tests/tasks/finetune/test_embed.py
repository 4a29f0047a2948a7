"""`bert embed`: losses and gradients are PyTorch's, on every layout; the result opens in sentence-transformers."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.hf_models import change_weights
from support.runs import continues_bit_for_bit
from support.tiny_models import OTHERS, PIECES, TINY, metrics_of, write_model

from bert_cli.cli import main
from bert_cli.config.embed import EmbedSettings
from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.features import Features
from bert_cli.data.tokens.tokenizer import Normalization, read_tokenizer, write_vocabulary
from bert_cli.files import OWN_CHECKSUM, STATE
from bert_cli.model import hf
from bert_cli.model.bert import build_block
from bert_cli.parallel.engine import UpdateRequest, count
from bert_cli.parallel.group import ProcessGroup
from bert_cli.parallel.tensorflow.mesh import cpu_mesh, group_of
from bert_cli.planning.workload import workload_of
from bert_cli.tasks.finetune import embed
from bert_cli.tasks.run import build, finetune, models, resolve, start, teacher
from bert_cli.tasks.run.task import Task
from bert_cli.tasks.run.vectors import Embedding
from bert_cli.train.checkpoint import MODEL, complete_checkpoints

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FLAGS = ["--max-seq-length", "32", "--optimizer-opts.learning-rate.max-learning-rate", "0.001"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two models, pairs with a hard negative, texts, pairs with scores, and a folder for retrieval."""
    home = tmp_path_factory.mktemp("embed")
    write_model(home / "model")
    write_model(home / "plain", TINY.model_copy(update=NO_DROPOUT))
    draw = np.random.default_rng(5)

    def text(word=None):
        words = list(draw.choice(OTHERS, int(draw.integers(3, 12))))
        return " ".join([*words, *([word] * 3 if word else [])])

    words = [f"{a}{b}" for a in "bcdfghjk" for b in "lmnpqrst"]
    rows = ["anchor\tpositive\tnegative"]
    rows += [f"{text(word)}\t{text(word)}\t{text()}" for word in words]
    (home / "pairs.tsv").write_text("\n".join(rows) + "\n")
    (home / "texts.txt").write_text("\n".join(text() for _ in range(40)) + "\n")
    judged = ["sentence1,sentence2,score"]
    judged += [f"{text(a)},{text(b)},{float(a == b)}" for a in words[:6] for b in words[:6]]
    (home / "sts.csv").write_text("\n".join(judged) + "\n")
    documents = [{"_id": f"d{n}", "title": w, "text": text(w)} for n, w in enumerate(words)]
    queries = [{"_id": f"q{n}", "text": text(w)} for n, w in enumerate(words[:9])]
    for name, objects in (("corpus", documents), ("queries", queries)):
        lines = "".join(f"{json.dumps(one)}\n" for one in objects)
        (home / f"{name}.jsonl").write_text(lines)
    (home / "qrels").mkdir()
    judgements = [f"q{n}\td{n}\t1" for n in range(9)]
    (home / "qrels" / "dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judgements]))
    return home


def arguments(home, run, *more, micro_batch=8, accumulation=2):
    words = ["embed", "--pretrained-ckpt-path", home / "model", "--save-ckpt-path", home / run]
    words += ["--global-batch.micro-batch-size", micro_batch]
    words += ["--global-batch.grad-acc-steps-per-replica", accumulation, "--cache-dir", "null"]
    return [*map(str, words), *FLAGS, *more]


def pairs(home, run, *more, **sizes):
    return arguments(home, run, "--train-file", str(home / "pairs.tsv"), *more, **sizes)


def newest(run):
    return complete_checkpoints(run)[-1]


# --- losses and gradients


def first_step(home, **changes):
    """Return the loss, the gradients by Hugging Face's names and the texts of the first step."""
    values = {
        "pretrained_ckpt_path": str(home / "plain"),
        "bert_config": TINY.model_copy(update=NO_DROPOUT).model_dump(),
        "max_seq_length": 32,
        "global_batch": {"micro_batch_size": 4, "grad_acc_steps_per_replica": 3},
        "do_validation": False,
        "cache_dir": None,
        **changes,
    }
    settings = EmbedSettings.model_validate(values)
    work = workload_of(settings)
    mesh = resolve.open_mesh(work)
    task = embed.build(settings, read_tokenizer(home / "plain"), None)
    group = group_of(mesh)
    task = task.teach(task=task, group=group) if task.teach else task
    plan, reader, _ = finetune.open_features(settings, task.train, mesh, task.reader)
    engine, state, _ = build.build_run(work, mesh, plan)
    start.load_weights(models.find_source(str(home / "plain")), state.weights)
    batch = task.prepare(engine, reader[0], UpdateRequest())
    counts = count(batch, engine.head.COUNTS)
    engine.compile_stages(batch, counts)
    sums = engine.accumulate(batch, 0, counts, 1.0)
    gradients = {
        name: accumulator.numpy()
        for stage in engine.replicas[0]
        for name, accumulator in stage.accumulators.items()
    }
    shape = settings.bert_config
    # Without the packs of texts.
    batch = finetune.open_features(settings, task.train, mesh)[1][0]
    return sums["loss"] / counts["examples"], hf.to_hf(gradients, shape), batch


def opened(home, name, pooling):
    """Return the model without dropout in sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    folder = home / name
    if not folder.exists():
        shutil.copytree(home / "plain", folder)
        for file, content in embeddings.embedding_files(pooling, TINY.hidden_size, 32).items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(content)
    return SentenceTransformer(str(folder), device="cpu")


def tensors(batch, column, rows):
    import torch

    names = {"input_ids": "input_ids", "attention_mask": "input_mask"}
    flat = {theirs: batch[own].reshape(-1, batch[own].shape[-1]) for theirs, own in names.items()}
    return {name: torch.tensor(one[column::rows]) for name, one in flat.items()}


def assert_gradients(gradients, model, prefix=""):
    """Assert the gradients of PyTorch's parameters, those of both where a weight is used twice."""
    norm = np.sqrt(sum(np.sum(np.square(one, dtype=np.float64)) for one in gradients.values()))
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and (ours := gradients.get(f"{prefix}{name}")) is not None:
            apart = np.linalg.norm(ours - parameter.grad.numpy())
            assert apart <= 1e-5 * max(np.linalg.norm(ours), 1e-2 * norm), name
            compared += 1
    assert compared >= 5 + 16 * TINY.num_hidden_layers


@pytest.mark.parametrize(("pooling", "micro_batches"), [("mean", 3), ("cls", 3), ("mean", 1)])
def test_loss_and_gradients_of_pairs_are_pytorchs_of_the_complete_batch(
    pooling, micro_batches, home
):
    """Of 12 rows of anchor, positive and hard negative, in packs of texts for the mean."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    columns = ["anchor", "positive", "negative"]
    changes = {"train_file": str(home / "pairs.tsv"), "text_column": columns, "temperature": 0.1}
    sizes = {
        "micro_batch_size": 12 // micro_batches,
        "grad_acc_steps_per_replica": micro_batches,
    }
    loss, gradients, batch = first_step(home, **changes, pooling=pooling, global_batch=sizes)
    assert batch["input_ids"].shape[:2] == (micro_batches, 36 // micro_batches)
    model = opened(home, pooling, pooling)
    judge = MultipleNegativesRankingLoss(model, scale=10.0)
    expected = judge([tensors(batch, n, 3) for n in range(3)], None)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_gradients(gradients, model[0].auto_model, "bert.")


def test_equal_texts_are_no_negatives_and_blocks_change_nothing(monkeypatch):
    draw = np.random.default_rng(2)
    vectors = draw.standard_normal((6, 2, 8)).astype(np.float32)
    texts = np.arange(12).reshape(6, 2)
    complete = embed.contrastive_loss(vectors, texts, 0.1)
    monkeypatch.setattr(embed, "ROWS", 4)
    for mine, other in zip(embed.contrastive_loss(vectors, texts, 0.1), complete, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)
    vectors[5, 1], texts[5, 1] = vectors[0, 1], texts[0, 1]  # the positive of row 0 once more
    repeated = embed.contrastive_loss(vectors, texts, 0.1)
    without = embed.contrastive_loss(vectors[:5], texts[:5], 0.1)
    for mine, other in zip(repeated[:2], without[:2], strict=True):
        assert mine[0] == pytest.approx(other[0], rel=1e-5)
    same = embed.contrastive_loss(np.ones_like(vectors), np.arange(12).reshape(6, 2), 0.1)
    assert not same[1].any(), "of equal vectors none finds its own positive"


def test_a_candidate_with_the_text_of_the_anchor_is_no_negative():
    draw = np.random.default_rng(4)
    vectors = draw.standard_normal((6, 3, 8)).astype(np.float32)
    texts = np.arange(18).reshape(6, 3)
    vectors[5, 1:], texts[5, 1:] = vectors[0, 0], texts[0, 0]
    repeated = embed.contrastive_loss(vectors, texts, 0.1)
    without = embed.contrastive_loss(vectors[:5], texts[:5], 0.1)
    assert repeated[0][0] == pytest.approx(without[0][0], rel=1e-5)
    assert repeated[0][1] > without[0][1] + 1e-3  # to another anchor they are negatives


def test_a_positive_that_ties_is_not_correct_in_a_step_of_any_number_of_micro_batches():
    """The positive of row 0 has the score of another candidate; the positives of rows 1 and 2 are best."""
    texts = np.eye(6, dtype=np.float32)[[0, 3, 1, 1, 2, 2, 4, 3]]
    texts[0] = texts[1]
    on_host = embed.contrastive_loss(texts.reshape(4, 2, 6), np.arange(8).reshape(4, 2), 0.1)[1]
    assert on_host.tolist() == [0.0, 1.0, 1.0, 0.0]
    head = build_block("embed_head", TINY, seed=None, policy="float32")
    labels = {
        "text_slots": np.arange(8, dtype=np.int32),
        "is_left_out": np.zeros((4, 4), np.bool_),
        "temperature": np.float32(0.1),
    }
    _, sums = head.call(texts[:, None], labels, {"examples": 8.0}, None)
    assert float(sums["correct"]) == 2 * on_host.sum(), "each row counts for its two texts"


def test_the_gradients_of_each_process_are_those_of_its_own_texts():
    """Two processes of 3 micro-batches have what one process of 6 has."""
    draw = np.random.default_rng(6)
    index = np.concatenate([draw.permutation(24), [-1] * 6]).reshape(6, 5)
    numbers = np.where(index < 0, 0, index % 20)
    vectors = draw.standard_normal((6, 5, 8)).astype(np.float32)
    contrast = embed.Contrast(rows=12, texts=2, temperature=0.1, sizes=(8,))
    sent = {}

    def batch_of(rank, world_size, all_reduce):
        group = SimpleNamespace(rank=rank, world_size=world_size, all_reduce=all_reduce)
        rows = slice(rank * 6 // world_size, (rank + 1) * 6 // world_size)
        engine = SimpleNamespace(group=group, forward=lambda batch, request: vectors[rows])
        batch = {"text_index": index[rows], "text_numbers": numbers[rows]}
        return embed.add_gradients(contrast, engine, batch, UpdateRequest())

    complete = batch_of(0, 1, lambda array: array)
    for rank in (0, 1):  # what each process sends
        batch_of(rank, 2, lambda array, rank=rank: sent.setdefault(rank, array))
    both = [batch_of(rank, 2, lambda array: sent[0] + sent[1]) for rank in (0, 1)]
    for name in ("losses", "is_correct", "vector_gradients"):
        np.testing.assert_array_equal(np.concatenate([one[name] for one in both]), complete[name])
    assert not np.array_equal(both[0]["vector_gradients"], both[1]["vector_gradients"])
    for name in ("losses", "is_correct"):
        of_text = np.zeros(24)
        of_text[index[index >= 0]] = complete[name][index >= 0]
        assert np.array_equal(of_text[::2], of_text[1::2]) and len({*of_text}) > 1, name
    assert not complete["vector_gradients"][index < 0].any()
    assert complete["vector_gradients"][index >= 0].any(axis=1).all()


def test_held_out_pairs_are_not_trained_on(home, monkeypatch):
    texts = {}
    monkeypatch.setattr(
        embed, "features_of_texts", lambda examples, name, *_: texts.update({name: examples.first})
    )
    settings = EmbedSettings.model_validate(
        {
            "pretrained_ckpt_path": str(home / "plain"),
            "bert_config": TINY.model_dump(),
            "max_seq_length": 32,
            "train_file": str(home / "pairs.tsv"),
            "held_out_fraction": 0.25,
        }
    )
    embed.build(settings, read_tokenizer(home / "plain"), None)
    held, trained = set(texts["queries"]), set(texts["train"])
    assert len(held) == 16 and len(texts["train"]) == 2 * 48
    assert not (held | set(texts["documents"])) & trained


# --- layouts, kills, engines


LAYOUTS = {
    "2 replicas": ["--global-batch.replicas", "2"],
    "2 processes": ["--global-batch.replicas", "2"],
    "mixed_float16": ["--precision", "mixed_float16", "--optimizer-opts.loss-scaling", "1024"],
    "a pipeline, recomputed": [
        "--parallel.pipeline-stages", '[["emb","hid"],["hid","mean_pool","embed_head"]]',
        "--parallel.pipeline-device-mapping", "[0,1]", "--parallel.recompute",
    ],
    "jax, 2 replicas": ["--engine", "jax", "--global-batch.replicas", "2"],
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(home):
    """A run of 4 steps of 16 pairs in 4 micro-batches, with dropout."""
    words = ["--total-num-train-samples", "64", "--checkpoint-every-steps", "2"]
    assert main(pairs(home, "trained", *words, micro_batch=4, accumulation=4)) == 0
    return home / "trained"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * ("processes" in n)) for n in LAYOUTS]
)
def test_a_run_gives_the_same_numbers_in_every_layout(name, home, trained, tmp_path):
    flags = LAYOUTS[name]
    accumulation = 2 if "--global-batch.replicas" in flags else 4
    words = pairs(
        home, tmp_path / "run", "--total-num-train-samples", "64", *flags,
        micro_batch=4, accumulation=accumulation,
    )  # fmt: skip
    if "processes" in name:
        assert main(["launch", "--processes", "2", "--", *words]) == 0
    elif "jax" in name:
        devices = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        assert (
            subprocess.run([sys.executable, "-m", "bert_cli", *words], env=devices).returncode == 0
        )
    else:
        assert main(words) == 0
    for mine, other in zip(metrics_of(tmp_path / "run"), metrics_of(trained), strict=True):
        for metric in ("loss", "gradient_norm", "weight_norm"):
            within = 0.02 if "16" in name else 1e-5
            assert mine[metric] == pytest.approx(other[metric], rel=within), metric
        assert mine["accuracy"] == other["accuracy"] or "16" in name


def test_a_stopped_run_continues_bit_for_bit(home, trained):
    words = ["--total-num-train-samples", "64", "--checkpoint-every-steps", "2"]
    words = pairs(home, "trained", *words, micro_batch=4, accumulation=4)
    continues_bit_for_bit(trained, lambda run: main([*words, "--save-ckpt-path", str(run)]), 2)


def test_a_run_of_an_earlier_version_without_packs_is_refused(home, trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "run")
    for checkpoint in complete_checkpoints(tmp_path / "run"):
        state = json.loads((checkpoint / STATE).read_text())
        del state[OWN_CHECKSUM]
        fingerprint = state["fixed"]["corpus"]
        assert fingerprint.endswith(", packs")
        state["fixed"]["corpus"] = fingerprint.removesuffix(", packs")
        (checkpoint / STATE).write_text(json.dumps(state))
    words = ["--total-num-train-samples", "64"]
    words = pairs(home, tmp_path / "run", *words, micro_batch=4, accumulation=4)
    assert main(words) == 4
    message = capsys.readouterr().err
    assert "corpus (the examples that are read)" in message
    assert "start a new run in another save_ckpt_path" in message


# --- scores and use


def test_training_on_pairs_improves_the_scores_of_held_out_texts(home, capsys):
    """Spearman's correlation, and the ranking of documents, after and before."""
    judged = ["--validation-file", str(home / "sts.csv")]
    judged += ["--retrieval-file", str(home / "qrels/dev.tsv")]
    assert main(pairs(home, "better", *judged, "--num-epochs", "8")) == 0
    after = json.loads(capsys.readouterr().out.splitlines()[-1])
    start = ["embed", "--pretrained-ckpt-path", str(home / "model"), "--no-do-training", *judged]
    assert main([*start, "--max-seq-length", "32"]) == 0
    before = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {*after} == {"spearman", "ndcg_10", "recall_10", "recall_100"}
    assert all(value == round(value, 4) for value in (*after.values(), *before.values()))
    assert after["spearman"] > before["spearman"] + 0.1 and after["ndcg_10"] > before["ndcg_10"]


def test_an_epoch_has_every_row_once_however_many_texts_it_has(home):
    """12 rows a step: 64 rows of three texts, and of two; 40 texts with themselves."""
    for changes, epochs, steps in (
        ({"text_column": ["anchor", "positive", "negative"]}, 3, 16),
        ({"text_column": ["anchor", "positive"]}, 3, 16),
        ({"train_file": home / "texts.txt", "objective": "simcse"}, 1.5, 5),
    ):
        values = {"train_file": home / "pairs.tsv", "do_validation": False, "max_seq_length": 32}
        values |= {"num_epochs": epochs, "cache_dir": None, **changes}
        values["global_batch"] = {"micro_batch_size": 4, "grad_acc_steps_per_replica": 3}
        settings = EmbedSettings.model_validate(values)
        task = embed.build(settings, read_tokenizer(home / "plain"), None)
        mesh = resolve.open_mesh(workload_of(settings))
        plan, reader, _ = finetune.open_features(settings, task.train, mesh, task.reader)
        assert plan.total_steps == steps and reader.epoch_size in (40, 64)
        assert plan.epochs == pytest.approx(12 * steps / reader.epoch_size)


def test_simcse_trains_on_texts_with_themselves(home):
    words = ["--objective", "simcse", "--train-file", str(home / "texts.txt"), "--no-do-validation"]
    assert main(arguments(home, "simcse", *words, "--num-epochs", "4")) == 0
    losses = [row["loss"] for row in metrics_of(home / "simcse")]
    # Dropout makes two vectors of a text, so that the loss is not 0 from the start.
    assert 0.01 < losses[-1] < losses[0]


def test_scores_are_those_of_sentence_transformers(home):
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    retrieval = embeddings.read_retrieval(home / "qrels" / "dev.tsv")
    model = opened(home, "mean", "mean")
    documents = {str(n): text for n, text in enumerate(retrieval.documents)}
    judge = InformationRetrievalEvaluator(
        {str(n): text for n, text in enumerate(retrieval.queries)},
        documents,
        {str(n): {str(one) for one in relevant} for n, relevant in enumerate(retrieval.relevant)},
        precision_recall_at_k=[10, 100],
        ndcg_at_k=[10],
    )
    expected = judge(model)
    vectors = (model.encode(list(texts)) for texts in (retrieval.queries, retrieval.documents))
    scores = embeddings.retrieval_scores(*vectors, retrieval.relevant)
    assert 0.0 < scores["ndcg_10"] < 1.0
    for name, theirs in (("ndcg_10", "ndcg@10"), ("recall_10", "recall@10")):
        assert scores[name] == pytest.approx(expected[f"cosine_{theirs}"], abs=1e-6)


def test_sentence_transformers_opens_a_checkpoint_and_gives_the_vectors_of_predict(
    home, trained, capsys
):
    from sentence_transformers import SentenceTransformer

    texts = [f"the {word} was very good " * 9 for word in OTHERS]
    (home / "input.txt").write_text("\n".join(texts) + "\n")
    assert main(["predict", str(trained), "--input", str(home / "input.txt")]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = SentenceTransformer(str(newest(trained)), device="cpu")
    np.testing.assert_allclose([row["embedding"] for row in rows], model.encode(texts), atol=1e-5)
    assert np.linalg.norm(rows[0]["embedding"]) == pytest.approx(1.0, abs=1e-5)
    assert all(row["truncated"] for row in rows), "at 32 tokens, as in training"


def test_the_decoder_in_a_checkpoint_of_an_earlier_version_is_ignored(
    home, trained, tmp_path, capsys
):
    old = tmp_path / "old"
    shutil.copytree(newest(trained), old)
    weights = load_file(old / MODEL)
    weights["denoise_head.cross_0.value.weight"] = np.zeros((2, 2), np.float32)
    save_file(weights, old / MODEL)
    (old / "state.json").unlink()  # it has the checksum of the weights
    vectors = []
    for folder in (newest(trained), old):
        assert main(["predict", str(folder), "good film"]) == 0
        vectors.append(capsys.readouterr().out)
    assert vectors[0] == vectors[1]


def test_similarity_ranks_the_texts_of_a_file(home, trained, capsys):
    (home / "some.txt").write_text("the plot was bad\n\ngood music\nthe film was good\n")
    words = ["predict", str(trained), "the film was good", "--task", "similarity"]
    assert main([*words, "--input", str(home / "some.txt"), "--top", "2"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["text"] == "the film was good" and first["similarity"] == pytest.approx(
        1.0, abs=1e-5
    )
    assert second["similarity"] < 0.999
    assert main(["predict", str(trained), "--task", "similarity", "--input", "x"]) == 2
    assert "give a TEXT" in capsys.readouterr().err


WRONG = {
    "has no column 'anchor'": ("a,b\n1,2\n", []),
    "has an empty text": ("anchor,positive\ngood,\n", []),
    "is not in": ("anchor,positive\na,b\nc,d\n", ["--retrieval-file", "qrels/wrong.tsv"]),
    "has a text on each line, not pairs; give a table, or --objective simcse": (
        "",
        ["--train-file", "texts.txt"],
    ),
    "is not a number": ("anchor,positive\na,b\nc,d\n", ["--validation-file", "wrong.csv"]),
    "has the same score in every row": (
        "anchor,positive\na,b\nc,d\n",
        ["--validation-file", "same.csv"],
    ),
    "has one pair per step": (
        "",
        ["--global-batch.micro-batch-size", "1", "--global-batch.grad-acc-steps-per-replica", "1"],
    ),
    "has nothing to score on": ("", ["--objective", "simcse"]),
    "text_column (--text-column): names anchor twice": ("", ["--text-column", "anchor,anchor"]),
    "validation_column (--validation-column): names a twice": (
        "",
        ["--validation-column", "a,a,score"],
    ),
    "matryoshka.0 (--matryoshka): got ''": ("", ["--matryoshka", ""]),
    "num_epochs (1e+308): makes a run without end": (
        "anchor,positive\na,b\nc,d\ne,f\n",
        ["--num-epochs", "1e308"],
    ),
    "train.csv: is UTF-16, not UTF-8": ("\ufeffanchor,positive".encode("utf-16"), []),
    "surrogate.jsonl (line 1): has an unpaired surrogate": (
        "",
        ["--train-file", "surrogate.jsonl"],
    ),
    "names 1 column for": ("", ["--text-column", "text"]),
    "objective (--objective) 'tsdae': is no longer supported": ("", ["--objective", "tsdae"]),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_mistake_names_its_place_and_a_remedy(message, home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, flags = WRONG[message]
    (tmp_path / "train.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "surrogate.jsonl").write_text('{"anchor": "\\ud800", "positive": "a"}\n')
    (tmp_path / "texts.txt").write_text("a\nb\n")
    (tmp_path / "wrong.csv").write_text("sentence1,sentence2,score\na,b,much\n")
    (tmp_path / "same.csv").write_text("sentence1,sentence2,score\na,b,1\nb,c,1\n")
    for name in ("queries", "corpus"):
        (tmp_path / f"{name}.jsonl").write_text('{"_id": "1", "text": "a"}\n')
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "wrong.tsv").write_text("query-id\tcorpus-id\tscore\n1\t2\t1\n")
    words = arguments(home, tmp_path / "run", "--train-file", "train.csv", *flags)
    assert main(words) in (2, 3)
    assert message in capsys.readouterr().err


# --- shortened vectors


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_loss_and_gradients_of_shortened_vectors_are_sentence_transformers(micro_batches, home):
    """The complete vectors and two prefixes, on the host (3 micro-batches) and in the head (one)."""
    from sentence_transformers.sentence_transformer.losses import (
        MatryoshkaLoss,
        MultipleNegativesRankingLoss,
    )

    columns = ["anchor", "positive", "negative"]
    changes = {"train_file": str(home / "pairs.tsv"), "text_column": columns, "temperature": 0.1}
    sizes = {
        "micro_batch_size": 12 // micro_batches,
        "grad_acc_steps_per_replica": micro_batches,
    }
    dimensions = [TINY.hidden_size, TINY.hidden_size // 2, 4]
    loss, gradients, batch = first_step(
        home, **changes, global_batch=sizes, matryoshka=dimensions[1:]
    )
    model = opened(home, "mean", "mean")
    model.zero_grad()
    inner = MultipleNegativesRankingLoss(model, scale=10.0)
    expected = MatryoshkaLoss(model, inner, dimensions)(
        [tensors(batch, n, 3) for n in range(3)], None
    )
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_gradients(gradients, model[0].auto_model, "bert.")


def test_shortened_vectors_are_scored_and_predicted(home, trained, capsys):
    judged = ["--validation-file", str(home / "sts.csv"), "--max-seq-length", "32"]
    start = ["embed", "--pretrained-ckpt-path", str(trained), "--no-do-training", *judged]
    assert main([*start, "--matryoshka", f"{TINY.hidden_size},8,4"]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(scores) == ["spearman", "spearman_dim8", "spearman_dim4"]
    texts = [f"the {word} was very good" for word in OTHERS[:5]]
    (home / "short.txt").write_text("\n".join(texts) + "\n")
    rows = []
    for flags in ([], ["--dimensions", "8"]):
        assert main(["predict", str(trained), "--input", str(home / "short.txt"), *flags]) == 0
        printed = capsys.readouterr()
        warning = f"(8): is not a size for which the vectors were trained ({TINY.hidden_size})"
        assert (warning in printed.err) == bool(flags)
        lines = printed.out.splitlines()
        rows.append(np.array([json.loads(line)["embedding"] for line in lines]))
    assert rows[1].shape == (5, 8)
    expected = rows[0][:, :8] / np.linalg.norm(rows[0][:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(rows[1], expected, atol=1e-6)
    words = ["predict", str(trained), texts[0], "--task", "similarity", "--dimensions", "8"]
    assert main([*words, "--input", str(home / "short.txt")]) == 0
    ranked = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cosines = dict(zip(texts, expected @ expected[0], strict=True))
    assert [row["text"] for row in ranked] == sorted(texts, key=cosines.get, reverse=True)
    similarities = [row["similarity"] for row in ranked]
    assert similarities == pytest.approx(sorted(cosines.values(), reverse=True), abs=1e-5)
    for words in (
        [*start, "--matryoshka", "999"],
        ["predict", str(trained), "a text", "--dimensions", "999"],
    ):
        assert main(words) == 2
        message = capsys.readouterr().err
        assert (
            f"(999): is more than the {TINY.hidden_size} values of the model's vectors" in message
        )


# --- vectors of a teacher


@pytest.fixture(scope="module")
def teachers(home):
    """Models of vectors of the student's size and of more values, with another vocabulary."""
    for name, size in (("equal", TINY.hidden_size), ("wide", 48)):
        config = TINY.model_copy(update={"hidden_size": size})
        folder = write_model(home / name, config, seed=9)
        reordered = [*PIECES[:5], *reversed(PIECES[5:])]
        write_vocabulary(folder, "".join(f"{p}\n" for p in reordered).encode(), Normalization())
        for file, content in embeddings.embedding_files("mean", size, 8).items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(content)
    return home


@pytest.mark.parametrize("teacher", ["equal", "wide"])
def test_loss_and_gradients_of_a_teachers_vectors_are_sentence_transformers(teacher, teachers):
    """Of texts in packs. Wider vectors become their coordinates on the principal axes."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MSELoss

    texts = (teachers / "texts.txt").read_text().splitlines()
    changes = {"train_file": str(teachers / "texts.txt")}
    changes["distillation"] = {"teacher": str(teachers / teacher)}
    loss, gradients, batch = first_step(teachers, **changes)
    size = TINY.hidden_size
    targets = batch["teacher_vectors"].reshape(-1, size)
    features = tensors(batch, 0, 1)
    expected = SentenceTransformer(str(teachers / teacher), device="cpu").encode(texts)
    if expected.shape[1] > size:
        left, values, _ = np.linalg.svd(expected, full_matrices=False)
        expected = left[:, :size] * values[:size]
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    # The order of the texts is the step's, and the sign of an axis is arbitrary.
    tokens = [row[row > 0].tolist() for row in features["input_ids"].numpy()]
    ours = read_tokenizer(teachers / "plain").library.encode_batch_fast(texts)
    rows = [next(n for n, e in enumerate(ours) if e.ids == row[1:-1]) for row in tokens]
    np.testing.assert_allclose(targets @ targets.T, expected[rows] @ expected[rows].T, atol=1e-5)
    model = opened(teachers, "mean", "mean")
    model.zero_grad()
    expected = size * MSELoss(model)([features], torch.tensor(targets))
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_gradients(gradients, model[0].auto_model, "bert.")


def test_vectors_of_a_teacher_are_computed_once_for_each_text(
    teachers, tmp_path, monkeypatch, capsys
):
    texts = (teachers / "texts.txt").read_text().splitlines()
    read = []
    of_texts = Embedding.of_texts

    def counted(self, inputs):
        if len(read) > 20:
            raise KeyboardInterrupt
        read.extend(item.fields["text"] for item in inputs)
        return of_texts(self, inputs)

    monkeypatch.setattr(Embedding, "of_texts", counted)
    monkeypatch.setattr(teacher, "STORED_AT_ONCE", 8)
    values = {"distillation": {"teacher": str(teachers / "equal")}, "cache_dir": tmp_path}
    settings = EmbedSettings.model_validate(values)
    features = Features(*(np.zeros(0, kind) for kind in ("i4", "i1", "i8")))
    task = Task(TINY.hidden_size, None, features)
    group = group_of(cpu_mesh())
    with pytest.raises(KeyboardInterrupt):
        teacher.with_vectors(settings, task, texts, group)
    stored = read.copy()
    read.clear()
    assert len(stored) == 24
    column = teacher.with_vectors(settings, task, texts[16:], group).train.labels["teacher_vectors"]
    assert read == texts[24:]
    read.clear()
    again = teacher.with_vectors(settings, task, texts[::-1], group).train.labels["teacher_vectors"]
    assert not read
    assert f"reads 0 texts, {len(texts)} vectors are cached" in capsys.readouterr().out
    np.testing.assert_array_equal(again[: len(column)], column[::-1])


# Changes of a cached row, by SQL.
DAMAGE = {
    "a changed bit": "vector = x'01' || substr(vector, 2)",
    "zeros": "vector = zeroblob(length(vector))",
    "short": "vector = substr(vector, 5)",
    "absent": "vector = NULL",
    "text": "vector = 'text'",
    "a number": "vector = 1, crc32c = 'x'",
    "a vector of another text": "text = '{2}' WHERE text = '{1}'; --",
    "no checksum": "crc32c = NULL",
}


@pytest.fixture(scope="module")
def cached(teachers, tmp_path_factory):
    """A cache folder, its file, and a function that returns the vectors of 20 texts with that folder."""
    folder = tmp_path_factory.mktemp("cache")
    texts = sorted(f"{first} {second}" for first in OTHERS[:4] for second in OTHERS[:5])
    values = {"distillation": {"teacher": str(teachers / "equal")}, "cache_dir": folder}
    settings = EmbedSettings.model_validate(values)
    features = Features(*(np.zeros(0, kind) for kind in ("i4", "i1", "i8")))
    task = Task(TINY.hidden_size, None, features)

    def vectors(group):
        return teacher.with_vectors(settings, task, texts, group).train.labels["teacher_vectors"]

    expected = vectors(group_of(cpu_mesh()))
    (file,) = folder.glob("vectors_*.sqlite")
    return vectors, expected, file, texts


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_row_of_the_cached_vectors_is_computed_again(cached, damage, capsys):
    vectors, expected, file, texts = cached
    with closing(sqlite3.connect(file)) as store, store:
        if damage.startswith("text ="):
            store.execute("DELETE FROM checked_vectors WHERE text = ?", texts[19:])
        damage = damage.format(None, *texts[18:])
        store.executescript(f"UPDATE checked_vectors SET {damage} WHERE text = '{texts[7]}'")
    np.testing.assert_allclose(vectors(group_of(cpu_mesh())), expected, atol=1e-6)
    said = "teacher: 1 vectors of the cache are damaged\n.*reads [12] texts, 1[89] "
    assert re.search(said, capsys.readouterr().out)
    vectors(group_of(cpu_mesh()))
    assert "reads 0 texts, 20 vectors are cached" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage", ["text", "truncated", "zeroed page", "empty", "older", "columns"]
)
def test_a_damaged_file_of_cached_vectors_is_made_again(cached, damage, capsys):
    vectors, expected, file, _ = cached
    data = file.read_bytes()
    with closing(sqlite3.connect(file)) as store, store:
        if damage == "older":
            store.execute("DROP TABLE checked_vectors")
            store.execute("CREATE TABLE vectors (text TEXT PRIMARY KEY, vector BLOB)")
            store.execute("INSERT INTO vectors VALUES ('text 1', zeroblob(64))")
        elif damage == "columns":
            store.execute("ALTER TABLE checked_vectors RENAME COLUMN crc32c TO crc32d")
    if damage in ("text", "truncated", "zeroed page", "empty"):
        half = len(data) // 2
        changed = {"text": b"x" * 999, "truncated": data[:half], "empty": b""}
        file.write_bytes(changed.get(damage, data[:4096] + bytes(4096) + data[8192:]))
    np.testing.assert_allclose(vectors(group_of(cpu_mesh())), expected, atol=1e-6)
    said = f"{file}: is damaged (" in (printed := capsys.readouterr().out)
    assert said == (damage not in ("empty", "older")) and "reads 20 texts" in printed


class Other(ProcessGroup):
    """A rank of several threads that add their numbers."""

    def __init__(self, rank, barrier, numbers):
        super().__init__(rank, barrier.parties)
        self.barrier, self.numbers = barrier, numbers

    def _sum(self, numbers):
        self.numbers[self.rank] = numbers
        self.barrier.wait(60)
        total = sum(self.numbers.values())
        self.barrier.wait(60)
        return total

    def publish(self, text): ...

    def published_by(self, rank): ...

    def naming_lost_process(self):
        return nullcontext()


def test_ranks_divide_the_texts_of_a_teacher_and_rank_0_has_the_cache(cached, monkeypatch):
    vectors, expected, file, texts = cached
    with closing(sqlite3.connect(file)) as store, store:
        store.execute("DELETE FROM checked_vectors WHERE text >= ?", [texts[14]])
    read, numbers, opened = [], {}, []
    of_texts, connect = Embedding.of_texts, sqlite3.connect

    def counted(self, inputs):
        read.append([item.fields["text"] for item in inputs])
        return of_texts(self, inputs)

    monkeypatch.setattr(Embedding, "of_texts", counted)

    def connected(path, **more):
        opened.append(path)
        return connect(path, **more)

    monkeypatch.setattr(sqlite3, "connect", connected)
    barrier = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        groups = [Other(rank, barrier, numbers) for rank in range(3)]
        results = list(pool.map(vectors, groups))
    assert sorted(text for part in read for text in part) == texts[14:] and list(
        map(len, read)
    ) == [2, 2, 2]
    assert sorted(opened) == sorted([str(file), ":memory:", ":memory:"])
    for result in results:
        np.testing.assert_allclose(result, expected, atol=1e-6)


CHANGED = ("nothing", "weights", "pooling", "length", "tokenizer")


@pytest.mark.parametrize("change", CHANGED)
def test_vectors_are_computed_again_after_a_change_of_the_teacher(change, teachers, tmp_path):
    other = tmp_path / "other"
    bias = {"weights": {"embeddings.LayerNorm.bias": lambda values: values + 1.0}}
    prefix = (
        "bert." if "bert.embeddings.LayerNorm.bias" in load_file(teachers / "equal" / MODEL) else ""
    )
    changes = {f"{prefix}{name}": function for name, function in bias.get(change, {}).items()}
    change_weights(teachers / "equal", other, changes)
    pooling, longest = "cls" if change == "pooling" else "mean", 20 if change == "length" else 8
    files = embeddings.embedding_files(pooling, TINY.hidden_size, longest)
    for file, content in files.items():
        (other / file).write_bytes(content)
    if change == "tokenizer":
        pieces = (other / "vocab.txt").read_text().splitlines()
        lines = "".join(f"{piece}\n" for piece in [*pieces[:5], *reversed(pieces[5:])])
        shutil.rmtree(other / "tokenizer.json", ignore_errors=True)
        write_vocabulary(other, lines.encode(), Normalization())
    texts = (teachers / "texts.txt").read_text().splitlines()
    features = Features(*(np.zeros(0, kind) for kind in ("i4", "i1", "i8")))
    tasks = []
    for name in ("equal", other):
        values = {"distillation": {"teacher": str(teachers / name)}, "cache_dir": tmp_path}
        settings = EmbedSettings.model_validate(values)
        task = Task(TINY.hidden_size, None, features)
        tasks.append(teacher.with_vectors(settings, task, texts, group_of(cpu_mesh())).train)
    is_equal = change == "nothing"
    assert len(list(tmp_path.glob("vectors_*.sqlite"))) == (1 if is_equal else 2)
    assert (tasks[0].fingerprint == tasks[1].fingerprint) == is_equal
    vectors = [part.labels["teacher_vectors"] for part in tasks]
    assert np.array_equal(*vectors) == is_equal


@pytest.mark.slow
def test_a_run_learns_the_vectors_of_a_teacher_in_any_layout_and_continues(teachers, tmp_path):
    words = ["--distillation.teacher", str(teachers / "wide"), "--total-num-train-samples", "64"]
    words += ["--text-column", "anchor", "--text-column", "positive"]
    words += ["--checkpoint-every-steps", "2"]

    def train(run, *flags):
        accumulation = 2 if "--global-batch.replicas" in flags else 4
        line = pairs(teachers, run, *words, *flags, micro_batch=4, accumulation=accumulation)
        if "jax" in flags:
            devices = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
            return subprocess.run([sys.executable, "-m", "bert_cli", *line], env=devices).returncode
        return main(line)

    assert train(tmp_path / "run") == 0
    expected = metrics_of(tmp_path / "run")
    assert "accuracy" not in expected[0] and expected[-1]["loss"] < expected[0]["loss"]
    continues_bit_for_bit(tmp_path / "run", train, 2)
    for name in ("2 replicas", "a pipeline, recomputed", "jax, 2 replicas"):
        assert train(tmp_path / name, *LAYOUTS[name]) == 0
        for mine, other in zip(metrics_of(tmp_path / name), expected, strict=True):
            for metric in ("loss", "gradient_norm", "weight_norm"):
                assert mine[metric] == pytest.approx(other[metric], rel=1e-5), (name, metric)


@pytest.mark.slow
def test_learning_a_teachers_vectors_improves_the_scores(teachers, tmp_path, capsys):
    """The teacher is trained on pairs, the student on texts alone."""
    judged = ["--validation-file", str(teachers / "sts.csv"), "--num-epochs", "8"]
    assert main(pairs(teachers, tmp_path / "teacher", *judged)) == 0
    learned = json.loads(capsys.readouterr().out.splitlines()[-1])["spearman"]
    words = ["--distillation.teacher", str(tmp_path / "teacher"), "--text-column", "positive"]
    words += ["--global-batch.grad-acc-steps-per-replica", "1"]
    assert main(pairs(teachers, tmp_path / "student", *judged, *words)) == 0
    student = json.loads(capsys.readouterr().out.splitlines()[-1])["spearman"]
    start = ["embed", "--pretrained-ckpt-path", str(teachers / "model"), "--no-do-training"]
    assert main([*start, *judged[:2], "--max-seq-length", "32"]) == 0
    before = json.loads(capsys.readouterr().out.splitlines()[-1])["spearman"]
    assert student - before > 0.5 * (learned - before) > 0.05


def test_a_teacher_of_vectors_that_cannot_be_used_is_refused(teachers, tmp_path, capsys):
    flags = ["--distillation.teacher", str(teachers / "equal"), "--no-do-validation"]
    flags += ["--train-file", str(teachers / "texts.txt")]
    for words, code, message in (
        ([*flags, "--objective", "simcse"], 2, "objective.*has no effect with distillation"),
        ([*flags, "--matryoshka", "8"], 2, "matryoshka.*has no effect with distillation"),
        ([*flags, "--no-do-training"], 2, "distillation.*has no effect without do_training"),
        ([*flags, "--distillation.teacher", str(teachers / "none")], 4, "no such folder"),
        (flags[:2], 2, "do_validation.*has nothing to score on without pairs"),
    ):
        assert main(arguments(teachers, tmp_path / "run", *words)) == code
        assert re.search(message, capsys.readouterr().err.replace("\n", " ")), message


# --- a model of sentence-transformers as the start


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, ("cls", 24)), ({"pooling": "mean", "max_seq_length": 16}, ("mean", 16))],
)
def test_pooling_and_length_of_the_model_are_the_defaults(given, expected, home, tmp_path):
    folder = shutil.copytree(home / "plain", tmp_path / "vectors")
    for name, content in embeddings.embedding_files("cls", TINY.hidden_size, 24).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    values = {
        "pretrained_ckpt_path": str(folder),
        "train_file": home / "pairs.tsv",
        "cache_dir": None,
    }
    settings = EmbedSettings.model_validate({**values, **given, "save_ckpt_path": tmp_path / "run"})
    with ExitStack() as stack:
        used = finetune.prepare(settings, embed.build, stack)[0].order
    assert (used.pooling, used.max_seq_length) == expected
