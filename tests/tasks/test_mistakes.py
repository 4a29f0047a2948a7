"""Command lines whose mistake shows only when files are read, each with its exit code and a part of its message."""

import json
import os
import shlex
import shutil

import numpy as np
import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from safetensors.numpy import load_file, save_file
from support.hf_models import PIECES, Models, change_weights
from support.runs import lines_of
from support.tiny_models import OTHERS, SENTENCES, pretrain_words, write_model, write_records
from support.tiny_models import PIECES as TINY_PIECES

from bert_cli.cli import main
from bert_cli.config.tools import EXAMPLES
from bert_cli.data.tokens.tokenizer import Normalization, write_vocabulary

FILES = {
    "masks.txt": "a [MASK]\na dog\n",
    "bad.jsonl": '{"text": "a"}\n{"text": \n',
    "pair.jsonl": '{"text": "a", "second": "b"}\n',
    "half.jsonl": '{"text": "\\ud83d"}\n',
    "half_id.jsonl": '{"text": "a", "id": "\\ud800"}\n',
    "tab.jsonl": '{"text": "a"}\n{"text": "a", "id": "b\\tc"}\n',
    "folder.csv/mine": "text",
    "half_pair.jsonl": '{"anchor": "\\ud800", "positive": "a"}\n',
    "reviews.csv": "text,label\n"
    + "".join(f"good film {n},positive\nbad plot {n},negative\n" for n in range(8)),
    "no_rows.csv": "text\n",
    "words.conll": "Ann B-PER\nsat O\n\nHere O\n",
    "bad.conll": "Ann B-PER\nsat\n",
    "gluey/SST-2/train.tsv": "sentence\tlabel\ngood\t1\nbad\t0\n",
    "other.csv": "a,b\n1,2\n",
    "gap.csv": "anchor,positive\ngood,\n",
    "sheet.xlsx": "PK",
    "lines.txt": '{"text": "a"}\n',
    "two.csv": "anchor,positive\na,b\nc,d\n",
    "three.csv": "anchor,positive\na,b\nc,d\ne,f\n",
    "texts.txt": "a\nb\n",
    "much.csv": "sentence1,sentence2,score\na,b,much\n",
    "same.csv": "sentence1,sentence2,score\na,b,1\nb,c,1\n",
    "queries.jsonl": '{"_id": "1", "text": "a"}\n',
    "corpus.jsonl": '{"_id": "1", "text": "a"}\n',
    "qrels/wrong.tsv": "query-id\tcorpus-id\tscore\n1\t2\t1\n",
    "one.txt": "A single short document.\n",
    "few.txt": "A single short document.\n\n" + "Another document. " * 500,
    "empty.txt": "",
    "rows.jsonl": "".join(json.dumps({"body": " ".join(SENTENCES[:12])}) + "\n" for _ in range(30)),
    "used/mine": "text",
    "gpt/config.json": '{"model_type": "gpt2"}',
    "only_corpus/corpus.json": "",
    "begun/metrics.jsonl": "",
    "runs/mine/step_00000001/state.json": "{}",
    "cut/model.safetensors": "cut",
    "several.jsonl": "".join(
        json.dumps({"text": f"a {n}", "label": ["b", "c"][: n % 3]}) + "\n" for n in range(9)
    ),
    "other_label.csv": "text,label\ngood,positve\n",
    "twice/queries.jsonl": '{"_id": "1", "text": "a"}\n',
    "twice/corpus.jsonl": '{"_id": "1", "text": "a"}\n{"_id": "2", "text": "a"}\n{"_id": "1", "text": "b"}\n',
    "twice/qrels/all.tsv": "query-id\tcorpus-id\tscore\n1\t1\t1\n",
    "pair/a/metrics.jsonl": "",
    "pair/b/metrics.jsonl": "",
    "strange/a.tfrecord": "text",
}


def describe(folder, **changes):
    """Change entries of a model's config.json."""
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | changes))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Models, records, a run of two steps, and files with and without mistakes."""
    home = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (home / "utf16.csv").write_bytes("\ufeffanchor,positive".encode("utf-16"))
    model = write_model(home / "model")
    shutil.copy(model / "config.json", home / "cut")
    swapped = [*TINY_PIECES[:5], *TINY_PIECES[6:4:-1], *TINY_PIECES[7:], "unheard"]
    for name, pieces in (("records", TINY_PIECES), ("other", swapped)):
        (home / f"{name}_vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
        write_records(home / name, SENTENCES[:8], home / f"{name}_vocab.txt")
    write_records(home / "static", SENTENCES[:8], model, masking="static")
    assert main(pretrain_words(home)) == 0
    assert main(["search", "make", str(home / "one.index"), str(home / "one.txt")]) == 0
    tensors = load_file(model / "model.safetensors")
    heads = {"classifier.weight": np.ones((2, 32), np.float32), "classifier.bias": np.zeros(2, np.float32)}  # fmt: skip
    for name in ("classifier", "foreign"):
        shutil.copytree(model, home / name)
        save_file(tensors | heads, home / name / "model.safetensors", metadata={"format": "pt"})
        labels = {"0": "negative", "1": "positive"}
        describe(home / name, architectures=["BertForSequenceClassification"], id2label=labels)
    pieces = [piece.replace(OTHERS[0], "another") for piece in TINY_PIECES]
    data = "".join(f"{piece}\n" for piece in pieces).encode()
    write_vocabulary(home / "foreign", data, Normalization())
    for name in ("do_lower_case", "tokenize_chinese_chars"):
        shutil.copytree(model, home / name)
        entries = json.dumps({"do_lower_case": True} | {name: False})
        (home / name / "tokenizer_config.json").write_text(entries)
    models = Models(home / "theirs")
    for name in ("masked", "text", "question", "bare", "plain_token", "modern"):
        os.symlink(models[name], home / name)
    first = {f"classifier.{leaf}": lambda value: value[:1] for leaf in ("weight", "bias")}
    describe(change_weights(home / "plain_token", home / "one_label", first), id2label={"0": "PER"})
    nothing = dict.fromkeys(("classifier.weight", "classifier.bias"))
    change_weights(home / "text", home / "headless", nothing)
    huge = {"classifier.weight": lambda values: values * 0 + 3e38}
    change_weights(home / "text", home / "huge", huge)
    large = shutil.copytree(home / "text", home / "large_vocab")
    (large / "vocab.txt").write_text("\n".join([*PIECES, *(f"word{n}" for n in range(9))]))
    describe(shutil.copytree(home / "bare", home / "unknown"), architectures=["BertFor"])
    return home


EMBED = "embed --save-ckpt-path new --cache-dir null --max-seq-length 32 --pretrained-ckpt-path model --train-file"
CLASSIFY = (
    "classify --save-ckpt-path new --cache-dir null --max-seq-length 32 --train-file reviews.csv"
)
TASK = "--save-ckpt-path new --cache-dir null --max-seq-length 32"
NER = f"ner {TASK} --train-file"
GLUE = f"glue {TASK} --glue-task sst2 --dataset-dir"
SQUAD = f"squad {TASK} --doc-stride 8 --max-query-length 8"
STUDENT = f"{CLASSIFY} --pretrained-ckpt-path model --distillation.teacher"
PRETRAIN = (
    "pretrain --save-ckpt-path new --max-seq-length 32 --max-predictions-per-seq 5 --total-num-train-samples 8 "
    "--global-batch.micro-batch-size 4 --optimizer-opts.name AdamW "
    "--optimizer-opts.learning-rate.max-learning-rate 0.003 --dataset-dir"
)
FROM = "--pretrained-ckpt-path model"
MISTAKES = [
    # --- the text, the model and the settings of a prediction
    ("predict masked 'the cat'", 3, "TEXT: has no [MASK]"),
    ("predict masked 'a [MASK]' --task text-classification", 2, "BertForMaskedLM"),
    ("predict masked --input masks.txt", 3, "masks.txt (line 2): has no [MASK]"),
    ("predict question 'the cat'", 2, "text: has no"),
    ("predict bare --input pair.jsonl", 3, "pair.jsonl (line 1): 'second'"),
    ("predict text 'the cat' --no-normalize=1", 2, "--no-normalize: ignored explicit argument '1'"),
    ("predict text 'the cat' --top 3", 2, "top: has no effect"),
    ("predict text 'the cat' --max-seq-length 41", 2, "40 positions"),
    ("predict text '  '", 3, "TEXT: is empty"),
    ("predict text --input bad.jsonl", 3, "bad.jsonl (line 2): is not JSON"),
    ("predict text --input empty.txt", 3, "empty.txt: is empty; write examples, such as one on each line"),
    ("predict text --input half.jsonl", 3, "line 1): has an unpaired surrogate"),
    ("predict bare --task similarity --input texts.txt", 2, "pass a TEXT"),
    ("predict text --input other.csv", 3, "or pass one by --text-column"),
    ("predict text --input pair.jsonl --text-column reply", 3, "has no column 'reply', only 'text', 'second'"),
    ("predict text --input other.csv --text-column a,b,x", 2, "names 3 columns for task text-class"),
    ("predict text --input texts.txt --text-column a", 2, "no effect on the lines of"),
    ("predict text --input texts.txt --output x.xlsx", 2, "x.xlsx is of an unknown kind; name it .csv"),
    ("predict text --input other.csv --output other.csv", 2, "is the input; choose another file"),
    ("predict text --input other.csv --output used/../other.csv", 2, "is the input; choose another file"),
    ("predict huge --input half_id.jsonl --output new.csv", 3, "half_id.jsonl (line 1): has an unpaired surrogate"),
    ("predict huge --input tab.jsonl --output new.tsv", 3, "tab.jsonl (line 2): a .tsv holds no tab and no line"),
    ("predict huge --input texts.txt --output folder.csv", 3, "(folder.csv): cannot be written (it is a folder)"),
    ("predict text --input pair.jsonl --text-field reply", 2, "--text-column names a column or a field"),
    ("predict text --input sheet.xlsx", 3, "is a spreadsheet, not text; save it as CSV"),
    ("predict text --input lines.txt", 3, "is a JSON object, not a text; pass a file with the suffix .jsonl"),
    ("predict bare a --task embed --dimensions 999", 2, "(999): is more than the 32 values of the model's vectors"),
    ("predict huge 'the cat'", 5, "TEXT: the model's outputs"),
    ("predict headless 'the cat'", 2, "has no glue_head"),
    ("predict large_vocab 'the cat'", 2, "is too large for the model"),
    ("predict one_label 'the cat'", 2, "(id2label {'0': 'PER'}): names one label"),
    ("predict 'The capital of France is [MASK].' a", 4, "write the model first"),
    ("predict runs/min a", 4, "did you mean 'runs/mine'?"),
    ("predict runs/other a", 4, "MODEL (runs/other): "),
    ("predict runs a", 4, "runs/mine"),
    ("predict begun a", 4, "the run has saved no checkpoint yet; wait, or see bert runs begun"),
    # --- exports, averages, scores, smaller models
    ("export nowhere new --format saved-model", 4, "MODEL"),
    ("export unknown new --format saved-model", 2, "BertFor"),
    ("export bare used --format saved-model", 2, "out (used): exists and is not an empty folder"),
    ("export bare used/mine --format saved-model", 2, "is not an empty folder"),
    ("export bare new --format onnx --dimensions 8", 2, "has no effect"),
    ("export bare new --format onnx --compare-on x", 2, "has no effect with an exact export"),
    ("average run new --last 7", 4, "run (run): has 2 complete checkpoints, fewer than --last 7; train with a"),
    ("average run new --last 7", 4, " --keep-checkpoints or --keep-every-steps, or pass --last 2 "),
    ("average runs/mine new --last 2", 4, "has 1 complete checkpoint, fewer than --last 2; train with a"),
    ("average runs/mine new --last 2", 4, " or --keep-every-steps "),  # a mean needs two: no --last 1
    ("average absent new --last 3", 4, "has 0 complete checkpoints, fewer than --last 3; use a run's folder"),
    ("average run new --last 1", 2, "--last"),
    ("average run used --last 2", 2, "out (used): exists and is not an empty"),
    ("average run new --last 2 --validation-dir absent", 3, "validation_dir (absent)"),
    ("evaluate model", 2, "is not a run of pretrain; use a run of `bert pretrain`"),
    ("evaluate used", 4, "has neither a checkpoint nor a model"),
    ("evaluate run --dataset-dir absent", 3, "dataset_dir (absent): no such folder"),
    ("shrink bare new --layers 0,2", 2, "layers (2): is not among the layers 0 to 1"),
    ("shrink bare new --layers 1,0", 2, "layers (--layers): are not in ascending order"),
    ("shrink bare new --layers 0,0", 2, "layers (--layers): are not in ascending order"),
    ("shrink modern new --layers 0", 2, "different windows of attention"),
    # --- texts, labels and teachers of fine-tuning
    (f"{CLASSIFY} {FROM} --label-column lable", 3, "did you mean 'label'?"),
    (f"{CLASSIFY} {FROM} --output-dir out", 2, "--output-dir: is the old name of --save-ckpt-path, which is also"),
    (f"{CLASSIFY} {FROM} --save-ckpt-path /dev/null/out", 3, "save_ckpt_path (/dev/null/out): cannot be written"),
    (f"{CLASSIFY} {FROM} --cache-dir /dev/null/out", 3, "cache_dir (/dev/null/out): cannot be written"),
    (CLASSIFY, 2, "pass --pretrained-ckpt-path MODEL, or for new weights"),
    (f"{CLASSIFY} --tokenizer-path nowhere", 4, "nowhere"),
    (f"{CLASSIFY} --tokenizer-path model --bert-config.vocab-size 10", 2, "pieces): is too large for the model"),
    (f"{CLASSIFY} {FROM} --no-do-training --validation-file reviews.csv", 2, "(BertForPreTraining): was not trained"),
    (f"{STUDENT} model", 2, "not a model for text-classification"),
    (f"{STUDENT} foreign", 2, "has another vocabulary than the model"),
    (f"{STUDENT} classifier --no-do-training", 2, "has no effect"),
    (f"{STUDENT} classifier --distillation.unlabelled-file none.csv", 3, "none.csv: no such file"),
    (f"{STUDENT} classifier --distillation.unlabelled-file no_rows.csv", 3, "no_rows.csv: contains no rows"),
    (f"{CLASSIFY} {FROM} --few --train-file several.jsonl", 2, "few: learns one label of a text, not several"),
    (f"{CLASSIFY} --pretrained-ckpt-path classifier --no-do-training", 2, "has no rows that no fold trained on"),
    (f"{CLASSIFY} {FROM} --validation-file other_label.csv", 3, "the labels are 'negative', 'positive'; did you mean"),
    (f"{CLASSIFY} {FROM} --distillation.logits 0.5", 2, "has no effect without teacher"),
    (f"{CLASSIFY} {FROM} --distillation.unlabelled-file reviews.csv", 2, "has no effect without teacher"),
    (f"{NER} words.conll --validation-file words.conll --pretrained-ckpt-path ./none", 4, "no such folder"),
    (f"{NER} words.conll --validation-file none.conll {FROM}", 3, "none.conll: no such file"),
    (f"{NER} words.conll --validation-file bad.conll {FROM}", 3, "bad.conll (line 2): "),
    (f"{NER} words.conll {FROM}", 2, "validation_file: is missing; pass --validation-file"),
    (f"{GLUE} none {FROM}", 3, "none/train.tsv: no such file; use the folder that contains SST-2"),
    (f"{GLUE} gluey {FROM}", 3, "SST-2/dev.tsv"),
    (f"{SQUAD} {FROM}", 2, "train_file: is missing; pass --train-file, or --dataset-dir with both files"),
    (f"{SQUAD} {FROM} --train-file reviews.csv --validation-file reviews.csv", 3, "reviews.csv"),
    (f"{SQUAD} --train-file texts.txt --validation-file texts.txt", 2, "pass --pretrained-ckpt-path MODEL, or"),
    ("ner --generated-dataset --no-do-training --save-ckpt-path new", 2, "do_training (--"),
    ("ner --generated-dataset --evaluate-every-steps 5 --save-ckpt-path new", 2, "has no effect with generated_data"),
    # --- pairs and texts of vectors
    (f"{EMBED} other.csv", 3, "has no column 'anchor'"),
    (f"{EMBED} gap.csv", 3, "has an empty text"),
    (f"{EMBED} two.csv --retrieval-file qrels/wrong.tsv", 3, "is not in"),
    (f"{EMBED} two.csv --retrieval-file twice/qrels/all.tsv", 3, "corpus.jsonl (line 3): has the _id '1' of line 1"),
    (f"{EMBED} texts.txt", 3, "texts.txt: has a text on each line, not the columns 'anchor', 'positive'; use a table"),
    (f"{EMBED} two.csv --validation-file much.csv", 3, "is not a number"),
    (f"{EMBED} two.csv --validation-file same.csv", 3, "all scores are equal; use different scores"),
    (f"{EMBED} two.csv --global-batch.micro-batch-size 1", 2, "has one pair per step"),
    (f"{EMBED} texts.txt --objective simcse", 2, "has nothing to score on"),
    (f"{EMBED} two.csv --text-column anchor,anchor", 2, "text_column (--text-column): names anchor twice"),
    (f"{EMBED} two.csv --matryoshka ''", 2, "matryoshka.0 (--matryoshka): got ''"),
    (f"{EMBED} two.csv --matryoshka 999", 2, "(999): is more than the 32 values of the model's vectors"),
    (f"{EMBED} three.csv --num-epochs 1e308", 2, "num_epochs (1e+308): makes a run without end"),
    (f"{EMBED} utf16.csv", 3, "utf16.csv: is UTF-16, not UTF-8"),
    (f"{EMBED} half_pair.jsonl", 3, "half_pair.jsonl (line 1): has an unpaired surrogate"),
    (f"{EMBED} two.csv --text-column text", 2, "names 1 column for"),
    (f"{EMBED} texts.txt --distillation.teacher bare --objective simcse", 2, "has no effect with distillation"),
    (f"{EMBED} texts.txt --distillation.teacher bare --matryoshka 8", 2, "has no effect with distillation"),
    (f"{EMBED} texts.txt --distillation.teacher bare --no-do-training", 2, "has no effect without do_training"),
    (f"{EMBED} texts.txt --distillation.teacher ./none --no-do-validation", 4, "no such folder"),
    (f"{EMBED} texts.txt --distillation.teacher bare", 2, "has nothing to score on without pairs"),
    # --- records, models and runs of pre-training
    (f"{PRETRAIN} other {FROM}", 2, "was made with another vocabulary than "),
    (f"{PRETRAIN} other {FROM}", 2, "`bert vocab --extend`"),
    ("vocab records_text new --extend model --size +5 --cased", 2, "leave out --cased"),
    (f"{PRETRAIN} other {FROM} --save-ckpt-path run", 2, "save_ckpt_path (run): holds a run "),
    (f"{PRETRAIN} records {FROM} --validation-dir other", 2, "validation_dir (other)"),
    (f"{PRETRAIN} absent {FROM}", 3, "dataset_dir (absent): no such folder"),
    (f"{PRETRAIN} static {FROM} --masking.unit word", 2, "masking: has no effect on"),
    (f"{PRETRAIN} records --pretrained-ckpt-path do_lower_case", 2, "with --vocab do_lower_case --cased"),
    (f"{PRETRAIN} records --pretrained-ckpt-path tokenize_chinese_chars", 2, '"split_chinese": false'),
    (f"{PRETRAIN} records --pretrained-ckpt-path ./none", 4, "no such folder"),
    (f"{PRETRAIN} records --pretrained-ckpt-path cut", 4, "copy the model again"),
    (f"{PRETRAIN} records --bert-config.architecture modernbert", 2, "this model has no segments; make it with"),
    # --- the text of a recipe, and runs side by side
    ("init rows.jsonl used --text-field body", 2, "out (used): exists and is not an empty folder"),
    ("init one.txt new", 3, "has 1 document of 4 words"),
    ("init few.txt new", 3, "has 2 documents of 1,004 words; use at least 1,000 words in 4 documents"),
    ("init empty.txt new", 3, "empty"),
    ("init only_corpus new", 3, "holds records, not text"),
    ("init rows.jsonl new --text-field body --from ./absent", 4, "no such folder"),
    ("init rows.jsonl new --text-field body --from gpt", 4, "gpt/config.json (model_type gpt2): is not a supported"),
    ("init rows.jsonl new --text-field body --hours 0", 2, "hours"),
    ("compare run absent", 3, "second (absent): no such folder"),
    ("compare run used", 3, "second (used): contains no run with metrics.jsonl"),
    ("compare run run", 3, "is the same run as the first"),
    ("runs absent", 3, "no such folder"),
    ("compare pair run", 3, "first (pair): contains 2 runs; name one of them, such as pair/a"),
    # --- records and indexes
    ("index strange", 3, "another tool made its records; pass their vocabulary: --vocab vocab.txt"),
    ("search export one.index two.csv", 3, "out (two.csv): exists; choose a new file"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("line", "code", "message"), MISTAKES)
def test_a_mistake_has_its_exit_code_and_a_message_and_leaves_nothing(
    home, line, code, message, monkeypatch, bert
):
    monkeypatch.chdir(home)
    shutil.rmtree(home / "new", ignore_errors=True)
    steps = sorted((home / "run").iterdir())
    printed = bert(*shlex.split(line), code=code)
    assert message in printed.err.replace("\n", " "), printed.err
    assert not any(text.startswith("{") for text in printed.out.splitlines()), "a result"
    assert not list(home.glob("new/[!l]*")) and sorted((home / "run").iterdir()) == steps
    if line.split()[0] in EXAMPLES:
        # `bert doctor` takes the steps of the run, and finds what it would end with.
        shutil.rmtree(home / "new", ignore_errors=True)
        examined = bert("doctor", *shlex.split(line), code=code)
        assert message in (examined.out + examined.err).replace("\n", " ")
        assert not (home / "new").exists()
    assert lines_of(home / "run/metrics.jsonl")[-1]["step"] == 2
