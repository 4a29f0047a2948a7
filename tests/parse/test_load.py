"""Settings from files and flags: origins, renames, and every mistake at once."""

import json
from pathlib import Path

import pytest

from bert_cli.commands import COMMANDS
from bert_cli.config.data import ExtractSettings, IndexSettings, TokenizeSettings, VocabSettings
from bert_cli.config.finetune import SquadSettings
from bert_cli.config.init import InitSettings
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.tools import PlotSettings
from bert_cli.config.use import AverageSettings, ExportSettings, PredictSettings
from bert_cli.errors import ConfigError
from bert_cli.parse.load import changed, describe, load, named_configs, read_config
from bert_cli.planning.layout import parameters, propose, stages_of
from bert_cli.planning.plan import Length, make_plan
from bert_cli.planning.workload import workload_of

SMALL = {
    "max_seq_length": 32,
    "max_predictions_per_seq": 5,
    "global_batch": {"micro_batch_size": 2, "replicas": 1, "grad_acc_steps_per_replica": 3},
    "optimizer_opts": {"name": "LAMB", "learning_rate": {"max_learning_rate": 0.006}},
    "total_num_train_samples": 540,
}


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def pretrain(*arguments: str):
    return load(PretrainSettings, arguments, "bert pretrain")


def rejection(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        pretrain(*arguments)
    return str(caught.value)


def test_a_file_extends_another_one_without_its_description(tmp_path):
    about = {"what": "base", "command": "bert pretrain --config base.json", "expect": "little"}
    write(tmp_path / "base.json", {**SMALL, "about": about})
    more = {"extends": "base.json", "global_batch": {"replicas": 4}, "seed": 7}
    settings, loaded = pretrain("--config", write(tmp_path / "more.json", more))
    batch = settings.global_batch
    assert (batch.replicas, batch.micro_batch_size, settings.seed) == (4, 2, 7)
    assert settings.about is None
    assert not [where for where in loaded.origins if where.startswith("about")]
    part = {"extends": "base.json", "about": {"what": "mine"}}
    about = pretrain("--config", write(tmp_path / "part.json", part))[0].about
    assert (about.what, about.expect) == ("mine", "little")


def test_a_variable_that_is_not_set_is_free_where_no_records_are_opened():
    for corpora in ('["$UNSET/a", "$UNSET/b"]', '[{"path": "$UNSET/a"}, {"path": "$UNSET/b"}]'):
        words = ["--config", "pretrain_base_128_phase1", "--dataset-dir", corpora]
        assert pretrain(*words, "--generated-dataset")[0].generated_dataset
        assert "the variable is not set" in rejection(*words)


def test_flags_override_files_and_every_value_has_an_origin(tmp_path):
    config = write(tmp_path / "c.json", SMALL)
    settings, loaded = pretrain("--config", config, "--global-batch.replicas", "4", "--dry-run")
    assert settings.dry_run
    lines = {line.split()[0]: line for line in describe(settings, loaded).splitlines()}
    assert lines["global_batch.replicas"].endswith("4  (--global-batch.replicas)")
    assert lines["global_batch.micro_batch_size"].endswith(f"2  ({config})")
    assert lines["seed"].endswith("1984  (default)")


def test_arguments_and_flags_with_another_name_than_their_setting_have_their_origin():
    words = ["text", "out", "--from", "model", "--for", "search", "--dry-run"]
    settings, loaded = load(InitSettings, words, "bert init")
    lines = {line.split()[0]: line for line in describe(settings, loaded).splitlines()}
    assert lines["input"].endswith('"text"  (argument)')
    assert lines["from"].endswith('"model"  (--from)')
    assert lines["for"].endswith('"search"  (--for)')
    assert lines["hours"].endswith("8.0  (default)")


def test_a_list_given_as_a_flag_replaces_that_of_the_file_and_null_unsets_it(tmp_path):
    shape = {"bert_config": {"num_hidden_layers": 2}}
    first = {"pipeline_stages": [["emb", "hid*2", "enc_out", "pool", "heads"]]}
    config = write(tmp_path / "c.json", {**SMALL, **shape, "parallel": first})
    stages = '[["emb"],["hid*2","enc_out","pool","heads"]]'
    flags = ["--parallel.pipeline-stages", stages, "--parallel.pipeline-device-mapping", "[0,0]"]
    settings, _ = pretrain("--config", config, *flags)
    expected = [["emb"], ["hid", "hid", "enc_out", "pool", "heads"]]
    assert settings.parallel.pipeline_stages == expected
    settings, _ = pretrain("--config", config, "--parallel.pipeline-stages", "null")
    assert settings.parallel.pipeline_stages is None


def test_all_mistakes_are_reported_at_once_with_origin_and_nearest_name(tmp_path):
    bad = {"global_batch": {"micro_batch_size": 0, "acumulation": 3}, "precison": "float16"}
    bad |= {"replicas": 4, "optimizer_opts": {**SMALL["optimizer_opts"], "name": "LAMP"}}
    config = write(tmp_path / "bad.json", SMALL | bad | {"compile": "all"})
    text = rejection("--config", config, "--no-compile-only")
    origin = str(tmp_path / "bad.json")
    assert len(text.splitlines()) == 6
    assert f"compile ({origin}): got 'all'" in text  # not by --compile-only, which begins alike
    assert "did you mean 'global_batch.replicas'?" in text
    assert f"precison ({origin}): no such setting; did you mean 'precision'?" in text
    assert f"global_batch.acumulation ({origin}): no such setting" in text
    assert f"global_batch.micro_batch_size ({origin}): got 0" in text
    assert f"optimizer_opts.name ({origin}): got 'LAMP'" in text
    text = rejection("--generated-dataset")
    assert (
        "max_seq_length: is missing; pass --max-seq-length or set it in a config (--config FILE)"
        in text
    )
    needed = "--optimizer-opts.name and --optimizer-opts.learning-rate.max-learning-rate"
    assert f"optimizer_opts: is missing; pass {needed} or set" in text


def test_a_config_extends_a_shipped_one_by_name_or_first_one_of_its_folder(tmp_path):
    mine = write(tmp_path / "mine.json", {"extends": "pretrain_tiny_128_phase1.json", "seed": 5})
    assert read_config(Path(mine)).values["max_seq_length"] == 128
    write(tmp_path / "pretrain_tiny_128_phase1.json", {"max_seq_length": 7})
    assert read_config(Path(mine)).values == {"max_seq_length": 7, "seed": 5}


def test_a_missing_config_is_answered_with_the_nearest_of_its_folder_or_of_the_shipped(tmp_path):
    write(tmp_path / "base.json", SMALL)
    mine = write(tmp_path / "mine.json", {"extends": "bases.json"})
    text = rejection("--config", mine)
    assert f"extends in {mine} (bases.json): no such file; did you mean 'base.json'?" in text
    text = rejection("--config", str(tmp_path / "mine.jsn"))
    assert f"did you mean '{mine}'?" in text
    text = rejection("--config", "pretrain_base_128_phase_1")
    assert "did you mean 'pretrain_base_128_phase1'?" in text
    # A file suffix alone is no likeness.
    assert "did you mean" not in rejection("--config", str(tmp_path / "zzz.json"))


def test_a_config_is_one_nested_json_object(tmp_path):
    path = tmp_path / "c.json"
    for text, message in (
        ("[1]", f"{path}: Input should be an object"),
        ('{"wandb.enabled": true}', "wandb.enabled"),
        ('{"extends": "c.json"}', "extends itself"),
    ):
        path.write_text(text, encoding="utf-8")
        assert message in rejection("--config", str(path))


def test_an_unset_variable_is_reported_with_every_other_mistake(tmp_path, monkeypatch):
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    config = write(tmp_path / "c.json", {**SMALL, "dataset_dir": "$DATASETS_DIR/128"})
    lines = rejection("--config", config, "--seed", "many", "--log-every-steps", "0").splitlines()
    assert len(lines) == 3 and "the variable is not set" in "".join(lines)
    assert "seed" in lines[0] and "log_every_steps" in lines[1]
    settings, _ = pretrain("--config", config, "--dataset-dir", str(tmp_path))
    assert settings.dataset_dir == str(tmp_path)
    files = ["--train-file", "a.json", "--validation-file", "b.json"]
    load(SquadSettings, ["--config", "squad_base", *files], "bert squad")
    with pytest.raises(ConfigError, match=r"dataset_dir .*the variable is not set"):
        load(SquadSettings, ["--config", "squad_base", *files[:2]], "bert squad")
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    assert pretrain("--config", config)[0].dataset_dir == "/corpora/128"


TINY = ["--config", "pretrain_tiny_128_phase1", "--generated-dataset"]


@pytest.mark.parametrize(
    ("settings", "words", "name"),
    [
        (ExtractSettings, ["$PLACE/dump", "out"], "dump"),
        (ExtractSettings, ["dump", "~/$PLACE"], "out"),
        (TokenizeSettings, ["in", "out", "--vocab", "$PLACE/vocab"], "vocab"),
        (VocabSettings, ["in", "out", "--extend", "${PLACE}", "--size", "+9"], "extend"),
        (IndexSettings, ["$PLACE"], "folder"),
        (PredictSettings, ["$PLACE/model", "text with $5 and $NOTHING"], "model"),
        (PredictSettings, ["model", "--input", "$PLACE"], "input"),
        (ExportSettings, ["model", "$PLACE", "--format", "hf"], "out"),
        (AverageSettings, ["$PLACE", "out", "--last", "2"], "run"),
        (PlotSettings, ["$PLACE", "--output", "x"], "runs"),
        (PretrainSettings, [*TINY, "--pretrained-ckpt-path", "$PLACE"], "pretrained_ckpt_path"),
    ],
)
def test_variables_are_expanded_in_every_path_by_one_rule(settings, words, name, monkeypatch):
    monkeypatch.setenv("PLACE", "here")
    monkeypatch.setenv("HOME", "/home/me")
    value = getattr(load(settings, words, "bert")[0], name)
    value = value[0] if isinstance(value, list) else value
    word = next(word for word in words if "PLACE" in word)
    expected = word.replace("${PLACE}", "here").replace("$PLACE", "here")
    assert str(value) == expected.replace("~", "/home/me")
    monkeypatch.delenv("PLACE")
    with pytest.raises(ConfigError, match="the variable is not set"):
        load(settings, words, "bert")


# The values of the original's configs: sequence length and predictions, micro-batch x replicas x
# accumulation, loss scale, learning rate and warm-up, blocks and device of each stage. Only the vocabulary
# size differs: Google's 30,522 for their 30,400.
PHASE_1, PHASE_2 = (0.006, 0.28), (0.002828, 0.129)
BASE, LARGE, TINY = (1, 4, 4, 4, 3), (4, 7, 7, 7, 3), (1, 3, 2)
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
    "pretrain_tiny_128_phase1": ((128, 20), (2, 1, 600), 1, PHASE_1, TINY, TWO),
    "pretrain_groupbert_base_128_phase1": ((128, 20), (32, 4, 510), 512, (0.012, 0.14), BASE, FOUR),
    "pretrain_groupbert_base_512_phase2": ((512, 76), (8, 4, 510), 512, (0.01, 0.13), BASE, FOUR),
    "pretrain_groupbert_tiny_128_phase1": ((128, 20), (2, 1, 600), 1, (0.012, 0.14), TINY, TWO),
}  # fmt: skip
WIDTHS_AND_LAYERS = {"base": (768, 12), "large": (1024, 24), "tiny": (128, 2)}


@pytest.mark.parametrize("name", ORIGINAL_NUMBERS)
def test_a_shipped_config_has_the_numbers_of_the_original(name, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    settings, _ = pretrain("--config", name)
    batch, options, layout = settings.global_batch, settings.optimizer_opts, settings.parallel
    rate, config = options.learning_rate, settings.bert_config
    assert (
        (settings.max_seq_length, settings.max_predictions_per_seq),
        (batch.micro_batch_size, batch.replicas, batch.grad_acc_steps_per_replica),
        options.loss_scaling,
        (rate.max_learning_rate, rate.warmup_frac),
        tuple(len(stage) for stage in layout.pipeline_stages),
        tuple(layout.pipeline_device_mapping),
    ) == ORIGINAL_NUMBERS[name]
    widths = (config.hidden_size, config.num_hidden_layers)
    is_group = config.architecture == "groupbert"
    kind = is_group, rate.warmup_power, config.layer_norm_eps
    assert kind in ((True, 0.5, 1e-3), (False, 1.0, 1e-12))
    name = name.replace("groupbert_", "")
    assert widths == WIDTHS_AND_LAYERS[name.split("_")[1]]
    assert (config.vocab_size, config.attention_probs_dropout_prob) == (30522, 0.0)
    kinds = (options.name, options.weight_decay_rate, rate.schedule_name, settings.seed)
    assert kinds == ("LAMB", 0.01, "up_down", 1984)
    clipped = (options.max_gradient_norm, "gamma" in options.no_weight_decay)
    assert clipped == ((1.0, True) if is_group else (None, False))
    samples = 460_849_152 if name.split("_")[3] == "phase1" else 34_239_360
    assert settings.total_num_train_samples == samples


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
    settings, _ = pretrain("--config", f"pretrain_modern_{size}_1024", "--dataset-dir", "x")
    config, options = settings.bert_config, settings.optimizer_opts
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    assert (
        tuple(getattr(config, name) for name in sizes),
        (options.learning_rate.max_learning_rate, options.weight_decay_rate),
        round(parameters(workload_of(settings)) / 1e6, 1),
    ) == ETTIN[size]
    assert settings.global_batch.examples == 4608 and options.name == "StableAdamW"


def test_the_later_phases_of_a_modernbert_end_at_a_fiftieth_of_its_first_rate():
    flags = ("--dataset-dir", "x", "--pretrained-ckpt-path", "y")
    extended, _ = pretrain("--config", "pretrain_modern_8192", *flags)
    last, _ = pretrain("--config", "pretrain_modern_8192_decay", *flags)
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
    words = ["--config", "squad_groupbert_base", "--dataset-dir", "x"]
    settings, _ = load(SquadSettings, words, "bert squad")
    options, rate = settings.optimizer_opts, settings.optimizer_opts.learning_rate
    assert (options.name, rate.max_learning_rate, rate.warmup_frac) == ("LAMB", 4e-4, 0.1)
    assert (settings.num_epochs, settings.global_batch.examples) == (2.0, 40)
    assert options.max_gradient_norm == 1.0 and "gamma" in options.no_weight_decay


def test_the_run_folder_defaults_to_the_name_of_the_config(tmp_path):
    config = write(tmp_path / "mine.json", SMALL)
    assert pretrain("--config", config)[0].save_ckpt_path == Path("checkpoints/mine")
    mine = write(tmp_path / "own.json", {**SMALL, "save_ckpt_path": "b"})
    assert pretrain("--config", mine)[0].save_ckpt_path == Path("b")


def test_the_description_of_a_config_is_dropped_when_a_flag_changes_its_values(tmp_path):
    about = {"what": "small", "command": "bert pretrain --config c.json", "expect": "little"}
    config = write(tmp_path / "c.json", {**SMALL, "about": about, "dataset_dir": "a"})
    for flags in ([], ["--dataset-dir", "b"], ["--save-ckpt-path", "c"], ["--dry-run"]):
        assert pretrain("--config", config, *flags)[0].about is not None
    for flags in (["--total-num-train-samples", "9"], ["--global-batch.replicas", "2"]):
        assert pretrain("--config", config, *flags)[0].about is None


def test_a_contradiction_has_the_origin_of_the_last_value(tmp_path):
    base = write(tmp_path / "base.json", {**SMALL, "parallel": {"recompute": False}})
    by_stage = {"extends": "base.json", "parallel": {"recompute_by": "stage"}}
    child = write(tmp_path / "child.json", by_stage)
    assert f"parallel.recompute_by ({child}): has no effect" in rejection("--config", child)
    text = rejection("--config", base, "--parallel.recompute-by", "stage")
    assert "recompute_by (--parallel.recompute-by): has no" in text


def test_layout_auto_does_not_check_the_stages_that_it_replaces(tmp_path):
    parallel = {"pipeline_stages": [["emb", "hid*3"]], "pipeline_device_mapping": [0, 2]}
    config = write(tmp_path / "c.json", {**SMALL, "parallel": parallel})
    settings, _ = pretrain("--config", config, "--parallel.layout", "auto")
    complete = [["emb", *["hid"] * 12, "enc_out", "pool", "heads"]]
    assert stages_of(workload_of(settings)) == (complete, [0])
    chosen = propose(workload_of(settings), "GPU", 2, 10**12).parallel
    assert (chosen.pipeline_stages, chosen.pipeline_device_mapping) == (complete, [0])


def test_a_mistake_in_one_of_several_corpora_is_one_line_with_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wrong, expected in (
        ({"path": "a", "wieght": 3}, "wieght (c.json): no such setting; did you mean 'weight'?"),
        ({"path": "b", "weight": 0}, "weight (c.json): got 0; input should be greater"),
        ({"weight": 1}, "path (c.json): is missing; set it there"),
    ):
        write(tmp_path / "c.json", SMALL | {"dataset_dir": ["a", wrong]})
        (line,) = rejection("--config", "c.json").splitlines()
        assert line.startswith(f"dataset_dir.1.{expected}")


def test_shipped_configs_leave_the_vocabulary_to_the_records():
    for name, path in named_configs().items():
        model = json.loads(path.read_text()).get("bert_config", {})
        assert "vocab_size" not in model or not name.startswith("pretrain"), name


def test_the_accumulation_follows_from_the_examples_of_a_step(tmp_path):
    batch = {"micro_batch_size": 4, "examples_per_step": 64}
    mine = write(tmp_path / "mine.json", {**SMALL, "global_batch": batch})
    given = "--global-batch.grad-acc-steps-per-replica"
    auto = "--global-batch.micro-batch-size=auto"
    for flags, expected in (
        ([], (4, 1, 16, None)),
        (["--global-batch.replicas", "2"], (4, 2, 8, None)),
        ([given, "3"], (4, 1, 3, None)),
        (["--global-batch.examples-per-step", "32"], (4, 1, 8, None)),
        # Until the memory is known.
        ([auto], (1, 1, 64, 64)),
    ):
        settings, _ = pretrain("--config", mine, *flags)
        one = settings.global_batch
        sizes = one.micro_batch_size, one.replicas, one.grad_acc_steps_per_replica
        assert (*sizes, one.examples_per_step) == expected, flags
    settings, _ = pretrain("--config", write(tmp_path / "plain.json", SMALL), auto)
    assert settings.global_batch.examples_per_step == 1 * 2 * 3
    for flags, problem in (
        (["--global-batch.micro-batch-size", "5"], "64 cannot be divided into micro-batches of 5"),
        ([auto, given, "3"], "auto computes the accumulation"),
    ):
        assert problem in rejection("--config", mine, *flags)


def test_a_length_replaces_the_one_of_the_file_below(tmp_path):
    write(tmp_path / "base.json", SMALL)
    short = {"extends": "base.json", "num_epochs": 3}
    for in_file, flags, samples, epochs in (
        ({}, [], 540, None),
        ({"num_epochs": 3}, [], None, 3.0),
        ({"num_epochs": 3}, ["--total-num-train-samples", "40"], 40, None),
        ({"total_num_train_samples": 40}, ["--num-epochs", "2"], None, 2.0),
        # A run's settings.json has both names.
        ({"num_epochs": 3, "total_num_train_samples": None}, [], None, 3.0),
    ):
        mine = write(tmp_path / "mine.json", {"extends": "base.json", **in_file})
        settings, _ = pretrain("--config", mine, *flags)
        assert (settings.total_num_train_samples, settings.num_epochs) == (samples, epochs)
    both = write(tmp_path / "both.json", {**short, "total_num_train_samples": 40})
    for words in ([], ["--num-epochs", "2", "--total-num-train-samples", "40"]):
        assert "both set the length" in rejection("--config", both, *words)


def test_the_settings_json_of_a_run_is_a_config(tmp_path, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    files = ["--train-file", "a", "--validation-file", "b", "--evaluate-every-steps", "3"]
    cases = [("classify", files), ("ner", files)]
    cases += [(name.partition("_")[0], ["--config", name]) for name in named_configs()]
    for command, words in cases:
        kind = COMMANDS[command].settings_class()
        first, loaded = load(kind, words, "bert")
        plan = make_plan(workload_of(first), Length(samples=10**6), 10**6)
        assert loaded.no_effect == {} and plan.total_steps > 0
        if words[0] == "--config":
            assert first.about.command.startswith(
                f"bert {command} --config configs/{words[1]}.json"
            )
        given = write(tmp_path / "settings.json", first.model_dump(mode="json"))
        again, _ = load(kind, ["--config", given], "bert")
        # Their `~` was expanded.
        caches = {"dataset_cache", "cache_dir"}
        assert again.model_dump(exclude=caches) == first.model_dump(exclude=caches)


LONG = "9" * 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"optimizer_opts": {"epsilon": Infinity}', "epsilon (c.json): got inf; input should be a finite"),
        ('"optimizer_opts": {"weight_decay_rate": 1e999}', "weight_decay_rate (c.json): got inf; input should"),
        ('"bert_config": {"layer_norm_eps": NaN}', "layer_norm_eps (c.json): got nan; input should be a finite"),
        ('"budget_hours": 2.0', "budget_hours (c.json): no such setting; leave it out; `bert init TEXT OUT --hours`"),
        ('"seed": true', "seed (c.json): got true or false; use a value of the kind"),
        ('"parallel": {"tensor": [true]}', "parallel.tensor (c.json): got true or false"),
        ('"seed": 1, "seed": 2', "c.json: the key 'seed' occurs twice in an object; change the file"),
        ('"global_batch": {"replicas": 1, "replicas": 2}', "c.json: the key 'replicas' occurs twice"),
        (f'"log_every_steps": {LONG}', "log_every_steps (c.json): has too many digits; use a number below 2^63"),
        (f'"log_every_steps": {12 * LONG}', "c.json: Invalid JSON: number out of range"),
        ('"bert_config": {"num_hidden_layers": 1000000000}', "should be less than or equal to 1000"),
        ('"bert_config": {"vocab_size": 1000000000}', "should be less than or equal to 10000000"),
        ('"pretrained_ckpt_path": ""', "pretrained_ckpt_path (c.json): is empty; use a path"),
        ('"extends": "."', "extends in c.json (.): no such file"),
    ],
)  # fmt: skip
def test_a_file_cannot_say_what_json_or_pydantic_would_bend(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = '{"extends": "pretrain_tiny_128_phase1", "dataset_dir": "x", '
    if '"extends"' in text:
        start = "{"
    Path("c.json").write_text(f"{start}{text}}}")
    assert message in rejection("--config", "c.json")


def test_a_flag_obeys_the_rules_of_a_file(tmp_path):
    tiny = ("--config", "pretrain_tiny_128_phase1", "--dataset-dir", "x")
    for words, message in (
        (("--optimizer-opts.epsilon", LONG), "input should be a finite number"),
        (("--checkpoint-every-steps", LONG), "(--checkpoint-every-steps): has too many digits"),
        (("--save-ckpt-path", ""), "save_ckpt_path (--save-ckpt-path): is empty"),
        (("--validation-dir", ""), "validation_dir (--validation-dir): is empty"),
        (("--parallel", '{"tensor": 1, "tensor": 2}'), "the key 'tensor' occurs twice"),
        (("--save-ckpt-path", "runs/\udcff"), "is not UTF-8; rename it"),
        (("--parallel.pipeline-stages", '[["hid*99999999999"]]'), "which is not a block"),
    ):
        assert message in rejection(*tiny, *words)
    assert "--config (.): no such file" in rejection("--config", ".")


def test_a_changed_copy_keeps_what_was_set_and_is_checked_like_a_file():
    words = ["--version-2", "--null-score-diff-threshold", "1"]
    settings, _ = load(SquadSettings, words, "bert squad")
    copy = changed(settings, seed=7, global_batch={"replicas": 2})
    assert (copy.seed, copy.version_2, copy.global_batch.replicas) == (7, True, 2)
    assert copy.model_fields_set == settings.model_fields_set | {"seed"}
    assert (settings.seed, settings.global_batch.replicas) == (1984, 1)
    with pytest.raises(ConfigError, match="null_score_diff_threshold: has no effect without"):
        changed(settings, version_2=False)
