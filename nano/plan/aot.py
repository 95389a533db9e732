"""Compiles a training step for TPUs that are not there.

Traced here: the script's own step, on virtual CPU devices and on placeholders, which hold no memory. Compiled in a child
process: the program with its shardings, by libtpu, Google's own TPU compiler, for a named slice. Nothing is run.
"""
import ast
import gzip
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable

import torch

from nano import UserError, say
from nano.chips import Slice

MAX_CLIENT = 64  # virtual devices; PyTorch breaks above 127, and annotations of more devices need no more of them
VERSION = 4  # of what a cached result holds


@dataclass
class Step:
    """A script's training step, ready to be traced. All tensors lie on the device and are marked."""
    weights: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]  # the optimizer's
    batch: dict[str, torch.Tensor]  # what a step gets from the host
    run: Callable[[], torch.Tensor]  # traces one step: updates weights and state in place, returns the metrics
    unit: str  # what throughput counts: 'tokens', 'images'
    units: int  # of them in a step
    steps: int  # of the whole run
    model_flops: float  # of a step, by the convention of the script's MFU
    flops_rule: str  # that convention, in words


@dataclass
class Traced:
    module: bytes  # MLIR bytecode
    key: str  # of what is computed: a hash that does not depend on where the operators come from
    n_devices: int
    parameters: dict[int, str]  # number of a program's input -> 'weights w_up_LDF', 'state ...', 'batch ...'
    local_bytes: dict[str, dict[str, int]]  # weights, state, batch: name -> bytes on each chip
    n_weights: int
    trace_s: float  # the host's time for a step that is traced again, as in a run
    step: Step


@dataclass
class Compiled:
    """What the compiler says. Sizes are bytes on each chip."""
    fits: bool
    total: int  # with what the runtime reserves; of a step that does not fit, at least
    limit: int
    reserved: int
    program: int  # gradients, activations, code
    arguments: int
    seconds: float
    hlo: str = ''  # the scheduled program; empty if it does not fit
    coords: list[tuple[int, ...]] = field(default_factory=list)  # of each device in the torus
    largest: list[tuple[int, str, str]] = field(default_factory=list)  # of the program: (bytes, shape, where from)
    rematerialized: tuple[int, int] = (0, 0)  # bytes before and after, if the compiler had to compute anew to fit
    warnings: list[str] = field(default_factory=list)
    cached: bool = False


class Placeholders(torch.overrides.TorchFunctionMode):
    """Tensors are made on the device, where nothing happens before a program runs, and are not filled."""
    make = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye, torch.arange}
    fill = {torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.zero_, torch.Tensor.fill_, torch.Tensor.copy_,
            torch.nn.init.trunc_normal_, torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.xavier_uniform_,
            torch.nn.init.kaiming_uniform_, torch.nn.init.kaiming_normal_, torch.nn.init.orthogonal_}

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in self.make:
            kwargs['device'] = self.device
            kwargs.pop('generator', None)
        if func in self.fill:
            return args[0] if args else kwargs['tensor']
        return func(*args, **kwargs)


def start(n_devices: int):
    """Starts torch_xla on virtual CPU devices that stand for a slice's chips; before anything else has imported it."""
    if 'torch_xla' in sys.modules:
        raise UserError('a plan needs a process of its own, in which torch_xla was not started before')
    os.environ.update(PJRT_DEVICE='CPU', CPU_NUM_DEVICES=str(min(n_devices, MAX_CLIENT)), JAX_PLATFORMS='cpu',
                      TPU_SKIP_MDS_QUERY='1', XLA_PARAMETER_WRAPPING_THREADSHOLD='100000',
                      XLA_HLO_DEBUG='1', XLA_IR_DEBUG='1')  # the last two write operators' names into the program
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    import torch_xla.runtime as xr
    xr.use_spmd()
    if n_devices > MAX_CLIENT:
        xr.global_runtime_device_count = lambda: n_devices


def trace(make: Callable[[torch.device], Step], n_devices: int) -> Traced:
    """`make(device)` builds the step: it is called with placeholders in place of tensors."""
    import torch_xla
    xla, device = torch_xla._XLAC, torch_xla.device()
    with Placeholders(device):
        step = make(device)
    groups = dict(weights=step.weights, state=step.state, batch=step.batch)
    inputs = {f'{group} {name}': t for group, tensors in groups.items() for name, t in tensors.items()}
    state = {name: t for name, t in inputs.items() if not name.startswith('batch ')}  # what a step writes over
    xla._clear_pending_irs(str(device))  # what is pending is never computed: its tensors become placeholders
    sharding = {name: xla._get_xla_sharding_spec(t) for name, t in inputs.items()}
    name_of = {xla._unique_id_for_ir_and_data(t): name for name, t in inputs.items()}
    metrics = step.run()
    context = xla.lowering.LoweringContext('step')
    context.build([metrics.detach(), *(t.detach() for t in state.values())])
    hlo = context.hlo()
    numbers = {}
    for number, t in context.device_parameter_id_tensor_mapping().items():
        if t.device.type == 'xla' and (name := name_of.get(xla._unique_id_for_ir_and_data(t))):
            numbers[name] = number
    module, key = _module(hlo, numbers, sharding, list(state))
    # The step again, as all those after the first: what scan and the kernels keep is there now, and no names are written.
    times, names = [], xla._get_ir_debug()
    xla._set_ir_debug(False)
    for _ in range(3):
        xla._clear_pending_irs(str(device))
        began = time.perf_counter()
        step.run()
        times.append(time.perf_counter() - began)
    xla._set_ir_debug(names)
    xla._clear_pending_irs(str(device))
    local = {group: {name: math.prod(local_shape(t.shape, sharding[f'{group} {name}'])) * t.element_size()
                     for name, t in tensors.items()} for group, tensors in groups.items()}
    return Traced(module, key, n_devices, {number: name for name, number in numbers.items()}, local,
                  sum(t.numel() for t in step.weights.values()), min(times), step)


def local_shape(shape: tuple[int, ...], sharding: str) -> tuple[int, ...]:
    """A tensor's part on one device, by XLA's notation: '{devices=[1,16]0,1,...}' cuts the second dimension in 16."""
    match = re.match(r'\{devices=\[([0-9,]+)\]', sharding)
    ways = [int(w) for w in match[1].split(',')][:len(shape)] if match else [1] * len(shape)
    return tuple(-(-n // w) for n, w in zip(shape, ways))


def _module(hlo: bytes, numbers: dict[str, int], sharding: dict[str, str], state: list[str]) -> tuple[bytes, str]:
    """HLO -> MLIR and its key, with what tracing on placeholders loses and a run has: the sharding of the inputs, and that the new
    weights are written over the old. Output 0 is the metrics, then come those of `state`."""
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo)))
        module.operation.attributes['sym_name'] = ir.StringAttr.get('step')  # its number grows from step to step
        main = next(op for op in module.body.operations if op.attributes['sym_name'].value == 'main')
        attributes = [{a.name: a.attr for a in one} for one in main.arg_attrs]
        for name, number in numbers.items():
            if sharding[name]:
                attributes[number]['mhlo.sharding'] = ir.StringAttr.get(sharding[name])
            if name in state:
                attributes[number]['tf.aliasing_output'] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32),
                                                                             1 + state.index(name))
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(one) for one in attributes])
        text = module.operation.get_asm(enable_debug_info=False)
        return mlir.module_to_bytecode(module), hashlib.sha256(text.encode()).hexdigest()


# ---- The compiler, in a child process ----

def compile_step(traced: Traced, where: Slice, flags: str, cache: Path | None, timeout_s: float = 3600,
                 tick: Callable[[], None] = lambda: None, order: list[int] | None = None) -> Compiled:
    """Compiles for the slice; `flags` are libtpu's. A step that does not fit is a result too. Raises UserError if the
    compiler fails otherwise. `tick` is called about every second. `order`: which chips the mesh's devices are, if they
    do not come in the order of the chips' numbers."""
    job = dict(topology=f'{where.chip.name}:{where.topology}', n_slices=where.n_slices,
               wrap=[*where.wrap, False][:3], flags=flags, version=VERSION, libtpu=_libtpu_version())
    if where.hosts == where.n_slices:  # all chips of a slice on one host
        job['host'] = [*where.shape, 1][:3]
    if where.chip.name == 'v4':
        job['config'] = 'megacore_dense'  # what torch_xla sets: the two cores of a chip are one device
    if order:
        job['order'] = order
    key = hashlib.sha256((json.dumps(job) + traced.key).encode()).hexdigest()
    kept = cache / f'{key}.json.gz' if cache else None
    if kept:
        try:
            return Compiled(**json.loads(gzip.decompress(kept.read_bytes())) | {'cached': True})
        except (OSError, EOFError, ValueError, TypeError, zlib.error):
            pass  # not there, or damaged: made anew
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, 'step.mlir').write_bytes(traced.module)
        Path(folder, 'job.json').write_text(json.dumps(job | dict(parent=os.getpid())))
        began = time.perf_counter()
        with open(f'{folder}/log', 'wb') as log:
            child = subprocess.Popen([sys.executable, '-m', 'nano.plan.aot', folder], stdout=log, stderr=log,
                                     cwd=Path(__file__).parents[2], env=_environment(flags, folder))
            try:
                while child.poll() is None:
                    if time.perf_counter() - began > timeout_s:
                        raise UserError(f'the compiler did not end within {timeout_s:.0f} s')
                    tick()
                    time.sleep(0.5)
            finally:
                child.kill()
                child.wait()
        if child.returncode < 0:
            raise UserError(f'the TPU compiler was ended by signal {-child.returncode}: with 9 this machine has too little '
                            f'memory for it, it takes up to some GB')
        text = Path(folder, 'log').read_text(errors='replace')
        compiled = _read(text, Path(folder), where, time.perf_counter() - began)
    if kept:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f'.{os.getpid()}')
            try:
                part.write_bytes(gzip.compress(json.dumps(asdict(compiled)).encode(), 6))
                part.rename(kept)
            finally:  # also when it is ended here
                part.unlink(missing_ok=True)
        except OSError as e:
            say(f'warning: not kept for the next time: {e}')
    return compiled


def _environment(flags: str, folder: str) -> dict[str, str]:
    import libtpu
    other = {k: v for k, v in os.environ.items() if k not in ('XLA_FLAGS', 'PJRT_DEVICE', 'CPU_NUM_DEVICES')}
    return other | dict(
        LIBTPU_INIT_ARGS=flags, TPU_LIBRARY_PATH=libtpu.get_library_path(), TPU_SKIP_MDS_QUERY='1',
        JAX_PLATFORMS='cpu', ALLOW_MULTIPLE_LIBTPU_LOAD='1', TPU_LOG_DIR='disabled', TPU_STDERR_LOG_LEVEL='0',
        TPU_MIN_LOG_LEVEL='0', TMPDIR=folder, XLA_FLAGS=f'--xla_dump_to={folder}/dump')


def _libtpu_version() -> str:
    from importlib.metadata import version
    return version('libtpu')


def _child(folder: Path):
    """The process that compiles: reads `job.json` and `step.mlir`, writes the scheduled program and the devices."""
    import ctypes
    import signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no compile outlives the plan it is for
    job = json.loads((folder / 'job.json').read_text())
    if os.getppid() != job['parent']:
        os._exit(1)
    import numpy as np
    from jax._src.lib import xla_client
    from jax.experimental import topologies
    options = dict(wrap=job['wrap'])
    if 'config' in job:
        options['chip_config_name'] = job['config']
    if 'host' in job:
        options['chips_per_host_bounds'] = job['host']
    if job['n_slices'] > 1:
        options['num_slices'] = job['n_slices']
    devices = sorted(topologies.get_topology_desc(job['topology'], 'tpu', **options).devices, key=lambda d: d.id)
    devices = [devices[i] for i in job.get('order', range(len(devices)))]
    (folder / 'coords.json').write_text(json.dumps([[getattr(d, 'slice_index', None) or 0, *d.coords]
                                                    for d in devices]))
    n = len(devices)
    ask = xla_client.CompileOptions()
    ask.num_partitions = n
    build = ask.executable_build_options
    build.num_replicas, build.num_partitions, build.use_spmd_partitioning = 1, n, True
    build.allow_spmd_sharding_propagation_to_output = [True]  # as torch_xla sets; else the new weights are gathered
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in devices]]))
    program = devices[0].client.compile((folder / 'step.mlir').read_bytes(), xla_client.DeviceList(tuple(devices)), ask)
    (folder / 'step.hlo').write_text(program.hlo_modules()[0].to_string())


_UNITS = {'': 1, 'B': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


def _size(text: str) -> int:
    """'794.53M' -> bytes."""
    match = re.match(r'([0-9.]+)([KMGT]?)', text.strip())
    return round(float(match[1]) * _UNITS[match[2]])


def _read(log: str, folder: Path, where: Slice, seconds: float) -> Compiled:
    """The compiler's own report. What it says is in units of 1024."""
    # A step that does not fit is told twice, in the log and in the exception; the report comes last.
    exhausted = 'RESOURCE_EXHAUSTED' in log and 'hbm' in log
    if not exhausted and not (folder / 'step.hlo').exists():
        lines = [line for line in log.splitlines() if 'TPU_WORKER_HOSTNAMES' not in line]
        told = [line for line in lines if re.search('Unknown|unknown flag|Error|INVALID|UNIMPLEMENTED', line)]
        flags = [line for line in told if 'flag' in line]
        raise UserError(f'the TPU compiler failed: {(flags or told or lines or ["no message"])[-1][:500]}')
    if exhausted and 'Total hbm usage >=' not in log:  # a single array is larger than the memory: there is no report
        size, shape = re.search(r"Allocation \(size=(\d+)\) would exceed memory.*?shape = '(\S+)'", log, re.S).groups()
        total = max([int(size)] + [_size(after) for _, after in _rematerialized(log)])
        return Compiled(False, total, round(where.chip.usable_gib * 2**30), 0, total, 0, seconds,
                        largest=[(int(size), shape, '')])
    report = log[log.rindex('Total hbm usage >='):]
    sizes = {name: _size(m[1]) if (m := re.search(rf'\b{name} +([0-9.]+[BKMGT]?)', report)) else 0
             for name in ('reserved', 'program', 'arguments')}
    total = _size(re.search(r'Total hbm usage >= ([0-9.]+[BKMGT]?)', report)[1])
    reduced = max(((_size(a), _size(b)) for a, b in _rematerialized(log)), default=(0, 0))
    coords = folder / 'coords.json'
    result = Compiled(not exhausted, total, round(where.chip.usable_gib * 2**30), sizes['reserved'], sizes['program'],
                      sizes['arguments'], seconds, coords=json.loads(coords.read_text()) if coords.exists() else [],
                      rematerialized=reduced)
    if exhausted:
        for size, rest in re.findall(r'^  \d+\. Size: (\S+)\n(.*?)=====', report, re.M | re.S):
            shape = re.search(r'Shape: (\S+)', rest)
            result.largest.append((_size(size), shape[1] if shape else '', _origin(rest) or (
                label[1] if (label := re.search(r'XLA label: \S+ = ([\w-]+)', rest)) else '')))
        return result
    result.hlo = (folder / 'step.hlo').read_text()
    result.largest = _largest(folder, result.hlo)
    for source, target, what in re.findall(r'Involuntary full rematerialization.*?from sharding (\{.*?\}) to (\{.*?\}) '
                                           r'efficiently for HLO operation (%\S+ = \S+)', log):
        result.warnings.append(f'{what} is gathered in full on its way from {source} to {target}')
    return result


def _rematerialized(log: str) -> list[tuple[str, str]]:
    """Sizes before and after the compiler computed parts anew, as it writes them."""
    return re.findall(r'rematerialization hbm reduction: +([0-9.]+[BKMGT]?) => ([0-9.]+[BKMGT]?)', log)


def _origin(metadata: str) -> str:
    """'layers, backward: mm, in loss_sums', from what XLA writes beside an instruction."""
    name = re.search(r'op_name="([^"]*)"', metadata)
    source = re.search(r'source_file="([^"]*)" source_line=(\d+)', metadata)
    if not name:
        return ''
    loop = 'layers' + next((f', {way}ward' for way in ('back', 'for') if f'aot_{way}ward' in name[1]), '') + ': ' \
        if 'scan' in name[1] else ''
    function = ''
    if source and 'site-packages' not in source[1] and os.path.exists(source[1]):
        for node in ast.walk(ast.parse(Path(source[1]).read_text())):  # the innermost comes last
            if isinstance(node, ast.FunctionDef) and node.lineno <= int(source[2]) <= node.end_lineno:
                function = f', in {node.name}'
    return loop + re.sub(r'\.\d+$', '', name[1].rsplit('/', 1)[-1]).removeprefix('aten__').removeprefix('xla__') + function


def _largest(folder: Path, hlo: str, n: int = 20) -> list[tuple[int, str, str]]:
    """The largest temporaries by the compiler's buffer assignment: (bytes, shape, operator). What shares a place with a
    larger one is left out."""
    reports = sorted(folder.glob('dump/*buffer-assignment.txt'))
    if not reports:
        return []
    values = set()
    for block in re.split(r'\n(?=allocation )', reports[-1].read_text(errors='replace')):
        if 'preallocated-temp' in block.split('\n', 1)[0] and 'color' not in block.split('\n', 1)[0]:  # 0, HBM
            values |= {(int(size), int(offset), shape, name) for name, size, offset, shape in re.findall(
                r'value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\): (\S+)', block)}
    found, taken = [], []
    for size, offset, shape, name in sorted(values, reverse=True):
        if any(offset < end and begin < offset + size for begin, end in taken):
            continue  # its place is a larger one's at another time
        if len(found) == n:
            break
        taken.append((offset, offset + size))
        line = re.search(rf'%{re.escape(name.split("{")[0])} = .*', hlo)
        origin = _origin(line[0]) if line else ''
        origin = origin or re.sub(r'[._{][\d.}]*$', '', name)
        found.append((size, shape, origin))
    return found


if __name__ == '__main__':
    _child(Path(sys.argv[1]))
