"""What holds for any input: hypothesis looks for an input that breaks it, and draws the same inputs in every run."""

import bz2
from functools import cache
from itertools import accumulate, combinations, pairwise, product
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies
from support.dumps import articles, dump, page
from support.properties import SEEDS, integers, nonempty_lists
from tokenizers import BertWordPieceTokenizer

from bert_cli.data.examples.source import Packs, shortest_pack_first
from bert_cli.data.finetune import features
from bert_cli.data.io.wrapping import Joiner
from bert_cli.data.random import permute, row_keys
from bert_cli.data.records import sentence_pairs, tfrecord
from bert_cli.data.records.masking import MaskRecipe, mask_examples, unmasked
from bert_cli.data.search import passages
from bert_cli.data.text.preprocess import load_splitter
from bert_cli.data.text.wikipedia import Dump
from bert_cli.data.tokens import encoder as module
from bert_cli.data.tokens.encoder import Encoder
from bert_cli.data.tokens.notation import SpecialIds
from bert_cli.data.tokens.tokenizer import SPECIAL_TOKENS, Normalization
from bert_cli.facts.masking import Masking

# --- frames and numbers of records


@given(nonempty_lists(strategies.binary(max_size=300), max_size=8))
def test_payloads_are_read_back_from_the_frames_that_the_index_names(tmp_path_factory, payloads):
    path = tmp_path_factory.mktemp("records") / "a.tfrecord"
    with tfrecord.RecordWriter(path) as writer:
        writer.write_all(payloads)
    data = path.read_bytes()
    lines = np.loadtxt(path.with_suffix(".index"), np.int64, ndmin=2)
    frames = [data[start : start + size] for start, size in lines]
    assert b"".join(frames) == data and writer.records == len(payloads)
    assert tfrecord.read_payloads(frames, str, "") == payloads
    sizes = [tfrecord.payload_bytes(frame[: tfrecord.HEAD_BYTES]) for frame in frames]
    assert sizes == [*map(len, payloads)]


EDGES = [2 ** (7 * n) + step for n in (1, 2, 3) for step in (-1, 0)]
NUMBER = integers(0, 2**28 - 1) | strategies.sampled_from(EDGES)


@given(nonempty_lists(strategies.tuples(NUMBER, NUMBER, NUMBER), max_size=9))
def test_numbers_are_the_varints_of_protobuf(rows):
    from google.protobuf.internal.encoder import _VarintBytes

    packed = [b"".join(map(_VarintBytes, row)) for row in rows]
    assert tfrecord.varint_rows(np.array(rows)) == packed
    assert [b"".join(map(tfrecord.varint, row)) for row in rows] == packed
    numbers, counts = tfrecord.parse_varints(packed)
    assert numbers.tolist() == np.ravel(rows).tolist() and counts.tolist() == [3] * len(rows)


# --- the order of examples, and their packs


@given(nonempty_lists(integers(1, 300) | integers(1, 2**40), max_size=4), SEEDS)
def test_every_record_comes_once_in_any_epoch_whatever_is_asked_with_it(sizes, seed):
    draw = np.random.default_rng(seed)
    asked = [np.arange(n) if n <= 300 else np.unique(draw.integers(0, n, 300)) for n in sizes]
    orders = [permute(row, sizes[epoch], seed, epoch) for epoch, row in enumerate(asked)]
    for order, size, indices in zip(orders, sizes, asked, strict=True):
        assert len({*order.tolist()}) == len(indices)
        assert order.min() >= 0 and order.max() < size
    counts = [*map(len, asked)]
    of_all = [np.repeat(column, counts) for column in (sizes, range(len(sizes)))]
    together = permute(np.concatenate(asked), of_all[0], seed, of_all[1])
    assert np.array_equal(together, np.concatenate(orders))
    assert permute([], 5, seed, 0).tolist() == []


@pytest.mark.parametrize("size", [2**14 + 1, 99_991])
def test_every_record_comes_once_in_an_epoch_of_thousands(size):
    order = permute(np.arange(size), size, 1984, 5)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_seeds_and_epochs_have_orders_of_their_own():
    size = 1000
    orders = [permute(np.arange(size), size, s, e) for s in (0, 1, 2, 1984) for e in range(5)]
    # Two random orders agree at one index on average.
    assert all(np.count_nonzero(one == other) < 10 for one, other in combinations(orders, 2))


def packs_one_by_one(lengths, longest, most):
    """Return how many packs shortest pack first makes over sequences and not over a histogram."""
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fits = [p for p in packs if len(p) < most and sum(p) + length <= longest]
        if fits:
            min(fits, key=sum).append(length)
        else:
            packs.append([length])
    return len(packs)


DRAWN = nonempty_lists(integers(0, 999), max_size=90)


@given(integers(8, 60), DRAWN, strategies.sampled_from([1, 2, 3, 60]), SEEDS)
def test_packs_are_those_of_one_by_one_and_have_each_record_once(longest, drawn, most, seed):
    lengths = [1 + number % longest for number in drawn]
    packs = Packs(np.array(lengths), longest, most, seed)
    _, counts = shortest_pack_first(np.bincount(lengths, minlength=longest + 1), most)
    assert len(packs) == counts.sum() == packs_one_by_one(lengths, longest, most)
    for epoch in range(2):
        rows = packs.records(np.arange(len(packs)), np.full(len(packs), epoch))
        assert sorted(rows[rows >= 0].tolist()) == [*range(len(lengths))]
        of_slots = np.where(rows >= 0, np.array([*lengths, 0])[rows], 0)
        assert of_slots.sum(1).max() <= longest and np.all(np.diff(of_slots) <= 0)


# --- pairs, segments and masks


@cache
def sentences_of(seed: int, longest: int) -> tuple[list[int], list[int]]:
    """Return prefix sums of sentences of 1 to `longest` tokens in documents of 1 to 80 sentences."""
    random = Random(seed)
    sizes = [random.randint(1, 80) for _ in range(20)]
    lengths = [random.randint(1, longest) for _ in range(sum(sizes))]
    return [0, *accumulate(lengths)], [0, *accumulate(sizes)]


def document_of(tokens, sentences, documents):
    return np.searchsorted(np.array(sentences)[np.array(documents)], tokens, side="right") - 1


@given(SEEDS, integers(1, 200), integers(5, 200))
def test_a_pass_uses_every_sentence_once_and_a_second_segment_is_where_its_label_says(
    seed, longest, room
):
    sentences, documents = sentences_of(seed, longest)
    pairs = sentence_pairs.pair_sentences(sentences, documents, room, 0.1, Random(seed))
    used = []
    for a, a_length, b, b_length, is_random in zip(*(c.tolist() for c in pairs), strict=True):
        used += [(a, a + a_length), (b, b + b_length)][: 2 - is_random]
    assert (used[0][0], used[-1][1]) == (0, sentences[-1])
    assert all(before[1] == after[0] for before, after in pairwise(used))
    assert {edge for pair in used for edge in pair} <= {*sentences}
    first = document_of(pairs.first_start, sentences, documents)
    second = document_of(pairs.second_start, sentences, documents)
    assert np.all((first != second) == pairs.is_random)
    follows = pairs.second_start == pairs.first_start + pairs.first_length
    assert np.all(follows[~pairs.is_random])
    # The last sentence is the one that reaches the target.
    tokens = (pairs.first_length + pairs.second_length)[~pairs.is_random]
    assert np.all(tokens < room + longest)
    ends = pairs.second_start + pairs.second_length - 1
    assert np.array_equal(document_of(ends, sentences, documents), second)


@given(SEEDS, integers(1, 200), integers(2, 150), strategies.sampled_from([0.0, 0.1, 1.0]))
def test_segments_hold_every_token_once_in_their_document_and_end_where_a_sentence_does_not_fit(
    seed, longest, room, short
):
    sentences, documents = sentences_of(seed, longest)
    segments = sentence_pairs.fill_sentences(sentences, documents, room, short, Random(seed))
    starts = segments.first_start
    ends = starts + segments.first_length
    assert (starts[0], ends[-1]) == (0, sentences[-1]) and np.array_equal(starts[1:], ends[:-1])
    assert segments.first_length.min() > 0 and segments.first_length.max() <= room
    last = document_of(ends - 1, sentences, documents)
    assert np.array_equal(document_of(starts, sentences, documents), last)
    assert not segments.second_length.any() and not segments.is_random.any()
    following = dict(pairwise(sentences))
    of_documents = {sentences[n] for n in documents}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end not in following and end not in of_documents:
            assert end - start == room  # within a sentence
        elif short == 0.0 and end not in of_documents:
            assert following[end] - start > room


@given(nonempty_lists(strategies.tuples(integers(1, 70), integers(1, 70))), integers(2, 80), SEEDS)
def test_truncation_leaves_what_a_loop_over_tokens_leaves(lengths, longest, seed):
    a, b = (np.array(column) for column in zip(*lengths, strict=True))
    zeros = np.zeros(len(a), np.int64)
    pairs = sentence_pairs.Pairs(zeros, a, zeros + 1000, b, zeros.astype(bool))
    cut = sentence_pairs.truncate_pairs(pairs, longest, row_keys(np.arange(len(a)), seed))
    for row, (first, second) in enumerate(lengths):
        while first + second > longest:
            first, second = (first - 1, second) if first > second else (first, second - 1)
        assert (cut.first_length[row], cut.second_length[row]) == (first, second)
    assert np.all(cut.first_start >= 0) and np.all(cut.second_start >= 1000)
    assert np.all(cut.first_start + cut.first_length <= a)
    assert np.all(cut.second_start + cut.second_length <= 1000 + b)


SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
V = 40
CONTINUES = np.arange(V) % 3 == 0
CONTINUES[:5] = False


TEXTS = nonempty_lists(strategies.lists(integers(2, 9), min_size=3, max_size=30), max_size=9)


@given(TEXTS, strategies.booleans(), strategies.floats(0.05, 0.99), integers(1, 40), SEEDS)
def test_masks_are_as_many_as_the_recipe_says_on_ordinary_tokens_and_complete_words(
    texts, takes_words, probability, most, seed
):
    tokens = np.zeros((len(texts), 30), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = np.array([*map(len, texts)])
    keys = row_keys(np.arange(len(texts)), seed)
    masking = Masking(unit="word" if takes_words else "token", probability=probability)
    recipe = MaskRecipe(SPECIAL, V, masking, most, CONTINUES)
    batch = mask_examples(tokens, lengths, lengths // 2, lengths % 2, keys, recipe)
    assert batch["masked_lm_positions"].shape == (len(texts), most)
    assert np.array_equal(unmasked(batch), tokens)
    assert np.array_equal(batch["input_mask"].sum(1), lengths)
    assert np.array_equal(batch["segment_ids"].sum(1), lengths - lengths // 2)
    for row, text in enumerate(texts):
        weights = batch["masked_lm_weights"][row]
        count = int(weights.sum())
        assert np.array_equal(weights, np.arange(most) < count)
        masked = batch["masked_lm_positions"][row, :count].tolist()
        assert masked == sorted({*masked}) and not batch["masked_lm_positions"][row, count:].any()
        assert not batch["masked_lm_ids"][row, count:].any()
        ordinary = [n for n, token in enumerate(text) if token not in (SPECIAL.cls, SPECIAL.sep)]
        assert {*masked} <= {*ordinary}
        quota = min(most, max(1, round(len(text) * probability)))
        assert np.array_equal(
            np.delete(batch["input_ids"][row], masked), np.delete(tokens[row], masked)
        )
        if not takes_words:
            assert count == min(quota, len(ordinary))
            continue
        words: list[list[int]] = []
        for n in ordinary:
            if CONTINUES[text[n]] and words and words[-1][-1] == n - 1:
                words[-1].append(n)
            else:
                words.append([n])
        complete = [word for word in words if {*word} <= {*masked}]
        assert sum(map(len, complete)) == count <= quota
        assert all(word in complete or len(word) > quota - count for word in words)


# --- windows of long texts


@given(nonempty_lists(integers(0, 40), max_size=4), strategies.data())
def test_a_token_counts_in_the_window_with_the_most_context(lengths, data):
    room = data.draw(integers(1, 12))
    stride = data.draw(integers(1, room))
    owner, first, length = features.window_spans(np.array(lengths), room, stride)
    best = np.split(features.most_central(owner, first, length), np.cumsum(length)[:-1])
    for text, size in enumerate(lengths):
        windows = np.flatnonzero(owner == text)
        assert first[windows].tolist() == [stride * n for n in range(len(windows))]
        for token in range(size):
            holds = [w for w in windows if first[w] <= token < first[w] + length[w]]
            context = [min(token - first[w], first[w] + length[w] - 1 - token) for w in holds]
            assert holds
            value = [100 * c + length[w] for c, w in zip(context, holds, strict=True)]
            wins = [bool(best[w][token - first[w]]) for w in holds]
            assert wins == [n == value.index(max(value)) for n in range(len(holds))]


# --- text


LINES = strategies.lists(strategies.text("abc dE.1,;:日é\t", max_size=90), max_size=30)


@given(LINES, strategies.lists(integers(10, 80), max_size=2))
def test_joined_lines_have_every_letter_in_its_order(lines, margins):
    joined = list(Joiner("\n".join(lines), margins).paragraphs(lines))
    assert "".join("".join(joined).split()) == "".join("".join(lines).split())
    assert len(joined) <= len(lines)


SPLIT = load_splitter("sentencex", "en")
BLOCKS = ["# A heading", "## Next", "It lists files.", "", "- an item", "\tcode    x", "---", "Bread    2.00",
    "This sentence has some words and ends here. " * 7, "word " * 300 + "end", "日本語の文と" * 90,
    "A hash: " + "0123456789abcdef" * 8, "Ends without a stop"]  # fmt: skip


@given(strategies.lists(strategies.sampled_from(BLOCKS), max_size=25))
def test_the_passages_of_a_document_together_are_its_text(lines):
    found = passages.passages_of(lines, SPLIT)
    text = "\n".join(lines)
    assert [p.text for p in found] == [text[p.start : p.stop] for p in found]
    assert all(passages.width(p.text) <= passages.LENGTH + passages.LONGEST_HEADING for p in found)
    assert all(not text[a.stop : b.start].strip() for a, b in pairwise(found))
    if any(map(str.isalnum, text)):
        assert passages.characters_left_out(lines, found) == 0
        cut = "" if "日" in text else " "  # only words of scripts with spaces are never cut
        assert cut.join(cut.join(p.text for p in found).split()) == cut.join(text.split())
    else:
        assert found == []


DUMP_PAGES = page(7, "Été", "L'été &lt;b&gt;") + page(8, "B", "", redirect="C") + articles(3, 20)


@settings(max_examples=25)
@given(integers(1, 2000), integers(1, 400))
def test_a_dump_has_its_pages_under_any_cut_into_streams(tmp_path_factory, first, size):
    source = dump(tmp_path_factory.mktemp("dump") / "dump.xml", DUMP_PAGES)
    expected = list(Dump(source).pages())
    data = source.read_bytes()
    ends = [*range(min(first, len(data) - 1), len(data), size), len(data)]
    source.write_bytes(b"".join(bz2.compress(data[a:b]) for a, b in pairwise([0, *ends])))
    reader = Dump(source)
    assert list(reader.pages()) == expected and reader.notes == [] and len(expected) == 5
    if not data[ends[0] :].lstrip().startswith(b"<page>"):
        assert Dump(source).streams(1) == []


# --- text to ids


ANY_TEXT = strategies.text(
    strategies.characters(codec="utf-8", exclude_characters="\n")
    | strategies.sampled_from("aAbe \u0301 \u00a0日é.'İß")
)
WAYS = [*product((False, True), (None, False, True), (True, False))]


@pytest.mark.parametrize("way", WAYS, ids=str)
@example(lines=["a [SEP] [MASK]b"])
@given(lines=nonempty_lists(ANY_TEXT, max_size=5))
def test_any_text_is_encoded_as_the_library_does(way, lines):
    letters = [chr(n) for n in (*range(33, 127), *range(0xC0, 0x250), 0x65E5, 0x0301)]
    pieces = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters), "ab"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    library = BertWordPieceTokenizer(
        vocabulary, lowercase=not way[0], strip_accents=way[1], handle_chinese_chars=way[2]
    )
    library._tokenizer.encode_special_tokens = True  # a text with [SEP] has its letters
    got = Encoder(vocabulary, Normalization(*way)).encode("\n".join(lines))
    expected = [library.encode(line, add_special_tokens=False).ids for line in lines]
    parts = np.split(got.tokens, np.cumsum(got.lengths)[:-1])
    assert [part.tolist() for part in parts] == expected
    spaces = module._CONTROL_SPACES + " \t\r"
    assert got.blank.tolist() == [not line.strip(spaces).strip() for line in lines]
