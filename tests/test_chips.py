"""nano/chips.py: the table against what Google documents, and every name that is or is not a slice."""
import datetime
import math
import os
import random
import re
import subprocess
import sys

import pytest

from nano import UserError
from nano.chips import CHIP_NAMES, CHIPS, SLICES, find_slice
from nano.runtime import Runtime

# Name, topology, chips, hosts, dimensions that wrap. Topologies, chips and hosts of v5p: cloud.google.com/tpu/docs/v5p;
# topologies and chips of v5e: .../v5e; all topologies and wraps: AI-Hypercomputer/maxtext, accelerator_to_spec_map.py.
DOCUMENTED = [
    ('v5e-1', '1x1', 1, 1, '00'), ('v5e-4', '2x2', 4, 1, '00'), ('v5e-8', '2x4', 8, 1, '00'),
    ('v5e-16', '4x4', 16, 4, '00'), ('v5e-32', '4x8', 32, 8, '00'), ('v5e-64', '8x8', 64, 16, '00'),
    ('v5e-128', '8x16', 128, 32, '01'), ('v5e-256', '16x16', 256, 64, '11'),
    ('v5p-8', '2x2x1', 4, 1, '000'), ('v5p-16', '2x2x2', 8, 2, '000'), ('v5p-32', '2x2x4', 16, 4, '000'),
    ('v5p-64', '2x4x4', 32, 8, '000'), ('v5p-128', '4x4x4', 64, 16, '111'), ('v5p-256', '4x4x8', 128, 32, '111'),
    ('v5p-384', '4x4x12', 192, 48, '111'), ('v5p-512', '4x8x8', 256, 64, '111')]
DOCUMENTED += [(name.replace('v5e', 'v6e').replace('v5p', 'v4'), *rest) for name, *rest in DOCUMENTED]


def refused(name):
    with pytest.raises(UserError) as e:
        find_slice(name)
    text = str(e.value)
    assert len(text.splitlines()) == 1 and 'is not a slice' in text, text
    return text


def listed(text):
    """The names in an error's 'v4-{8,16}, v5e-{1}'."""
    return [f'{chip}-{n}' for chip, numbers in re.findall(r'(\w+)-\{([\d,]+)\}', text) for n in numbers.split(',')]


@pytest.mark.parametrize('name,topology,chips,hosts,wrap', DOCUMENTED)
def test_slices_are_as_documented(name, topology, chips, hosts, wrap):
    s = find_slice(name)
    assert (s.name, s.topology, s.n_chips, s.hosts) == (name, topology, chips, hosts)
    assert s.wrap == tuple(w == '1' for w in wrap) and len(s.wrap) == s.chip.torus_dims
    assert s.chip is CHIPS[name.split('-')[0]] and s.n_slices == 1 and s.chips_per_slice == math.prod(s.shape) == chips


def test_there_are_no_slices_but_these():
    assert set(SLICES) == {name for name, *_ in DOCUMENTED}


def test_other_ways_to_write_a_name():
    assert find_slice('v5litepod-16') == find_slice(' V5E-16\n') == find_slice('1xv5e-16') == find_slice('v5e-16')
    for name in ('2xv5e-256', '2xV5LITEPOD-256'):
        s = find_slice(name)
        assert (s.name, s.n_slices, s.chips_per_slice, s.n_chips, s.hosts) == ('2xv5e-256', 2, 256, 512, 128)
        assert s.topology == '16x16' and s.wrap == (True, True)
    assert find_slice('3xv6e-8').hosts == 3


@pytest.mark.parametrize('name,close', [
    ('v5e-24', 'v5e-16'), ('v5litepod-250', 'v5e-256'), ('v5lite-16', 'v5e-16'), ('v6e64', 'v6e-64'),
    ('2xv6e_64', 'v6e-64'), ('0xv5e-16', 'v5e-16'), ('-1xv5e-16', 'v5e-16'), ('v5p-4', 'v5p-8'), ('v4-9999', 'v4-512'),
    ('v6-64', 'v6e-64')])
def test_a_near_miss_names_the_closest(name, close):
    text = refused(name)
    assert f'did you mean {close}?' in text and close in listed(text)


def test_errors_list_what_there_is():
    for chip in CHIPS:
        text = refused(f'{chip}-7')
        assert listed(text) == [name for name in SLICES if name.startswith(chip)]
        assert ('TensorCores, two to a chip' in text) == (chip in ('v4', 'v5p'))
    for name in ('', 'v3-32', 'h100', 'x'):
        text = refused(name)
        assert listed(text) == list(SLICES) and 'did you mean' not in text
        assert 'a v4 or v5p counts TensorCores' in text
    for name in listed(refused('')) + re.findall(r'as in (\S+)', refused('')):
        assert find_slice(name).name == name


def test_junk_is_refused(seed):
    rng = random.Random(seed)
    for _ in range(5000):
        junk = ''.join(rng.choices('v456ep-x0128 \n\t{}%\'"é١²\x00', k=rng.randrange(12)))
        try:
            assert find_slice(junk).name.removeprefix('1x').split('x')[-1] in SLICES
        except UserError as e:
            assert len(str(e).splitlines()) == 1
    for name in ('v5e-' + '9' * 10000, '9' * 10000 + 'xv5e-16', 'v5e-16' * 1000, 'v5e-١٦', 'v5e-016', 'v5e-16x2',
                 'v5e-1\n6'):
        assert len(refused(name)) < 500


def test_chips_are_as_documented():
    peak = {'v4': 275, 'v5e': 197, 'v5p': 459, 'v6e': 918}  # TFLOP/s
    links = {'v5e': 400, 'v5p': 1200, 'v6e': 800}  # GB/s of all links of a chip, both ways
    assert {name: chip.peak_tflops for name, chip in CHIPS.items()} == peak
    for name, chip in CHIPS.items():
        assert chip.name == name and chip.cores == (2 if name in ('v4', 'v5p') else 1)
        assert .95 * chip.hbm_gib < chip.usable_gib < 1.01 * chip.hbm_gib
        assert chip.peak_tflops == pytest.approx(chip.cores * 4 * 2 * chip.mxu**2 * chip.clock_ghz / 1e3, rel=.003)
        if name in links:
            assert .85 < chip.link_gbs * 2 * 2 * chip.torus_dims / links[name] <= 1


TOO_LARGE = '''
import sys, jax
from jax.experimental import topologies

name, config = sys.argv[1:]
chip = topologies.get_topology_desc(name, 'tpu', **({'chip_config_name': config} if config else {})).devices[0]
x = jax.ShapeDtypeStruct((2**15, 2**15), 'float32', sharding=jax.sharding.SingleDeviceSharding(chip))  # 4 GiB
print(chip.device_kind, flush=True)
jax.jit(lambda *xs: [x + 1 for x in xs]).trace(*[x] * 30).lower(lowering_platforms=('tpu',)).compile()
'''


@pytest.mark.parametrize('chip,topology,config', [('v4', 'v4:2x2x1', 'megacore'), ('v5e', 'v5e:2x2', ''),
                                                  ('v5p', 'v5:2x2x1', 'megacore'), ('v6e', 'v6e:2x2', '')])
def test_libtpu_says_how_much_memory_there_is(tmp_path, chip, topology, config):
    """It compiles for chips that are not there, and refuses a program of 240 GiB with the size of the memory."""
    import libtpu
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'TPU_LIBRARY_PATH': libtpu.get_library_path(),
           'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TPU_LOG_DIR': 'disabled'}
    done = subprocess.run([sys.executable, '-c', TOO_LARGE, topology, config], cwd=tmp_path, env=env,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert CHIP_NAMES[done.stdout.strip()] == chip, done.stderr[-3000:]
    limits = set(re.findall(r'Used [\d.]+G of ([\d.]+)G hbm', done.stderr))
    assert limits == {f'{CHIPS[chip].usable_gib:.2f}'}, done.stderr[-3000:]


def test_a_runtime_knows_its_peak():
    assert CHIP_NAMES == {'TPU v4': 'v4', 'TPU v5 lite': 'v5e', 'TPU v5e': 'v5e', 'TPU v5': 'v5p', 'TPU v5p': 'v5p',
                          'TPU v6 lite': 'v6e', 'TPU v6e': 'v6e'}
    assert Runtime('v5e', 16, 0, 4, '', (0, 1, 4, 5)).peak_flops == 16 * 197e12
    assert Runtime('cpu', 8, 0, 1, '', ()).peak_flops is Runtime('TPU v9', 8, 0, 1, '', ()).peak_flops is None


def test_prices():
    for chip in CHIPS.values():
        price = chip.price
        assert 0 < (price.spot or .01) < price.on_demand < 10 and re.fullmatch(r'[a-z]+-[a-z]+\d', price.region)
        assert datetime.date(2024, 1, 1) < datetime.date.fromisoformat(price.read)
        assert price.source.startswith('https://')
    assert CHIPS['v6e'].price.on_demand == 2.70  # as in the announcement that it is for sale, of December 2024
