"""Checkpoints: `torch.distributed.checkpoint` with torch_xla's SPMD planners, each host writing its own parts, in the
background.

A checkpoint is a folder `step_00001000`. Its meta.json is written last and names every file with its size: a folder
without it, or with a file missing or shorter, is incomplete and never read. On a disk it is written under another name
and renamed; an object store (gs://...) has no rename, so there the meta.json alone commits it.
"""
import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Callable

import torch

from nano import UserError, say
from nano.store import cause, file_system

STEP = re.compile(r'step_(\d{8})')


class Saver:
    """Writes checkpoints into `folder`, one at a time, in a background thread; use it in `with`.

    Of those complete it keeps the newest `keep` and every one whose step is a multiple of `keep_every` (0: no others).
    A save that fails is said, and `failed_last` until another one succeeds; what was complete before stays.
    With several hosts all call `save` and `wait` at the same steps; `group` is theirs alone (process_group). Before it
    commits one, the first host calls `before_commit`.
    """

    def __init__(self, folder: str | Path, keep: int, keep_every: int = 0, say: Callable[[str], Any] = print,
                 group=None, before_commit: Callable[[], Any] = lambda: None):
        self.folder, self.keep, self.keep_every, self.say, self.group = str(folder), keep, keep_every, say, group
        self.before_commit = before_commit
        self.failed_last = self._hosts_lost = False
        if _rank(group) == 0:  # what kills left, of other steps too: each has the size of a whole one
            for rest in Path(folder).glob('step_*.tmp'):
                shutil.rmtree(rest, ignore_errors=True)
        self.committed: int | None = None  # step of the last complete one
        self._thread: threading.Thread | None = None

    def save(self, step: int, tensors: dict[str, torch.Tensor], meta: dict[str, Any]):
        """Returns when this host holds copies of its parts of `tensors`; `meta` is JSON. Waits for the save before;
        does nothing if that was of this step. Raises UserError if the hosts lost one another: none will be written."""
        began = time.perf_counter()
        self.wait()
        if self._hosts_lost:
            raise UserError('the hosts cannot reach one another any more, so no checkpoint can be written: start all '
                            'of them again; the newest complete one goes on')
        if self.committed == step:
            return
        waited = time.perf_counter()
        memory = PeakMemory()
        parts = to_host(tensors)
        copied = time.perf_counter()
        n_bytes = sum(_n_bytes(p) for p in parts.values())

        def write():
            try:
                path = _write(self.folder, step, parts, meta, self.group, self.before_commit, self.say)
                parts.clear()
                self.committed, self.failed_last = step, False
                before = f'{waited - began:.2f} s for the save before and ' if waited - began > 0.05 else ''
                self.say(f'step {step}: wrote {path}, {n_bytes / 1e6:,.1f} MB; the loop stood still for {before}'
                         f'{copied - waited:.2f} s; {time.perf_counter() - copied:.2f} s in the background{memory}')
            except BaseException as e:  # torch's CheckpointException is no Exception
                self.failed_last = True
                self._hosts_lost = self.group is not None and isinstance(e, RuntimeError)  # gloo's
                self.say(f'error: step {step}: NO CHECKPOINT was written in {self.folder} ({cause(e)}). Training goes '
                         f'on; until one is written a stop loses the steps since '
                         f'{self.committed or "the start of this process"}')
                return
            try:
                self._prune()
            except Exception as e:  # an object store's client raises its own
                self.say(f'warning: old checkpoints in {self.folder} are not removed ({cause(e)}); the next save '
                         f'tries again')

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
            # One of a later step is not of this run; who put it there may want it.
            mine = [path for path in complete(self.folder) if step_of(path) <= self.committed]
            oldest_kept = step_of(mine[-self.keep:][0])
            for path in _all(self.folder):  # also what is left of one, when a kill came in the middle of this
                if step_of(path) < oldest_kept and (not self.keep_every or step_of(path) % self.keep_every):
                    file_system(self.folder).rm(path, recursive=True)


def _write(folder: str, step: int, parts: dict[str, Any], meta: dict[str, Any], group, before_commit, say) -> str:
    fs = file_system(folder)
    final = f'{folder}/step_{step:08d}'
    temp = final + '.tmp' if _is_local(fs) else final

    def prepare():
        for old in {final, temp}:  # incomplete: of a kill, or of a copy that was broken off
            if fs.exists(old):
                fs.rm(old, recursive=True)
        fs.makedirs(temp, exist_ok=True)

    def commit():
        try:
            before_commit()
        except Exception as e:  # of an object store's client; the weights are worth more than the record
            say(f'warning: the record was not copied to {folder} ({cause(e)}): it is on this machine alone')
        files = {path.rsplit('/', 1)[-1]: size for path, size in _files(fs, temp).items()}
        _put(fs, f'{temp}/meta.json', json.dumps({'step': step, 'files': files, **meta}, indent=1))
        if temp != final:
            _rename(temp, final)
            _sync(folder)

    _on_first(group, prepare)
    try:
        _write_parts(temp, parts, group)
        _on_first(group, commit)
    except BaseException:
        if _rank(group) == 0:
            with contextlib.suppress(Exception):
                fs.rm(temp, recursive=True)  # the disk may be full of it
        raise
    return final


def _write_parts(folder: str, parts: dict[str, Any], group):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    class Writer(FsspecWriter):
        def write_data(self, plan, planner):
            try:
                return super().write_data(plan, planner)
            except Exception as e:  # the hosts send one another what failed: of any class that would not always go
                raise OSError(cause(e)) from e

    # per_thread_copy_ahead=0: with torchax imported, copying ahead asks it for a stream and fails.
    writer = Writer(folder, per_thread_copy_ahead=0)
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


def load(path: str | Path, tensors: dict[str, torch.Tensor], reader=None):
    """Reads the checkpoint at `path` into `tensors`, which are on the device and sharded as they shall be, or all of
    them on the host; the mesh and the hosts may differ from those that wrote it. Each host reads what its devices need,
    one tensor at a time. `reader`: of another format (nano.hf). Raises UserError if a name or a shape differs or if it
    cannot be read."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.api import CheckpointException
    reader = reader or FsspecReader(str(path))
    planner = dcp.DefaultLoadPlanner
    if any(t.device.type != 'cpu' for t in tensors.values()):
        from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner as planner
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
                dcp.load({name: t}, storage_reader=reader, planner=planner(), no_dist=True)
    except UserError:
        raise
    except FileNotFoundError as e:
        raise UserError(f'{path} was removed while it was read ({cause(e)}), as a run does with its oldest: start '
                        f'again') from e
    except (Exception, CheckpointException) as e:  # a damaged pickle raises anything
        for stop, _ in getattr(e, 'failures', {}).values():
            if isinstance(stop, (SystemExit, KeyboardInterrupt)):
                raise stop from None
        raise UserError(f'{path} cannot be read ({cause(e)}): if it is damaged, delete it to use the one before') \
            from e


# ---- Which checkpoints there are ----

def problem(path: str | Path) -> str | None:
    """What makes the checkpoint at `path` incomplete, or None. Seen from a listing: nothing large is read. Raises
    UserError if that fails."""
    fs, path = file_system(path), str(path)
    try:
        meta = json.loads(fs.cat_file(f'{path}/meta.json'))
        wanted = dict(meta['files'])
    except FileNotFoundError:
        return 'has no meta.json, which is written last'
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        return f'meta.json cannot be read ({type(e).__name__})'
    except Exception as e:  # a disk's or a network's failure makes no checkpoint incomplete
        raise UserError(f'{path}/meta.json cannot be read ({cause(e)}): try again') from e
    found = {name.rsplit('/', 1)[-1]: size for name, size in _files(fs, path).items()}
    for name, size in wanted.items():
        if name not in found:
            return f'{name} is missing'
        if found[name] != size:
            return f'{name} has {found[name]:,} bytes of {size:,}'
    return None


def complete(folder: str | Path) -> list[str]:
    """Paths of the complete checkpoints in `folder`, oldest first."""
    return [path for path in _all(folder) if not problem(path)]


def newest(folder: str | Path, say: Callable[[str], Any] = say) -> str | None:
    """The newest complete checkpoint in `folder`, or None if there was none yet, as when the first save into a bucket
    was cut short. Raises UserError if there are only broken ones: starting afresh would lose the run."""
    fs = file_system(folder)
    if _is_local(fs) and os.path.lexists(folder) and not os.path.isdir(folder):
        raise UserError(f'{folder}: is no folder, or a link to a disk that is not there')
    for path in reversed(_all(folder)):
        if not (why := problem(path)):
            return path
        say(f'left out: {path} {why}')
    # A save ends with .metadata and meta.json, a copy begins with them.
    if broken := [p for p in _all(folder) if fs.exists(f'{p}/meta.json') or fs.exists(f'{p}/.metadata')]:
        raise UserError(f'{folder} holds only incomplete checkpoints ({", ".join(b.rsplit("/", 1)[-1] for b in broken)}'
                        f'): delete them, or choose another --out')
    return None


def read_meta(path: str | Path, types: dict[str, type | tuple]) -> dict[str, Any]:
    """The `meta` that was saved with the checkpoint at `path`, which must have these names, of these types. Raises
    UserError otherwise, or if the checkpoint is incomplete."""
    if why := problem(path):
        raise UserError(f'{path} is no complete checkpoint: {why}')
    meta = json.loads(file_system(path).cat_file(f'{path}/meta.json'))
    wrong = [name for name, kind in types.items() if not isinstance(value := meta.get(name, ...), kind) or
             isinstance(value, int) and not 0 <= value < 2**62]
    if wrong or meta.get('step') != step_of(path):
        raise UserError(f'{path}/meta.json: {", ".join(wrong or ["step"])} cannot be used: another script wrote it, or '
                        f'it was edited')
    return meta


def amend(path: str | Path, **more: Any):
    """Changes some of a checkpoint's meta."""
    fs = file_system(path)
    _put(fs, f'{path}/meta.json', json.dumps({**json.loads(fs.cat_file(f'{path}/meta.json')), **more}, indent=1))


def is_one(path: str | Path) -> bool:
    """Whether `path` has a checkpoint's name."""
    return bool(STEP.fullmatch(str(path).rsplit('/', 1)[-1]))


def holds_some(folder: str | Path) -> bool:
    """Whether something in `folder` has a checkpoint's name."""
    return bool(_all(folder))


def step_of(path: str | Path) -> int:
    """1000 of .../step_00001000."""
    return int(STEP.fullmatch(str(path).rsplit('/', 1)[-1])[1])


def _all(folder: str | Path) -> list[str]:
    """Everything in `folder` that has a checkpoint's name, oldest first."""
    fs = file_system(folder)
    try:
        names = [path.rstrip('/').rsplit('/', 1)[-1] for path in fs.ls(str(folder), detail=False, refresh=True)]
    except FileNotFoundError:
        return []
    except Exception as e:  # an object store's client raises its own: no such bucket, no permission, no login
        if _is_local(fs):
            raise
        raise UserError(f'{folder}: cannot be listed ({cause(e)}). Does the bucket exist, and may this machine read '
                        f'it? For gs://: gcloud auth application-default login') from e
    return [f'{folder}/{name}' for name in sorted(names) if STEP.fullmatch(name)]


# ---- File systems ----

def check_writable(folder: str):
    """Raises UserError if an object store refuses a small file: no such bucket, no permission."""
    fs, probe = file_system(folder), f'{folder}/probe_{secrets.token_hex(8)}'
    try:
        fs.pipe_file(probe, b'this machine may write here')
        fs.rm(probe)
    except Exception as e:  # each store's client raises its own
        raise UserError(f'{folder}: cannot be written ({cause(e)}). Does the bucket exist, and may this machine write '
                        f'there? For gs://: gcloud auth application-default login') from e


def _is_local(fs) -> bool:
    import fsspec.implementations.local
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)


def _files(fs, folder: str) -> dict[str, int]:
    return {f['name']: f['size'] for f in fs.ls(folder, detail=True, refresh=True) if f['type'] == 'file'}


def _put(fs, path: str, text: str):
    """Writes a small file so that a reader finds all of it or nothing."""
    if not _is_local(fs):
        return fs.pipe_file(path, text.encode())
    try:
        with open(path + '.new', 'w') as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.rename(path + '.new', path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(path + '.new')
        raise
    _sync(os.path.dirname(path))


def _rename(temp: str, final: str):
    try:
        os.rename(temp, final)
    except OSError:  # a bucket mounted with gcsfuse renames files, but no folders that hold some
        os.makedirs(final, exist_ok=True)
        for name in sorted(os.listdir(temp), key=lambda name: name == 'meta.json'):
            os.rename(f'{temp}/{name}', f'{final}/{name}')
        os.rmdir(temp)


def _sync(folder: str):
    fd = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a network's file system may not know it
        os.fsync(fd)  # the rename itself
    os.close(fd)


class PeakMemory:
    """The most host memory that this process holds from now on, as the end of a sentence; the whole process's, so what
    runs beside counts too."""

    def __init__(self):
        self.before = self._read('VmRSS')
        try:
            Path('/proc/self/clear_refs').write_text('5')  # see proc(5): the peak begins anew
        except OSError:
            self.before = None

    @staticmethod
    def _read(name: str) -> float | None:
        found = re.search(rf'^{name}:\s+(\d+) kB', Path('/proc/self/status').read_text(), re.M)
        return int(found[1]) * 1024 if found else None

    def mb(self) -> tuple[float, float] | None:
        """(the peak, how much more that is than before) in MB; None where /proc does not tell."""
        peak = self._read('VmHWM')
        return None if self.before is None or peak is None else (peak / 1e6, max(0.0, peak - self.before) / 1e6)

    def __str__(self) -> str:
        return f'; host memory at most {found[0]:,.0f} MB ({found[1]:+,.0f})' if (found := self.mb()) else ''


def _n_bytes(part: Any) -> int:
    return sum(s.data.nbytes for s in part.shards) if hasattr(part, 'shards') else part.nbytes


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
            if not group:
                raise
            found = [cause(e)]
    if group:
        torch.distributed.broadcast_object_list(found, 0, group)
    if found[0] is not None:
        raise OSError(found[0])


def meet(group):
    """Waits for the other hosts. Raises UserError if one has ended: the devices would wait for it for ever."""
    try:
        if group:
            torch.distributed.all_reduce(torch.zeros(1), group=group)  # barrier() would ask for an accelerator
    except RuntimeError as e:
        raise UserError(f'another host has ended or cannot be reached, see what it says ({cause(e)})') from e


def check_shared(folder: str | Path, group, found: str | None = None):
    """Refuses a folder that the hosts do not share: each would hold a part of each checkpoint, and none a whole one.
    Also if they `found` different checkpoints to go on from, as where a network's file system lags."""
    if not group:
        return
    import torch.distributed as dist
    fs, token = file_system(folder), [secrets.token_hex(8)]
    dist.broadcast_object_list(token, 0, group)
    probe = f'{folder}/probe_{token[0]}'
    _on_first(group, lambda: (fs.makedirs(str(folder), exist_ok=True), fs.pipe_file(probe, b'seen by all hosts')))
    seen = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, fs.exists(probe, refresh=True), group)
    _on_first(group, lambda: fs.rm(probe))
    if not all(seen):
        blind = ', '.join(str(i) for i, s in enumerate(seen) if not s)
        raise UserError(f'--out {folder}: host {blind} does not see what host 0 writes there: use a disk that all of '
                        f'them mount, or a bucket (gs://...)')
    dist.all_gather_object(seen, found, group)
    if len(set(seen)) > 1:
        raise UserError(f'--out {folder}: the hosts see different checkpoints as the newest ({seen}): start again')
