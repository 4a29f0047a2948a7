"""`bert data`: the steps from a dump to indexed records, chained.

Each step is the command of its own, with its own folder under OUT, its own manifest and its own
restart; the chain adds nothing but the order and the names of the folders. A second sequence length
on the same OUT finds extraction and sentences done.
"""

from typing import TypeVar

from bert_cli.config.data import (
    DataChainSettings,
    DataSettings,
    ExtractSettings,
    IndexSettings,
    PreprocessSettings,
    TokenizeSettings,
)
from bert_cli.data.records import index, tokenize
from bert_cli.data.records.vocab import find_vocabulary
from bert_cli.data.text import extract, preprocess

Step = TypeVar("Step", bound=DataSettings)


def run(settings: DataChainSettings) -> None:
    """Run extract, preprocess, tokenize and index; raises what they raise."""
    extracted, sentences = settings.out / "extracted", settings.out / "sentences"
    records = settings.out / str(settings.sequence_length)
    if settings.masking == "dynamic":
        records = records.with_name(f"{records.name}_dynamic")
    # A vocabulary that is not there is better known now than after hours of extraction.
    find_vocabulary(settings.vocab, cased=settings.cased)
    extract.run(_take(ExtractSettings, settings, dump=settings.dump, out=extracted))
    preprocess.run(_take(PreprocessSettings, settings, input=extracted, out=sentences))
    tokenize.run(_take(TokenizeSettings, settings, input=sentences, out=records))
    index.run(_take(IndexSettings, settings, folder=records, vocab=None))
    print(f"data: the records are in {records}")


def _take(kind: type[Step], settings: DataChainSettings, **paths: object) -> Step:
    """The settings of one step: its paths, and whatever was said to the chain under the same name."""
    said = settings.model_dump(include=settings.model_fields_set & set(kind.model_fields))
    return kind.model_validate({**said, **paths})
