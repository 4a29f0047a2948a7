"""`bert doctor`: a run without mistakes, and the finding for each mistake."""

import json
import sys
from pathlib import Path

import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from support import corpora as made
from support.corpora import PIECES, WORDS, make_corpus
from support.tiny_models import TINY_RUN, flags_of

from bert_cli.cli import main
from bert_cli.commands import COMMANDS
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.records.formats import dynamic_payloads, static_payloads
from bert_cli.errors import CheckpointError, ConfigError, DataError
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.runtime import Devices
from bert_cli.parse.load import load
from bert_cli.planning.memory import estimate
from bert_cli.tasks.look import doctor, examine, machine
from bert_cli.tasks.look.machine import Finding, Report
from bert_cli.tasks.run import corpora, job
from bert_cli.train.checkpoint import complete_checkpoints

FLAGS = {
    **TINY_RUN,
    "max-predictions-per-seq": made.P,
    "bert-config.vocab-size": WORDS,
    "bert-config.hidden-size": 64,
    "bert-config.hidden-dropout-prob": 0.0,
    "bert-config.attention-probs-dropout-prob": 0.0,
    "global-batch.micro-batch-size": 8,
    "optimizer-opts.name": "AdamW",
    "total-num-train-samples": 8,
    "keep-checkpoints": 3,
}
ONE = Processes(())
CHECKED = COMMANDS["doctor pretrain"].settings_class()


def settings_of(folder: Path, **changes: object) -> PretrainSettings:
    words = flags_of(FLAGS, save_ckpt_path=folder / "run", **changes)
    return load(CHECKED, words, "bert doctor pretrain")[0]


def findings(check, *arguments, **options) -> list[Finding]:
    report = Report(quiet=True)
    check(report, *arguments, **options)
    return report.findings


def the_finding(check, *arguments, **options) -> Finding:
    (only,) = findings(check, *arguments, **options)
    return only


def examined(folder: Path, **changes: object) -> list[Finding]:
    return doctor.examine(settings_of(folder, **changes), Report(quiet=True)).findings


def of(what: str, results: list[Finding]) -> Finding:
    return [finding for finding in results if finding.what == what][-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert main(["pretrain", *flags_of(FLAGS, save_ckpt_path=folder / "run")]) == 0
    return folder


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
    return examined(tmp_path_factory.mktemp("complete"))


def test_a_run_without_mistakes_has_what_its_steps_found(complete):
    assert not [one for one in complete if one.level == "error" or "\n" in str(one)]
    assert of("layout", complete).found == "1 replica of 1 device, idle for 0.0% of a step"
    assert "1 step of 8 examples" in of("plan", complete).found


def test_the_checkpoint_of_a_continued_run_is_measured_named_and_loaded(trained):
    (*_, saved) = complete_checkpoints(trained / "run")
    size = sum(file.stat().st_size for file in saved.glob("*.safetensors"))
    estimated = examine.checkpoint_bytes(settings_of(trained))
    assert estimated == pytest.approx(size, rel=0.05)
    results = examined(trained)
    assert f"the last step is done ({saved})" in of("save_ckpt_path", results).found
    assert "being written need" in of("disk", results).found


def test_the_records_are_read_their_epochs_counted_and_wrong_ones_are_errors(tmp_path):
    corpus = make_corpus(tmp_path / "corpus", "dynamic", [64])
    real = {"generated_dataset": False, "dataset_dir": corpus}
    results = examined(tmp_path, **real, total_num_train_samples=160)
    assert "64 readable records" in of("dataset_dir", results).found
    assert of("epochs", results).values == {"epochs": 2.5}
    results = examined(tmp_path, **real, total_num_train_samples=64 * 200)
    assert of("epochs", results).level == "warning"
    # New weights learn each token of the vocabulary from this text.
    assert of("vocabulary", results).level == "warning"
    damaged = make_corpus(tmp_path / "damaged", "dynamic", [8])
    data = bytearray((damaged / "wiki_000.tfrecord").read_bytes())
    data[40] ^= 1
    (damaged / "wiki_000.tfrecord").write_bytes(data)
    for change, kind, message in (
        ({"dataset_dir": damaged}, DataError, "checksum"),
        ({"dataset_dir": "nowhere"}, DataError, "no such folder"),
        ({"dataset_dir": "$NO_SUCH_VARIABLE/x"}, ConfigError, "the variable is not set"),
        ({"dataset_dir": False}, ConfigError, "is missing"),
        ({"max_seq_length": 12}, DataError, "16"),
        ({"validation_dir": "nowhere"}, DataError, "no such folder"),
        ({"bert_config__type_vocab_size": 1}, ConfigError, "this model has no segments"),
        ({"pretrained_ckpt_path": "nowhere"}, CheckpointError, "nowhere"),
    ):
        results = examined(tmp_path, **(real | change))
        (error,) = [one for one in results if one.level == "error"]
        assert error.kind is kind and message in error.found


def test_the_folder_has_space_and_is_given_and_writable(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, keep_checkpoints=2)
    each = examine.checkpoint_bytes(settings)
    with monkeypatch.context() as patch:
        for free, level in ((3 * each, "ok"), (3 * each - 1, "error")):
            patch.setattr(examine, "free_bytes", lambda _, free=free: free)
            assert (
                of("disk", findings(examine.check_disk, job.Draft(settings), [tmp_path])).level
                == level
            )
    values = of("disk", examined(tmp_path, keep_every_steps=10, total_num_train_samples=800)).values
    assert values["kept"] == 3 + 10 and values["needed"] == 14 * values["checkpoint"]
    (tmp_path / "file").write_text("")
    for folder, flag, level, message in (
        (None, {}, "error", "is missing"),
        (tmp_path / "file" / "run", {}, "error", "cannot be written"),
        (None, {"dry_run": None}, "ok", "nothing"),
    ):
        words = flags_of(FLAGS, save_ckpt_path=folder or False, **flag)
        settings = load(CHECKED, words, "bert doctor pretrain")[0]
        one = of("save_ckpt_path", doctor.examine(settings, Report(quiet=True)).findings)
        assert one.level == level and message in one.found


def test_text_that_repeats_itself_is_a_warning(tmp_path):
    payloads = [*dynamic_payloads(made.dynamic_records(0, 400))]
    static = [*static_payloads(made.static_examples(0, 400))]
    for kind, shard, levels in (
        ("dynamic", payloads, ["ok"]),
        ("dynamic", payloads * 10, ["warning"]),
        # How many masked copies there are of each text is not recorded with these.
        ("static", static * 10, []),
    ):
        folder = made.write_folder(tmp_path / f"{kind}_{len(shard)}", kind, [shard], PIECES)
        settings = settings_of(tmp_path, generated_dataset=False, dataset_dir=folder)
        checks = corpora.text_checks(corpora.open_stream(settings), len(PIECES))
        assert [one.level for one in findings(examine.add_checks, checks)][:1] == levels


def test_missing_memory_is_an_error_and_used_memory_a_warning(tmp_path, monkeypatch, complete):
    needed = of("memory of a run", complete).values["needed"]
    work = settings_of(tmp_path)
    cpu = Devices("CPU", 1, 0)
    for total, free, level in (
        (2 * needed, needed, "ok"),
        (2 * needed, needed - 1, "warning"),
        (needed, needed, "error"),
    ):
        monkeypatch.setattr(machine, "memory", lambda total=total, free=free: (total, free))
        assert the_finding(examine.check_memory, work, ONE, cpu).level == level
    # The replicas of a CPU share its memory; GPUs are checked one by one.
    monkeypatch.setattr(machine, "memory", lambda: (10**12, 10**6))
    four = work.with_batch(replicas=4)
    for processes, here in ((ONE, 4), (Processes(("a:1", "b:1")), 2)):
        one = the_finding(examine.check_memory, four, processes, cpu)
        assert one.values["needed"] == pytest.approx(here * needed, rel=0.2)
    for memory, level in ((10**6, "error"), (10**10, "ok")):
        assert (
            the_finding(examine.check_memory, four, ONE, Devices("GPU", 1, memory)).level == level
        )
    # Of several GPUs the fullest decides; here it is the second.
    stages = '[["emb"], ["hid"], ["enc_out", "pool", "heads"]]'
    placed = {"pipeline_stages": stages, "pipeline_device_mapping": "[1, 0, 1]"}
    two = settings_of(tmp_path, **{f"parallel__{name}": value for name, value in placed.items()})
    first, second = (part.total for part in estimate(two))
    one = the_finding(examine.check_memory, two, ONE, Devices("GPU", 2, 10**10))
    assert one.values["needed"] == second > first


def test_the_processes_and_devices_have_to_suffice_for_the_layout(tmp_path, monkeypatch):
    two = {"global_batch__replicas": 2}
    assert "2 devices are simulated on" in of("devices", examined(tmp_path, **two)).found
    chosen = of("layout", examined(tmp_path, parallel__layout="auto"))
    assert chosen.level == "ok" and "1 replica of 1 device" in chosen.found
    for workers, level, found in (
        ("a:1,b:1", "ok", "; 2 processes from --cluster.workers"),
        ("a:1,b:1,c:1", "error", "cannot be divided among 3 processes"),
    ):
        several = {**two, "cluster__workers": workers, "cluster__rank": 0}
        one = of("layout", examined(tmp_path, **several))  # the other processes need not be there
        assert one.level == level and found in one.found
    monkeypatch.setenv("TF_CONFIG", "{nonsense")
    error = of("layout", examined(tmp_path))
    assert error.level == "error" and "TF_CONFIG" in error.found


def test_all_findings_are_printed_and_written_and_the_first_error_decides(
    tmp_path, bert, capsys, monkeypatch
):
    monkeypatch.setattr(machine, "memory", lambda: (10**6, 10**6))
    real = {"generated_dataset": False, "dataset_dir": tmp_path / "none"}
    settings = settings_of(tmp_path, **real, json=tmp_path / "d.json")
    problem = r"dataset_dir, memory of a run: did not pass \(2 errors, .*\)"
    with pytest.raises(DataError, match=problem):
        doctor.run(settings)
    lines = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "d.json").read_text(encoding="utf-8"))
    assert len(lines) == len(written["findings"]) + 1
    assert written["errors"] == 2 and ": 2 errors, " in lines[-1]
    wrong = next(one for one in written["findings"] if one["level"] == "error")
    assert set(wrong) == {"level", "what", "found", "remedy", "values"}
    assert wrong["what"] == "dataset_dir" and wrong["found"] in "\n".join(lines)
    # Without a run only the machine is checked; JSON on standard output is alone.
    assert "dataset_dir" not in bert("doctor").out
    assert main(["doctor", "--json", "-"]) == 0
    names = {one["what"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert {"python", "devices"} <= names and not {"plan", "layout"} & names


def test_a_tensorflow_that_cannot_be_imported_is_a_finding(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "bert_cli.parallel.tensorflow.mesh", raising=False)
        patch.setitem(sys.modules, "tensorflow", None)
        results = examined(tmp_path)
    assert (results[-1].what, results[-1].level) == ("tensorflow", "error")
    assert "import failed: import of tensorflow halted" in results[-1].found
    assert of("processor", results).level == "ok"

    def check_run(*_):
        raise ImportError("a package that a step needs")

    monkeypatch.setattr(examine, "check_run", check_run)
    with pytest.raises(ImportError, match="that a step needs"):
        examined(tmp_path)
