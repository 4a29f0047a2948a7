"""`bert index`: an index of each file of records, and their description."""

import time

from bert_cli.config.data import IndexSettings
from bert_cli.data.io.manifest import Stats, Step, write_manifest
from bert_cli.data.records import index
from bert_cli.data.records.corpus import CORPUS, RecordFiles, check_checksums, read_corpus
from bert_cli.data.workers.pool import run_in_threads
from bert_cli.data.workers.runner import summary
from bert_cli.disk import size_of
from bert_cli.processes import print_line
from bert_cli.settings.markers import recorded

INDEX_MANIFEST = "index_manifest.json"  # manifest.json belongs to the step that made the records


def run(settings: IndexSettings) -> None:
    """Index every record file of a folder and write corpus.offsets and corpus.json."""
    started = time.monotonic()
    folder = settings.folder
    processes = settings.processes
    paths = index.record_files(folder)
    if (folder / CORPUS).exists():
        before = read_corpus(folder)
        description = index.description_of(folder, before, settings.vocab)
        if settings.check:
            files = [*before["other_files"], *before["files"]]
            check_checksums(folder, files, f"run `bert index {folder}`")
    else:
        description = index.describe_foreign(folder, paths, settings.vocab)
    stale = [path for path in paths if index.read_index(path) is None]
    # Threads, because the time is spent reading, during which other threads run.
    read = run_in_threads("index", size_of(stale), index.write_index, stale, processes)
    corpus = index.write_corpus(folder, description)
    if settings.check:
        records = RecordFiles(folder, corpus)
        read += run_in_threads("check", size_of(paths), records.check_file, paths, processes)
        print_line(f"check: the values of all {corpus['records']:,} records are valid")
    seconds = time.monotonic() - started
    stats = Stats(
        records=corpus["records"],
        bytes_in=sum(file["bytes"] for file in corpus["files"]),
        bytes_out=8 * corpus["records"] + size_of(path.with_suffix(".index") for path in paths),
    )
    indexed = {path.relative_to(folder).as_posix() for path in stale}
    step = Step("index", folder, recorded(settings), ["numpy", "google-crc32c"])
    shards = [file | {"indexed": file["name"] in indexed} for file in corpus["files"]]
    write_manifest(folder / INDEX_MANIFEST, step, stats, seconds, read, shards=shards)
    fresh = len(paths) - len(stale)
    described = f"{fresh} of {len(paths)}" if fresh else ""
    print_line(summary("index", stats, seconds, read, described))
