"""A run's folder: kept by one process, copied from and to an object store, and the rules by which a run goes on in it.
"""
import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Iterator, Sequence

from nano import UserError, checkpoint
from nano.tokenizer import write_huggingface

# What a checkpoint says of itself beside its step.
META = dict(consumed=int, tokens=int, best=float, wall_s=float, owed=bool, tokenizer=(str, type(None)),
            separator=(int, type(None)), data=str, config=dict)
TOKENIZERS = 'tokenizer.model', 'tokenizer.json'


class Folder:
    """`out` is a path, or an address of an object store (gs://...). Its files cannot grow there line by line: `local`
    is a folder of this machine with all but the checkpoints, which `push` copies there, and `fetch` from there."""

    def __init__(self, out: str):
        self.out = out.removeprefix('file://').rstrip('/') or '/'
        scheme, _, rest = self.out.rpartition('://')
        self.local = Path('out', 'mirror', scheme, rest) if scheme else Path(self.out)
        self.ckpt, self._sent = f'{self.out}/ckpt', {}
        self.remote = bool(scheme)

    @contextlib.contextmanager
    def held(self, main: bool) -> Iterator[None]:
        """Makes it and holds it for this process: two runs that write the same checkpoints destroy each other's. The
        lock ends with the process, however that ends. Hosts that are not `main` write beside it. Raises UserError."""
        self.local.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.local, os.O_RDONLY)
        try:
            if main:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            os.close(fd)
            raise UserError(f'--out {self.out}: another run is writing there: wait for it, or choose another --out') \
                from e
        except OSError:
            pass  # a network's file system without locks
        try:
            yield
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.rmdir(self.local)  # if nothing was written

    def check_space(self, n_bytes: int):
        """Raises UserError if a checkpoint has no room, or if nothing can be written."""
        if self.remote:
            checkpoint.check_writable(self.out)
        elif (free := shutil.disk_usage(self.local).free) < n_bytes:
            raise UserError(f'{self.out}: {free / 1e6:,.1f} MB are free there, a checkpoint takes {n_bytes / 1e6:,.1f}')

    def fetch(self):
        """Brings the record of a run that was elsewhere before, over what may be here of it."""
        if self.remote:
            fs = checkpoint.file_system(self.out)
            root = fs._strip_protocol(self.out)
            for path in fs.find(self.out) if fs.exists(self.out) else ():
                name = path[len(root):].lstrip('/')
                if not name.startswith('ckpt/'):
                    (self.local / name).parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(path, str(self.local / name))
                    self._sent[self.local / name] = _state(self.local / name)

    def push(self):
        """Sends what changed since the last time."""
        if self.remote:
            fs = checkpoint.file_system(self.out)
            for path in sorted(p for p in self.local.rglob('*') if p.is_file()):
                if self._sent.get(path) != (state := _state(path)):
                    fs.put_file(str(path), f'{self.out}/{path.relative_to(self.local)}')
                    self._sent[path] = state


def _state(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, path.stat().st_size


def source(address: str, option: str = '--init_from') -> str:
    """The checkpoint at `address`, or the newest one of the run there. Raises UserError if there is none, naming the
    option that gave it."""
    address = address.rstrip('/')
    if checkpoint.STEP.fullmatch(address.rsplit('/', 1)[-1]):
        return address
    if (path := checkpoint.newest(f'{address}/ckpt')) is None:
        raise UserError(f'{option} {address}: neither a run or a checkpoint' +
                        (' nor a HuggingFace model folder' if option == '--init_from' else ''))
    return path


def options_of(cls: type, path: str, meta: dict[str, Any], shape: Sequence[str]) -> Any:
    """The options that the checkpoint at `path` was trained with. Raises UserError if they are another script's."""
    then = meta['config']
    if lacking := [k for k in shape if k not in then]:
        raise UserError(f'{path}/meta.json: its config lacks {", ".join(lacking)}: another script wrote it')
    return cls(**{f.name: then[f.name] for f in fields(cls) if f.name in then})


def copy_tokenizer(path: str, to: str):
    """Puts the tokenizer that lies beside the run of the checkpoint at `path` into the folder `to`, as HuggingFace's
    tokenizers read it. Says what could not be done."""
    run = path.rsplit('/', 2)[0]
    fs = checkpoint.file_system(run)
    for name in TOKENIZERS:
        if fs.exists(f'{run}/{name}'):
            with tempfile.TemporaryDirectory() as temp:
                fs.get_file(f'{run}/{name}', f'{temp}/{name}')
                if note := write_huggingface(f'{temp}/{name}', to):
                    print(note.replace(temp, run))
                return
    print(f'{run} has no tokenizer: none is written')


def check_model(cfg: Any, path: str, then: dict[str, Any], shape: Sequence[str], may_differ: Sequence[str] = ()):
    """Refuses another model: many have weights of the same shapes, and would go on with a high loss and no error.
    `then`: the options of the one at `path`; `shape`: those that make the model."""
    if other := [f'--{k} {then.get(k)}, not {getattr(cfg, k)}' for k in shape
                 if then.get(k) != getattr(cfg, k) and k not in may_differ]:
        raise UserError(f'{path} was trained with {"; ".join(other)}: use its values, or another --out')


def check_tokenizer(cfg: Any, path: str, then: str | None, now: str | None):
    """Refuses token ids of another tokenizer: sha256 of its file then and now, None without one."""
    if then != now:
        raise UserError(f'{path} was trained on ids of another tokenizer than that of {cfg.data}: prepare the text '
                        f'with the first one (data/text.py --tokenizer FILE)')


def check_data(cfg: Any, path: str, meta: dict[str, Any], data_hash: str):
    """Refuses to go on in the middle of another order of data, where windows would be seen twice or never; with
    --reset_data it sets `consumed` to 0 instead."""
    then = meta['config']
    differs = [f'--{k} {then[k]}, not {getattr(cfg, k)}' for k in ('seed', 'seq_len') if then.get(k) != getattr(cfg, k)]
    if meta['data'] != data_hash:
        differs.append(f'other tokens than those in {cfg.data} now')
    if differs and cfg.reset_data:
        meta['consumed'] = 0
    elif differs:
        raise UserError(f'{path} was trained with {"; ".join(differs)}: use these, or --reset_data to go on from the '
                        f'beginning of the data')


def changes(cfg: Any, then: dict[str, Any]) -> str:
    """', --lr 0.1 (was 0.2)' for each option that differs from then."""
    return ''.join(f', --{k} {v!r} (was {then[k]!r})' for k, v in asdict(cfg).items()
                   if k in then and then[k] != v and k not in ('preset', 'out', 'init_from'))
