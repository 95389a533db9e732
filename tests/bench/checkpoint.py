"""What a save and a load cost at 124 million parameters with optimizer state (1.5 GB), on 8 virtual CPU devices,
against a plain torch.save of the gathered state:

    python tests/bench/checkpoint.py save            # both, three times in turn, each in a process of its own
    python tests/bench/checkpoint.py resume          # seconds from the start of train_gpt.py to its first step

Peaks are of host memory above what the process held before. On a CPU that holds the devices' memory too.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
ENV = dict(os.environ, PJRT_DEVICE='CPU', CPU_NUM_DEVICES='8', TF_CPP_MIN_LOG_LEVEL='2')
SIZE = '--layers 12 --width 768 --heads 6 --kv_heads 6 --head_size 128 --mlp_width 2048 --vocab_size 50304'.split()


def one_save(kind: str, folder: str) -> dict:
    """Saves and loads once; seconds and MB."""
    import torch
    import torch_xla

    import train_gpt
    from nano import checkpoint, config, runtime
    rt = runtime.start('cpu', say=lambda text: None)
    cfg = config.parse(train_gpt.Config, train_gpt.PRESETS, ['--device', 'cpu', *SIZE])
    weights, state = train_gpt.build(cfg, runtime.make_mesh('1,8,1', rt.n_devices), torch_xla.device())
    tensors = weights | state
    with torch.no_grad():
        for t in tensors.values():
            t.add_(1e-3)  # as a step does: zeros that were never written take no memory before they are read
    torch_xla.sync(wait=True)
    out = dict(state_mb=sum(t.numel() * t.element_size() for t in tensors.values()) / 1e6)

    memory, began = checkpoint.PeakMemory(), time.perf_counter()
    if kind == 'ours':
        with checkpoint.Saver(folder, 1, say=lambda text: None) as saver:
            saver.save(1, tensors, {})
            out['stall_s'] = time.perf_counter() - began
            saver.wait()
        assert not saver.failed_last
    else:
        with open(f'{folder}/all.pt', 'wb') as f:
            torch.save({name: t.detach().cpu() for name, t in tensors.items()}, f)
            f.flush()
            os.fsync(f.fileno())
        out['stall_s'] = time.perf_counter() - began
    out |= dict(committed_s=time.perf_counter() - began, save_peak_mb=memory.mb()[1])

    memory, began = checkpoint.PeakMemory(), time.perf_counter()
    if kind == 'ours':
        checkpoint.load(f'{folder}/step_00000001', tensors)
    else:
        found = torch.load(f'{folder}/all.pt')
        with torch.no_grad():
            for name, t in tensors.items():
                t.copy_(found.pop(name))
                torch_xla.sync(wait=True)  # or all copies wait on the host for the last
    torch_xla.sync(wait=True)
    return out | dict(load_s=time.perf_counter() - began, load_peak_mb=memory.mb()[1])


def save():
    found = {'ours': [], 'torch.save': []}
    for _ in range(3):
        for kind in found:
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run([sys.executable, __file__, 'one', kind, folder], env=ENV, stdout=subprocess.PIPE,
                                      text=True, check=True)
                found[kind].append(json.loads(done.stdout.splitlines()[-1]))
                print(kind, {k: round(v, 2) for k, v in found[kind][-1].items()}, flush=True)
    print(f'\n{"medians":<14} {"ours":>10} {"torch.save":>10} {"ratio":>7}')
    for name in found['ours'][0]:
        ours, plain = (statistics.median(x[name] for x in found[kind]) for kind in found)
        print(f'{name:<14} {ours:>10.2f} {plain:>10.2f} {ours / plain:>7.2f}')


def resume():
    """A run of two steps that is stopped after the first, and goes on."""
    with tempfile.TemporaryDirectory() as folder:
        import numpy as np

        from nano import shards
        entries = []
        for split, n in (('train', 20000), ('val', 2000)):
            writer = shards.ShardWriter(folder, split, 'uint16', 10**6)
            writer.add(np.random.default_rng(0).integers(0, 50304, n).astype(np.uint16), n_bytes=n)
            entries += writer.close()
        shards.write_manifest(folder, dict(format=1, dtype='uint16', vocab_size=50304, tokenizer=None, separator=None,
                                           shards=entries))
        command = [sys.executable, str(ROOT / 'train_gpt.py'), '--device', 'cpu', *SIZE, '--data', folder, '--out',
                   f'{folder}/run', '--seq_len', '64', '--eval_windows', '8', '--steps', '2', '--eval_every', '0']
        for stop_at in (1, 2):
            began = time.perf_counter()
            process = subprocess.Popen([*command, '--stop_at', str(stop_at)], env=ENV, stdout=subprocess.PIPE,
                                       text=True)
            for line in process.stdout:
                if any(text in line for text in ('goes on from', 'compiling the evaluation', 'compiling the training',
                                                 'graphs', 'wrote')):
                    print(f'{time.perf_counter() - began:7.1f} s  {line.strip()}', flush=True)
            assert process.wait() == 0


if __name__ == '__main__':
    if sys.argv[1:2] == ['one']:
        print(json.dumps(one_save(*sys.argv[2:])))
    elif sys.argv[1:] in (['save'], ['resume']):
        globals()[sys.argv[1]]()
    else:
        sys.exit(__doc__)
