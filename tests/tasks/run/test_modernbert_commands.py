"""A ModernBERT from records to predictions: pre-training on packs, continued, fine-tuned and asked."""

import json
import shutil

import pytest
import safetensors.numpy
from support.bert import run_python
from support.hf_models import need
from support.tiny_models import (
    PIECES,
    RUN_OF_RECORDS,
    SENTENCES,
    flags_of,
    write_model,
    write_reviews,
)

from bert_cli.cli import main
from bert_cli.facts.architectures import shape_of

SHAPE = {
    "bert-config.architecture": "modernbert",
    "bert-config.hidden-size": 32,
    "bert-config.num-hidden-layers": 4,
    "bert-config.num-attention-heads": 4,
    "bert-config.intermediate-size": 48,
    "bert-config.max-position-embeddings": 64,
    "bert-config.local-attention": 4,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `vocab`, and records `single` of 32 positions."""
    home = tmp_path_factory.mktemp("modernbert")
    vocab = write_model(home / "vocab")
    (home / "text").mkdir()
    (home / "text/a.txt").write_text("\n".join([*SENTENCES, ""] * 5))
    words = ["tokenize", home / "text", home / "single", "--vocab", vocab, "--no-nsp"]
    words += ["--sequence-length", 32, "--mask-tokens", 5, "--masking", "dynamic", "--processes", 1]
    assert main([*map(str, words)]) == 0
    return home


def pretrain(home, run, **changes):
    folders = {"dataset-dir": home / "single", "save-ckpt-path": home / run}
    return main(["pretrain", *flags_of(RUN_OF_RECORDS | SHAPE | folders, **changes)])


@pytest.fixture(scope="module")
def trained(home):
    packs = {"max_sequences_per_pack": 3, "max_seq_length": 48, "max_predictions_per_seq": 12}
    packs["total_num_train_samples"] = 24
    assert pretrain(home, "run", **packs) == 0
    return home / "run"


def test_an_export_is_compared_where_a_position_reads_a_token(trained, tmp_path, capsys):
    """A window of padding alone has other outputs in transformers."""
    need("torch", "transformers")
    assert main(["export", str(trained), str(tmp_path / "hf"), "--format", "hf"]) == 0
    assert "its outputs differ by at most" in capsys.readouterr().out
    written = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert written["model_input_names"] == ["input_ids", "attention_mask"]


def test_an_encoder_without_a_head_is_exported_without_a_pooler(trained, tmp_path):
    need("torch", "transformers")
    folder = shutil.copytree(max(trained.glob("step_*")), tmp_path / "encoder")
    described = json.loads((folder / "config.json").read_text())
    described["architectures"] = ["ModernBertModel"]
    (folder / "state.json").unlink()  # it has a checksum of config.json
    (folder / "config.json").write_text(json.dumps(described))
    exported = tmp_path / "exported"
    assert main(["export", str(folder), str(exported), "--format", "hf"]) == 0
    weights = safetensors.numpy.load_file(exported / "model.safetensors")
    assert weights and not [name for name in weights if "pooler" in name]


@pytest.mark.slow
def test_other_rotary_positions_and_a_task_start_from_the_checkpoint(home, trained, bert, capsys):
    start = {"pretrained_ckpt_path": trained, "bert_config__global_rope_theta": 320000}
    assert pretrain(home, "longer", **start) == 0
    assert "starts from the weights" in capsys.readouterr().out
    saved = home / "longer/step_00000002/model.safetensors"
    rope = json.loads(saved.with_name("config.json").read_text())["rope_parameters"]
    assert rope["full_attention"]["rope_theta"] == 320000
    reviews = write_reviews(home / "reviews.csv", 24)
    words = ["classify", "--pretrained-ckpt-path", trained, "--train-file", reviews]
    words += ["--save-ckpt-path", home / "classifier", "--num-epochs", 1, "--max-seq-length", 48]
    words += ["--global-batch.micro-batch-size", 8, "--held-out-fraction", 0.2]
    assert "new weights from the seed: glue_head/classifier" in bert(*words).out
    assert main(["predict", str(home / "classifier"), "the film was good"]) == 0
    assert json.loads(capsys.readouterr().out)["label"] in ("negative", "positive")


PEAK = """
from bert_cli.cli import main
assert main(words) == 0
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def peak_of(*words):
    """Return the most bytes of memory that a command uses."""
    done = run_python(f"words = {[*map(str, words)]}\n{PEAK}")
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.split()[-1])


@pytest.mark.slow
def test_memory_of_predictions_grows_with_the_length_and_not_with_its_square(tmp_path):
    """All scores of 4 heads and 8,192 positions would take 1.1 GB for each array."""
    shape = {name.partition(".")[2].replace("-", "_"): value for name, value in SHAPE.items()}
    shape |= {"max_position_embeddings": 8192, "local_attention": 128}
    shape |= {"vocab_size": len(PIECES), "hidden_size": 64}
    model = write_model(tmp_path / "model", shape_of(shape))
    peaks = []
    for tokens in (512, 2048, 8192):
        text = tmp_path / f"{tokens}.txt"
        text.write_text("good " * (tokens - 2))
        peaks.append(peak_of("predict", model, "--task", "embed", "--input", text))
    assert peaks[1] - peaks[0] < 150e6 and peaks[2] - peaks[0] < 400e6, peaks


@pytest.mark.slow
def test_training_computes_few_scores_of_long_sequences_at_a_time():
    """With all scores at once, 8,192 positions take 7.7 GB more than 1,024; else 0.5 to 1.15 GB, by machine."""
    sizes = {"max-seq-length": 8192, "max-predictions-per-seq": 1000, "total-num-train-samples": 4}
    sizes |= {"bert-config.max-position-embeddings": 8192, "bert-config.local-attention": 128}
    sizes |= {"bert-config.hidden-size": 64, "bert-config.vocab-size": 2000}
    sizes |= {"global-batch.micro-batch-size": 1, "generated-dataset": None, "dry-run": None}
    peaks = [
        peak_of("pretrain", *flags_of(RUN_OF_RECORDS | SHAPE | sizes, max_seq_length=length))
        for length in (1024, 8192)
    ]
    assert peaks[1] - peaks[0] < 2e9, peaks
