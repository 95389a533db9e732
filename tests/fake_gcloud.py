"""A stand-in for gcloud: workers are folders of this machine, and each command runs there with the worker's HOME.

It has the commands, flags and states of these pages, and refuses others:
  https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm/ssh, .../tpu-vm/describe, .../tpu-vm/delete
  https://cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources/create, .../describe, .../delete
  https://cloud.google.com/sdk/gcloud/reference (--project, --quiet, --format: "gcloud wide flags")
  https://cloud.google.com/tpu/docs/queued-resources (the states of a request)
  https://cloud.google.com/tpu/docs/runtimes (the software version of each chip)
  https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e (types, and how many hosts they have)
That ssh takes exit code 255 for a lost connection, and repeats the command with what is left of stdin, is from the
source of the real one (SDK 528). The folder $FAKE_CLOUD holds calls.jsonl, SLICE/ for each slice (state, n, wN/), and
the faults that a test puts there: error; for ssh to worker N, sshN: refused, slow S, lost (when done), cut BYTES (of
stdin).
"""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CLOUD = Path(os.environ['FAKE_CLOUD'])
# 'name=' wants a value. What gcloud requires is in capitals.
FLAGS = {
    'tpu-vm ssh': 'command= dry-run force-key-file-overwrite internal-ip output-directory= plain ssh-flag= '
                  'ssh-key-expiration= ssh-key-expire-after= ssh-key-file= strict-host-key-checking= worker=',
    'tpu-vm describe': '',
    'tpu-vm delete': 'async',
    'queued-resources create': 'ACCELERATOR-TYPE= RUNTIME-VERSION= NODE-ID= async boot-disk= data-disk= description= '
                               'guaranteed internal-ips labels= metadata= metadata-from-file= network= range= reserved '
                               'scopes= service-account= shielded-secure-boot spot subnetwork= tags= '
                               'valid-after-duration= valid-after-time= valid-until-duration= valid-until-time=',
    'queued-resources describe': '',
    'queued-resources delete': 'async force'}
FORMATS = {'queued-resources describe': ('value(state.state)', 'json(state)'),
           'tpu-vm describe': ('value(state,networkEndpoints.len())',)}
# By the beginning of a type: its software version; what its number counts for a chip; the most on one host; for a host
# of several.
TYPES = {'v4': ('tpu-ubuntu2204-base', 2, 4, 4), 'v5litepod': ('v2-alpha-tpuv5-lite', 1, 8, 4),
         'v5p': ('v2-alpha-tpuv5', 2, 4, 4), 'v6e': ('v2-alpha-tpuv6e', 1, 8, 4)}


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


def hosts_of(kind, runtime):
    """How many hosts a type has. Fails for a type that is none, and for another chip's software version."""
    name, _, number = kind.partition('-')
    if name not in TYPES or not number.isdigit():
        fail('queued-resources create', f'INVALID_ARGUMENT: Accelerator type {kind} not found')
    version, units, one_host, several = TYPES[name]
    if runtime != version:
        fail('queued-resources create', f'INVALID_ARGUMENT: Runtime version {runtime} is not supported by {kind}')
    chips = int(number) // units
    return 1 if chips <= one_host else chips // several


def make(folder):
    for i in range(int((folder / 'n').read_text())):
        python = folder / f'w{i}' / 'nano' / '.venv' / 'bin' / 'python'
        python.parent.mkdir(parents=True)
        # Never the pip of the Python that runs these tests: what it is asked for is noted.
        python.write_text('#!/bin/sh\n[ "$1 $2" != "-m pip" ] || { echo "$*" >>~/pip; exit; }\n'
                          f'exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        stamp = f'{folder}/w{i}/nano, Python {sys.version_info[0]}.{sys.version_info[1]}\n'
        (python.parent.parent / 'launch.stamp').write_text(stamp + (CLOUD / 'hashes').read_text())


def ssh(folder, options):
    if 'command' not in options:
        fail('tpu-vm ssh', 'the stand-in has no terminal')
    n = int((folder / 'n').read_text())
    if options.get('worker') == 'all':  # at once; the first code that is not 0 counts
        alone = [[a for a in sys.argv if a != '--worker=all'] + [f'--worker={i}'] for i in range(n)]
        children = [subprocess.Popen([sys.executable, *args], stdin=subprocess.DEVNULL) for args in alone]
        sys.exit(next((code for code in [c.wait() for c in children] if code), 0))
    i = int(options.get('worker', 0))
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
            lost, part = what == 'lost', None
            if what.startswith('cut'):
                lost, part = True, b''
                while len(part) < int(what.split()[1]) and (byte := os.read(0, 1)):
                    part += byte
            code = subprocess.run(['bash', '-c', options['command']], env=env, cwd=home, start_new_session=True,
                                  input=part, stdout=subprocess.DEVNULL if lost else None).returncode
            code = 255 if lost else code
        if code != 255:
            sys.exit(code)
        print('Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].', file=sys.stderr)
    fail('tpu-vm ssh', '[/usr/bin/ssh] exited with return code [255].', 255)


def parse(args):
    """(command, name, options), or exit code 2, as for argparse."""
    verb, options, names = ' '.join(args[2:4]), {}, []
    if args[:2] != ['compute', 'tpus'] or verb not in FLAGS:
        fail('', f"Invalid choice: '{' '.join(args)}'", 2)
    known = f'{FLAGS[verb].lower()} zone= project= quiet format='.split()
    for arg in args[4:]:
        name, equals, value = arg[2:].partition('=')
        if not arg.startswith('-'):
            names.append(arg)
        elif not arg.startswith('--') or name + equals not in known:
            fail(verb, f'unrecognized arguments: {arg}', 2)
        else:
            options[name] = value
    missing = [flag for flag in FLAGS[verb].split() if flag.isupper() and flag.lower().rstrip('=') not in options]
    if len(names) != 1 or missing:
        fail(verb, f'argument {" ".join(missing) or "NAME"}: Must be specified.', 2)
    if 'zone' not in options:
        fail(verb, 'The required property [compute/zone] is not currently set.')
    if options.get('format', '') not in ('', *FORMATS.get(verb, ())):
        fail(verb, 'the stand-in does not know this format')
    return verb, names[0], options


def main(args):
    with open(CLOUD / 'calls.jsonl', 'a') as f:
        f.write(json.dumps(args) + '\n')
    verb, name, options = parse(args)
    if error := fault('error'):
        fail(verb, error)
    folder = CLOUD / name
    state = folder / 'state'
    if verb == 'queued-resources create':
        n = hosts_of(options['accelerator-type'], options['runtime-version'])
        try:
            folder.mkdir()
        except FileExistsError:
            fail(verb, f"ALREADY_EXISTS: Resource 'projects/p/locations/{options['zone']}/queuedResources/{name}' "
                 'already exists')
        (folder / 'n').write_text(str(n))
        state.write_text('WAITING_FOR_RESOURCES PROVISIONING ACTIVE')
        return
    if not folder.exists():
        fail(verb, f"NOT_FOUND: Resource 'projects/p/locations/{options['zone']}/nodes/{name}' was not found")
    states = state.read_text().split()
    if verb.endswith('delete'):
        if verb.startswith('queued') and states[0] == 'ACTIVE' and 'force' not in options:
            fail(verb, 'FAILED_PRECONDITION: the queued resource has nodes')
        subprocess.run(['mv', folder, CLOUD / f'deleted-{name}-{time.time_ns()}'], check=True)
    elif verb == 'queued-resources describe':
        print(states[0])
        if len(states) > 1:
            if states[1] == 'ACTIVE':
                make(folder)
            state.write_text(' '.join(states[1:]))
    else:
        node = {'ACTIVE': 'READY', 'PROVISIONING': 'CREATING', 'SUSPENDING': 'PREEMPTED'}.get(states[0])
        if not node:  # "SUSPENDED: the resources are deleted"
            fail(verb, f"NOT_FOUND: Resource 'projects/p/locations/{options['zone']}/nodes/{name}' was not found")
        if verb == 'tpu-vm describe':
            print(f'{node}\t{(folder / "n").read_text()}')
        elif node != 'READY':
            fail(verb, f'This TPU has terminal state "{node}", so it cannot be used anymore.')
        else:
            ssh(folder, options)


main(sys.argv[1:])
