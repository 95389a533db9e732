"""TPU chips, and the slices of them that can be rented: what they can do, how they are wired, what they cost."""
import difflib
import math
import re
from dataclasses import dataclass

from nano import UserError


@dataclass(frozen=True)
class Price:
    """List prices in USD for one chip for an hour, without discounts. Those of spot chips can change every day."""
    region: str
    on_demand: float
    spot: float | None
    read: str  # the day
    source: str


@dataclass(frozen=True)
class Chip:
    """Where no other source is given the figures are those of cloud.google.com/tpu/docs, pages "v4", "v5e", ..."""
    name: str
    peak_tflops: float  # bf16 TFLOP/s
    hbm_gib: float  # as advertised
    # What a program gets, in GiB: libtpu 0.0.22 refuses larger ones at compile time ("Used 144.00G of 15.75G hbm").
    usable_gib: float
    hbm_gbs: float  # GB/s
    # GB/s of one link to a neighbor, one way: jax-ml.github.io/scaling-book/tpus. The docs count all links of a chip,
    # both ways (v5e 400, v6e 800, v5p 1200), and so say 50, 100 and 100.
    link_gbs: float
    torus_dims: int  # each has two links
    # GB/s to other slices, one way: a host's network cards over its chips (2 x 100 Gbit/s for 8 chips of v5e, 4 x 200
    # for 8 of v6e by the docs' page "v6e"; v5p by the scaling book). v4's is not documented: taken as v5p's.
    dcn_gbs: float
    # GHz. The peak is cores x 4 MXUs x 2 x width^2 x clock.
    clock_ghz: float
    mxu: int  # width of a matrix unit: the docs' page "v6e" names both
    cores: int  # TensorCores; one device nevertheless, v4 and v5p run them as one ("megacore")
    chips_per_host: int  # where a slice has several hosts. A host is a VM, with one process
    chips_one_host: int  # the largest slice on one host: VM types ct5lp-hightpu-8t and ct6e-standard-8t have 8
    kinds: tuple[str, ...]  # the runtime's names: `xr.global_runtime_device_attributes()` and the PJRT device kind
    price: Price


# Google's prices as SkyPilot collects them from its billing API. The file has no date, so spot prices may be old.
_PRICES = ('2026-11-30', 'https://github.com/skypilot-org/skypilot-catalog/blob/'
           '2c3d7ea7d76bf84cf80d382e946c1609571485fd/catalogs/v9/gcp/vms.csv')

CHIPS = {chip.name: chip for chip in (
    #     peak, HBM, usable, HBM GB/s, link, dims, DCN, clock, MXU, cores, chips of a host, of the only one
    Chip('v4', 275, 32, 30.75, 1200, 45, 3, 6.25, 1.05, 128, 2, 4, 4, ('TPU v4',),
         Price('us-central2', 3.22, .9215, *_PRICES)),
    Chip('v5e', 197, 16, 15.75, 819, 45, 2, 3.125, 1.5, 128, 1, 4, 8, ('TPU v5 lite', 'TPU v5e'),
         Price('us-central1', 1.2, .2977, *_PRICES)),
    Chip('v5p', 459, 95, 95.74, 2765, 90, 3, 6.25, 1.75, 128, 2, 4, 4, ('TPU v5', 'TPU v5p'),
         Price('us-central1', 4.2, .7805, *_PRICES)),
    Chip('v6e', 918, 32, 31.25, 1638, 90, 2, 12.5, 1.75, 256, 1, 4, 8, ('TPU v6 lite', 'TPU v6e'),
         Price('us-central1', 2.7, .5927, *_PRICES)),
)}
CHIP_NAMES = {kind: chip.name for chip in CHIPS.values() for kind in chip.kinds}

# By the number of the torus's dimensions. Slices of v4 and v5p have other shapes too, on request, and go on to
# thousands of chips; these are what a name stands for (AI-Hypercomputer/maxtext, accelerator_to_spec_map.py).
TOPOLOGIES = {2: ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'),
              3: ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x4x12', '4x8x8')}


@dataclass(frozen=True)
class Slice:
    """Chips that are wired together, or `n_slices` such groups with only the data center's network between them."""
    name: str
    chip: Chip
    topology: str  # of one slice, chips in each dimension: '4x4', '2x2x4'
    n_slices: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.topology.split('x'))

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Whether each dimension closes to a ring; a line takes about twice as long for most collectives.

        v5e and v6e: at the pod's full 16. v4 and v5p: optical switches close all dimensions of whole 4x4x4 cubes.
        """
        if self.chip.torus_dims == 2:
            return tuple(n == 16 for n in self.shape)
        return (all(n % 4 == 0 for n in self.shape),) * 3

    @property
    def chips_per_slice(self) -> int:
        return math.prod(self.shape)

    @property
    def n_chips(self) -> int:
        """Of all slices."""
        return self.chips_per_slice * self.n_slices

    @property
    def hosts(self) -> int:
        """Of all slices."""
        one = self.chips_per_slice <= self.chip.chips_one_host
        return self.n_slices * (1 if one else self.chips_per_slice // self.chip.chips_per_host)


# A name's number counts TensorCores.
SLICES = {name: Slice(name, chip, topology) for chip in CHIPS.values() for topology in TOPOLOGIES[chip.torus_dims]
          for name in [f'{chip.name}-{chip.cores * math.prod(map(int, topology.split("x")))}']}


def find_slice(name: str) -> Slice:
    """'v5e-16' or 'v5litepod-16', 'v4-32', '2xv5e-256' (two slices), in any case. Raises UserError."""
    match = re.fullmatch(r'(?:([1-9][0-9]{0,3})x)?(v.*)', name.strip().lower())
    n, one = (int(match[1] or 1), match[2].replace('v5litepod-', 'v5e-')) if match else (1, '')
    if one not in SLICES:
        raise UserError(_unknown(name))
    found = SLICES[one]
    return found if n == 1 else Slice(f'{n}x{one}', found.chip, found.topology, n)


def _unknown(name: str) -> str:
    """What to say of a name that is none: the closest, and all of its chip, or of all chips."""
    typed = name.strip().lower()[:40].replace('v5lite', 'v5e')
    match = re.search('(' + '|'.join(CHIPS) + r')(?:[^0-9]*([0-9]+))?', typed)
    chips = [CHIPS[match[1]]] if match else list(CHIPS.values())
    numbers = {chip.name: [int(s.split('-')[1]) for s in SLICES if SLICES[s].chip == chip] for chip in chips}
    if match and match[2]:
        close = [f'{match[1]}-{min(numbers[match[1]], key=lambda n: abs(n - int(match[2])))}']
    else:
        close = difflib.get_close_matches(typed, SLICES, n=1, cutoff=.84)  # v6-64, but not v3-32 for v4-32
    text = f'{name[:40]!r} is not a slice' + ''.join(f' (did you mean {c}?)' for c in close) + ': there are '
    text += ', '.join(f'{c}-{{{",".join(map(str, ns))}}}' for c, ns in numbers.items())
    if cores := [chip.name for chip in chips if chip.cores == 2]:
        text += f' (the number of a {" or ".join(cores)} counts TensorCores, two to a chip)'
    return text + ', and several of one kind as in 2xv5e-256'
