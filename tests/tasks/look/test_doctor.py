"""`bert doctor` as a person has it: a run that is in order, and each way in which one is not."""

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
from bert_cli.errors import BertError, CheckpointError, ConfigError, DataError
from bert_cli.tasks.look import capacity, doctor, first_loss, machine
from bert_cli.tasks.look.finding import Finding
from bert_cli.train.folder import complete_checkpoints

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
    """A small run; a change to False leaves a flag out, one to None gives it no value."""
    changed = {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
    words: list[str] = []
    for name, value in {**FLAGS, "generated-dataset": None, **changed}.items():
        if value is not False:
            words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words


def settings_of(folder: Path, **changes: object) -> DoctorSettings:
    words = flags(save_ckpt_path=folder / "run", **changes)
    return load(DoctorSettings, words, "bert doctor")[0]


def examined(folder: Path, **changes: object) -> list[Finding]:
    """All findings but the first losses."""
    return list(doctor.examine(settings_of(folder, no_build=None, **changes)))


def built(folder: Path, **changes: object) -> list[Finding]:
    """All findings: takes seconds."""
    return list(doctor.examine(settings_of(folder, **changes)))


def of(what: str, findings: list[Finding]) -> Finding:
    """The finding about something: the only one, or the last."""
    return [finding for finding in findings if finding.what == what][-1]


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
    """The folder of the run that the flags describe, of one step."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["pretrain", *flags(), "--save-ckpt-path", str(folder / "run")]) == 0
    return folder


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Finding]]:
    """A run's folder, and the findings on it, the first losses too."""
    folder = tmp_path_factory.mktemp("order")
    return folder, built(folder)


def test_a_run_that_is_in_order_has_no_error_and_its_first_losses_are_those_of_chance(in_order):
    folder, found = in_order
    assert [one.found for one in found if one.level == "error"] == []
    loss = of("first loss", found)
    assert loss.level == "ok" and f"ln {WORDS} = {math.log(WORDS):.2f}" in loss.found
    assert loss.figures["mlm_loss"] == pytest.approx(math.log(WORDS), abs=0.2)
    assert loss.figures["nsp_loss"] == pytest.approx(math.log(2), abs=0.1)
    assert not (folder / "run").exists()


def test_the_first_losses_are_those_of_the_runs_first_step(trained, in_order):
    lines = (trained / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, loss = json.loads(lines[0]), of("first loss", in_order[1]).figures
    for name in ("mlm_loss", "nsp_loss"):
        assert loss[name] == pytest.approx(first[name], abs=1e-5)


def test_a_checkpoint_has_the_bytes_that_are_said(trained):
    saved = complete_checkpoints(trained / "run")[-1]
    size = sum(file.stat().st_size for file in saved.glob("*.safetensors"))
    assert capacity.checkpoint_bytes(settings_of(trained)) == pytest.approx(size, rel=0.05)


def test_the_checkpoint_that_a_run_continues_from_is_named(trained):
    found = examined(trained)
    assert (
        f"continue from {complete_checkpoints(trained / 'run')[-1]}"
        in of("save_ckpt_path", found).found
    )
    assert "still need" in of("disk", found).found


def test_weights_that_scatter_too_much_are_seen_in_the_first_loss(tmp_path):
    loss = of("first loss", built(tmp_path, bert_config__initializer_range=1.0))
    assert loss.level == "warning" and "initializer_range (1)" in loss.remedy


def test_weights_to_start_from_are_read_and_must_do_better_than_chance(trained, tmp_path):
    # Its one step was on the examples that are read here.
    loss = of("first loss", built(tmp_path, pretrained_ckpt_path=trained / "run"))
    assert "starts from the weights in" in loss.found
    assert loss.level == "ok" and loss.figures["mlm_loss"] < math.log(WORDS) - 0.5
    equal = {"mlm_loss": math.log(WORDS), "nsp_loss": math.log(2)}
    (judged,) = first_loss.judged(settings_of(tmp_path), equal, equal, "", is_trained=True)
    assert judged.level == "warning" and "vocabulary of the model" in judged.remedy


def test_a_run_that_continues_is_judged_by_its_own_weights(trained, tmp_path):
    loss = of("first loss", built(trained))
    assert "a fresh model" not in loss.found
    assert loss.level == "ok" and loss.figures["mlm_loss"] < math.log(WORDS) - 0.5


def test_weights_that_are_not_there_are_an_error_of_checkpoints(tmp_path):
    found = examined(tmp_path, pretrained_ckpt_path=tmp_path / "none")
    model = of("model", found)
    assert model.level == "error" and model.kind is CheckpointError
    assert "none" in model.found


def test_the_shape_is_that_of_the_model_which_the_run_starts_from(trained, tmp_path):
    shape = [name for name in FLAGS if name.startswith("bert-config.")]
    unsaid = {name.replace(".", "__").replace("-", "_"): False for name in shape}
    model = trained / "run"
    found = examined(tmp_path, pretrained_ckpt_path=model, **unsaid)
    assert [one.found for one in found if one.level == "error"] == []
    assert str(complete_checkpoints(model)[-1]) in of("model", found).found
    as_said = of("memory of a run", examined(tmp_path)).figures["needed"]
    assert of("memory of a run", found).figures["needed"] == as_said


def test_a_loss_that_is_no_number_is_warned_of(tmp_path):
    equal = {"mlm_loss": 1.0, "nsp_loss": 0.7}
    found = first_loss.judged(
        settings_of(tmp_path),
        {"mlm_loss": math.nan, "nsp_loss": 0.7},
        equal,
        "",
        is_trained=False,
    )
    assert [one.level for one in found] == ["warning"]


def test_a_corpus_without_pairs_is_not_judged_by_them(tmp_path):
    settings, log = settings_of(tmp_path), math.log(WORDS)
    equal = {"mlm_loss": log, "nsp_loss": math.log(2)}
    (found,) = first_loss.judged(settings, {"mlm_loss": log}, equal, "", is_trained=False)
    assert found.level == "ok" and "next sentence" not in found.found

    class NoPairs:
        def rows(self, positions: np.ndarray) -> dict[str, np.ndarray]:
            reader = doctor.corpora.open_stream(settings, 8)
            return reader.rows(positions) | {"next_sentence_weights": np.zeros(8, np.float32)}

    (found,) = first_loss.first_loss(settings, NoPairs())
    assert found.level == "ok" and set(found.figures) == {"mlm_loss", "equal_mlm_loss"}


def test_the_examples_are_opened_and_their_epochs_told(corpus, tmp_path):
    real = {"generated_dataset": False, "dataset_dir": corpus}
    found = built(tmp_path, **real, total_num_train_samples=160)
    assert "64 records, readable" in of("dataset_dir", found).found
    assert of("epochs", found).figures == {"epochs": 2.5}
    assert of("first loss", found).level == "ok"
    found = examined(tmp_path, **real, total_num_train_samples=64 * 200)
    assert of("epochs", found).level == "warning"
    assert of("first loss", found).found == "not computed: --no-build"


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        ({"dataset_dir": "nowhere"}, DataError, "no such folder"),
        ({"dataset_dir": "$NO_SUCH_VARIABLE/x"}, ConfigError, "the variable is not set"),
        ({"dataset_dir": False}, ConfigError, "is not given"),
        ({"max_seq_length": 12}, DataError, "have 16 places"),
        ({"bert_config__vocab_size": 200}, ConfigError, "vocabulary of 300"),
        ({"validation_dir": "nowhere"}, DataError, "no such folder"),
    ],
)
def test_records_that_do_not_fit_the_run_are_errors(change, kind, told, corpus, tmp_path):
    real = {"generated_dataset": False, "dataset_dir": corpus}
    errors = [one for one in examined(tmp_path, **(real | change)) if one.level == "error"]
    assert len(errors) == 1
    assert errors[0].kind is kind and told in errors[0].found and errors[0].remedy


def test_records_that_are_damaged_are_an_error(tmp_path):
    folder = corpus_of(tmp_path / "damaged", 8)
    data = bytearray((folder / "a.tfrecord").read_bytes())
    data[40] ^= 1
    (folder / "a.tfrecord").write_bytes(data)
    found = examined(tmp_path, generated_dataset=False, dataset_dir=folder)
    assert of("dataset_dir", found).kind is DataError
    assert "wrong checksum" in of("dataset_dir", found).found


def test_a_disk_without_room_for_the_checkpoints_is_an_error(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, keep_checkpoints=2)
    each = capacity.checkpoint_bytes(settings)
    for free, level in ((3 * each, "ok"), (3 * each - 1, "error")):
        monkeypatch.setattr(capacity, "free_bytes", lambda _, free=free: free)
        assert of("disk", list(capacity.run_folder(settings, None))).level == level


def test_checkpoints_that_are_kept_for_ever_need_room_too(tmp_path):
    more = {"keep_every_steps": 10, "total_num_train_samples": 800}
    found = of("disk", examined(tmp_path, **more)).figures
    assert found["kept"] == 3 + 10
    assert found["needed"] == 14 * found["checkpoint"]


def test_a_folder_that_is_not_given_or_cannot_be_written_is_an_error(tmp_path):
    settings = load(DoctorSettings, flags(), "bert doctor")[0]
    (found,) = capacity.run_folder(settings, None)
    assert found.level == "error" and "is not given" in found.found
    (tmp_path / "file").write_text("")
    (found,) = capacity.run_folder(settings_of(tmp_path / "file"), None)
    assert found.level == "error" and "cannot be written" in found.found
    dry = load(DoctorSettings, flags(dry_run=None), "bert doctor")[0]
    assert [one.level for one in capacity.run_folder(dry, None)] == ["ok"]


def test_a_folder_that_does_not_outlast_the_machine_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "mounts", lambda: "tmpfs / tmpfs rw 0 0\n")
    found = list(capacity.run_folder(settings_of(tmp_path), None))
    assert [one.level for one in found] == ["warning", "ok"]
    assert "gone when the machine restarts" in found[0].found


def test_memory_that_is_not_there_is_an_error_and_memory_in_use_a_warning(tmp_path, monkeypatch):
    needed = of("memory of a run", examined(tmp_path)).figures["needed"]
    for total, free, level in (
        (2 * needed, needed, "ok"),
        (2 * needed, needed - 1, "warning"),
        (needed, needed, "error"),
    ):
        monkeypatch.setattr(machine, "memory", lambda total=total, free=free: (total, free))
        found = examined(tmp_path)
        assert of("memory of a run", found).level == level
    monkeypatch.setattr(machine, "memory", lambda: (10**12, 10**6))
    loss = of("first loss", built(tmp_path))
    assert loss.level == "warning" and "not computed: the model needs" in loss.found


def test_all_replicas_and_devices_of_a_cpu_share_its_memory(tmp_path):
    one = of("memory of a run", examined(tmp_path)).figures["needed"]
    two = examined(tmp_path, global_batch__replicas=3)
    assert of("memory of a run", two).figures["needed"] == pytest.approx(3 * one, rel=0.2)


def test_gpus_are_judged_one_by_one(tmp_path):
    settings = settings_of(tmp_path, global_batch__replicas=2)
    alone = capacity.Processes(())
    for number, level in ((1, "error"), (2, "ok")):
        assert [
            one.level for one in capacity.the_layout(settings, alone, "GPU", number, 10**9)
        ] == [level]
    for memory, level in ((10**6, "error"), (10**10, "ok")):
        assert [one.level for one in capacity.room_for_it(settings, alone, "GPU", memory)] == [
            level
        ]


def test_replicas_that_cannot_be_divided_among_processes_are_an_error(tmp_path, monkeypatch):
    cluster = {"worker": ["a:2222", "b:2222"]}
    told = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    monkeypatch.setenv("TF_CONFIG", told)
    found = examined(tmp_path, global_batch__replicas=3)
    assert of("layout", found).level == "error" and of("layout", found).kind is ConfigError
    monkeypatch.setenv("TF_CONFIG", "{nonsense")
    found = examined(tmp_path)
    assert of("processes", found).level == "error" and "TF_CONFIG" in of("processes", found).found


def test_a_layout_is_chosen_as_the_run_would_choose_it(tmp_path):
    found = examined(tmp_path, parallel__layout="auto")
    assert of("layout", found).level == "ok" and of("layout", found).found.startswith("chosen: ")


@pytest.mark.parametrize(
    ("wanted", "flag", "kind", "level"),
    [
        ("float32", "", "CPU", "ok"),
        ("mixed_bfloat16", "avx2", "CPU", "warning"),
        ("mixed_bfloat16", "amx_bf16", "CPU", "ok"),
        ("mixed_float16", "avx512_bf16", "CPU", "warning"),
        ("float16", "avx2", "GPU", "ok"),
    ],
)
def test_a_number_format_that_the_processor_does_not_have_is_warned_of(
    wanted, flag, kind, level, tmp_path, monkeypatch
):
    monkeypatch.setattr(machine, "processor_text", lambda: f"flags : fpu {flag}\n")
    settings = settings_of(tmp_path, precision=wanted)
    assert [one.level for one in capacity.precision(settings, kind)] == [level]


def test_findings_are_printed_as_json_alone_where_their_place_is_a_dash(capsys):
    doctor.run(load(DoctorSettings, ["--json", "-"], "bert doctor")[0])
    told = json.loads(capsys.readouterr().out)
    assert told["errors"] == 0 and told["findings"]


def test_all_findings_are_printed_and_written_and_the_first_error_decides(tmp_path, capsys):
    settings = settings_of(
        tmp_path, generated_dataset=False, dataset_dir=tmp_path / "none", json=tmp_path / "d.json"
    )
    with pytest.raises(DataError, match=r"dataset_dir: is not in order \(1 error, .* above\)"):
        doctor.run(settings)
    lines = capsys.readouterr().out.splitlines()
    told = json.loads((tmp_path / "d.json").read_text(encoding="utf-8"))
    assert len(lines) == len(told["findings"]) + 1
    assert told["errors"] == 1 and lines[-1].startswith("1 error, ")
    wrong = next(one for one in told["findings"] if one["level"] == "error")
    assert wrong["what"] == "dataset_dir" and wrong["found"] and wrong["remedy"]
    assert f"{wrong['found']}; {wrong['remedy']}" in "\n".join(lines)


def test_the_first_of_several_errors_decides_the_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: (10**6, 10**6))
    settings = settings_of(tmp_path, generated_dataset=False, dataset_dir=tmp_path / "none")
    with pytest.raises(BertError) as caught:
        doctor.run(settings)
    assert caught.type is DataError and caught.value.exit_code == DataError.exit_code
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 errors, ")


def test_the_machine_alone_is_looked_at_without_a_run(capsys):
    doctor.run(load(DoctorSettings, [], "bert doctor")[0])
    out = capsys.readouterr().out
    assert "python " in out and "devices " in out
    assert "plan " not in out and "first loss" not in out


def test_a_tensorflow_that_cannot_be_loaded_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "BROKEN", "ImportError: libcudart.so.12: cannot open")
    found = examined(tmp_path)
    assert found[-1].level == "error" and "libcudart" in found[-1].found
    assert of("processor", found).level == "ok"


@pytest.mark.parametrize(("micro_batches", "level"), [(1, "warning"), (64, "ok")])
def test_stages_that_wait_for_one_another_are_warned_of(tmp_path, micro_batches, level):
    found = of(
        "layout",
        examined(
            tmp_path,
            global_batch__grad_acc_steps_per_replica=micro_batches,
            bert_config__num_hidden_layers=2,
            parallel__pipeline_stages='[["emb", "hid"], ["hid"], ["enc_out", "pool", "heads"]]',
            parallel__pipeline_device_mapping="[0, 1, 0]",
        ),
    )
    assert found.level == level
    assert ("--parallel.pipeline-stages null" in found.remedy) == (level == "warning")
