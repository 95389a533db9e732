"""nano/track.py: the record of a run, what is printed, and that nothing about them stops a training."""
import fcntl
import json
import os
import pty
import random
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from nano.track import Tracker

ROOT = Path(__file__).resolve().parent.parent


def records(out):
    return [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]


def run(code, out, **env):
    """Runs code in its own process, with no terminal, no input and no home: as on a worker."""
    head = 'import sys\nfrom nano.track import Tracker\nout = sys.argv[1]\n'
    return subprocess.run([sys.executable, '-c', head + code, str(out)], cwd=ROOT, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=60,
                          env={'HOME': str(out), 'PATH': os.environ['PATH'], 'PYTHONPATH': str(ROOT), **env})


def test_metrics_are_json_lines_flushed_at_once(tmp_path):
    tracker = Tracker(tmp_path / 'new' / 'run', 10)
    tracker.log(1, loss=2.5, lr=np.float32(0.5), tokens=np.int64(7), bad=float('nan'), worse=np.float32('inf'),
                name='a\nb', path=tmp_path)
    assert records(tmp_path / 'new' / 'run') == [
        {'step': 1, 'loss': 2.5, 'lr': 0.5, 'tokens': 7, 'bad': None, 'worse': None, 'name': 'a\nb',
         'path': str(tmp_path)}]
    tracker.log(2, val_loss=1.0)
    assert len(records(tmp_path / 'new' / 'run')) == 2
    tracker.close()
    tracker.close()


def test_a_resumed_run_keeps_the_history_of_the_run_that_is(tmp_path, seed):
    """Stopped anywhere, also within a line, and resumed from an older step: each step stands once, in order."""
    rng = random.Random(seed)
    path = tmp_path / 'metrics.jsonl'
    done = 0
    for _ in range(20):
        tracker = Tracker(tmp_path, 100, start_step=done)
        assert [r['step'] for r in records(tmp_path)] == list(range(1, done + 1)) if path.exists() else done == 0
        reached = done + rng.randrange(0, 8)
        for step in range(done + 1, reached + 1):
            tracker.log(step, loss=1.0)
        tracker.close()
        if path.exists() and rng.random() < 0.5:  # a kill in the middle of the last write
            data = path.read_bytes()
            path.write_bytes(data + b'{"step": ' + str(reached).encode())
        done = rng.randrange(done, reached + 1)  # the newest checkpoint
    assert not list(tmp_path.glob('*.tmp'))


def test_lines_up_to_the_start_stay_byte_for_byte(tmp_path):
    kept = b'{"step": 0, "val_loss": 4.0}\n{"note": "no step"}\n{"step":2,"loss":null}\n'
    (tmp_path / 'metrics.jsonl').write_bytes(kept + b'{"step": 3}\n[1]\nnot json\n{"step": "x"}\n\xff\n')
    Tracker(tmp_path, 10, start_step=2).close()
    assert (tmp_path / 'metrics.jsonl').read_bytes() == kept


def test_other_hosts_only_have_a_log(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, 'wandb', raising=False)  # timm's tests bring it
    (tmp_path / 'metrics.jsonl').write_text('{"step": 9}\n')
    tracker = Tracker(tmp_path, 10, start_step=1, main=False, wandb_project='p', host=3)
    tracker.log(2, loss=1.0)
    tracker.progress(2, 1.0, 10.0)
    tracker.print('host', 3)
    tracker.close()
    assert capsys.readouterr() == ('', '')
    assert (tmp_path / 'metrics.jsonl').read_text() == '{"step": 9}\n'  # it is host 0's
    assert sorted(p.name for p in tmp_path.iterdir()) == ['log_3.txt', 'metrics.jsonl']
    assert (tmp_path / 'log_3.txt').read_text().endswith(' host 3\n')
    assert 'wandb' not in sys.modules


def test_without_a_terminal_plain_lines_now_and_then(tmp_path):
    done = run('t = Tracker(out, 1000)\nfor i in range(1, 1001): t.progress(i, 2.0 / i, 123456.0)\n'
               't.print("done", 1)\nt.close()\n'
               'print(sorted(m for m in sys.modules if m in ("tqdm", "wandb", "torch")))', tmp_path)
    assert done.returncode == 0 and done.stderr == ''
    assert done.stdout.splitlines() == ['step 1/1000  loss 2.0000  123k tokens/s  ? left',
                                        'step 1000/1000  loss 0.0020  123k tokens/s  0:00 left', 'done 1', '[]']
    log = (tmp_path / 'log.txt').read_text().splitlines()
    assert [line[20:] for line in log] == done.stdout.splitlines()[:3]
    assert all(time.strptime(line[:19], '%Y-%m-%d %H:%M:%S') for line in log)


def test_time_left_leaves_the_compile_out(tmp_path, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, 'monotonic', lambda: clock[0])
    tracker = Tracker(tmp_path, 4000, start_step=100)
    clock[0] = 600.0  # ten minutes of compiling
    for step in range(101, 122):
        tracker.progress(step, float('nan'), 5e6)
        clock[0] += 1.0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ['101/4000', '111/4000', '121/4000']
    assert lines[1] == 'step 111/4000  loss nan  5M tokens/s  1:04:49 left'  # 3889 steps of one second


@pytest.mark.parametrize('columns', [0, 110])
def test_on_a_terminal_a_bar(tmp_path, columns):
    """On a real terminal: one bar with loss, rate and time left; printed lines stand whole above it."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
    code = ('import time\nfrom nano.track import Tracker\nt = Tracker(%r, 50)\n'
            'for i in range(1, 51): t.progress(i, 3.25, 1234.0); time.sleep(0.02)\n'
            't.print("a line")\nt.close()\n' % str(tmp_path))
    child = subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=secondary,
                             stderr=secondary, env={**os.environ, 'TERM': 'xterm'})
    os.close(secondary)
    text = b''
    while True:
        try:
            got = os.read(primary, 4096)
        except OSError:  # its end is closed
            break
        if not got:
            break
        text += got
    os.close(primary)
    assert child.wait() == 0
    text = text.decode()
    assert '50/50' in text and 'loss 3.2500, 1.23k tokens/s' in text and '\ra line\r\n' in text.replace('\x1b[A', '')
    assert 'step 1/50' not in text  # no plain lines beside the bar,
    assert 'step 50/50' in (tmp_path / 'log.txt').read_text()  # which the log file has


def full_disk(tmp_path, code):
    """Runs code where files under `out` cannot grow beyond 4 KB, as on a full disk."""
    return run(f'import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
               f'resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n{code}', tmp_path)


def test_a_full_disk_is_reported_once_and_training_goes_on(tmp_path):
    done = full_disk(tmp_path, 't = Tracker(out, 500)\n'
                               'for i in range(500): t.log(i, loss=1.0); t.print("step", i)\nt.close()\n'
                               'resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))\n'
                               't.log(500, loss=2.0)\nprint("trained")')
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith('WARNING')]
    assert len(warnings) == 2 and 'log.txt cannot be written' in warnings[0] and 'metrics.jsonl' in warnings[1]
    assert done.stdout.endswith('step 499\ntrained\n')
    got = records(tmp_path)  # whole lines only, also the one after there was room again
    assert [r['step'] for r in got[:-1]] == list(range(len(got) - 1)) and got[-1] == {'step': 500, 'loss': 2.0}


def test_a_closed_output_stops_nothing(tmp_path):
    code = ('import sys\nfrom nano.track import Tracker\nt = Tracker(sys.argv[1], 10)\n'
            'for i in range(9): t.print("x" * 9999)\nt.log(9)')
    child = subprocess.Popen([sys.executable, '-c', code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL)
    child.stdout.close()
    child.wait()
    assert records(tmp_path) == [{'step': 9}] and len((tmp_path / 'log.txt').read_text()) > 9 * 9999


def test_no_file_stays_open_and_no_thread(tmp_path):
    def left():
        return sorted(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))
    before = left()
    for i in range(50):
        tracker = Tracker(tmp_path / str(i), 10)
        tracker.log(1, loss=1.0)
        tracker.progress(1, 1.0, 1.0)
        tracker.print('x')
        assert left() == before
        tracker.close()


def test_wandb_without_a_key_stays_offline_and_asks_nothing(tmp_path):
    done = run('t = Tracker(out + "/run", 3, config={"lr": 0.1}, wandb_project="p")\n'
               't.log(1, loss=float("nan")); t.log(2, loss=2.0)\nt.close()', tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f'wandb: no API key (WANDB_API_KEY), so the run stays offline in {tmp_path}/run/wandb\n'
    assert list((tmp_path / 'run' / 'wandb').glob('offline-run-*')) and len(records(tmp_path / 'run')) == 2
    name = (tmp_path / 'run' / 'wandb_id.txt').read_text()
    run('Tracker(out + "/run", 3, start_step=2, wandb_project="p").close()', tmp_path)
    assert (tmp_path / 'run' / 'wandb_id.txt').read_text() == name  # a resumed run is the same run
    assert {p.name.split('-')[-1] for p in (tmp_path / 'run' / 'wandb').glob('offline-run-*')} == {name}


@pytest.mark.parametrize('env', [{'WANDB_API_KEY': 'too short'}, {'WANDB_MODE': 'nonsense'}])
def test_a_wandb_that_fails_does_not_stop_the_run(tmp_path, env):
    done = run('t = Tracker(out, 3, wandb_project="p")\nt.log(1, loss=2.0)\nt.close()\nprint("trained")', tmp_path,
               **env)
    assert done.returncode == 0 and 'goes on without it' in done.stdout and done.stdout.endswith('trained\n')
    assert records(tmp_path) == [{'step': 1, 'loss': 2.0}]


def test_the_line_of_an_evaluation_that_is_made_again_is_dropped(tmp_path):
    """A kill can come between the line and the note that it is no longer owed."""
    for owed, left in ((False, [1, 2, 2]), (True, [1, 2])):
        lines = [dict(step=1, loss=1.0), dict(step=2, loss=1.0), dict(step=2, val_loss=1.0), dict(step=3, loss=1.0)]
        (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(x) + '\n' for x in lines))
        Tracker(tmp_path, 9, 2, owed=owed)
        assert [json.loads(x)['step'] for x in (tmp_path / 'metrics.jsonl').read_text().splitlines()] == left
