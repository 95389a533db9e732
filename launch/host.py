"""This host's part of a run on all hosts of a slice. They agree on code, versions and data before anything starts; the
first to fail is named and ends the others.

    python -P -m launch.host SCRIPT ARGS...     what launch.sh does on a worker

It supervises: the script is its child, in a process group of its own. Worker 0 listens; the others tell it who they
are, wait for its word, and say how their script ended, as JSON lines over TCP, in the slice's own network. Nothing is
left behind: the supervisor ends with its script, and the script with its supervisor.
"""
import contextlib
import ctypes
import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import zlib
from pathlib import Path

from launch import facts, runs
from launch.runs import GRACE_S, LOST, STOP_S, kill_group, ticks

JOIN_S = os.environ.get('NANO_JOIN_S', '600')  # all must have come by then
if not re.fullmatch('[0-9]{1,6}', JOIN_S):
    sys.exit(f'error: NANO_JOIN_S={JOIN_S}: give a whole number of seconds, such as 600')
JOIN_S = int(JOIN_S)
SILENCE_S = float(os.environ.get('NANO_SILENCE_S', 30))  # a host that says nothing for so long is lost
REPEAT_S = 600  # so long after a run whose end nobody heard, the same command is a repeat of gcloud's
STOPPED = (129, 130, 143)  # a script that was asked to end, and did
CAUSES = ('they were not started (start the same command on all workers), are still setting up, were preempted, or '
          'a firewall is between them')


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
        self.index, self.hosts = facts.place()
        self.name = facts.name_of(script, args)
        self.id = re.sub(r'[^A-Za-z0-9._-]', '_', os.environ.get('NANO_ID', '')).lstrip('.-')
        self.detached = 'NANO_DETACHED' in os.environ  # slice.sh: the log is followed by another command
        self.folder = runs.home() / self.name / (self.id or time.strftime('%Y%m%d-%H%M%S-') + str(os.getpid()))
        port = os.environ.get('NANO_PORT', str(20000 + zlib.crc32(self.name.encode()) % 10000))
        if not re.fullmatch('[0-9]{4,5}', port) or not 1024 <= int(port) <= 65535:
            sys.exit(f'error: NANO_PORT={port}: give a number from 1024 to 65535, or leave it out')
        self.port = int(port)
        self.record = dict(name=self.name, id=self.folder.name, index=self.index, count=len(self.hosts),
                           command=[os.path.relpath(self.script, self.checkout), *args], cwd=os.getcwd(),
                           pid=os.getpid(), ticks=ticks(os.getpid()), boot=runs.boot(), started=time.time())
        self.data = facts.option(args, 'data') or None
        self.links, self.facts, self.codes = {}, {}, {}  # by index; of worker 0
        self.link = self.child = None
        self.phase, self.verdict = 'joining', None  # exit code, once it is known
        self.asked, self.stopping, self.kill_at, self.first = 0, False, None, 0
        self.shown, self.beat_at, self.unheard = 0, 0.0, False

    # -- what it says: a full disk ends no run --

    def say(self, text):
        with contextlib.suppress(OSError), open(self.folder / 'log.txt', 'a', encoding='utf-8') as f:
            f.write(''.join(f'hosts: {line}\n' for line in text.splitlines()))

    def note(self, **values):
        self.record.update(values)
        temp = self.folder / 'run.json.new'
        with contextlib.suppress(OSError):
            temp.write_text(json.dumps(self.record, indent=1))
            os.replace(temp, self.folder / 'run.json')

    def finish(self, code):
        """The end of the record: every run that is over has these three."""
        self.note(phase='ended', code=code, ended=time.time(), unheard=self.unheard)
        return code

    def show(self):
        """In the foreground the log is copied to stdout, until nobody is there to read it (a lost ssh session). It does
        not wait for a reader: worker 0 would take this host for lost. Returns whether there is more to show."""
        if self.detached:
            return False
        with contextlib.suppress(OSError), open(self.folder / 'log.txt', 'rb') as f:
            f.seek(self.shown)
            for _ in range(100):
                if not (text := f.read(select.PIPE_BUF)):
                    return False
                if not select.select([], [1], [], 0)[1]:
                    return True
                try:
                    self.shown += os.write(1, text)
                except OSError:
                    self.detached = self.unheard = True
                    return False
            return True
        return False

    # -- the script --

    def spawn(self, phase, command):
        self.phase, me = phase, os.getpid()

        def ends_with_us():  # SIGTERM if the supervisor is killed; a script that is alone would hold the TPU for ever
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)
            if os.getppid() != me:
                os._exit(LOST)

        try:
            log = open(self.folder / 'log.txt', 'ab')
        except OSError:
            log = open(os.devnull, 'wb')
        with log:
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
                return self.report('ready', data=facts.fingerprint(fetch.folder_of(self.data)))
            self.note(phase='ended', script_code=code)
            tail = runs.tail_of(self.folder / 'log.txt') if code else ''
            self.report('ended', code=code, phase=self.phase, tail=tail)
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
                self.agree('prepare', 'busy', 'id', 'command', 'revision', 'versions')
        elif kind == 'ready':
            self.facts[index].update(message, ready=True)
            if all('ready' in fact for fact in self.facts.values()):
                self.agree('start', 'data')
        elif kind == 'stopping' and not self.stopping:
            self.say(f'worker {index} was asked to stop')
            if message.get('by_stop'):
                with contextlib.suppress(OSError):
                    (self.folder / 'stopped').touch()  # slice.sh asks worker 0
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
                wrong, advice = facts.differences(self.facts, key), {
                    'data': 'give all hosts the same data (--data gs://... does)', 'versions': 'run launch.sh on each',
                    'id': 'the run was started twice at once; start it once more',
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
        self.order('end', code=code, text=text)

    # -- what worker 0 orders --

    def order(self, kind, **message):
        for link in self.links.values():
            link.send(kind, **message)
        self.obey(dict(kind=kind, **message))

    def obey(self, message):
        kind = message['kind']
        if kind == 'prepare' and '://' in (self.data or ''):
            self.spawn('fetching', [sys.executable, '-P', '-m', 'launch.fetch', self.data])
        elif kind == 'prepare':
            self.report('ready', data=facts.fingerprint(self.data))
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
        text, stale = runs.device()
        if stale:
            self.say(f'note: {text}: nobody holds it (launch.sh --stop removes it)')
        busy = ', '.join(f'pid {pid} ({command})' for pid, command in runs.holders())
        return dict(run=self.name, host=socket.gethostname(), chips=runs.chips(), busy=busy, id=self.id,
                    revision=facts.revision(self.checkout), versions=facts.versions(self.checkout),
                    command=self.record['command'])

    def run(self):
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._ask)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a closed ssh session; the run goes on
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self.note(phase='joining')
        server, deadline = None, time.monotonic() + JOIN_S
        if self.index == 0 and len(self.hosts) > 1:
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(('', self.port))
            except OSError as e:
                self.say(f'error: port {self.port} cannot be had here ({e.strerror}): NANO_PORT=... is another one')
                self.show()
                return self.finish(2)
            server.listen(256)
        if self.index == 0:
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
                    for message in socks[sock].receive():
                        self.hear(socks[sock], message, strangers)
                except Exception as e:  # whatever comes from a stranger, or from a host that is none, ends no run
                    if not isinstance(e, (EOFError, ValueError)) and socks[sock] not in strangers:
                        self.say(f'not understood: {e!r}')
                    self.lost(socks[sock], strangers)
            now = time.monotonic()
            for link in [*self.links.values()] + ([self.link] if self.link else []):
                if now - link.heard > SILENCE_S:
                    self.lost(link, strangers)
            if now > self.beat_at:
                self.beat_at = now + min(5, SILENCE_S / 4)
                for link in [*self.links.values()] + ([self.link] if self.link else []):
                    link.send('beat')
            if self.index == 0 and self.phase == 'joining' and len(self.facts) < len(self.hosts) and now > deadline:
                missing = ', '.join(str(i) for i in range(len(self.hosts)) if i not in self.facts)
                self.fail(None, 2, f'nothing was started: worker {missing} of {len(self.hosts)} did not come within '
                          f'{JOIN_S} s. Likely causes: {CAUSES}')
            if self.index == 0 and self.kill_at and now > self.kill_at and self.verdict is None and self.codes:
                self.order('end', code=self.first, text='stopped; not all hosts ended in time')
            self.watch_asked()
            self.watch_child()
            self.show()
            if self.verdict is not None:
                ended = ended or now
        code = self.verdict
        self.say(f'the run ended with exit code {code}')
        until = time.monotonic() + min(10, SILENCE_S)
        while self.show():
            if time.monotonic() > until:
                self.unheard = True
                break
            time.sleep(.05)
        return self.finish(code)

    def hear(self, link, message, strangers):
        if self.link:
            return self.obey(message)
        if link in strangers:
            index = message.pop('index', None) if isinstance(message, dict) else None
            if type(index) is not int or not 0 < index < len(self.hosts) or message.get('kind') != 'hello':
                return self.lost(link, strangers)  # whoever it is
            if message.get('run') != self.name or index in self.facts:
                there = f'worker {index} has come already' if index in self.facts else f'the run there is {self.name}'
                link.send('end', code=2, text=f'error: worker 0 does not take this one into its run: {there}')
                return self.lost(link, strangers)
            if not isinstance(message.get('versions'), dict) or not {'host', 'chips', 'busy', 'revision'} <= {*message}:
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
        until, hello, before = time.monotonic() + JOIN_S, self.hello(), ''
        for record in runs.records(self.name):
            if 'code' in record and time.time() - record.get('ended', 0) < REPEAT_S:
                before = (f'; or this command is a repeat of gcloud\'s: the run before has ended with exit code '
                          f'{record["code"]}')
        while not self.asked:
            try:
                self.link = Link(socket.create_connection((self.hosts[0], self.port), 5))
                self.link.send('hello', index=self.index, **hello)
                return
            except OSError as e:
                if time.monotonic() > until:
                    self.say(f'error: no answer from worker 0 ({self.hosts[0]}:{self.port}) within {JOIN_S} s '
                             f'({e}). Likely causes: {CAUSES}{before}')
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
                self.report('stopping', by_stop=(self.folder / 'stopped').exists())


def run(script, args):
    for fd in range(3):  # a daemon's may be closed; then the log would get the number of stdout
        with contextlib.suppress(OSError):
            os.fstat(fd)
            continue
        os.open(os.devnull, os.O_RDWR)
    _, hosts = facts.place()
    if len(hosts) == 1 and not os.environ.get('NANO_ID') and (os.isatty(0) or os.isatty(1)):
        os.execv(sys.executable, [sys.executable, script, *args])  # someone sits before the only host
    host = Host(script, args)
    try:
        host.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(host.folder.parent / '.lock', os.O_CREAT | os.O_RDWR)
    except OSError as e:
        print(f'error: {host.folder.parent}: the record of the run cannot be written ({e.strerror})', file=sys.stderr)
        return 2
    until = time.monotonic() + 10
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
            break
        except BlockingIOError:
            then = next((r for r in runs.records(host.name) if r['alive']), None)
            if then or time.monotonic() > until:
                return already(host, then)
            time.sleep(.1)  # it has just begun, or is just ending
    if before := heard_by_nobody(host):
        why = '' if host.id else ', as its end could not be told. The same command once more starts it'
        print(f'hosts: this run has ended already, with exit code {before.get("code", LOST)}, and this is its log: it '
              f'is not started again{why}', flush=True)
        return tell(before)
    with contextlib.suppress(OSError):
        host.folder.mkdir(exist_ok=True)
    try:
        code = host.run()
    except Exception:  # of this file: told where the run's log is read; the script ends with this process
        host.say(f'error: this supervisor has failed:\n{traceback.format_exc()}')
        host.show()
        code = host.finish(1)
    return never_255(code, host)


def never_255(code, host):
    if code == 255 and not host.detached:
        host.say('ends with 254 in place of 255, which gcloud would take for a lost connection, and start it again')
        return 254
    return code


def heard_by_nobody(host):
    """The record of a run that this command has started before, and whose end it has not heard.

    gcloud repeats a command whose connection was lost, and by then the run may have ended. What is known of that: our
    own words to the first session were refused, or not read. (A loss that ssh has not noticed yet is not known. Then a
    slice's other hosts do not come, so nothing starts either; a host that is alone starts again, from its newest
    checkpoint.) With NANO_ID=... a command says itself which start it is: there is one for each."""
    if host.id:
        return runs.newest(host.name, host.id)
    before = runs.newest(host.name)
    if before and before.get('unheard') and not (Path(before['folder']) / 'heard').exists() and (
            before['command'] == host.record['command'] and 0 <= time.time() - before.get('ended', 0) < REPEAT_S):
        return before


def tell(record):
    """Its log to its end, and its exit code."""
    code = runs.follow(record['name'], record['id'], tag=b'')
    if code is None:
        return LOST  # nobody reads this
    (Path(record['folder']) / 'heard').touch()
    return 254 if code == 255 else code


def already(host, then):
    """A run of this name is alive here. The same command again is gcloud's repeat: it follows the run."""
    if then and (then['id'] == host.id if host.id else then['command'] == host.record['command']):
        print(f'hosts: this run is alive here already (pid {then["pid"]}): followed, not started again', flush=True)
        return tell(then)
    whose = f'pid {then["pid"]}, {" ".join(then["command"])}' if then else 'its record cannot be read'
    text = (f'error: a run named {host.name} is alive on this host ({whose}): stop it, or give this one another name '
            '(RUN=..., or --out)')
    print(text, file=sys.stderr)
    if host.detached:
        host.say(text)
        host.finish(2)
    return 2


if __name__ == '__main__':
    sys.exit(run(sys.argv[1], sys.argv[2:]))
