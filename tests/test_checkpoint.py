"""nano/checkpoint.py on 8 devices: what is written, read by PyTorch alone, and read back onto other meshes."""
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nano import UserError, checkpoint, runtime

ROOT = Path(__file__).resolve().parent.parent
MESHES = '1,8,1', '2,2,2', '8,1,1', '1,1,8', '4,2,1'
AXES = None, 'data', 'fsdp', 'tensor', ('data', 'fsdp')


@pytest.fixture(scope='module')
def devices():
    return runtime.start('cpu')


def place(tensors, specs, mesh):
    """On the device, sharded, with their values or zeros."""
    import torch_xla
    import torch_xla.distributed.spmd as xs
    out = {}
    for name, t in tensors.items():
        out[name] = t.to(torch_xla.device())
        if specs[name] is not None:
            xs.mark_sharding(out[name], mesh, specs[name])
    torch_xla.sync()
    return out


def sharding_of(t):
    import torch_xla
    return torch_xla._XLAC._get_xla_sharding_spec(t)


def save(folder, step, tensors, say=print, keep=9, keep_every=0, **meta):
    with checkpoint.Saver(folder, keep, keep_every, say) as saver:
        saver.save(step, tensors, meta)
    return f'{folder}/step_{step:08d}'


def read_by_torch(path):
    reader = dcp.FileSystemReader(path)
    found = {n: torch.full(m.size, -7.0) for n, m in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def random_case(rng, generator):
    tensors, specs = {'count': torch.tensor(3.0)}, {'count': None}
    for i in range(12):
        shape = [rng.choice((1, 3, 8, 16, 61)) for _ in range(rng.randint(1, 3))]
        free = [a for a in AXES if a != ('data', 'fsdp')] if rng.random() < 0.5 else [None, ('data', 'fsdp'), 'tensor']
        spec = []
        for _ in shape:
            spec.append(rng.choice(free))
            if spec[-1] is not None:
                free.remove(spec[-1])
        tensors[f'w{i}'], specs[f'w{i}'] = torch.randn(shape, generator=generator), tuple(spec)
    return tensors, specs


def test_each_part_is_written_once_and_read_onto_any_mesh(devices, tmp_path, seed):
    """Random shapes and shardings, dimensions that do not divide, parts that several devices hold."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for case, mesh in enumerate(MESHES):
        tensors, specs = random_case(rng, generator)
        on_device = place(tensors, specs, runtime.make_mesh(mesh, 8))
        path = save(tmp_path / str(case), 5, on_device, x=1)
        meta = checkpoint.read_meta(path, {'x': int})
        assert meta['step'] == 5 and meta['x'] == 1 and checkpoint.newest(tmp_path / str(case)) == path
        found = read_by_torch(path)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[n], t) for n, t in tensors.items()), (mesh, specs)
        for name, stored in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
            assert sum(c.sizes.numel() for c in stored.chunks) == tensors[name].numel()

        other = rng.choice(MESHES)
        back = place({n: torch.zeros_like(t) for n, t in tensors.items()}, specs, runtime.make_mesh(other, 8))
        sharding = {n: s for n, t in back.items() if 'devices' in (s := sharding_of(t))}
        checkpoint.load(path, back)
        assert sharding == {n: sharding_of(back[n]) for n in sharding}  # and so never gathered
        assert all(torch.equal(back[n].cpu(), t) for n, t in tensors.items()), (mesh, other, specs)


def test_another_model_is_refused(devices, tmp_path):
    mesh = runtime.make_mesh('1,8,1', 8)
    specs = {'a': ('fsdp', None), 'b': (None,), 'c': (None,)}
    path = save(tmp_path, 1, place({'a': torch.ones(8, 2), 'b': torch.ones(3)}, specs, mesh))
    for wrong, message in (({'a': torch.ones(8, 3)}, r'a is \(8, 2\), this model.s is \(8, 3\)'),
                           ({'c': torch.ones(3)}, 'has no c')):
        with pytest.raises(UserError, match=message):
            checkpoint.load(path, place(wrong, specs, mesh))


def some_tensors(n=3):
    return place({f'w{i}': torch.full((64, 100), float(i)) for i in range(n)},
                 {f'w{i}': ('fsdp', None) for i in range(n)}, runtime.make_mesh('1,8,1', 8))


def test_a_full_disk_is_said_and_the_run_goes_on(devices, tmp_path):
    """A limit on the size of files stands for the disk: the save fails as a whole, the one before stays, the next is
    written."""
    said = []
    with checkpoint.Saver(tmp_path, 9, say=said.append) as saver:
        saver.save(1, some_tensors(), {})
        saver.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            saver.save(2, some_tensors(), {})
            saver.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert saver.failed_last and 'step 2: NO CHECKPOINT' in said[-1] and 'since 1' in said[-1]
        assert checkpoint.newest(tmp_path, said.append) == f'{tmp_path}/step_00000001'
        saver.save(3, some_tensors(), {})
        saver.wait()
        assert not saver.failed_last
    assert checkpoint.complete(tmp_path) == [f'{tmp_path}/step_{n:08d}' for n in (1, 3)]
    tmp_path.chmod(0o500)  # root may write all the same
    if os.getuid():
        save(tmp_path, 4, some_tensors(), said.append)
        assert 'step 4: NO CHECKPOINT' in said[-1] and 'Permission' in said[-1]


def test_what_is_incomplete_is_said_and_never_read(devices, tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, some_tensors())
    good, last = f'{tmp_path}/step_00000002', tmp_path / 'step_00000003'
    part = next(last.glob('*.distcp'))
    whole, meta = part.read_bytes(), (last / 'meta.json').read_text()
    for break_it, why in ((lambda: part.write_bytes(whole[:-1]), f'{part.name} has {len(whole) - 1:,} bytes of'),
                          (lambda: part.unlink(), f'{part.name} is missing'),
                          (lambda: (last / '.metadata').unlink(), '.metadata is missing'),
                          (lambda: (last / 'meta.json').write_text(meta[:-5]), 'meta.json cannot be read'),
                          (lambda: (last / 'meta.json').write_text('[]'), 'meta.json cannot be read'),
                          (lambda: (last / 'meta.json').unlink(), 'has no meta.json')):
        copy = tmp_path / 'copy'
        shutil.copytree(last, copy)
        break_it()
        said = []
        assert checkpoint.newest(tmp_path, said.append) == good
        assert len(said) == 1 and str(last) in said[0] and why in said[0]
        with pytest.raises(UserError, match=re.escape(why)):
            checkpoint.read_meta(last, {})
        shutil.rmtree(last)
        copy.rename(last)
    assert checkpoint.newest(tmp_path) == str(last)
    for step in (1, 2, 3):
        (tmp_path / f'step_{step:08d}' / 'meta.json').unlink()
    with pytest.raises(UserError, match='only incomplete checkpoints .step_00000001, step_00000002, step_00000003'):
        checkpoint.newest(tmp_path, said.append)
    assert checkpoint.newest(tmp_path / 'nothing') is None
    for step in (1, 2, 3):  # as when the first save into a bucket was cut short: nothing was there to lose
        (tmp_path / f'step_{step:08d}' / '.metadata').unlink()
    assert checkpoint.newest(tmp_path, said.append) is None


def test_what_cannot_be_read_is_not_incomplete(devices, tmp_path, monkeypatch):
    """A disk that fails for a moment must not send a run back to an older checkpoint."""
    path = save(tmp_path, 1, some_tensors())
    (tmp_path / 'step_00000001' / 'meta.json').unlink()
    (tmp_path / 'step_00000001' / 'meta.json').mkdir()  # root may read all but this
    with pytest.raises(UserError, match='meta.json cannot be read .IsADirectoryError.*try again'):
        checkpoint.newest(tmp_path)
    assert checkpoint.step_of(path) == 1


def test_a_later_step_is_not_removed_and_removes_nothing(devices, tmp_path):
    """A checkpoint that somebody put there."""
    save(tmp_path / 'theirs', 30, some_tensors())
    with checkpoint.Saver(tmp_path, 1, say=print) as saver:
        for step in (1, 2):
            saver.save(step, some_tensors(), {})
            saver.wait()
            if step == 1:
                (tmp_path / 'theirs' / 'step_00000030').rename(tmp_path / 'step_00000030')
    assert [checkpoint.step_of(path) for path in checkpoint.complete(tmp_path)] == [2, 30]


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'link').symlink_to(tmp_path / 'unmounted')
    for name in ('file', 'link'):
        with pytest.raises(UserError, match='is no folder, or a link to a disk that is not there'):
            checkpoint.newest(tmp_path / name)


def test_what_fails_beside_a_save_costs_no_checkpoint(devices, tmp_path, monkeypatch):
    """The copy of the record, and the removal of old checkpoints, as by an object store's client."""
    class HttpError(Exception):
        def __init__(self, code, message):
            super().__init__(f'{code} {message}')

    def fail(*_, **__):
        raise HttpError(503, 'Service Unavailable')

    said = []
    with checkpoint.Saver(f'memory://{tmp_path.name}/x', 1, say=said.append, before_commit=fail) as saver:
        saver.save(1, some_tensors(), {})
        saver.wait()
        store = type(checkpoint.file_system('memory://x'))
        remove = store.rm
        monkeypatch.setattr(store, 'rm', lambda self, path, recursive=False, **more:
                            fail() if recursive else remove(self, path, **more))
        saver.save(2, some_tensors(), {})
        saver.wait()
        assert not saver.failed_last and saver.committed == 2
    assert [line.split(':')[0] for line in said] == ['warning', 'step 1', 'warning', 'step 2', 'warning'], said
    assert len(checkpoint.complete(f'memory://{tmp_path.name}/x')) == 2 and all('HttpError: 503' in s for s in said[::2])


@pytest.mark.parametrize('place_', ['disk', 'memory'])
def test_which_are_kept(devices, tmp_path, place_):
    """On a disk, and in fsspec's stand-in for an object store, which has no rename."""
    folder = tmp_path if place_ == 'disk' else f'memory://{tmp_path.name}/run'
    tensors = some_tensors()
    with checkpoint.Saver(folder, keep=2, keep_every=3, say=print) as saver:
        for step in range(1, 9):
            if step == 5:  # a rest of what a kill left while it was removed
                saver.wait()
                checkpoint.file_system(folder).rm(f'{folder}/step_00000004/meta.json')
            saver.save(step, tensors, {'n': step})
    assert [checkpoint.step_of(p) for p in checkpoint._all(folder)] == [3, 6, 7, 8]
    assert [checkpoint.step_of(p) for p in checkpoint.complete(folder)] == [3, 6, 7, 8]
    newest = checkpoint.newest(folder)
    assert checkpoint.read_meta(newest, {'n': int})['n'] == 8
    back = some_tensors()
    for t in back.values():
        t.zero_()
    checkpoint.load(newest, back)
    assert all(torch.equal(back[n].cpu(), tensors[n].cpu()) for n in tensors)


def test_a_mount_that_renames_no_folders(devices, tmp_path, monkeypatch):
    """As gcsfuse does: the files are moved one by one, meta.json last."""
    rename, moved = os.rename, []

    def mounted(old, new):
        if os.path.isdir(old):
            raise OSError(39, 'Directory not empty')
        moved.append(os.path.basename(new))
        rename(old, new)

    monkeypatch.setattr(os, 'rename', mounted)
    path = save(tmp_path, 3, some_tensors(), n=3)
    assert checkpoint.newest(tmp_path) == path and read_by_torch(path).keys() == {'w0', 'w1', 'w2'}
    assert moved[-1] == 'meta.json' and os.listdir(tmp_path) == ['step_00000003']


def test_peak_memory_is_said_and_is_about_one_copy(devices, tmp_path):
    """64 MB on 8 devices: what the save needs beside, with a half more for what else goes on."""
    tensors = place({f'w{i}': torch.ones(1024, 2048) for i in range(8)}, {f'w{i}': ('fsdp', None) for i in range(8)},
                    runtime.make_mesh('1,8,1', 8))
    said = []
    save(tmp_path, 1, tensors, said.append)
    more = int(re.search(r'host memory at most [\d,]+ MB \(\+([\d,]+)\)', said[0])[1].replace(',', ''))
    assert 50 < more < 100, said
    memory = checkpoint.PeakMemory()
    checkpoint.load(tmp_path / 'step_00000001', tensors)
    assert memory.mb()[1] < 50, memory  # of one tensor at a time, 8 MB


def test_a_kill_while_saving_leaves_what_was_complete(devices, tmp_path, seed):
    """SIGKILL at random moments of a process that does nothing but save: the newest complete one can always be read."""
    rng = random.Random(seed)
    code = f'''
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from test_checkpoint import *
runtime.start('cpu')
import torch_xla
with checkpoint.Saver({str(tmp_path)!r}, keep=2, say=lambda text: print(text, flush=True)) as saver:
    for step in range(int(sys.argv[1]) + 1, 1000):
        saver.save(step, place({{'w': torch.full((64, 5000), float(step))}}, {{'w': ('fsdp', None)}},
                               runtime.make_mesh('1,8,1', 8)), {{}})
'''
    last = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, '-c', code, str(last)], stdout=subprocess.PIPE, text=True)
        while 'wrote' not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(rng.random() * 0.5)
        process.kill()
        process.wait()
        path = checkpoint.newest(tmp_path)
        assert checkpoint.step_of(path) > last
        last = checkpoint.step_of(path)
        assert torch.equal(read_by_torch(path)['w'], torch.full((64, 5000), float(last)))
