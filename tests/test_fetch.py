"""launch/fetch.py: shards of an object store, played by fsspec's memory, are copied to this machine's disk."""
import json

import fsspec
import pytest

from launch import fetch
from nano import UserError, shards


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
