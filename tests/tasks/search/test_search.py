"""`bert search`: what a person types, and what it prints; text that changes; kills; a model of vectors."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from sklearn.metrics import ndcg_score
from support.made_documents import lines, made_pdf
from support.processes import wait_for
from support.terminal import Terminal
from support.tiny_models import TINY, write_model
from support.vectors import vectors_of, write_pooling

import bert_cli
from bert_cli.cli import main
from bert_cli.data.io import conversion
from bert_cli.data.random import chooses
from bert_cli.data.search.index import SCALE, Index, open_index
from bert_cli.data.search.lexical import Lexical
from bert_cli.data.search.words import parse
from bert_cli.data.search.writing import write_index
from bert_cli.errors import CheckpointError
from bert_cli.tasks.model.runtimes import FEW
from bert_cli.tasks.search import make, score
from bert_cli.tasks.search.ask import place_of
from bert_cli.tasks.search.vectors import Model

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(bert_cli.__file__).parents[1])}
MANUALS = {
    "mount.txt": "MOUNT\n\nThe command mounts a disk. It needs a folder.\n",
    "shell/copy.txt": f"COPY\n\n{'It copies files to a folder. ' * 15}\n\nOPTIONS\n\nThere are none.\n",
    "notes.jsonl": '{"text": "Coffee is good."}\n{"text": "The film was bad, and the music fine."}\n',
}


def write(folder, texts=MANUALS):
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def manuals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "manuals")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_pooling(write_model(tmp_path_factory.mktemp("model") / "vectors"), "mean", 32, 24)


def content(path):
    """Return everything in an index but the numbers of rows and the times of files."""
    columns = "name || suffix, title, start, stop, text, value"
    tables = "places LEFT JOIN vectors USING (hash)"
    return sorted(sqlite3.connect(path).execute(f"SELECT {columns} FROM {tables}").fetchall())


def test_of_places_with_the_same_words_the_nearest_is_named(manuals):
    line = "A zebra needs a stable, and hay of the last summer, which the\n  keeper brings in.\n"
    write(manuals, {"zoo.md": f"# Zoo\r\n\r\n{line * 9}\r\n"})
    assert main(["search", "make", "index", "manuals"]) == 0
    hit = open_index(Path("index")).ask("zebra stable")[0]
    fifth = hit._replace(text="A zebra needs a stable", start=len("# Zoo\n\n") + 4 * len(line))
    assert place_of(fifth, str(manuals / "zoo.md")) == "line 11"


def test_words_that_matched_are_bold_and_control_characters_are_signs(
    manuals, monkeypatch, bert, capsys
):
    write(manuals, {"evil.txt": "A zebra\x1b]0;title\x07 and\ta \x9b31m horse.\n"})
    main(["search", "make", "index", "manuals"])
    capsys.readouterr()
    words = ["search", "ask", "index", "zebra horse", "--top", "1"]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(words) == 0
    shown = terminal.getvalue()
    assert "A \x1b[1mzebra\x1b[0m\ufffd]0;title\ufffd and" in shown
    assert "\ufffd31m \x1b[1mhorse\x1b[0m." in shown


def test_words_alone_load_no_framework(manuals):
    code = (
        "import sys\nfrom bert_cli.cli import main\nimport bert_cli\n"
        "assert main(['search', 'make', 'index', 'manuals']) == 0\n"
        "assert main(['search', 'ask', 'index', 'disk']) == 0\n"
        "hit, *_ = bert_cli.open_index('~/index').ask('disk', top=10)\n"
        "assert (hit.title, hit.document) == ('MOUNT', 'mount.txt') and hit.score > 0\n"
        "print(sorted({'tensorflow', 'keras', 'jax', 'torch'} & {*sys.modules}))"
    )
    words = [sys.executable, "-c", code]
    home = {**ENVIRONMENT, "HOME": str(manuals.parent)}
    done = subprocess.run(words, capture_output=True, text=True, env=home)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_second_call_reads_what_changed_and_forgets_what_is_gone(manuals, monkeypatch, capsys):
    main(["search", "make", "index", "manuals"])
    before = Path("index").read_bytes()
    read = []
    of = make.documents_of
    monkeypatch.setattr(make, "documents_of", lambda p, _: read.append(p.path.name) or of(p, _))
    assert main(["search", "make", "index", "manuals"]) == 0
    assert read == [] and Path("index").read_bytes() == before
    write(manuals, {"new.txt": "A zebra.\n", "mount.txt": "MOUNT\n\nIt has another text now.\n"})
    (manuals / "shell" / "copy.txt").unlink()
    capsys.readouterr()
    assert main(["search", "make", "index", "manuals"]) == 0
    assert "reads 2 new or changed files, forgets 1" in capsys.readouterr().out
    assert sorted(read) == ["mount.txt", "new.txt"]
    main(["search", "make", "fresh %20 #1?", "manuals"])
    assert content("index") == content("fresh %20 #1?")
    assert open_index(Path("index")).ask("copies") == []
    # A text of the same size, a millisecond later.
    new = manuals / "new.txt"
    second = new.stat().st_mtime_ns // 10**9 * 10**9
    for text, at in (("A llama.\n", second), ("A koala.\n", second + 10**6)):
        new.write_text(text)
        os.utime(new, ns=(at, at))
        assert main(["search", "make", "index", "manuals"]) == 0
    assert [hit.text for hit in open_index(Path("index")).ask("koala")] == ["A koala."]


@pytest.mark.parametrize("rows", [1, 1200])
def test_a_call_that_was_killed_continues_to_the_same_index(manuals, rows):
    sentence = "The film number {} was good, and its music was fine. "
    texts = ("".join(sentence.format(n + m) for m in range(400)) for n in range(60))
    write(manuals, {f"{n}.txt": text for n, text in enumerate(texts)})

    def passages():
        try:
            with closing(sqlite3.connect("file:index?mode=ro", uri=True)) as table:
                return table.execute("SELECT count(*) FROM passages").fetchone()[0]
        except sqlite3.Error:
            return 0  # not made yet

    words = [sys.executable, "-m", "bert_cli", "search", "make", "index", "manuals"]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: passages() >= rows, [process])
        process.kill()
    found = open_index(Path("index"))
    assert rows <= found.count("passages") < 2000
    assert found.ask("number")
    assert main(["search", "make", "index", "manuals"]) == 0
    assert main(["search", "make", "fresh", "manuals"]) == 0
    assert content("index") == content("fresh")


@pytest.mark.tensorflow
def test_vectors_are_those_of_predict_and_are_completed(manuals, model, monkeypatch, bert, capsys):
    monkeypatch.setattr(make, "AT_ONCE", 2)
    original = Model.__call__
    calls = []

    def fail_later(self, texts, done, total):
        calls.append((len(texts), done, total))
        if len(calls) > 1:
            raise KeyboardInterrupt
        return original(self, texts, done, total)

    monkeypatch.setattr(Model, "__call__", fail_later)
    words = ["search", "make", "index", "manuals", "--model", str(model)]
    assert main(words) == 130
    assert open_index(Path("index")).count("vectors") == 2
    total = calls[0][2]
    assert calls == [(2, 0, total), (2, 2, total)] and total > 4
    captured = bert("search", "ask", "index", "a disk")
    assert "lacks some vectors, and ranks by words alone" in captured.err
    assert "MOUNT" in captured.out
    assert main(["search", "ask", "index", "a disk", "--meaning"]) == 2
    monkeypatch.setattr(Model, "__call__", original)
    monkeypatch.setattr(make, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(make, "SAMPLE", 1)
    assert main(words[:4]) == 0  # the model of the index
    assert len(re.findall(r"search: \d+ of \d+ vectors", capsys.readouterr().out)) == total - 2
    stored = {row[4]: np.frombuffer(row[5], np.int16) / SCALE for row in content("index")}
    texts = [text for text in stored if "\n" not in text]
    Path("texts.txt").write_text("\n".join(texts) + "\n")
    rows = bert("predict", model, "--task", "embed", "--input", "texts.txt").rows
    for row in rows:
        np.testing.assert_allclose(stored[row["text"]], row["embedding"], atol=1e-3)
    question = "the music is fine"
    vector = bert("predict", model, question, "--task", "embed").last["embedding"]
    index = bert_cli.open_index("index")
    np.testing.assert_allclose(index.embed([question]).texts[0], vector, atol=1e-6)
    expected = sorted(stored, key=lambda text: stored[text] @ vector, reverse=True)
    hits = index.ask(question, half="meaning", top=3)
    assert [hit.text for hit in hits] == expected[:3]
    assert index.ask(question)[0].title == "The film was bad, and the music fine."


@pytest.mark.tensorflow
def test_a_log_has_a_line_of_the_progress_a_minute_where_the_machine_slows_down(
    manuals, model, monkeypatch
):
    seconds = [0.0]
    printed: list[tuple[float, str]] = []
    original = Model.__call__

    def slowly(self, texts, done, total):
        seconds[0] += len(texts) * (25.0 if done < 2 else 45.0)
        return original(self, texts, done, total)

    monkeypatch.setattr(Model, "__call__", slowly)
    monkeypatch.setattr(make, "SAMPLE", 1)
    monkeypatch.setattr(make, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(make, "print_line", lambda line: printed.append((seconds[0], line)))
    assert main(["search", "make", "index", "manuals", "--model", str(model)]) == 0
    assert seconds[0] > 180 and max(np.diff([at for at, _ in printed])) <= 60
    # The first took 25 s, which are not counted, the second 25 s, and each of the others 45 s.
    left = [line.partition("; ")[2] for _, line in printed if " of 5 vectors" in line]
    assert left == ["", "1 min 15 s left", "1 min 10 s left", "38.3 s left", "0 s left"]


@pytest.mark.tensorflow
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_numpy_computes_the_vectors_of_the_engine(model, tmp_path, pooling):
    folder = write_pooling(shutil.copytree(model, tmp_path / "model"), pooling, 32, 8)
    texts = ["the film", "who was the actor in a very good film, and where is it?", "?", "a", "b"]
    found = Model(str(folder))
    first, last = found(texts[:2]), found(texts[2:])
    many = found(texts, 0, FEW + 1)
    assert found._for_few.model.runtime == "NumPy" and not found._predictor.model.runtime
    np.testing.assert_allclose(np.concatenate([first.texts, last.texts]), many.texts, atol=1e-6)
    for tokens, expected in zip(first.tokens + last.tokens, many.tokens, strict=True):
        np.testing.assert_allclose(tokens, expected, atol=2e-6)


def test_a_model_is_known_by_all_files_of_weights_and_its_settings(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    shard = (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with safe_open(shard, "numpy") as tensors:
        names = dict.fromkeys(tensors.keys(), shard.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    identities = [Model(str(folder)).weights]
    assert Model(str(folder)).weights == identities[0]
    shard.write_bytes(shard.read_bytes()[:-4] + b"\1\1\1\1")
    identities.append(Model(str(folder)).weights)
    for pooling, length in (("cls", 24), ("mean", 8)):
        write_pooling(folder, pooling, 32, length)
        identities.append(Model(str(folder)).weights)
    assert len({*identities}) == 4


def test_another_model_makes_all_vectors_again(manuals, model, tmp_path, bert, capsys):
    folder = shutil.copytree(model, tmp_path / "model")
    assert main(["search", "make", "index", "manuals", "--model", "model"]) == 0
    shutil.rmtree(folder)
    assert main(["search", "ask", "index", "disk"]) == 4  # the model is gone
    assert main(["search", "ask", "index", "disk", "--words"]) == 0
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    write_model(folder, TINY.model_copy(update=sizes))
    capsys.readouterr()
    assert main(["search", "ask", "index", "disk"]) == 2
    assert "before it was changed; run `bert search make` again" in capsys.readouterr().err
    assert "computes 5 vectors" in bert("search", "make", "index", "manuals").out
    assert {len(row[5]) for row in content("index")} == {2 * 16}


def test_scores_are_those_of_scikit_learn(manuals, bert):
    write(manuals, {"tea.txt": "TEA\n\nTea is good. A folder of tea.\n"})
    write(manuals, {"more.txt": "A disk in a folder of files.\n"})
    # Of eleven documents the longest is in no ten answers.
    write(manuals, {f"ship{n}.txt": "A harbour." + n * " It is deep." + "\n" for n in range(11)})
    main(["search", "make", "index", "manuals"])
    questions = [("mount a disk", ["MOUNT"]), ("a folder of files", ["mount.txt", "tea.txt", "COPY"]),
                 ("coffee or film", ["notes.jsonl"]), ("zebra folder", ["notes.jsonl:1"]),
                 ("zebra", ["mount.txt"]), ("harbour", ["ship10.txt"]),
                 ("a harbour", [f"ship{n}.txt" for n in range(11)])]  # fmt: skip
    lines = [f"{question}\t{name}" for question, names in questions for name in names]
    Path("queries.tsv").write_text("question\tdocument\n" + "\n".join(lines) + "\n")
    index = open_index(Path("index"))
    relevant = score.read_queries(Path("queries.tsv"), index)
    assert [len(rows) for rows in relevant.values()] == [1, 3, 2, 1, 1, 1, 11]
    scores = score.question_scores(index, relevant)
    owner, documents = score.owners(index)
    for row, (question, right) in enumerate(relevant.items()):
        passages = index.lexical.scores(parse(question), owner >= 0)
        best = [max(passages[owner == number]) for number, _ in documents]
        labels = [[n in right for n in range(len(best))]]
        ndcg, recall, mrr = scores[row, 0]
        order = np.argsort(-np.array(best), kind="stable").tolist()
        if min(best) < max(best) and right <= set(np.flatnonzero(best)):
            strict = [[-order.index(n) for n in range(len(best))]]  # ties in the order of the text
            np.testing.assert_allclose(ndcg, ndcg_score(labels, strict, k=10))
        found = [n for n in right if best[n] > 0]
        assert recall == len({*found} & {*order[:10]}) / len(right)
        higher = sum(value > max(best[n] for n in right) for value in best)
        assert mrr == (1 / (1 + higher) if found else 0.0)
    out = bert("search", "score", "index", "--queries", "queries.tsv").out
    assert "7 questions about" in out and f"words    {scores[:, 0, 0].mean():.3f} [" in out


def test_half_of_the_documents_choose_a_weight_and_the_others_confirm_it(manuals):
    main(["search", "make", "index", "manuals"])
    index = open_index(Path("index"))
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 2)
    noise = random.uniform(0, 0.1, size=(80, 1))
    better = noise + np.array([[0.1 * min(n, 8) for n in range(11)]])  # 0.8 and more
    text = score.choose_weight(index, better, groups)
    assert index.weight == 0.8 and "the index now has weight 0.8" in text
    assert "0.0 0.0" in text
    assert "other questions, 0.8 was 0.200 [0.200, 0.200] better than 0.6" in text
    chance = np.random.default_rng(1).uniform(size=(80, 11))
    text = score.choose_weight(index, chance, groups)
    assert index.weight == 0.8 and "the weight stays 0.8" in text
    text = score.choose_weight(index, noise - abs(np.arange(11) - 8), groups)
    assert text.endswith("the best weight is 0.8; the index has it")
    text = score.choose_weight(index, noise - abs(np.arange(11) - 5), groups)
    assert index.weight == 0.5 and "the index now has weight 0.5" in text
    # The half that chooses likes 0.2, the others like 0.9, and more so.
    likes, strength = (np.where(chooses(groups), *each)[:, None] for each in ((2, 9), (1, 3)))
    text = score.choose_weight(index, -strength * abs(np.arange(11) - likes), groups)
    assert index.weight == 0.5
    assert "0.2 was not clearly better than 0.5 (-9.000 [" in text
    # Many questions about each document are no more proof than one.
    gains = np.zeros((1200, 11))
    gains[:, 7] = np.repeat(np.random.default_rng(2).normal(0.2, 1, 40), 30)
    text = score.choose_weight(index, gains, np.repeat(np.arange(40), 30))
    assert "0.7 was not clearly better than 0.5 (0." in text
    text = score.choose_weight(index, better[:20], groups[:20])
    assert "about at least 20 documents, 10 in each half; yours name 5 and 5" in text


def test_an_answer_of_a_pdf_names_its_page(manuals, monkeypatch, capsys):
    pages = [lines("Sails", "A sail needs wind."), lines("Masts", "A mast of spruce is light."), []]
    (manuals / "boats.pdf").write_bytes(made_pdf(pages))
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "find_spec", lambda name: None)
        assert main(["search", "make", "index", "manuals"]) == 0
    assert "needs the extra 'documents'; pip install" in capsys.readouterr().err
    assert main(["search", "make", "index", "manuals"]) == 0
    assert "boats.pdf, are missing on 1 of 3 pages; if" in capsys.readouterr().err
    for empty in ([], [[]]):  # the same lines on the next page
        (manuals / "boats.pdf").write_bytes(made_pdf([*empty, *pages]))
        assert main(["search", "make", "index", "manuals"]) == 0
        assert main(["search", "ask", "index", "mast of spruce", "--top", "1"]) == 0
        assert f"(manuals/boats.pdf, page {2 + len(empty)})" in capsys.readouterr().out
    assert main(["search", "ask", "index", "mount", "--top", "1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["page"] is None
    assert main(["search", "make", "index", "manuals", "--strict"]) == 0
    (manuals / "scan.pdf").write_bytes(made_pdf([[]]))
    assert main(["search", "make", "index", "manuals", "--strict"]) == 3
    assert "scan.pdf: is a PDF that has no text" in capsys.readouterr().err


def test_scores_and_export_read_the_index_at_one_time(manuals, monkeypatch):
    main(["search", "make", "index", "manuals"])
    Path("queries.tsv").write_text("question\tdocument\ndisk\tMOUNT\n")
    read = []

    def watched(of):
        return lambda index, *words: read.append(index.table.in_transaction) or of(index, *words)

    for home, name in ((Index, "count"), (score, "owners"), (Lexical, "scores")):
        monkeypatch.setattr(home, name, watched(getattr(home, name)))
    assert main(["search", "export", "index", "words.parquet"]) == 0
    assert main(["search", "score", "index", "--queries", "queries.tsv"]) == 0
    assert len(read) == 4 and all(read)


def test_unchanged_rows_keep_their_passages_where_others_come_and_go(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"The {animal} sleeps."}) for animal in ("zebra", "lion", "owl")]
    new = json.dumps({"text": "A giraffe eats leaves."})

    def places():
        Path("rows.jsonl").write_text("\n".join(rows))
        assert main(["search", "make", "index", "rows.jsonl"]) == 0
        index = open_index(Path("index"))
        query = "SELECT text, name || suffix, id FROM places ORDER BY number_of(suffix)"
        index.table.create_function("number_of", 1, lambda suffix: int(suffix[1:] or 1))
        return index.table.execute(query).fetchall()

    before = places()
    assert [row[1] for row in before] == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]
    rows[1:2] = [rows[0]]  # twice, and none of the lion
    rows.insert(0, new)
    after = places()
    assert [text.split()[1] for text, _, _ in after] == ["giraffe", "zebra", "zebra", "owl"]
    assert [name for _, name, _ in after] == [f"rows.jsonl:{n}" for n in (1, 2, 3, 4)]
    assert after[1][2] == before[0][2] and after[3][2] == before[2][2]
    assert len({number for _, _, number in (*before, *after)}) == 5
    rows[1:] = [rows[3].replace("sleeps", " sleeps")]  # blanks alone
    assert [text for text, _, _ in places()][1] == "The owl  sleeps."
    rows[1:] = []
    assert [name for _, name, _ in places()] == ["rows.jsonl"]
    assert [hit.text for hit in open_index(Path("index")).ask("giraffe zebra")] == [after[0][0]]


def test_an_index_warns_until_the_text_of_a_stopped_call_is_read(manuals, bert):
    shutil.copy(sys.executable, manuals / "z.dat")
    for index, code in (("new", 3), ("old", 0)):
        if index == "old":
            (manuals / "z.dat").rename("z.dat")
            main(["search", "make", index, "manuals"])
            Path("z.dat").rename(manuals / "z.dat")
        assert main(["search", "make", index, "manuals", "manuals/z.dat"]) == 3
        assert "`bert search make" in bert("search", "ask", index, "disk", code=code).err
    (manuals / "z.dat").unlink()
    for index in ("new", "old"):
        assert main(["search", "make", index, "manuals"]) == 0
        assert not bert("search", "ask", index, "disk").err


def test_the_exported_table_has_all_passages(manuals):
    from pyarrow import parquet

    main(["search", "make", "index", "manuals"])
    assert main(["search", "export", "index", "out/words.parquet"]) == 0
    rows = parquet.read_table("out/words.parquet").to_pylist()
    assert [*rows[0]] == ["id", "document", "title", "page", "start", "stop", "text"]
    assert sorted(row["document"] for row in rows) == [
        "mount.txt", "notes.jsonl:1", "notes.jsonl:2", "shell/copy.txt", "shell/copy.txt"
    ]  # fmt: skip
    vectors = np.eye(5, 8, dtype=np.float32)
    with write_index(Path("index")) as index, index.changing():
        index.add_vectors([row["id"] for row in rows], vectors_of(vectors))
    assert main(["search", "export", "index", "vectors.parquet", "--format", "parquet"]) == 0
    rows = parquet.read_table("vectors.parquet").to_pylist()
    assert [row["vector"] for row in rows] == vectors.tolist()


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_sqlite_of_tensorflow_searches_too(manuals):
    code = (
        "import tensorflow, sys\nfrom bert_cli.cli import main\n"
        "sys.exit(main(['search', 'make', 'index', 'manuals']))"
    )
    assert not subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode
    assert main(["search", "ask", "index", '"mounts a disk" -copies']) == 0


@pytest.mark.tensorflow
def test_an_open_index_says_that_its_model_has_changed(manuals, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    assert main(["search", "make", "index", "manuals", "--model", str(folder)]) == 0
    index = bert_cli.open_index("index")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\1\1\1")
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        index.ask("disk")


def test_a_forked_process_asks_while_a_thread_holds_the_index(manuals):
    main(["search", "make", "index", "manuals"])
    code = (
        "import os, bert_cli\n"
        "index = bert_cli.open_index('index')\n"
        "with index.snapshot():\n"
        "    if not (child := os.fork()):\n"
        "        import signal, threading\n"
        "        signal.alarm(20)\n"
        "        hits = []\n"
        "        asking = threading.Thread(target=lambda: hits.extend(index.ask('disk\\udc80')))\n"
        "        asking.start(), asking.join()\n"
        "        os._exit(len(hits) != 1)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "assert index.ask('disk')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
