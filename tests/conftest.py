"""What every test needs before torch_xla starts: 8 virtual CPU devices, and one printed seed for all random cases."""
import os
import random
import signal
import subprocess
import sys

# The runtime reads both when its client is made, once per process, so this stands before any test imports torch_xla.
os.environ['PJRT_DEVICE'] = 'CPU'
os.environ['CPU_NUM_DEVICES'] = '8'
# LLVM's optimizations take 3/4 of the 10 to 25 s of compiling a tiny training step, and save nothing at that size.
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_backend_optimization_level=0'

# nohup and a shell's background have them ignored, which processes pass on: then no test of a signal could pass.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest  # noqa: E402

# NANO_SEED=N repeats a run whose random cases failed; without it each run draws new ones.
SEED = int(os.environ.get('NANO_SEED') or random.SystemRandom().randrange(10**6))
os.environ['NANO_SEED'] = str(SEED)  # for the processes of -n, which share it


def pytest_report_header(config):
    return f'random cases: repeat them with NANO_SEED={SEED}'


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get('failed'):  # with -q the header is not shown
        terminalreporter.write_line(f'random cases of this run: repeat them with NANO_SEED={SEED}')


@pytest.fixture
def seed():
    """The seed of this run; pytest shows what was printed beside a failure."""
    print(f'NANO_SEED={SEED}')
    return SEED


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    """A folder of token shards that data/text.py made of modules of the standard library, with 350 token ids."""
    out = str(tmp_path_factory.mktemp('corpus') / 'shards')
    library = os.path.dirname(os.__file__)
    files = [f'{library}/{name}.py' for name in 'abc argparse ast bdb bisect calendar cmd code codecs copy csv'.split()]
    script = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'data', 'text.py')
    subprocess.run([sys.executable, script, *files, '--split_on', r'\n\n\n', '--vocab_size', '350',
                    '--val_fraction', '0.1', '--workers', '1', '--out', out], check=True)
    return out
