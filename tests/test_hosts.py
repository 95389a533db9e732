"""Several hosts, played by processes of this machine: each runs the whole program on its own 8 devices, writes the
parts that its share of them would hold, and agrees with the others over gloo, as hosts do."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nano import checkpoint
from test_runs import OPTIONS, data, metrics, run, stored  # noqa: F401, data is a fixture

ROOT = Path(__file__).resolve().parent.parent
HOST = '''
import sys
sys.path.insert(0, {root!r})
rank, count = int(sys.argv[1]), int(sys.argv[2])
import torch_xla.runtime as xr
xr.process_index, xr.process_count = lambda: rank, lambda: count
import train_gpt
from nano import checkpoint, runtime
mine = range(rank * 8 // count, (rank + 1) * 8 // count)
whole = checkpoint.to_host

def to_host(tensors):
    parts = whole(tensors)
    for part in parts.values():
        if hasattr(part, 'shards'):
            part.shards = [s for s in part.shards if int(s.shard_device.split(':')[1]) in mine]
    return parts

checkpoint.to_host = to_host
runtime.rows_of_host = lambda batch, mesh, rt: None  # each plays all devices, so it needs all rows
train_gpt.main(sys.argv[3:])
'''.format(root=str(ROOT))


def start(tmp_path, count, out, *options, outs=None):
    with socket.socket() as s:  # a free port; on a TPU the hosts find one another by themselves
        s.bind(('localhost', 0))
        env = dict(os.environ, MASTER_ADDR='localhost', MASTER_PORT=str(s.getsockname()[1]))
    return [subprocess.Popen([sys.executable, '-c', HOST, str(rank), str(count), *OPTIONS, '--strict', '--out',
                              str(outs[rank] if outs else out), *map(str, options)], cwd=tmp_path, text=True, env=env,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(count)]


def ends(hosts):
    found = [(p.communicate(timeout=300)[0], p.returncode) for p in hosts]
    print(*(f'--- host {i}, {code}\n{said}' for i, (said, code) in enumerate(found)))
    return [code for _, code in found], [said for said, _ in found]


@pytest.mark.parametrize('mesh', ['1,8,1', pytest.param('2,2,2', marks=pytest.mark.slow)])
def test_two_hosts_stop_together_and_one_goes_on(data, tmp_path, mesh):  # noqa: F811
    """SIGTERM to the second host only: both save the same step and end. One host takes over what two wrote."""
    out = tmp_path / 'run'
    options = '--data', data, '--mesh', mesh, '--steps', 200, '--save_every', 2, '--eval_every', 0
    hosts = start(tmp_path, 2, out, *options)
    while not (out / 'ckpt' / 'step_00000002' / 'meta.json').exists():
        assert all(p.poll() is None for p in hosts), ends(hosts)
        time.sleep(0.01)
    hosts[1].send_signal(signal.SIGTERM)
    codes, said = ends(hosts)
    assert codes == [143, 143] and 'stopped after step' in said[0] and 'wrote' not in said[1]
    step = int(said[0].split('stopped after step ')[1].split(':')[0])
    path = out / 'ckpt' / f'step_{step:08d}'
    names = [p.name for p in path.iterdir()]
    assert {n.split('_')[2] for n in names if n.endswith('.distcp')} == {'0', '1'}  # each host wrote
    assert set(json.loads((path / 'meta.json').read_text())['files']) == set(names) - {'meta.json'}
    assert 'log.txt' in os.listdir(out) and len(metrics(out)[0]) == step

    options = *options, '--stop_at', step + 2, '--strict'
    code, said, _ = run(out, data, *options[2:])
    assert code == 0 and f'goes on from {path}' in said
    assert run(tmp_path / 'alone', data, *options[2:])[0] == 0
    mine, theirs = stored(out, step + 2), stored(tmp_path / 'alone', step + 2)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert [x['loss'] for x in metrics(out)[0]] == [x['loss'] for x in metrics(tmp_path / 'alone')[0]]


def test_a_host_that_dies_ends_the_others(data, tmp_path):  # noqa: F811
    """They say so and end, so that all can be started again, from a complete checkpoint."""
    out = tmp_path / 'run'
    hosts = start(tmp_path, 2, out, '--data', data, '--steps', 2000, '--save_every', 2, '--eval_every', 0)
    while not (out / 'ckpt' / 'step_00000002' / 'meta.json').exists():
        assert all(p.poll() is None for p in hosts), ends(hosts)
        time.sleep(0.01)
    hosts[1].kill()
    codes, said = ends(hosts)
    assert codes == [2, -signal.SIGKILL] and 'Traceback' not in said[0]
    assert re.search('error: (another host has ended|the hosts cannot reach one another)', said[0])
    assert checkpoint.newest(out / 'ckpt')


def test_hosts_that_do_not_share_the_folder_are_refused(data, tmp_path):  # noqa: F811
    hosts = start(tmp_path, 2, None, '--data', data, outs=[tmp_path / 'a', tmp_path / 'b'])
    codes, said = ends(hosts)
    assert codes == [2, 2] and all('host 1 does not see what host 0 writes' in s for s in said)
