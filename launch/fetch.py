"""--data gs://BUCKET/FOLDER: shards cannot be memory-mapped in a bucket, so each host copies them to its own disk.

    python -P -m launch.fetch ADDRESS     what host.py does on each host before the script starts

In parallel, and resumable: a file has another name until its sha256 is the manifest's, and what is there is not fetched
again. The manifest comes last, as its presence means complete. NANO_DATA is the folder for all of them.
"""
import fcntl
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable

from nano import UserError, say, store
from nano.shards import DataError, file_sha256, parallel, rename

CHUNK = 16 << 20


def folder_of(address: str) -> str:
    """Where the shards of `address` lie on this machine."""
    root = Path(os.environ.get('NANO_DATA') or Path.home() / 'nano' / 'data')
    return str(root / hashlib.sha256(address.rstrip('/').encode()).hexdigest()[:16])


def fetch(data: str, log: Callable[[str], Any] = say) -> str:
    """Returns the folder of the shards: `data` itself, or if that is an address, a folder that holds a whole copy.
    Raises UserError (DataError for a file that is not what the manifest says)."""
    if '://' not in data:
        return data
    data, fs = data.rstrip('/'), store.file_system(data)
    folder = Path(folder_of(data))
    try:
        text = fs.cat_file(f'{data}/manifest.json')
        wanted = dict(_files(json.loads(text)))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError(f'{data}/manifest.json: is not the manifest of shards ({e}): copy the folder again') from e
    except Exception as e:  # an object store's client raises its own
        raise UserError(f'{data}: its manifest.json cannot be read ({store.cause(e)}). Is it there, and may this '
                        f'machine read it? For gs://: gcloud storage ls {data}; gcloud auth application-default '
                        'login') from e
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f'{folder}: cannot be made ({e.strerror}): NANO_DATA=FOLDER is another place for data') from e
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of this machine may fetch the same: the second finds it done
        _copy(fs, data, folder, text, wanted, log)
    finally:
        os.close(lock)
    return str(folder)


def _copy(fs, data: str, folder: Path, text: bytes, wanted: dict[str, str], log: Callable[[str], Any]):
    manifest = folder / 'manifest.json'
    if manifest.exists() and manifest.read_bytes() != text:
        manifest.unlink()  # other data are at the address now

    def one(name: str):
        path, part = folder / name, f'{folder / name}.part'  # a part that is there goes on where it was broken off
        if path.exists():
            if manifest.exists() or file_sha256(path) == wanted[name]:
                return
            path.unlink()
        for again in (os.path.exists(part), False):
            try:
                size = fs.info(f'{data}/{name}')['size']
                with open(part, 'ab') as f:
                    if f.tell() > size:
                        f.truncate(0)
                    while (at := f.tell()) < size:
                        f.write(fs.cat_file(f'{data}/{name}', start=at, end=min(at + CHUNK, size)))
                    f.flush()
                    os.fsync(f.fileno())
            except Exception as e:  # of the disk, or an object store's client's own
                raise UserError(f'{data}/{name}: cannot be copied to {folder} ({store.cause(e)}): start again, it goes '
                                'on from there') from e
            if (found := file_sha256(part)) == wanted[name]:
                break
            os.unlink(part)
            if not again:  # else the part may have been of older data
                raise DataError(f'{data}/{name}: sha256 is {found}, the manifest says {wanted[name]}: damaged there; '
                                'copy it again')
        rename(part, str(path))

    parallel(one, list(wanted), f'{data}: fetching to {folder}', log)
    if not manifest.exists():
        (folder / 'manifest.new').write_bytes(text)
        rename(str(folder / 'manifest.new'), str(manifest))
        log(f'{data}: {len(wanted)} files are in {folder}')


def _files(manifest: dict):
    """(name, sha256) of each file that a manifest of tokens or of images names."""
    entries = [manifest['tokenizer']] if manifest.get('tokenizer') else []
    for shard in manifest['shards']:
        entries += [shard] if 'file' in shard else [shard['images'], shard['labels']]
    for entry in entries:
        if os.path.basename(entry['file']) != entry['file'] or not entry['file']:
            raise ValueError(f'{entry["file"]!r} is not a file name')
        yield entry['file'], entry['sha256']


if __name__ == '__main__':
    try:
        fetch(sys.argv[1])
    except UserError as e:
        sys.exit(f'error: {e}')
