"""The runs of this host: what is recorded of them, and what may be asked of them from afar. Only the standard library,
in one file, so that slice.sh can send it to a worker through stdin, whatever is installed there:

    python3 - status|stop|log [NAME] <launch/runs.py
    python3 - follow [NAME [ID [SKIP]]] <launch/runs.py       the log from line SKIP on, until the run ends

A run's folder is ~/nano/runs/NAME/ID, outside of the checkout: run.json (who, what, process ids, exit code), log.txt.

What came through a connection counts only with a last line '@ok CODE': a lost one can look like an empty answer. So
each line of text begins with '|', and only what is said to slice.sh with '@': a script may print what it likes. On a
terminal (python3 launch/runs.py status, on a worker) there are neither.
"""
import contextlib
import glob
import json
import os
import pwd
import re
import signal
import sys
import time
from pathlib import Path

GRACE_S = float(os.environ.get('NANO_GRACE_S', 20))  # from SIGTERM to SIGKILL when another host has failed
STOP_S = float(os.environ.get('NANO_STOP_S', 660))  # the same when a user stops it: a checkpoint takes minutes
LOST = 75  # exit code of a run that lost a host; EX_TEMPFAIL: trying again can help
LOCK = os.environ.get('NANO_TPU_LOCK', '/tmp/libtpu_lockfile')  # libtpu leaves it when it is killed (jax-ml/jax#10192)
TAG = b'' if os.isatty(1) else b'|'
DEVICES = os.environ.get('NANO_TPU_DEVICES', '/dev/accel*:/dev/vfio/[0-9]*').split(':')


def home():
    return Path.home() / 'nano' / 'runs'


# ---- Processes, the device ----

def ticks(pid):
    """When process `pid` started, in ticks since the boot; None without one. With the boot it makes a pid unique."""
    try:
        fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
        return None if fields[0] in 'ZX' else int(fields[19])
    except (OSError, IndexError):
        return None


def boot():
    """No clock: those of a machine that has just started jump."""
    return Path('/proc/sys/kernel/random/boot_id').read_text().strip()


def one_line(text):
    return re.sub(r'[\x00-\x1f\x7f]+', ' ', text).strip()


def command_of(pid):
    with contextlib.suppress(OSError):
        return one_line(Path(f'/proc/{pid}/cmdline').read_bytes().decode(errors='replace'))[:120]
    return '?'


def kill_group(pgid, signum):
    """Returns whether the group has members (zombies aside)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signum)
    for stat in glob.glob('/proc/[0-9]*/stat'):
        with contextlib.suppress(OSError):
            fields = Path(stat).read_text().rpartition(')')[2].split()
            if int(fields[2]) == pgid and fields[0] not in 'ZX':
                return True
    return False


def holders():
    """[(pid, command)] of the processes that have a TPU or its lock open; of those that this user may see."""
    names, found = {LOCK, *(name for pattern in DEVICES for name in glob.glob(pattern))}, {}
    for link in glob.glob('/proc/[0-9]*/fd/*'):
        with contextlib.suppress(OSError):
            if os.readlink(link) in names:
                found[pid] = command_of(pid := int(link.split('/')[2]))
    return sorted(found.items())


def device():
    """(what to say of the TPU, whether its lock is stale: nobody holds it)."""
    try:
        owner = os.stat(LOCK).st_uid
    except OSError:
        owner = None
    if found := holders():
        return 'TPU in use by ' + ', '.join(f'pid {pid} ({command})' for pid, command in found), False
    if owner is not None and os.getuid() not in (0, owner):  # whose open files only root may see
        with contextlib.suppress(KeyError):
            owner = pwd.getpwuid(owner).pw_name
        return f'TPU perhaps in use by {owner}, who has {LOCK}: sudo fuser -v {LOCK}', False
    if owner is not None:
        return f'TPU free, stale lock {LOCK}', True
    return f'TPU free ({chips()} chips)' if chips() else 'no TPU', False


def chips():
    return sum(len(glob.glob(pattern)) for pattern in DEVICES)


# ---- Records and logs ----

def records(name=''):
    """Those of all runs of this name, or of all: first those whose supervisor is alive (`alive`), each kind newest
    first. A start that was refused is newer than the run that is alive."""
    found = []
    for path in glob.glob(f'{glob.escape(str(home()))}/{glob.escape(name) or "*"}/*/run.json'):
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads(Path(path).read_text())
            record['alive'] = 'code' not in record and is_ours(record, 'pid', 'ticks')
            record['folder'] = os.path.dirname(path)
            found.append(record)
    return sorted(found, key=lambda r: (not r['alive'], -r['started']))


def is_ours(record, pid, began):
    """Whether the process of a record is there, and not another one that has got its number."""
    return record['boot'] == boot() and record.get(pid) and ticks(record[pid]) == record[began]


def newest(name='', run_id=''):
    return next((r for r in records(name) if run_id in ('', r['id'])), None)


def tail_of(log, lines=20):
    """The last traceback of a log, if there is one near its end, and its last lines."""
    try:
        with open(log, 'rb') as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - 65536))
            text = f.read().decode(errors='replace').splitlines()
    except OSError:
        return ''
    starts = [i for i, line in enumerate(text) if line.startswith('Traceback (most recent call last)')]
    first = min(starts[-1], len(text) - lines) if starts else len(text) - lines
    return '\n'.join(text[max(0, first, len(text) - 100):])


def launching(folder):
    """Whether launch.sh is still on its way to the run: its pid is noted by who started it."""
    try:
        return ticks(int((folder / 'pid').read_text())) is not None
    except (OSError, ValueError):
        return False


# ---- What is asked ----

def write(line, tag=TAG):
    sys.stdout.buffer.write(tag + line.rstrip(b'\n') + b'\n')


def say(text):
    for line in text.split('\n'):
        write(line.encode())


def follow(name='', run_id='', skip=0, tag=TAG):
    """Writes a run's log from line `skip` on, until it ends. Returns its exit code; None if the session is lost."""
    parent, began, f, skip = os.getppid(), time.monotonic(), None, int(skip)
    while True:
        if record := newest(name, run_id):  # the first that is seen is followed to its end
            name, run_id, folder = record['name'], record['id'], Path(record['folder'])
            over = not record['alive']
        else:
            folder = home() / name / run_id if name and run_id else None
            over = time.monotonic() - began > 3 and not (folder and launching(folder))
        if f is None and folder and (folder / 'log.txt').exists():
            f = open(folder / 'log.txt', 'rb')
            if tag:
                print(f'@run {name} {run_id}', flush=True)
        while f and (line := f.readline(1 << 16)):  # of a bar that goes on and on, a part
            if not line.endswith(b'\n') and len(line) < 1 << 16 and not over:
                f.seek(-len(line), os.SEEK_CUR)  # its rest is still to come; slice.sh counts whole lines
                break
            if skip > 0:
                skip -= 1
            else:
                write(line, tag)
        sys.stdout.flush()
        if over:
            break
        if os.getppid() != parent:  # nobody reads any more
            return None
        time.sleep(.2)
    if not f and folder and (folder / 'launch.txt').exists():  # launch.sh failed
        for line in (folder / 'launch.txt').read_bytes().splitlines():
            write(line, tag)
    elif not f:
        write(f'hosts: no run {name or "of any name"} on this worker'.encode(), tag)
    if record and 'code' not in record:
        write(f'hosts: this worker\'s supervisor (pid {record["pid"]}) is gone without a word: rebooted or killed'
              .encode(), tag)
    if tag and folder and (folder / 'stopped').exists():
        write(b'stopped', b'@')
    sys.stdout.flush()
    return record.get('code', LOST) if record else 2


def status(name=''):
    """A line for each run that is alive, else for the newest."""
    found = records(name)
    for record in [r for r in found if r['alive']] or found[:1]:
        log = tail_of(f'{record["folder"]}/log.txt', 200)
        last = next((line for line in reversed(log.splitlines()) if line.strip()), '')
        step, loss = re.findall(r'\bstep ([\d,]+)', log), re.findall(r'\bloss ([\d.]+|nan)', log)
        state = f'{record["phase"]}, pid {record["pid"]}' if record['alive'] else (
            f'ended with {record["code"]}' if 'code' in record else 'gone (rebooted or killed)')
        say(f'{record["name"]} {record["id"]}: {state}; step {(step or "-")[-1]}, loss {(loss or "-")[-1]}; '
            f'{device()[0]}; {one_line(last)[:100]}')
    if not found:
        say(f'no run; {device()[0]}')
    return 0


def stop(name=''):
    """Ends the run's own processes, checks that, and removes a device lock that nobody holds."""
    found = [r for r in records(name) if r['alive'] or 'code' not in r]
    names = sorted({r['name'] for r in found if r['alive']})
    if not name and len(names) > 1:
        say('several runs are alive here, say which (RUN=...): ' + ', '.join(names))
        return 2
    ok = True
    for r in found:
        if r['alive']:
            with contextlib.suppress(OSError):  # that a person asked: a preemption sends SIGTERM as well
                Path(r['folder'], 'stopped').touch()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(r['pid'], signal.SIGTERM)
            until = time.monotonic() + STOP_S + GRACE_S + 30
            while is_ours(r, 'pid', 'ticks') and time.monotonic() < until:
                time.sleep(.1)
            if is_ours(r, 'pid', 'ticks'):
                say(f'pid {r["pid"]} of run {r["name"]} has not ended')
                ok = False
                continue
        pgid = r.get('script_pid')
        # The supervisor was killed. A group keeps its number as long as it has members, so this one is the run's unless
        # the machine restarted, or the number is another process's by now.
        if pgid and r['boot'] == boot() and ticks(pgid) in (None, r['script_ticks']) and kill_group(pgid, 0):
            kill_group(pgid, signal.SIGTERM)
            until = time.monotonic() + GRACE_S
            while kill_group(pgid, 0) and time.monotonic() < until:
                time.sleep(.1)
            if kill_group(pgid, signal.SIGKILL):
                time.sleep(1)
        say(f'run {r["name"]} {r["id"]}: stopped')
    if not found:
        say('no run is alive')
    text, stale = device()
    if stale:
        try:
            os.remove(LOCK)
            text = f'removed {LOCK}, which nobody held'
        except OSError as e:
            text = f'{LOCK} is stale, but cannot be removed ({e.strerror}): sudo rm {LOCK}'
    elif text.startswith('TPU in use'):
        text = f'left alone, not of this run: {text}'
    say(text)
    return 0 if ok else 1


def log(name=''):
    record = newest(name)
    try:
        with open(f'{record["folder"]}/log.txt', 'rb') as f:
            for line in f:
                write(line)
    except (OSError, TypeError):
        say('no log')
    with contextlib.suppress(OSError, TypeError):  # what launch.sh said itself, if it broke
        text = Path(record['folder'], 'launch.txt').read_bytes()
        for line in text.splitlines() if b'Traceback' in text else ():
            write(line)
    return 0


def main(verb, *args):
    if verb == 'follow':
        if (code := follow(*args)) is not None and TAG:
            print(f'@end {code}', flush=True)
        return
    code = {'status': status, 'stop': stop, 'log': log}[verb](*args)
    sys.stdout.flush()
    if TAG:
        print(f'@ok {code}', flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
