"""Files that the data code refuses: what reads them, their name and content, and the words of the error.

The error names the file. Where it names another path, the row has both: `("other.txt", "")` for the folder.
"""

import bz2
import contextlib
import gzip
import json
import re
import sqlite3
import tarfile
from functools import partial

import pyarrow
import pytest
from pyarrow import parquet
from support import made_documents as made
from support.contents import put

from bert_cli.data.finetune import conll, embeddings, glue, labels, squad, tables
from bert_cli.data.io import files
from bert_cli.data.io.documents import marked_lines
from bert_cli.data.text import templates
from bert_cli.data.text.wikipedia import Dump
from bert_cli.data.tokens.tokenizer import read_tokenizer, read_vocabulary
from bert_cli.errors import CheckpointError, ConfigError, DataError


def table(path, labels=("label",), separator=None):
    columns = {"text_columns": ("text",), "label_columns": list(labels)}
    tables.read_table(path, **columns, label_names=None, label_separator=separator)


def recognised(path):
    """Only recognise a file: a step refuses it before it writes."""
    files.recognise(path, files.Reading())


def text(path, **reading):
    reading = files.Reading(**reading)
    list(marked_lines(files.recognise(path, reading), reading))


def split_of(task):
    return lambda path: glue.read_split(path.parent, task, "validation")


NAMES = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
entities = partial(conll.read_conll, label_names=NAMES)
untitled = partial(table, labels=())
body = partial(text, text_field="body")
answers = partial(squad.read_squad, version_2=True, training=True)
of_folder = lambda read: lambda path: read(path.parent)  # noqa: E731
tokenizer = of_folder(read_tokenizer)


def parquet_of(**columns):
    stream = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), stream, row_group_size=2)
    return stream.getvalue().to_pybytes()


# --- texts with labels

GOOD = '{"text": "a", "label": 0}'
HALVES = ({"text": "\ud800", "label": "b"}, {"text": "b", "label": "x\udfff"})
SPELLINGS = {"1": "1.0", "pos": "Pos", "a b": "ab", "07": "7", "1e1": "10", "STRASSE": "straße"}
TABLES = [
    (untitled, "a.txt", "\ufeff\n", "is empty"),
    (untitled, "a.txt", b"one\ntwo\nna\xefve\n", r"\(line 3\): byte 0xEF is not UTF-8"),
    (text, "a.txt", b"one\n" * 300_000 + b"na\xefve\n", r"\(line 300001\): byte 0xEF is not UTF-8"),
    (table, "a.txt", "one\n", "has a text on each line, not the columns 'text', 'label'"),
    (untitled, "a.txt.gz", gzip.compress(b"a\nb\n" * 1000)[:-20], "the gzip data are damaged or cut off"),
    (untitled, "a.txt.gz", b"not gzip", r"\(line 1\): has a name for gzip, but"),
    (table, "a.log", "PK", r"is of an unknown kind; name it \.csv, \.tsv"),
    *((table, f"a.{name}", "PK", "is a spreadsheet, not text; save it as CSV") for name in ("xlsx", "XLS", "ods")),
    (table, "a.csv", "Text,label\na,1\n",
     r"\(line 1\): has no column 'text', only 'Text', 'label'; did you mean 'Text'"),
    (table, "a.csv", "Text;label\na;1\n", "no column 'text', only 'Text', 'label'; did you mean"),
    (table, "a.csv", "text;label\na;b;1\n", r"\(line 2\): has 3 cells for 2 columns"),
    (table, "a.csv", "text,label,text\na,1,b\n", r"\(line 1\): has two columns 'text'"),
    (table, "a.csv", 'text,label\n"a\nb",1\nc,d,e\n', r"\(line 4, row 3\): has 3 cells for 2 columns"),
    (table, "a.csv", 'text,label\na,1\n"b\nc,1\nd,0\n', r"\(line 3\): is not CSV"),
    (table, "a.csv", "text,label\n", "contains no rows"),
    (table, "a.csv", "text,label\na,1\ntext,label\nb,0\n", r"\(line 3\): repeats the names of the columns"),
    (table, "a.pdf", "%PDF-1.4", "is a document, not text; save it as CSV"),
    (table, "a.csv", "text,label\na,1\nb,1\n", r"\(label\): has one label, '1'"),
    *((table, "a.csv", f"text,label\na,1\nb,{word}\nc,2\n", r"\(line 3\): 'label' is empty or not a label")
      for word in ("nan", "NaN", "", "  ", "<NA>", "#N/A")),
    *((table, "a.csv", f"text,label\na,{word}\nb,x\nc,{same}\n",
       rf"\(line 4\): label '{same}' is spelled '{word}' in .*\(line 2\)") for word, same in SPELLINGS.items()),
    *((partial(table, labels=("x", "y")), "a.csv", f"text,x,y\na,1,0\nb,{cell},0\n", rf"\(line 3\): 'x' is {words}")
      for cell, words in (("2", "'2', not 0 or 1; write 1"), ("", "empty"))),
    (partial(table, separator=";"), "a.csv", "text,label\na,x|y\nb,y\n",
     r"label_separator \(';'\): does not separate labels: no text has two"),
    (table, "a.jsonl", f'{GOOD}\n{{"text": "b"}}', r"\(line 2\): has no column 'label'"),
    (table, "a.jsonl", f'{GOOD}\n{{"text": "b", "label": NaN}}',
     r"\(line 2\): 'label' is empty or not a label \(nan\)"),
    (table, "a.jsonl", f'{GOOD}\n{{"text": "b", "label": []}}', r"\(line 2\): differs from the first row: only one"),
    (table, "a.jsonl", f'{GOOD}\n{{"text": 3, "label": 1}}', r"\(line 2\): 'text' is not a string"),
    (table, "a.jsonl", f"{GOOD}\n\n7", r"\(line 3\): is not a JSON object"),
    (table, "a.jsonl", f"{GOOD}\n[1]\n{GOOD}", r"\(line 2\): is not a JSON object"),
    (table, "a.json", f"[{GOOD}, 7]", r"\(item 2\): is not a JSON object"),
    (table, "a.json", f"[{GOOD}", "is not JSON"),
    *((table, "a.jsonl", f"{GOOD}\n{json.dumps(row)}", r"\(line 2\): has an unpaired surrogate") for row in HALVES),
    *((table, "a.json", f"[{GOOD},{json.dumps(row)}]", r"\(item 2\): has an unpaired surrogate") for row in HALVES),
    (table, "a.jsonl", '{"text": "a", "label": ["x", null]}', r"\(line 1\): 'label' is empty"),
    (table, "a.jsonl", '{"text": "a", "label": []}\n{"text": "b", "label": "x"}',
     r"\(line 2\): differs from the first"),
    (table, "a.jsonl", '{"text": "a", "label": []}', r"\(label\): has no label in any row"),
    (table, "a.jsonl", '{"text": "a", "label": ["x", "X"]}', r"\(line 1\): label 'X' is spelled 'x'"),
    (table, "a.csv", "text,label\na,['x' 'y']\nb,['x']\n", r"\(line 2\): 'label' looks like a list, but cannot be "
     r"read as one \(\['x' 'y'\]\); write it as \[\"a\", \"b\"\]"),
    *((table, "a.csv", f'text,label\na,"{cell}"\nb,y\n', r"\(line 2\): 'label' looks like a list")
      for cell in ("[x]", "{x,y}", "array([x y])")),
    (table, "a.csv", "text,label\na,{'x': 1}\nb,y\n", r"\(line 2\): 'label' is empty or not a label"),
    (table, "a.parquet", parquet_of(text=["a", "b"], Label=[1, 2]), "has no column 'label', only 'text', 'Label'"),
    (table, "a.parquet", parquet_of(text=[3], label=[1]), r"\(row 1\): 'text' is not a string"),
    (table, "a.parquet", parquet_of(text=["a", "b"], label=[1, None]),
     r"\(row 2\): 'label' is empty or not a label"),
]  # fmt: skip

RTE = "index\tsentence1\tsentence2\tlabel\n"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
WSC = {"target": {"span2_index": 15, "span1_index": 5, "span1_text": "床", "span2_text": "它"},
       "idx": 261, "label": "false", "text": "这时候放在床上的手机响了,现在它突然响了。"}  # fmt: skip
AFQMC = {"sentence1": "a", "sentence2": "b", "label": "0"}


def second_of(good, row):
    texts = (json.dumps(good), row if isinstance(row, str) else json.dumps(row), json.dumps(good))
    return "\n".join(texts)


def changed(target):
    return second_of(WSC, WSC | {"target": WSC["target"] | target})


TASKS = [
    (split_of("rte"), "dev.tsv", f"{RTE}0\ta\tb\tentailment\n1\tOne.\tTwo.\n", r"\(line 3\): has 3 of 4 columns"),
    (split_of("rte"), "dev.tsv", f"{RTE}1\ta\tb\tnot_entailement\n", r"\(line 2\): label .* mean 'not_entailment'\?"),
    (split_of("rte"), "dev.tsv", RTE.replace("sentence1", "sentence 1"),
     r"\(line 1\): has no column 'sentence1'.*'sentence 1'\?"),
    (split_of("rte"), "dev.tsv", RTE, "contains no labelled rows"),
    *((split_of("stsb"), "dev.tsv", f"{STSB}0\t1\t2\t3\t4\t5\t6\tOne.\tTwo.\t{score}\n", rf"\(line 2\): {words}")
      for score, words in (("5.2", "score '5.2' is not"), ("nan", "'score' is empty or not a label"),
                           ("much", "score 'much' is not"), ("+nan", r"score '\+nan' is not"))),
    (split_of("wsc"), "dev.json", changed({"span1_index": 6}), r"\(line 2\): .*span1 '床' is not at character 6"),
    (split_of("wsc"), "dev.json", changed({"span2_text": ""}), r"\(line 2\): .*span2 '' is not at"),
    (split_of("afqmc"), "dev.json", second_of(AFQMC, '{"sentence1": "a"'), r"\(line 2\): .*is not JSON"),
    (split_of("afqmc"), "dev.json", second_of(AFQMC, AFQMC | {"sentence1": 3}),
     r"\(line 2\): .*'sentence1' is not a string"),
    (split_of("afqmc"), "dev.json", second_of(AFQMC, AFQMC | {"label": "2"}), r"\(line 2\): .*label '2' is unknown"),
    (split_of("afqmc"), "dev.json", json.dumps(AFQMC | {"label": "-"}), r"\(line 1\): label '-' is unknown"),
    (entities, "dev.txt", "a O\nb\n", r"\(line 2\): 'b' is not a line of 2 columns"),
    (entities, "dev.txt", "a O\n\nNew York O\n", r"\(line 3\): 'New York O' is not"),
    (entities, "dev.txt", "a\tO\n\tO\n", r"\(line 2\): ' O' is not"),
    (entities, "dev.txt", "a O\nb S-PER\n", r"\(line 2\): 'b S-PER' is not .* to BIO"),
    (entities, "dev.txt", "a O\nb B-\n", r"\(line 2\): 'b B-' is not"),
    (entities, "dev.txt", "a O\n\nb B-PERS\n",
     r"\(line 3\): label 'B-PERS' is unknown; .*; did you mean 'B-PER'\?"),
    (entities, "dev.txt", "-DOCSTART- -X- O O\n", "contains no sentences"),
    (entities, "dev.txt", '{"tokens": ["a"], "ner_tags": ["O"]}\n', "is JSON, but sentences are .*; write each word"),
    (entities, "dev.txt", '[{"tokens": ["a"], "ner_tags": ["O"]}]\n', "is JSON"),
    *((entities, "dev.txt", words, rf"\(line {line}\): column 1 counts the words") for words, line in (
        ("1 a B-LOC\n2 b O\n\n1 a O\n3 b O\n\n1 a O\n2 b O\n", 4), ("1 O\n2 B-LOC\n", 1),
        ("1\ta\tB-LOC\n2\t\tO\n", 2))),
    *((conll.read_conll, "dev.txt", words, "has no entity: the label in the last column")
      for words in ("1\tThe\tO\tO\n2\tParis\tB-LOC\tO\n", "a O\n")),
    (conll.read_conll, "dev.txt", "a B-LOC\nb B-Loc\n", r"\(line 2\): label 'Loc' is spelled 'LOC' in .*\(line 1\)"),
    (of_folder(labels.read_decision), "decision.json", '{"thresholds": [1]}', r"\(thresholds\)", CheckpointError),
]  # fmt: skip


def beir(path):
    embeddings.read_retrieval(path.parent / "qrels" / "test.tsv")


# Rows of named columns: a row without any one of them is refused with its line.
NEEDED = (
    (split_of("afqmc"), "dev.json", AFQMC), (split_of("wsc"), "dev.json", WSC),
    (split_of("csl"), "dev.json", {"keyword": ["a"], "abst": "b", "label": "0"}),
    (beir, "queries.jsonl", {"_id": "a", "text": "b"}), (table, "a.jsonl", {"text": "a", "label": 1}),
    (embeddings.read_similarities, "a.jsonl", {"sentence1": "a", "sentence2": "b", "score": 1}),
)  # fmt: skip
LACKING = [
    (read, name, second_of(row, {key: row[key] for key in row if key != column}),
     rf"\(line 2\): has no column '{column}'")
    for read, name, row in NEEDED for column in row if column != "idx"
]  # fmt: skip
LACKING += [
    (split_of("wsc"), "dev.json", second_of(WSC, WSC | {"target": None}), "has no object in the column 'target'"),
    (split_of("csl"), "dev.json", second_of(NEEDED[2][2], NEEDED[2][2] | {"keyword": "ab"}),
     "has no list of words in the column 'keyword'; download"),
]  # fmt: skip


def question(name="a", start=4, **more):
    answers = [{"text": "cat", "answer_start": start}]
    return {"id": name, "question": "Who?", "answers": answers, **more}


def file_of(*rows, context="The cat sat."):
    paragraphs = [{"context": context, "qas": list(rows)}]
    return json.dumps({"data": [{"title": "Cats", "paragraphs": paragraphs}]})


FLAT = '{"id": "1", "context": "a cat", "question": "who?", "answers": {"text": ["cat"], "answer_start": [2]}}'
IN_ROW = r"\(data.0.paragraphs.0.qas.0.{}\): "
QUESTIONS = [(answers, "squad.json", *row) for row in (
    ("", "is empty"),
    ('{"data":\n [}', "Invalid JSON.* line 2"),
    *((rows, ".*; write it in SQuAD's form") for rows in ("[]", FLAT, f"{FLAT}\n{FLAT}\n", f"[{FLAT}]")),
    ('{"data": []}', "the file contains no questions"),
    ('{"data": [{"title": "Cats"}]}', r"\(data.0.paragraphs\): Field required"),
    (file_of(question(), context=" \n"), r"\(question 'a'\): has an empty context"),
    (file_of(question() | {"id": 1.5}), IN_ROW.format("id.str")),
    (file_of(question(3), question("3")), r"\(question '3'\): comes twice"),
    (file_of(question(), question()), r"\(question 'a'\): comes twice"),
    (file_of(question() | {"answers": [{"text": "cat"}]}), IN_ROW.format("answers.0.answer_start")),
    (file_of(question(is_impossible=True)), ".*marked impossible and has answers"),
    (file_of(question() | {"question": "\ud83d"}), "Invalid JSON.* hex escape"),
)]  # fmt: skip

# --- text


def made_by_programs():
    """Return (kind, bytes) of files as their own libraries write them."""
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.execute("create table a (b text)")
        written = [("db", base.serialize(), "is an SQLite database")]
    for form in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        header = tarfile.TarInfo("text")
        data = header.tobuf(form) + bytes(1024)
        written.append(("tar", data, "is a tar archive; unpack it first, as with"))
    old = bytearray(data)
    old[257:265] = bytes(8)  # a header without a mark, as the seventh Unix wrote it
    old[148:156] = b"%06o\0 " % (sum(old[:148]) + 8 * 32 + sum(old[156:512]))
    written.append(("v7", bytes(old), "is a tar archive"))
    arrow = pyarrow.table({"text": ["One."]})
    for kind, open_ipc in (("arrow", pyarrow.ipc.new_stream), ("feather", pyarrow.ipc.new_file)):
        stream = pyarrow.BufferOutputStream()
        with open_ipc(stream, arrow.schema) as writer:
            writer.write_table(arrow)
        data = stream.getvalue().to_pybytes()
        written.append((kind, data, "is an Arrow file; write its text as Parquet"))
    return [(recognised, f"a.{kind}", data, words) for kind, data, words in written]


ROW = b'{"text": "One \\ud83d\\ude00."}\n\n%b\n{"text": "Two."}\n'
STRINGS = pyarrow.array([b"One.", b"Caf\xe9"], pyarrow.binary()).view(pyarrow.string())
MANY = pyarrow.concat_arrays([STRINGS[:1]] * 5 + [STRINGS])
PROGRAMS = made_by_programs()
IN_16_BITS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
# What is refused, packed or not.
NO_TEXT = [
    (recognised, "a.txt", "In sixteen bits.".encode("utf-16-le"), "is UTF-16LE, not UTF-8"),
    (recognised, "a.png", b"\x89PNG\r\n\x1a\n" + bytes(2000), "is a picture; leave it out"),
    (recognised, "a.xml", b'<doc id="1">\nText.\n</doc>\n', "contains no document.* url="),
    # Another program makes text of these.
    (recognised, "a", b"%PDF-1.7\n", "is a PDF that is damaged or too large .*; download or copy the file again"),
    (recognised, "a", b"PK\x03\x04\x14", "is a zip archive, as are docx.* as with `unzip "),
    (recognised, "a", b"%!PS-Adobe-3.0\n", "is PostScript"),
    (recognised, "a", b"\xef\xbb\xbf\n<!DOCTYPE html>", r"is HTML .*\(Document is empty\); "),
    (recognised, "a", b"<HTML lang='en'>", "is HTML that has no text"),
    (recognised, "a", b"{\\rtf1", "is rich text"),
    (recognised, "a", b"<mediawiki xml:lang='en'>", "is a MediaWiki dump; run `bert extract "),
    (recognised, "a", b"<?xml version='1.0'?>\n<mediawiki>", "is a MediaWiki dump; run"),
    (recognised, "a", b"<?xml version='1.0'?>\n<!-- a --><html>", "is HTML"),
    (recognised, "a", b"<?xml version='1.0'?>\n<article>", "is XML, not text; .*--input-format plain to"),
    (recognised, "a", b"WARC/1.0\r\nWARC-Type: warcinfo\r\n", "is a WARC file"),
    (recognised, "a", b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS.*git lfs pull"),
    (recognised, "a", b"\x7fELF\x02", "is a program"),
    (recognised, "a", b"7z\xbc\xaf\x27\x1c", "is a 7z archive; unpack it first"),
    (recognised, "a", gzip.compress(gzip.compress(b"Text.")), "is gzip in another compression; unpack"),
    *PROGRAMS,
]  # fmt: skip
TEXT = [
    *NO_TEXT,
    *((recognised, "packed", gzip.compress(data), words) for _, _, data, words in NO_TEXT),
    (recognised, "a.bin", b"One.\0Two.\0Three.\0Four.\n", "is not UTF-8 text"),
    (recognised, "a.mac", b"One.\rTwo.\r\rThree.\r", r"carriage returns alone.* tr '\\r'"),
    (recognised, "a.txt.gz", b"Plain text.\n", "has a name for gzip, but"),
    (recognised, "a.pdf", b"junk\n%PDF-1.7\n", "is a PDF that is damaged"),
    (recognised, "a.pdf", b"Plain text.\n", "has a name for pdf, but its content is not pdf"),
    (text, "b", b"One.\nTwo.\nCaf\xe9.\n", r"\(line 3\): byte 0xE9 is not UTF-8"),
    *((text, "rows.jsonl", gzip.compress(ROW % row), rf"\(line 3\){words}") for row, words in (
        (b'{"text": "cut', r": is not JSON \(Invalid"), (b'{"body": "elsewhere"}', ".*only 'body'; .* --text-field"),
        (b'["text"]', ": is not a JSON object"), (b'{"text": ["a", "list"]}', ": 'text' is not a string; .* --text-"),
        (b'{"text": "a \\ud800 b"}', ": has an unpaired surrogate"), (b"[" * 100_000 + b"]" * 100_000, ".*recursion"),
        (b'{"text": "Caf\xe9"}', ": byte 0xE9 is not UTF-8"))),
    (body, "a", parquet_of(text=["One."]), "has no column 'body', only 'text'"),
    (text, "a", parquet_of(text=[1, 2]), r"\(row 1\): 'text' is not a string"),
    (text, "a", parquet_of(text=STRINGS), r"\(row 2\): is not UTF-8"),
    (text, "a", parquet_of(text=MANY), r"\(row 7\): is not UTF-8"),
    *((body, "b.csv", rows, rf"\({where}\): .*{words}") for rows, where, words in (
        ("a,b\n1,2\n", "line 1", "has no column 'body', only 'a', 'b'; .*--text-field"),
        ("body,b,body\n1,2,3\n", "line 1", "has two columns 'body'"),
        ('body,b\n"1\n",2\n1,2,3\n', "line 4, row 3", "has 3 cells for 2 columns"),
        ('body,b\n1,2\n"cut', "line 3", "unexpected end of data"))),
    *((read, "a.csv", "text,label\nOne.,1\n".encode(name), f"is {shown}, not UTF-8; convert it with iconv -f {shown} ")
      for name in IN_16_BITS for shown in [name.upper().replace("-LE", "LE").replace("-BE", "BE")]
      for read in (partial(text, text_field="text"), table)),
    # The byte order mark decides, even where no byte is zero.
    (text, "a.txt", "\ufeff我爱北京。".encode("utf-16"), "is UTF-16, not UTF-8"),
    *((partial(text, text_field="text"), name, '\ufeff\n[\n {"text": "One."}]',
       r"is a JSON array; write one object on each line \(jq -c \.\[\]\)") for name in ("a.json", "a.jsonl")),
]  # fmt: skip

# --- documents

LOCKED = "is encrypted; save a copy without its password"
MANIFEST = {"META-INF/manifest.xml": "<manifest><encryption-data/></manifest>"}
LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10 if n else "ha" * 99}">' for n in range(10))
BOMB = f"<!DOCTYPE a [{LAUGHS}]><a>{'&l9;' * 10}</a>"
ENCODED = (
    ("帆船の旅。" * 9, "cp932 euc-jp gb18030"),
    ("Żaglówki płyną, gdy wieje; łódź stoi, żegluję dłużej.", "cp1250 iso-8859-2"),
    ("Příliš žluťoučký kůň úpěl. Őszi szőlő sűrű bő vörös", "cp1250 iso-8859-2"),
    ("În pădure şi pe câmp, oamenii îşi fac viaţa.", "cp1250 iso-8859-2"),
    ("Čamci plove noću, duša kaže nešto, možda kući", "cp1250 iso-8859-2"),
    ("Gemiler büyük şehrin kıyısında, ışık yanıyor, çünkü gün doğdu", "cp1254"),
    ("Laivų švyturys rodo kelią į uostą, žuvėdros.", "cp1257"),
    ("Kuģi brauc uz ostu, bāka rāda ceļu, jūrā vējš.", "cp1257"),
)
document = partial(text, documents="files", line_breaks="auto")
DOCUMENTS = [(document, *row) for row in (
    ("a.pdf", made.made_pdf([made.lines("Text")], encrypted=True), f"is a PDF that {LOCKED}"),
    ("a.pdf", made.made_pdf([made.lines("Text")])[:200], "is a PDF that is damaged.*; "),
    ("a.pdf", made.made_pdf([[], []]), r"has no text on its pages \(2\); .*ocrmypdf"),
    ("a.docx", made.made_docx(made.paragraph("Text"))[:-40], "is a file of Word that is damaged.*; "),
    ("a.docx", made.made_zip({"other.xml": "<a/>"}), "is damaged or too large .*word/document.xml.*; "),
    ("a.docx", made.made_docx(made.paragraph("")), "is a file of Word that has no text; "),
    ("a.docx", made.made_docx("<w:p>"), "is damaged or too large .*mismatch.*; "),
    ("a.docx", made.made_docx("", "", {"word/document.xml": bytes(1 << 28)}), "unpacks to more than 128 MiB; "),
    ("a.docx", made.made_docx("", "", {"word/document.xml": BOMB}), "is a file of Word that "),
    ("a.odt", made.made_odt("", MANIFEST), f"is an OpenDocument text that {LOCKED}"),
    ("a.epub", made.made_epub({"a": "<html/>"}, "", "A"), "is an EPUB book that has no text; "),
    ("a.html", b"<!DOCTYPE html><p hidden>No.</p>", "is HTML that has no text; "),
    ("a.html", f"<!DOCTYPE html>Text.{'<b>' * 1_000_000}deep", "has too many elements within"),
    *(("a.html", f"<!DOCTYPE html>{page}".encode(name), "unknown encoding; .*iconv")
      for page, names in ENCODED for name in names.split()),
)]  # fmt: skip

# --- dumps, templates and tokenizers

PIECES = ["the", "cat", "##s", "[PAD]", "[MASK]", "[UNK]", "[SEP]", "[CLS]"]


def vocabulary_of(*pieces):
    return "".join(f"{piece}\n" for piece in pieces)


TOKENS = [
    *((templates.read_rules, "rules.json", content, rf"{words}; write {{", ConfigError) for content, words in (
        ('{"a": 1}', "'a': 1\\): is not a text"), ('{"a": "{1"}', r"'a': '{1'\): has a brace without its partner"),
        ('["a"]', "Input should be an object"), ('{"a": ', "Invalid JSON.*"))),
    *((Dump, "dump.xml.bz2", content, f"is not a MediaWiki dump{words}") for content, words in (
        (b"", ""), (b"BZh91AY&SY not really", " .*damaged or cut off"),
        (b"7z\xbc\xaf\x27\x1c....", " .*; use a pages-articles file"), (b"<mediawiki></mediawiki>", ""),
        (bz2.compress(b"<mediawiki></mediawiki>"), ""))),
    *((read_vocabulary, "vocab.txt", vocabulary_of(*PIECES, piece, "end"),
       rf"line 9\): '{piece}' is blank .*write \[unused8\]") for piece in ("cat", "")),
    *((read, "vocab.txt", vocabulary_of(*(piece for piece in PIECES if piece != token)), rf"lacks \{token}")
      for token in PIECES[3:] for read in (read_vocabulary, tokenizer)),
    (tokenizer, ("other.txt", ""), "", r": holds neither vocab\.txt nor tokenizer\.json"),
    (tokenizer, "tokenizer.json", '{"model": {"type": "WordPiece", "vocab": 3}}', "cannot be read"),
    (split_of("rte"), ("other.tsv", "dev.tsv"), "", "no such file; use the folder that contains RTE"),
    (of_folder(lambda folder: templates.read_rules(folder / "absent")), ("a", "absent"), "",
     r"cannot be read \(No such file", ConfigError),
]  # fmt: skip

ROWS = [*TABLES, *TASKS, *LACKING, *QUESTIONS, *TEXT, *DOCUMENTS, *TOKENS]


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(re.findall(r"\w+", row[3])) for row in ROWS])
def test_a_file_is_refused_with_its_name_its_line_and_what_to_do(row, tmp_path):
    read, name, content, words, *kind = row
    name, path_in_message = name if isinstance(name, tuple) else (name, name)
    message = f"{re.escape(str(tmp_path / path_in_message))}.*?{words}"
    with pytest.raises(kind[0] if kind else DataError, match=message) as error:
        read(put(tmp_path / name, content))
    assert "; " in str(error.value)
