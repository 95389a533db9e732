"""What this host is, and what it must have in common with the others before a run starts: code, versions, data."""
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import metadata as packages
from pathlib import Path

from launch import runs


def place():
    """(index, addresses) of this host among those of its slice; (0, ['localhost']) where there is no slice.

    The variables are those that torch_xla reads, and where they are not set, the attributes of the metadata server."""
    names = os.environ.get('TPU_WORKER_HOSTNAMES', '').split(',')
    index = os.environ.get('CLOUD_TPU_TASK_ID', os.environ.get('TPU_WORKER_ID'))
    if len(names) > 1 and index:
        return int(index), names
    if not runs.chips():
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
    for last in (False, False, True):
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError:
            raise
        except OSError:  # a startup script comes early
            if last:
                raise
            time.sleep(2)


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
    found = {'Python': sys.version.split()[0]}
    with contextlib.suppress(OSError):
        for name in re.findall(r'^([A-Za-z0-9_.-]+)==', (checkout / 'requirements.txt').read_text(), re.M):
            with contextlib.suppress(packages.PackageNotFoundError):
                found[name] = packages.version(name)
    return found


def option(args, name):
    """The value of --name, or ''. The last one counts, as for argparse."""
    found = ''
    for i, arg in enumerate(args):
        if arg == f'--{name}' and i + 1 < len(args):
            found = args[i + 1]
        elif arg.startswith(f'--{name}='):
            found = arg.partition('=')[2]
    return found


def name_of(script, args):
    """NANO_RUN, or the last part of --out, or the script's name: what tells the runs of a slice apart."""
    out = option(args, 'out').rstrip('/').rpartition('/')[2]
    name = os.environ.get('NANO_RUN') or out or Path(script).stem
    return re.sub(r'[^A-Za-z0-9._-]', '_', name).lstrip('.-') or 'run'


def fingerprint(data):
    """Of the manifest of a folder of shards: what it says but where the data came from. None without one."""
    try:
        manifest = json.loads((Path(data).expanduser() / 'manifest.json').read_text())
        manifest.pop('source', None)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
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
        if all(isinstance(v, dict) for v in values.values()):  # only what differs
            value = ', '.join(f'{k} {value.get(k, "missing")}' for k in sorted(set().union(*values.values()))
                              if len({v.get(k) for v in values.values()}) > 1)
        parts.append(f'worker {", ".join(map(str, members))}: {value}')
    return '; '.join(parts)
