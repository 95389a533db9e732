"""launch/slice.sh against a stand-in for gcloud (fake_gcloud.py), whose workers are folders of this machine."""
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from test_launch import NASTY, ROOT
from test_supervisor import SCRIPT, wait_for

TYPES = {1: 'v6e-8', 2: 'v5p-16', 4: 'v5e-16', 16: 'v4-128'}  # with so many hosts
SHOW = SCRIPT + '''
import json
json.dump([sys.argv[1:], os.environ.get('HF_TOKEN'), os.environ.get('WANDB_API_KEY')],
          open(os.environ['HOME'] + '/got', 'w'))
'''
GCSFS = '''
import os
from fsspec.implementations.local import LocalFileSystem

class GCSFileSystem(LocalFileSystem):
    """Buckets are folders beside the slices. A worker's file `odd` has it see another one, `breaks` fails one read."""
    protocol = 'gs', 'gcs'

    @classmethod
    def _strip_protocol(cls, path):
        home = os.environ['HOME']
        bucket = home + '/../../' + ('odd/' if os.path.exists(home + '/odd') else 'buckets/')
        return os.path.normpath(path.replace('gs://', bucket)) if path.startswith('gs://') else path

    def cat_file(self, path, start=None, end=None, **more):
        home, name = os.environ['HOME'], os.path.basename(path)
        print(name, file=open(home + '/reads', 'a'))
        if name == 'b.bin' and os.path.exists(home + '/breaks'):
            import glob, time
            while not glob.glob(home + '/nano/data/*/a.bin'):
                time.sleep(.01)
            os.remove(home + '/breaks')
            raise RuntimeError('the network is gone')
        return super().cat_file(path, start, end, **more)
'''


class Laptop:
    def __init__(self, tmp, n):
        self.cloud, self.checkout, self.procs = tmp / 'cloud', tmp / 'a checkout', []
        (self.cloud / 'faults').mkdir(parents=True)
        self.n = n
        shutil.copytree(ROOT / 'launch', self.checkout / 'launch', ignore=shutil.ignore_patterns('__pycache__'))
        (self.checkout / 'nano').mkdir()
        for name in ('launch.sh', 'nano/__init__.py', 'nano/store.py', 'nano/shards.py'):
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

    def home(self, i, slice='pod'):
        return self.cloud / slice / f'w{i}'

    def started(self, i):
        path = self.home(i) / 'started'
        return len(path.read_text()) if path.exists() else 0

    def log(self, run, i=0):
        return ''.join(p.read_text() for p in self.home(i).glob(f'nano/runs/{run}/*/log.txt'))

    def until_all_run(self, times=1):
        wait_for(lambda: all(self.started(i) == times for i in range(self.n)))


@pytest.fixture
def laptop(tmp_path):
    made = []

    def make(n):
        made.append(Laptop(tmp_path, n))
        done = made[-1].run('--create', TYPES[n], '--spot')
        assert done.returncode == 0 and 'WAITING_FOR_RESOURCES' in done.err and 'ready: TPU=pod' in done.err
        return made[-1]
    yield make
    for path in glob.glob(f'{tmp_path}/cloud/*/w*/nano/runs/*/*/run.json'):  # what a failed test left
        record = json.loads(Path(path).read_text())
        if 'code' not in record:
            os.kill(record['pid'], signal.SIGKILL) if os.path.exists(f'/proc/{record["pid"]}') else None
    for p in made[0].procs if made else ():
        p.kill() if p.poll() is None else None


def seen_by_ps(stop, found):
    while not stop.is_set():
        for path in glob.glob('/proc/[0-9]*/cmdline'):
            try:
                found.update([path] * (b's3cret' in Path(path).read_bytes()))
            except OSError:
                pass
        stop.wait(.02)


@pytest.mark.parametrize('n', [4, 16])
def test_a_run_on_all_workers(laptop, n):
    laptop = laptop(n)
    laptop.fault('ssh1', 'refused')
    laptop.fault('ssh2', 'lost')  # while it is set up: repeated with an empty stdin, which must not pass for success
    laptop.fault('ssh3', 'slow 1')
    stop, found = threading.Event(), set()
    watcher = threading.Thread(target=seen_by_ps, args=(stop, found))
    watcher.start()
    done = laptop.run('train_toy.py', *NASTY, HF_TOKEN='s3cret $x', WANDB_API_KEY="s3cret'2")
    stop.set()
    watcher.join()
    assert done.returncode == 0 and 'worker 0 done' in done.out
    assert all(f'host {i} of {n}' in done.out for i in range(n))
    for i in range(n):
        assert json.loads((laptop.home(i) / 'got').read_text()) == [NASTY, 's3cret $x', "s3cret'2"]
        assert laptop.started(i) == 1
    [copy] = laptop.home(n - 1).glob('nano/checkouts/*')
    assert (copy / 'new file').exists() and not (copy / 'ignored').exists() and '-dirty-' in copy.name
    assert not found and 's3cret' not in json.dumps(laptop.calls()) + done.out + done.err  # nor in a file of a worker:
    assert not subprocess.run(['grep', '-rl', 's3cret', '--exclude=got', laptop.cloud, laptop.checkout],
                              capture_output=True).stdout
    assert f'revision {copy.name}' in done.out
    done = laptop.run('--status')
    assert done.returncode == 0 and done.out.count('ended with 0') == n and done.out.startswith('worker 0: train_toy ')
    assert laptop.run('--ssh', 'echo "a  b" $TPU_WORKER_ID').out.count('a  b') == n


def test_what_gcloud_is_asked(laptop):
    laptop = laptop(2)
    for args in (['train_toy.py'], ['--stop'], ['--delete']):
        assert laptop.run(*args).returncode == 0
    calls = [(c[2], c[3], *(a for a in c[4:] if not a.startswith(('--command', '--ssh-flag')))) for c in laptop.calls()]
    named = 'pod', '--zone=us-east5-b'
    describe = 'queued-resources', 'describe', 'pod', '--format=value(state.state)', named[1]
    look = 'tpu-vm', 'describe', 'pod', '--format=value(state,networkEndpoints.len())', named[1]
    ssh = [('tpu-vm', 'ssh', *named, f'--worker={i}') for i in range(2)]
    assert calls[:5] == [('queued-resources', 'create', 'pod', '--node-id=pod', '--accelerator-type=v5p-16',
                          '--runtime-version=v2-alpha-tpuv5', '--spot', '--async', named[1]), *[describe] * 3, look]
    assert calls[5:7] == ssh  # set up; worker 0 first and alone, as it may have to write the key
    assert sorted(calls[7:9]) == ssh and calls[9] == ssh[0]  # start both, follow the first
    assert calls[10] == look and sorted(calls[11:13]) == ssh  # stop
    assert calls[13:] == [describe, ('queued-resources', 'delete', 'pod', '--force', '--quiet', named[1])]
    assert all('--ssh-flag=-o ServerAliveInterval=15' in c for c in laptop.calls() if c[3] == 'ssh')


def test_every_chip_has_its_software_version(tmp_path):
    laptop = Laptop(tmp_path, 1)
    for kind in ('v5litepod-8', 'v5p-8', 'v4-8'):
        assert laptop.run('--create', kind, TPU=None, ZONE='z').returncode == 0
    done = laptop.run('--create', 'v7-8')
    assert done.returncode == 2 and "no type 'v7-8': such as v5e-64" in done.err
    done = laptop.run('--create', 'v4-8', TPU=None)
    assert done.returncode == 1 and 'there is a slice v4-8 already' in done.err
    done = laptop.run('--create', 'v5e-8', RUNTIME='v2-alpha-tpuv6e')  # of another chip
    assert done.returncode == 1 and 'Runtime version v2-alpha-tpuv6e is not supported' in done.err


def test_a_lost_connection_at_the_start_starts_nothing_twice(laptop):
    laptop = laptop(4)
    laptop.script('time.sleep(1)')
    for i in range(4):
        laptop.fault(f'ssh{i}', 'slow 0')  # of the set-up
        laptop.fault(f'ssh{i}', 'lost')  # of the start
    assert laptop.run('train_toy.py', NANO_AT_ONCE='3').returncode == 0
    assert [laptop.started(i) for i in range(4)] == [1] * 4


def test_what_is_left_of_stdin_is_not_run(laptop):
    """gcloud repeats a command that was lost in the middle, and what comes then begins anywhere."""
    laptop = laptop(2)
    for i, at in enumerate((7, 900)):  # in the first line of the programs; in the packed checkout
        laptop.fault(f'ssh{i}', f'cut {at}')
        laptop.fault(f'ssh{i}', 'slow 0')  # the repeat
        laptop.fault(f'ssh{i}', 'slow 0')  # the set-up, once more
        laptop.fault(f'ssh{i}', 'cut 7')  # the start
    assert laptop.run('train_toy.py').returncode == 0
    for i in range(2):
        assert laptop.started(i) == 1 and {p.name for p in laptop.home(i).iterdir()} == {'nano', 'got', 'started'}
        assert len(list(laptop.home(i).glob('nano/checkouts/*'))) == 1


def test_a_worker_that_cannot_be_set_up(laptop):
    """Such as one whose disk is full: it is named, with what it says, and nothing starts anywhere."""
    laptop = laptop(2)
    for name in ('checkouts', 'runs'):
        (laptop.home(1) / 'nano' / name).touch()  # where a folder is to be made
        done = laptop.run('train_toy.py')
        assert done.returncode == 1 and 'worker 1 failed: ' in done.err and name in done.err
        assert 'nothing was started on the workers that are named above' in done.err and not laptop.started(0)
        laptop.run('--stop')
        (laptop.home(1) / 'nano' / name).unlink()


def test_a_script_may_print_what_it_likes(laptop):
    laptop = laptop(1)
    lines = ['@end 3', '@ok 5', '@failed', '@run x y', '|x', '  a  ', '\\n', '', '@ok 7']
    laptop.script(f'print(*{lines!r}, sep=chr(10), end="")')
    laptop.checkout.joinpath('train_toy.py').write_text(
        laptop.checkout.joinpath('train_toy.py').read_text().replace("print('worker'", "sys.exit(3)\nprint('worker'"))
    done = laptop.run('train_toy.py')
    assert done.returncode == 3 and '\n'.join(lines) in done.out
    done = laptop.run('--logs')
    assert done.returncode == 0
    assert '\n'.join(lines) in (laptop.checkout / 'out/logs/pod/newest/worker_0.txt').read_text()


def test_a_failure_is_the_launchers_exit_code(laptop):
    laptop = laptop(4)
    laptop.script('if me < 3: time.sleep(60)\ntry: 1 / 0\nexcept ZeroDivisionError: import traceback; '
                  'traceback.print_exc(); sys.exit(7)')
    done = laptop.run('train_toy.py')
    assert done.returncode == 7 and done.out.count('worker 3 failed first, with exit code 7') == 1
    after = done.out.split('failed first')[1]
    assert after.index('Traceback') < after.index('ZeroDivisionError') < after.index('the run ended with exit code 7')
    laptop.run('--logs')
    assert 'joining worker 0' in (laptop.checkout / 'out/logs/pod/newest/worker_2.txt').read_text()


def test_ctrl_c_detaches_attach_follows_stop_ends(laptop):
    laptop = laptop(4)
    laptop.script('print("runs\\nstep 12/20  loss 3.2500  9 tokens/s", flush=True); time.sleep(60)')
    p = laptop.start('train_toy.py', RUN='mine')
    laptop.until_all_run()
    wait_for(lambda: '/20' in laptop.log('mine'))
    time.sleep(.5)
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
    laptop.until_all_run()
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


@pytest.mark.parametrize('by', ['SIGTERM', 'deleted', '--stop'])
def test_keep_alive_tells_a_preemption_from_a_persons_wish(laptop, by):
    """A preemption sends SIGTERM first, and Google may tell of it later. What a person ends is not rented again."""
    laptop = laptop(2)
    laptop.script(f'while not os.path.exists({str(laptop.cloud / "end")!r}): time.sleep(.1)')
    p = laptop.start('--keep-alive', '--spot', 'v5p-16', 'train_toy.py')
    laptop.until_all_run()
    if by == '--stop':
        assert laptop.run('--stop').returncode == 0
    elif by == 'deleted':
        assert laptop.run('--delete').returncode == 0
    pids = [json.loads(Path(path).read_text())['pid']
            for path in glob.glob(f'{laptop.cloud}/*pod*/w*/nano/runs/*/*/run.json')]
    if by == 'SIGTERM':
        os.kill(pids[1], signal.SIGTERM)
        wait_for(lambda: 'with exit code 143' in laptop.log('train_toy'))
        time.sleep(1)
        (laptop.cloud / 'end').touch()
        (laptop.cloud / 'pod' / 'state').write_text('SUSPENDED')
    out, err = p.communicate(timeout=60)
    creates = sum(c[3] == 'create' for c in laptop.calls())
    text, code, times = {'SIGTERM': ('preemption: the slice is gone, SUSPENDED', 0, 2),
                         'deleted': ('somebody deleted slice pod', 1, 1),
                         '--stop': ('run train_toy was stopped', 143, 1)}[by]
    assert (text in err, p.returncode, creates) == (True, code, times), err


def test_keep_alive_checks_before_it_pays(tmp_path):
    laptop = Laptop(tmp_path, 1)
    (laptop.checkout / 'ignored').write_text('')
    for args, text in ((['v7-8', 'train_toy.py'], "no type 'v7-8'"), (['v5e-8', '--spot', 'nix.py'], 'no script'),
                       (['--spot', 'v5e-8', 'ignored'], 'git ignores ignored')):
        done = laptop.run('--keep-alive', *args)
        assert done.returncode == 2 and text in done.err
    assert not (laptop.cloud / 'calls.jsonl').exists()


@pytest.mark.parametrize('code', [96, 97, 98])
def test_a_script_may_end_with_any_code(laptop, code):
    laptop = laptop(1)
    laptop.script(f'sys.exit({code})')
    done = laptop.run('train_toy.py')
    assert done.returncode == code and 'error: ' not in done.err
    done = laptop.run('--keep-alive', 'v6e-8', 'train_toy.py', TRIES='1')
    assert done.returncode == code and f'failed with exit code {code}' in done.err
    assert 'a preemption deletes: the run would then start from nothing' in done.err


def test_a_request_that_waits(tmp_path):
    laptop = Laptop(tmp_path, 1)
    p = laptop.start('--create', 'v6e-8', NANO_NAP='60')
    wait_for(lambda: (laptop.cloud / 'pod' / 'state').exists() and len(laptop.calls()) > 1)
    time.sleep(.5)
    os.killpg(p.pid, signal.SIGINT)
    out, err = p.communicate(timeout=20)
    assert p.returncode == 130 and 'the request for slice pod stays' in err
    (laptop.cloud / 'pod' / 'state').write_text('WAITING_FOR_RESOURCES WAITING_FOR_RESOURCES PROVISIONING ACTIVE')
    assert 'its request is WAITING_FOR_RESOURCES. bash launch.sh --create TYPE waits on' in laptop.run('--attach').err
    done = laptop.run('--create', 'v6e-8')
    assert done.returncode == 0 and 'asked for already' in done.err and 'ready: TPU=pod' in done.err


def test_keep_alive_deletes_nothing_when_its_own_network_fails(laptop):
    laptop = laptop(2)
    laptop.script(f'while not os.path.exists({str(laptop.cloud / "end")!r}): time.sleep(.1)')
    for _ in range(3):
        laptop.fault('error', 'Unable to reach the server')
    p = laptop.start('--keep-alive', 'v5e-16', '--spot', 'train_toy.py')
    laptop.until_all_run()
    os.killpg(p.pid, signal.SIGKILL)  # the laptop; the same command follows the run
    p = laptop.start('--keep-alive', 'v5e-16', '--spot', 'train_toy.py')
    log = laptop.checkout / 'out/keep-alive-pod-train_toy.log'
    wait_for(lambda: log.exists() and 'train_toy is alive' in log.read_text())
    (laptop.cloud / 'end').touch()
    out, err = p.communicate(timeout=30)
    assert [laptop.started(i) for i in range(2)] == [1, 1]
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
    ('PERMISSION_DENIED: This API method requires billing to be enabled', 'console.cloud.google.com/billing'),
    ('INVALID_ARGUMENT: Accelerator type v5e-3 not found', 'accelerator-types list'),
    ('Unable to reach the server', 'is this machine online? Then try again'),
    ('The required property [project] is not currently set', 'PROJECT=..., or'),
    ('Reauthentication failed', 'gcloud auth login'),
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

    def gcloud(env, *args):
        command = f'{env} NANO_VENV=$HOME/nano/.venv bash nano/checkouts/*/launch.sh train_toy.py {" ".join(args)}'
        return subprocess.run(['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'pod', '--zone=z', '--worker=all',
                               f'--command={command}'], env=laptop.env, text=True, capture_output=True, timeout=60)
    laptop.fault('ssh3', 'lost')  # when the run is over
    done = gcloud('NANO_ID=once', 'fail')  # of code 255 gcloud would think that the connection was lost
    assert done.returncode == 254 and 'worker 2 failed first, with exit code 255' in done.stdout
    assert 'this run has ended already, with exit code 255' in done.stdout
    assert [laptop.started(i) for i in range(4)] == [2] * 4
    laptop.fault('ssh3', 'lost')
    done = gcloud('NANO_JOIN_S=2')  # without NANO_ID: alone it does not start
    assert done.returncode == 2 and 'no answer from worker 0' in done.stdout and 'the run before' in done.stdout
    assert [laptop.started(i) for i in range(4)] == [3] * 4


def test_a_startup_script(laptop):
    """root's, with next to no environment, in /, without a terminal or even a stdin, at each boot."""
    laptop = laptop(2)
    laptop.script('assert os.getcwd() == "/"')
    assert laptop.run('train_toy.py').returncode == 1  # brings the checkout
    for boot in (1, 2):
        hosts = []
        for i in range(2):
            [checkout] = laptop.home(i).glob('nano/checkouts/*')
            env = dict(PATH=os.environ['PATH'], HOME=laptop.home(i), TPU_WORKER_ID=str(i), NANO_PORT='21999',
                       TPU_WORKER_HOSTNAMES='localhost,localhost', NANO_VENV=laptop.home(i) / 'nano/.venv')
            hosts.append(subprocess.Popen(['sh', '-c', 'exec bash "$0" train_toy.py <&-', checkout / 'launch.sh'],
                                          env=env, cwd='/', start_new_session=True, stdout=subprocess.PIPE, text=True))
        said = [p.communicate(timeout=30)[0] for p in hosts]
        assert [p.returncode for p in hosts] == [0, 0] and 'worker 1 done' in said[1], said
        assert [laptop.started(i) for i in range(2)] == [1 + boot] * 2


def test_two_runs_at_once_are_told_apart(laptop):
    laptop = laptop(4)
    (laptop.cloud / 'own ports').touch()
    laptop.script('print("I am", sys.argv[2], flush=True); time.sleep(60)')
    names = [f'run{os.getpid()}{letter}' for letter in 'ab']
    both = [laptop.start('train_toy.py', '--out', f'gs://bucket/{name}/') for name in names]
    laptop.until_all_run(2)
    if (laptop.home(3) / 'pip').exists():  # unless it is there
        [asked] = set((laptop.home(3) / 'pip').read_text().splitlines())
        assert re.fullmatch(r'-m pip install -q -c \S+/requirements.txt gcsfs==2026.10.1', asked)
    refused = laptop.run('train_toy.py', '--out', f'x/{names[0]}')
    assert refused.returncode == 2 and 'is alive on this host' in refused.out
    assert laptop.run('--logs', RUN=names[0]).returncode == 0  # not those of the refused one
    assert 'I am' in (laptop.checkout / f'out/logs/pod/{names[0]}/worker_3.txt').read_text()
    assert f'which (RUN=...): {names[1]}, {names[0]}' in laptop.run('--stop').out.replace(
        f'{names[0]}, {names[1]}', f'{names[1]}, {names[0]}')
    assert laptop.run('--stop', RUN=names[0]).returncode == 0
    assert both[0].wait(20) == 143 and both[1].poll() is None
    assert laptop.run('--status', RUN=names[1]).out.count('running, pid') == 4
    assert laptop.run('--stop').returncode == 0 and both[1].wait(20) == 143


def test_two_slices_at_once_from_one_laptop(laptop):
    laptop = laptop(2)
    assert laptop.run('--create', 'v5p-16', TPU='pod2').returncode == 0
    laptop.script('print("I am", sys.argv[1], flush=True)')
    both = [laptop.start('--keep-alive', 'v5p-16', 'train_toy.py', name, TPU=name) for name in ('pod', 'pod2')]
    for p, mine, other in zip(both, ('pod', 'pod2'), ('pod2', 'pod')):
        out, err = p.communicate(timeout=60)
        assert p.returncode == 0 and f'I am {mine}\n' in out and f'I am {other}\n' not in out, err
        assert 'is complete' in (laptop.checkout / f'out/keep-alive-{mine}-train_toy.log').read_text()
        assert (laptop.home(1, mine) / 'started').read_text() == 'x'
        done = laptop.run('--status', TPU=mine)
        assert done.out.count('\n') == 2 and done.out.count('ended with 0') == 2
        assert laptop.run('--logs', TPU=mine).returncode == 0
        assert f'I am {mine}\n' in (laptop.checkout / f'out/logs/{mine}/newest/worker_1.txt').read_text()


def test_data_in_a_bucket(laptop):
    """Each host copies them to its disk. What a broken fetch has brought stays; with other data nothing is started."""
    laptop = laptop(2)
    (laptop.checkout / 'gcsfs').mkdir()
    (laptop.checkout / 'gcsfs' / '__init__.py').write_text(GCSFS)
    for bucket, last in (('buckets', b'b'), ('odd', b'c')):
        folder = laptop.cloud / bucket / 'mine' / 'corpus'
        folder.mkdir(parents=True)
        shards = []
        for name, content in (('a.bin', b'a' * 1000), ('b.bin', last * 1000)):
            (folder / name).write_bytes(content)
            shards.append(dict(file=name, sha256=hashlib.sha256(content).hexdigest()))
        (folder / 'manifest.json').write_text(json.dumps(dict(shards=shards)))
    (laptop.home(1) / 'breaks').touch()
    command = 'train_toy.py', '--data', 'gs://mine/corpus'
    done = laptop.run(*command)
    assert done.returncode == 1 and 'worker 1 could not fetch the data, with exit code 1' in done.out
    assert 'b.bin: cannot be copied' in done.out and 'the network is gone' in done.out and not laptop.started(0)
    done = laptop.run(*command)
    assert done.returncode == 0 and 'all 2 hosts agree, data ' in done.out
    for i in range(2):
        [manifest] = laptop.home(i).glob('nano/data/*/manifest.json')
        assert {p.name: p.read_bytes()[:1] for p in manifest.parent.glob('?.*')} == {'a.bin': b'a', 'b.bin': b'b'}
        assert laptop.started(i) == 1
    assert (laptop.home(1) / 'reads').read_text().split().count('a.bin') == 1
    (laptop.home(1) / 'odd').touch()
    done = laptop.run(*command)
    assert done.returncode == 2 and 'nothing was started: the hosts differ in their data: worker ' in done.out
    assert laptop.started(0) == 1


def test_odd_names(laptop):
    """Of a run, of files in the checkout, of a slice."""
    laptop = laptop(1)
    for name in ('-n', 'a\nb', "it's", '--checkpoint=1'):
        (laptop.checkout / name).write_text('x')
    (laptop.checkout / 'link').symlink_to('/nowhere/at all')
    (laptop.checkout / 'to file').symlink_to('launch.sh')
    subprocess.run(['git', '-c', 'user.name=x', '-c', 'user.email=x@y', 'tag', '-am', 'x', 'v/1$é'],
                   cwd=laptop.checkout, check=True)
    done = laptop.run('train_toy.py', RUN='../-x y\'z$(id)*')
    assert done.returncode == 0, done.err
    [copy] = laptop.home(0).glob('nano/checkouts/*')
    assert all((copy / name).read_text() == 'x' for name in ('-n', 'a\nb', "it's", '--checkpoint=1'))
    assert os.readlink(copy / 'to file') == 'launch.sh'
    [folder] = laptop.home(0).glob('nano/runs/*')
    assert folder.name == '_-x_y_z__id__'
    assert laptop.run('--status', RUN='../-x y\'z$(id)*').out.count('ended with 0') == 1
    for name in ('-x', 'a b', 'A', '../pod', 'x' * 64, '$(id)'):
        done = laptop.run('--status', TPU=name)
        assert done.returncode == 2 and 'is no name' in done.err


def test_words_that_mean_nothing_are_refused(tmp_path):
    laptop = Laptop(tmp_path, 1)
    for verb in ('--delete', '--stop', '--attach', '--status', '--logs'):
        done = laptop.run(verb, 'mine')
        assert done.returncode == 2 and f"{verb} takes no 'mine': the slice is TPU=NAME, the run RUN=NAME" in done.err
    for args in (['v5e-16', '--spot', '--foo'], ['v5e-16', 'mine'], ['--spot', 'v5e-16', 'mine']):
        done = laptop.run('--create', *args)
        assert done.returncode == 2 and f"takes no '{args[-1]}'" in done.err
    for name, value in (('NANO_PORT', 'abc'), ('NANO_PORT', '99999'), ('NANO_JOIN_S', 'abc'), ('NANO_PORT', '08')):
        done = laptop.run('train_toy.py', **{name: value})
        assert done.returncode == 2 and f'{name}={value}: give a whole number from ' in done.err
    assert not (laptop.cloud / 'calls.jsonl').exists()


def test_what_needs_no_chips_runs_here(tmp_path):
    laptop = Laptop(tmp_path, 1)
    (laptop.checkout / 'data').mkdir()
    (laptop.checkout / 'data' / 'x.py').touch()
    for args in (['train_toy.py', '--plan', 'v5e-16'], ['train_toy.py', '--help'], ['data/x.py', 'y']):
        assert 'PYTHON=none does not fit' in laptop.run(*args, PYTHON='none').err  # it would set this machine up
    assert not (laptop.cloud / 'calls.jsonl').exists()


def test_a_checkout_that_cannot_be_packed(laptop):
    laptop = laptop(1)
    (tmp := laptop.cloud.parent / 'bin' / 'tar').write_text('#!/bin/sh\nexit 2\n')
    tmp.chmod(0o755)
    done = laptop.run('train_toy.py')
    assert done.returncode == 1 and 'could not be packed' in done.err
    assert not [c for c in laptop.calls() if c[3] == 'ssh']


def test_delete(laptop):
    laptop = laptop(1)
    assert laptop.run('--delete').returncode == 0 and not (laptop.cloud / 'pod').exists()
    assert any(c[2:4] == ['queued-resources', 'delete'] and '--force' in c for c in laptop.calls())


def test_shellcheck():
    subprocess.run([Path(sys.executable).parent / 'shellcheck', ROOT / 'launch' / 'slice.sh'], check=True)
