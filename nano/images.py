"""Image shards: writing them, checking them, and reading any pictures of them as one array.

A set is a folder that data/images.py makes: numpy's own files, and a manifest.json that is written last, so that its
presence means complete. Anyone can open them with np.load(FILE, mmap_mode='r'):

    train_000000_images.npy   uint8 [n, H, W, C], decoded and resized once, C is 3 (RGB) or 1 (grey)
    train_000000_labels.npy   int32 [n], from 0 to the number of classes - 1; then train_000001_..., val_000000_...
    manifest.json             {"format": 1, "kind": "images", "image": [H, W, C], "classes": [name, ...], "mean": [C],
                              "std": [C], "resize": words, "shards": [{"split", "count", "images": {"file", "sha256"},
                              "labels": {"file", "sha256"}}], "source": {...}}

mean and std are of all pixels of the train split, each channel by itself, with 255 as 1. The files are in the order of
the input; it is the loader that shuffles (nano/loader.py). Random crops and flips are for the device: store pictures
larger than they are trained, and cut there.
"""
import contextlib
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterable

import numpy as np

from nano.shards import IGNORE, DataError, file_sha256, read_manifest, rename, verify_files, write_json

SCRIPT = 'data/images.py'
BLOCK = 64  # pictures that a thread reads at a time, and files that it has open at most
THREADS = 4  # that read a batch; most of it is copying, which Python's lock does not hold up


class Images:
    """The pictures of a split, in the order of its shards. DataError if it is empty or a file is not what it should be.

    Nothing is mapped: each picture is read into its place in the batch, so only batches take memory, however large the
    set, and a file that is cut while in use is an error, where a map would end the process (SIGBUS)."""

    def __init__(self, folder: str, split: str):
        self.manifest = load_manifest(folder)
        entries = _check_shards(folder, self.manifest, split)
        self.shape = tuple(self.manifest['image'])  # H, W, C
        self.classes = self.manifest['classes']
        self.paths = [os.path.join(folder, s['images']['file']) for s in entries]
        self.starts = np.cumsum([0] + [s['count'] for s in entries], dtype=np.int64)  # of each shard, and the end
        self.data_starts = [_read_header(p, 'uint8', (s['count'], *self.shape)) for p, s in zip(self.paths, entries)]
        self._states = [_state(os.stat(p)) for p in self.paths]
        self.threads = ThreadPoolExecutor(THREADS, 'images')
        self.labels_N = np.concatenate([_read_labels(folder, s, len(self.classes)) for s in entries])

    def __len__(self) -> int:
        return len(self.labels_N)

    def blank(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """n rows that count for nothing: uint8 [n, H, W, C] of 0, int32 [n] of IGNORE."""
        return np.zeros((n, *self.shape), np.uint8), np.full(n, IGNORE, np.int32)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pictures indices [n], in any order -> uint8 [n, H, W, C] and their classes, int32 [n]."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f'images {indices.min()} to {indices.max()} of {len(self)}')
        images_NHWC = np.empty((len(indices), *self.shape), np.uint8)
        blocks = [slice(i, i + BLOCK) for i in range(0, len(indices), BLOCK)]
        list(self.threads.map(self._read_block, (indices[b] for b in blocks), (images_NHWC[b] for b in blocks)))
        return images_NHWC, self.labels_N[indices]

    def _read_block(self, indices: np.ndarray, images_NHWC: np.ndarray):
        size = int(np.prod(self.shape))
        shards = (np.searchsorted(self.starts, indices, side='right') - 1).tolist()
        rows = (indices - self.starts[shards]).tolist()
        offsets = [self.data_starts[s] + row * size for s, row in zip(shards, rows)]
        with contextlib.ExitStack() as stack:
            files = {}
            for shard in set(shards):
                try:
                    files[shard] = fd = os.open(self.paths[shard], os.O_RDONLY | os.O_CLOEXEC)
                except OSError as e:
                    raise DataError(f'{self.paths[shard]}: cannot be read ({e.strerror}): removed while in use?') from e
                stack.callback(os.close, fd)
                if _state(os.fstat(fd)) != self._states[shard]:
                    raise DataError(f'{self.paths[shard]}: was changed or replaced while in use: start again')
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead beyond the picture
            # A network disk answers after a millisecond or so: told of all pictures first, it works on them at once.
            for shard, offset in zip(shards, offsets):
                os.posix_fadvise(files[shard], offset, size, os.POSIX_FADV_WILLNEED)
            for shard, row, offset, image_HWC in zip(shards, rows, offsets, images_NHWC):
                todo = memoryview(image_HWC).cast('B')
                try:
                    while todo and (n := os.preadv(files[shard], [todo], offset)):
                        todo, offset = todo[n:], offset + n
                except OSError as e:
                    raise DataError(f'{self.paths[shard]}: cannot be read ({e.strerror})') from e
                if todo:
                    raise DataError(f'{self.paths[shard]}: ends within image {row}: cut while in use')


def _state(stat: os.stat_result) -> tuple[int, int, int]:
    """Differs if a file has been written or replaced."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def write_shard(folder: str, split: str, index: int, shape: tuple[int, int, int],
                pictures: Iterable[tuple[np.ndarray, int]]) -> dict | None:
    """Writes (uint8 [H, W, C], class) pairs, one at a time, as one shard. Returns its entry for the manifest.

    Files have temporary names until they are whole and synced. None, and no file, if there are no pictures."""
    os.makedirs(folder, exist_ok=True)
    entry = {kind: {'file': f'{split}_{index:06d}_{kind}.npy'} for kind in ('images', 'labels')}
    temps = {kind: os.path.join(folder, e['file'] + '.tmp') for kind, e in entry.items()}
    labels = []
    with open(temps['images'], 'wb') as f:
        _write_header(f, 'uint8', (0, *shape))  # of the same length for any count: numpy leaves room for it
        for image_HWC, label in pictures:
            if image_HWC.shape != tuple(shape) or image_HWC.dtype != np.uint8:
                raise ValueError(f'{image_HWC.dtype} {image_HWC.shape} where uint8 {shape} belongs')
            f.write(np.ascontiguousarray(image_HWC).data)
            labels.append(label)
        f.seek(0)
        _write_header(f, 'uint8', (len(labels), *shape))
        f.flush()
        os.fsync(f.fileno())
    if not labels:
        os.unlink(temps['images'])
        return None
    with open(temps['labels'], 'wb') as f:
        _write_header(f, 'int32', (len(labels),))
        f.write(np.array(labels, '<i4').data)
        f.flush()
        os.fsync(f.fileno())
    for kind, temp in temps.items():
        entry[kind]['sha256'] = file_sha256(temp)
        rename(temp, temp.removesuffix('.tmp'))
    return {'split': split, 'count': len(labels), **entry}


def _write_header(f: Any, dtype: str, shape: tuple[int, ...]):
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype).newbyteorder('<'))
    np.lib.format.write_array_header_1_0(f, {'descr': descr, 'fortran_order': False, 'shape': shape})


def _read_header(path: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the offset of the data in a .npy file that holds what is expected; DataError otherwise."""
    try:
        with open(path, 'rb') as f:
            np.lib.format.read_magic(f)
            found, fortran, kind = np.lib.format.read_array_header_1_0(f)
            start, size = f.tell(), os.fstat(f.fileno()).st_size
    except OSError as e:
        raise DataError(f'{path}: cannot be read ({e.strerror}): copy the shard again') from e
    except Exception as e:  # of numpy, and of the parser of Python's syntax behind it
        raise DataError(f'{path}: is no .npy file ({str(e).splitlines()[0]}): damaged, copy the shard again') from e
    if (found, fortran, kind) != (shape, False, np.dtype(dtype).newbyteorder('<')):
        raise DataError(f'{path}: holds {kind} {list(found)}, the manifest says {dtype} {list(shape)}: another file of '
                        'this name; copy the shard again')
    expected = start + kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if size != expected:
        raise DataError(f'{path}: has {size} bytes, its header says {expected}: '
                        f'{"truncated" if size < expected else "trailing bytes"}, copy the shard again')
    return start


def _read_labels(folder: str, entry: dict, n_classes: int) -> np.ndarray:
    path, shape = os.path.join(folder, entry['labels']['file']), (entry['count'],)
    labels_n = np.fromfile(path, '<i4', entry['count'], offset=_read_header(path, 'int32', shape))
    if labels_n.min() < 0 or labels_n.max() >= n_classes:
        raise DataError(f'{path}: has labels from {labels_n.min()} to {labels_n.max()}, but there are {n_classes} '
                        'classes: damaged, copy the shard again')
    return labels_n


def _check_manifest(path: str, m: Any):
    def need(ok, what):
        if not ok:
            raise DataError(f'{path}: {what}: prepare the data again ({SCRIPT})')

    def whole(v):
        return type(v) is int and v >= 1

    def keys(d, what, names):
        need(isinstance(d, dict), f'{what} is not a JSON object')
        missing = [k for k in names.split() if k not in d]
        need(not missing, f'{what} lacks {", ".join(missing)}')

    need(isinstance(m, dict) and m.get('kind') == 'images', 'is not the manifest of image shards')
    keys(m, 'the manifest', 'format image classes mean std resize shards')
    need(m['format'] == 1, f'format is {m["format"]!r}, this program reads 1')
    image, classes = m['image'], m['classes']
    need(isinstance(image, list) and len(image) == 3 and all(map(whole, image)) and image[2] in (1, 3),
         f'image is {image!r}, expected [H, W, C] with C 1 or 3')
    need(isinstance(classes, list) and classes and all(isinstance(c, str) and c for c in classes),
         'classes is not a list of names')
    need(len(set(classes)) == len(classes), 'classes has a name twice')
    for name in ('mean', 'std'):
        need(isinstance(m[name], list) and len(m[name]) == image[2]
             and all(type(v) in (int, float) and 0 <= v <= 1 for v in m[name]),
             f'{name} is {m[name]!r}, expected {image[2]} numbers from 0 to 1')
    need(isinstance(m['shards'], list) and m['shards'], 'lists no shards')
    names = []
    for i, s in enumerate(m['shards']):
        keys(s, f'shard {i}', 'split count images labels')
        need(isinstance(s['split'], str) and whole(s['count']), f'shard {i} has wrong types')
        for kind in ('images', 'labels'):
            keys(s[kind], f'{kind} of shard {i}', 'file sha256')
            name = s[kind]['file']
            need(isinstance(name, str) and isinstance(s[kind]['sha256'], str), f'{kind} of shard {i}: wrong types')
            need(name and os.path.basename(name) == name, f'shard file {name!r} is not a file name')
            names.append(name)
    need(len(set(names)) == len(names), 'lists a file twice')


def write_manifest(folder: str, manifest: dict):
    """Writes manifest.json atomically; call it last, when every shard is in place."""
    path = os.path.join(folder, 'manifest.json')
    _check_manifest(path, manifest)
    write_json(path, manifest)


def load_manifest(folder: str) -> dict:
    """Returns the manifest of a folder, its keys and types checked; DataError otherwise."""
    manifest = read_manifest(folder, SCRIPT)
    _check_manifest(os.path.join(folder, 'manifest.json'), manifest)
    return manifest


def fingerprint(manifest: dict) -> str:
    """Changes with the pictures, their classes and the meaning of these, not with where they lie."""
    shards = [(s['split'], s['count'], s['images']['sha256'], s['labels']['sha256']) for s in manifest['shards']]
    return hashlib.sha256(json.dumps([manifest['image'], manifest['classes'], shards]).encode()).hexdigest()


def _check_shards(folder: str, manifest: dict, split: str) -> list[dict]:
    """Returns the entries of a split, headers and sizes checked against the files."""
    entries = [s for s in manifest['shards'] if s['split'] == split]
    if not entries:
        raise DataError(f'{folder}: split {split!r} is empty; splits with images: '
                        + ', '.join(sorted({s['split'] for s in manifest['shards']})))
    for s in entries:
        for kind, dtype, shape in (('images', 'uint8', manifest['image']), ('labels', 'int32', [])):
            _read_header(os.path.join(folder, s[kind]['file']), dtype, (s['count'], *shape))
    return entries


def verify(folder: str, manifest: dict, splits: list[str], log: Callable[[str], Any] = print):
    """Checks header, size and sha256 of each file of `splits`; what was checked is remembered (see verify_files)."""
    entries = [s for split in splits for s in _check_shards(folder, manifest, split)]
    verify_files(folder, {s[kind]['file']: s[kind]['sha256'] for s in entries for kind in ('images', 'labels')}, log)
