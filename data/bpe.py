"""The tokenizer that data/text.py trains, and encoding with it: exactly sentencepiece's ids, but mostly looked up."""
import array
import collections
import functools
import heapq
import importlib
import io
import re

from nano.shards import DataError
from nano.tokenizer import load_tokenizer

# 31 x 128: whole tiles on a TPU. Not 4096: rows a power of two bytes apart share cache sets, and on a CPU the head's
# matmul runs at half speed (35 against 69 GFLOP/s).
VOCAB_SIZE = 3968
HASHES = 1 << 64  # a hash is below
CACHE = 1 << 25  # a worker's memory of encoded units, in bytes, about
# Our tokenizers' pieces lie within one UNIT of text: some newlines or some spaces (U+2581 is sentencepiece's space) or
# neither, then what follows up to the next of either. BPE merges two neighbours only when the result is a piece, so
# nothing merges across the border of two units, and units encoded apart give the ids of the whole. Where a border lies
# depends on the two characters beside it alone, so a part of a text has the same borders. CUT finds some, in bytes.
# WORD is finer in the same way (not for every vocabulary: é ties to letters), and fewer of them are new in a text.
UNIT = re.compile(r'(?:\n+|[ \u2581]+)?[^ \u2581\n]+|\n+|[ \u2581]+')
WORD = re.compile(r'[ \u2581]*[A-Za-z]+|(?:\n+|[ \u2581]+)?[^ \u2581\nA-Za-z]+|\n+|[ \u2581]+')
CUT = re.compile(rb'(?<=[^ \n])(?<!\xe2\x96\x81)[ \n]')
LINE = re.compile(r'\n+[^\n]*|[^\n]+')  # what the trainer sees at once: so no piece has a newline after anything else


class Encoder:
    """Text to the bytes of its token ids: exactly those of the whole text, mostly looked up unit by unit.

    That holds for models like ours: sentencepiece BPE, text not normalised, no prefix, bytes for unknown characters,
    every piece within one UNIT. Any other tokenizer gets whole documents (by_unit is False)."""

    def __init__(self, path: str):
        self.tokenizer = load_tokenizer(path)
        self.by_unit = is_plain_bpe(path) and self.within(UNIT)
        self.unit = WORD if self.by_unit and self.within(WORD) else UNIT
        self.code = 'H' if self.tokenizer.vocab_size <= 65536 else 'I'  # uint16, uint32
        self.ids, self.held = {}, 0  # unit -> bytes of its ids

    def within(self, pattern: re.Pattern) -> bool:
        return all(pattern.findall(piece) == [piece] for piece in self.tokenizer.pieces())

    def __call__(self, text: str) -> bytes:
        if not self.by_unit:
            return array.array(self.code, self.tokenizer.encode(text)).tobytes()
        out, start = [], 0
        while start < len(text):
            end = start + 65536  # a list of all units would take 10 times the memory of the text
            end = self.unit.match(text, end).end() if end < len(text) else len(text)
            units = self.unit.findall(text, start, end)
            start = end
            if self.held > CACHE:
                self.ids, self.held = {}, 0
            new = list(set(units).difference(self.ids))
            for unit, ids in zip(new, self.tokenizer.encode_batch(new)):
                self.ids[unit] = array.array(self.code, ids).tobytes()
                self.held += 200 + len(unit) + len(self.ids[unit])
            out += map(self.ids.__getitem__, units)
        return b''.join(out)


def is_plain_bpe(path: str) -> bool:
    """Whether a sentencepiece model merges the text as it is, so that only its pieces can tie neighbours together."""
    if not path.endswith('.model'):
        return False
    from sentencepiece.sentencepiece_model_pb2 import ModelProto
    with open(path, 'rb') as f:
        model = ModelProto.FromString(f.read())
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    return (trainer.model_type == trainer.BPE and trainer.byte_fallback and not trainer.treat_whitespace_as_suffix
            and not normalizer.precompiled_charsmap  # no rules of normalisation
            and not normalizer.add_dummy_prefix and not normalizer.remove_extra_whitespaces
            and normalizer.escape_whitespaces)


def train_tokenizer(pieces: list[str], vocab_size: int | None, path: str):
    """Trains a BPE model that loses nothing on `pieces`. vocab_size None: VOCAB_SIZE, or less if they give less."""
    counts = collections.Counter()
    for piece in pieces:
        counts.update(piece)
    # Characters that get a piece of their own: those that make up 99.995 % of the text, as in Llama, but no more than a
    # quarter of the vocabulary; the rest are bytes. Text is parted at the rest, and at two characters that
    # sentencepiece keeps for itself: it leaves out sentences with them.
    size, total, covered, kept = vocab_size or VOCAB_SIZE, sum(counts.values()), 0, set()
    for char in sorted(counts, key=lambda c: (-counts[c], c))[:max(1, (size - 259) // 4)]:
        if covered < 0.99995 * total:
            kept.add(char)
            covered += counts[char]
    apart = re.compile('[' + re.escape(''.join(sorted(set(counts) - kept | {'\0', '\u2585'}))) + ']')
    lines = [part for piece in pieces for line in LINE.findall(piece) for part in apart.split(line) if part.strip('\n')]
    model = io.BytesIO()
    train = functools.partial(
        importlib.import_module('sentencepiece').SentencePieceTrainer.train, model_writer=model, model_type='bpe',
        normalization_rule_name='identity', byte_fallback=True, add_dummy_prefix=False, remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, split_digits=True, character_coverage=1.0, max_sentence_length=1 << 20,
        num_threads=1, minloglevel=2)
    try:
        train(sentence_iterator=iter(lines or [' ']), vocab_size=size)
    except RuntimeError as e:
        most = re.search(r'set it to a value <= (\d+)', str(e))
        if not most:
            raise DataError(f'--vocab_size {size}: the tokenizer cannot be trained: {e}') from e
        if vocab_size:
            raise DataError(f'--vocab_size {size}: too high for this text, which gives at most {most[1]}') from e
        train(sentence_iterator=iter(lines or [' ']), vocab_size=int(most[1]))
    with open(path, 'wb') as f:
        f.write(model.getvalue())


class Sample:
    """The pieces of text with the smallest hashes that make up at most `budget` bytes, whatever the order they come in.

    What is as large as a piece ever dropped is never taken, so that the result is a prefix of all pieces by hash."""

    def __init__(self, budget: int):
        self.cutoff = HASHES if budget else 0
        self.left, self.heap, self.texts = budget, [], {}

    def add(self, hash_: int, text: str):
        if hash_ >= self.cutoff or hash_ in self.texts:
            return
        self.texts[hash_] = text
        heapq.heappush(self.heap, -hash_)
        self.left -= len(text.encode())
        while self.left < 0:
            self.cutoff = -heapq.heappop(self.heap)
            self.left += len(self.texts.pop(self.cutoff).encode())

    def pieces(self) -> list[str]:
        return [self.texts[h] for h in sorted(self.texts)]
