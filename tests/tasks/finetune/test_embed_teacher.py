"""Vectors of a teacher: computed once for each text, and again where the teacher or the cache has changed."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.hf_models import change_weights
from support.threads import on_each_rank
from support.tiny_models import OTHERS, TINY
from support.vectors import write_pooling, write_teachers

from bert_cli.config.embed import EmbedSettings
from bert_cli.data.finetune.features import Features
from bert_cli.data.tokens.tokenizer import Normalization, write_vocabulary
from bert_cli.parallel.tensorflow.mesh import group_of
from bert_cli.tasks.model.vectors import Embedding
from bert_cli.tasks.run import teacher
from bert_cli.tasks.run.resolve import open_mesh
from bert_cli.tasks.run.task import Task
from bert_cli.train.checkpoint import MODEL


@pytest.fixture(scope="module")
def teachers(home):
    return write_teachers(home)


def taught(name, cache, texts, group=None):
    """Return features with the vectors of a teacher for texts."""
    values = {"distillation": {"teacher": str(name)}, "cache_dir": cache}
    settings = EmbedSettings.model_validate(values)
    features = Features(*(np.zeros(0, kind) for kind in ("i4", "i1", "i8")))
    task = Task(TINY.hidden_size, None, features)
    learn = teacher.find_vectors(settings, texts, task)
    return learn(group or group_of(open_mesh(settings))).train


def vectors_of(*arguments):
    return taught(*arguments).labels["teacher_vectors"]


def test_vectors_of_a_teacher_are_computed_once_for_each_text(teachers, tmp_path, monkeypatch):
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
    with pytest.raises(KeyboardInterrupt):
        vectors_of(teachers / "equal", tmp_path, texts)
    first = {*read}
    read.clear()
    column = vectors_of(teachers / "equal", tmp_path, texts)
    assert len(read) == len({*read}) and {*read} == {*texts} - first
    read.clear()
    # Texts in another order, such as that of another seed, and one more.
    again = vectors_of(teachers / "equal", tmp_path, [*texts[::-1], "a new text", texts[0]])
    assert "a new text" in read and len(read) < 16
    np.testing.assert_allclose(again[: len(column)], column[::-1], atol=1e-6)
    np.testing.assert_array_equal(again[-1], again[len(column) - 1])


def test_ranks_divide_the_texts_of_a_teacher_and_read_them_once(teachers, tmp_path, monkeypatch):
    texts = sorted(f"{first} {second}" for first in OTHERS[:4] for second in OTHERS[:5])
    expected = vectors_of(teachers / "equal", None, texts)
    read = []
    of_texts = Embedding.of_texts

    def counted(self, inputs):
        read.append([item.fields["text"] for item in inputs])
        return of_texts(self, inputs)

    monkeypatch.setattr(Embedding, "of_texts", counted)
    monkeypatch.setattr(teacher, "STORED_AT_ONCE", 8)

    def vectors(group):
        return vectors_of(teachers / "equal", tmp_path, texts, group)

    # Another number of ranks reads no text again.
    for ranks, expected_texts in ((3, texts), (2, [])):
        results = on_each_rank(vectors, ranks)
        assert sorted(text for part in read for text in part) == expected_texts
        read.clear()
        for result in results:
            np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.fixture(scope="module")
def stored(teachers, tmp_path_factory):
    """A cache with the vectors of the texts, and these as features."""
    cache = tmp_path_factory.mktemp("stored")
    texts = (teachers / "texts.txt").read_text().splitlines()
    return cache, taught(teachers / "equal", cache, texts)


@pytest.mark.parametrize("change", ["nothing", "weights", "pooling", "length", "tokenizer"])
def test_vectors_are_computed_again_after_a_change_of_the_teacher(
    change, teachers, stored, tmp_path
):
    bias = "embeddings.LayerNorm.bias"
    name = next(name for name in load_file(teachers / "equal" / MODEL) if name.endswith(bias))
    weights = {name: lambda values: values + 1.0} if change == "weights" else {}
    other = change_weights(teachers / "equal", tmp_path / "other", weights)
    longest = 20 if change == "length" else 8
    write_pooling(other, "cls" if change == "pooling" else "mean", longest=longest)
    if change == "tokenizer":
        pieces = (other / "vocab.txt").read_text().splitlines()
        lines = "".join(f"{piece}\n" for piece in [*pieces[:5], *reversed(pieces[5:])])
        shutil.rmtree(other / "tokenizer.json", ignore_errors=True)
        write_vocabulary(other, lines.encode(), Normalization())
    texts = (teachers / "texts.txt").read_text().splitlines()
    cache = shutil.copytree(stored[0], tmp_path / "cache")
    parts = [stored[1], taught(other, cache, texts)]
    is_equal = change == "nothing"
    assert len(list(cache.glob("*.npz"))) == (1 if is_equal else 2)
    assert (parts[0].fingerprint == parts[1].fingerprint) == is_equal
    assert np.array_equal(*(part.labels["teacher_vectors"] for part in parts)) == is_equal
