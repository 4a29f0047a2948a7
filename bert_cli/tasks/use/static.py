"""`bert export --format static`: one vector for each piece of the vocabulary, for vectors of texts without a model.

Each piece goes through the model alone. PCA shortens the vectors, and pieces weigh less the more frequent they are, as
estimated from their ranks; the vector of a text is the mean of the vectors of its pieces, scaled to length 1 (Tulkens
and van Dongen 2024, "Model2Vec"). model2vec and sentence-transformers open the folder.

Shapes: V vocabulary size, D hidden size, d size of the shortened vectors.
"""

import json

import numpy as np
from scipy.stats import spearmanr

from bert_cli.arrays import Floats32
from bert_cli.config.use import ExportSettings
from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.features import Features, encode_texts
from bert_cli.data.tokens.notation import TOKENIZER_FILE
from bert_cli.files import atomic_folder
from bert_cli.processes import print_line
from bert_cli.settings.settings import is_set
from bert_cli.tasks.model import models
from bert_cli.tasks.model.vectors import Embedding, check_dimensions, open_vectors
from bert_cli.tasks.use import export_card, int8
from bert_cli.train import card, checkpoint

# Relative frequency at which the weight of a piece is 1/2, the value of model2vec.
FREQUENT = 1e-4
MODULES = "sentence_transformers.models"
CODE = """---
library_name: model2vec
pipeline_tag: sentence-similarity
{license}---

# Static vectors

{described}, written by `bert export --format static` from {name}.

```python
from model2vec import StaticModel

model = StaticModel.from_pretrained(".")
print(model.encode(["a query", "a text that may answer it"]))
```"""


def run(settings: ExportSettings) -> None:
    """Write the vectors of the pieces, and compare them with the model's on the texts of `compare_on`.

    Raises ConfigError for a folder in use, CheckpointError if there is no model.
    """
    source = models.find_source(settings.model, "MODEL")
    if is_set(settings, "dimensions"):
        check_dimensions(settings.dimensions, source)
    texts = int8.read_texts(settings.compare_on, source, "embed")
    predictor = open_vectors(source, batch_size=256)
    print_line(f"export: {source.folder} ({source.architecture}) as {settings.format}")
    table = piece_vectors(predictor, settings.dimensions)
    described = f"{len(table):,} vectors of {table.shape[1]} values"
    license = "" if settings.license is None else f"license: {settings.license}\n"
    sections = [CODE.format(described=described, license=license, name=source.folder.name)]
    if texts:
        expected, _ = predictor.of_texts(texts)
        words = [item.fields["text"] for item in texts]
        length = predictor.max_seq_length
        features, _ = encode_texts(predictor.tokenizer, words, None, {}, max_seq_length=length)
        # Sums instead of means: a cosine does not see the difference.
        static = np.add.reduceat(table[features.tokens], features.starts)
        rank = spearmanr(*map(int8.similarities, (expected, static))).statistic
        note = f"static vectors against the model on {len(texts):,} texts: "
        note += f"rank correlation of the similarities {rank:.4f}"
        print_line(f"export: {note}")
        sections.append(f"{note[0].upper()}{note[1:]}.")
    sections += export_card.training_sections(source.folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{MODULES}.StaticEmbedding"},
        {"idx": 1, "name": "1", "path": "1_Normalize", "type": f"{MODULES}.Normalize"},
    ]
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True}
    files = source.tokenizer.for_model(source.config, fills_masks=False)
    with atomic_folder(settings.out) as folder:
        checkpoint.write_tensors(folder / checkpoint.MODEL, {"embeddings": table})
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        (folder / embeddings.MODULES).write_text(json.dumps(modules, indent=2))
        (folder / "1_Normalize").mkdir()
        (folder / "1_Normalize" / "config.json").write_text("{}")
        (folder / TOKENIZER_FILE).write_bytes(files[TOKENIZER_FILE])
        (folder / card.CARD).write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    print_line(f"export: {settings.out}, {table.nbytes / 1e6:.1f} MB; {described}")


def piece_vectors(predictor: Embedding, size: int) -> Floats32:
    """Return the weighted vectors [V, d] of all pieces; the vectors of special tokens are 0."""
    from sklearn.decomposition import PCA

    tokenizer = predictor.tokenizer
    special = tokenizer.special
    pieces = np.arange(len(tokenizer.pieces), dtype=np.int32)
    rows = np.stack(np.broadcast_arrays(special.cls, pieces, special.sep), 1, dtype=np.int32)
    ends = 3 * np.arange(1, len(pieces) + 1)
    features = Features(rows.reshape(-1), np.zeros(rows.size, np.int8), ends)
    vectors = predictor.of_examples(features, tokenizer.pieces)
    is_text = ~np.isin(pieces, [*vars(special).values()])
    table = np.zeros((len(pieces), min(size, is_text.sum(), vectors.shape[1])), np.float32)
    # The solver that is chosen by default draws random numbers for many pieces.
    components = PCA(table.shape[1], svd_solver="covariance_eigh")
    table[is_text] = components.fit_transform(vectors[is_text])
    # Zipf's law: a vocabulary begins with the most frequent pieces.
    frequencies = 1.0 / (2.0 + pieces)
    frequencies /= frequencies.sum()
    return (table * (FREQUENT / (FREQUENT + frequencies))[:, None]).astype(np.float32)
