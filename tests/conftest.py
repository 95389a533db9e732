"""What every test needs before torch_xla starts: 8 virtual CPU devices, and one printed seed for all random cases."""
import os
import random

# The runtime reads both when its client is made, once per process, so this stands before any test imports torch_xla.
os.environ['PJRT_DEVICE'] = 'CPU'
os.environ['CPU_NUM_DEVICES'] = '8'

import pytest  # noqa: E402

# NANO_SEED=N repeats a run whose random cases failed; without it each run draws new ones.
SEED = int(os.environ.get('NANO_SEED') or random.SystemRandom().randrange(10**6))


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
