"""Settings and commands that version 1.0 removed, and what to use instead.

A name is looked up here only if a command does not know it. `docs/removed.md` has the same table.
"""

from bert_cli.parse.old_names import REMEDIES, SWITCHES, our_name

PROBLEM = "was removed in 1.0"
PHASES = "start a second run with --pretrained-ckpt-path, as `pretrain_base_512_phase2` does"
PACKS = (
    "pass --max-sequences-per-pack to `bert pretrain`, which packs dynamic records while it reads"
)
FORMATS = "pass it to `bert preprocess`, which reads files of any format and writes one sentence on each line"
CONSTANT = "leave it out; the value is always {}"
# Dotted key of a setting, or of a group with all that it has -> what to use.
SETTINGS = {
    "parallel.schedule": CONSTANT.format("1F1B"),
    "parallel.reduce_precision": CONSTANT.format("float32"),
    "parallel.recompute_by": CONSTANT.format("layer"),
    "stages": PHASES,
    "decay_from": "leave it out; the schedule wsd decays within one run",
    "new_rows_only_steps": "leave it out; all weights train from the first step",
    "probe": "leave it out; validation_dir measures the loss on held-out records",
    "length_buckets": PACKS,
    "dataset_cache": "copy the records first, for example with `aws s3 sync`",
    "compile_for": "leave it out; the plan estimates the memory of a device",
    "no_build": "leave it out; the first line of the run has its first losses",
    "checkpoint": "leave it out; a measurement saves nothing",
    "list_targets": "leave it out; the plan estimates the memory of a device",
    "cluster.bind_address": "name each host in cluster.workers by the address of its interface",
    "bind_address": "name each host in --hosts by the address of its interface",
    "masking.span_stop": "set masking.unit to word",
    "masking.longest_span": "set masking.unit to word",
    "cluster.report_waiting_after_seconds": CONSTANT.format("60"),
    "optimizer_opts.no_layer_adaptation": CONSTANT.format("bias, beta and gamma"),
    "mirror": "download the dump with another program; `bert extract` reads it",
    "chunk_megabytes": CONSTANT.format("16"),
    "group_files": "join small files before; a group is one file",
    "min_frequency": CONSTANT.format("2"),
    "max_query_length": "leave it out; the value of the training is used",
    "max_answer_length": "leave it out; the value of the training is used",
    "null_score_diff_threshold": "leave it out; the value of the training is used",
    "validation_column": "name the columns of validation_file sentence1, sentence2 and score",
    "examples": "leave it out; `bert inspect` shows one example",
    "input_format": FORMATS,
    "text_field": f"{FORMATS}; --text-column names a column or a field",
    "documents": FORMATS,
}
# Command, of one word or two -> what to use.
COMMANDS = {
    "pack": PACKS,
    "plan targets": "`bert plan` estimates the memory of a device",
    "doctor machine": "`bert doctor`",
}


def why_unknown(key: str) -> tuple[str, str] | None:
    """Return problem and remedy for a key of the original, a removed one, or one in a removed group; else None."""
    last = key.removeprefix("no_").rpartition(".")[2]
    if last in SWITCHES:
        return SWITCHES[last][1], "leave it out"
    if last in REMEDIES:
        return "no such name", REMEDIES[last]
    name = our_name(key)
    while name:
        if name in SETTINGS:
            return PROBLEM, SETTINGS[name]
        name = name.rpartition(".")[0]
    return None
