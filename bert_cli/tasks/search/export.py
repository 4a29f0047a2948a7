"""`bert search export`: the passages of an index with their vectors as Parquet, which databases load."""

import numpy as np

from bert_cli.config.search import SearchExportSettings
from bert_cli.data.search.index import SCALE, open_index
from bert_cli.errors import DataError, import_extra
from bert_cli.files import atomic_file
from bert_cli.processes import print_line
from bert_cli.text import count

AT_ONCE = 4096  # passages of a row group
COLUMNS = ("id", "document", "title", "page", "start", "stop", "text", "vector")
ROWS = """SELECT places.id, name || suffix, title, json_extract(pages, '$[0]'), start, stop, text, value
    FROM places LEFT JOIN vectors USING (hash) ORDER BY places.id"""


def run(settings: SearchExportSettings) -> None:
    """Write the table. Raises DataError for a file that exists or a damaged index, ConfigError without pyarrow."""
    pyarrow = import_extra("pyarrow", "parquet", "format (parquet)")
    from pyarrow import parquet

    if settings.out.exists():
        raise DataError(f"out ({settings.out})", "exists", "choose a new file")
    index = open_index(settings.index)
    integer = pyarrow.int64()
    string = pyarrow.string()
    vector = pyarrow.list_(pyarrow.float32())
    kinds = (integer, string, string, integer, integer, integer, string, vector)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    with index.snapshot():
        passages = index.count("passages")
        has_vectors = index.has_vectors
        fields = list(zip(COLUMNS, kinds, strict=True))
        # The vectors are the last column.
        if not has_vectors:
            fields.pop()
        schema = pyarrow.schema(fields)
        with atomic_file(settings.out) as partial, parquet.ParquetWriter(partial, schema) as writer:
            rows = index.table.execute(ROWS)
            while batch := rows.fetchmany(AT_ONCE):
                *columns, values = map(list, zip(*batch, strict=True))
                if has_vectors:
                    columns.append([np.frombuffer(v, np.int16) / np.float32(SCALE) for v in values])
                writer.write_batch(pyarrow.record_batch(columns, schema))
    what = "with" if has_vectors else "without"
    print_line(f"search: wrote {count(passages, 'passage')} {what} vectors to {settings.out}")
