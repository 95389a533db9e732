"""HuggingFace's model folders, of Llama's family: config.json, and weights in safetensors files, one or many with an
index. Both are read and written one weight at a time.

A script's weights are stacked over layers and its matrices are [in, out]; in a folder each layer's has a name of its
own and is [out, in]. The script says what is called what: `names` maps a weight to its name there, with {} for the
number of the layer.
"""
import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any, Callable, Iterable

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from nano import UserError, shards

FAMILIES = 'llama', 'mistral', 'qwen2', 'qwen3'
USUAL = dict(hidden_act='silu', attention_bias=False, mlp_bias=False, rope_interleaved=False, quantization_config=None,
             partial_rotary_factor=1.0)  # what the model computes; another value is refused by its name
IGNORED = '.rotary_emb.inv_freq',  # old folders hold these, which follow from config.json
LLAMA3 = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'  # of rope_scaling
FILE_BYTES = 2e9  # of a written file, so that no more is held in memory


def is_folder(folder: str | Path) -> bool:
    """Whether `folder` looks like one of HuggingFace's."""
    return os.path.isfile(f'{folder}/config.json') and 'model_type' in _json(f'{folder}/config.json')


def options(folder: str | Path, seq_len: int) -> dict[str, Any]:
    """The model of a folder as train_gpt.py's options. Raises UserError naming all that such a model cannot be, for
    sequences of `seq_len`."""
    path = f'{folder}/config.json'
    config = _json(path)
    family = config.get('model_type')
    wrong = [] if family in FAMILIES else [f'model_type {family!r} (known: {", ".join(FAMILIES)})']
    wrong += [f'{k} {config[k]!r}' for k, usual in USUAL.items() if config.get(k) not in (None, usual)]
    try:
        window = config.get('sliding_window', 4096) or math.inf  # without the field it is 4096 in all that have windows
        slides = (family == 'mistral' or config.get('use_sliding_window') and
                  config.get('max_window_layers', 28) < config.get('num_hidden_layers', 0) or
                  set(config.get('layer_types') or ()) - {'full_attention'})
        if slides and seq_len > window:
            wrong.append(f'sliding_window {window} (attention to fewer tokens than --seq_len {seq_len})')
        rope = {'rope_theta': config.get('rope_theta') or 10000.0, **(config.get('rope_parameters') or {}),
                **(config.get('rope_scaling') or {})}
        kind = rope.get('rope_type', rope.get('type', 'default'))
        scaling = ''
        if kind == 'linear':
            scaling = _number(rope['factor'])
        elif kind == 'llama3':
            scaling = ','.join(_number(rope[k]) for k in LLAMA3)
        elif kind != 'default':
            wrong.append(f'rope_type {kind!r} (known: default, linear, llama3)')
        if rope.get('partial_rotary_factor', 1.0) != 1.0:
            wrong.append(f'partial_rotary_factor {rope["partial_rotary_factor"]}')
        heads = config['num_attention_heads']
        # A field that has its family's default may be left out of the file.
        found = dict(
            layers=config['num_hidden_layers'], width=config['hidden_size'], heads=heads,
            kv_heads=config.get('num_key_value_heads') or heads if family == 'llama' else config['num_key_value_heads'],
            head_size=config.get('head_dim') or (128 if family == 'qwen3' else config['hidden_size'] // heads),
            mlp_width=config['intermediate_size'], vocab_size=config['vocab_size'],
            tied=config.get('tie_word_embeddings', False), qk_norm=family == 'qwen3', qkv_bias=family == 'qwen2',
            rope_theta=float(rope['rope_theta']), rope_scaling=scaling, norm_eps=config.get('rms_norm_eps', 1e-6))
        numbers = {k: v for k, v in found.items() if k not in ('tied', 'qk_norm', 'qkv_bias', 'rope_scaling')}
        if bad := [k for k, v in numbers.items() if not isinstance(v, (int, float)) or not 0 < v < 1e30 or
                   k not in ('rope_theta', 'norm_eps') and v != int(v)]:
            wrong.append(f'{", ".join(bad)} not a (whole) number above 0')
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        wrong.append(f'no usable {e}' if isinstance(e, KeyError) else f'a field of the wrong type ({e})')
    if wrong:
        raise UserError(f'{path}: not a model that train_gpt.py can be: {"; ".join(wrong)}')
    return found


def check_tokenizer(folder: str | Path, data: str, sha256: str | None):
    """Refuses `data` that another tokenizer than the folder's made, if both have one; `sha256` is of the data's."""
    found = [path for name in ('tokenizer.json', 'tokenizer.model') if os.path.isfile(path := f'{folder}/{name}')]
    known = [shards.file_sha256(path) for path in found]
    if os.path.isfile(f'{folder}/tokenizer_config.json'):  # an export's own says what it was made from
        known.append(_json(f'{folder}/tokenizer_config.json').get('source_sha256'))
    if sha256 and found and sha256 not in known:
        raise UserError(f'{data} was made with another tokenizer than that of {folder}: make it with the same one '
                        f'(data/text.py --tokenizer {found[0]})')


class Weights(StorageReader):
    """Weights in the form of a checkpoint, for nano.checkpoint.load: a host reads what its devices need. `shapes`:
    their names and shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes

    def part(self, name: str, spans: tuple[slice, ...]) -> torch.Tensor:
        """A part of a weight in float32."""
        raise NotImplementedError

    def read_data(self, plan, planner) -> Future[None]:
        for item in plan.items:
            spans = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths))
            target = planner.resolve_tensor(item).detach()
            target.copy_(self.part(item.storage_index.fqn, spans))
            planner.commit_tensor(item, target)
        done = Future()
        done.set_result(None)
        return done

    def read_metadata(self, *_, **__) -> dcp.Metadata:
        float32 = dcp.TensorProperties(dtype=torch.float32)
        return dcp.Metadata({name: dcp.TensorStorageMetadata(
            float32, torch.Size(shape), [dcp.ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))])
            for name, shape in self.shapes.items()})

    def reset(self, checkpoint_id=None):
        pass

    def set_up_storage_reader(self, metadata, is_coordinator, *_, **__):
        pass

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True


class Held(Weights):
    """Those that are held on the host."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        super().__init__({name: tuple(w.shape) for name, w in weights.items()})
        self.weights = weights

    def part(self, name: str, spans: tuple[slice, ...]) -> torch.Tensor:
        return self.weights[name][spans]


class Reader(Weights):
    """A folder's weights. `shapes`: the script's weights and their shapes; a table of the vocabulary may have more rows
    there than `vocab_size`, the others become 0. Raises UserError naming every weight that either side lacks, and every
    other shape or type.
    """

    def __init__(self, folder: str | Path, names: dict[str, str], shapes: dict[str, tuple[int, ...]], vocab_size: int):
        super().__init__(shapes)
        self.names, self.vocab_size = names, vocab_size
        self._files = _open(folder)
        wrong, known = [], set()
        for name, shape in shapes.items():
            for theirs in self._names_of(name):
                if len(wrong) > 20:
                    break
                known.add(theirs)
                wanted = list(shape[1:][::-1]) if '{}' in names[name] else [*shape]
                if _is_table(name):
                    wanted[0] = vocab_size
                if theirs not in self._files:
                    wrong.append(f'no {theirs}')
                    continue
                have = self._files[theirs].get_slice(theirs)
                if have.get_shape() != wanted:
                    wrong.append(f'{theirs} is {have.get_shape()}, not {wanted}')
                if have.get_dtype() not in ('F32', 'F16', 'BF16', 'F64'):
                    wrong.append(f'{theirs} is of type {have.get_dtype()}')
        if 'head_VD' not in shapes:
            known.add(names['head_VD'])  # a tied model's may be there a second time
        wrong += [f'{n}, for which the model has no place' for n in sorted(set(self._files) - known)
                  if not n.endswith(IGNORED) and len(wrong) <= 20]
        if wrong:
            more = f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''
            raise UserError(f'{folder}: {"; ".join(wrong[:5])}{more}')

    def part(self, name: str, spans: tuple[slice, ...]) -> torch.Tensor:
        part = torch.zeros([s.stop - s.start for s in spans])
        theirs = self.names[name]
        if '{}' in theirs:
            for n, layer in enumerate(range(spans[0].start, spans[0].stop)):
                file = self._files[theirs.format(layer)]
                part[n] = file.get_slice(theirs.format(layer))[tuple(spans[:0:-1])].t()
        else:
            end = min(spans[0].stop, self.vocab_size) if _is_table(name) else spans[0].stop
            rows = max(0, end - spans[0].start)
            part[:rows] = self._files[theirs].get_slice(theirs)[(slice(spans[0].start, end), *spans[1:])] if rows else 0
        return part

    def _names_of(self, name: str) -> list[str]:
        return [self.names[name].format(n) for n in range(self.shapes[name][0] if '{}' in self.names[name] else 1)]


def write(folder: str | Path, config: dict[str, Any], weights: Iterable[tuple[str, torch.Tensor]],
          names: dict[str, str], dtype: torch.dtype, vocab_size: int, others: Callable[[str], Any]):
    """Fills `folder`, which must be empty or missing: what `others(folder)` puts there, the `weights` as they come (one
    is held at a time, and a file's worth of those before), and config.json last. Nothing is left of it if that fails.
    Raises UserError if the folder holds something."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    if '://' in str(folder):
        raise UserError(f'--export {folder}: must be a folder on a disk; copy it from there')
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'--export {folder}: is there already: choose another folder, or delete it')
    folder.mkdir(parents=True, exist_ok=True)
    os.umask(umask := os.umask(0))
    files: list[list[str]] = []  # the tensors of each
    pending: dict[str, torch.Tensor] = {}
    n_bytes = 0

    def flush():
        try:
            save_file(pending, folder / f'{len(files)}', metadata={'format': 'pt'})
        except SafetensorError as e:
            raise OSError(f'{folder}: {e}') from e
        files.append(list(pending))
        pending.clear()

    try:
        others(str(folder))
        for name, w in weights:
            w = w[:vocab_size] if _is_table(name) else w
            for n, one in enumerate(w) if '{}' in names[name] else [(0, w)]:
                one = one.t() if one is not w and one.dim() == 2 else one
                one = one.to(dtype, copy=True, memory_format=torch.contiguous_format)  # no view that holds the stack
                if pending and sum(t.nbytes for t in pending.values()) + one.nbytes > FILE_BYTES:
                    flush()
                pending[names[name].format(n)] = one
                n_bytes += one.nbytes
            del w, one  # before the next is read
        flush()
        place = {}
        for n, tensors in enumerate(files, 1):
            file = f'model-{n:05}-of-{len(files):05}.safetensors' if len(files) > 1 else 'model.safetensors'
            (folder / f'{n - 1}').rename(folder / file)
            place |= dict.fromkeys(tensors, file)
        if len(files) > 1:
            _write_json(folder / 'model.safetensors.index.json', dict(metadata=dict(total_size=n_bytes),
                                                                      weight_map=place))
        for path in folder.iterdir():
            path.chmod(0o666 & ~umask)  # safetensors makes files that nobody else can read
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        _write_json(folder / 'config.json', config)
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        with contextlib.suppress(OSError):  # the root of a mount
            folder.rmdir()
        raise


def config_of(o: dict[str, Any], dtype: torch.dtype, separator: int | None) -> dict[str, Any]:
    """The config.json of a model with train_gpt.py's options `o`: Llama's, or the family's that has its features.
    Raises UserError if none has them all."""
    if o['qk_norm'] and o['qkv_bias']:
        raise UserError('--export: no family of HuggingFace has both --qk_norm and --qkv_bias')
    # transformers' LlamaConfig refuses a width that the heads do not divide; Mistral's is the same model without that.
    family, name = (('qwen3', 'Qwen3') if o['qk_norm'] else ('qwen2', 'Qwen2') if o['qkv_bias'] else
                    ('mistral', 'Mistral') if o['width'] % o['heads'] else ('llama', 'Llama'))
    scaling = [float(x) for x in o['rope_scaling'].split(',') if x]
    kinds = {0: None, 1: dict(rope_type='linear'), 4: dict(rope_type='llama3')}
    rope = kinds[len(scaling)] and {**kinds[len(scaling)], **dict(zip(LLAMA3, scaling))}
    length = o['seq_len']
    if len(scaling) == 4:
        rope[LLAMA3[3]] = int(scaling[3])
        length = max(length, rope[LLAMA3[3]])
    return dict(
        architectures=[f'{name}ForCausalLM'], model_type=family, vocab_size=o['vocab_size'],
        num_hidden_layers=o['layers'], hidden_size=o['width'], intermediate_size=o['mlp_width'],
        num_attention_heads=o['heads'], num_key_value_heads=o['kv_heads'], head_dim=o['head_size'], hidden_act='silu',
        max_position_embeddings=length, rms_norm_eps=o['norm_eps'], rope_theta=o['rope_theta'], rope_scaling=rope,
        tie_word_embeddings=o['tied'], sliding_window=None, bos_token_id=separator, eos_token_id=separator,
        torch_dtype=str(dtype).removeprefix('torch.'))


def _is_table(name: str) -> bool:
    """Whether it has a row for each token id."""
    return name.split('_')[-1].startswith('V')


def _number(x: float) -> str:
    return repr(float(x)).removesuffix('.0')


def _open(folder: str | Path) -> dict[str, Any]:
    """{name of a tensor: the open file that holds it}."""
    from safetensors import SafetensorError, safe_open
    folder = Path(folder)
    index = folder / 'model.safetensors.index.json'
    try:
        files = sorted(set(_json(index)['weight_map'].values())) if index.exists() else ['model.safetensors']
    except (KeyError, AttributeError, TypeError) as e:
        raise UserError(f'{index}: has no weight_map') from e
    found = {}
    for file in files:
        if not (folder / str(file)).is_file():
            raise UserError(f'{folder}: {file} is missing (weights are read from safetensors files only)')
        try:
            opened = safe_open(folder / file, framework='pt')
            found |= {name: opened for name in opened.keys()}
        except (SafetensorError, OSError) as e:
            raise UserError(f'{folder / file}: cannot be read ({e}): copy it again') from e
    return found


def _json(path: str | Path) -> dict:
    try:
        with open(path, encoding='utf-8') as f:
            found = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f'{path}: cannot be read ({e})') from e
    if not isinstance(found, dict):
        raise UserError(f'{path}: is no JSON object')
    return found


def _write_json(path: Path, content: dict):
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
