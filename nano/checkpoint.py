"""Checkpoints: `torch.distributed.checkpoint` with torch_xla's SPMD planners, each host writing its own shards.

A checkpoint is a folder `step_00001000` with one file `meta.json` written last: a folder without it is not complete
and is never read. It is written under another name and renamed, so that a kill leaves nothing that looks finished.
"""
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from nano import UserError


def save(folder: str | Path, step: int, tensors: dict[str, torch.Tensor], meta: dict[str, Any], keep: int = 3) -> Path:
    """Writes `tensors` (on the device, sharded) and `meta` (JSON) as the checkpoint of `step`; returns its path.

    Only the newest `keep` checkpoints stay. Raises OSError if the disk does not take it.
    """
    import torch.distributed.checkpoint as dcp
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner
    folder = Path(folder)
    final, temp = folder / f'step_{step:08d}', folder / f'step_{step:08d}.tmp'
    if final.exists():
        return final
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    # per_thread_copy_ahead=0: with torchax imported, copying ahead asks it for a stream and fails.
    writer = dcp.FileSystemWriter(temp, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of torch about torch_xla's planner and of what one process is
        dcp.save(tensors, storage_writer=writer, planner=SPMDSavePlanner(), no_dist=True)
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


def read_meta(path: str | Path) -> dict[str, Any]:
    """The `meta` that was saved with the checkpoint at `path`. Raises UserError."""
    try:
        return json.loads((Path(path) / 'meta.json').read_text())
    except (OSError, ValueError) as e:
        raise UserError(f'{path} is no checkpoint that can be read: {e}') from e


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
    except (OSError, EOFError, CheckpointException) as e:
        raise UserError(f'{path} cannot be read ({str(e).splitlines()[0]}): delete it to use the one before') from e
