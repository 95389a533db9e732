"""Derives manifest.json for token shards of other tools (llm.c, modded-nanogpt), so that they train as they are.

    python data/manifest.py FOLDER [--separator ID] [--vocab_size N] [--tokenizer FILE]

Nothing is copied or changed. The split stands in the file's name: fineweb_train_000001.bin, fineweb_val_000000.bin."""
import argparse
import hashlib
import os
import re
import sys
from typing import Any, Callable

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from nano.shards import HEADER_BYTES, DataError, file_sha256, parallel, read_header, write_manifest  # noqa: E402


def split_of(name: str) -> str:
    found = set(re.findall('(?:^|[^a-z])(train|val)', name.lower()))
    if len(found) != 1:
        raise DataError(f'{name}: its name does not say which split it is of: rename it, with train or val as a word, '
                        'like fineweb_train_000001.bin or fineweb_val_000000.bin')
    return found.pop()


def _text_bytes(tokenizer: Any, path: str, dtype: str, separator: int | None) -> int:
    """UTF-8 bytes of a shard's text; documents are decoded one by one, and a shard without a separator in pieces."""
    n_bytes, start, piece = 0, HEADER_BYTES, 1 << 20
    while len(tokens := np.fromfile(path, np.dtype(dtype).newbyteorder('<'), piece, offset=start)):
        start += tokens.nbytes
        for document in np.split(tokens, np.flatnonzero(tokens == separator)):
            n_bytes += len(tokenizer.decode(document[document != separator].tolist()).encode())
    return n_bytes


def derive(folder: str, separator: int | None = None, vocab_size: int | None = None, tokenizer: str | None = None,
           log: Callable[[str], Any] = print) -> dict:
    """Writes the manifest of a folder of .bin shards that other tools wrote, and returns it. DataError otherwise.

    vocab_size None: the tokenizer's, or the largest id + 1. separator None: the tokenizer's, if the shards have it.
    `bytes` is what the tokenizer decodes, for every split but train (decoding takes hours per 10B tokens), or null."""
    if not os.path.isdir(folder):
        raise DataError(f'{folder}: no such folder')
    if os.path.exists(os.path.join(folder, 'manifest.json')):
        raise DataError(f'{folder}: has a manifest.json already; remove it to derive another')
    names = sorted(n for n in os.listdir(folder) if n.endswith(('.bin', '.bin.tmp')))
    if not names:
        raise DataError(f'{folder}: has no .bin shards')
    if any(n.endswith('.tmp') for n in names):
        raise DataError(f'{folder}: writing it was interrupted (it has .bin.tmp files): run data/text.py again')
    splits = [split_of(n) for n in names]
    paths = [os.path.join(folder, n) for n in names]
    headers = [read_header(p) for p in paths]
    dtype = headers[0][0]
    for path, (other, _) in zip(paths, headers):
        if other != dtype:
            raise DataError(f'{path}: holds {other} tokens but {paths[0]} {dtype}: put one kind into each folder')
    coder = None
    if tokenizer is not None:
        from nano.tokenizer import load_tokenizer
        coder = load_tokenizer(tokenizer)
        vocab_size = coder.vocab_size if vocab_size is None else vocab_size
        separator = coder.separator if separator is None else separator

    def scan(path):
        """Returns (sha256, largest id, first id, separators), in one pass."""
        sha, largest, first, separators = hashlib.sha256(), -1, None, 0
        with open(path, 'rb') as f:
            sha.update(f.read(HEADER_BYTES))
            while chunk := f.read(16 << 20):
                sha.update(chunk)
                tokens = np.frombuffer(chunk, np.dtype(dtype).newbyteorder('<'))
                first = int(tokens[0]) if first is None else first
                largest = max(largest, int(tokens.max()))
                separators += 0 if separator is None else int((tokens == separator).sum())
        return sha.hexdigest(), largest, first, separators

    scans = parallel(scan, paths, f'{folder}: hashing', log)
    largest = max(s[1] for s in scans)
    if largest < 0:
        raise DataError(f'{folder}: its shards hold no tokens')
    if vocab_size is None:
        vocab_size = largest + 1
        log(f'vocab_size {vocab_size}: the largest id + 1; give --vocab_size if the tokenizer has more')
    for path, s in zip(paths, scans):
        if s[1] >= vocab_size:
            raise DataError(f'{path}: holds id {s[1]}, outside the vocabulary of {vocab_size}: another tokenizer?')
    if separator is not None and not any(s[3] for s in scans):
        if not coder or separator != coder.separator:
            raise DataError(f'{folder}: separator {separator} never occurs; the first token is {scans[0][2]}')
        separator = None
    if separator is None:
        log(f'no separator: if {scans[0][2]}, the first token, stands between documents, give --separator')
    shards = []
    for name, path, split, (_, tokens), (sha, _, _, separators) in zip(names, paths, splits, headers, scans):
        n_bytes = _text_bytes(coder, path, dtype, separator) if coder and split != 'train' else None
        shards.append({'file': name, 'split': split, 'tokens': tokens, 'bytes': n_bytes, 'sha256': sha,
                       'documents': None if separator is None else separators})
    beside = tokenizer and os.path.dirname(os.path.abspath(tokenizer)) == os.path.abspath(folder)
    manifest = {
        'format': 1, 'dtype': dtype, 'vocab_size': vocab_size, 'separator': separator, 'shards': shards,
        'tokenizer': tokenizer and {'file': os.path.basename(tokenizer) if beside else os.path.abspath(tokenizer),
                                    'sha256': file_sha256(tokenizer)},
        'source': {'derived_by': 'data/manifest.py'}}
    write_manifest(folder, manifest)
    for split in sorted(set(splits)):
        own = [s for s in shards if s['split'] == split]
        log(f'{split}: {len(own)} shards, {sum(s["tokens"] for s in own):,} tokens')
    for split in {'train', 'val'} - set(splits):
        log(f'no {split} shards')
    log(f'wrote {folder}/manifest.json')
    return manifest


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=(
        'Derives manifest.json for a folder of llm.c or modded-nanogpt token shards, so that they train as they are.'))
    parser.add_argument('folder', help='holds .bin shards with train or val in their names')
    parser.add_argument('--separator', type=int, help='id between documents (GPT-2: 50256; Llama-3: 128000)')
    parser.add_argument('--vocab_size', type=int, help='ids are below this; default: the largest id + 1')
    parser.add_argument('--tokenizer', help='tokenizer.model or tokenizer.json; for samples and bits per byte')
    options = parser.parse_args(argv)
    try:
        derive(**vars(options))
    except (DataError, OSError) as e:
        print(f'error: {e}', file=sys.stderr)
        sys.exit(2)


if __name__ == '__main__':
    main()
