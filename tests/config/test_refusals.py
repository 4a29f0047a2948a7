"""Command lines that the settings refuse, each with its message."""

import shlex

import pytest

from bert_cli.commands import COMMANDS, split_command
from bert_cli.errors import ConfigError
from bert_cli.parse.load import load

TINY = "pretrain --config pretrain_tiny_128_phase1"
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
    ("pack a gs://bucket/out", "out: gs://bucket/out is an address, but this command needs"),
    ("extract a b --executor dask", "dask needs the address of the scheduler"),
    ("extract a b --executor dask --scheduler s --processes 2", "processes (--processes): has no"),
    ("glue --do-test", "do_test (--do-test): has no effect without save_ckpt_path"),
    ("squad --max-seq-length 150", "leaves 83 tokens of a text after max_query_length 64 and"),
    ("ner --max-seq-length 32 --doc-stride 30", "leaves 29 tokens of a text after the special tokens"),
    ("squad --no-do-training --no-do-validation", "is off, and so is do_validation"),
    ("classify --held-out-fraction 0.2 --validation-file f", "no effect with validation_file"),
    ("classify --generated-dataset --early-stop 3", "has no effect with generated_dataset"),
    ("embed --generated-dataset --held-out-fraction 0.3", "has no effect with generated_dataset"),
    ("embed --train-file a.txt.gz", "contains single texts, but --objective pairs"),
    ("squad --max-seq-length 31", "greater than or equal to 32"),
    ("classify --text-column a,b,c", "names 3 columns; name one or two"),
    ("doctor --seed 3", "max_seq_length: is missing"),
    ("inspect folder --n-best-size 21", "(--n-best-size): is always 20; leave it out"),
    ("inspect folder --dataset-cache a", "has no effect on a folder of this machine"),
    (f"bench {TINY} --checkpoint-dir x", "no such setting; set TMPDIR to the folder, as in"),
    (f"bench {TINY} --dry-run", "dry_run (--dry-run): has no effect on a measurement"),
    (f"plan {TINY[9:]} --compile-for v5e:2x2", "compile_for (--compile-for): has no effect with engine"),
    (f"plan {TINY[9:]} --parallel.layout auto --devices {10**9}", "less than or equal to 1000000"),
    (
        f"plan {TINY[9:]} --parallel.pipeline-stages '[[\"emb\"], [\"hid*2\"]]' "
        "--parallel.pipeline-device-mapping '[0, 300000000]'",
        "[0, 300000000] leaves a device out; number them from 0",
    ),
    (f"plan {TINY[9:]} --compile-for h100:8 --devices 8", "has no effect with compile_for"),
    (
        f"pretrain {TINY[9:]} --distillation.teacher x",
        "(--distillation.teacher): no such setting; leave it out, or finish a pre-training run that has a teacher with",
    ),
    ("extract dump ''", "out: is empty; use a path, '.' for the current folder"),
    ("runs ''", "folders: is empty"),
    ("predict ''", "model: is empty"),
    ("tokenize in out --vocab ''", "vocab (--vocab): is empty"),
    (f"extract dump out --chunk-megabytes {'9' * 25}", "less than or equal to 10000000"),
    (f"vocab in out --size {10**12}", "size (--size): got 1000000000000; use a number from 100 to"),
    ("vocab in out --size +5", "size (--size): got +5 without --extend"),
    ("vocab in out --extend model", "got 30522 with --extend"),
    ("vocab in out --extend model --size many", "got many; use a number from 100 to 9,999,999, or +2000"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), REFUSALS)
def test_a_command_line_that_the_settings_refuse_has_one_message(line, message):
    command, words = split_command(shlex.split(line))
    with pytest.raises(ConfigError) as error:
        load(COMMANDS[command].settings_class(), words, f"bert {command}")
    assert message in str(error.value)
    # Without a run `bert doctor` names all settings that are missing.
    assert len(str(error.value).splitlines()) == 1 or command == "doctor"
