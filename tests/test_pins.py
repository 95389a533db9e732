"""requirements.txt: what is installed is what is pinned, and the pinned compiler reads what the pinned jax writes."""
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.markers import Marker

from nano import UserError, runtime

ROOT = Path(__file__).resolve().parent.parent
FILES = ['requirements.txt', 'tests/requirements.txt']


def pins(name):
    """[(package, version)] of the lines that hold for this Python, of which every one must be an exact pin."""
    found = []
    for line in (ROOT / name).read_text().splitlines():
        line, _, condition = line.split('#')[0].partition(';')
        if line.strip() and not (condition.strip() == 'python_version >= "3.12"' and sys.version_info < (3, 12)):
            assert re.fullmatch(r'[A-Za-z0-9_.-]+==[0-9A-Za-z.]+', line.strip()), line
            found.append(tuple(line.strip().split('==')))
    return found


@pytest.mark.parametrize('name', FILES)
def test_installed_is_what_is_pinned(name):
    for package, version in pins(name):
        assert importlib.metadata.version(package).split('+')[0] == version, package  # torch may be 2.9.0+cpu


def test_every_package_that_a_pin_brings_is_pinned():
    """But for torch's CUDA libraries, which torch pins itself and a machine without a GPU can do without."""
    normal = {re.sub(r'[-_.]+', '-', package).lower() for name in FILES for package, _ in pins(name)}
    for package in normal:
        for need in importlib.metadata.requires(package) or []:
            needed, condition = re.match(r'([A-Za-z0-9_.-]+)[^;]*;?(.*)', need).groups()
            if not condition.strip() or Marker(condition.strip()).evaluate({'extra': ''}):
                needed = re.sub(r'[-_.]+', '-', needed).lower()
                assert needed in normal or re.match('nvidia-|triton$', needed), f'{package} needs {needed}'


@pytest.mark.parametrize('installed, message', [
    ({'torch': '2.10.0'}, 'torch is 2.10.0, not 2.9.0'),
    ({'torch_xla': '2.8.1', 'libtpu': '0.0.21'}, 'torch_xla is 2.8.1, not 2.9.0; libtpu is 0.0.21, not 0.0.22'),
    ({'jaxlib': None}, 'jaxlib 0.7.1 is missing'),
    ({'torch': '2.9.0+cpu'}, None),
])
def test_other_versions_are_one_line_at_the_start(installed, message, monkeypatch, capsys):
    version = importlib.metadata.version

    def other(name):
        if name in installed and installed[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed.get(name) or version(name)

    monkeypatch.setattr(importlib.metadata, 'version', other)
    if message is None:
        assert 'torch 2.9.0' in runtime.check_versions()
        return
    with pytest.raises(UserError, match=re.escape(message)) as e:
        runtime.start('cpu')
    assert '\n' not in str(e.value) and 'launch.sh' in str(e.value)
    monkeypatch.setattr(sys, 'version_info', (3, 10, 12))
    with pytest.raises(UserError, match='3.11, 3.12 and 3.13 only'):
        runtime.start('cpu')


KERNEL = '''
import jax, jax.numpy as jnp, importlib.metadata
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

topology = topologies.get_topology_desc('v5e:2x2', platform='tpu')
chip = jax.sharding.SingleDeviceSharding(topology.devices[0])
x = jax.ShapeDtypeStruct((1, 2, 256, 128), jnp.bfloat16, sharding=chip)
loss = lambda q, k, v: flash_attention(q, k, v, causal=True).astype(jnp.float32).sum()
for f in (flash_attention, jax.grad(loss, argnums=(0, 1, 2))):
    text = jax.jit(f).trace(x, x, x).lower(lowering_platforms=('tpu',)).compile().as_text()
    print('kernels:', text.count('tpu_custom_call'))
'''


def test_libtpu_compiles_a_kernel_that_jax_writes(tmp_path):
    """jax's flash attention, forward and backward, for a v5e that is not there (libtpu 0.0.21 fails: see the pin)."""
    import libtpu
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'TPU_LIBRARY_PATH': libtpu.get_library_path(),
           'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TPU_LOG_DIR': 'disabled'}
    done = subprocess.run([sys.executable, '-c', KERNEL], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=300)
    counts = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith('kernels:')]
    assert done.returncode == 0 and len(counts) == 2 and min(counts) > 0, done.stderr[-3000:]
