"""One start of a run reads each file once."""

import json
from collections import Counter

from support.bert import run_python
from support.runs import run_command
from support.tiny_models import RUN_OF_RECORDS, SENTENCES, flags_of, write_model, write_records

NAMES = ("state.json", "corpus.json", "tokenizer_config.json", "vocab.txt")
OPENED = """
import json, os, sys
opened = []

def note(event, arguments):
    if event == "open" and not isinstance(arguments[0], int):
        opened.append(os.fspath(arguments[0]))

sys.addaudithook(note)
from bert_cli.cli import main
words = sys.argv[1:]
code = main(words)
print(json.dumps([path for path in opened if isinstance(path, str)]))
sys.exit(code)
"""


def test_a_resumed_run_reads_each_file_once_after_its_checksum(tmp_path):
    model = write_model(tmp_path / "model")
    records, held_out = (
        write_records(tmp_path / name, SENTENCES, model) for name in ("records", "held_out")
    )
    paths = {"dataset-dir": records, "validation-dir": held_out, "pretrained-ckpt-path": model}
    more = {"save-ckpt-path": tmp_path / "run"}
    words = ["pretrain", *flags_of(RUN_OF_RECORDS, **paths, **more)]
    assert run_command(words) == 0
    process = run_python(OPENED, *words)
    assert process.returncode == 0, process.stderr
    assert "nothing to do" in process.stdout
    opened = json.loads(process.stdout.splitlines()[-1])
    counts = Counter(path for path in opened if path.endswith(NAMES))
    (state,) = (path for path in counts if path.endswith("state.json"))
    checkpoint = state.removesuffix("state.json")
    assert {name.rpartition("/")[2] for name in counts} == set(NAMES)
    for path, count in counts.items():
        # A tokenizer's file is read for its checksum first.
        may_be_twice = path.startswith((checkpoint, str(records))) and path.endswith(NAMES[2:])
        assert count <= 1 + may_be_twice, path
