"""Turns pictures of any kind into image shards for the train scripts: decoded and resized once, here.

    python data/images.py                                Fashion-MNIST (or small digits), to data/shards/images
    python data/images.py imagenet/ --size 256           train/CLASS/x.jpg and val/CLASS/x.jpg
    python data/images.py flowers/ --out data/shards/flowers              CLASS/x.jpg: a share is held out as val
    python data/images.py cifar-10-batches-bin/          CIFAR-10 or CIFAR-100, the binary version
    python data/images.py mnist/                         IDX files: MNIST and its family, .gz or not
    python data/images.py imagenette/data/*.parquet      HuggingFace's form: pictures in a column, labels in another
    python data/images.py shards/*.tar                   webdataset's form: x.jpg beside x.cls, or x.json with a label

The output, shards and manifest.json (nano/images.py), appears under its name only when it is complete, and is the same
for any number of workers. Words in the names of folders, .parquet and .tar files say which split they are of: train;
val, valid, validation or dev; test counts as val where there is none, and is left out otherwise. Where nothing is held
out, the hash of a picture's name does it for --val_fraction of them, but for one of each class at least.

A picture becomes a square of --size by these rules: its centre square, whose side is its shorter side, is resized with
Pillow's bicubic filter, which is antialiased; a smaller one is enlarged. That is what is evaluated. Random crops of the
training are made from it later, on the device: --size 256 leaves room for crops of 224. First: a JPEG is decoded at
1/2, 1/4 or 1/8 if that leaves at least twice the size; EXIF's orientation is applied; of 16 bits the upper 8 are
taken; what is transparent is laid over white; all else (palette, grey, CMYK) becomes RGB, or grey with --grey, as
Pillow converts it; colour profiles are ignored; of an animation the first frame is taken. IDX files and CIFAR keep
their size without --size, and their channels.

What cannot be decoded is left out, counted, and named in broken.txt in the output; more than --max_broken of all, or a
class that is left without pictures to train on, is an error. Pictures without a label (none, or below 0) are left out
and counted.
"""
import argparse
import collections
import concurrent.futures
import hashlib
import multiprocessing
import os
import shutil
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Iterator

import numpy as np
from tqdm import tqdm

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE]
import common  # noqa: E402
import pictures  # noqa: E402
from common import Parser, content_hash, make, need, note, start_worker, unreadable, whole_number  # noqa: E402
from nano.images import load_manifest, write_manifest, write_shard  # noqa: E402
from nano.shards import DataError  # noqa: E402

SHARD_BYTES, SHARD_IMAGES = 128 << 20, 8192  # a shard is one worker's task, and its list of names crosses a pipe
HASHES = 2**64

seen: Any = None  # pictures that all workers have been through, for the bar


def start(counter: Any):
    global seen
    seen = counter
    start_worker()
    warnings.simplefilter('ignore')  # of Pillow, on odd files: they are decoded, or named as broken


def pack(folder: str, split: str, index: int, items: list[tuple], how: dict) -> tuple:
    """Writes one shard of items (name, label, place). Returns (its entry or None, images per class, sums and sums of
    squares of each channel, [(name of a broken picture, why)])."""
    counts, broken, rows = collections.Counter(), [], pictures.Rows()
    height, width, channels = how['shape']
    sums, squares = np.zeros(channels, np.int64), np.zeros(channels, np.int64)

    def decoded():
        nonlocal sums, squares
        for name, label, place in items:
            try:
                raw = pictures.read_span(*place[1:]) if place[0] == 'span' else rows(*place[1:])
                if how['raw']:
                    image_HWC = pictures.pixels(raw, how['raw'], how['planes'], how['size'], how['grey'])
                else:
                    image_HWC = pictures.decode(raw, how['size'], how['grey'])
            except (DataError, MemoryError):
                raise
            except Exception as e:  # Pillow's decoders raise anything
                why = 'is no picture that Pillow reads' if type(e).__name__ == 'UnidentifiedImageError' else str(e)
                broken.append((name, ' '.join((why or type(e).__name__).split())[:200]))
            else:
                counts[label] += 1
                values = np.ascontiguousarray(image_HWC.reshape(-1, channels).T).astype(np.int64)
                sums += values.sum(1)
                squares += np.einsum('cn,cn->c', values, values)  # channels first: 0.2 ms, where last would take 5
                yield image_HWC, label
            with seen.get_lock():
                seen.value += 1

    entry = write_shard(folder, split, index, how['shape'], decoded())
    return entry, counts, sums, squares, broken


def in_order(pool: ProcessPoolExecutor, workers: int, tasks: Iterator[tuple], counter: Any, bar: tqdm) -> Iterator:
    """Results of pack(*task) in the order of the tasks; a few more than the workers are under way."""
    def result(future):
        while concurrent.futures.wait([future], 0.2).not_done:
            bar.update(counter.value - bar.n)
        return future.result()

    waiting = collections.deque()
    for task in tasks:
        waiting.append(pool.submit(pack, *task))
        if len(waiting) > workers + 2:
            yield result(waiting.popleft())
    while waiting:
        yield result(waiting.popleft())
    bar.update(counter.value - bar.n)


class Splits:
    """Which split a picture goes to, after one pass over all of them; counts and checks them on the way."""

    def __init__(self, source: pictures.Source, val_fraction: float, key: bytes):
        self.limit, self.key = int(val_fraction * HASHES), key
        self.highest: dict[int, int] = {}  # class: of its hashes
        self.notes: dict = {}
        self.n, self.largest = 0, -1
        for item in tqdm(source.items(self.notes), 'finding', unit=' images', disable=None):
            if not self.has_label(item):
                note(self.notes, 'pictures without a label, left out', item.name)
                continue
            self.n += 1
            self.largest = max(self.largest, item.label)
            if source.classes is not None and item.label >= len(source.classes):
                raise DataError(f'{item.name}: has label {item.label}, but there are {len(source.classes)} classes: '
                                'name as many with --labels, or mend the label')
            if item.split == '':
                hash_ = content_hash(os.fsencode(item.key), self.key)
                self.highest[item.label] = max(hash_, self.highest.get(item.label, 0))

    def has_label(self, item: pictures.Item) -> bool:
        return item.label is not None and item.label >= 0

    def of(self, item: pictures.Item) -> str:
        if item.split:
            return item.split
        hash_ = content_hash(os.fsencode(item.key), self.key)
        return 'val' if hash_ < self.limit and hash_ != self.highest[item.label] else 'train'


def tasks(source: pictures.Source, splits: Splits, folder: str, shard_images: int, how: dict) -> Iterator[tuple]:
    waiting, done = {'train': [], 'val': []}, {'train': 0, 'val': 0}

    def task(split):
        items, waiting[split] = waiting[split], []
        done[split] += 1
        return folder, split, done[split] - 1, items, how

    for item in source.items({}):
        if splits.has_label(item):
            split = splits.of(item)
            waiting[split].append((item.name, item.label, item.place))
            if len(waiting[split]) == shard_images:
                yield task(split)
    yield from (task(split) for split, items in waiting.items() if items)


def build(args: argparse.Namespace, wanted: dict, tmp: str, pool: ProcessPoolExecutor, counter: Any):
    """Writes the set, manifest last, into the folder tmp."""
    pictures.open_file.cache_clear()
    fetched = os.path.join(tmp, 'fetched')
    source = (pictures.open_source(args.inputs, args.image_field, args.label_field) if args.inputs
              else pictures.default_source(fetched))
    if args.labels:
        source.classes = args.labels
    if twice := [name for name, n in collections.Counter(source.classes).items() if n > 1]:
        raise DataError(f'{source.what}: two classes are called {twice[0]!r}: name them with --labels')
    size, grey = args.size if source.raw else args.size or 224, args.grey
    if size or grey or not source.raw:
        pillow = need('PIL', 'decoding and resizing').__version__
    height, width, channels = source.raw or (size, size, 3)
    shape = (size or height, size or width, 1 if grey else channels)
    how = {'raw': source.raw, 'planes': source.planes, 'size': size, 'grey': grey, 'shape': shape}
    resize = 'none' if not size else (f'the centre square of the shorter side, resized to {size}x{size} with Pillow '
                                      f'{pillow}\'s bicubic filter, antialiased')

    print(f'reading {source.what}', flush=True)
    splits = Splits(source, args.val_fraction, args.key)
    for what, (times, where) in splits.notes.items():
        print(f'{what}: {times:,} (first: {where})', flush=True)
    if not splits.n:
        raise DataError(f'{source.what}: no picture with a label' + (', see above' if splits.notes else ''))
    if not source.classes and splits.largest >= splits.n:
        raise DataError(f'{source.what}: labels go up to {splits.largest:,}, but there are {splits.n:,} pictures: '
                        'these numbers are no classes (choose others with --label_field)')
    classes = source.classes or [str(i) for i in range(splits.largest + 1)]
    shard_images = args.shard_images or max(1, min(SHARD_IMAGES, SHARD_BYTES // int(np.prod(shape))))

    entries, n_broken, examples = [], 0, 10
    counts = {'train': collections.Counter(), 'val': collections.Counter()}
    sums, squares = np.zeros(shape[2], object), np.zeros(shape[2], object)  # Python's integers: exact, of any size
    with open(os.path.join(tmp, 'broken.txt'), 'w', encoding='utf-8') as f, \
            tqdm(None, 'packing', splits.n, unit=' images', disable=None) as bar:
        work = tasks(source, splits, tmp, shard_images, how)
        for entry, count, sums_, squares_, broken in in_order(pool, args.workers, work, counter, bar):
            for name, why in broken:
                n_broken += 1
                f.write(f'{name}\t{why}\n')
                if n_broken <= examples:
                    bar.write(f'broken, left out: {name}: {why}', sys.stdout)
            if entry is None:
                continue
            entries.append(entry)
            counts[entry['split']] += count
            if entry['split'] == 'train':
                sums, squares = sums + sums_.astype(object), squares + squares_.astype(object)
    if n_broken + sum(c.total() for c in counts.values()) != splits.n:
        raise DataError(f'{source.what}: changed while it was read: run again')
    empty = [name for i, name in enumerate(classes) if not counts['train'][i]]
    if n_broken:
        named = f'{args.out}/broken.txt'
        problem = n_broken > args.max_broken * splits.n
        if problem or empty:  # the output goes, but what is broken must be known
            named = os.path.realpath(args.out) + '.broken.txt'
            shutil.copyfile(os.path.join(tmp, 'broken.txt'), named)
        print(f'{n_broken:,} of {splits.n:,} pictures are broken and left out: {named} names all', flush=True)
        if problem:
            raise DataError(f'{n_broken:,} of {splits.n:,} pictures are broken, more than --max_broken '
                            f'{args.max_broken:g} of them: see {named}')
    else:
        os.unlink(os.path.join(tmp, 'broken.txt'))
    if empty:
        raise DataError(f'{len(empty):,} of {len(classes):,} classes have no pictures to train on, the first is '
                        f'{empty[0]!r}: add some, or leave the class out (labels count from 0 without gaps)')

    shutil.rmtree(fetched, ignore_errors=True)
    entries.sort(key=lambda e: (e['split'], e['images']['file']))
    n_values = counts['train'].total() * shape[0] * shape[1]
    mean = [int(s) / n_values / 255 for s in sums]
    std = [max(0, int(q) * n_values - int(s)**2)**0.5 / n_values / 255 for s, q in zip(sums, squares)]
    write_manifest(tmp, {'format': 1, 'kind': 'images', 'image': list(shape), 'classes': classes, 'mean': mean,
                         'std': std, 'resize': resize, 'shards': entries, 'source': {
                             **wanted, 'images': source.what, 'broken': n_broken,
                             'notes': {what: {'count': c, 'first': w} for what, (c, w) in splits.notes.items()}}})
    for split, count in counts.items():
        of_split = [e for e in entries if e['split'] == split]
        print(f'{split:5}  {count.total():,} images of {len(count):,} classes, {len(of_split)} shards')
    print(f'{shape[0]}x{shape[1]}x{shape[2]}; mean {" ".join(f"{v:.4f}" for v in mean)}, std '
          f'{" ".join(f"{v:.4f}" for v in std)}', flush=True)
    if not counts['val']:
        print('warning: there is no val split, so nothing is held out' + (
            '' if args.val_fraction == 0 else ': too few pictures; give more, or a larger --val_fraction'), flush=True)


def options(argv: list[str] | None) -> argparse.Namespace:
    """Reads and checks the command line."""
    p = Parser('data/images.py', __doc__)
    add = p.add_argument
    add('inputs', nargs='*', metavar='SOURCE', help='a folder of pictures, of IDX files or of CIFAR\'s .bin files; or '
        '.parquet files, or .tar files, or folders of these')
    add('--out', default='data/shards/images', help='folder to make (default: %(default)s)')
    add('--size', type=whole_number, help='height and width of what is stored (default: 224; IDX files and CIFAR: as '
        'they are)')
    add('--grey', action='store_true', help='one channel instead of RGB')
    add('--labels', metavar='NAMES', help='names of the classes in their order: a file with one on each line, or '
        'a,b,c (default: those of the source, or numbers)')
    add('--image_field', metavar='NAME', help='column of .parquet (default: the one with pictures)')
    add('--label_field', metavar='NAME', help='column of .parquet, or field of .json in .tar (default: the one that '
        'has class names, or is called label)')
    add('--val_fraction', type=float, default=0.1, help='held out where the source holds out none (default: '
        '%(default)s)')
    add('--max_broken', type=float, default=0.1, help='share of pictures that may be broken (default: %(default)s)')
    add('--shard_images', type=whole_number, default=0, help=f'images per shard (default: {SHARD_BYTES >> 20} MiB, and '
        f'at most {SHARD_IMAGES})')
    add('--workers', type=whole_number, default=0, help='processes (default: one per core)')
    add('--seed', type=whole_number, default=0, help='another one holds out others (default: %(default)s)')
    add('--force', action='store_true', help='replace finished output')
    args = p.parse_args(argv)
    for ok, problem in (
            (args.size is None or 1 <= args.size <= 8192, f'--size {args.size}: from 1 to 8192'),
            (0 <= args.val_fraction < 1, f'--val_fraction {args.val_fraction}: from 0 to below 1'),
            (0 <= args.max_broken <= 1, f'--max_broken {args.max_broken}: from 0 to 1')):
        if not ok:
            raise DataError(problem)
    if args.labels is not None:
        args.labels = (pictures.read_names(args.labels) if os.path.isfile(args.labels)
                       else [name.strip() for name in args.labels.split(',')])
        if not args.labels or not all(args.labels):
            raise DataError('--labels: has an empty name')
    args.workers = args.workers or len(os.sched_getaffinity(0))
    args.key = str(args.seed).encode()[:64]
    return args


def stats_hash(inputs: list[str]) -> str:
    """Changes with the names, sizes and times of all files of the inputs."""
    digest = hashlib.sha256()

    def add(path):
        try:
            s = os.stat(path)
        except OSError:  # such as a link to nowhere: a broken picture
            digest.update(repr(path).encode())
        else:
            digest.update(repr((path, s.st_size, s.st_mtime_ns)).encode())

    for path in inputs:
        if not os.path.isdir(path):
            add(path)
            continue
        for top in [path, *(e.path for e in sorted(os.scandir(path), key=lambda e: e.name) if e.is_symlink())]:
            for folder, below, names in os.walk(top, onerror=unreadable):
                below.sort()
                for name in sorted(names):
                    add(os.path.join(folder, name))
    return digest.hexdigest()[:16]


def prepare(args: argparse.Namespace):
    wanted = {'inputs': args.inputs, 'input files': stats_hash(args.inputs)}
    wanted |= {k: getattr(args, k) for k in
               'size grey labels image_field label_field val_fraction max_broken shard_images seed'.split()}

    def damaged(out, manifest):
        sizes = {'images': int(np.prod(manifest['image'])), 'labels': 4}
        for s in manifest['shards']:
            for kind, size in sizes.items():
                path = os.path.join(out, s[kind]['file'])
                if not os.path.exists(path) or not 0 < os.path.getsize(path) - s['count'] * size < 1024:  # the header
                    return path

    counter = multiprocessing.get_context('spawn').Value('q', 0)
    make(args, wanted, 'images', r'(train|val)_\d{6,}_(images|labels)\.npy|manifest\.json|broken\.txt|\.verified\.json',
         load_manifest, damaged, lambda tmp, pool: build(args, wanted, tmp, pool, counter), start, (counter,))


def main(argv: list[str] | None = None) -> int:
    return common.main(argv, options, prepare)


if __name__ == '__main__':
    common.run(main)
