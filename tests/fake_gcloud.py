"""A stand-in for gcloud: workers are folders of this machine, and each command runs there with the worker's HOME.

Flags and output as in cloud.google.com/sdk/gcloud/reference/compute/tpus: tpu-vm/ssh, tpu-vm/describe, tpu-vm/delete,
queued-resources/create, /describe, /delete (general availability, no alpha); another flag or format is refused. As the
real one (SDK 528), ssh takes exit code 255 for a lost connection, and repeats the command with what is left of stdin.
The folder $FAKE_CLOUD holds calls.jsonl, SLICE/ for each slice (state, wN/), and faults that a test puts there.
"""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CLOUD = Path(os.environ['FAKE_CLOUD'])
FLAGS = {
    'tpu-vm ssh': 'zone= project= worker= command= ssh-flag= ssh-key-file= internal-ip dry-run plain quiet',
    'tpu-vm describe': 'zone= project= format=', 'tpu-vm delete': 'zone= project= async quiet',
    'queued-resources create': 'zone= project= node-id= accelerator-type= runtime-version= spot async quiet',
    'queued-resources describe': 'zone= project= format=',
    'queued-resources delete': 'zone= project= force async quiet'}


def fail(verb, text, code=1):
    print(f'ERROR: (gcloud.compute.tpus.{verb.replace(" ", ".")}) {text}', file=sys.stderr)
    sys.exit(code)


def fault(name):
    """Uses one of the faults of this name up; returns what it says."""
    for path in sorted((CLOUD / 'faults').glob(name + '.*')):
        try:
            text = path.read_text()
            path.unlink()
            return text or 'yes'
        except FileNotFoundError:
            continue
    return ''


def make(folder, n):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        python = folder / f'w{i}' / 'nano' / '.venv' / 'bin' / 'python'
        python.parent.mkdir(parents=True)
        # Never the pip of the Python that runs these tests: what it is asked for is noted.
        python.write_text('#!/bin/sh\n[ "$1 $2" != "-m pip" ] || { echo "$*" >>~/pip; exit; }\n'
                          f'exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        stamp = f'{folder}/w{i}/nano, Python {sys.version_info[0]}.{sys.version_info[1]}\n'
        (python.parent.parent / 'launch.stamp').write_text(stamp + (CLOUD / 'hashes').read_text())
    (folder / 'n').write_text(str(n))


def ssh(folder, options):
    if 'command' not in options:
        fail('tpu-vm ssh', 'the stand-in has no terminal')
    n = int((folder / 'n').read_text())
    if options['worker'] == 'all':  # at once; the first code that is not 0 counts
        alone = [[a for a in sys.argv if a != '--worker=all'] + [f'--worker={i}'] for i in range(n)]
        children = [subprocess.Popen([sys.executable, *args], stdin=subprocess.DEVNULL) for args in alone]
        sys.exit(next((code for code in [c.wait() for c in children] if code), 0))
    i = int(options['worker'])
    if i >= n:
        fail('tpu-vm ssh', f'Invalid value for [--worker]: worker index {i} is larger than the valid worker indexes')
    home = folder / f'w{i}'
    port = 21000 + (sum(map(ord, str(folder))) * 7919) % 9000
    env = {'PATH': os.environ['PATH'], 'HOME': str(home), 'TPU_WORKER_ID': str(i), 'NANO_PORT': str(port),
           'TPU_WORKER_HOSTNAMES': ','.join(['localhost'] * n), 'NANO_TPU_LOCK': str(home / 'lock'),
           'NANO_TPU_DEVICES': str(home / 'accel*'), 'NANO_GRACE_S': '3', 'NANO_JOIN_S': '30', 'LANG': 'C'}
    if (CLOUD / 'own ports').exists():  # those that the runs choose by their names
        del env['NANO_PORT']
    for attempt in range(3):
        print(f'SSH: Attempting to connect to worker {i}...', file=sys.stderr)
        what = fault(f'ssh{i}')
        if what.startswith('slow'):
            time.sleep(float(what.split()[1]))
        if what == 'refused':
            code = 255
        else:
            lost = what == 'lost'  # after the command was done
            code = subprocess.run(['bash', '-c', options['command']], env=env, cwd=home, start_new_session=True,
                                  stdout=subprocess.DEVNULL if lost else None).returncode
            code = 255 if lost else code
        if code != 255:
            sys.exit(code)
        print('Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].', file=sys.stderr)
    fail('tpu-vm ssh', '[/usr/bin/ssh] exited with return code [255].', 255)


def main(args):
    with open(CLOUD / 'calls.jsonl', 'a') as f:
        f.write(json.dumps(args) + '\n')
    if args[:2] != ['compute', 'tpus'] or ' '.join(args[2:4]) not in FLAGS:
        fail('', f"Invalid choice: '{' '.join(args)}'", 2)
    verb, options, names = ' '.join(args[2:4]), {}, []
    for arg in args[4:]:
        name, equals, value = arg[2:].partition('=')
        if not arg.startswith('--'):
            names.append(arg)
        elif name + equals not in FLAGS[verb].split():
            fail(verb, f'unrecognized arguments: {arg}', 2)
        else:
            options[name] = value
    [name] = names
    if 'zone' not in options:
        fail(verb, 'The required property [compute/zone] is not currently set.')
    if error := fault('error'):
        fail(verb, error)
    folder = CLOUD / name
    state = folder / 'state'
    missing = (f'NOT_FOUND: Resource \'projects/p/locations/{options["zone"]}/nodes/{name}\' was not found')
    if verb == 'queued-resources create':
        if folder.exists():
            fail(verb, 'ALREADY_EXISTS')
        assert options['node-id'] == name and options['accelerator-type'].startswith('v5litepod-')
        assert options['runtime-version'] == 'v2-alpha-tpuv5-lite'
        folder.mkdir()
        state.write_text('WAITING_FOR_RESOURCES PROVISIONING ACTIVE')
        return
    if not folder.exists():
        fail(verb, missing)
    states = state.read_text().split()
    if verb.endswith('delete'):
        subprocess.run(['mv', folder, CLOUD / f'deleted-{name}-{time.time_ns()}'], check=True)
    elif verb == 'queued-resources describe':
        if options['format'] not in ('value(state.state)', 'json(state)'):
            fail(verb, 'the stand-in does not know this format')
        print(states[0])
        if len(states) > 1:
            state.write_text(' '.join(states[1:]))
            if states[1] == 'ACTIVE':
                make(folder, int((CLOUD / 'size').read_text()))
    else:
        node = {'ACTIVE': 'READY', 'SUSPENDED': 'PREEMPTED'}.get(states[0], 'CREATING')
        if verb == 'tpu-vm describe':
            assert options['format'] == 'value(state,networkEndpoints.len())'
            print(f'{node}\t{(folder / "n").read_text()}')
        elif node != 'READY':
            fail(verb, f'This TPU has terminal state "{node}", so it cannot be used anymore.')
        else:
            ssh(folder, options)


main(sys.argv[1:])
