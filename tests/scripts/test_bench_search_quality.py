"""What `scripts/bench_search_quality.py` reads."""

import json
from argparse import Namespace

import numpy as np
from support.command_lines import script

from bert_cli.cli import main
from bert_cli.data.search.index import open_index
from bert_cli.tasks.search import score

quality = script("bench_search_quality.py")
PARAGRAPHS = [
    ("Coffee", "Coffee is roasted in Vienna.", ["Where is coffee roasted?"]),
    ("Rivers", "The river carries ice to the sea.", ["What carries ice?", "Where does ice go?"]),
    ("Rivers", "The mountain is high.", []),
    ("Nothing", " ", ["What is nothing?"]),
]


def test_a_folder_in_the_form_of_beir_has_the_documents_and_questions_of_squad(tmp_path):
    """A question may have several right documents; one that is judged 0 is none."""
    article = [
        {"title": title, "paragraphs": [{"context": text, "qas": [{"question": q} for q in asked]}]}
        for title, text, asked in PARAGRAPHS[:3]
    ]
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps({"data": article}))
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    rows = [{"_id": f"d{n}", "title": t, "text": text} for n, (t, text, _) in enumerate(PARAGRAPHS)]
    queries = [(n, question) for n, (*_, asked) in enumerate(PARAGRAPHS) for question in asked]
    asked = [{"_id": f"q{n}", "text": question} for n, (_, question) in enumerate(queries)]
    for name, lines in (("corpus", rows), ("queries", asked)):
        (beir / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    judged = [f"q{n}\td{document}\t1\n" for n, (document, _) in enumerate(queries)]
    header = "query-id\tcorpus-id\tscore\n"
    (beir / "qrels" / "test.tsv").write_text("".join([header, *judged, "q0\td2\t0\n"]))

    def relevant(path, questions=10):
        folder = tmp_path / f"{path.name}-{questions}"
        folder.mkdir()
        options = Namespace(questions=questions, titles=True)
        text = quality.write("text", path, folder, options)
        assert main(["search", "make", str(folder / "index"), str(text)]) == 0
        index = open_index(folder / "index")
        read = score.read_queries(folder / "questions.jsonl", index)
        assert np.mean(score.question_scores(index, read)) == 1.0
        return read

    expected = {question: {n} for n, question in queries if n < 3}
    assert relevant(beir) == relevant(squad) == expected
    assert len(relevant(beir, 2)) <= 2
