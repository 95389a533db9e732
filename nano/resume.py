"""A run's folder: kept by one process, copied from and to an object store. And where a run starts: from nothing, from
its own newest checkpoint, or from another's weights, with the rules of what must be the same.
"""
import contextlib
import fcntl
import math
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import torch

from nano import UserError, checkpoint, hf, shards
from nano.tokenizer import write_huggingface

# What a checkpoint says of itself beside its step.
META = dict(consumed=int, units=int, best=float, wall_s=float, owed=bool, tokenizer=(str, type(None)),
            separator=(int, type(None)), data=str, config=dict)  # and labels of train_vit.py, a list of names
TOKENIZERS = 'tokenizer.model', 'tokenizer.json'


class Folder:
    """`out` is a path, or an address of an object store (gs://...). Its files cannot grow there line by line: `local`
    is a folder of this machine with all but the checkpoints, which `push` copies there, and `fetch` from there."""

    def __init__(self, out: str):
        self.out = out.rstrip('/')
        scheme, _, rest = self.out.rpartition('://')
        if not rest or self.out.endswith(':') or '::' in self.out:
            raise UserError(f'--out {out!r}: names no folder')
        self.local = Path('out', 'mirror', scheme, rest.lstrip('/')) if scheme else Path(self.out)
        self.ckpt, self._sent = f'{self.out}/ckpt', {}
        self.remote, self.main = bool(scheme), True

    @contextlib.contextmanager
    def held(self, main: bool, found: str | None) -> Iterator[None]:
        """Makes it and holds it for this process: two runs that write the same checkpoints destroy each other's. The
        lock ends with the process, however that ends. Hosts that are not `main` write beside it. `found` is the
        checkpoint to go on from. Raises UserError, also if there is a newer one by now."""
        self.main = main
        self.local.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.local, os.O_RDONLY)
        try:
            if main:
                with contextlib.suppress(OSError):  # a network's file system without locks
                    _lock(fd, self.out)
                if checkpoint.newest(self.ckpt, say=lambda text: None) != found:
                    raise UserError(f'--out {self.out}: another run has just saved there: start again to go on from it')
                self._fetch()
        except BaseException:
            os.close(fd)
            raise
        try:
            yield
        finally:
            try:
                self.push()
            except Exception as e:  # an object store's client raises its own
                print(f'warning: {self.out}: the end of the record is in {self.local} alone ({e})')
            os.close(fd)
            with contextlib.suppress(OSError):
                os.rmdir(self.local)  # if nothing was written

    def check_space(self, n_bytes: int):
        """Raises UserError if a checkpoint has no room, or if nothing can be written."""
        if self.remote:
            checkpoint.check_writable(self.out)
        elif (free := shutil.disk_usage(self.local).free) < n_bytes:
            raise UserError(f'{self.out}: {free / 1e6:,.1f} MB are free there, a checkpoint takes {n_bytes / 1e6:,.1f}')

    def _fetch(self):
        """Brings the record of a run that was elsewhere before, unless here is the same and more."""
        if self.remote:
            fs = checkpoint.file_system(self.out)
            root = fs._strip_protocol(self.out)
            for path in fs.find(self.out) if fs.exists(self.out) else ():
                name = path[len(root):].lstrip('/')
                here = self.local / name
                if not name.startswith('ckpt/') and not (here.exists() and
                                                         here.read_bytes().startswith(fs.cat_file(path))):
                    here.parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(path, str(here))
                    self._sent[here] = _state(here)

    def push(self):
        """Sends what changed since the last time; of a host that is not `main`, its log."""
        if self.remote:
            fs = checkpoint.file_system(self.out)
            for path in sorted(p for p in self.local.rglob('*' if self.main else 'log_*.txt') if p.is_file()):
                if self._sent.get(path) != (state := _state(path)):
                    fs.put_file(str(path), f'{self.out}/{path.relative_to(self.local)}')
                    self._sent[path] = state


def _lock(fd: int, out: str):
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise UserError(f'--out {out}: another run is writing there: wait for it, or choose another --out') from e


def _state(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, path.stat().st_size


@dataclass
class Foreign:
    """Folders of others' programs that a script can start from."""
    is_folder: Callable[[str], bool]
    options: Callable[[str, dict[str, Any]], dict[str, Any]]  # (folder, the script's options) -> those of its model
    reader: Callable[[Any, str | None], hf.Weights]  # (config, sha256 of the data's tokenizer) -> the weights


@dataclass
class Start:
    """Where a run starts. `meta`: see META, and `step`; of the first step if it does not go on."""
    meta: dict[str, Any]
    path: str | None = None  # what is loaded
    goes_on: bool = False  # with the optimizer's state and all, not with the weights alone
    reader: hf.Weights | None = None  # of another format
    changes: str = ''
    then: dict[str, Any] = field(default_factory=dict)  # the options of the weights that are taken
    labels: list[str] | None = None  # what their classes are called, if that is known

    def complete(self, cfg: Any) -> bool:
        """Whether nothing is left to do; then it says so."""
        step, end = self.meta['step'], min(cfg.stop_at or cfg.steps, cfg.steps)
        if done := step >= end and not self.meta['owed']:
            print(f'{cfg.out} is complete: step {step} of {end}. More: a larger --steps or --stop_at; anew: another '
                  f'--out')
        return done

    def load(self, weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> str:
        """Reads them, and returns a sentence about it."""
        memory = checkpoint.PeakMemory()
        checkpoint.load(self.path, weights | state if self.goes_on else weights, self.reader)
        return f'{"goes on from" if self.goes_on else "starts from the weights of"} {self.path}{self.changes}{memory}'


def find(cfg: Any, data: dict[str, Any], shape: Sequence[str], may_differ: Sequence[str], foreign: Foreign) -> Start:
    """Where the run of `cfg` starts. `shape` are the options that make the model: others are refused, as many models
    have weights of the same shapes, and would go on with a high loss and no error. `may_differ`: those of them that
    may all the same, when only the weights are taken. `data` has META's names data, tokenizer and separator. Raises
    UserError."""
    tokenizer = data['tokenizer']
    folder = Folder(cfg.out)
    if checkpoint.is_one(folder.out) or checkpoint.holds_some(folder.out):
        raise UserError(f'--out {cfg.out}: is a checkpoint, or a folder of them, and not the folder of a run')
    if not folder.remote and os.path.exists(f'{folder.out}/config.json') and foreign.is_folder(folder.out):
        raise UserError(f'--out {cfg.out}: is a model folder of HuggingFace\'s, which would be overwritten')
    if path := checkpoint.newest(folder.ckpt):
        meta = checkpoint.read_meta(path, META)
        if cfg.init_from and cfg.init_from != meta['config'].get('init_from'):
            began = meta['config'].get('init_from') or 'weights of its own'
            raise UserError(f'--init_from {cfg.init_from}: {cfg.out} holds a run already, which began from {began}: '
                            f'leave the option out to go on with it, or begin a new run in another --out')
        _check_model(cfg, path, meta['config'], shape, advice='use its values (all are in config.json there), or begin '
                     'a new run in another --out')
        _check_tokenizer(cfg, path, meta['tokenizer'], tokenizer)
        _check_data(cfg, path, meta, data['data'])
        changes = ''.join(f', --{k} {v!r} (was {meta["config"][k]!r})' for k, v in asdict(cfg).items()
                          if meta['config'].get(k, v) != v and k not in ('preset', 'out', 'init_from', 'stop_at'))
        return Start(meta, path, True, None, changes)
    start = Start(dict(step=0, consumed=0, units=0, best=math.inf, wall_s=0.0, owed=True))
    if cfg.init_from and foreign.is_folder(cfg.init_from):
        start.then = foreign.options(cfg.init_from, asdict(cfg))
        _check_model(cfg, cfg.init_from, start.then, shape, may_differ)
        start.path, start.reader = cfg.init_from, foreign.reader(cfg, tokenizer)
    elif cfg.init_from:
        start.path = source(cfg.init_from)
        then = checkpoint.read_meta(start.path, META)
        start.then, start.labels = then['config'], then.get('labels')
        _check_model(cfg, start.path, start.then, shape, may_differ)
        _check_tokenizer(cfg, start.path, then['tokenizer'], tokenizer)
    return start


def options_of_source(chosen: dict[str, Any], shape: Sequence[str], foreign: Foreign,
                      of_data: Sequence[str] = ()) -> dict[str, Any]:
    """For nano.config.parse: what makes the model comes with --init_from, and when such a run goes on from itself; when
    any run goes on, `of_data`, the options whose default is what the data have."""
    address = chosen['init_from']
    if chosen['export']:
        return {}
    if path := checkpoint.newest(Folder(chosen['out']).ckpt, say=lambda text: None):
        then = checkpoint.read_meta(path, META)['config']
        return {k: then[k] for k in (*(shape if then.get('init_from') else ()), *of_data) if k in then}
    if not address:
        return {}
    if foreign.is_folder(address):
        then = foreign.options(address, chosen)
        return {k: then[k] for k in shape if k in then}
    then = checkpoint.read_meta(source(address), META)['config']
    return {k: then[k] for k in shape if k in then}


def source(address: str, option: str = '--init_from') -> str:
    """The checkpoint at `address`, or the newest one of the run there. Raises UserError if there is none, naming the
    option that gave it."""
    address = address.rstrip('/') if '://' in address else os.path.abspath(address)
    if checkpoint.is_one(address):
        return address
    if os.path.isfile(address):
        raise UserError(f'{option} {address}: is a file, and a run, a checkpoint or a model is a folder')
    if path := checkpoint.newest(f'{address}/ckpt') or checkpoint.newest(address):
        return path
    raise UserError(f'{option} {address}: neither a run nor a checkpoint' +
                    (', nor a model folder of HuggingFace\'s' if option == '--init_from' else ''))


def options_of(cls: type, path: str, meta: dict[str, Any], shape: Sequence[str]) -> Any:
    """The options that the checkpoint at `path` was trained with. Raises UserError if they are another script's."""
    then = meta['config']
    if lacking := [k for k in shape if k not in then]:
        raise UserError(f'{path}/meta.json: its config lacks {", ".join(lacking)}: another script wrote it')
    wrong = [f.name for f in fields(cls) if f.name in then and
             not isinstance(then[f.name], (float, int) if f.type is float else f.type)]
    if wrong:
        raise UserError(f'{path}/meta.json: {", ".join(wrong)} of its config cannot be used: it was edited')
    return cls(**{f.name: then[f.name] for f in fields(cls) if f.name in then})


def copy_tokenizer(path: str, to: str, sha256: str | None):
    """Puts the tokenizer that lies beside the run of the checkpoint at `path`, which was trained with the one of this
    `sha256`, into the folder `to`, as HuggingFace's tokenizers read it. Says what could not be done."""
    run, ckpt, _ = path.rsplit('/', 2)
    fs = checkpoint.file_system(path)
    for name in TOKENIZERS if ckpt == 'ckpt' else ():
        if fs.exists(f'{run}/{name}'):
            with tempfile.TemporaryDirectory() as temp:
                fs.get_file(f'{run}/{name}', f'{temp}/{name}')
                if shards.file_sha256(f'{temp}/{name}') != sha256:
                    continue
                try:
                    note = write_huggingface(f'{temp}/{name}', to)
                except UserError as e:
                    raise UserError(str(e).replace(temp, run)) from e
                if note:
                    print(note.replace(temp, run))
                return
    print(f'no tokenizer is written: that of {path} does not lie in the run\'s folder')


def _check_model(cfg: Any, path: str, then: dict[str, Any], shape: Sequence[str], may_differ: Sequence[str] = (),
                 advice: str = 'leave these options out'):
    if other := [f'--{k} {then.get(k)}, not {getattr(cfg, k)}' for k in shape
                 if then.get(k) != getattr(cfg, k) and k not in may_differ]:
        raise UserError(f'{path} has {"; ".join(other)}: {advice}')


def _check_tokenizer(cfg: Any, path: str, then: str | None, now: str | None):
    """Refuses token ids of another tokenizer: sha256 of its file then and now, None without one."""
    if then != now:
        raise UserError(f'{path} was trained on ids of another tokenizer than that of {cfg.data}: prepare the text '
                        f'with the first one (data/text.py --tokenizer FILE)')


def _check_data(cfg: Any, path: str, meta: dict[str, Any], data_hash: str):
    """Refuses to go on in the middle of another order of data, where windows would be seen twice or never; with
    --reset_data it sets `consumed` to 0 instead."""
    then = meta['config']
    differs = [f'--{k} {then.get(k)}, not {getattr(cfg, k)}' for k in ('seed', 'seq_len')
               if hasattr(cfg, k) and then.get(k) != getattr(cfg, k)]
    if meta['data'] != data_hash:
        differs.append(f'other data than those in {cfg.data} now')
    if differs and cfg.reset_data:
        meta['consumed'] = 0
    elif differs:
        raise UserError(f'{path} was trained with {"; ".join(differs)}: use these, or --reset_data to go on from the '
                        f'beginning of the data')
