"""Turns any text into token shards for the train scripts.

    python data/text.py                                          Shakespeare's plays, to data/shards/text
    python data/text.py books/ notes.md --out data/shards/mine   every text file in a folder, and one more
    python data/text.py stories.txt --split_on '<|endoftext|>'   one file of many documents
    python data/text.py dump.jsonl.zst --field body --tokenizer llama/tokenizer.json
    python data/text.py hf:roneneldan/TinyStories                a dataset of the HuggingFace hub (needs disk space)

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
import functools
import hashlib
import os
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Callable, Iterable, Iterator

import numpy as np
from tqdm import tqdm

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE]
import common  # noqa: E402
from bpe import HASHES, VOCAB_SIZE, Encoder, Sample, train_tokenizer  # noqa: E402
from common import Parser, content_hash, make, note, whole_number  # noqa: E402
from nano.shards import HEADER_BYTES, DataError, ShardWriter, file_sha256, load_manifest, write_manifest  # noqa: E402
from nano.tokenizer import load_tokenizer  # noqa: E402
from sources import BATCH, SUFFIXES, documents, fetch, find_files, items  # noqa: E402

SAMPLE_PIECE = re.compile(r'.{1,2000}(?=[ \n]|\Z)|.{1,2000}', re.S)


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


def choose_val(low: int, high: int, n_val: int, n: int, args: argparse.Namespace) -> int:
    """The hash below which a document is val, of n documents with hashes from low to high, n_val of them below
    --val_fraction. A split that would be empty gets the document at its end of the hashes."""
    if args.val_fraction == 0:
        return 0
    if low == high:
        print('no val split, so nothing will be held out: there is only one document'
              + (f', which occurs {n:,} times' if n > 1 else '')
              + r". Give more, or cut text files into documents: for one at each blank line, --split_on '\n\n'")
        return 0
    return low + 1 if n_val == 0 else high if n_val == n else int(args.val_fraction * HASHES)


def check_val(val: list[int], total: list[int], fraction: float):
    """Warns if val, of (tokens, documents, bytes), is far from its fraction of the bytes, or small."""
    share = val[2] / total[2]
    if not fraction / 3 <= share <= fraction * 3 or 1 - share < (1 - fraction) / 3:
        why = ('documents are not cut, and a hash of the text decides where each goes, so few or unequal ones divide '
               'unevenly. If a text file holds many, --split_on STRING cuts it')
    elif val[0] < 5000:
        why = 'the loss on so few says little. Give more text, or a larger --val_fraction'
    else:
        return
    print(f'warning: val has {val[1]:,} of {total[1]:,} documents, {share:.2%} of the bytes (--val_fraction asks for '
          f'{fraction:.2%}), {val[0]:,} tokens: {why}')


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
    if args.split_on and n <= len(files):
        print(f'warning: --split_on {args.split_on.decode()!r} occurs in none of the files', flush=True)
    threshold = choose_val(low, high, n_val, n, args)

    model = os.path.join(tmp, 'tokenizer' + os.path.splitext(args.tokenizer or 'a.model')[1])
    if args.tokenizer:
        shutil.copyfile(args.tokenizer, model)
    else:
        pieces = sample.pieces()
        print(f'training a tokenizer on {args.sample_bytes - sample.left:,} bytes', flush=True)
        pool.submit(train_tokenizer, pieces, args.vocab_size, model).result()
        del pieces, sample
    with open(model, 'rb') as f:
        os.fsync(f.fileno())  # like the shards: in place before the manifest says so
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
    if threshold:
        check_val(totals['val'].tolist(), (totals['train'] + totals['val']).tolist(), args.val_fraction)


def options(argv: list[str] | None) -> argparse.Namespace:
    """Reads and checks the command line."""
    p = Parser('data/text.py', __doc__)
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
    add('--val_fraction', type=float, help='of the documents (default: 0.05; without INPUT 0.15, 4 of the 38 plays)')
    add('--shard_tokens', type=whole_number, default=100_000_000, help='tokens per shard (default: %(default)s)')
    add('--workers', type=whole_number, default=0, help='processes (default: one per core)')
    add('--seed', type=whole_number, default=0, help='another one draws other val documents (default: %(default)s)')
    add('--force', action='store_true', help='replace finished output')
    args = p.parse_args(argv)
    if args.val_fraction is None:
        args.val_fraction = 0.05 if args.inputs else 0.15
    for ok, problem in (
            (args.split_on is None or 1 <= len(args.split_on) <= 1000, '--split_on: from 1 to 1000 characters'),
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
    wanted = {'inputs': args.inputs, 'input files': hashlib.sha256(repr(stats).encode()).hexdigest()[:16],
              'tokenizer': file_sha256(args.tokenizer)[:16] if args.tokenizer else None,
              'split_on': args.split_on.decode() if args.split_on else None}
    wanted |= {k: getattr(args, k) for k in 'field vocab_size sample_bytes val_fraction shard_tokens seed'.split()}

    def damaged(out, manifest):
        size = np.dtype(manifest['dtype']).itemsize
        paths = {os.path.join(out, s['file']): HEADER_BYTES + s['tokens'] * size for s in manifest['shards']}
        return next((p for p, n in paths.items() if not os.path.exists(p) or os.path.getsize(p) != n), None)

    make(args, wanted, 'text', r'(train|val)_\d{6,}\.bin|manifest\.json|tokenizer\.(model|json)|\.verified\.json',
         load_manifest, damaged, lambda tmp, pool: build(args, wanted, tmp, pool))


def main(argv: list[str] | None = None) -> int:
    return common.main(argv, options, prepare)


if __name__ == '__main__':
    common.run(main)
