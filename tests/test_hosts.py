"""Several hosts, played by processes of this machine: each runs the whole program on its own 8 devices, writes the
parts that its share of them would hold, and agrees with the others over gloo, as hosts do."""
import importlib
import json
import os
import re
import signal
import socket
import time

import pytest

from forks import Fork
from nano import checkpoint, runtime
from test_kills import same_run, scripts  # noqa: F401, a fixture
from test_runs import data, metrics  # noqa: F401, data is a fixture
from test_vit import image_set  # noqa: F401, a fixture


def host(rank, count, name, *options):
    """Plays one of `count` hosts, in a process of its own."""
    import torch_xla.runtime as xr
    xr.process_index, xr.process_count = lambda: rank, lambda: count
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
    importlib.import_module(name).main(list(options))


def start(script, count, outs, *options):
    with socket.socket() as s:  # a free port; on a TPU the hosts find one another by themselves
        s.bind(('localhost', 0))
        env = dict(MASTER_ADDR='localhost', MASTER_PORT=str(s.getsockname()[1]))
    return [Fork(host, rank, count, *script.command(outs[rank]), *map(str, options), cwd=outs[rank].parent, **env)
            for rank in range(count)]


def ends(hosts):
    codes = [h.end() for h in hosts]
    print(*(f'--- host {i}, {code}\n{h.said}' for i, (h, code) in enumerate(zip(hosts, codes))))
    return codes, [h.said for h in hosts]


def wait_for_a_checkpoint(out, hosts):
    while not (out / 'ckpt' / 'step_00000002' / 'meta.json').exists():
        assert all(h.runs() for h in hosts), ends(hosts)
        time.sleep(0.01)


@pytest.mark.parametrize('name, mesh', [('train_gpt', '1,8,1'), ('train_vit', '2,2,2'),
                                        pytest.param('train_gpt', '2,2,2', marks=pytest.mark.slow)])
def test_two_hosts_stop_together_and_one_goes_on(scripts, tmp_path, name, mesh):  # noqa: F811
    """SIGTERM to the second host only: both save the same step and end. One host takes over what two wrote, and all is
    as if it had been alone: losses, evaluations, samples and weights."""
    script, out = scripts[name], tmp_path / 'run'
    options = '--mesh', mesh, '--steps', 200
    hosts = start(script, 2, [out, out], *options)
    wait_for_a_checkpoint(out, hosts)
    hosts[1].send_signal(signal.SIGTERM)
    codes, said = ends(hosts)
    assert codes == [143, 143] and 'stopped after step' in said[0] and 'wrote' not in said[1]
    assert f'compiled {script.compiles} graphs' in said[0]  # the others write to their logs
    step = int(said[0].split('stopped after step ')[1].split(':')[0])
    path = out / 'ckpt' / f'step_{step:08d}'
    names = [p.name for p in path.iterdir()]
    assert {n.split('_')[2] for n in names if n.endswith('.distcp')} == {'0', '1'}  # each host wrote
    assert set(json.loads((path / 'meta.json').read_text())['files']) == set(names) - {'meta.json'}
    assert 'log.txt' in os.listdir(out) and len(metrics(out)[0]) == step

    options = *options, '--stop_at', step + 2
    code, stdout, _ = script.run(out, *options)
    assert code == 0 and f'goes on from {path}' in stdout
    assert script.run(tmp_path / 'alone', *options)[0] == 0
    same_run(out, tmp_path / 'alone', step + 2)


def test_a_host_that_dies_ends_the_others(scripts, tmp_path):  # noqa: F811
    """They say so and end, so that all can be started again, from a complete checkpoint."""
    out = tmp_path / 'run'
    hosts = start(scripts['train_gpt'], 2, [out, out], '--steps', 2000, '--eval_every', 0)
    wait_for_a_checkpoint(out, hosts)
    hosts[1].kill()
    codes, said = ends(hosts)
    assert codes == [2, -signal.SIGKILL] and 'Traceback' not in said[0]
    assert re.search('error: (another host has ended|the hosts cannot reach one another)', said[0])
    assert checkpoint.newest(out / 'ckpt')


def test_hosts_that_do_not_share_the_folder_are_refused(scripts, tmp_path):  # noqa: F811
    hosts = start(scripts['train_gpt'], 2, [tmp_path / 'a', tmp_path / 'b'])
    codes, said = ends(hosts)
    assert codes == [2, 2] and all('host 1 does not see what host 0 writes' in s for s in said)
