"""launch/host.py, launch/runs.py: the hosts of a slice, played by processes of this machine, each with its own HOME."""
import ast
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = '''
import os, sys, time
me = int(os.environ['TPU_WORKER_ID'])
open(os.environ['HOME'] + '/started', 'a').write('x')
exec(os.environ.get('DO', ''))
print('worker', me, 'done', *sys.argv[1:])
'''


def wait_for(what):
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(.05)


class Pod:
    """N hosts with one checkout each. Hosts may `do` different things: Python that the script runs."""

    def __init__(self, tmp, n):
        with socket.socket() as s:
            s.bind(('', 0))
            self.port = s.getsockname()[1]
        self.tmp, self.n, self.procs = tmp, n, {}
        for i in range(n):
            checkout = self.home(i) / 'checkout'
            shutil.copytree(ROOT / 'launch', checkout / 'launch', ignore=shutil.ignore_patterns('__pycache__'))
            (checkout / 'launch.sh').touch()
            (checkout / 'requirements.txt').write_text('pytest==1\n')
            (checkout / 'train_toy.py').write_text(SCRIPT)

    def home(self, i):
        return self.tmp / f'w{i}'

    def start(self, i, *args, do='', **env):
        home = self.home(i)
        env = {'PATH': os.environ['PATH'], 'HOME': str(home), 'TPU_WORKER_ID': str(i), 'NANO_PORT': str(self.port),
               'TPU_WORKER_HOSTNAMES': ','.join(['localhost'] * self.n), 'NANO_JOIN_S': '20', 'NANO_GRACE_S': '3',
               'NANO_TPU_LOCK': str(home / 'lock'), 'NANO_TPU_DEVICES': str(home / 'accel*'), 'DO': do,
               'PYTHONPATH': str(home / 'checkout'), **env}
        command = [sys.executable, '-P', '-m', 'launch.host', 'checkout/train_toy.py', *args]
        self.procs[i] = subprocess.Popen(command, env=env, cwd=home, text=True, stdin=subprocess.DEVNULL,
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return self.procs[i]

    def ask(self, i, *args):
        home = self.home(i)
        env = {'PATH': os.environ['PATH'], 'HOME': str(home), 'NANO_TPU_LOCK': str(home / 'lock'),
               'NANO_TPU_DEVICES': str(home / 'accel*')}
        with open(ROOT / 'launch' / 'runs.py') as program:  # as slice.sh sends it
            return subprocess.run([sys.executable, '-', *args], stdin=program, env=env, cwd=home, text=True,
                                  capture_output=True, timeout=30).stdout

    def ends(self, timeout=30):
        said = {i: p.communicate(timeout=timeout)[0] for i, p in sorted(self.procs.items())}
        print(*(f'--- {i}: {self.procs[i].returncode}\n{text}' for i, text in said.items()), sep='\n')
        return [self.procs[i].returncode for i in sorted(self.procs)], said

    def started(self, i):
        path = self.home(i) / 'started'
        return len(path.read_text()) if path.exists() else 0

    def record(self, i):
        [path] = self.home(i).glob('nano/runs/*/*/run.json')
        return json.loads(path.read_text())


@pytest.fixture
def pod(tmp_path):
    made = []

    def make(n):
        made.append(Pod(tmp_path, n))
        return made[-1]
    yield make
    for p in made[-1].procs.values() if made else ():
        p.kill() if p.poll() is None else None


@pytest.mark.parametrize('n', [4, 16])
def test_all_start_together_once_and_end_with_0(pod, n):
    pod = pod(n)
    for i in reversed(range(n)):  # worker 0 last: the others wait for it
        pod.start(i, '--out', 'gs://b/x y', 'a\n$b"')
    codes, said = pod.ends()
    assert codes == [0] * n and [pod.started(i) for i in range(n)] == [1] * n
    for i in range(n):
        assert f'worker {i} done --out gs://b/x y a\n$b"' in said[i]
        assert re.search(fr'host {i} of {n}: .*, 0 chips, Python 3.*, revision unnamed, code [0-9a-f]{{12}}', said[0])
    record = pod.record(n - 1)
    assert record['name'] == 'x_y' and record['code'] == 0 and record['command'][0] == 'train_toy.py'


def test_the_first_to_fail_is_named_and_ends_the_others(pod):
    pod = pod(4)
    for i in range(4):
        pod.start(i, do='time.sleep(60)' if i != 2 else 'time.sleep(.5); raise SystemError("boom")')
    t = time.monotonic()
    codes, said = pod.ends()
    assert codes == [1] * 4 and time.monotonic() - t < 15
    assert 'worker 2 failed first, with exit code 1' in said[0] and 'worker 2 failed first' in said[1]
    after = said[0].split('failed first')[1]
    assert after.index('Traceback') < after.index('SystemError: boom')  # its traceback, in worker 0's log
    for i in range(4):  # nothing is left behind
        assert not Path(f'/proc/{pod.record(i)["script_pid"]}').exists()


def test_all_end_within_a_minute():
    """With the times that hold where these tests set no shorter ones: of a host that is silent, and of a script that
    ignores SIGTERM."""
    from launch import host, runs
    assert 0 < host.SILENCE_S + runs.GRACE_S + 5 < 60


def test_a_script_that_ignores_sigterm_is_killed_with_its_children(pod):
    pod = pod(2)
    pod.start(0, do='import signal, subprocess; signal.signal(15, signal.SIG_IGN); '
              'subprocess.Popen(["sleep", "61"]); time.sleep(60)', NANO_GRACE_S='1')
    pod.start(1, do='time.sleep(1); sys.exit(7)')
    assert pod.ends()[0] == [7, 7]
    group = pod.record(0)['script_pid']
    stats = [p.read_text().rpartition(')')[2].split() for p in Path('/proc').glob('[0-9]*/stat')]
    assert not [s for s in stats if s[2] == str(group) and s[0] != 'Z']


@pytest.mark.parametrize('what', ['revision', 'versions', 'data', 'command'])
def test_hosts_that_differ_refuse(pod, what):
    pod = pod(4)
    for i in range(4):
        data = pod.home(i) / 'shards'
        data.mkdir()
        odd = i == 3
        (data / 'manifest.json').write_text(json.dumps({'shards': [what == 'data' and odd], 'source': i}))
        if odd and what == 'revision':
            (pod.home(i) / 'checkout' / 'train_toy.py').write_text(SCRIPT + '#')
        if odd and what == 'versions':
            info = pod.home(i) / 'checkout' / 'pytest-0.1.dist-info' / 'METADATA'
            info.parent.mkdir()
            info.write_text('Metadata-Version: 2.1\nName: pytest\nVersion: 0.1\n')
        pod.start(i, '--data', 'shards', *['x'] * (odd and what == 'command'))
    codes, said = pod.ends()
    assert codes == [2] * 4 and not any(pod.started(i) for i in range(4))
    assert all(f'nothing was started: the hosts differ in their {what}: worker 3: ' in s for s in said.values())
    assert 'worker 0, 1, 2: ' in said[3]


def test_who_does_not_come_is_named(pod):
    pod = pod(4)
    for i in (0, 1):
        pod.start(i, NANO_JOIN_S='2')
    codes, said = pod.ends()
    assert codes == [2, 2] and not pod.started(0)
    assert 'worker 2, 3 of 4 did not come within 2 s. Likely causes: ' in said[0] and 'worker 2, 3' in said[1]


def test_without_worker_0_the_others_give_up(pod):
    pod = pod(2)
    pod.start(1, NANO_JOIN_S='1')
    codes, said = pod.ends()
    assert codes == [2] and f'no answer from worker 0 (localhost:{pod.port}) within 1 s' in said[1]


@pytest.mark.parametrize('gone, silent', [(3, False), (0, False), (2, True)])
def test_a_host_that_dies_ends_the_others(pod, gone, silent):
    """Killed, as by a preemption; silent: the machine is gone and no packet says so."""
    pod = pod(4)
    for i in range(4):
        pod.start(i, do='time.sleep(60)', NANO_SILENCE_S='2')
    wait_for(lambda: all(pod.started(i) for i in range(4)))
    pod.procs[gone].send_signal(signal.SIGSTOP if silent else signal.SIGKILL)
    others = [i for i in range(4) if i != gone]
    for i in others:
        assert pod.procs[i].wait(timeout=20) == 75
    log = next(pod.home(others[0]).glob('nano/runs/*/*/log.txt')).read_text()
    assert f'worker {gone} is gone: preempted' in log
    pod.procs[gone].kill()
    wait_for(lambda: not Path(f'/proc/{pod.record(gone)["script_pid"]}/exe').exists())  # nor its own script


def test_stop_ends_all_in_order(pod):
    """One SIGTERM to each script, however many are asked; a script that then saves is waited for."""
    pod = pod(4)
    do = 'import signal; n = []; signal.signal(15, lambda *a: n.append(1))\nwhile not n: time.sleep(.05)\n'
    for i in range(4):
        pod.start(i, do=do + f'time.sleep({.3 + .3 * i}); print("signals", len(n)); sys.exit(143)')
    wait_for(lambda: all(pod.started(i) for i in range(4)))
    time.sleep(.5)
    assert 'alive' not in pod.ask(1, 'status') and 'running, pid' in pod.ask(1, 'status')
    asked = [threading.Thread(target=pod.ask, args=(i, 'stop')) for i in (1, 3)]
    [t.start() for t in asked]
    codes, said = pod.ends()
    assert codes == [143] * 4 and all('signals 1\n' in s for s in said.values())
    assert 'ended with 143' in pod.ask(1, 'status')


def test_stop_removes_a_stale_lock_and_leaves_what_is_foreign(pod):
    pod = pod(1)
    lock = pod.home(0) / 'lock'
    lock.touch()
    foreign = subprocess.Popen([sys.executable, '-c', f'f = open({str(lock)!r}); input()'], stdin=subprocess.PIPE)
    wait_for(lambda: f'pid {foreign.pid} ' in pod.ask(0, 'status'))
    assert f'left alone, not of this run: TPU in use by pid {foreign.pid} ' in pod.ask(0, 'stop')
    assert lock.exists() and foreign.poll() is None
    foreign.communicate(b'\n')
    assert 'stale lock' in pod.ask(0, 'status')
    said = pod.ask(0, 'stop')
    assert f'removed {lock}, which nobody held' in said and said.endswith('@ok 0\n') and not lock.exists()


def test_a_held_tpu_is_reported_with_its_pid(pod):
    pod = pod(2)
    accel = pod.home(1) / 'accel0'
    accel.touch()
    foreign = subprocess.Popen([sys.executable, '-c', f'f = open({str(accel)!r}); input()'], stdin=subprocess.PIPE)
    wait_for(lambda: f'pid {foreign.pid} ' in pod.ask(1, 'status'))
    for i in range(2):
        pod.start(i)
    codes, said = pod.ends()
    assert codes == [2, 2] and f'the TPU is in use: worker 1: pid {foreign.pid} (' in said[0] and not pod.started(1)
    assert foreign.poll() is None
    foreign.communicate(b'\n')


def test_a_repeated_command_is_followed_not_started(pod):
    """gcloud repeats a command whose connection was lost."""
    pod = pod(2)
    for i in range(2):
        pod.start(i, do='time.sleep(3)')
    wait_for(lambda: all(pod.started(i) for i in range(2)))
    first = dict(pod.procs)
    first[1].stdout.close()  # the connection: the run goes on
    again = pod.start(1, do='time.sleep(3)')
    said, _ = again.communicate(timeout=20)
    assert again.returncode == 0 and 'followed, not started again' in said and 'worker 1 done' in said
    assert [p.wait(10) for p in first.values()] == [0, 0] and pod.started(1) == 1


def test_a_command_repeated_at_once(pod):
    pod = pod(2)
    twice = [pod.start(i, do='time.sleep(.5)') for i in (1, 1, 1, 0)]
    said = [p.communicate(timeout=30)[0] for p in twice]
    assert [p.returncode for p in twice] == [0] * 4 and pod.started(1) == 1, said
    assert all('worker 1 done' in s for s in said[:3]) and ''.join(said).count('followed, not started') == 2


def test_a_repeat_after_an_end_that_nobody_heard(pod):
    """The session was lost, and the run ended before gcloud repeated its command. A person who has seen the end means
    to start anew with the same command."""
    pod = pod(2)

    def both(*args, **env):
        for i in range(2):
            pod.start(i, *args, do='time.sleep(.3); sys.exit(5)', **env)
        return pod.ends()
    for i in range(2):
        pod.start(i, do='time.sleep(.3); sys.exit(5)')
    for p in pod.procs.values():
        p.stdout.close()
    assert [p.wait(20) for p in pod.procs.values()] == [5, 5] and pod.started(1) == 1
    codes, said = both()
    assert codes == [5, 5] and [pod.started(i) for i in range(2)] == [1, 1]
    assert 'has ended already, with exit code 5' in said[1] and 'failed first, with exit code 5' in said[1]
    for times in (2, 3):
        assert both()[0] == [5, 5] and [pod.started(i) for i in range(2)] == [times] * 2
    for _ in range(2):  # with NANO_ID it is known
        assert both(NANO_ID='a/b')[0] == [5, 5] and [pod.started(i) for i in range(2)] == [4, 4]


def test_two_starts_at_once(pod):
    """From two laptops: each has some of the workers."""
    pod = pod(4)
    for i in range(4):
        pod.start(i, NANO_ID=f'laptop{i % 2}')
    codes, said = pod.ends()
    assert codes == [2] * 4 and not any(pod.started(i) for i in range(4))
    assert 'the hosts differ in their id' in said[0] and 'started twice at once' in said[3]


def test_the_only_host(pod):
    """Without a terminal it is supervised as well; two runs of other names may be alive, and status tells of both."""
    pod = pod(1)
    runs = [pod.start(0, do=f'print("step {n} "); time.sleep(60)', NANO_RUN=f'run{n}') for n in (1, 2)]
    wait_for(lambda: pod.ask(0, 'status').count('running, pid') == 2)
    wait_for(lambda: all(f'run{n} ' in pod.ask(0, 'status') and f'step {n},' in pod.ask(0, 'status') for n in (1, 2)))
    assert 'say which (RUN=...): run1, run2\n@ok 2' in pod.ask(0, 'stop')
    [path] = pod.home(0).glob('nano/runs/run1/*/run.json')
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | dict(boot='an earlier one')))  # the numbers are of other processes now
    assert 'gone (rebooted or killed)' in pod.ask(0, 'status', 'run1')
    pod.ask(0, 'stop', 'run1')
    time.sleep(.2)
    assert runs[0].poll() is None
    path.write_text(json.dumps(record))
    for n in (1, 2):
        assert pod.ask(0, 'stop', f'run{n}').endswith('@ok 0\n') and runs[n - 1].wait(10) == 143
    assert 'no run none' in pod.ask(0, 'follow', 'none') and pod.ask(0, 'follow', 'run1').endswith('@end 143\n')


def test_an_endless_line_is_followed(pod):
    """A bar of some library, which prints no end of line."""
    pod = pod(1)
    p = pod.start(0, do='print("x" * 100_000, end="\\r", flush=True); time.sleep(60)',
                  NANO_SILENCE_S='1')
    wait_for(lambda: pod.started(0))
    home = pod.home(0)
    with open(ROOT / 'launch' / 'runs.py') as program:
        f = subprocess.Popen([sys.executable, '-', 'follow', 'train_toy'], stdin=program, env={'HOME': str(home)},
                             stdout=subprocess.PIPE, text=True)
    while not (line := f.stdout.readline()).startswith('|x'):
        assert line
    assert len(line) == 1 + 65536 + 1 and p.poll() is None
    p.terminate()
    assert f.stdout.readline().rstrip() == '|' + 'x' * (100_000 - 65536)
    assert f.communicate(timeout=20)[0].endswith('@end 143\n')


def test_what_is_sent_to_a_worker_runs_there():
    """On its own Python, which is 3.8 on the oldest images, without any package."""
    tree = ast.parse((ROOT / 'launch' / 'runs.py').read_text(), feature_version=(3, 8))
    imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {a.name for n in imports for a in n.names} | {getattr(n, 'module', None) for n in imports} - {None}
    assert {'json', 'pathlib'} <= names and names - {'Path'} <= set(sys.stdlib_module_names)


def test_nobody_reads_and_the_disk_is_full(pod):
    """A stalled ssh session, or a log that cannot be written, neither ends nor delays a run."""
    pod = pod(3)
    for i in range(3):
        if i == 2:
            folder = pod.home(2) / 'nano' / 'runs' / 'x' / 'once'
            folder.mkdir(parents=True)
            (folder / 'log.txt').symlink_to('/dev/full')
        do = 'print("x" * 1_000_000, flush=True)' if i == 1 else 'time.sleep(4)'
        pod.start(i, do=f'{do}\ntry: print("y")\nexcept OSError: pass\nsys.stdout = None', NANO_ID='once', NANO_RUN='x',
                  NANO_SILENCE_S='2')
    assert [pod.procs[i].wait(20) for i in (0, 2)] == [0, 0] and [pod.started(i) for i in range(3)] == [1] * 3
    assert 'x' * 1000 in pod.procs[1].communicate(timeout=20)[0]
    assert pod.procs[1].returncode == 0 and pod.record(1)['unheard']


def test_strangers_at_the_port(pod):
    """What is no hello ends nothing; a host of another run is told so."""
    pod = pod(2)
    pod.start(0)

    def knock(line):
        with socket.create_connection(('localhost', pod.port), 5) as s:
            s.sendall(line + b'\n')
            return s.makefile().readline()
    wait_for(lambda: 'host 0 of 2' in ''.join(p.read_text() for p in pod.home(0).glob('nano/runs/*/*/log.txt')))
    for line in (b'GET / HTTP/1.1', b'[1]', b'{"kind": "hello", "index": [1]}', b'{"kind": "end"}', b'\xff',
                 b'[' * 200_000, b'{"kind": "hello", "index": 1, "run": "train_toy"}'):
        assert knock(line) == ''
    assert 'the run there is train_toy' in knock(b'{"kind": "hello", "index": 1, "run": "other"}')
    pod.start(1)
    assert pod.ends()[0] == [0, 0]


def test_a_lock_of_another_user_is_not_taken_for_stale(tmp_path, monkeypatch):
    from launch import runs
    (tmp_path / 'lock').touch()
    monkeypatch.setattr(runs, 'LOCK', str(tmp_path / 'lock'))
    assert runs.device() == (f'TPU free, stale lock {tmp_path}/lock', True)
    monkeypatch.setattr(os, 'getuid', lambda: 54321)
    text, stale = runs.device()
    assert f'sudo fuser -v {tmp_path}/lock' in text and not stale


@pytest.mark.parametrize('name, value', [('NANO_PORT', 'abc'), ('NANO_PORT', '99999'), ('NANO_JOIN_S', 'abc')])
def test_numbers_that_are_none(pod, name, value):
    pod = pod(1)
    pod.start(0, **{name: value})
    codes, said = pod.ends()
    assert codes == [1] and said[0].startswith(f'error: {name}={value}: give a ')


def test_another_run_of_the_same_name_is_refused(pod):
    pod = pod(2)
    for i in range(2):
        pod.start(i, do='time.sleep(3)')
    wait_for(lambda: all(pod.started(i) for i in range(2)))
    first = dict(pod.procs)
    pod.start(1, 'other')
    said = pod.procs[1].communicate(timeout=20)[0]
    assert pod.procs[1].returncode == 2 and f'is alive on this host (pid {first[1].pid}, train_toy.py)' in said
    assert first[0].wait(10) == 0


def test_a_start_after_a_refused_one(pod):
    """Which leaves a record too; older ones say only how the run ended."""
    pod = pod(2)
    first = [pod.start(i, do='time.sleep(60)') for i in range(2)]
    wait_for(lambda: all(pod.started(i) for i in range(2)))
    for i in range(2):
        (pod.home(i) / 'nano/runs/train_toy/no').mkdir()
        assert pod.start(i, 'other', NANO_ID='no', NANO_DETACHED='yes').wait(20) == 2
        path = pod.home(i) / 'nano/runs/train_toy/no/run.json'
        record = json.loads(path.read_text())
        assert record['code'] == 2 and record['ended'] and record['unheard'] is False
        path.write_text(json.dumps({k: v for k, v in record.items() if k not in ('ended', 'unheard')}))
    pod.ask(0, 'stop')
    assert [p.wait(20) for p in first] == [143, 143]
    for i in range(2):
        pod.start(i)
    assert pod.ends()[0] == [0, 0]


def test_a_supervisor_that_fails_says_so_in_the_log(pod):
    pod = pod(1)
    with open(pod.home(0) / 'checkout/launch/host.py') as f:
        text = f.read()
    (pod.home(0) / 'checkout/launch/host.py').write_text(text.replace('    def watch_asked(self):\n',
                                                                      '    def watch_asked(self):\n        1 / 0\n'))
    pod.start(0)
    codes, said = pod.ends()
    assert codes == [1] and 'supervisor has failed' in said[0] and 'ZeroDivisionError' in said[0]
    assert 'ended with 1' in pod.ask(0, 'status') and 'ZeroDivisionError' in pod.ask(0, 'log')


def test_exit_code_255_is_not_taken_for_a_lost_connection(pod):
    pod = pod(2)
    for i in range(2):
        pod.start(i, do='sys.exit(255)' if i else 'time.sleep(30)')
    codes, said = pod.ends()
    assert codes == [254, 254] and 'with exit code 255' in said[0]


def test_the_metadata_server_says_which_worker_this_is(pod, monkeypatch):
    answers = {'worker-network-endpoints': 'a:1:10.0.0.2,b:2:10.0.0.3', 'agent-worker-number': '1'}

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers['Metadata-Flavor'] == 'Google'
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers[self.path.removeprefix('/computeMetadata/v1/instance/attributes/')].encode())

        def log_message(self, *_):
            pass

    from launch import facts, runs
    server = http.server.HTTPServer(('localhost', 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv('GCE_METADATA_HOST', f'localhost:{server.server_port}')
    for name in ('TPU_WORKER_ID', 'TPU_WORKER_HOSTNAMES', 'CLOUD_TPU_TASK_ID'):
        monkeypatch.delenv(name, raising=False)
    assert facts.place() == (0, ['localhost'])  # no chips: not even asked
    monkeypatch.setattr(runs, 'chips', lambda: 4)
    assert facts.place() == (1, ['10.0.0.2', '10.0.0.3'])
    answers['worker-network-endpoints'] = 'a:1:10.0.0.2'
    assert facts.place()[1] == ['10.0.0.2']
    server.shutdown()
