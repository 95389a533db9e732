"""Token shards: writing them, checking them, and reading windows of them.

A corpus is a folder of llm.c / modded-nanogpt shards (https://github.com/karpathy/llm.c/tree/master/dev/data) and a
manifest.json that is written last, so that its presence means complete:

    train_000000.bin ...   256 little-endian int32 (magic, version, token count, 0 ...), then the tokens
    val_000000.bin ...     magic 20240520 version 1: uint16 tokens; magic 20240801 version 7: uint32 tokens
    manifest.json          {"format": 1, "dtype", "vocab_size", "separator", "tokenizer": {"file", "sha256"} | null,
                            "shards": [{"file", "split", "tokens", "documents", "bytes", "sha256"}], "source": {...}}

Shards that other tools wrote train as they are, after one command that derives their manifest and copies nothing:

    python data/manifest.py FOLDER [--separator ID] [--vocab_size N] [--tokenizer FILE]

The shards of a split are one stream of N tokens, cut into ceil((N - 1) / T) windows: window w reads tokens
[w*T, w*T + T) and predicts [w*T + 1, w*T + T + 1), so each token but the first is predicted exactly once.
"""
import concurrent.futures
import contextlib
import hashlib
import json
import mmap
import os
import time
from typing import Any, Callable

import numpy as np

from nano import UserError

IGNORE = -1  # a target that counts for nothing
FORMATS = {'uint16': (20240520, 1), 'uint32': (20240801, 7)}  # dtype: magic, version
HEADER_BYTES = 256 * 4
MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32; a stream of shards is longer and has 64-bit offsets
# Mapped pages count as resident memory, so all maps are dropped after touching this much. A fault maps a whole page of
# the page cache, which can have 2 MB: that makes at most 128 reads, and no more maps, each of which holds a file
# descriptor (FineWeb-100B has 1,031 shards, a process often 1,024 descriptors).
RESIDENT_BYTES, HUGE_PAGE = 256 << 20, 2 << 20


class DataError(UserError):
    """What is wrong with the data, where, and what to do: one line for people."""


def read_header(path: str) -> tuple[str, int]:
    """Returns (dtype, tokens) of a shard whose header fits its size; DataError otherwise."""
    try:
        size = os.path.getsize(path)
        header = np.fromfile(path, '<i4', 256)
    except OSError as e:
        raise DataError(f'{path}: cannot be read ({e.strerror}): copy the shard again') from e
    if len(header) < 256:
        raise DataError(f'{path}: has {size} bytes, a header alone {HEADER_BYTES}: truncated, copy the shard again')
    magic, version, tokens = header[:3].tolist()
    dtype = next((d for d, (m, _) in FORMATS.items() if m == magic), None)
    if dtype is None:
        raise DataError(f'{path}: magic number {magic}, expected 20240520 (uint16) or 20240801 (uint32): not an llm.c '
                        'token shard (nanoGPT writes .bin files without a header: prepare the text with data/text.py)')
    if version != FORMATS[dtype][1]:
        raise DataError(f'{path}: version {version}, expected {FORMATS[dtype][1]} for {dtype} tokens: another format')
    if tokens < 0:
        raise DataError(f'{path}: the header counts {tokens} tokens: damaged, copy the shard again')
    itemsize = np.dtype(dtype).itemsize
    expected = HEADER_BYTES + tokens * itemsize
    if size != expected:
        what = 'truncated' if size < expected else 'trailing bytes'
        odd = f' and is not a whole number of {dtype} tokens' if (size - HEADER_BYTES) % itemsize else ''
        raise DataError(f'{path}: {what}: the header counts {tokens} {dtype} tokens, so {expected} bytes, but the file '
                        f'has {size}{odd}: copy the shard again')
    return dtype, tokens


def file_sha256(path: str) -> str:
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def rename(temp: str, path: str):
    """Renames a file that is already synced, and syncs the folder, so that the name outlives a power cut too."""
    os.replace(temp, path)
    fd = os.open(os.path.dirname(path) or '.', os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: str, value: Any):
    text = json.dumps(value, indent=1)
    temp = f'{path}.{os.uname().nodename}.{os.getpid()}.tmp'  # its own name for each host that shares the folder
    with open(temp, 'w', encoding='utf-8') as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    rename(temp, path)


class ShardWriter:
    """Writes one split as {split}_000000.bin, {split}_000001.bin, ... of `shard_tokens` tokens each, the last shorter.

    A shard has a temporary name and no magic number until it is whole and synced. DataError for what does not fit."""

    def __init__(self, folder: str, split: str, dtype: str, shard_tokens: int):
        if dtype not in FORMATS:
            raise DataError(f'dtype {dtype!r}: shards hold {" or ".join(FORMATS)}')
        if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
            raise DataError(f'shard_tokens {shard_tokens}: must be 1 to {MAX_SHARD_TOKENS}, the header counts in int32')
        os.makedirs(folder, exist_ok=True)
        if os.path.exists(os.path.join(folder, 'manifest.json')):
            raise DataError(f'{folder}: holds a finished corpus; remove its manifest.json to write another over it')
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.entries: list[dict] = []
        self._file = None

    def add(self, tokens: np.ndarray, documents: int = 0, n_bytes: int | None = None):
        """Appends tokens [n] of any integer dtype; `documents` begin here, of `n_bytes` UTF-8 bytes (None: unknown).

        Ids that do not fit the shard's dtype are refused: numpy would wrap 70000 to 4464 without a word."""
        tokens = np.asarray(tokens)
        n = len(tokens)
        if n == 0:
            return
        if tokens.ndim != 1 or tokens.dtype.kind not in 'iu':
            raise DataError(f'{self.split}: tokens must be integers [n], not {tokens.dtype} {list(tokens.shape)}')
        if tokens.min() < 0 or tokens.max() > np.iinfo(self.dtype).max:
            raise DataError(f'{self.split}: token ids from {tokens.min()} to {tokens.max()} do not fit {self.dtype}')
        tokens = tokens.astype(np.dtype(self.dtype).newbyteorder('<'))
        done = 0
        while done < n:
            if self._file is None:
                self._open()
            entry = self.entries[-1]
            end = min(n, done + self.shard_tokens - entry['tokens'])
            self._file.write(tokens[done:end].data)
            entry['tokens'] += end - done
            entry['documents'] += documents if done == 0 else 0
            if n_bytes is None or entry['bytes'] is None:
                entry['bytes'] = None
            else:  # text that spans shards is shared out by tokens: the sum stays exact
                entry['bytes'] += n_bytes * end // n - n_bytes * done // n
            done = end
            if entry['tokens'] == self.shard_tokens:
                self._finish()

    def close(self) -> list[dict]:
        """Completes the last shard. Returns the manifest's entries for this split."""
        if self._file is not None:
            self._finish()
        return self.entries

    def _open(self):
        name = f'{self.split}_{len(self.entries):06d}.bin'
        self._file = open(os.path.join(self.folder, name + '.tmp'), 'wb')
        self._file.write(bytes(HEADER_BYTES))
        self.entries.append({'file': name, 'split': self.split, 'tokens': 0, 'documents': 0, 'bytes': 0})

    def _finish(self):
        header = np.zeros(256, '<i4')
        header[:3] = *FORMATS[self.dtype], self.entries[-1]['tokens']
        self._file.seek(0)
        self._file.write(header.data)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        temp, self._file = self._file.name, None
        read_header(temp)  # a write that failed half-way, as on a full disk, shows in the size
        self.entries[-1]['sha256'] = file_sha256(temp)  # read back: the header, known last, is hashed first
        rename(temp, temp.removesuffix('.tmp'))


def _check_manifest(path: str, m: Any):
    def need(ok, what):
        if not ok:
            raise DataError(f'{path}: {what}: prepare the data again (data/text.py, or data/manifest.py)')

    def whole(v, least=0, most=2**63 - 1):
        return type(v) is int and least <= v <= most

    def keys(d, what, names):
        need(isinstance(d, dict), f'{what} is not a JSON object')
        missing = [k for k in names.split() if k not in d]
        need(not missing, f'{what} lacks {", ".join(missing)}')

    keys(m, 'the manifest', 'format dtype vocab_size separator tokenizer shards')
    need(m['format'] == 1, f'format is {m["format"]!r}, this program reads 1')
    need(m['dtype'] in list(FORMATS), f'dtype is {m["dtype"]!r}, expected {" or ".join(FORMATS)}')
    most = 2**16 if m['dtype'] == 'uint16' else 2**31  # ids are int32 on the device
    need(whole(m['vocab_size'], 1, most), f'vocab_size is {m["vocab_size"]!r}, expected 1 to {most}')
    need(m['separator'] is None or whole(m['separator'], 0, m['vocab_size'] - 1),
         f'separator is {m["separator"]!r}, expected null or an id below {m["vocab_size"]}')
    if m['tokenizer'] is not None:
        keys(m['tokenizer'], 'tokenizer', 'file sha256')
        need(all(isinstance(m['tokenizer'][k], str) for k in ('file', 'sha256')), 'tokenizer is not two strings')
    need(isinstance(m['shards'], list) and m['shards'], 'lists no shards')
    for i, s in enumerate(m['shards']):
        keys(s, f'shard {i}', 'file split tokens documents bytes sha256')
        need(all(isinstance(s[k], str) for k in ('file', 'split', 'sha256')) and whole(s['tokens'])
             and all(s[k] is None or whole(s[k]) for k in ('documents', 'bytes')), f'shard {i} has wrong types')
        need(s['file'] and os.path.basename(s['file']) == s['file'], f'shard file {s["file"]!r} is not a file name')
    names = [s['file'] for s in m['shards']]
    need(len(set(names)) == len(names), 'lists a shard twice')


def write_manifest(folder: str, manifest: dict):
    """Writes manifest.json atomically; call it last, when every shard and the tokenizer are in place."""
    path = os.path.join(folder, 'manifest.json')
    _check_manifest(path, manifest)
    write_json(path, manifest)


def load_manifest(folder: str) -> dict:
    """Returns the manifest of a folder, its keys and types checked; DataError otherwise."""
    manifest = read_manifest(folder, 'data/text.py',
                             f', or for shards of other tools: python data/manifest.py {folder}')
    _check_manifest(os.path.join(folder, 'manifest.json'), manifest)
    return manifest


def read_manifest(folder: str, script: str, or_else: str = '') -> Any:
    """Returns what manifest.json holds, unchecked; DataError says that `script`, or what else, makes such a folder."""
    path = os.path.join(folder, 'manifest.json')
    if '://' in folder:
        raise DataError(f'{folder}: shards are read from a disk of each machine: copy the folder there (launch/fetch.py)')
    if not os.path.isdir(folder):
        raise DataError(f'{folder}: no such folder: prepare data with {script}')
    try:
        with open(path, encoding='utf-8') as f:
            return json.load(f)
    except FileNotFoundError as e:
        raise DataError(f'{folder}: has no manifest.json, so its data is not complete: run {script} again, or with '
                        f'this folder as its source, to make shards of what lies there{or_else}') from e
    except (OSError, ValueError, RecursionError) as e:
        raise DataError(f'{path}: is not readable JSON ({e}): prepare the data again') from e


def fingerprint(manifest: dict) -> str:
    """Changes with the tokens of a data set, not with where it lies or how it is called."""
    content = [(s['split'], s['tokens'], s['sha256']) for s in manifest['shards']]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def bytes_per_token(manifest: dict, split: str) -> float | None:
    """UTF-8 bytes of text for each token of a split, separators counted as tokens of 0 bytes: a loss in nats for each
    token over ln 2 and this is bits per byte. None if the bytes of a shard are unknown."""
    of_split = [s for s in manifest['shards'] if s['split'] == split]
    if not of_split or any(s['bytes'] is None for s in of_split):
        return None
    return sum(s['bytes'] for s in of_split) / max(1, sum(s['tokens'] for s in of_split))


def _check_shards(folder: str, manifest: dict, split: str) -> list[dict]:
    """Returns the entries of a split, their headers and sizes checked against the files."""
    entries = [s for s in manifest['shards'] if s['split'] == split]
    if not sum(s['tokens'] for s in entries):
        splits = ', '.join(sorted({s['split'] for s in manifest['shards'] if s['tokens']})) or 'none'
        raise DataError(f'{folder}: split {split!r} is empty; splits with tokens: {splits}')
    for s in entries:
        path = os.path.join(folder, s['file'])
        dtype, tokens = read_header(path)
        if (dtype, tokens) != (manifest['dtype'], s['tokens']):
            raise DataError(f'{path}: holds {tokens} {dtype} tokens, the manifest says {s["tokens"]} '
                            f'{manifest["dtype"]}: another file of this name; copy the shard again')
    return entries


def parallel(function: Callable, items: list, what: str, log: Callable[[str], Any]) -> list:
    """[function(x) for x in items] on threads (hashing and numpy run without the GIL), with a line every 5 s."""
    told = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        futures = [pool.submit(function, x) for x in items]
        for i, future in enumerate(concurrent.futures.as_completed(futures), 1):
            future.result()
            if time.monotonic() > told + 5:
                told = time.monotonic()
                log(f'{what}: {i} of {len(items)} files')
        return [f.result() for f in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def verify(folder: str, manifest: dict, splits: list[str], log: Callable[[str], Any] = print):
    """Checks header, size and sha256 of each shard of `splits`, and the tokenizer's. DataError names the file."""
    wanted = {s['file']: s['sha256'] for split in splits for s in _check_shards(folder, manifest, split)}
    if manifest['tokenizer']:
        wanted[manifest['tokenizer']['file']] = manifest['tokenizer']['sha256']
    verify_files(folder, wanted, log)


def verify_files(folder: str, wanted: dict[str, str], log: Callable[[str], Any] = print):
    """Checks the sha256 of each file of a folder, {name: sha256}. DataError names the one that differs.

    `.verified.json` remembers name, size, mtime and sha256, so that a restart hashes only what has changed."""
    memo_path = os.path.join(folder, '.verified.json')
    try:
        with open(memo_path, encoding='utf-8') as f:
            memo = dict(json.load(f))
    except (OSError, ValueError, TypeError):
        memo = {}

    def check(name):
        path = os.path.join(folder, name)
        try:
            stat = os.stat(path)
            state = [stat.st_size, stat.st_mtime_ns, wanted[name]]
            found = wanted[name] if memo.get(name) == state else file_sha256(path)
        except OSError as e:
            raise DataError(f'{path}: named by the manifest, cannot be read ({e.strerror}): copy it again') from e
        if found != wanted[name]:
            raise DataError(f'{path}: sha256 is {found}, the manifest says {wanted[name]}: damaged or another file; '
                            'copy it again')
        return name, state

    known = {**memo, **dict(parallel(check, list(wanted), f'{folder}: verifying checksums', log))}
    if known != memo:
        with contextlib.suppress(OSError):  # a read-only folder is hashed at each start
            write_json(memo_path, known)


class Windows:
    """A split's shards as one stream of N tokens in ceil((N - 1) / T) fixed windows; memory-mapped, bounded in RAM.

    The last window is padded (input 0, target IGNORE). Ids must be below the manifest's vocab_size, and below
    `vocab_size` when given. DataError when the split is empty or a shard is not what the manifest says."""

    def __init__(self, folder: str, split: str, seq_len: int, vocab_size: int | None = None):
        if seq_len < 1:
            raise DataError(f'seq_len {seq_len}: must be at least 1')
        self.manifest = load_manifest(folder)
        self.seq_len = int(seq_len)
        self.vocab_size = min(self.manifest['vocab_size'], vocab_size or 2**31)
        entries = [s for s in _check_shards(folder, self.manifest, split) if s['tokens']]
        self.paths = [os.path.join(folder, s['file']) for s in entries]
        self.starts = np.cumsum([0] + [s['tokens'] for s in entries], dtype=np.int64)  # of each shard, and the end
        self.n_tokens = int(self.starts[-1])
        if self.n_tokens < 2:
            raise DataError(f'{folder}: split {split!r} has {self.n_tokens} token, needs 2: to read and to predict')
        self._dtype = np.dtype(self.manifest['dtype']).newbyteorder('<')
        self._maps: dict[int, np.ndarray] = {}
        self._touched = 0

    def __len__(self) -> int:
        return -(-(self.n_tokens - 1) // self.seq_len)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Windows indices [n] -> inputs x and targets y, int32 [n, T]. DataError for an id outside the vocabulary."""
        T = self.seq_len
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f'windows {indices.min()} to {indices.max()} of {len(self)}')
        # One array for both: numpy asks for huge pages from 4 MB on, which saves 1,000 page faults and half of the time
        # of a batch of 512 windows of 1,024.
        x, y = np.empty((2, len(indices), T), np.int32)
        firsts = indices * T
        shards = np.searchsorted(self.starts, firsts, side='right') - 1
        for row, (first, shard) in enumerate(zip(firsts.tolist(), shards.tolist())):
            part = self._slice(shard, first, T + 1)
            while len(part) <= T and (shard := shard + 1) < len(self.paths):  # the window spans shards
                part = np.concatenate([part, self._slice(shard, first + len(part), T + 1 - len(part))])
            n = len(part) - 1
            x[row, :n] = part[:-1]
            y[row, :n] = part[1:]
            x[row, n:] = y[row, n:] = 0  # the end of the stream
        # Compared as unsigned, since a uint32 id from 2**31 on has become negative.
        if len(indices) and max(x[:, 0].view(np.uint32).max(), y.view(np.uint32).max()) >= self.vocab_size:
            self._refuse_id(firsts, np.concatenate([x[:, :1], y], axis=1).view(np.uint32))
        y[indices == len(self) - 1, self.n_tokens - 1 - (len(self) - 1) * T:] = IGNORE
        return x, y

    def blank(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """x and y int32 [n, T] that count for nothing."""
        return np.zeros((n, self.seq_len), np.int32), np.full((n, self.seq_len), IGNORE, np.int32)

    def _refuse_id(self, firsts: np.ndarray, tokens: np.ndarray):
        row, column = np.argwhere(tokens >= self.vocab_size)[0]
        at = firsts[row] + column
        shard = np.searchsorted(self.starts, at, side='right') - 1
        raise DataError(f'{self.paths[shard]}: token {at - self.starts[shard]} has id {tokens[row, column]}, outside '
                        f'the vocabulary of {self.vocab_size}: another tokenizer wrote it, or vocab_size is too small')

    def _slice(self, shard: int, first: int, n: int) -> np.ndarray:
        """The n tokens of the stream from `first` on, which is in `shard`; fewer where the shard ends."""
        self._touched += n * self._dtype.itemsize + HUGE_PAGE
        if self._touched > RESIDENT_BYTES:
            self._maps.clear()
            self._touched = 0
        try:
            tokens, start = self._maps[shard]
        except KeyError:
            tokens, start = self._maps[shard] = self._map(shard), int(self.starts[shard])
        return tokens[first - start:first - start + n]

    def _map(self, shard: int) -> np.ndarray:
        n = int(self.starts[shard + 1] - self.starts[shard])
        try:
            with open(self.paths[shard], 'rb') as f:
                mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.madvise(mmap.MADV_RANDOM)  # no read-ahead beyond the window
            return np.frombuffer(mapped, self._dtype, n, HEADER_BYTES)
        except (OSError, ValueError) as e:
            raise DataError(f'{self.paths[shard]}: removed or cut while in use ({e})') from e
