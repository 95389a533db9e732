"""Checkpoints: `torch.distributed.checkpoint` with torch_xla's SPMD planners, each host writing its own shards.

A checkpoint is a folder `step_00001000` with one file `meta.json` written last: a folder without it is not complete
and is never read. It is written under another name and renamed, so that a kill leaves nothing that looks finished.
"""
import contextlib
import fcntl
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, Iterator

import torch

from nano import UserError


def save(folder: str | Path, step: int, tensors: dict[str, torch.Tensor], meta: dict[str, Any], keep: int = 3) -> Path:
    """Writes `tensors` (on the device, sharded) and `meta` (JSON) as the checkpoint of `step`; returns its path.

    Only the newest `keep` checkpoints stay. Raises OSError if the disk does not take it.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner
    folder, tensors = Path(folder), to_host(tensors)
    final, temp = folder / f'step_{step:08d}', folder / f'step_{step:08d}.tmp'
    if (final / 'meta.json').exists():
        return final
    for old in (final, temp):  # incomplete: of a kill, or of a copy that was broken off
        shutil.rmtree(old, ignore_errors=True)
    temp.mkdir(parents=True)
    # per_thread_copy_ahead=0: with torchax imported, copying ahead asks it for a stream and fails.
    writer = dcp.FileSystemWriter(temp, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of torch about torch_xla's planner and of what one process is
        try:
            dcp.save(tensors, storage_writer=writer, planner=SPMDSavePlanner(), no_dist=True)
        except (CheckpointException, RuntimeError) as e:  # what torch makes of an error of the disk
            shutil.rmtree(temp, ignore_errors=True)
            raise OSError(f'{temp} cannot be written ({_cause(e)}): is the disk full?') from e
    with open(temp / 'meta.json', 'w') as f:
        json.dump({'step': step, **meta}, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.rename(temp, final)
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)  # the rename itself
    os.close(fd)
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)
    return final


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


def complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(p.parent for p in Path(folder).glob('step_????????/meta.json'))


def newest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in `folder`, or None if there is nothing. Raises UserError if there are only
    broken ones: starting afresh without a word would lose the run."""
    found = complete(folder)
    broken = sorted(p.name for p in Path(folder).glob('step_????????') if p not in found)
    if not found and broken:
        raise UserError(f'{folder} holds only incomplete checkpoints ({", ".join(broken)}): delete them, or choose '
                        f'another --out')
    return found[-1] if found else None


def read_meta(path: str | Path, *names: str) -> dict[str, Any]:
    """The `meta` that was saved with the checkpoint at `path`, which must have `names`. Raises UserError."""
    try:
        meta = json.loads((Path(path) / 'meta.json').read_text())
        if not isinstance(meta, dict) or not {'step', *names} <= meta.keys():
            raise ValueError(f'meta.json lacks one of step, {", ".join(names)}')
        return meta
    except (OSError, ValueError) as e:
        raise UserError(f'{path} is no checkpoint that can be read ({e}): delete it to use the one before') from e


def load(path: str | Path, tensors: dict[str, torch.Tensor]):
    """Reads the checkpoint at `path` into `tensors`, which are on the device and sharded as they shall be; the mesh may
    differ from the one that wrote it. Raises UserError if a name or a shape differs."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner
    reader = dcp.FileSystemReader(path)
    try:
        stored = reader.read_metadata().state_dict_metadata
        for name, t in tensors.items():
            if name not in stored:
                raise UserError(f'{path} has no {name}: it was written by another model')
            if tuple(stored[name].size) != tuple(t.shape):
                raise UserError(f'{path}: {name} is {tuple(stored[name].size)}, this model\'s is {tuple(t.shape)}')
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            dcp.load(tensors, storage_reader=reader, planner=SPMDLoadPlanner(), no_dist=True)
    except UserError:
        raise
    except (Exception, CheckpointException) as e:  # a damaged pickle raises anything
        raise UserError(f'{path} cannot be read ({_cause(e)}): delete it to use the one before') from e


def _cause(e: BaseException) -> str:
    """One line: the first failure within torch's CheckpointException, which by itself says only that there are some."""
    for inner, _ in getattr(e, 'failures', {}).values():
        return _cause(inner)
    return f'{type(e).__name__}: {e}'.splitlines()[0]


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
