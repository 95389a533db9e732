"""Devices: start torch_xla or say why not, the mesh, what a chip can do, counting compiles, checks of a sharded model.

Everything is SPMD, with one process for each host and also with one device: there is one code path.
"""
import contextlib
import hashlib
import importlib.metadata
import os
import re
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np
from packaging.requirements import Requirement

from nano import UserError, say
from nano.chips import CHIP_NAMES, CHIPS

AXES = ('data', 'fsdp', 'tensor')

# These make torch_xla compute in bfloat16 behind the script's back: the most negative float32 becomes minus infinity
# (pytorch/xla#4152) and sums stop growing at 256 (pytorch/xla#2425).
DOWNCASTS = ('XLA_USE_BF16', 'XLA_DOWNCAST_BF16', 'XLA_USE_FP16', 'XLA_DOWNCAST_FP16')


# Flags of the TPU compiler, for training and for a plan alike; those in LIBTPU_INIT_ARGS win.
TPU_FLAGS = {
    # Matmuls of sharded weights are not cut into a ring of small ones, each sending a part to its neighbor: gathering a
    # weight while the matmul before it runs is faster (1B parameters on v5e-16, fsdp: 0.59 s a step predicted, not
    # 0.81; not looked at with tensor parallelism).
    'xla_jf_spmd_threshold_for_windowed_einsum_mib': '100000',
}


@dataclass(frozen=True)
class Runtime:
    """What this process computes on. A chip is one device on every TPU since v4 (v4 runs in megacore mode)."""
    kind: str  # 'cpu', or the chip: 'v4', 'v5e', 'v5p', 'v6e', or what the runtime calls another one
    n_devices: int  # of all hosts
    process_index: int
    process_count: int
    versions: str
    local_devices: tuple[int, ...]  # this host's, as numbers in the mesh; not always a run of them (v5e: 0, 1, 4, 5)

    @property
    def main(self) -> bool:
        """Whether this host prints, draws and talks to wandb."""
        return self.process_index == 0

    @property
    def peak_flops(self) -> float | None:
        """bf16 FLOP/s of all chips together; None on CPU, which has no figure to compare with."""
        return CHIPS[self.kind].peak_tflops * 1e12 * self.n_devices if self.kind in CHIPS else None


def process_index_and_count() -> tuple[int, int]:
    """(index, count) of the hosts' processes. The one source of both, for tests to replace."""
    import torch_xla.runtime as xr
    return xr.process_index(), xr.process_count()


def local_device_ids() -> tuple[int, ...]:
    """The numbers of this host's devices among all, for tests to replace."""
    import torch_xla
    return tuple(int(name.split(':')[1]) for name in torch_xla._XLAC._xla_get_runtime_devices())


def check_versions(requirements: Path = Path(__file__).parent.parent / 'requirements.txt') -> str:
    """Compares the installed versions with the pins; returns 'torch 2.9.0, ...'.

    Raises UserError naming every difference: mixed versions fail later with undefined symbols, or compute on the CPU
    without a word (pytorch/xla#8626, pytorch/xla#2259).
    """
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise UserError(f'Python {sys.version.split()[0]}: jax 0.7.1 has wheels for 3.11, 3.12 and 3.13 only; '
                        'use one of these, or `bash launch.sh`, which finds one')
    wrong, found = [], {}
    for line in re.findall(r'^[^#\s][^#\n]*', requirements.read_text(), re.M):
        pin = Requirement(line)
        if pin.marker and not pin.marker.evaluate():
            continue  # for other versions of Python
        name, pin = pin.name, str(pin.specifier)[2:]
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f'{name} {pin} is missing')
            continue
        if found[name].split('+')[0] != pin:  # torch's CPU build calls itself 2.9.0+cpu
            wrong.append(f'{name} is {found[name]}, not {pin}')
    if wrong:
        raise UserError(f'{"; ".join(wrong)} (pinned in {requirements.name}): run `bash launch.sh`, or '
                        f'`{sys.executable} -m pip install -r {requirements.name}`')
    return ', '.join(f'{name} {found[name]}' for name in ('torch', 'torch_xla', 'jax', 'libtpu') if name in found)


def check_environment() -> str:
    """Of a run and of a plan alike. Returns the versions; raises UserError."""
    for name in DOWNCASTS:
        if os.environ.get(name, '0').lower() not in ('', '0', 'false'):
            raise UserError(f'{name} is set: it downcasts behind the script\'s back and breaks masks and sums; '
                            f'unset it (matmuls are in bfloat16 on TPU anyway)')
    return check_versions()


def start(device: str, timeout_s: float = 600,
          say: Callable[[str], None] = say) -> Runtime:
    """Starts torch_xla in SPMD mode on `device` ('tpu' or 'cpu').

    Prints a line before and after the devices are asked for: on several hosts this waits for all of them, and what is
    missing shows in which line did not come. Raises UserError, and ends the process after `timeout_s` without devices
    (a blocked call into libtpu cannot be interrupted).
    """
    if device not in ('tpu', 'cpu'):
        raise UserError(f"--device {device}: expected 'tpu' or 'cpu'")
    versions = check_environment()
    if device == 'tpu' and not tpu_chips():
        raise UserError('no TPU on this machine (no /dev/accel* and no /dev/vfio/*). To train on the CPU ask for it: '
                        '--device cpu')
    if os.environ.get('PJRT_DEVICE', device).lower() != device:
        raise UserError(f"PJRT_DEVICE={os.environ['PJRT_DEVICE']} but --device {device}: unset the variable or "
                        f"change the option")
    os.environ['PJRT_DEVICE'] = device.upper()
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    os.environ['JAX_PLATFORMS'] = 'cpu'  # jax only writes programs here: the TPU is torch_xla's, one process holds it
    if device == 'cpu':
        os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    else:
        os.environ['LIBTPU_INIT_ARGS'] = tpu_flags()  # torch_xla adds its own

    say(f'asking for the {device.upper()}s ({versions}, Python {sys.version.split()[0]})')
    ready = threading.Event()
    watch = threading.Thread(target=_give_up, args=(ready, timeout_s), daemon=True)
    watch.start()
    import torch_xla.runtime as xr
    try:
        xr.use_spmd()
        index, count = process_index_and_count()
        n_devices, local = xr.global_runtime_device_count(), local_device_ids()
        kind = 'cpu' if device == 'cpu' else _chip_name()
    except RuntimeError as e:
        raise UserError(f'the {device.upper()} did not start: {str(e).splitlines()[0]} (another process of yours may '
                        f'hold it: look with `sudo lsof /dev/accel* /dev/vfio/*`)') from e
    ready.set()
    say(f'host {index} of {count}: {len(local)} of {n_devices} {kind} devices')
    return Runtime(kind, n_devices, index, count, versions, local)


def tpu_flags(more: dict[str, str] = {}) -> str:
    """The value of LIBTPU_INIT_ARGS: what is in it already, and of TPU_FLAGS and `more` those that are not."""
    given = os.environ.get('LIBTPU_INIT_ARGS', '').split()
    names = {flag.lstrip('-').partition('=')[0] for flag in given}
    return ' '.join(given + [f'--{name}={value}' for name, value in {**TPU_FLAGS, **more}.items() if name not in names])


def tpu_chips() -> int:
    """How many TPU chips this machine has, by their device files; nothing is loaded or locked."""
    dev = Path('/dev')
    return len(list(dev.glob('accel[0-9]*')) or list((dev / 'vfio').glob('[0-9]*')))


def _chip_name() -> str:
    import torch_xla
    kind = torch_xla._XLAC._xla_device_kind(str(torch_xla.device()))
    return CHIP_NAMES.get(kind, kind)  # a chip that is not in the table trains too, without an MFU


def _give_up(ready: threading.Event, timeout_s: float):
    if not ready.wait(timeout_s):
        print(f'error: no devices after {timeout_s:.0f} s. Likely causes: not all hosts of the slice were started; '
              'another process holds the TPU; the metadata server cannot be reached (containers need --net=host)',
              file=sys.stderr, flush=True)
        os._exit(3)


def make_mesh(sizes: str, n_devices: int):
    """'1,-1,1' (data, fsdp, tensor; -1 once for "the rest") -> the mesh over all devices. Raises UserError."""
    import torch_xla.distributed.spmd as xs
    shape = mesh_shape(sizes, n_devices)
    return xs.Mesh(np.arange(n_devices), shape, AXES)


def mesh_shape(sizes: str, n_devices: int) -> tuple[int, ...]:
    """The mesh's sizes, with -1 filled in. Raises UserError."""
    try:
        shape = [int(s) for s in sizes.split(',')]
    except ValueError:
        shape = []
    if len(shape) != len(AXES) or any(s < 1 and s != -1 for s in shape) or shape.count(-1) > 1:
        raise UserError(f"--mesh {sizes}: expected {len(AXES)} sizes for {','.join(AXES)}, with -1 once at most for "
                        f"the rest, such as 1,-1,1")
    known = int(np.prod([s for s in shape if s != -1]))
    if -1 in shape and n_devices % known == 0:
        shape[shape.index(-1)] = n_devices // known
    if np.prod(shape) != n_devices:
        cpu = os.environ.get('PJRT_DEVICE') == 'CPU'
        hint = ' (CPU_NUM_DEVICES=8 in the environment makes 8 of a CPU)' if cpu else ''
        raise UserError(f'--mesh {sizes} does not fill the {n_devices} devices: the sizes must multiply to '
                        f'{n_devices}{hint}')
    return tuple(shape)


def rows_of_host(global_batch: int, mesh, runtime: Runtime) -> np.ndarray:
    """Rows of the global batch that this host's devices need, when rows are sharded over (data, fsdp)."""
    groups = np.asarray(mesh.device_ids).reshape(mesh.mesh_shape[0] * mesh.mesh_shape[1], mesh.mesh_shape[2])
    per_group = global_batch // len(groups)
    return np.concatenate([np.arange(g * per_group, (g + 1) * per_group)
                           for g, ids in enumerate(groups) if set(ids) & set(runtime.local_devices)])


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but the parts, the same in every process and version of Python."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], 'little') >> 1


def n_compiles() -> int:
    """How many graphs this process has compiled so far."""
    import torch_xla.debug.metrics as met
    data = met.metric_data('CompileTime')
    return data[0] if data else 0


class CompileWatch:
    """Counts compiles after the first step, and says when one happens: a change of shape, of a Python number in the
    graph or of a branch would otherwise cost minutes again and again without a word."""

    def __init__(self, strict: bool, say: Callable[[str], None]):
        self.strict, self.say, self.expected = strict, say, None

    def check(self, step: int, phase: str) -> int:
        """Call after each step and phase; returns the compiles so far. Raises UserError if strict."""
        n = n_compiles()
        if self.expected is not None and n > self.expected:
            message = (f'step {step}, {phase}: {n - self.expected} compile(s) after the first step; something in the '
                       f'graph depends on the step (a shape, a Python number, a branch)')
            if self.strict:
                raise UserError(message + ' (--strict)')
            self.say('warning: ' + message)
            self.expected = n
        return n

    def all_compiled(self):
        """From here on every compile is one too many."""
        self.expected = n_compiles()


def check_sharding(weights: dict, table: dict[str, tuple], mesh, say: Callable[[str], None],
                   replicated_share: float = 0.05):
    """Compares the weights as they lie on the devices with the script's sharding table, and prints it.

    `weights`: name -> device tensor; `table`: name -> mesh axes of each dimension. Raises UserError if a weight is not
    in the table, if its sharding is not what the table says, or if more than `replicated_share` of all bytes is on
    every device in full although the mesh could divide it: a forgotten weight shows up as lack of memory only, on the
    day when the model grows (huggingface/transformers#28949).
    """
    import torch_xla
    missing = sorted(set(weights) - set(table)), sorted(set(table) - set(weights))
    if any(missing):
        raise UserError(f'sharding table: weights without a line {missing[0]}, lines without a weight {missing[1]}')
    size = dict(zip(AXES, mesh.mesh_shape))
    total = replicated = 0
    wide = max(map(len, weights))
    say(f'{"weight":<{wide}} {"shape":<22} {"mesh axes":<32} MB/device')
    for name, w in weights.items():
        spec = table[name]
        have = torch_xla._XLAC._get_xla_sharding_spec(w)
        ways = [int(np.prod([size[a] for a in ((s,) if isinstance(s, str) else s or ())])) for s in spec]
        if have == '' or np.prod(ways) > 1 and have == '{replicated}':
            raise UserError(f'{name} is not sharded on the devices as the table says ({spec}): mark it before the '
                            f'first step')
        n_bytes = w.numel() * w.element_size()
        total += n_bytes
        if np.prod(ways) == 1:
            replicated += n_bytes
        local = w.element_size() * np.prod([-(-n // k) for n, k in zip(w.shape, ways)])
        say(f'{name:<{wide}} {str(tuple(w.shape)):<22} {str(spec):<32} {local / 1e6:9.2f}')
    if size['fsdp'] * size['tensor'] > 1 and replicated > replicated_share * total:
        raise UserError(f'{replicated / total:.0%} of the weights\' bytes are on every device in full: give the large '
                        f'ones of the table above mesh axes; for a model as small as this one take --mesh -1,1,1')


class StopSignal:
    """Turns Ctrl-C and SIGTERM into a request that the loop reads where the weights are whole, see `asked`.

    A thread answers at once, also while Python's own handlers cannot run: during a compile they came 71 s late. Where
    there is `nothing_to_save` it ends the process then and there, elsewhere at a second signal, or if the process has
    not ended `grace_s` seconds after the first. A terminal that closes (SIGHUP) asks too, but is no second signal: a
    machine that shuts down sends it with SIGTERM. Exit code: 128 + the signal's number. Use it in `with`, in the
    main thread."""

    def __init__(self, grace_s: float = 600):  # a large checkpoint takes minutes
        self.signum, self.group, self.nothing_to_save, self.grace_s = 0, None, True, grace_s
        self._agreed, self._pending = 0, None

    def asked(self) -> bool:
        """Whether to stop here. With several hosts (`group`, see checkpoint.process_group) each must call it at the
        same places: all get the same answer, one call after the first of them was asked, and none waits for it. Raises
        UserError if a host has ended."""
        import torch
        if self.group is None:
            return self.signum > 0
        if self._pending:
            work, flag = self._pending
            try:
                work.wait()
            except RuntimeError as e:
                raise UserError(f'another host has ended or cannot be reached, see what it says; then start all of '
                                f'again ({str(e).splitlines()[0]})') from e
            self._agreed = self._agreed or int(flag)
        flag = torch.tensor([self.signum])
        work = torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, self.group, async_op=True)
        self._pending = work, flag
        return self._agreed > 0

    @property
    def exit_code(self) -> int:
        return 128 + (self._agreed or self.signum)

    def __enter__(self) -> 'StopSignal':
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        threading.Thread(target=self._watch, daemon=True, name='signals').start()
        # Python's handlers do nothing; that they are set makes the interpreter write to the pipe.
        self._before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                        if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN}  # nohup stays what it is
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(self._fd_before)
        for s, handler in self._before.items():
            signal.signal(s, handler)
        os.close(self._write)  # ends the thread

    def _watch(self):
        deadline = None
        while True:
            ready, _, _ = select.select([self._read], [], [], deadline and max(0.0, deadline - time.monotonic()))
            signum = os.read(self._read, 1) if ready else None
            if signum == b'':
                return os.close(self._read)
            if signum and signum[0] not in self._before:
                continue  # another one that has a handler
            if signum and deadline and signal.SIGHUP in (signum[0], self.signum):
                if signum[0] != signal.SIGHUP:
                    self.signum = signum[0]  # from here on another one is a second
                continue
            if deadline:  # a second signal, or time is up
                os._exit(128 + self.signum)
            self.signum, deadline = signum[0], time.monotonic() + self.grace_s
            if self.nothing_to_save:
                _tell(b'\nstopped before the first step of this start: there is nothing new to save\n')
                os._exit(128 + self.signum)
            # Not print(): the main thread may be in the middle of one.
            _tell(b'\nstopping: a checkpoint, then the end; a second signal ends it at once\n')


def _tell(text: bytes):
    with contextlib.suppress(OSError):  # a closed terminal or a full disk must not end the thread
        os.write(2, text)


def rss_gb() -> float:
    """Resident memory of this process, in GB."""
    with open('/proc/self/statm') as f:
        return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 1e9
