"""`bert extract`: text from a dump of MediaWiki."""

from functools import partial

from bert_cli.config.data import ExtractSettings
from bert_cli.data.io.manifest import Step
from bert_cli.data.text import extract
from bert_cli.data.text.templates import read_rules
from bert_cli.data.text.wikipedia import Dump, find_dump
from bert_cli.data.workers.program import command_of
from bert_cli.data.workers.runner import Workers, run_shards
from bert_cli.errors import ConfigError
from bert_cli.files import file_crc32c
from bert_cli.settings.markers import recorded


def run(settings: ExtractSettings) -> None:
    """Extract the text of a dump."""
    path = find_dump(settings.dump)
    program = settings.with_program
    command = []
    if program:
        command = command_of(program)
    dump = Dump(path)
    values = recorded(settings)
    rules: dict[str, str] = {}
    if settings.templates:
        if program:
            where = f"templates ({settings.templates})"
            raise ConfigError(where, "has no effect on another extractor", "leave it out")
        rules = read_rules(settings.templates)
        values["templates"] = file_crc32c(settings.templates)
    packages = []
    if program == "wikiextractor":
        packages = ["wikiextractor"]
    run_shards(
        Step(
            "extract",
            settings.out,
            settings=values | {"extractor": program or "bert"},
            packages=packages,
            expected_bytes=extract.bytes_written(path, settings.processes),
        ),
        extract.shards_of(dump),
        partial(extract.extract_chunk, header=dump.header, command=command, rules=rules),
        Workers(settings.processes, settings.scheduler),
        total=path.stat().st_size,
        notes=dump.notes,
        check=partial(
            extract.check_damage, path=path, out=settings.out, is_kept=settings.keep_damaged
        ),
    )
