"""`bert doctor`: a run without mistakes, and the finding for each mistake."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bert_cli.cli import main
from bert_cli.config.load import load
from bert_cli.config.tools import DoctorSettings
from bert_cli.data.records.formats import DynamicRecords, dynamic_payloads
from bert_cli.data.records.index import write_corpus
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.records.vocab import SPECIAL_TOKENS, read_vocabulary, write_vocabulary
from bert_cli.errors import CheckpointError, ConfigError, DataError
from bert_cli.tasks.look import doctor, machine
from bert_cli.tasks.look.machine import Finding, Report
from bert_cli.train.checkpoint import complete_checkpoints

S, WORDS = 16, 300
FLAGS = {
    "max-seq-length": S,
    "max-predictions-per-seq": 3,
    "bert-config.vocab-size": WORDS,
    "bert-config.hidden-size": 64,
    "bert-config.num-hidden-layers": 1,
    "bert-config.num-attention-heads": 2,
    "bert-config.intermediate-size": 64,
    "bert-config.max-position-embeddings": 32,
    "bert-config.hidden-dropout-prob": 0.0,
    "bert-config.attention-probs-dropout-prob": 0.0,
    "global-batch.micro-batch-size": 8,
    "optimizer-opts.name": "AdamW",
    "optimizer-opts.learning-rate.max-learning-rate": 0.01,
    "total-num-train-samples": 8,
}


def flags(**changes: object) -> list[str]:
    """Return the flags of a small run; False leaves a flag out, None gives it no value."""
    changed = {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
    words: list[str] = []
    for name, value in {**FLAGS, "generated-dataset": None, **changed}.items():
        if value is not False:
            words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words


def settings_of(folder: Path, **changes: object) -> DoctorSettings:
    words = flags(save_ckpt_path=folder / "run", **changes)
    return load(DoctorSettings, words, "bert doctor")[0]


def findings(check, *arguments, **options) -> list[Finding]:
    report = Report(quiet=True)
    check(report, *arguments, **options)
    return report.findings


def examined(folder: Path, **changes: object) -> list[Finding]:
    """Return all findings except the first losses."""
    return built(folder, no_build=None, **changes)


def built(folder: Path, **changes: object) -> list[Finding]:
    """Return all findings, in seconds."""
    return doctor.examine(settings_of(folder, **changes), Report(quiet=True)).findings


def of(what: str, found: list[Finding]) -> Finding:
    """Return the last finding of a check."""
    return [finding for finding in found if finding.what == what][-1]


def corpus_of(folder: Path, count: int = 64) -> Path:
    folder.mkdir()
    rows = np.random.default_rng(0).integers(5, WORDS, (count, S))
    rows[:, 0], rows[:, 8], rows[:, -1] = 2, 3, 3
    full, labels = np.full(count, S, np.int32), np.arange(count, dtype=np.int32) % 2
    records = DynamicRecords(rows.reshape(-1).astype(np.int32), full, full - 7, labels)
    with RecordWriter(folder / "a.tfrecord") as writer:
        writer.write_all(dynamic_payloads(records))
    pieces = [*SPECIAL_TOKENS, *(f"w{number}" for number in range(WORDS - 5))]
    write_vocabulary(folder, "\n".join(pieces).encode() + b"\n", cased=False)
    described = {
        "format": "dynamic",
        "sequence_length": S,
        "mask_tokens": 3,
        "masked_lm_prob": None,
        "whole_word_masking": None,
        "vocab_size": WORDS,
        "vocab_sha256": read_vocabulary(folder / "vocab.txt").sha256,
        "token_bytes": 2,
        "special_ids": {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
        "tokenizer": {},
    }
    write_corpus(folder, described)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus_of(tmp_path_factory.mktemp("doctor") / "corpus")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["pretrain", *flags(), "--save-ckpt-path", str(folder / "run")]) == 0
    return folder


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Finding]]:
    """A folder and the findings for a run without mistakes."""
    folder = tmp_path_factory.mktemp("order")
    return folder, built(folder)


def test_a_run_without_mistakes_has_the_first_losses_of_equal_probabilities(complete):
    folder, found = complete
    assert [one.found for one in found if one.level == "error"] == []
    loss = of("first loss", found)
    assert loss.level == "ok" and f"ln {WORDS} = {math.log(WORDS):.2f}" in loss.found
    assert loss.values["mlm_loss"] == pytest.approx(math.log(WORDS), abs=0.2)
    assert loss.values["nsp_loss"] == pytest.approx(math.log(2), abs=0.1)
    assert not (folder / "run").exists()


def test_the_first_losses_are_those_of_the_first_step(trained, complete):
    lines = (trained / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, loss = json.loads(lines[0]), of("first loss", complete[1]).values
    for name in ("mlm_loss", "nsp_loss"):
        assert loss[name] == pytest.approx(first[name], abs=1e-5)


def test_the_checkpoint_of_a_continued_run_is_measured_named_and_loaded(trained):
    (*_, saved) = complete_checkpoints(trained / "run")
    size = sum(file.stat().st_size for file in saved.glob("*.safetensors"))
    assert doctor.checkpoint_bytes(settings_of(trained)) == pytest.approx(size, rel=0.05)
    found = built(trained)
    assert f"continue from {saved}" in of("save_ckpt_path", found).found
    assert "still need" in of("disk", found).found
    loss = of("first loss", found)
    assert "new weights" not in loss.found
    assert loss.level == "ok" and loss.values["mlm_loss"] < math.log(WORDS) - 0.5


def test_pretrained_weights_are_loaded_with_their_shape(trained, tmp_path, complete):
    model = trained / "run"
    shape = [name for name in FLAGS if name.startswith("bert-config.")]
    unset = {name.replace(".", "__").replace("-", "_"): False for name in shape}
    found = built(tmp_path, pretrained_ckpt_path=model, **unset)
    assert [one.found for one in found if one.level == "error"] == []
    assert str(complete_checkpoints(model)[-1]) in of("model", found).found
    values = [of("memory of a run", one).values["needed"] for one in (found, complete[1])]
    assert values[0] == values[1]
    # Its only step was on the examples that are evaluated here.
    loss = of("first loss", found)
    assert "starts from the weights in" in loss.found
    assert loss.level == "ok" and loss.values["mlm_loss"] < math.log(WORDS) - 0.5


def test_absent_weights_are_an_error_of_checkpoints(tmp_path):
    model = of("model", examined(tmp_path, pretrained_ckpt_path=tmp_path / "none"))
    assert model.level == "error" and model.kind is CheckpointError and "none" in model.found


def test_first_losses_are_judged(tmp_path):
    settings, equal = settings_of(tmp_path), {"mlm_loss": math.log(WORDS), "nsp_loss": math.log(2)}
    for losses, is_trained, level in (
        (equal, False, "ok"),
        (equal, True, "warning"),
        (equal | {"mlm_loss": 3.0}, True, "ok"),
        (equal | {"mlm_loss": math.nan}, False, "warning"),
        (equal | {"nsp_loss": 1.0}, False, "warning"),
        ({"mlm_loss": math.log(WORDS)}, False, "ok"),
    ):
        (found,) = findings(doctor.judge, settings, losses, "", is_trained=is_trained)
        assert found.level == level and ("next sentence" in found.found) == ("nsp_loss" in losses)
    loss = of("first loss", built(tmp_path, bert_config__initializer_range=1.0))
    assert loss.level == "warning" and "initializer_range (1)" in loss.remedy


def test_a_corpus_without_pairs_has_no_loss_of_them(tmp_path):
    settings = settings_of(tmp_path)

    class NoPairs:
        def rows(self, positions: np.ndarray) -> dict[str, np.ndarray]:
            stream = doctor.corpora.open_stream(settings, 8)
            return stream.rows(positions) | {"next_sentence_weights": np.zeros(8, np.float32)}

    (found,) = findings(doctor.check_first_loss, settings, NoPairs(), None)
    assert found.level == "ok" and set(found.values) == {"mlm_loss", "equal_mlm_loss"}


def test_the_records_are_read_and_their_epochs_counted(corpus, tmp_path):
    real = {"generated_dataset": False, "dataset_dir": corpus}
    found = built(tmp_path, **real, total_num_train_samples=160)
    assert "64 readable records" in of("dataset_dir", found).found
    assert of("epochs", found).values == {"epochs": 2.5}
    assert of("first loss", found).level == "ok"
    found = examined(tmp_path, **real, total_num_train_samples=64 * 200)
    assert of("epochs", found).level == "warning"
    assert of("first loss", found).found == "not computed: --no-build"


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"dataset_dir": "nowhere"}, DataError, "no such folder"),
        ({"dataset_dir": "$NO_SUCH_VARIABLE/x"}, ConfigError, "the variable is not set"),
        ({"dataset_dir": False}, ConfigError, "is missing"),
        ({"max_seq_length": 12}, DataError, "16"),
        ({"bert_config__vocab_size": 200}, ConfigError, "300"),
        ({"validation_dir": "nowhere"}, DataError, "no such folder"),
    ],
)
def test_records_that_do_not_fit_the_run_are_errors(change, kind, message, corpus, tmp_path):
    real = {"generated_dataset": False, "dataset_dir": corpus}
    (error,) = [one for one in examined(tmp_path, **(real | change)) if one.level == "error"]
    assert error.kind is kind and message in error.found


def test_damaged_records_are_an_error(tmp_path):
    folder = corpus_of(tmp_path / "damaged", 8)
    data = bytearray((folder / "a.tfrecord").read_bytes())
    data[40] ^= 1
    (folder / "a.tfrecord").write_bytes(data)
    error = of("dataset_dir", examined(tmp_path, generated_dataset=False, dataset_dir=folder))
    assert error.kind is DataError and "checksum" in error.found


def test_the_disk_needs_space_for_all_checkpoints(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, keep_checkpoints=2)
    each = doctor.checkpoint_bytes(settings)
    for free, level in ((3 * each, "ok"), (3 * each - 1, "error")):
        monkeypatch.setattr(doctor, "free_bytes", lambda _, free=free: free)
        assert of("disk", findings(doctor.check_folder, settings, None)).level == level
    values = of("disk", examined(tmp_path, keep_every_steps=10, total_num_train_samples=800)).values
    assert values["kept"] == 3 + 10 and values["needed"] == 14 * values["checkpoint"]


def test_the_folder_is_given_writable_and_permanent(tmp_path, monkeypatch):
    (found,) = findings(doctor.check_folder, load(DoctorSettings, flags(), "bert doctor")[0], None)
    assert found.level == "error" and "not given" in found.found
    (tmp_path / "file").write_text("")
    (found,) = findings(doctor.check_folder, settings_of(tmp_path / "file"), None)
    assert found.level == "error" and "cannot be written" in found.found
    dry = load(DoctorSettings, flags(dry_run=None), "bert doctor")[0]
    assert [one.level for one in findings(doctor.check_folder, dry, None)] == ["ok"]
    monkeypatch.setattr(machine, "file_system", lambda _: "tmpfs")
    warning, disk = findings(doctor.check_folder, settings_of(tmp_path), None)
    assert (warning.level, disk.level) == ("warning", "ok")
    assert "lost when the machine restarts" in warning.found


def test_missing_memory_is_an_error_and_used_memory_a_warning(tmp_path, monkeypatch, complete):
    needed = of("memory of a run", complete[1]).values["needed"]
    one, settings = doctor.Processes(()), settings_of(tmp_path)
    for total, free, level in (
        (2 * needed, needed, "ok"),
        (2 * needed, needed - 1, "warning"),
        (needed, needed, "error"),
    ):
        monkeypatch.setattr(machine, "memory", lambda total=total, free=free: (total, free))
        (found,) = findings(doctor.check_memory, settings, one, "CPU", 0)
        assert found.level == level
    # The replicas of a CPU share its memory; GPUs are checked one by one.
    monkeypatch.setattr(machine, "memory", lambda: (10**12, 10**6))
    three = settings_of(tmp_path, global_batch__replicas=3)
    (found,) = findings(doctor.check_memory, three, one, "CPU", 0)
    assert found.values["needed"] == pytest.approx(3 * needed, rel=0.2)
    for memory, level in ((10**6, "error"), (10**10, "ok")):
        (found,) = findings(doctor.check_memory, three, one, "GPU", memory)
        assert found.level == level
    loss = of("first loss", built(tmp_path))
    assert loss.level == "warning" and "not computed: the model needs" in loss.found


def test_processes_have_to_divide_the_replicas_and_gpus_to_suffice(tmp_path, monkeypatch):
    settings, one = settings_of(tmp_path, global_batch__replicas=2), doctor.Processes(())
    for number, level in ((1, "error"), (2, "ok")):
        (found,) = findings(doctor.check_layout, settings, one, "GPU", number, 10**9)
        assert found.level == level
    cluster = {"worker": ["a:2222", "b:2222"]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    found = of("layout", examined(tmp_path, global_batch__replicas=3))
    assert found.level == "error" and found.kind is ConfigError
    monkeypatch.setenv("TF_CONFIG", "{nonsense")
    found = of("processes", examined(tmp_path))
    assert found.level == "error" and "TF_CONFIG" in found.found


def test_a_layout_is_chosen_and_idle_stages_are_warned_of(tmp_path):
    found = of("layout", examined(tmp_path, parallel__layout="auto"))
    assert found.level == "ok" and found.found.startswith("chosen: ")
    stages = '[["emb", "hid"], ["hid"], ["enc_out", "pool", "heads"]]'
    for micro_batches, level in ((1, "warning"), (64, "ok")):
        settings = settings_of(
            tmp_path,
            global_batch__grad_acc_steps_per_replica=micro_batches,
            bert_config__num_hidden_layers=2,
            parallel__pipeline_stages=stages,
            parallel__pipeline_device_mapping="[0, 1, 0]",
        )
        (found,) = findings(doctor.check_layout, settings, doctor.Processes(()), "CPU", 2, 0)
        assert found.level == level
        assert ("--parallel.pipeline-stages null" in found.remedy) == (level == "warning")


def test_json_on_standard_output_is_alone_and_without_a_run_only_the_machine_is_checked(capsys):
    doctor.run(load(DoctorSettings, ["--json", "-"], "bert doctor")[0])
    written = json.loads(capsys.readouterr().out)
    names = {one["what"] for one in written["findings"]}
    assert written["errors"] == 0 and {"python", "devices"} <= names
    assert not {"plan", "first loss"} & names


def test_all_findings_are_printed_and_written_and_the_first_error_decides(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(machine, "memory", lambda: (10**6, 10**6))
    settings = settings_of(
        tmp_path, generated_dataset=False, dataset_dir=tmp_path / "none", json=tmp_path / "d.json"
    )
    with pytest.raises(DataError, match=r"dataset_dir: did not pass \(2 errors, .*\)") as caught:
        doctor.run(settings)
    assert caught.value.exit_code == DataError.exit_code
    lines = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "d.json").read_text(encoding="utf-8"))
    assert len(lines) == len(written["findings"]) + 1
    assert written["errors"] == 2 and ": 2 errors, " in lines[-1]
    wrong = next(one for one in written["findings"] if one["level"] == "error")
    assert set(wrong) == {"level", "what", "found", "remedy", "figures"}
    assert wrong["what"] == "dataset_dir" and wrong["found"] in "\n".join(lines)


def test_a_tensorflow_that_cannot_be_imported_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "IMPORT_ERROR", "ImportError: libcudart.so.12: cannot open")
    found = examined(tmp_path)
    assert found[-1].level == "error" and "libcudart" in found[-1].found
    assert of("processor", found).level == "ok"
