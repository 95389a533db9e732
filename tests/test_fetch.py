"""launch/fetch.py: shards of an object store, played by fsspec's memory, are copied to this machine's disk."""
import json
import os

import fsspec
import numpy as np
import pytest

from launch import fetch
from nano import UserError, images, shards


@pytest.fixture
def bucket(corpus, tmp_path, monkeypatch):
    """(address, the store) of a corpus in a bucket, and a disk of this machine's own."""
    fs, address = fsspec.filesystem('memory'), f'memory://{tmp_path.name}/corpus'
    fs.put(corpus, address, recursive=True)
    monkeypatch.setenv('NANO_DATA', str(tmp_path / 'disk'))
    yield address, fs
    fs.rm(address, recursive=True)


def test_a_copy_that_is_whole(bucket, corpus):
    address, fs = bucket
    said = []
    folder = fetch.fetch(address, said.append)
    manifest = shards.load_manifest(folder)
    shards.verify(folder, manifest, ['train', 'val'])
    assert shards.fingerprint(manifest) == shards.fingerprint(shards.load_manifest(corpus)) and len(said) == 1
    assert fetch.fetch(address + '/', said.append) == folder == fetch.folder_of(address) and len(said) == 1
    assert fetch.fetch(corpus) == corpus  # a path that is there


def test_goes_on_where_it_was_broken_off(bucket, tmp_path, monkeypatch):
    address, fs = bucket
    monkeypatch.setattr(fetch, 'CHUNK', 1000)
    read, asked = type(fs).cat_file, []

    def breaks(self, path, start=None, end=None, **more):
        if path.endswith('train_000000.bin'):
            asked.append(start)
            if start == 3000 and asked.count(3000) == 1:
                raise OSError('the network is gone')
        return read(self, path, start, end, **more)
    monkeypatch.setattr(type(fs), 'cat_file', breaks)
    with pytest.raises(UserError, match='the network is gone.*start again, it goes on from there'):
        fetch.fetch(address)
    assert not (tmp_path / 'disk' / fetch.folder_of(address) / 'manifest.json').exists()
    folder = fetch.fetch(address)
    assert asked[:5] == [0, 1000, 2000, 3000, 3000] and asked.count(0) == 1
    shards.verify(folder, shards.load_manifest(folder), ['train', 'val'])


def test_images(tmp_path, monkeypatch):
    """The same for image shards, whose manifest names two files for each."""
    source, fs, address = str(tmp_path / 'source'), fsspec.filesystem('memory'), f'memory://{tmp_path.name}/images'
    pixels = [(np.full((4, 4, 1), i, np.uint8), i % 2) for i in range(6)]
    entries = [images.write_shard(source, split, 0, (4, 4, 1), pixels) for split in ('train', 'val')]
    images.write_manifest(source, dict(format=1, kind='images', image=[4, 4, 1], classes=['a', 'b'], mean=[.5],
                                       std=[.3], resize='none', shards=entries, source={}))
    fs.put(source, address, recursive=True)
    monkeypatch.setenv('NANO_DATA', str(tmp_path / 'disk'))
    whole = fs.cat_file(f'{address}/{entries[1]["labels"]["file"]}')
    fs.pipe_file(f'{address}/{entries[1]["labels"]["file"]}', whole[:-1])
    with pytest.raises(shards.DataError, match='sha256 is .*damaged there'):
        fetch.fetch(address)
    fs.pipe_file(f'{address}/{entries[1]["labels"]["file"]}', whole)
    folder = fetch.fetch(address)
    manifest = images.load_manifest(folder)
    images.verify(folder, manifest, ['train', 'val'])
    assert images.fingerprint(manifest) == images.fingerprint(images.load_manifest(source))
    assert len(images.Images(folder, 'val')) == 6
    fs.rm(address, recursive=True)


def test_a_part_of_older_data_is_begun_anew(bucket):
    address, fs = bucket
    folder = fetch.folder_of(address)
    os.makedirs(folder)
    with open(f'{folder}/train_000000.bin.part', 'wb') as f:
        f.write(b'?' * 100)
    shards.verify(fetch.fetch(address), shards.load_manifest(folder), ['train', 'val'])


def test_damaged_missing_and_changed(bucket, tmp_path):
    address, fs = bucket
    name, whole = f'{address}/train_000000.bin', fs.cat_file(f'{address}/train_000000.bin')
    fs.pipe_file(name, whole[:-1] + b'?')
    with pytest.raises(shards.DataError, match='train_000000.bin: sha256 is .*damaged there'):
        fetch.fetch(address)
    fs.pipe_file(name, whole)
    folder = fetch.fetch(address)
    manifest = json.loads(fs.cat_file(f'{address}/manifest.json'))  # other data at the same address
    fs.mv(name, f'{address}/other.bin')
    next(s for s in manifest['shards'] if s['file'] == 'train_000000.bin')['file'] = 'other.bin'
    fs.pipe_file(f'{address}/manifest.json', json.dumps(manifest).encode())
    assert fetch.fetch(address) == folder
    shards.verify(folder, shards.load_manifest(folder), ['train'])
    with pytest.raises(UserError, match='manifest.json cannot be read.*Is it there'):
        fetch.fetch(address + 'x')
    manifest['shards'][0]['file'] = '../x'
    fs.pipe_file(f'{address}/manifest.json', json.dumps(manifest).encode())
    with pytest.raises(shards.DataError, match='is not a file name'):
        fetch.fetch(address)
