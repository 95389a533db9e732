"""Checkpoints: `torch.distributed.checkpoint` with torch_xla's SPMD planners, each host writing its own parts, in the
background.

A checkpoint is a folder `step_00001000`. Its meta.json is written last and names every file with its size: a folder
without it, or with a file missing or shorter, is incomplete and never read. On a disk it is written under another name
and renamed; an object store (gs://...) has no rename, so there the meta.json alone commits it.
"""
import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

from nano import UserError

STEP = re.compile(r'step_(\d{8})')


class Saver:
    """Writes checkpoints into `folder`, one at a time, in a background thread; use it in `with`.

    Of those complete it keeps the newest `keep` and every one whose step is a multiple of `keep_every` (0: no others).
    A save that fails is said, and `failed_last` until another one succeeds; what was complete before stays.
    With several hosts all call `save` and `wait` at the same steps; `group` is theirs alone (process_group).
    """

    def __init__(self, folder: str | Path, keep: int, keep_every: int = 0, say: Callable[[str], Any] = print,
                 group=None):
        self.folder, self.keep, self.keep_every, self.say, self.group = str(folder), keep, keep_every, say, group
        self.failed_last = False
        if _rank(group) == 0:  # what kills left, of other steps too: each has the size of a whole one
            for rest in Path(folder).glob('step_*.tmp'):
                shutil.rmtree(rest, ignore_errors=True)
        self.committed: int | None = None  # step of the last complete one
        self._thread: threading.Thread | None = None

    def save(self, step: int, tensors: dict[str, torch.Tensor], meta: dict[str, Any]):
        """Returns when this host holds copies of its parts of `tensors`; `meta` is JSON. Waits for the save before;
        does nothing if that was of this step."""
        began = time.perf_counter()
        self.wait()
        if self.committed == step:
            return
        waited = time.perf_counter()
        parts = to_host(tensors)
        copied = time.perf_counter()
        n_bytes = sum(_n_bytes(p) for p in parts.values())

        def write():
            try:
                path = _write(self.folder, step, parts, meta, self.group)
                parts.clear()
                self.committed, self.failed_last = step, False
                self.say(f'step {step}: wrote {path}: {n_bytes / 1e6:,.1f} MB; the loop stood still for '
                         f'{waited - began:.2f} s to finish the save before and {copied - waited:.2f} s to copy, then '
                         f'{time.perf_counter() - copied:.2f} s in the background')
                with contextlib.suppress(OSError):  # the next save prunes again
                    self._prune()
            except BaseException as e:  # torch's CheckpointException is no Exception
                self.failed_last = True
                self.say(f'error: step {step}: NO CHECKPOINT was written in {self.folder}: is the disk full? '
                         f'({_cause(e)}) Training goes on; until one is written a stop loses the steps since '
                         f'{self.committed or "the start of this process"}')

        self._thread = threading.Thread(target=write, name='checkpoint')
        self._thread.start()

    def wait(self):
        """Returns when the last save is committed or has failed."""
        if self._thread:
            self._thread.join()

    def __enter__(self) -> 'Saver':
        return self

    def __exit__(self, *_):
        self.wait()

    def _prune(self):
        if _rank(self.group) == 0:
            fs = _fs(self.folder)
            for path in complete(self.folder)[:-self.keep]:
                if not self.keep_every or step_of(path) % self.keep_every:
                    if _is_local(fs):  # a kill leaves half of it: under a name that the next start removes
                        os.rename(path, path := f'{path}.tmp')
                    fs.rm(path, recursive=True)


def _write(folder: str, step: int, parts: dict[str, Any], meta: dict[str, Any], group) -> str:
    fs = _fs(folder)
    final = f'{folder}/step_{step:08d}'
    temp = final + '.tmp' if _is_local(fs) else final

    def prepare():
        for old in {final, temp}:  # incomplete: of a kill, or of a copy that was broken off
            if fs.exists(old):
                fs.rm(old, recursive=True)
        fs.makedirs(temp, exist_ok=True)

    def commit():
        files = {path.rsplit('/', 1)[-1]: size for path, size in _files(fs, temp).items()}
        _put(fs, f'{temp}/meta.json', json.dumps({'step': step, 'files': files, **meta}, indent=1))
        if temp != final:
            os.rename(temp, final)
            _sync(folder)

    _on_first(group, prepare)
    try:
        _write_parts(temp, parts, group)
        _on_first(group, commit)
    except BaseException:
        if _rank(group) == 0:
            with contextlib.suppress(OSError):
                fs.rm(temp, recursive=True)  # the disk may be full of it
        raise
    return final


def _write_parts(folder: str, parts: dict[str, Any], group):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner
    # per_thread_copy_ahead=0: with torchax imported, copying ahead asks it for a stream and fails.
    writer = FsspecWriter(folder, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of torch about torch_xla's planner and of what one process is
        dcp.save(parts, storage_writer=writer, planner=SPMDSavePlanner(), process_group=group, no_dist=group is None)


def to_host(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Copies of this host's parts of sharded tensors, each part once, in the form that torch_xla's planner writes.

    Given the tensors themselves the planner drops a part that two devices of the host hold, with both its copies
    (torch_xla 2.9.0, dedup_tensors): a mesh with data > 1 would leave files without most weights.
    """
    import torch_xla
    from torch_xla.distributed.spmd import ShardingType, XLAShardedTensor, wrap_if_sharded
    from torch_xla.experimental.distributed_checkpoint import _helpers
    found = {}
    for name, t in tensors.items():  # one at a time: besides the copies, one tensor's replicas are held at most
        t = wrap_if_sharded(t.detach())
        t, spread = (t.global_tensor, t.sharding_type != ShardingType.REPLICATED) \
            if isinstance(t, XLAShardedTensor) else (t, False)
        if spread:
            found[name], = _helpers._cpu_shards_from_tensors([t])
            found[name].shards = [s for s in found[name].shards if s.replica_id == 0]
        else:
            found[name], = torch_xla._XLAC._xla_get_cpu_tensors([t])
    return found


def load(path: str | Path, tensors: dict[str, torch.Tensor]):
    """Reads the checkpoint at `path` into `tensors`, which are on the device and sharded as they shall be; the mesh and
    the hosts may differ from those that wrote it. Each host reads what its devices need, one tensor at a time. Raises
    UserError if a name or a shape differs or if it cannot be read."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner
    reader = FsspecReader(str(path))
    try:
        stored = reader.read_metadata().state_dict_metadata
        for name, t in tensors.items():
            if name not in stored:
                raise UserError(f'{path} has no {name}: it was written by another model')
            if tuple(stored[name].size) != tuple(t.shape):
                raise UserError(f'{path}: {name} is {tuple(stored[name].size)}, this model\'s is {tuple(t.shape)}')
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            for name, t in tensors.items():
                dcp.load({name: t}, storage_reader=reader, planner=SPMDLoadPlanner(), no_dist=True)
    except UserError:
        raise
    except (Exception, CheckpointException) as e:  # a damaged pickle raises anything
        raise UserError(f'{path} cannot be read ({_cause(e)}): if it is damaged, delete it to use the one before') \
            from e


# ---- Which checkpoints there are ----

def problem(path: str | Path) -> str | None:
    """What makes the checkpoint at `path` incomplete, or None. Seen from a listing: nothing large is read."""
    fs, path = _fs(path), str(path)
    try:
        meta = json.loads(fs.cat_file(f'{path}/meta.json'))
        wanted = dict(meta['files'])
    except FileNotFoundError:
        return 'has no meta.json, which is written last'
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        return f'meta.json cannot be read ({type(e).__name__})'
    found = {name.rsplit('/', 1)[-1]: size for name, size in _files(fs, path).items()}
    for name, size in wanted.items():
        if name not in found:
            return f'{name} is missing'
        if found[name] != size:
            return f'{name} has {found[name]:,} bytes of {size:,}'
    return None


def complete(folder: str | Path, say: Callable[[str], Any] = lambda text: None) -> list[str]:
    """Paths of the complete checkpoints in `folder`, oldest first; says what is wrong with the others."""
    good = []
    for path in _all(folder):
        if why := problem(path):
            say(f'left out: {path} {why}')
        else:
            good.append(path)
    return good


def newest(folder: str | Path, say: Callable[[str], Any] = print) -> str | None:
    """The newest complete checkpoint in `folder`, or None if there is none at all. Raises UserError if there are only
    broken ones: starting afresh without a word would lose the run."""
    for path in reversed(_all(folder)):
        if not (why := problem(path)):
            return path
        say(f'left out: {path} {why}')
    if broken := _all(folder):
        raise UserError(f'{folder} holds only incomplete checkpoints ({", ".join(b.rsplit("/", 1)[-1] for b in broken)}'
                        f'): delete them, or choose another --out')
    return None


def read_meta(path: str | Path, types: dict[str, type | tuple]) -> dict[str, Any]:
    """The `meta` that was saved with the checkpoint at `path`, which must have these names, of these types. Raises
    UserError otherwise, or if the checkpoint is incomplete."""
    if why := problem(path):
        raise UserError(f'{path} is no complete checkpoint: {why}')
    meta = json.loads(_fs(path).cat_file(f'{path}/meta.json'))
    wrong = [name for name, kind in types.items() if not isinstance(meta.get(name, ...), kind)]
    if wrong or meta.get('step') != step_of(path):
        raise UserError(f'{path}/meta.json: {", ".join(wrong or ["step"])} cannot be used: another script wrote it, or '
                        f'it was edited')
    return meta


def amend(path: str | Path, **more: Any):
    """Changes some of a checkpoint's meta."""
    fs = _fs(path)
    _put(fs, f'{path}/meta.json', json.dumps({**json.loads(fs.cat_file(f'{path}/meta.json')), **more}, indent=1))


def step_of(path: str | Path) -> int:
    """1000 of .../step_00001000."""
    return int(STEP.fullmatch(str(path).rsplit('/', 1)[-1])[1])


def _all(folder: str | Path) -> list[str]:
    """Everything in `folder` that has a checkpoint's name, oldest first."""
    fs = _fs(folder)
    try:
        names = [path.rstrip('/').rsplit('/', 1)[-1] for path in fs.ls(str(folder), detail=False, refresh=True)]
    except FileNotFoundError:
        return []
    return [f'{folder}/{name}' for name in sorted(names) if STEP.fullmatch(name)]


# ---- File systems ----

def _fs(path: str | Path):
    """fsspec's file system of a path or an address. Raises UserError naming the package that it lacks."""
    import fsspec
    try:
        return fsspec.core.url_to_fs(str(path))[0]
    except (ImportError, ValueError) as e:
        raise UserError(f'{path}: {e} (for gs:// addresses: pip install gcsfs)') from e


def _is_local(fs) -> bool:
    import fsspec.implementations.local
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)


def _files(fs, folder: str) -> dict[str, int]:
    return {f['name']: f['size'] for f in fs.ls(folder, detail=True, refresh=True) if f['type'] == 'file'}


def _put(fs, path: str, text: str):
    """Writes a small file so that a reader finds all of it or nothing."""
    if not _is_local(fs):
        return fs.pipe_file(path, text.encode())
    with open(path + '.new', 'w') as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.rename(path + '.new', path)
    _sync(os.path.dirname(path))


def _sync(folder: str):
    fd = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a network's file system may not know it
        os.fsync(fd)  # the rename itself
    os.close(fd)


def _n_bytes(part: Any) -> int:
    return sum(s.data.nbytes for s in part.shards) if hasattr(part, 'shards') else part.nbytes


def _cause(e: BaseException) -> str:
    """One line: the first failure within torch's CheckpointException, which by itself says only that there are some."""
    for inner, _ in getattr(e, 'failures', {}).values():
        return _cause(inner)
    return f'{type(e).__name__}: {e}'.splitlines()[0]


# ---- Several hosts ----

def process_group(count: int):
    """A group of the hosts' processes, for messages over the network that no device sees; None for one host."""
    if count == 1:
        return None
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401, makes xla:// known
    if not dist.is_initialized():
        dist.init_process_group('gloo', init_method='xla://')
    return dist.new_group(backend='gloo')


def _rank(group) -> int:
    return torch.distributed.get_rank(group) if group else 0


def _on_first(group, do: Callable[[], Any]):
    """Does it on the first host while the others wait. Raises on all what it raises there."""
    found = [None]
    if _rank(group) == 0:
        try:
            do()
        except Exception as e:
            found = [e]
    if group:
        torch.distributed.broadcast_object_list(found, 0, group)
    if found[0] is not None:
        raise found[0]


def check_shared(folder: str | Path, group):
    """Refuses a folder that the hosts do not share: each would hold a part of each checkpoint, and none a whole one."""
    if not group:
        return
    import torch.distributed as dist
    fs, token = _fs(folder), [secrets.token_hex(8)]
    dist.broadcast_object_list(token, 0, group)
    probe = f'{folder}/probe_{token[0]}'
    _on_first(group, lambda: (fs.makedirs(str(folder), exist_ok=True), fs.pipe_file(probe, b'seen by all hosts')))
    seen = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, fs.exists(probe, refresh=True), group)
    _on_first(group, lambda: fs.rm(probe))
    if not all(seen):
        blind = ', '.join(str(i) for i, s in enumerate(seen) if not s)
        raise UserError(f'--out {folder}: host {blind} does not see what host 0 writes there: use a disk that all of '
                        f'them mount')


@contextlib.contextmanager
def alone(folder: str | Path) -> Iterator[None]:
    """Makes the folder and holds it for this process among those of this machine: two runs that write the same
    checkpoints destroy each other's. The lock ends with the process, however that ends. Raises UserError."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(fd)
        raise UserError(f'--out {folder}: another run is writing there: wait for it, or choose another --out') from e
    except OSError:
        pass  # a network's file system without locks
    try:
        yield
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # if nothing was written
