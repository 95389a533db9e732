"""launch/slice.sh against a stand-in for gcloud (fake_gcloud.py), whose workers are folders of this machine."""
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from test_launch import NASTY, ROOT
from test_supervisor import SCRIPT

SHOW = SCRIPT + '''
import json
json.dump([sys.argv[1:], os.environ.get('HF_TOKEN')], open(os.environ['HOME'] + '/got', 'w'))
'''


class Laptop:
    def __init__(self, tmp, n):
        self.cloud, self.checkout, self.procs = tmp / 'cloud', tmp / 'a checkout', []
        (self.cloud / 'faults').mkdir(parents=True)
        (self.cloud / 'size').write_text(str(n))
        (self.checkout / 'nano').mkdir(parents=True)
        (self.checkout / 'launch').mkdir()
        for name in ('launch.sh', 'launch/slice.sh', 'launch/host.py', 'nano/__init__.py'):
            shutil.copy(ROOT / name, self.checkout / name)
        (self.checkout / 'requirements.txt').write_text('pytest==1\n')
        (self.checkout / 'train_toy.py').write_text("if __name__ == '__main__':\n    pass\n")
        (self.checkout / '.gitignore').write_text('out/\nignored\n')
        (self.checkout / 'ignored').touch()
        git = ['git', '-C', self.checkout, '-c', 'user.name=x', '-c', 'user.email=x@y']
        for args in (['init', '-q'], ['add', '.'], ['commit', '-qm', 'x']):
            subprocess.run([*git, *args], check=True)
        (self.checkout / 'train_toy.py').write_text(SHOW + "if __name__ == '__main__':\n    pass\n")  # not committed
        (self.checkout / 'new file').touch()
        (self.cloud / 'hashes').write_text(subprocess.run(['sha256sum', 'requirements.txt'], cwd=self.checkout,
                                                          text=True, capture_output=True).stdout)
        (tmp / 'bin').mkdir()
        (tmp / 'bin' / 'gcloud').write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/fake_gcloud.py "$@"\n')
        (tmp / 'bin' / 'gcloud').chmod(0o755)
        self.env = {'PATH': f'{tmp}/bin:{os.environ["PATH"]}', 'HOME': str(tmp), 'FAKE_CLOUD': str(self.cloud),
                    'TPU': 'pod', 'ZONE': 'us-east5-b', 'NANO_NAP': '.2'}

    def script(self, do):
        (self.checkout / 'train_toy.py').write_text(SHOW.replace("exec(os.environ.get('DO', ''))", do) +
                                                    "if __name__ == '__main__':\n    pass\n")

    def fault(self, name, text=''):
        (self.cloud / 'faults' / f'{name}.{time.time_ns()}').write_text(text)

    def start(self, *args, **env):
        env = {k: v for k, v in {**self.env, **env}.items() if v is not None}
        self.procs.append(subprocess.Popen(['bash', self.checkout / 'launch.sh', *args], env=env, text=True, cwd='/',
                                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                                           start_new_session=True))
        return self.procs[-1]

    def run(self, *args, **env):
        p = self.start(*args, **env)
        p.out, p.err = p.communicate(timeout=100)
        print('$', args, p.returncode, p.out[-3000:], p.err[-3000:], sep='\n')
        return p

    def calls(self):
        return [json.loads(line) for line in (self.cloud / 'calls.jsonl').read_text().splitlines()]

    def home(self, i):
        return self.cloud / 'pod' / f'w{i}'

    def started(self, i):
        path = self.home(i) / 'started'
        return len(path.read_text()) if path.exists() else 0

    def until(self, what):
        end = time.monotonic() + 30
        while not what():
            assert time.monotonic() < end
            time.sleep(.05)


@pytest.fixture
def laptop(tmp_path):
    made = []

    def make(n):
        made.append(Laptop(tmp_path, n))
        done = made[-1].run('--create', 'v5e-16', '--spot')
        assert done.returncode == 0 and 'WAITING_FOR_RESOURCES' in done.err and 'ready: TPU=pod' in done.err
        return made[-1]
    yield make
    for path in glob.glob(f'{tmp_path}/cloud/*/w*/nano/runs/*/*/run.json'):  # what a failed test left
        record = json.loads(Path(path).read_text())
        if 'code' not in record:
            os.kill(record['pid'], signal.SIGKILL) if os.path.exists(f'/proc/{record["pid"]}') else None
    for p in made[0].procs if made else ():
        p.kill() if p.poll() is None else None


@pytest.mark.parametrize('n', [4, 16])
def test_a_run_on_all_workers(laptop, n):
    laptop = laptop(n)
    laptop.fault('ssh1', 'refused')
    laptop.fault('ssh2', 'lost')  # while it is set up: repeated with an empty stdin, which must not pass for success
    laptop.fault('ssh3', 'slow 1')
    done = laptop.run('train_toy.py', *NASTY, HF_TOKEN='s3cret $x')
    assert done.returncode == 0 and 'worker 0 done' in done.out
    assert all(f'host {i} of {n}' in done.out for i in range(n))
    for i in range(n):
        assert json.loads((laptop.home(i) / 'got').read_text()) == [NASTY, 's3cret $x'] and laptop.started(i) == 1
    [copy] = laptop.home(n - 1).glob('nano/checkouts/*')
    assert (copy / 'new file').exists() and not (copy / 'ignored').exists() and '-dirty-' in copy.name
    assert 's3cret' not in json.dumps(laptop.calls()) + done.out + done.err  # nor in a file of a worker
    assert not subprocess.run(['grep', '-rl', 's3cret', '--exclude=got', laptop.cloud, laptop.checkout],
                              capture_output=True).stdout
    assert f'revision {copy.name}' in done.out
    first = [c for c in laptop.calls() if c[3] == 'ssh'][0]
    assert '--worker=0' in first  # alone: it may have to write the key
    done = laptop.run('--status')
    assert done.returncode == 0 and done.out.count('ended with 0') == n and done.out.startswith('worker 0: train_toy ')
    assert laptop.run('--ssh', 'echo "a  b" $TPU_WORKER_ID').out.count('a  b') == n


def test_a_lost_connection_at_the_start_starts_nothing_twice(laptop):
    laptop = laptop(4)
    laptop.script('time.sleep(1)')
    for i in range(4):
        laptop.fault(f'ssh{i}', 'slow 0')  # of the set-up
        laptop.fault(f'ssh{i}', 'lost')  # of the start
    assert laptop.run('train_toy.py').returncode == 0
    assert [laptop.started(i) for i in range(4)] == [1] * 4


def test_a_failure_is_the_launchers_exit_code(laptop):
    laptop = laptop(4)
    laptop.script('sys.exit(7) if me == 3 else time.sleep(60)')
    done = laptop.run('train_toy.py')
    assert done.returncode == 7 and done.out.count('worker 3 failed first, with exit code 7') == 1
    laptop.run('--logs')
    assert 'joining worker 0' in (laptop.checkout / 'out/logs/pod/newest/worker_2.txt').read_text()


def test_ctrl_c_detaches_attach_follows_stop_ends(laptop):
    laptop = laptop(4)
    laptop.script('print("runs\\nstep 12/20  loss 3.2500  9 tokens/s", flush=True); time.sleep(60)')
    p = laptop.start('train_toy.py', RUN='mine')
    laptop.until(lambda: all(laptop.started(i) for i in range(4)))
    time.sleep(1)
    os.killpg(p.pid, signal.SIGINT)
    out, err = p.communicate(timeout=20)
    assert p.returncode == 0 and 'detached' in err and 'runs' in out
    assert laptop.run('--status', RUN='mine').out.count('running, pid') == 4
    assert 'step 12, loss 3.2500; no TPU' in laptop.run('--status').out
    again = laptop.start('--attach')
    time.sleep(1)
    (laptop.home(1) / 'lock').touch()
    done = laptop.run('--stop', RUN='mine')
    assert done.returncode == 0 and f'worker 1: removed {laptop.home(1)}/lock' in done.out
    out, err = again.communicate(timeout=30)
    assert again.returncode == 143 and 'runs' in out
    for path in glob.glob(f'{laptop.cloud}/pod/w*/nano/runs/mine/*/run.json'):
        assert not os.path.exists(f'/proc/{json.loads(Path(path).read_text())["script_pid"]}')


def test_keep_alive_makes_a_preempted_slice_again(laptop):
    laptop = laptop(4)
    laptop.script(f'''
seen = {str(laptop.cloud / "preempted")!r}
while not os.path.exists(seen): time.sleep(.1)''')
    p = laptop.start('--keep-alive', 'v5e-16', '--spot', 'train_toy.py')
    laptop.until(lambda: all(laptop.started(i) for i in range(4)))
    (laptop.cloud / 'pod' / 'state').write_text('SUSPENDED')
    for path in glob.glob(f'{laptop.cloud}/pod/w*/nano/runs/*/*/run.json'):
        os.kill(json.loads(Path(path).read_text())['pid'], signal.SIGKILL)
    (laptop.cloud / 'preempted').touch()
    out, err = p.communicate(timeout=60)
    print(out, err)
    assert p.returncode == 0 and 'preemption: the slice is gone' in err and 'is complete, after 1 repeats' in err
    creates = [c for c in laptop.calls() if c[3] == 'create']
    assert len(creates) == 2 and creates[0] == creates[1] and '--spot' in creates[1]
    assert 'preemption' in (laptop.checkout / 'out/keep-alive-pod-train_toy.log').read_text()


def test_keep_alive_deletes_nothing_when_its_own_network_fails(laptop):
    laptop = laptop(2)
    laptop.script(f'while not os.path.exists({str(laptop.cloud / "end")!r}): time.sleep(.1)')
    for _ in range(3):
        laptop.fault('error', 'Unable to reach the server')
    p = laptop.start('--keep-alive', 'v5e-16', '--spot', 'train_toy.py')
    laptop.until(lambda: all(laptop.started(i) for i in range(2)))
    (laptop.cloud / 'end').touch()
    out, err = p.communicate(timeout=30)
    assert p.returncode == 0 and 'is complete, after 0 repeats' in err, err
    assert not [c for c in laptop.calls() if c[3] == 'delete'] and sum(c[3] == 'create' for c in laptop.calls()) == 1


def test_keep_alive_gives_up_on_a_program_that_fails(laptop):
    laptop = laptop(4)
    laptop.script('sys.exit(9)')
    done = laptop.run('--keep-alive', 'v5e-16', 'train_toy.py', TRIES='2')
    assert done.returncode == 9 and 'given up after 2 quick failures; the first was: ' in done.err
    assert laptop.started(0) == 2 and sum(c[3] == 'create' for c in laptop.calls()) == 1


@pytest.mark.parametrize('error, text', [
    ('RESOURCE_EXHAUSTED: Quota limit exceeded', 'cloud.google.com/tpu/docs/quota'),
    ('PERMISSION_DENIED: Permission tpu.nodes.get denied', 'roles/tpu.admin'),
    ('SERVICE_DISABLED: Cloud TPU API has not been used', 'gcloud services enable tpu.googleapis.com')])
def test_what_gcloud_refuses_comes_with_advice(tmp_path, error, text):
    laptop = Laptop(tmp_path, 1)
    laptop.fault('error', error)
    done = laptop.run('--create', 'v5e-16')
    assert done.returncode != 0 and error in done.err and text in done.err


def test_no_gcloud_no_slice_no_zone(tmp_path):
    laptop = Laptop(tmp_path, 1)
    only = tmp_path / 'only'
    only.mkdir()
    for tool in 'bash dirname grep sed mktemp rm env'.split():
        os.symlink(shutil.which(tool), only / tool)
    done = laptop.run('--status', PATH=str(only))
    assert done.returncode == 1 and 'there is no gcloud here: https://' in done.err
    assert 'there is no slice pod' in laptop.run('train_toy.py').err
    assert 'say where: ZONE=' in laptop.run('--status', ZONE=None).err
    assert laptop.run('--status', TPU=None).returncode == 2


def test_gcloud_on_all_workers_without_a_laptops_side(laptop):
    laptop = laptop(4)
    laptop.script('time.sleep(1)\nif sys.argv[1:] == ["fail"] and me == 2: sys.exit(255)')
    assert laptop.run('train_toy.py').returncode == 0  # brings the checkout
    laptop.fault('ssh3', 'lost')

    def gcloud(*args):
        command = f'NANO_VENV=$HOME/nano/.venv bash nano/checkouts/*/launch.sh train_toy.py {" ".join(args)}'
        return subprocess.run(['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'pod', '--zone=z', '--worker=all',
                               f'--command={command}'], env=laptop.env, text=True, capture_output=True, timeout=60)
    done = gcloud('fail')  # of code 255 gcloud would think that the connection was lost, and start it again
    assert done.returncode == 254 and 'worker 2 failed first, with exit code 255' in done.stdout
    assert [laptop.started(i) for i in range(3)] == [2] * 3  # worker 3's connection was lost; see test_supervisor.py


def test_two_runs_at_once_are_told_apart(laptop):
    laptop = laptop(4)
    (laptop.cloud / 'own ports').touch()
    laptop.script('print("I am", sys.argv[2], flush=True); time.sleep(60)')
    names = [f'run{os.getpid()}{letter}' for letter in 'ab']
    both = [laptop.start('train_toy.py', '--out', f'gs://bucket/{name}/') for name in names]
    laptop.until(lambda: all(laptop.started(i) == 2 for i in range(4)))
    if (laptop.home(3) / 'pip').exists():  # unless it is there
        assert (laptop.home(3) / 'pip').read_text().splitlines()[0] == '-m pip install -q gcsfs==2026.10.1'
    refused = laptop.run('train_toy.py', '--out', f'x/{names[0]}')
    assert refused.returncode == 2 and 'is alive on this host' in refused.out
    assert f'which (RUN=...): {names[1]}, {names[0]}' in laptop.run('--stop').out.replace(
        f'{names[0]}, {names[1]}', f'{names[1]}, {names[0]}')
    assert laptop.run('--stop', RUN=names[0]).returncode == 0
    assert both[0].wait(20) == 143 and both[1].poll() is None
    assert laptop.run('--status', RUN=names[1]).out.count('running, pid') == 4
    assert laptop.run('--stop').returncode == 0 and both[1].wait(20) == 143


def test_delete(laptop):
    laptop = laptop(1)
    assert laptop.run('--delete').returncode == 0 and not (laptop.cloud / 'pod').exists()
    assert any(c[2:4] == ['queued-resources', 'delete'] and '--force' in c for c in laptop.calls())


def test_shellcheck():
    subprocess.run([Path(sys.executable).parent / 'shellcheck', ROOT / 'launch' / 'slice.sh'], check=True)
