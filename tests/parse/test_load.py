"""Settings from files and flags: origins, what overrides what, the shipped configs, and every mistake at once."""

import json
from pathlib import Path

import pytest
from support.orders import order, refusal
from support.settings import RUN

from bert_cli.config.shipped import named_configs
from bert_cli.errors import ConfigError
from bert_cli.parse.load import _origin_of, changed, read_config
from bert_cli.planning.layout import parameters, propose, stages_of
from bert_cli.planning.plan import make_plan

SMALL = RUN | {
    "global_batch": {"micro_batch_size": 2, "replicas": 1, "grad_acc_steps_per_replica": 3},
    "total_num_train_samples": 540,
}
ABOUT = {"what": "base", "command": "bert pretrain --config base.json", "expect": "little"}
TINY = "pretrain --config pretrain_tiny_128_phase1"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, with base.json for configs that extend it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    write("base.json", SMALL)


def write(name: str, content: object) -> None:
    Path(name).write_text(json.dumps(content), encoding="utf-8")


def extending(**changes: object) -> dict:
    return {"extends": "base.json", **changes}


def test_a_file_extends_another_one_without_its_description():
    write("base.json", SMALL | {"about": ABOUT})
    settings, loaded = order("pretrain", extending(global_batch={"replicas": 4}, seed=7))
    batch = settings.global_batch
    assert (batch.replicas, batch.micro_batch_size, settings.seed) == (4, 2, 7)
    assert settings.about is None
    assert not [where for where in loaded.origins if where.startswith("about")]
    about = order("pretrain", extending(about={"what": "mine"}))[0].about
    assert (about.what, about.expect) == ("mine", "little")


def test_a_variable_that_is_not_set_is_free_where_no_records_are_opened():
    for corpora in ('["$UNSET/a", "$UNSET/b"]', '[{"path": "$UNSET/a"}, {"path": "$UNSET/b"}]'):
        line = f"pretrain --config pretrain_base_128_phase1 --dataset-dir '{corpora}'"
        assert order(f"{line} --generated-dataset")[0].generated_dataset
        assert "the variable is not set" in refusal(line)


TRIAL = "pretrain --global-batch.replicas 4 --dry-run"


def test_the_origin_of_a_group_is_the_last_file_or_flag_that_sets_a_member():
    for line, origin in (("pretrain", "c.json"), (TRIAL, "--global-batch.replicas")):
        _, loaded = order(line, extending(global_batch={"grad_acc_steps_per_replica": 4}))
        assert _origin_of("global_batch", loaded.origins) == origin


def test_a_list_given_as_a_flag_replaces_that_of_the_file_and_null_unsets_it():
    first = {"pipeline_stages": [["emb", "hid*2", "enc_out", "pool", "heads"]]}
    config = SMALL | {"bert_config": {"num_hidden_layers": 2}, "parallel": first}
    flag = "--parallel.pipeline-stages"
    stages = '\'[["emb"],["hid*2","enc_out","pool","heads"]]\''
    line = f"pretrain {flag} {stages} --parallel.pipeline-device-mapping [0,0]"
    expected = [["emb"], ["hid", "hid", "enc_out", "pool", "heads"]]
    assert order(line, config)[0].parallel.pipeline_stages == expected
    assert order(f"pretrain {flag} null", config)[0].parallel.pipeline_stages is None


def test_a_config_extends_a_shipped_one_by_name_or_first_one_of_its_folder():
    write("mine.json", {"extends": "pretrain_tiny_128_phase1.json", "seed": 5})
    assert read_config(Path("mine.json")).values["max_seq_length"] == 128
    write("pretrain_tiny_128_phase1.json", {"max_seq_length": 7})
    assert read_config(Path("mine.json")).values == {"max_seq_length": 7, "seed": 5}


def test_an_unset_variable_is_reported_with_every_other_mistake(monkeypatch):
    config = SMALL | {"dataset_dir": "$DATASETS_DIR/128"}
    lines = refusal("pretrain --seed many --log-every-steps 0", config).splitlines()
    assert len(lines) == 3 and "the variable is not set" in "".join(lines)
    assert "seed" in lines[0] and "log_every_steps" in lines[1]
    assert order("pretrain --dataset-dir here", config)[0].dataset_dir == "here"
    line = "squad --config squad_base --train-file a.json"
    order(f"{line} --validation-file b.json")
    text = refusal(line)
    assert text.startswith("dataset_dir (") and "the variable is not set" in text
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    assert order("pretrain", config)[0].dataset_dir == "/corpora/128"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("extract $PLACE/dump out", "dump"),
        ("extract dump ~/$PLACE", "out"),
        ("tokenize in out --vocab $PLACE/vocab", "vocab"),
        ("vocab in out --extend ${PLACE} --size +9", "extend"),
        ("index $PLACE", "folder"),
        ("predict $PLACE/model 'text with $5 and $NOTHING'", "model"),
        ("predict model --input $PLACE", "input"),
        ("export model $PLACE --format hf", "out"),
        ("average $PLACE out --last 2", "run"),
        ("plot $PLACE --output x", "runs"),
        (f"{TINY} --generated-dataset --pretrained-ckpt-path $PLACE", "pretrained_ckpt_path"),
    ],
)
def test_variables_are_expanded_in_every_path_by_one_rule(line, name, monkeypatch):
    monkeypatch.setenv("PLACE", "here")
    monkeypatch.setenv("HOME", "/home/me")
    value = getattr(order(line)[0], name)
    value = value[0] if isinstance(value, list) else value
    word = next(word for word in line.split() if "PLACE" in word)
    expected = word.replace("${PLACE}", "here").replace("$PLACE", "here")
    assert str(value) == expected.replace("~", "/home/me")
    monkeypatch.delenv("PLACE")
    assert "the variable is not set" in refusal(line)


# The values of the original's configs: sequence length and predictions, micro-batch x replicas x
# accumulation, loss scale, learning rate and warm-up, blocks and device of each stage. Only the vocabulary
# size differs: Google's 30,522 for their 30,400.
PHASE_1, PHASE_2 = (0.006, 0.28), (0.002828, 0.129)
BASE, LARGE, SMALLEST = (1, 4, 4, 4, 3), (4, 7, 7, 7, 3), (1, 3, 2)
FOUR, TWO = (0, 1, 2, 3, 0), (0, 1, 0)
ORIGINAL_NUMBERS = {
    "pretrain_base_128_phase1": ((128, 20), (32, 4, 510), 4096, PHASE_1, BASE, FOUR),
    "pretrain_base_128_phase1_pod4": ((128, 20), (32, 1, 2040), 4096, PHASE_1, BASE, FOUR),
    "pretrain_base_128_phase1_POD64": ((128, 20), (32, 16, 130), 4096, PHASE_1, BASE, FOUR),
    "pretrain_base_384_phase2": ((384, 56), (8, 4, 510), 4096, PHASE_2, BASE, FOUR),
    "pretrain_base_512_phase2": ((512, 76), (8, 4, 510), 4096, PHASE_2, BASE, FOUR),
    "pretrain_large_128_phase1": ((128, 20), (8, 4, 2040), 32768, PHASE_1, LARGE, FOUR),
    "pretrain_large_384_phase2": ((384, 56), (2, 4, 2040), 32768, PHASE_2, LARGE, FOUR),
    "pretrain_large_512_phase2": ((512, 76), (2, 4, 2040), 32768, PHASE_2, (3, 7, 7, 8, 3), FOUR),
    "pretrain_tiny_128_phase1": ((128, 20), (2, 1, 600), 1, PHASE_1, SMALLEST, TWO),
    "pretrain_groupbert_base_128_phase1": ((128, 20), (32, 4, 510), 512, (0.012, 0.14), BASE, FOUR),
    "pretrain_groupbert_base_512_phase2": ((512, 76), (8, 4, 510), 512, (0.01, 0.13), BASE, FOUR),
    "pretrain_groupbert_tiny_128_phase1": ((128, 20), (2, 1, 600), 1, (0.012, 0.14), SMALLEST, TWO),
}  # fmt: skip
WIDTHS_AND_LAYERS = {"base": (768, 12), "large": (1024, 24), "tiny": (128, 2)}


@pytest.mark.parametrize("name", ORIGINAL_NUMBERS)
def test_a_shipped_config_has_the_numbers_of_the_original(name, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    settings, _ = order(f"pretrain --config {name}")
    batch, options, layout = settings.global_batch, settings.optimizer_opts, settings.parallel
    rate, config = options.learning_rate, settings.bert_config
    is_group = config.architecture == "groupbert"
    _, size, _, phase, *_ = name.replace("groupbert_", "").split("_")
    assert (
        (settings.max_seq_length, settings.max_predictions_per_seq),
        (batch.micro_batch_size, batch.replicas, batch.grad_acc_steps_per_replica),
        options.loss_scaling,
        (rate.max_learning_rate, rate.warmup_frac),
        tuple(len(stage) for stage in layout.pipeline_stages),
        tuple(layout.pipeline_device_mapping),
    ) == ORIGINAL_NUMBERS[name]
    kind = is_group, rate.warmup_power, config.layer_norm_eps
    assert kind in ((True, 0.5, 1e-3), (False, 1.0, 1e-12))
    assert (config.hidden_size, config.num_hidden_layers) == WIDTHS_AND_LAYERS[size]
    assert (config.vocab_size, config.attention_probs_dropout_prob) == (30522, 0.0)
    kinds = (options.name, options.weight_decay_rate, rate.schedule_name, settings.seed)
    assert kinds == ("LAMB", 0.01, "up_down", 1984)
    clipped = (options.max_gradient_norm, "gamma" in options.no_weight_decay)
    assert clipped == ((1.0, True) if is_group else (None, False))
    samples = {"phase1": 460_849_152, "phase2": 34_239_360}
    assert settings.total_num_train_samples == samples[phase]


# Layers, sizes D and F, heads; learning rate and decay, which is Ettin's divided by the rate; weights with Ettin's
# vocabulary, in millions.
ETTIN = {
    "17m": ((7, 256, 384, 4), (3e-3, 0.1), 16.9),
    "32m": ((10, 384, 576, 6), (3e-3, 0.1), 32.1),
    "68m": ((19, 512, 768, 8), (3e-3, 0.1), 68.5),
    "base": ((22, 768, 1152, 12), (8e-4, 0.0125), 149.7),
}


@pytest.mark.parametrize("size", ETTIN)
def test_a_modernbert_has_the_numbers_of_ettin(size):
    settings, _ = order(f"pretrain --config pretrain_modern_{size}_1024 --dataset-dir x")
    config, options = settings.bert_config, settings.optimizer_opts
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    assert (
        tuple(getattr(config, name) for name in sizes),
        (options.learning_rate.max_learning_rate, options.weight_decay_rate),
        round(parameters(settings) / 1e6, 1),
    ) == ETTIN[size]
    assert settings.global_batch.examples == 4608 and options.name == "StableAdamW"


def test_the_later_phases_of_a_modernbert_end_at_a_fiftieth_of_its_first_rate():
    extended, last = (
        order(f"pretrain --config {name} --dataset-dir x --pretrained-ckpt-path y")[0]
        for name in ("pretrain_modern_8192", "pretrain_modern_8192_decay")
    )
    first = ETTIN["base"][1][0]
    before = extended.optimizer_opts.learning_rate
    rate = last.optimizer_opts.learning_rate
    assert before.max_learning_rate == first
    assert rate.max_learning_rate == first * before.final_fraction
    assert rate.max_learning_rate * rate.final_fraction == pytest.approx(first / 50)
    assert (extended.masking.probability, last.masking.probability) == (0.3, 0.15)
    # The shape comes from the checkpoint.
    thetas = {"architecture", "global_rope_theta", "local_rope_theta"}
    assert last.bert_config.model_fields_set == thetas


def test_squad_with_groupbert_has_the_numbers_of_the_original():
    settings, _ = order("squad --config squad_groupbert_base --dataset-dir x")
    options, rate = settings.optimizer_opts, settings.optimizer_opts.learning_rate
    assert (options.name, rate.max_learning_rate, rate.warmup_frac) == ("LAMB", 4e-4, 0.1)
    assert (settings.num_epochs, settings.global_batch.examples) == (2.0, 40)
    assert options.max_gradient_norm == 1.0 and "gamma" in options.no_weight_decay


def test_layout_auto_does_not_check_the_stages_that_it_replaces():
    parallel = {"pipeline_stages": [["emb", "hid*3"]], "pipeline_device_mapping": [0, 2]}
    settings, _ = order("pretrain --parallel.layout auto", SMALL | {"parallel": parallel})
    complete = [["emb", *["hid"] * 12, "enc_out", "pool", "heads"]]
    assert stages_of(settings) == (complete, [0])
    chosen = propose(settings, 2, 10**12).parallel
    assert (chosen.pipeline_stages, chosen.pipeline_device_mapping) == (complete, [0])


def test_shipped_configs_leave_the_vocabulary_to_the_records():
    for name, path in named_configs().items():
        model = json.loads(path.read_text()).get("bert_config", {})
        assert "vocab_size" not in model or not name.startswith("pretrain"), name


SHIPPED = [
    (json.loads(path.read_text())["about"]["command"].split(" --config")[0].split()[-1], name)
    for name, path in named_configs().items()
]
FILES = "--train-file a --validation-file b --evaluate-every-steps 3"


@pytest.mark.parametrize(("command", "name"), [("classify", ""), ("ner", ""), *SHIPPED])
def test_the_settings_json_of_a_run_is_a_config(command, name, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    first, loaded = order(f"{command} --config {name}" if name else f"{command} {FILES}")
    plan = make_plan(first.model_copy(update={"total_num_train_samples": 10**6}), 10**6)
    assert loaded.no_effect == {} and plan.total_steps > 0
    if name:
        assert f"{command} --config configs/{name}.json" in first.about.command
    again, _ = order(command, first.model_dump(mode="json"))
    # Its `~` was expanded.
    assert again.model_dump(exclude={"cache_dir"}) == first.model_dump(exclude={"cache_dir"})


def test_a_changed_copy_keeps_what_was_set_and_is_checked_like_a_file():
    settings, _ = order("squad --version-2 --null-score-diff-threshold 1")
    copy = changed(settings, seed=7, global_batch={"replicas": 2})
    assert (copy.seed, copy.version_2, copy.global_batch.replicas) == (7, True, 2)
    assert copy.model_fields_set == settings.model_fields_set | {"seed"}
    assert (settings.seed, settings.global_batch.replicas) == (1984, 1)
    settings, _ = order("classify", {"class_weights": {"v1.0": 5.0}})
    assert changed(settings, seed=7).class_weights == {"v1.0": 5.0}
    settings, _ = order("squad --version-2 --null-score-diff-threshold 1")
    with pytest.raises(ConfigError, match="null_score_diff_threshold: has no effect without"):
        changed(settings, version_2=False)
