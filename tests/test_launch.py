"""launch.sh, with stand-ins for the Pythons, pip and uv of a machine; and once for real, with a wheel made here.

A stand-in Python answers launch.sh's questions as its version would, makes a .venv that holds itself, notes what pip is
asked to do, and runs scripts by the Python of these tests. The machine's own tools are on PATH, but no other Python.
"""
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = 'bash cat cp df dirname flock grep head mkdir mv rm sed sha256sum sleep tail timeout uname env'.split()
NASTY = ['', 'a b', "it's", '"x"', '$HOME `id` $(id) \\', 'a\nb', '*', '--x=y z', '-', 'ü', '!', ';', '&&', '#']

PYTHON = '''#!{python} -I
import json, os, shutil, sys, time
me, args = os.path.abspath(__file__), sys.argv[1:]
facts = json.load(open(me + '.json'))
say = lambda *x: print(*x, file=open({log!r}, 'a'))
if args[0] == '-Ic' and 'ctypes' in args[1]:
    sys.exit(facts['unfit']) if facts['unfit'] else print(me)
elif args[0] == '-Ic' and 'version_info' in args[1] and 'torch_xla' not in args[1]:
    print(facts['version'])
elif args[0] == '-Ic':
    sys.exit(facts['no_venv'] and 'ensurepip' in args[1])
elif args[:2] == ['-m', 'venv']:
    say('venv by', facts['version'])
    os.makedirs(args[2] + '/bin', exist_ok=True)
    for end in ('', '.json'):
        shutil.copy(me + end, args[2] + '/bin/python' + end)
elif args[:2] == ['-m', 'pip']:
    if '--target' in args:  # that is how uv is fetched
        sys.exit('no uv here')
    say('pip', *args[2:])
    print('pip runs', flush=True)
    time.sleep(facts['pip_s'])
    if facts['pip_fails']:
        sys.exit('ERROR: No space left on device')
    say('pip done')
elif args[0] == '-m':
    print(args)
else:
    os.execv({python!r}, [{python!r}, *args])
'''
UV = '''#!{python} -I
import os, shutil, sys
args = sys.argv[1:]
say = lambda *x: print(*x, file=open({log!r}, 'a'))
if args[:2] == ['python', 'install']:
    say('uv python install', args[2])
elif args[:2] == ['python', 'find']:
    print({fetched!r})
elif args[0] == 'venv':
    say('uv venv')
    os.makedirs(args[-1] + '/bin', exist_ok=True)
    for end in ('', '.json'):
        shutil.copy(args[args.index('--python') + 1] + end, args[-1] + '/bin/python' + end)
elif args[:2] == ['pip', 'install']:
    say('uv', *[a for a in args if a.startswith(('--torch', '--dry', '-r'))])
    sys.exit({silent!r} == 'all' or {silent!r} in args)
'''


class Machine:
    """A checkout with launch.sh in a folder with an awkward name, and a PATH with chosen Pythons."""

    def __init__(self, tmp):
        self.tmp, self.log, self.bin = tmp, tmp / 'log.txt', tmp / 'bin'
        self.checkout = tmp / "a checkout's & $HOME"
        (self.checkout / 'tests').mkdir(parents=True)
        (self.checkout / 'data').mkdir()
        shutil.copy(ROOT / 'launch.sh', self.checkout)
        (self.checkout / 'requirements.txt').write_text('a==1\n')
        (self.checkout / 'tests' / 'requirements.txt').write_text('b==1\n')
        for name in ('train_gpt.py', 'data/text.py'):
            (self.checkout / name).write_text(
                "import json, os, sys\nif __name__ == '__main__':\n"
                '    print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["PYTHONPATH"]]))\n')
        (self.checkout / 'data' / 'bpe.py').write_text('import re\n')  # imported only
        self.bin.mkdir()
        for tool in TOOLS:
            os.symlink(shutil.which(tool), self.bin / tool)
        self.log.touch()

    def python(self, name, version, unfit='', no_venv=False, pip_s=0, pip_fails=False, where=None):
        path = (where or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PYTHON.format(python=sys.executable, log=str(self.log)))
        path.chmod(0o755)
        Path(f'{path}.json').write_text(json.dumps(dict(version=version, unfit=unfit, no_venv=no_venv, pip_s=pip_s,
                                                        pip_fails=pip_fails)))
        return path

    def uv(self, fetched='', silent=None):
        path = self.bin / 'uv'
        path.write_text(UV.format(python=sys.executable, log=str(self.log), fetched=str(fetched), silent=silent))
        path.chmod(0o755)

    def start(self, *args, cwd=None, **env):
        env = {'PATH': str(self.bin), 'HOME': str(self.tmp / 'home'), **{k: str(v) for k, v in env.items()}}
        return subprocess.Popen(['bash', str(self.checkout / 'launch.sh'), *args], cwd=cwd or self.tmp, env=env,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)

    def run(self, *args, **env):
        child = self.start(*args, **env)
        child.out, child.err = child.communicate(timeout=60)
        return child

    def did(self):
        """What Pythons, pip and uv were asked to do since the last call."""
        done = self.log.read_text().splitlines()
        self.log.write_text('')
        return done


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


ONCE = ['venv by 3.12', 'pip install --no-input --disable-pip-version-check -rrequirements.txt', 'pip done']


def test_installs_once_and_passes_arguments_as_typed(machine):
    machine.python('python3.12', '3.12')
    (machine.checkout / 'show.py').write_text('import json, sys\nprint(json.dumps(sys.argv[1:]))\nsys.exit(7)\n')
    done = machine.run('show.py', *NASTY)
    assert json.loads(done.out.splitlines()[-1]) == NASTY and done.returncode == 7
    assert machine.did() == ONCE
    t = time.monotonic()
    done = machine.run('show.py', *NASTY, PYTHON='python3.12')
    assert json.loads(done.out) == NASTY and done.returncode == 7 and done.err == ''
    assert machine.did() == [] and time.monotonic() - t < 5


def test_default_script_working_folder_and_import_path(machine):
    machine.python('python3', '3.13')
    args, cwd, path = json.loads(machine.run(PYTHONPATH='/elsewhere', PYTHONHOME='/elsewhere').out.splitlines()[-1])
    assert args == ['--device', 'cpu'] and cwd == str(machine.tmp)  # where the user stands: paths mean what was typed
    assert path == str(machine.checkout)
    assert json.loads(machine.run('data/text.py', 'x', cwd='/').out)[:2] == [['x'], '/']


def test_a_startup_script_has_no_home(machine):
    machine.python('python3.12', '3.12')
    (machine.checkout / 'show.py').write_text('import os\nprint(os.environ["HOME"], os.getcwd())\n')
    done = subprocess.run(['env', '-i', f'PATH={machine.bin}', 'bash', machine.checkout / 'launch.sh', 'show.py'],
                          cwd='/', stdin=subprocess.DEVNULL, text=True, capture_output=True)
    assert done.stdout.splitlines()[-1] == f'{pwd.getpwuid(os.getuid()).pw_dir} /', done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason='only root can give a checkout away')
def test_root_in_a_users_checkout_of_a_worker(machine):
    machine.python('python3.12', '3.12')
    shutil.chown(machine.checkout, 'nobody')
    for tool in ('id', 'stat'):
        os.symlink(shutil.which(tool), machine.bin / tool)
    done = machine.run('train_gpt.py', TPU_WORKER_HOSTNAMES='a,b')
    assert done.returncode == 1 and "is nobody's, who could then" in done.err and machine.did() == []
    assert f'sudo -H -u nobody bash {machine.tmp}/a\\ checkout' in done.err
    assert machine.run('train_gpt.py').returncode == 0  # no worker


@pytest.mark.skipif(os.path.exists('/dev/accel0') or os.path.exists('/dev/vfio/0'), reason='this machine has a TPU')
def test_device_cpu_is_added_and_said_where_there_is_no_tpu(machine):
    machine.python('python3.12', '3.12')
    machine.run()
    for args, added in [(['--lr', '1'], True), (['--device', 'cpu'], False), (['--device=tpu'], False),
                        (['--out', 'a --device b'], True), (['--plan', 'v5e-16'], False), (['--plan=v4-8'], False),
                        (['--plan_json', 'x'], True)]:
        done = machine.run('train_gpt.py', *args)
        assert json.loads(done.out)[0] == (['--device', 'cpu'] if added else []) + args
        assert done.err == ('launch.sh: no TPU here, so it runs with --device cpu\n' if added else '')
    assert json.loads(machine.run('data/text.py').out)[0] == []


def test_unknown_script_and_misplaced_options(machine):
    for args, text in [(['train_gtp.py'], "no script 'train_gtp.py'; there are: train_gpt.py, data/text.py, test"),
                       (['data'], "no script 'data'; there are"), (['--steps', '3'], 'the script comes first')]:
        done = machine.run(*args)
        assert done.returncode == 2 and done.err.startswith(f'error: {text}') and done.err.count('\n') == 1
    assert not (machine.checkout / '.venv').exists()
    (machine.checkout / 'launch').mkdir()
    shutil.copy(ROOT / 'launch' / 'slice.sh', machine.checkout / 'launch')
    done = machine.run('--help')
    assert done.returncode == 0 and 'bash launch.sh SCRIPT ARGS...' in done.out and 'set -' not in done.out
    assert '--keep-alive' in done.out
    for name in ('bpe', 'manifest', 'sources'):  # and with this repository's own files
        shutil.copy(ROOT / 'data' / f'{name}.py', machine.checkout / 'data')
    assert machine.run('x').err.endswith('; there are: train_gpt.py, data/manifest.py, data/text.py, test\n')


def test_tests_have_their_own_requirements_and_default_arguments(machine):
    machine.python('python3.12', '3.12')
    machine.run()
    assert machine.did() == ONCE
    done = machine.run('test', cwd='/')
    assert done.out.splitlines()[-1] == str(['-m', 'pytest', '-q', '-m', 'not slow', '-n', '2', '--dist', 'loadfile', 'tests'])
    assert machine.did() == [ONCE[1] + ' -rtests/requirements.txt', ONCE[2]]  # beside the others, .venv not made again
    assert machine.run('test', '-k', 'a or b').out == str(['-m', 'pytest', '-k', 'a or b']) + '\n'
    machine.run()
    assert machine.did() == []


def test_changed_requirements_are_installed_into_the_same_venv(machine):
    machine.python('python3.12', '3.12')
    machine.run()
    mine = machine.checkout / '.venv' / 'mine'
    mine.touch()
    machine.did()
    (machine.checkout / 'requirements.txt').write_text('a==2\n')
    machine.run()
    assert machine.did() == ONCE[1:] and mine.exists()


def test_which_python(machine):
    machine.python('python3', '3.10', unfit='is Python 3.10')
    machine.python('python3.13', '3.13', unfit='lacks its library')
    machine.python('python3.11', '3.11')
    own = machine.python('python3', '3.12', where=machine.tmp / 'home/.pyenv/versions/3.12.1/bin')
    machine.run()
    assert machine.did()[0] == 'venv by 3.11'  # the newest that fits
    machine.run(PYTHON=own)
    assert machine.did()[0] == 'venv by 3.12'  # another is asked for
    machine.run()
    assert machine.did() == []  # .venv's is as good as any
    (machine.bin / 'python3.11').unlink()
    shutil.rmtree(machine.checkout / '.venv')
    machine.run()
    assert machine.did()[0] == 'venv by 3.12'  # pyenv's, which is not on PATH
    done = machine.run(PYTHON='python3')
    assert done.returncode == 1 and 'PYTHON=python3 does not fit' in done.err and 'python3 is Python 3.10' in done.err


def test_only_python_310(machine):
    """As on Ubuntu 22.04's TPU images: uv fetches a Python, or the message says how to get one."""
    machine.python('python3', '3.10', unfit='is Python 3.10')
    done = machine.run()
    assert done.returncode == 1 and machine.did() == []
    for text in ('python3 is Python 3.10', 'Python 3.11, 3.12 or 3.13 is needed', 'pip install uv',
                 'ppa:deadsnakes/ppa', 'PYTHON=/path/to/python3.12'):
        assert text in done.err
    machine.uv(fetched=machine.python('python3.12', '3.12', where=machine.tmp / 'uv'))
    done = machine.run()
    assert done.returncode == 0, done.err
    assert machine.did()[:2] == ['uv python install 3.12', 'venv by 3.12']


def test_python_without_venv(machine):
    """Debian and Ubuntu package ensurepip apart."""
    machine.python('python3', '3.12', no_venv=True)
    done = machine.run()
    assert done.returncode == 1 and 'sudo apt-get install python3.12-venv' in done.err and machine.did() == []
    machine.uv()
    assert machine.run().returncode == 0 and machine.did()[0] == 'uv venv'


def test_uv_prefers_the_cpu_build_if_its_index_answers(machine):
    machine.python('python3.12', '3.12')
    plain, cpu = 'uv -rrequirements.txt', 'uv --torch-backend=cpu -rrequirements.txt'
    no_gpu, large, pip = not os.path.exists('/dev/nvidiactl'), 'so the large CUDA build is taken', 'so pip installs'
    cases = [('--torch-backend=cpu', {}, [cpu + ' --dry-run'] * no_gpu + [plain + ' --dry-run', plain]),
             ('all', {}, [cpu + ' --dry-run'] * no_gpu + [plain + ' --dry-run', *ONCE[1:]]),
             (None, {'UV': 'no'}, ONCE[1:]), (None, {}, [cpu + ' --dry-run', cpu] if no_gpu else None)]
    for silent, env, did in cases:
        machine.uv(silent=silent)
        err = machine.run(**env).err
        assert (large in err, pip in err) == (no_gpu and silent == '--torch-backend=cpu', silent == 'all'), err
        assert err.count('checking that torch_xla imports') == 1
        assert machine.did() == ['venv by 3.12', *(did or [plain + ' --dry-run', plain])]
        shutil.rmtree(machine.checkout / '.venv')


def test_a_failed_install_says_so_and_is_begun_anew(machine):
    machine.python('python3.12', '3.12', pip_fails=True)
    for _ in range(2):
        done = machine.run()
        assert done.returncode == 1 and '[[' not in done.out
        assert 'ERROR: No space left on device' in done.err
        assert re.search(r'\nerror: the packages could not be installed.*network.*disk.*\n$', done.err)
        assert machine.did() == ONCE[:2]
    machine.python('python3.12', '3.12')
    done = machine.run()
    assert done.returncode == 0 and 'is unfinished' in done.err and machine.did() == ONCE
    machine.python('python', '3.12', pip_fails=True, where=machine.checkout / '.venv' / 'bin')
    (machine.checkout / 'requirements.txt').write_text('a==2\n')
    assert machine.run().returncode == 1 and machine.did() == ONCE[1:2]  # an update that fails
    assert machine.run().returncode == 0 and machine.did() == ONCE


@pytest.mark.parametrize('sign', [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_install_is_begun_anew(machine, sign):
    machine.python('python3.12', '3.12', pip_s=90)
    child = machine.start()
    assert child.stdout.readline() == 'pip runs\n'
    os.killpg(child.pid, sign)  # Ctrl-C, or a preempted machine
    child.communicate(timeout=60)
    assert child.returncode != 0
    assert machine.did() == ONCE[:2]
    machine.python('python3.12', '3.12')
    done = machine.run()
    assert done.returncode == 0 and 'is unfinished' in done.err and machine.did() == ONCE


def test_two_launches_at_once_install_once(machine):
    machine.python('python3.12', '3.12', pip_s=2)
    first = machine.start()
    assert first.stdout.readline() == 'pip runs\n'
    second = machine.run()
    assert second.returncode == 0 and 'waiting for another launch' in second.err
    assert first.communicate(timeout=60)[0].startswith('[[') and first.returncode == 0
    assert machine.did() == ONCE


def test_a_running_script_holds_no_lock(machine):
    machine.python('python3.12', '3.12')
    (machine.checkout / 'wait.py').write_text('print("runs", flush=True)\nimport time\ntime.sleep(60)\n')
    child = machine.start('wait.py')
    try:
        assert 'runs\n' in (child.stdout.readline(), child.stdout.readline())
        (machine.checkout / 'requirements.txt').write_text('a==2\n')
        assert 'waiting' not in machine.run().err
    finally:
        child.terminate()  # exec: the script has launch.sh's own process id
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM


def test_a_moved_or_broken_venv_is_made_again(machine):
    machine.python('python3.12', '3.12')
    machine.run()
    machine.did()
    moved = machine.tmp / 'moved'
    machine.checkout.rename(moved)
    machine.checkout = moved
    done = machine.run()
    assert 'was moved' in done.err and machine.did() == ONCE
    (moved / '.venv/bin/python').unlink()  # as when the Python that it links to is removed
    done = machine.run()
    assert done.returncode == 0 and 'has another Python' in done.err and machine.did() == ONCE
    assert [p.name for p in moved.iterdir() if p.name.startswith('.venv')] == ['.venv']


def test_a_venv_that_is_not_ours_is_left_alone(machine):
    machine.python('python3.12', '3.12')
    (machine.checkout / '.venv').mkdir()
    (machine.checkout / '.venv' / 'precious').touch()
    done = machine.run()
    assert done.returncode == 1 and "is not launch.sh's" in done.err
    assert os.listdir(machine.checkout / '.venv') == ['precious'] and machine.did() == []


def test_for_real(machine):
    """This Python's own venv and pip, and a wheel that stands in for torch_xla: no stand-in else, and no network."""
    with zipfile.ZipFile(machine.checkout / 'torch_xla-1.0-py3-none-any.whl', 'w') as wheel:
        info = 'torch_xla-1.0.dist-info'
        wheel.writestr('torch_xla/__init__.py', '')
        wheel.writestr(f'{info}/METADATA', 'Metadata-Version: 2.1\nName: torch_xla\nVersion: 1.0\n')
        wheel.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        files = ['torch_xla/__init__.py', f'{info}/METADATA', f'{info}/WHEEL', f'{info}/RECORD']
        wheel.writestr(f'{info}/RECORD', ''.join(f'{name},,\n' for name in files))
    (machine.checkout / 'requirements.txt').write_text('./torch_xla-1.0-py3-none-any.whl\n')
    (machine.checkout / 'show.py').write_text('import sys, torch_xla\n'
                                              'print(torch_xla.__file__, sys.prefix, sys.argv[1:])\n')
    # The user's own settings that would send the packages elsewhere, and a home that cannot be written.
    env = dict(PYTHON=sys.executable, UV='no', PIP_USER='1', PIP_TARGET='/nowhere', PYTHONPATH='/nowhere',
               HOME='/proc/none', VIRTUAL_ENV='/nowhere', PIP_NO_INDEX='1')
    venv = machine.checkout / '.venv'
    done = machine.run('show.py', *NASTY, **env)
    assert done.returncode == 0, done.err
    assert f'{venv}/lib' in done.out and f' {venv} {NASTY}' in done.out
    library = f'libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0'
    beside = list(venv.glob(f'lib/*/site-packages/torch_xla/lib/{library}'))
    assert [p.exists() for p in beside] == [True] * os.path.exists(f'{sys.base_prefix}/lib/{library}')
    done = machine.run('show.py', **env)
    assert done.returncode == 0 and done.err == '' and done.out.count('\n') == 1
    (machine.checkout / 'requirements.txt').write_text('no-such-package==1\n')
    done = machine.run('show.py', **env)
    assert done.returncode == 1 and 'no-such-package' in done.err and 'error: the packages could not be' in done.err


def test_shellcheck():
    subprocess.run([Path(sys.executable).parent / 'shellcheck', ROOT / 'launch.sh', ROOT / '.ci' / 'run'], check=True)
