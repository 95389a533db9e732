"""nano/checkpoint.py on 8 devices: what is written, read by PyTorch alone, and read back onto other meshes."""
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nano import UserError, checkpoint, runtime

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
        meta = checkpoint.read_meta(path, 'x')
        assert meta['step'] == 5 and meta['x'] == 1 and checkpoint.newest(tmp_path / str(case)) == path
        found = read_by_torch(path)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[n], t) for n, t in tensors.items()), (mesh, specs)
        for name, stored in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
            assert sum(c.sizes.numel() for c in stored.chunks) == tensors[name].numel()

        other = rng.choice(MESHES)
        back = place({n: torch.zeros_like(t) for n, t in tensors.items()}, specs, runtime.make_mesh(other, 8))
        checkpoint.load(path, back)
        assert all(torch.equal(back[n].cpu(), t) for n, t in tensors.items()), (mesh, other, specs)


def test_another_model_is_refused(devices, tmp_path):
    mesh = runtime.make_mesh('1,8,1', 8)
    specs = {'a': ('fsdp', None), 'b': (None,), 'c': (None,)}
    path = save(tmp_path, 1, place({'a': torch.ones(8, 2), 'b': torch.ones(3)}, specs, mesh))
    for wrong, message in (({'a': torch.ones(8, 3)}, r'a is \(8, 2\), this model.s is \(8, 3\)'),
                           ({'c': torch.ones(3)}, 'has no c')):
        with pytest.raises(UserError, match=message):
            checkpoint.load(path, place(wrong, specs, mesh))
