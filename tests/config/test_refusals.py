"""Command lines and configs that the settings refuse, each with its message."""

import pytest
from support.contents import put
from support.orders import order, refusal
from support.settings import RUN, merged

TINY = "pretrain --config pretrain_tiny_128_phase1"
OPEN = f"{TINY} --dataset-dir x"
LONG = "9" * 400
OFFLOAD = {"parallel": {"optimizer_state_offload": True}}
REFUSALS = [
    ("pretrain --precison float16", "(--precison): no such flag; did you mean '--precision'?"),
    ("pretrain --seed 1 'a b,c' d", "(a b,c d): too many arguments"),
    ("pretrain mine.json", "write a list as A,B and a config as --config FILE"),
    ("pretrain --seed", "--seed: expected one argument"),
    (f"{TINY} --generated-dataset --optimizer-opts.no-weight-decay bias,gama", "got 'gama'; input should be 'kernel'"),
    (f"{TINY} --generated-dataset --dry-run flase", "(--dry-run): got 'flase', not a boolean; use true or false"),
    ("pretrain --parallel auto", "(--parallel): is a group of settings; set a value of the group, such as"),
    ("pretrain --parallel.pipeline-stages [[", "--parallel.pipeline-stages ([[): is not valid JSON"),
    ("launch pretrain --config x", "write bert launch -- COMMAND"),
    ("pretrain -- x", "(--): takes no command; leave out the --"),
    ("tokenize in --vocab v.txt", "out: is missing; pass OUT"),
    ("tokenize a b --vocab v --masking dynamic --duplication-factor 6", "has no effect with masking"),
    ("tokenize a b --vocab v --masking dynamic --whole-word-masking", "the run has --masking.unit"),
    ("data a b --vocab v --mask-tokens 200", "mask_tokens (--mask-tokens): 200 is more than"),
    ("extract a gs://bucket/out", "out: gs://bucket/out is an address, but this command needs"),
    ("extract a b --executor dask", "dask needs the address of the scheduler"),
    ("extract a b --executor dask --scheduler s --processes 2", "processes (--processes): has no"),
    ("glue --do-test", "do_test (--do-test): has no effect without save_ckpt_path"),
    ("squad --max-seq-length 150", "leaves 83 tokens of a text after max_query_length 64 and"),
    ("ner --max-seq-length 32 --doc-stride 30", "leaves 29 tokens of a text after the special tokens"),
    ("squad --no-do-training --no-do-validation", "is off, and so is do_validation"),
    ("classify --held-out-fraction 0.2 --validation-file f", "no effect with validation_file"),
    ("classify --generated-dataset --early-stop 3", "has no effect with generated_dataset"),
    ("embed --generated-dataset --held-out-fraction 0.3", "has no effect with generated_dataset"),
    ("squad --max-seq-length 31", "greater than or equal to 32"),
    ("classify --text-column a,b,c", "names 3 columns; name one or two"),
    ("doctor pretrain --seed 3", "max_seq_length: is missing"),
    (f"bench {TINY} --dry-run", "dry_run (--dry-run): has no effect on a measurement"),
    (f"plan pretrain {TINY[9:]} --parallel.layout auto --devices {10**9}", "less than or equal to 1000000"),
    (
        f"plan pretrain {TINY[9:]} --parallel.pipeline-stages '[[\"emb\"], [\"hid*2\"]]' "
        "--parallel.pipeline-device-mapping '[0, 300000000]'",
        "[0, 300000000] leaves a device out; number them from 0",
    ),
    ("extract dump ''", "out: is empty; use a path, '.' for the current folder"),
    ("runs ''", "folders: is empty"),
    ("predict ''", "model: is empty"),
    ("predict m a --question b --context c", "question (--question): cannot be combined with text; use one of them"),
    ("predict m --question b --context c --input d", "input (--input): cannot be combined with question"),
    ("classify --class-weights '{\"spam\": }'", "class_weights (--class-weights): is not a JSON object"),
    ("tokenize in out --vocab ''", "vocab (--vocab): is empty"),
    (f"vocab in out --size {10**12}", "size (--size): got 1000000000000; use a number from 100 to"),
    ("vocab in out --size +5", "size (--size): got +5 without --extend"),
    ("vocab in out --extend model", "got 30522 with --extend"),
    ("vocab in out --extend model --size many", "got many; use a number from 100 to 9,999,999, or +2000"),
    (f"{TINY} --train-file 00.tfrecord", "pass --dataset-dir, the folder"),
    (f"{TINY} --num-train-steps 4", "--total-num-train-samples, the steps times the examples"),
    (f"{TINY} --ipu-config", "(--ipu-config): is a group of settings; set a value of the group, such as "),
    (f"{OPEN} --optimizer-opts.epsilon {LONG}", "input should be a finite number"),
    (f"{OPEN} --checkpoint-every-steps {LONG}", "(--checkpoint-every-steps): has too many digits"),
    (f"{OPEN} --save-ckpt-path ''", "save_ckpt_path (--save-ckpt-path): is empty"),
    (f"{OPEN} --validation-dir ''", "validation_dir (--validation-dir): is empty"),
    (f"{OPEN} --parallel '{{\"tensor\": 1, \"tensor\": 2}}'", "the key 'tensor' occurs twice"),
    (f"{OPEN} --save-ckpt-path runs/\udcff", "is not UTF-8; rename it"),
    (f"{OPEN} --parallel.pipeline-stages '[[\"hid*99999999999\"]]'", "which is not a block"),
    ("squad --num-epochs 5 --total-num-train-samples 40", "both set the length"),
    ("pretrain", "extends (c.json): got ['base.json']; write the name of one", {"extends": ["base.json"]}),
    ("pretrain --config .", "--config (.): no such file"),
    ("pretrain", "extends in c.json (bases.json): no such file; did you mean 'base.json'?", {"extends": "bases.json"}),
    ("pretrain --config base.jsn", "did you mean 'base.json'?"),
    ("pretrain --config pretrain_base_128_phase_1", "did you mean 'pretrain_base_128_phase1'?"),
    ("pretrain", "parallel.optimizer_state_offload (c.json): has no effect", {"extends": "base.json"} | OFFLOAD),
    ("pretrain --config base.json --parallel.optimizer-state-offload",
     "optimizer_state_offload (--parallel.optimizer-state-offload): has no"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATASETS_DIR", raising=False)
    put(tmp_path / "base.json", RUN | {"engine": "jax"})


@pytest.mark.parametrize("row", REFUSALS)
def test_a_command_line_that_the_settings_refuse_has_one_message(row):
    line, message, *config = row
    text = refusal(line, *config)
    assert message in text
    # Without a run `bert doctor` names all settings that are missing.
    assert len(text.splitlines()) == 1 or line.startswith("doctor")


SMALL = RUN | {"bert_config": {"num_hidden_layers": 2, "max_position_embeddings": 64}}
LAST = ["enc_out", "pool", "heads"]
GROUP = {"architecture": "groupbert", "hidden_size": 96, "intermediate_size": 100}
UNIT = {"scaling": "unit"}


def layout(stages: list[list[str]], devices: list[int]) -> dict:
    return {"parallel": {"pipeline_stages": stages, "pipeline_device_mapping": devices}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_length": 65}, "max_seq_length (c.json): 65 is more than bert_config.max_position_embeddings (64)"),
        ({"max_predictions_per_seq": 30}, "max_predictions_per_seq (c.json): 30 is more than the 13 tokens"),
        ({"optimizer_opts": {"stochastic_rounding": True}}, "has no effect with precision"),
        ({"evaluate_every_steps": 5}, "evaluate_every_steps (c.json): has no effect without validation_dir"),
        ({"bert_config": {"hidden_size": 64, "num_attention_heads": 5}}, "5 does not divide hidden_size (64)"),
        ({"bert_config": {"conv_group_size": 8}}, "conv_group_size (c.json): has no effect with architecture 'bert'"),
        ({"bert_config": GROUP | {"conv_group_size": 7}}, "conv_group_size (c.json): 7 does not divide hidden_size"),
        ({"bert_config": GROUP | {"ffn_groups": 6}}, "ffn_groups (c.json): 6 does not divide intermediate_size (100)"),
        ({"bert_config": GROUP | {"conv_kernel_size": 4}}, "conv_kernel_size (c.json): 4 is even"),
        ({"bert_config": GROUP | {"conv_groups": 4}}, "conv_groups (c.json): no such name; did you mean 'conv_"),
        ({"optimizer_opts": {"learning_rate": {"warmup_power": 0.5}}}, "warmup_power (c.json): has no effect without"),
        (layout([["emb"], ["hid*2"], LAST], [0, 1, 2]), "[0, 1, 2] separates emb and heads"),
        (layout([["emb", "hid*3", *LAST]], [0]), "lists emb, hid*3, enc_out, pool, heads; the model has emb, hid*2"),
        (layout([["emb", "hidden*2", *LAST]], [0]), "stage 0 names 'hidden*2', which is not a block"),
        (layout([["emb", "hid*2", *LAST]], [0, 1]), "lists 2 devices for 1 stage; set one for each stage"),
        (layout([["emb"], ["hid*2", *LAST]], [1, 1]), "[1, 1] leaves a device out"),
        ({"parallel": {"pipeline_stages": [["emb", "hid*2", *LAST]]}}, "pipeline_stages (c.json): needs pipeline_dev"),
        ({"parallel": {"pipeline_device_mapping": [0]}}, "device_mapping (c.json): needs pipeline_stages"),
        ({"bert_config": {"architecture": "brt"}}, "architecture (c.json): got 'brt'; input should be 'bert' or"),
        ({"dataset_dir": "s3://a/b"}, "dataset_dir (c.json): s3://a/b is an address, but this command needs local"),
        ({"engine": "jax", "compile": "nothing"}, "compile (c.json): has no effect without engine tensorflow"),
        ({"engine": "jax", "parallel": {"tensor": 5}}, "5 does not divide bert_config.num_attention_heads (12); choo"),
        ({"engine": "jax", "parallel": {"tensor": [1, 2, 2]}}, "parallel.tensor (c.json)"),
        ({"engine": "jax", "parallel": {"tensor": 0}}, "parallel.tensor"),
        ({"num_epochs": 5, "total_num_train_samples": 40}, "both set the length"),
        ({"cluster": {"rank": 0}}, "cluster.rank (c.json): has no effect without workers"),
        ({"cluster": {"rank": 2, "workers": ["a:1", "b:1"]}}, "2 is not less than the number of workers, 2"),
        (UNIT | {"bert_config": {"architecture": "groupbert"}}, "architecture (c.json): groupbert cannot be combined"),
        (UNIT | {"bert_config": {"initializer_range": 0.1}}, "initializer_range (c.json): 0.1 cannot be combined with"),
        (UNIT | {"optimizer_opts": {"max_gradient_norm": 1.0}}, "norm (c.json): 1.0 cannot be combined with"),
        (UNIT | {"optimizer_opts": {"loss_scaling": 4096.0}}, "loss_scaling (c.json): 4096.0 cannot be combined with"),
    ],
)  # fmt: skip
def test_training_settings_that_contradict_one_another_are_rejected(changes, message):
    text = refusal("pretrain", merged(SMALL, changes))
    assert message in text and len(text.splitlines()) == 1


TWO_STAGES = layout([["emb", "hid*2"], LAST], [0, 0])["parallel"]


@pytest.mark.parametrize(
    ("engine", "parallel"),
    [
        ("tensorflow", TWO_STAGES),
        ("tensorflow", {"optimizer_state_offload": True}),
        ("jax", {"tensor": 2}),
        ("jax", {"tensor": [2, 2]}),
        ("jax", {"shard_weights": True}),
    ],
)
def test_a_setting_of_one_engine_is_refused_on_the_other_by_name(engine, parallel):
    values = SMALL | {"parallel": parallel}
    assert order("pretrain", values | {"engine": engine})
    other = {"tensorflow": "jax", "jax": "tensorflow"}[engine]
    remedy = "pass --parallel.layout auto" if parallel is TWO_STAGES else "leave it out"
    assert refusal("pretrain", values | {"engine": other}) == (
        f"parallel.{next(iter(parallel))} (c.json): has no effect without engine {engine}; "
        f"{remedy}, or pass --engine {engine}"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"optimizer_opts": {"epsilon": Infinity}', "epsilon (c.json): got inf; input should be a finite"),
        ('"optimizer_opts": {"weight_decay_rate": 1e999}', "weight_decay_rate (c.json): got inf; input should"),
        ('"bert_config": {"layer_norm_eps": NaN}', "layer_norm_eps (c.json): got nan; input should be a finite"),
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
        ('"wandb.enabled": true', "wandb.enabled (c.json): a file nests its settings; write"),
        ('"extends": "c.json"', "extends (c.json -> c.json): a config extends itself"),
        ('"dataset_dir": [{"path": "a", "wieght": 3}]', ".0.wieght (c.json): no such name; did you mean 'weight'"),
        ('"dataset_dir": ["a", {"path": "b", "weight": 0}]', "dir.1.weight (c.json): got 0; input should be greater"),
        ('"dataset_dir": ["a", {"weight": 1}]', "dataset_dir.1.path (c.json): is missing; set it there"),
    ],
)  # fmt: skip
def test_a_file_cannot_say_what_json_or_pydantic_would_bend(text, message):
    if '"extends"' not in text:
        text = f'"extends": "pretrain_tiny_128_phase1", "generated_dataset": true, {text}'
    text = refusal("pretrain", f"{{{text}}}")
    assert message in text and len(text.splitlines()) == 1


def test_a_config_is_an_object():
    assert "c.json: Input should be an object" in refusal("pretrain", "[1]")
