"""One run on all hosts of a slice. They agree on code, versions and data before anything starts; the first to fail is
named and ends the others. Only the standard library, in one file, so that it can be sent to a worker through stdin:

    python launch/host.py run SCRIPT ARGS...                     what launch.sh does on a worker
    python3 - status|stop|follow|log [NAME ...] <launch/host.py  what slice.sh asks of a worker, see `main`

`run` supervises: the script is its child, in a process group of its own. Worker 0 listens; the others tell it who they
are, wait for its word, and say how their script ended, as JSON lines over TCP, in the slice's own network. Nothing is
left behind: the supervisor ends with its script, and the script with its supervisor.

A run's folder, ~/nano/runs/NAME/ID, is outside of the checkout: run.json (who, what, process ids, exit code), log.txt.
"""
import contextlib
import ctypes
import fcntl
import glob
import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zlib
from pathlib import Path

JOIN_S = float(os.environ.get('NANO_JOIN_S', 600))  # all must have come by then
SILENCE_S = float(os.environ.get('NANO_SILENCE_S', 30))  # a host that says nothing for so long is lost
GRACE_S = float(os.environ.get('NANO_GRACE_S', 20))  # from SIGTERM to SIGKILL when another host has failed
STOP_S = float(os.environ.get('NANO_STOP_S', 660))  # the same when a user stops it: a checkpoint takes minutes
LOST = 75  # exit code of a run that lost a host; EX_TEMPFAIL: trying again can help
STOPPED = (129, 130, 143)  # a script that was asked to end, and did
LOCK = os.environ.get('NANO_TPU_LOCK', '/tmp/libtpu_lockfile')  # libtpu leaves it when it is killed (jax-ml/jax#10192)
DEVICES = os.environ.get('NANO_TPU_DEVICES', '/dev/accel*:/dev/vfio/[0-9]*').split(':')
CAUSES = ('they were not started (start the same command on all workers), are still setting up, were preempted, or '
          'a firewall is between them')


def runs():
    return Path.home() / 'nano' / 'runs'


# ---- Processes, the device, the log ----

def ticks(pid):
    """When process `pid` started, in ticks since the boot; None without one. It makes a pid unique."""
    try:
        fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
        return None if fields[0] in 'ZX' else int(fields[19])
    except (OSError, IndexError):
        return None


def command_of(pid):
    with contextlib.suppress(OSError):
        return Path(f'/proc/{pid}/cmdline').read_bytes().replace(b'\0', b' ').decode(errors='replace').strip()[:120]
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
    """A phrase: who has the TPU."""
    if found := holders():
        return 'TPU in use by ' + ', '.join(f'pid {pid} ({command})' for pid, command in found)
    if os.path.exists(LOCK):
        return f'TPU free, stale lock {LOCK}'
    return f'TPU free ({chips()} chips)' if chips() else 'no TPU'


def chips():
    return sum(len(glob.glob(pattern)) for pattern in DEVICES)


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


# ---- What the hosts must have in common ----

def place():
    """(index, addresses) of this host among those of its slice; (0, ['localhost']) where there is no slice.

    The variables are those that torch_xla reads, and where they are not set, the attributes of the metadata server."""
    names = os.environ.get('TPU_WORKER_HOSTNAMES', '').split(',')
    index = os.environ.get('CLOUD_TPU_TASK_ID', os.environ.get('TPU_WORKER_ID'))
    if len(names) > 1 and index:
        return int(index), names
    if not chips():
        return 0, ['localhost']
    try:
        # 'hostname:uid:ip,...', each; the number is that of this worker
        names = [entry.split(':')[2] for entry in metadata('worker-network-endpoints').split(',')]
        return int(metadata('agent-worker-number')), names
    except (OSError, IndexError, ValueError) as e:
        print(f'hosts: the metadata server does not say which worker this is ({e}), so it is taken for the only one; '
              'else set TPU_WORKER_ID and TPU_WORKER_HOSTNAMES', flush=True)
        return 0, ['localhost']


def metadata(name):
    server = os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')
    request = urllib.request.Request(f'http://{server}/computeMetadata/v1/instance/attributes/{name}',
                                     headers={'Metadata-Flavor': 'Google'})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()


def revision(checkout):
    """What git calls the checkout, or what slice.sh noted of it, and a hash of the code that is really there."""
    try:
        name = (checkout / '.revision').read_text().strip()
    except OSError:
        git = subprocess.run(['git', '-C', checkout, 'describe', '--always', '--dirty'], stdin=subprocess.DEVNULL,
                             capture_output=True, text=True) if (checkout / '.git').exists() else None
        name = git.stdout.strip() if git and git.returncode == 0 else 'unnamed'
    code, digest = [], hashlib.sha256()
    for folder in ('', 'nano', 'nano/plan', 'data', 'launch'):
        code += [p for p in (checkout / folder).glob('*') if p.suffix in ('.py', '.sh', '.txt')]
    for path in sorted(code):
        digest.update(f'{path.relative_to(checkout)}\0'.encode() + hashlib.sha256(path.read_bytes()).digest())
    return f'{name}, code {digest.hexdigest()[:12]}'


def versions(checkout):
    """{package of requirements.txt: version}, and Python's."""
    from importlib import metadata as packages
    found = {'Python': sys.version.split()[0]}
    with contextlib.suppress(OSError):
        for name in re.findall(r'^([A-Za-z0-9_.-]+)==', (checkout / 'requirements.txt').read_text(), re.M):
            with contextlib.suppress(packages.PackageNotFoundError):
                found[name] = packages.version(name)
    return found


def data_of(args):
    """The value of --data, or None."""
    for i, arg in enumerate(args):
        if arg == '--data' and i + 1 < len(args):
            return args[i + 1]
        if arg.startswith('--data='):
            return arg[7:]
    return None


def fingerprint(data):
    """Of the manifest of a folder of shards: what it says but where the data came from. None without one."""
    try:
        manifest = json.loads((Path(data).expanduser() / 'manifest.json').read_text())
    except (OSError, ValueError, TypeError):
        return None
    manifest.pop('source', None)
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:12]


def differences(facts, key):
    """'' if all hosts say the same of `key`; else who says what, the rarest first. facts: {index: {key: value}}."""
    groups = {}
    for index in sorted(facts):
        groups.setdefault(json.dumps(facts[index].get(key), sort_keys=True), []).append(index)
    if len(groups) == 1:
        return ''
    parts, values = [], {text: json.loads(text) for text in groups}
    for text, members in sorted(groups.items(), key=lambda g: len(g[1])):
        value = values[text]
        if isinstance(value, dict):  # only what differs
            value = ', '.join(f'{k} {value.get(k, "missing")}' for k in sorted(set().union(*values.values()))
                              if len({v.get(k) for v in values.values()}) > 1)
        parts.append(f'worker {", ".join(map(str, members))}: {value}')
    return '; '.join(parts)


# ---- The supervisor ----

class Link:
    """JSON lines to and from another host."""

    def __init__(self, sock):
        self.sock, self.rest, self.heard = sock, b'', time.monotonic()
        sock.settimeout(5)  # for sending

    def send(self, kind, **message):
        with contextlib.suppress(OSError):
            self.sock.sendall(json.dumps({'kind': kind, **message}).encode() + b'\n')

    def receive(self):
        """What has come, when select says that something has. EOFError at the end."""
        try:
            new = self.sock.recv(1 << 20)
        except OSError:
            new = b''
        if not new or len(self.rest) > 1 << 22:
            raise EOFError
        self.heard = time.monotonic()
        *lines, self.rest = (self.rest + new).split(b'\n')
        return [json.loads(line) for line in lines]


class Host:
    """This host's part of a run. Worker 0 gives the orders; what it orders it also obeys."""

    def __init__(self, script, args):
        self.script, self.args, self.checkout = os.path.abspath(script), args, Path(script).resolve().parent
        while not (self.checkout / 'launch.sh').exists() and self.checkout != self.checkout.parent:
            self.checkout = self.checkout.parent
        self.index, self.hosts = place()
        self.name, self.id = name_of(script, args), os.environ.get('NANO_ID', '')
        self.detached = bool(self.id)
        self.folder = runs() / self.name / (self.id or time.strftime('%Y%m%d-%H%M%S-') + str(os.getpid()))
        self.port = int(os.environ.get('NANO_PORT', 20000 + zlib.crc32(self.name.encode()) % 10000))
        self.record = dict(name=self.name, id=self.folder.name, index=self.index, count=len(self.hosts),
                           command=[os.path.relpath(self.script, self.checkout), *args], cwd=os.getcwd(),
                           pid=os.getpid(), ticks=ticks(os.getpid()), started=time.time())
        self.links, self.facts, self.codes = {}, {}, {}  # by index; of worker 0
        self.link = self.child = None
        self.phase, self.verdict = 'joining', None  # exit code, once it is known
        self.asked, self.stopping, self.kill_at, self.first = 0, False, None, 0
        self.shown, self.beat_at = 0, 0.0

    # -- what it says --

    def say(self, text):
        with open(self.folder / 'log.txt', 'a', encoding='utf-8') as f:
            f.write(''.join(f'hosts: {line}\n' for line in text.splitlines()))

    def note(self, **values):
        self.record.update(values)
        temp = self.folder / 'run.json.new'
        temp.write_text(json.dumps(self.record, indent=1))
        os.replace(temp, self.folder / 'run.json')

    def show(self):
        """In the foreground the log is copied to stdout, until nobody is there to read it (a lost ssh session)."""
        if not self.detached:
            with contextlib.suppress(OSError), open(self.folder / 'log.txt', 'rb') as f:
                f.seek(self.shown)
                text = f.read()
                self.shown += len(text)
                try:
                    os.write(1, text)
                except OSError:
                    self.detached = True

    # -- the script --

    def spawn(self, phase, command):
        self.phase = phase

        def ends_with_us():  # SIGTERM if the supervisor is killed; a script that is alone would hold the TPU for ever
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)

        with open(self.folder / 'log.txt', 'ab') as log:
            env = {**os.environ, 'PYTHONUNBUFFERED': '1'}
            self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                          start_new_session=True, preexec_fn=ends_with_us, env=env)
        self.note(script_pid=self.child.pid, script_ticks=ticks(self.child.pid), phase=phase)

    def terminate(self, seconds):
        """SIGTERM to the script's own group now, SIGKILL after so many seconds."""
        if self.child:
            kill_group(self.child.pid, signal.SIGTERM)
        kill_at = time.monotonic() + seconds
        self.kill_at = min(kill_at, self.kill_at or kill_at)

    def watch_child(self):
        if self.kill_at and time.monotonic() > self.kill_at and self.child:
            kill_group(self.child.pid, signal.SIGKILL)
        if self.child and self.child.poll() is not None:
            code, pgid, self.child = self.child.returncode, self.child.pid, None
            until = time.monotonic() + 3
            while kill_group(pgid, 0) and time.monotonic() < until:  # what it started, such as a tracker's upload
                time.sleep(.05)
            kill_group(pgid, signal.SIGKILL)
            code = code if code >= 0 else 128 - code
            if self.phase == 'fetching' and code == 0:
                from launch import fetch
                return self.report('ready', data=fingerprint(fetch.folder_of(data_of(self.args))))
            self.note(phase='ended', script_code=code)
            self.report('ended', code=code, phase=self.phase, tail=tail_of(self.folder / 'log.txt') if code else '')
            self.phase = 'ended'

    # -- what the hosts tell worker 0 --

    def report(self, kind, **message):
        if self.index == 0:
            self.collect(0, dict(kind=kind, **message))
        elif self.link:
            self.link.send(kind, **message)

    def collect(self, index, message):
        kind = message.pop('kind')
        if kind == 'hello':
            self.facts[index] = message
            some = ', '.join(f'{k} {v}' for k, v in message['versions'].items()
                             if k in ('Python', 'torch', 'torch_xla', 'libtpu'))
            self.say(f'host {index} of {len(self.hosts)}: {message["host"]}, {message["chips"]} chips, {some}, '
                     f'revision {message["revision"]}')
            if len(self.facts) == len(self.hosts):
                self.agree('prepare', 'busy', 'command', 'id', 'revision', 'versions')
        elif kind == 'ready':
            self.facts[index].update(message, ready=True)
            if all('ready' in fact for fact in self.facts.values()):
                self.agree('start', 'data')
        elif kind == 'stopping' and not self.stopping:
            self.say(f'worker {index} was asked to stop')
            self.order('stop')
        elif kind == 'ended' and index not in self.codes:
            code = self.codes[index] = message['code']
            self.first = self.first or code
            if code in STOPPED or self.stopping:  # the scripts agree on where to stop: the others are about to end too
                self.kill_at = self.kill_at or time.monotonic() + (STOP_S if self.stopping else 60)
            elif code and self.verdict is None:
                what = 'could not fetch the data' if message['phase'] == 'fetching' else 'failed first'
                self.fail(index, code, f'worker {index} {what}, with exit code {code}; the others are stopped',
                          message['tail'])
            elif code:
                self.say(f'worker {index} ended with {code}')
            if len(self.codes) == len(self.hosts) and self.verdict is None:
                self.order('done', code=self.first)

    def agree(self, then, *keys):
        """Gives the order if all say the same, else refuses."""
        for key in keys:
            if key == 'busy':
                wrong = '; '.join(f'worker {i}: {f["busy"]}' for i, f in sorted(self.facts.items()) if f['busy'])
                advice = 'end it, or stop its run; nothing foreign is ever killed'
            else:
                wrong, advice = differences(self.facts, key), {
                    'data': 'give all hosts the same data (--data gs://... does)', 'versions': 'run launch.sh on each',
                    }.get(key, 'start the same on all')
            if wrong:
                what = 'the TPU is in use' if key == 'busy' else f'the hosts differ in their {key}'
                self.fail(None, 2, f'nothing was started: {what}: {wrong}: {advice}')
                return
        if then == 'start':
            self.say(f'all {len(self.hosts)} hosts agree, data {self.facts[0].get("data")}: started')
        self.order(then)

    def fail(self, index, code, text, tail=''):
        """Ends the run everywhere. Shows what happened before anything else is said of it."""
        bar = '=' * 20
        self.say(f'{bar} {text} {bar}' + (f'\nthe end of its log:\n{tail}\n{bar} worker {index} {bar}' if tail else ''))
        (self.folder / 'failure.txt').write_text(f'{text}\n{tail}\n')
        self.order('end', code=code, text=text)

    # -- what worker 0 orders --

    def order(self, kind, **message):
        for link in self.links.values():
            link.send(kind, **message)
        self.obey(dict(kind=kind, **message))

    def obey(self, message):
        kind = message['kind']
        if kind == 'prepare' and '://' in (data_of(self.args) or ''):
            self.spawn('fetching', [sys.executable, '-m', 'launch.fetch', data_of(self.args)])
        elif kind == 'prepare':
            self.report('ready', data=fingerprint(data_of(self.args)))
        elif kind == 'start':
            self.spawn('running', [sys.executable, self.script, *self.args])
        elif kind == 'stop':
            if not self.stopping:  # once: to the scripts a second signal means at once
                self.stopping = True
                self.terminate(STOP_S)
        elif kind == 'end':
            self.verdict = message['code']
            if self.index:
                self.say(message['text'])
            self.terminate(GRACE_S)
        elif kind == 'done':
            self.verdict = message['code']

    # -- the loop --

    def hello(self):
        found = holders()
        if not found and os.path.exists(LOCK):
            self.say(f'note: {LOCK} is stale: nobody holds it (launch.sh --stop removes it)')
        busy = ', '.join(f'pid {pid} ({command})' for pid, command in found)
        return dict(host=socket.gethostname(), chips=chips(), revision=revision(self.checkout), busy=busy, id=self.id,
                    versions=versions(self.checkout), command=self.record['command'])

    def run(self):
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._ask)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a closed ssh session; the run goes on
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self.note(phase='joining')
        server = deadline = None
        if self.index == 0:
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(('', self.port))
            except OSError as e:
                self.say(f'error: port {self.port} cannot be had here ({e.strerror}): set NANO_PORT on all hosts')
                self.note(phase='ended', code=2)
                self.show()
                return 2
            server.listen(256)
            deadline = time.monotonic() + JOIN_S
            self.report('hello', **self.hello())
        else:
            self.say(f'host {self.index} of {len(self.hosts)}: joining worker 0 at {self.hosts[0]}:{self.port}')
            self.connect()
        strangers, ended = [], None
        while self.verdict is None or self.child or (self.index == 0 and len(self.codes) < len(self.facts)
                                                     and self.links and time.monotonic() < ended + GRACE_S + 10):
            mine = [*self.links.values(), *strangers] + ([self.link] if self.link else [])
            socks = {link.sock: link for link in mine}
            if server:
                socks[server] = None
            for sock in select.select(list(socks), [], [], .1)[0]:
                if socks[sock] is None:
                    strangers.append(Link(server.accept()[0]))
                    continue
                try:
                    messages = socks[sock].receive()
                except (EOFError, ValueError):
                    self.lost(socks[sock], strangers)
                    continue
                for message in messages:
                    self.hear(socks[sock], message, strangers)
            now = time.monotonic()
            for link in [*self.links.values()] + ([self.link] if self.link else []):
                if now - link.heard > SILENCE_S:
                    self.lost(link, strangers)
            if now > self.beat_at:
                self.beat_at = now + min(5, SILENCE_S / 4)
                for link in [*self.links.values()] + ([self.link] if self.link else []):
                    link.send('beat')
            if deadline and self.phase == 'joining' and len(self.facts) < len(self.hosts) and now > deadline:
                missing = ', '.join(str(i) for i in range(len(self.hosts)) if i not in self.facts)
                self.fail(None, 2, f'nothing was started: worker {missing} of {len(self.hosts)} did not come within '
                          f'{JOIN_S:.0f} s. Likely causes: {CAUSES}')
            if self.index == 0 and self.kill_at and now > self.kill_at and self.verdict is None and self.codes:
                self.order('end', code=self.first, text='stopped; not all hosts ended in time')
            self.watch_asked()
            self.watch_child()
            self.show()
            if self.verdict is not None:
                ended = ended or now
        code = self.verdict
        self.say(f'the run ended with exit code {code}')
        self.note(phase='ended', code=code, ended=time.time())
        self.show()
        return code

    def hear(self, link, message, strangers):
        if self.link:
            return self.obey(message)
        if link in strangers:
            index = message.pop('index', None)
            if message.get('kind') != 'hello' or index in self.links or index not in range(1, len(self.hosts)):
                return self.lost(link, strangers)
            strangers.remove(link)
            self.links[index] = link
        for index, known in self.links.items():
            if known is link and message['kind'] != 'beat':
                return self.collect(index, message)

    def lost(self, link, strangers):
        link.sock.close()
        if link in strangers:
            strangers.remove(link)
        elif link is self.link:
            self.link = None
            if self.verdict is None:
                self.say('worker 0 is gone: preempted, rebooted, or its run was killed. This one is stopped')
                self.verdict = LOST
                self.terminate(GRACE_S)
        for index in [i for i, known in self.links.items() if known is link]:
            del self.links[index]
            if index not in self.codes and self.verdict is None:
                self.codes[index] = LOST
                self.fail(index, LOST, f'worker {index} is gone: preempted, rebooted, out of memory, or its run was '
                          'killed; the others are stopped')
            self.codes.setdefault(index, LOST)

    def connect(self):
        until, facts = time.monotonic() + JOIN_S, self.hello()
        while not self.asked:
            try:
                self.link = Link(socket.create_connection((self.hosts[0], self.port), 5))
                self.link.send('hello', index=self.index, **facts)
                return
            except OSError as e:
                if time.monotonic() > until:
                    self.say(f'error: no answer from worker 0 ({self.hosts[0]}:{self.port}) within {JOIN_S:.0f} s '
                             f'({e}). Likely causes: {CAUSES}')
                    self.verdict = 2
                    return
                self.show()
                time.sleep(.5)
        self.verdict = 143

    def _ask(self, *_):
        self.asked += 1

    def watch_asked(self):
        if self.asked and self.phase in ('joining', 'fetching') and self.verdict is None:
            self.asked = 0
            if self.index == 0:
                return self.fail(None, 143, 'worker 0 was asked to stop before the start')
            self.verdict = 143
            self.terminate(GRACE_S)
        elif self.asked > 1 and self.child:
            self.asked = 1
            kill_group(self.child.pid, signal.SIGTERM)
        elif self.asked and not self.stopping and self.phase == 'running':
            if self.index == 0:
                self.collect(0, dict(kind='stopping'))
            else:
                self.stopping = True
                self.terminate(STOP_S)
                self.report('stopping')


def name_of(script, args):
    """NANO_RUN, or the last part of --out, or the script's name: what tells the runs of a slice apart."""
    out = next((a[6:] if a != '--out' else args[i + 1] for i, a in enumerate(args)
                if a.startswith('--out=') or a == '--out' and i + 1 < len(args)), '')
    name = os.environ.get('NANO_RUN') or out.rstrip('/').rpartition('/')[2] or Path(script).stem
    return re.sub(r'[^A-Za-z0-9._-]', '_', name).lstrip('.-') or 'run'


def run(script, args):
    index, hosts = place()
    if len(hosts) == 1 and not os.environ.get('NANO_ID'):
        os.execv(sys.executable, [sys.executable, script, *args])
    host = Host(script, args)
    host.folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(host.folder.parent / 'lock', os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
    except BlockingIOError:
        return already(host)
    code = host.run()
    if code == 255 and not host.id:
        host.say('ends with 254 in place of 255, which gcloud would take for a lost connection, and start it again')
        code = 254
    return code


def already(host):
    """The run is alive here. gcloud repeats a command whose connection was lost: then it is followed, not started."""
    then = next((r for r in records(host.name) if r['alive']), None)
    host.folder.rmdir() if not any(host.folder.iterdir()) else None
    if not then or then['command'] != host.record['command'] or host.id:
        whose = f'pid {then["pid"]}, {" ".join(then["command"])}' if then else 'it has just begun'
        print(f'error: a run named {host.name} is alive on this host ({whose}): stop it, or give this one another name '
              f'(RUN=..., or --out)', file=sys.stderr)
        if host.id:
            host.folder.mkdir(exist_ok=True)
            host.say(f'error: a run named {host.name} is alive on this host ({whose})')
            host.note(phase='ended', code=2)
        return 2
    print(f'hosts: this run is alive here already (pid {then["pid"]}): followed, not started again', flush=True)
    return follow(host.name, then['id'], 0, mark=False)


# ---- What is asked from afar ----

def records(name=''):
    """Those of all runs of this name, or of all, the newest first; `alive` tells whether its supervisor is."""
    found = []
    for path in glob.glob(str(runs() / (name or '*') / '*' / 'run.json')):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(Path(path).read_text())
            record['alive'] = ticks(record['pid']) == record['ticks'] and 'code' not in record
            record['folder'] = os.path.dirname(path)
            found.append(record)
    return sorted(found, key=lambda r: -r['started'])


def newest(name, run_id=''):
    return next((r for r in records(name) if run_id in ('', r['id'])), None)


def follow(name, run_id, skip, mark=True):
    """Prints a run's log from line `skip` on, until it ends; then '@end CODE' or, in place of it, returns the code."""
    parent, began = os.getppid(), time.monotonic()
    folder, f = None, None
    while True:
        if record := newest(name, run_id):
            run_id, folder = record['id'], Path(record['folder'])
            over = not record['alive']
        else:
            folder = runs() / name / run_id
            over = time.monotonic() - began > 3 and not launching(folder)
        if f is None and folder and (folder / 'log.txt').exists():
            f = open(folder / 'log.txt', 'rb')
            print(f'@run {name} {run_id}', flush=True) if mark else None
        for line in f or ():
            if skip > 0:
                skip -= 1
                continue
            sys.stdout.buffer.write(line if line.endswith(b'\n') else line + b'\n')
        sys.stdout.flush()
        if over:
            break
        if os.getppid() != parent:  # the session was lost; nobody reads any more
            return 0
        time.sleep(.2)
    code = record.get('code', LOST) if record else 2
    if not f:
        with contextlib.suppress(OSError):
            print((folder / 'launch.txt').read_text())
    if record and 'code' not in record:
        print(f'hosts: this worker\'s supervisor (pid {record["pid"]}) is gone without a word: rebooted or killed')
    if mark:
        print(f'@end {code}', flush=True)
    return 0 if mark else code


def launching(folder):
    """Whether launch.sh is still on its way to `run`: its pid is noted by who started it."""
    try:
        return ticks(int((folder / 'pid').read_text())) is not None
    except (OSError, ValueError):
        return False


def status(name):
    record = newest(name)
    if not record:
        print(f'no run; {device()}')
        return 0
    log = tail_of(f'{record["folder"]}/log.txt', 200)
    last = next((line for line in reversed(log.splitlines()) if line.strip()), '')
    step, loss = re.findall(r'\bstep ([\d,]+)', log), re.findall(r'\bloss ([\d.]+|nan)', log)
    state = f'{record["phase"]}, pid {record["pid"]}' if record['alive'] else (
        f'ended with {record["code"]}' if 'code' in record else 'gone (rebooted or killed)')
    print(f'{record["name"]} {record["id"]}: {state}; step {(step or "-")[-1]}, loss {(loss or "-")[-1]}; {device()}; '
          f'{last[:100]}')
    return 0


def stop(name):
    """Ends the run's own processes, checks that, and removes a device lock that nobody holds."""
    found = [r for r in records(name) if r['alive'] or 'code' not in r]
    if not name and len({r['name'] for r in found if r['alive']}) > 1:
        print('several runs are alive here, say which (RUN=...): ' + ', '.join(r['name'] for r in found if r['alive']))
        return 2
    ok = True
    for r in found:
        if r['alive']:
            os.kill(r['pid'], signal.SIGTERM)
            until = time.monotonic() + STOP_S + GRACE_S + 30
            while ticks(r['pid']) == r['ticks'] and time.monotonic() < until:
                time.sleep(.1)
            if ticks(r['pid']) == r['ticks']:
                print(f'pid {r["pid"]} of run {r["name"]} has not ended')
                ok = False
                continue
        pgid = r.get('script_pid')
        # A group keeps its number as long as it has members, so this one is the run's unless the machine restarted.
        if pgid and ticks(pgid) in (None, r['script_ticks']) and kill_group(pgid, 0) and r['started'] > boot_time():
            kill_group(pgid, signal.SIGTERM)
            until = time.monotonic() + GRACE_S
            while kill_group(pgid, 0) and time.monotonic() < until:
                time.sleep(.1)
            if kill_group(pgid, signal.SIGKILL):
                time.sleep(1)
        print(f'run {r["name"]} {r["id"]}: stopped')
    if not found:
        print('no run is alive')
    if foreign := holders():
        print('left alone, not of this run: ' + ', '.join(f'pid {pid} ({command})' for pid, command in foreign))
    elif os.path.exists(LOCK):
        try:
            os.remove(LOCK)
            print(f'removed {LOCK}, which nobody held')
        except OSError as e:
            print(f'{LOCK} is stale, but cannot be removed ({e.strerror}): sudo rm {LOCK}')
    return 0 if ok else 1


def boot_time():
    return time.time() - float(Path('/proc/uptime').read_text().split()[0])


def main(argv):
    verb, *args = argv
    if verb == 'run':
        sys.path[0] = os.environ.get('PYTHONPATH', '').split(':')[0] or str(Path(__file__).resolve().parent.parent)
        sys.exit(run(args[0], args[1:]))
    name = args[0] if args else ''
    if verb == 'follow':
        code = follow(name or (newest('') or {'name': 'none'})['name'], args[1] if len(args) > 1 else '',
                      int(args[2]) if len(args) > 2 else 0)
    elif verb == 'log':
        if record := newest(name):
            sys.stdout.buffer.write(Path(record['folder'], 'log.txt').read_bytes())
            sys.stdout.flush()
        code = 0
    else:
        code = {'status': status, 'stop': stop}[verb](name)
    # What came through a connection counts only with this line: a lost one can look like an empty answer.
    print(f'@ok {code}', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
