"""What data/images.py reads: which pictures there are, where their bytes lie, and how these become pixels."""
import contextlib
import functools
import glob
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np

from common import fetch_package, need, note, unreadable
from nano.shards import DataError

FORMATS = {'JPEG': '.jpg .jpeg', 'PNG': '.png', 'WEBP': '.webp', 'BMP': '.bmp', 'GIF': '.gif', 'TIFF': '.tif .tiff',
           'PPM': '.ppm .pgm .pbm', 'JPEG2000': '.jp2', 'AVIF': '.avif'}  # Pillow knows more, some by calling programs
SUFFIXES = tuple(' '.join(FORMATS.values()).split())
# EXIF's orientation (tag 274) -> what makes the picture upright, a value of Pillow's Image.Transpose.
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
SPLITS = {'train': 'train', 'training': 'train', 'val': 'val', 'valid': 'val', 'validation': 'val', 'dev': 'val',
          'test': 'test', 'testing': 'test'}  # words in names of files and folders
CIFAR10 = 'airplane automobile bird cat deer dog frog horse ship truck'.split()
FASHION = ['T-shirt/top', 'Trouser', 'Pullover', 'Dress', 'Coat', 'Sandal', 'Shirt', 'Sneaker', 'Bag', 'Ankle boot']
FASHION_LABELS = '657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7'  # sha256 of its 60,000 labels
FASHION_FOLDER, FASHION_PACKAGE = '/usr/share/datasets/fashion-mnist', 'dataset-fashion-mnist'  # Debian's, Expat
DIGITS = 'scikit-learn==1.9.1'  # on PyPI: among its files are 1,797 handwritten digits of 8x8 pixels, BSD licence
DIGITS_SHA256 = '09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22'  # of digits.csv.gz


class Item(NamedTuple):
    """A picture that has not been read yet."""
    name: str  # for people: where to look for it
    key: str  # its name without the folder where the set happens to lie: the hash decides whether it is held out
    split: str  # train, val, or '': the hash decides
    label: int | None  # None or negative: it has none
    place: tuple  # ('span', path, offset, size or None for the whole file) or ('row', path, row, column of .parquet)


@dataclass
class Source:
    """A set of pictures. items(notes) gives the same at each call, in an order that depends on the input alone."""
    what: str
    items: Callable[[dict], Iterator[Item]]
    classes: list[str] | None = None  # None: numbers, as many as occur
    raw: tuple[int, int, int] | None = None  # H, W, C of pixels that are stored as they are; None: encoded pictures
    planes: bool = False  # stored as C, H, W


def open_source(inputs: list[str], image_field: str | None, label_field: str | None) -> Source:
    """Finds out what the inputs are. DataError if they are nothing known, or of several kinds."""
    for path in inputs:
        if not os.path.exists(path):
            raise DataError(f'{path}: no such file or folder')
    files = []
    for path in inputs:
        if not os.path.isdir(path):
            files.append(path)
            continue
        names = listed(path)
        found = [n for n in names if re.search(r'-images[-.]idx3-ubyte(\.gz)?$', n)]
        cifar = [n for n in names if re.fullmatch(r'(data_batch_\d+|test_batch|train|test)\.bin', n)]
        if 'data_batch_1' in names:
            raise DataError(f'{path}: is CIFAR in Python\'s pickles, which can run programs: take the binary version '
                            '(cifar-10-binary.tar.gz or cifar-100-binary.tar.gz)')
        shards, beside = [], ''
        for folder, _, below in os.walk(path, onerror=unreadable) if not found and not cifar else ():
            shards += [os.path.join(folder, n) for n in below if n.endswith(('.parquet', '.tar')) and n[0] != '.']
            beside = beside or next((os.path.join(folder, n) for n in below if n.lower().endswith(SUFFIXES)), '')
        if shards and beside:
            raise DataError(f'{path}: holds {shards[0]}, but also {shown(beside)}: name the files or the folder that '
                            'is meant')
        files += sorted(shards)
        if not shards:
            if len(inputs) > 1:
                raise DataError(f'{path}: several inputs must all be .parquet files, or all .tar files, or folders '
                                'of them; a folder of pictures stands alone')
            return idx(path, found) if found else cifar_binary(path, cifar) if cifar else folders(path)
    kinds = {os.path.splitext(f)[1] for f in files}
    if kinds == {'.parquet'}:
        return parquet(with_splits(files), image_field, label_field)
    if kinds == {'.tar'}:
        return tars(with_splits(files), label_field or 'label')
    raise DataError(f'{files[0]}: is of no known kind, or the inputs are of several: give one folder of pictures, of '
                    'IDX files or of CIFAR\'s .bin files, or .parquet files, or .tar files (unpacked: no .tar.gz)')


def listed(folder: str) -> list[str]:
    try:
        return sorted(n for n in os.listdir(folder) if not n.startswith('.'))
    except OSError as e:
        unreadable(e)


def shown(name: str) -> str:
    """A file name that can be printed: names need not be UTF-8."""
    return os.fsencode(name).decode(errors='backslashreplace')


def held_out(splits: set[str | None], where: str) -> dict[str | None, str]:
    """{split that the input names: split of the shards}: val is what is held out, or test if there is no val.

    '' where names say only one thing, be it test: then it is the hash that decides."""
    if None in splits and 'train' in splits or splits == {'val', 'test'}:
        found = ', '.join(sorted(s or 'none of train, val, test' for s in splits))
        raise DataError(f'{where}: it is not clear what to train on: names say {found}; name every file, or its '
                        'folder, with train, val or test, or none')
    if len(splits) == 1:
        return {splits.pop(): ''}
    if {'val', 'test'} <= splits:
        print(f'{where}: the test split is left out; val is what is held out', flush=True)
        return {'train': 'train', None: 'train', 'val': 'val'}
    return {'train': 'train', None: 'train', 'val': 'val', 'test': 'val'}


def with_splits(files: list[str]) -> list[tuple[str, str]]:
    """(path, split) of each file that is to be read, by the words in its name, or else in its folder's."""
    def word(path):
        for part in (os.path.basename(path), os.path.basename(os.path.dirname(os.path.abspath(path)))):
            found = {SPLITS[w] for w in re.split('[^a-z]+', part.lower()) if w in SPLITS}
            if found:
                return found.pop() if len(found) == 1 else None
        return None

    words = [(path, word(path)) for path in dict.fromkeys(files)]
    known = held_out({w for _, w in words}, os.path.dirname(files[0]) or '.')
    return [(path, known[w]) for path, w in words if w in known]


# Kinds of sources


def folders(root: str) -> Source:
    """root/train/CLASS/*.jpg and root/val/CLASS/*.jpg, or root/CLASS/*.jpg; classes are sorted by name."""
    def classes_of(folder):
        return [n for n in listed(folder) if os.path.isdir(os.path.join(folder, n))]

    top = classes_of(root)
    parts = {n: SPLITS[n.lower()] for n in top if n.lower() in SPLITS}
    if len(parts) < len(top):  # a class may well be called train: then it has pictures and no folders
        parts = {n: s for n, s in parts.items() if classes_of(os.path.join(root, n))}
    if parts:
        known = held_out(set(parts.values()), root)
        parts = {n: known[s] for n, s in parts.items() if s in known}
        if len(set(parts.values())) != len(parts):
            raise DataError(f'{root}: has several folders for one split: {", ".join(parts)}')
    else:
        parts = {'': ''}
    of_train = next(n for n, split in parts.items() if split != 'val')
    classes = classes_of(os.path.join(root, of_train))
    for n in parts:
        if not classes_of(os.path.join(root, n)):
            raise DataError(f'{os.path.join(root, n)}: has no folders, and a folder is a class: CLASS/x.jpg, or '
                            'train/CLASS/x.jpg and val/CLASS/x.jpg (a share is held out without val)')
        for name in classes_of(os.path.join(root, n)):
            if name not in classes:
                raise DataError(f'{os.path.join(root, n, name)}: is not a class of {os.path.join(root, of_train)}: '
                                'sort its pictures into folders of the same names')

    def items(notes):
        for part, split in parts.items():
            for label, name in enumerate(classes):
                top, n = os.path.join(root, part, name), 0
                for folder, below, files in os.walk(top, onerror=unreadable) if os.path.isdir(top) else ():
                    below[:] = sorted(b for b in below if not b.startswith('.'))
                    for file in sorted(f for f in files if not f.startswith('.')):
                        path = os.path.join(folder, file)
                        if not file.lower().endswith(SUFFIXES):
                            note(notes, 'files whose names end in nothing known for pictures, skipped', shown(path))
                            continue
                        n += 1
                        yield Item(shown(path), os.path.relpath(path, os.path.join(root, part)), split, label,
                                   ('span', path, 0, None))
                if not n and split != 'val':
                    raise DataError(f'{top}: is a class without pictures: add some ({" ".join(SUFFIXES)}), or remove '
                                    'the folder')

    return Source(f'{root}: pictures in {len(classes)} folders', items, [shown(c) for c in classes])


def idx(root: str, names: list[str]) -> Source:
    """MNIST's files (http://yann.lecun.com/exdb/mnist): {train,t10k}-{images-idx3,labels-idx1}-ubyte, .gz or not."""
    parts = {}
    for name in sorted(names):  # the .gz after the one without
        prefix = re.split(r'-?images[-.]idx3', name)[0]
        split = {'train': 'train', 't10k': 'val', 'test': 'val', 'val': 'val'}.get(re.split('[^a-z0-9]', prefix)[-1])
        if split is None:
            raise DataError(f'{os.path.join(root, name)}: its name says neither train nor t10k')
        images = parts.setdefault(split, os.path.join(root, name))
        if images.removesuffix('.gz') != os.path.join(root, name).removesuffix('.gz'):
            raise DataError(f'{root}: holds several sets ({os.path.basename(images)}, {name}): one folder for each')
    if 'train' not in parts:
        raise DataError(f'{root}: has no train-images-idx3-ubyte: copy it there')
    shapes, labels = {}, {}
    for split, path in parts.items():
        shapes[split], start = idx_header(path)
        base = os.path.basename(path).replace('images', 'labels').replace('idx3', 'idx1').removesuffix('.gz')
        beside = [os.path.join(root, base + end) for end in ('', '.gz')]
        label_path = next((p for p in beside if os.path.exists(p)), None)
        if label_path is None:
            raise DataError(f'{beside[0]}: is missing: copy it there, the labels of {os.path.basename(path)}')
        (n,), start = idx_header(label_path)
        labels[split] = np.frombuffer(read_span(label_path, start, n), np.uint8)
        if len(shapes[split]) != 3 or n != shapes[split][0]:
            raise DataError(f'{path}: has shape {list(shapes[split])}, but there are {n} labels: files of two sets?')
    if len({s[1:] for s in shapes.values()}) != 1:
        raise DataError(f'{root}: pictures of train and of t10k differ in size: files of two sets?')
    fashion = hashlib.sha256(labels['train'].tobytes()).hexdigest() == FASHION_LABELS
    height, width = shapes['train'][1:]

    def items(notes):
        for split, path in parts.items():
            name, size = os.path.basename(path).removesuffix('.gz'), height * width
            for i, label in enumerate(labels[split].tolist()):
                yield Item(f'{path}, image {i}', f'{name}:{i}', split if len(parts) > 1 else '', label,
                           ('span', path, 16 + i * size, size))

    return Source(f'{root}: {"Fashion-MNIST, " if fashion else ""}IDX files', items, FASHION if fashion else None,
                  (height, width, 1))


def idx_header(path: str) -> tuple[tuple[int, ...], int]:
    """Returns (shape, offset of the data) of an IDX file of bytes."""
    head = read_span(path, 0, 4)
    if head[:3] != b'\0\0\x08' or not 1 <= head[3] <= 4:
        raise DataError(f'{path}: begins with {head.hex()}: no IDX file of bytes (000008..)')
    shape = tuple(np.frombuffer(read_span(path, 4, 4 * head[3]), '>u4').tolist())
    start = 4 + 4 * head[3]
    if not path.endswith('.gz') and os.path.getsize(path) != start + int(np.prod(shape)):
        raise DataError(f'{path}: has {os.path.getsize(path)} bytes, its header says {start + int(np.prod(shape))}: '
                        'copy it again')
    return shape, start


def cifar_binary(root: str, names: list[str]) -> Source:
    """CIFAR's binary version (https://www.cs.toronto.edu/~kriz/cifar.html): rows of 1 label (CIFAR-100: 2, the second
    is the fine one) and 3 planes of 32x32."""
    fine = 'train.bin' in names
    row, column, most = (3074, 1, 100) if fine else (3073, 0, 10)
    held = {'test.bin', 'test_batch.bin'} & set(names)
    labels = {}
    for name in names:
        path = os.path.join(root, name)
        if os.path.getsize(path) % row or not os.path.getsize(path):
            raise DataError(f'{path}: has {os.path.getsize(path)} bytes, not a multiple of {row}: copy it again')
        labels[path] = np.fromfile(path, np.uint8).reshape(-1, row)[:, column].tolist()
        if max(labels[path]) >= most:
            raise DataError(f'{path}: has label {max(labels[path])}, not below {most}: no CIFAR-{most} file')
    classes = None if fine else CIFAR10
    for path in glob.glob(os.path.join(glob.escape(root), 'fine_label_names.txt' if fine else 'batches.meta.txt')):
        classes = read_names(path)

    def items(notes):
        for path, of_file in labels.items():
            name = os.path.basename(path)
            for i, label in enumerate(of_file):
                yield Item(f'{path}, image {i}', f'{name}:{i}', '' if not held else 'val' if name in held else 'train',
                           label, ('span', path, i * row + column + 1, 3072))

    return Source(f'{root}: CIFAR-{most}', items, classes, (32, 32, 3), planes=True)


def parquet(files: list[tuple[str, str]], image_field: str | None, label_field: str | None) -> Source:
    """HuggingFace's form: a column of {bytes, path} or of bytes, and one of whole numbers, named in the metadata."""
    def columns(path):
        """(column of pictures, column of labels, class names or None)"""
        try:
            schema = need('pyarrow.parquet', path).read_schema(path)
        except DataError:
            raise
        except Exception as e:  # pyarrow's own, or OSError
            raise DataError(f'{path}: cannot be read: {str(e).splitlines()[0]}') from e
        kinds = {f.name: str(f.type) for f in schema}
        images = [n for n, t in kinds.items() if t in ('binary', 'large_binary') or t.startswith('struct<') and
                  'bytes: ' in t]
        numbers = [n for n, t in kinds.items() if re.fullmatch('u?int(8|16|32|64)', t)]
        try:
            features = json.loads(schema.metadata[b'huggingface'])['info']['features']
        except (KeyError, TypeError, ValueError):
            features = {}
        named = {n: [str(name) or '?' for name in f['names']] for n, f in features.items()
                 if isinstance(f, dict) and f.get('names')}
        chosen = []
        for field, found, option in ((image_field, images, '--image_field'),
                                     (label_field, [n for n in numbers if n in named] or
                                      [n for n in numbers if 'label' in n or n == 'cls'] or numbers, '--label_field')):
            if field is not None and field not in (images if option == '--image_field' else numbers) or not found:
                raise DataError(f'{path}: no column of {"pictures" if option == "--image_field" else "whole numbers"}'
                                f'{f" {field!r}" if field else ""}: choose one with {option}, there are: '
                                + ', '.join(f'{n} ({t[:40]})' for n, t in kinds.items()))
            if field is None and len(found) > 1:
                raise DataError(f'{path}: has several columns that may be meant: choose one with {option}: '
                                + ', '.join(found))
            chosen.append(field or found[0])
        return chosen[0], chosen[1], named.get(chosen[1])

    image, label, classes = columns(files[0][0])
    for path, _ in files:
        if columns(path) != (image, label, classes):
            raise DataError(f'{path}: has other columns or class names than {files[0][0]}: another set?')

    def items(notes):
        for path, split in files:
            name, row = os.path.basename(path), 0
            for batch in need('pyarrow.parquet', path).ParquetFile(path).iter_batches(1 << 16, columns=[label]):
                for value in batch.column(0).to_pylist():
                    yield Item(f'{path}, row {row}', f'{name}:{row}', split, value, ('row', path, row, image))
                    row += 1

    return Source(f'{len(files)} .parquet files, pictures in {image!r}, labels in {label!r}', items, classes)


def tars(files: list[tuple[str, str]], field: str) -> Source:
    """webdataset's form (https://github.com/webdataset/webdataset): KEY.jpg and KEY.cls, or KEY.json with a label."""
    def items(notes):
        for path, split in files:
            try:
                with tarfile.open(path, 'r:') as tar:
                    for key, picture, label in samples(tar):
                        if picture is None:
                            note(notes, 'samples without a picture, skipped', f'{path}, {shown(key)}')
                        else:
                            yield Item(f'{path}, {shown(picture.name)}', picture.name, split, label,
                                       ('span', path, picture.offset_data, picture.size))
            except (tarfile.TarError, OSError) as e:
                raise DataError(f'{path}: is no .tar file, or damaged ({e}): copy it again (a .tar.gz must be unpacked '
                                'to .tar, so that pictures can be read at their places)') from e

    def samples(tar):
        key, picture, label = None, None, None
        while (member := tar.next()) is not None:
            tar.members.clear()  # tarfile keeps each, for ever
            if not member.isfile():
                continue
            base, dot, suffix = os.path.basename(member.name).partition('.')
            this = os.path.join(os.path.dirname(member.name), base)
            if this != key:
                if key is not None:
                    yield key, picture, label
                key, picture, label = this, None, None
            suffix = suffix.lower()
            if suffix == 'cls':
                label = whole(tar.extractfile(member).read())
            elif suffix == 'json' and label is None:
                try:
                    label = whole(json.load(tar.extractfile(member)).get(field))
                except (ValueError, AttributeError):
                    pass
            elif f'.{suffix}'.endswith(SUFFIXES) and picture is None:
                picture = member
        if key is not None:
            yield key, picture, label

    return Source(f'{len(files)} .tar files', items)


def whole(value: Any) -> int | None:
    try:
        return int(value) if not isinstance(value, (bool, float)) else None
    except (ValueError, TypeError):
        return None


def read_names(path: str) -> list[str]:
    """The lines of a file of class names that are not empty."""
    try:
        with open(path, encoding='utf-8') as f:
            return [line.strip() for line in f if line.strip()]
    except (OSError, ValueError) as e:
        raise DataError(f'{path}: cannot be read: {e}') from e


# The set that is there without asking


def default_source(folder: str) -> Source:
    """Fashion-MNIST as Debian packs it, from this machine or fetched without root; else scikit-learn's digits."""
    more = f'The larger set, Fashion-MNIST with 70,000 of 28x28: apt-get install {FASHION_PACKAGE} (Debian, Ubuntu)'
    if os.path.isdir(FASHION_FOLDER):
        print(f'taking Fashion-MNIST, 70,000 images, from {FASHION_FOLDER}', flush=True)
        return idx(FASHION_FOLDER, [n for n in listed(FASHION_FOLDER) if '-images-' in n])
    os.mkdir(folder)
    if shutil.which('apt-get') and shutil.which('dpkg-deb'):
        print(f'fetching Fashion-MNIST, 70,000 images, Debian\'s package {FASHION_PACKAGE} (31 MB)', flush=True)
        unpacked = (debian_package(FASHION_PACKAGE, folder) or folder) + FASHION_FOLDER
        if os.path.isdir(unpacked):
            source = idx(unpacked, [n for n in listed(unpacked) if '-images-' in n])
            source.what = f'Fashion-MNIST, from Debian\'s package {FASHION_PACKAGE}'
            return source
    print(f'fetching 1,797 handwritten digits of 8x8 pixels, from the package {DIGITS}. {more}, then --force',
          flush=True)
    for path in fetch_package(DIGITS, r'sklearn/datasets/data/digits\.csv\.gz', folder):
        return digits(path, folder)
    raise DataError(f'no package registry answered, so there are no pictures to begin with: name some (--help). {more}')


def debian_package(name: str, folder: str) -> str | None:
    """Fetches and unpacks a Debian package below `folder`, without root: nothing is installed. apt checks signatures.

    A fresh machine has no lists of packages, or old ones: then they are fetched too, into `folder`."""
    own = ['-o', f'Dir::State::lists={folder}/lists', '-o', f'Dir::Cache={folder}/cache', '-o', 'Debug::NoLocking=1']
    os.makedirs(os.path.join(folder, 'lists', 'partial'))
    os.makedirs(os.path.join(folder, 'cache', 'archives', 'partial'))
    for options, first in (([], None), (own, 'update')):
        try:
            for command in filter(None, (first and [first], ['download', name])):
                subprocess.run(['apt-get', '-qq', *options, '-o', 'Acquire::Retries=1', '-o',
                                'Acquire::http::Timeout=15', *command], check=True, timeout=300, cwd=folder,
                               stdin=subprocess.DEVNULL, capture_output=True)
            for deb in glob.glob(os.path.join(glob.escape(folder), f'{name}_*.deb')):
                subprocess.run(['dpkg-deb', '-x', deb, os.path.join(folder, 'deb')], check=True, timeout=300,
                               stdin=subprocess.DEVNULL, capture_output=True)
                return os.path.join(folder, 'deb')
        except (OSError, subprocess.SubprocessError):
            pass
    return None


def digits(path: str, folder: str) -> Source:
    """The digits of scikit-learn: rows of 64 values from 0 to 16, which become 0 to 255, and a label."""
    with open(path, 'rb') as f:
        raw = f.read()
    if hashlib.sha256(raw).hexdigest() != DIGITS_SHA256:
        raise DataError(f'{path}: is not the file of {DIGITS}: its checksum differs')
    table = np.loadtxt(io.BytesIO(gzip.decompress(raw)), np.int64, delimiter=',')
    pixels = os.path.join(folder, 'digits')
    ((table[:, :64] * 255 + 8) // 16).astype(np.uint8).tofile(pixels)
    labels = table[:, 64].tolist()
    return Source(f'scikit-learn\'s digits, from the package {DIGITS}', lambda notes: (
        Item(f'digits, row {i}', f'digits:{i}', '', label, ('span', pixels, 64 * i, 64))
        for i, label in enumerate(labels)), raw=(8, 8, 1))


# From places to pixels


def read_span(path: str, offset: int, size: int | None) -> bytes:
    """Bytes of a file, or of what a .gz holds; the whole file if size is None. OSError, or DataError if it is cut."""
    if size is None:
        with open(path, 'rb') as f:
            return f.read()
    try:
        f = open_file(path)
        f.seek(offset)
        raw = f.read(size)
    except Exception as e:  # OSError, EOFError, zlib.error
        raise DataError(f'{path}: cannot be read: {e}') from e
    if len(raw) != size:
        raise DataError(f'{path}: ends early, {len(raw)} of {size} bytes at {offset}: copy it again')
    return raw


@functools.lru_cache(maxsize=4)  # one picture follows another: a .gz is unpacked once, not from its beginning for each
def open_file(path: str) -> Any:
    return gzip.open(path) if path.endswith('.gz') else open(path, 'rb')


class Rows:
    """Reads a column of .parquet files, row after row; a batch of rows is held at a time."""

    def __init__(self):
        self.at, self.batches, self.first, self.values = None, None, 0, []

    def __call__(self, path: str, row: int, column: str) -> bytes:
        try:
            if (path, column) != self.at:
                file = need('pyarrow.parquet', path).ParquetFile(path)
                groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                self.file, self.starts, self.at, self.group = file, np.cumsum([0] + groups), (path, column), None
            group = int(np.searchsorted(self.starts, row, side='right')) - 1
            if group != self.group or row < self.first:
                self.group, self.first, self.values = group, int(self.starts[group]), []
                self.batches = self.file.iter_batches(16, row_groups=[group], columns=[column])
            while row >= self.first + len(self.values):
                self.first += len(self.values)
                self.values = next(self.batches).column(0)
            value = self.values[row - self.first].as_py()
        except DataError:
            raise
        except Exception as e:  # pyarrow's own, OSError, StopIteration
            raise DataError(f'{path}: row {row} cannot be read: {e}') from e
        raw = value.get('bytes') if isinstance(value, dict) else value
        if raw is None:
            raise ValueError('has no bytes')
        return raw


def decode(raw: bytes, size: int, grey: bool) -> np.ndarray:
    """An encoded picture -> uint8 [size, size, C], by the rules at the top of images.py. Raises what Pillow does."""
    from PIL import Image
    with Image.open(io.BytesIO(raw), formats=list(FORMATS)) as image:
        image.draft(image.mode, (2 * size, 2 * size))  # JPEG's cheap half, quarter or eighth; not smaller than this
        image.load()
        with contextlib.suppress(Exception):  # EXIF that is damaged says nothing, and the picture is good without
            image = image.transpose(TURNS[image.getexif()[0x0112]])
        if image.mode == 'I' or image.mode.startswith('I;16'):
            values = np.asarray(image)
            if values.min() < 0 or values.max() > 65535:
                raise ValueError('has pixels of more than 16 bits')
            image = Image.fromarray((values >> 8).astype(np.uint8))
        elif image.mode == 'F':
            raise ValueError('has floating-point pixels')
        elif image.has_transparency_data:
            image = image.convert('RGBA')
            image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
        return square(image.convert('L' if grey else 'RGB'), size)


def square(image: Any, size: int) -> np.ndarray:
    """The centre square of a Pillow image of 8 bits, resized -> uint8 [size, size, C]."""
    from PIL import Image
    side, (width, height) = min(image.size), image.size
    left, top = (width - side) // 2, (height - side) // 2
    image = image.resize((size, size), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
    return np.asarray(image).reshape(size, size, -1)


def pixels(raw: bytes, shape: tuple[int, int, int], planes: bool, size: int | None, grey: bool) -> np.ndarray:
    """Stored pixels -> uint8 [H, W, C], or the centre square resized if there is a size."""
    height, width, channels = shape
    image_HWC = np.frombuffer(raw, np.uint8).reshape((channels, height, width) if planes else shape)
    image_HWC = image_HWC.transpose(1, 2, 0) if planes else image_HWC
    if size is None and not (grey and channels == 3):
        return image_HWC
    from PIL import Image
    image = Image.fromarray(np.ascontiguousarray(image_HWC[..., 0] if channels == 1 else image_HWC))
    image = image.convert('L') if grey else image
    return square(image, size) if size else np.asarray(image)[..., None]
