"""HuggingFace folders, against transformers: its small models of each family are read onto 8 devices and written back.
"""
import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch

import train_gpt
from nano import UserError, checkpoint, hf, runtime
from nano.loader import eval_batches
from test_gpt import close, whole
from test_runs import OPTIONS, data, metrics, run, stored  # noqa: F401, data is a fixture

LLAMA3 = dict(rope_type='llama3', rope_theta=700.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
SMALL = dict(vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
             num_key_value_heads=8, max_position_embeddings=64, rms_norm_eps=1e-3, bos_token_id=1, eos_token_id=2)
MODELS = {  # transformers' class, what differs from SMALL
    'Llama 2': ('Llama', dict(tie_word_embeddings=False)),
    'Llama 3.2': ('Llama', dict(num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=LLAMA3)),
    'TinyLlama, longer': ('Llama', dict(num_key_value_heads=4, rope_parameters=dict(rope_type='linear', factor=4.0,
                                                                                    rope_theta=1e4))),
    'SmolLM': ('Llama', dict(hidden_size=48, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True,
                             vocab_size=350)),
    'Mistral': ('Mistral', dict(num_key_value_heads=2, head_dim=16, sliding_window=None)),
    'Mistral, odd width': ('Mistral', dict(hidden_size=72, num_attention_heads=5, num_key_value_heads=1, head_dim=8,
                                           sliding_window=32, vocab_size=261)),
    'Qwen 2': ('Qwen2', dict(num_key_value_heads=2, tie_word_embeddings=True)),
    'Qwen 3': ('Qwen3', dict(num_key_value_heads=4, head_dim=16, tie_word_embeddings=False)),
}
MESHES = '1,8,1', '2,2,2', '1,2,4'


def make(kind, folder, seed, **more):
    """A model of transformers with random weights, norms and biases too, saved in several files."""
    import transformers
    family, differs = MODELS[kind]
    torch.manual_seed(seed)
    model = getattr(transformers, f'{family}ForCausalLM')(
        getattr(transformers, f'{family}Config')(**{**SMALL, **differs, **more})).eval()
    with torch.no_grad():
        for name, w in model.named_parameters():
            w.copy_(torch.randn(w.shape) * 0.15 + ('norm' in name))
    model.save_pretrained(folder, max_shard_size='100KB')
    return model


def config_of(folder, **more):
    return train_gpt.Config(device='cpu', seq_len=32, **hf.options(folder, 32), **more)


def logits(cfg, weights, ids):
    """Of train_gpt's model as a plain one."""
    model = train_gpt.GPT(replace(cfg, scan=False))
    return (model(weights, ids) @ model.head_VD(weights).t())[..., :cfg.vocab_size]


@pytest.fixture(scope='module')
def devices():
    return runtime.start('cpu')


@pytest.mark.parametrize('kind', MODELS)
def test_there_and_back(devices, kind, tmp_path, seed, monkeypatch):
    """Read onto 8 devices: the same logits. Saved, exported, read by transformers: nothing missing, the same bits."""
    import torch_xla
    import transformers
    theirs = make(kind, tmp_path / 'theirs', seed)
    cfg = config_of(tmp_path / 'theirs', out=str(tmp_path / 'run'))
    mesh = runtime.make_mesh(MESHES[list(MODELS).index(kind) % 3], 8)
    weights, state = train_gpt.build(cfg, mesh, torch_xla.device())
    torch_xla.sync()
    shapes = train_gpt.weight_shapes(cfg)
    reader = hf.Reader(tmp_path / 'theirs', train_gpt.HF_NAMES, shapes, cfg.vocab_size)
    checkpoint.load(tmp_path / 'theirs', weights, reader)
    found = {n: whole(w) for n, w in weights.items()}
    ids = torch.randint(0, cfg.vocab_size, (4, 32), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = theirs(ids).logits
        close(logits(cfg, found, ids), expected, 'logits')

    with checkpoint.Saver(tmp_path / 'run' / 'ckpt', 1) as saver:
        saver.save(7, weights | state, dict(consumed=0, units=0, best=1.0, wall_s=1.0, owed=False, tokenizer=None,
                                            separator=2, data='', config=asdict(cfg)))
    monkeypatch.setattr(hf, 'FILE_BYTES', 1e5)
    train_gpt.export(replace(cfg, export=str(tmp_path / 'ours')))
    assert len(list((tmp_path / 'ours').glob('model-*-of-*.safetensors'))) > 1
    back, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'ours', output_loading_info=True,
                                                                   dtype=torch.float32)
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(back(ids).logits, expected)
    assert back.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(t, theirs.state_dict()[n]) for n, t in back.state_dict().items())
    # What we wrote is read as the same model again, whatever family it calls itself.
    assert hf.options(tmp_path / 'ours', 32) == hf.options(tmp_path / 'theirs', 32)


PUBLISHED = {  # parameters, as on the models' pages on huggingface.co, and the fields of their config.json
    'Llama-2-7b': (6738415616, '''{"model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false,
        "vocab_size": 32000}'''),
    'Llama-3.1-8B': (8030261248, '''{"model_type": "llama", "attention_bias": false, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "mlp_bias": false, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": false, "vocab_size": 128256}'''),
    'Llama-3.2-1B': (1235814400, '''{"model_type": "llama", "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": true, "vocab_size": 128256}'''),
    'TinyLlama-1.1B': (1100048384, '''{"model_type": "llama", "attention_bias": false, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_hidden_layers": 22,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "vocab_size": 32000}'''),
    'SmolLM2-135M': (134515008, '''{"model_type": "llama", "attention_bias": false, "hidden_act": "silu",
        "hidden_size": 576, "intermediate_size": 1536, "mlp_bias": false, "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05, "rope_interleaved": false,
        "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true, "vocab_size": 49152}'''),
    'Mistral-7B-v0.1': (7241732096, '''{"model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
        "vocab_size": 32000}'''),
    'Qwen2.5-0.5B': (494032768, '''{"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
        "intermediate_size": 4864, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936}'''),
    'Qwen3-0.6B': (596049920, '''{"model_type": "qwen3", "attention_bias": false, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_window_layers": 28, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true, "use_sliding_window": false,
        "vocab_size": 151936}'''),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_models_have_their_parameters(name, tmp_path):
    parameters, config = PUBLISHED[name]
    (tmp_path / 'config.json').write_text(config)
    cfg = config_of(tmp_path)
    assert sum(torch.Size(s).numel() for s in train_gpt.weight_shapes(cfg).values()) == parameters
    o = asdict(cfg)
    assert o['rope_scaling'] == {'Llama-3.1-8B': '8,1,4,8192', 'Llama-3.2-1B': '32,1,4,8192'}.get(name, '')
    written = hf.config_of(o, torch.float32, 0)  # our own config.json says the same
    (tmp_path / 'config.json').write_text(json.dumps(written))
    assert config_of(tmp_path) == cfg and written['model_type'] == json.loads(config)['model_type'].replace(
        'mistral', 'llama')


REFUSED = {  # a change of config.json: what the message names
    'model_type': ('gpt2', "model_type 'gpt2' (known: llama, mistral, qwen2, qwen3)"),
    'hidden_act': ('gelu', "hidden_act 'gelu'"),
    'attention_bias': (True, 'attention_bias True'),
    'mlp_bias': (True, 'mlp_bias True'),
    'rope_interleaved': (True, 'rope_interleaved True'),
    'quantization_config': ({'bits': 4}, 'quantization_config'),
    'rope_scaling': ({'type': 'yarn', 'factor': 4.0}, "rope_type 'yarn' (known: default, linear, llama3)"),
    'rope_parameters': ({'rope_type': 'dynamic', 'rope_theta': 1e4, 'factor': 2.0}, "rope_type 'dynamic'"),
    'partial_rotary_factor': (0.5, 'partial_rotary_factor 0.5'),
    'hidden_size': ('wide', 'a field of the wrong type'),
    'num_hidden_layers': (None, 'layers not a (whole) number above 0'),
    'rms_norm_eps': ('small', 'norm_eps not a (whole) number above 0'),
    'layer_types': (1, 'a field of the wrong type'),
    'num_attention_heads': (0, 'a field of the wrong type'),
    'vocab_size': (-1, 'vocab_size not a (whole) number above 0'),
}


@pytest.mark.parametrize('field', REFUSED)
def test_what_a_model_has_that_this_one_has_not_is_named(field, tmp_path):
    value, message = REFUSED[field]
    config = {**json.loads(PUBLISHED['TinyLlama-1.1B'][1]), field: value}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with pytest.raises(UserError) as e:
        hf.options(tmp_path, 32)
    assert message in str(e.value) and str(tmp_path) in str(e.value) and '\n' not in str(e.value)


def test_sliding_windows(tmp_path):
    """The same model for sequences that fit into the window, another for longer ones."""
    (tmp_path / 'config.json').write_text(PUBLISHED['Mistral-7B-v0.1'][1])
    hf.options(tmp_path, 4096)
    with pytest.raises(UserError, match='sliding_window 4096 .attention to fewer tokens than --seq_len 4097'):
        hf.options(tmp_path, 4097)


@pytest.mark.parametrize('name, more, slides', [
    ('Mistral-7B-v0.1', {'sliding_window': None}, False),
    ('Mistral-7B-v0.1', {'sliding_window': ...}, True),  # its default is 4096
    ('Qwen3-0.6B', {'sliding_window': 4096}, False),  # not used
    ('Qwen3-0.6B', {'sliding_window': 4096, 'use_sliding_window': True}, False),  # from layer 28 of 28 on
    ('Qwen3-0.6B', {'use_sliding_window': True, 'sliding_window': ..., 'max_window_layers': 5}, True),
    ('Qwen3-0.6B', {'layer_types': ['full_attention'] * 27 + ['sliding_attention'], 'sliding_window': 512}, True),
])
def test_which_layers_have_windows(name, more, slides, tmp_path):
    config = {**json.loads(PUBLISHED[name][1]), **more}
    (tmp_path / 'config.json').write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    if slides:
        with pytest.raises(UserError, match='sliding_window'):
            hf.options(tmp_path, 8192)
    else:
        hf.options(tmp_path, 8192)


@pytest.mark.parametrize('more, theta, scaling', [
    (dict(rope_theta=5e5), 5e5, ''),
    (dict(rope_theta=None), 1e4, ''),
    (dict(rope_theta=77, rope_scaling=dict(type='linear', factor=2.6666667)), 77.0, '2.6666667'),
    (dict(rope_parameters=dict(rope_type='default')), 1e4, ''),
    (dict(rope_parameters=dict(rope_type='default', rope_theta=1e6), rope_theta=5), 1e6, ''),
    (dict(rope_parameters=dict(rope_type='llama3', rope_theta=1e6, factor=8, low_freq_factor=1, high_freq_factor=4,
                               original_max_position_embeddings=1048576)), 1e6, '8,1,4,1048576'),
])
def test_rotary_fields_old_and_new(more, theta, scaling, tmp_path):
    config = {k: v for k, v in json.loads(PUBLISHED['TinyLlama-1.1B'][1]).items() if 'rope' not in k}
    (tmp_path / 'config.json').write_text(json.dumps({**config, **more}))
    found = hf.options(tmp_path, 32)
    assert (found['rope_theta'], found['rope_scaling']) == (theta, scaling)


def broken(kind, change, tmp_path, more=None):
    folder = tmp_path / 'broken'
    make(kind, folder, 0)
    cfg = config_of(folder)
    change(folder)
    return hf.Reader(folder, train_gpt.HF_NAMES, train_gpt.weight_shapes(replace(cfg, **(more or {}))), cfg.vocab_size)


def edit_file(name, edit):
    """Changes the tensors of the file that holds `name`."""
    def change(folder):
        from safetensors.torch import load_file, save_file
        index = folder / 'model.safetensors.index.json'
        path = folder / json.loads(index.read_text())['weight_map'][name]
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)
    return change


NORM = 'model.layers.1.input_layernorm.weight'


@pytest.mark.parametrize('change, message', [
    (edit_file(NORM, lambda t: t.pop(NORM)), f'no {NORM}'),
    (edit_file(NORM, lambda t: t.update({NORM: torch.ones(63)})), f'{NORM} is [63], not [64]'),
    (edit_file(NORM, lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)})), f'{NORM} is of type I8'),
    (edit_file(NORM, lambda t: t.update({'model.layers.1.self_attn.o_proj.bias': torch.ones(64)})),
     'model.layers.1.self_attn.o_proj.bias, for which the model has no place'),
    (lambda f: sorted(f.glob('*.safetensors'))[1].unlink(), 'model-00002-of-'),
    (lambda f: sorted(f.glob('*.safetensors'))[1].write_bytes(b'1234'), 'cannot be read'),
    (lambda f: (f / 'model.safetensors.index.json').write_text('{}'), 'has no weight_map'),
    (lambda f: (f / 'model.safetensors.index.json').write_text('{'), 'cannot be read'),
    (lambda f: [p.unlink() for p in f.glob('model*')], 'model.safetensors is missing'),
])
def test_broken_folders_are_one_line(change, message, tmp_path):
    with pytest.raises(UserError) as e:
        broken('Llama 3.2', change, tmp_path)
    assert message in str(e.value) and str(tmp_path) in str(e.value) and '\n' not in str(e.value)


def test_old_buffers_and_a_tied_head_are_no_weights(tmp_path):
    more = {'lm_head.weight': torch.ones(1), 'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(4)}
    reader = broken('Llama 3.2', edit_file(NORM, lambda tensors: tensors.update(more)), tmp_path)
    assert 'head_VD' not in reader.shapes


def test_a_run_from_a_folder_and_its_export(data, tmp_path, monkeypatch):  # noqa: F811
    """--init_from brings the model; the first validation loss is transformers'. The run goes on without the folder;
    what it exports is its last weights and tokenizer."""
    import numpy as np
    import transformers
    from nano import shards
    folder, out = tmp_path / 'qwen', tmp_path / 'run'
    theirs = make('Qwen 2', folder, 3)
    # The model's options are the folder's to bring.
    monkeypatch.setattr('test_runs.OPTIONS', [*OPTIONS[:2], *OPTIONS[OPTIONS.index('--seq_len'):]])
    train = '--init_from', folder, '--eval_windows', 0, '--steps', 4, '--save_every', 2, '--lr', 1e-3

    def start(*options):
        return run(out, data, *train, *options)

    code, stdout, stderr = start('--stop_at', 2, '--layers', 2)
    assert code == 2 and '--layers 3, not 2' in stderr and not out.exists()
    code, stdout, stderr = start('--stop_at', 2, '--strict')
    assert code == 0 and f'starts from the weights of {folder}' in stdout, stderr
    windows = shards.Windows(str(data), 'val', 32)
    nats = []
    for ids, targets in eval_batches(windows, 0, 8, None, lambda *a: [torch.from_numpy(x).long() for x in a]):
        with torch.no_grad():
            nats.append(torch.nn.functional.cross_entropy(theirs(ids).logits.transpose(1, 2), targets, ignore_index=-1,
                                                          reduction='none')[targets != -1])
    assert metrics(out)[1][0]['val_loss'] == pytest.approx(torch.cat(nats).mean().item(), rel=1e-5)
    shutil.rmtree(folder)
    code, stdout, stderr = start('--strict')
    assert code == 0 and f'goes on from {out}/ckpt/step_00000002' in stdout, stderr

    for name, options, dtype in (('f32', (), torch.float32), ('bf16', ('--dtype', 'bfloat16'), torch.bfloat16)):
        code, stdout, stderr = run(out, data, '--export', tmp_path / name, *options)
        assert code == 0 and f'wrote {tmp_path / name}' in stdout, stderr
        back, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values()) and back.dtype == dtype and type(back).__name__ == 'Qwen2ForCausalLM'
        weights = {n: w for n, w in stored(out, 4).items() if 'adam' not in n}
        cfg = train_gpt.Config(**json.loads((out / 'config.json').read_text()))
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 350, (2, 32)))
        with torch.no_grad():
            close(back.float()(ids).logits, logits(cfg, weights, ids), 'logits', 3e-5 if name == 'f32' else 5e-2)
    assert 'PreTrainedTokenizerFast' in stdout  # AutoTokenizer makes Qwen's own kind of it, beside this family alone
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / 'f32')
    from nano.tokenizer import load_tokenizer
    text = 'def f(x):\n\treturn  x + "né"\n'
    ours = load_tokenizer(f'{data}/tokenizer.model')
    assert tokenizer(text).input_ids == ours.encode(text) and tokenizer.eos_token_id == ours.separator

    code, _, stderr = run(out, data, '--export', tmp_path / 'f32')
    assert code == 2 and 'is there already' in stderr
    code, _, stderr = run(out, data, '--export', 'gs://bucket/x')
    assert code == 2 and 'must be a folder on a disk' in stderr
    code, _, stderr = run(tmp_path / 'none', data, '--export', tmp_path / 'x')
    assert code == 2 and '--out' in stderr and not (tmp_path / 'x').exists() and not (tmp_path / 'none').exists()
    code, stdout, stderr = run(tmp_path / 'again', data, *train, '--init_from', tmp_path / 'f32', '--steps', 1)
    assert code == 0 and metrics(tmp_path / 'again')[1][0]['val_loss'] == metrics(out)[1][-1]['val_loss'], stderr


def test_an_export_that_fails_leaves_nothing(tmp_path):
    def weights():
        yield 'final_norm_D', torch.ones(4)
        raise OSError('no space')
    with pytest.raises(OSError):
        hf.write(tmp_path / 'x', {}, weights(), train_gpt.HF_NAMES, torch.float32, 4, print)
    assert not any(tmp_path.iterdir())
