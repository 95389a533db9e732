"""README.md's commands: each `bash launch.sh ...` as it stands there, in a copy of this checkout, with a small model."""
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nano import images, runtime, shards

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')
COMMANDS = [shlex.split(line, comments=True)[2:] for block in re.findall(r'```bash\n(.*?)```', README, re.S)
            for line in block.splitlines() if line.startswith('bash launch.sh')]
SMALL = '''--layers 1 --width 32 --heads 2 --kv_heads 1 --head_size 16 --mlp_width 32 --seq_len 32 --global_batch 4 --accumulate 1
--eval_windows 4 --sample_tokens 20 --save_every 0 --warmup 2 --lr 0.01'''.split()


SMALL_VIT = '''--layers 1 --width 32 --heads 2 --mlp_width 32 --patch 8 --image_size 24 --global_batch 8 --warmup 2 --save_every 0
--lr 0.01'''.split()


@pytest.fixture(scope='module')
def checkout(corpus, tmp_path_factory):
    """What a newcomer has after the first command, with the shards of a small corpus and the files that README names.
    .venv's Python starts the one of these tests."""
    here = tmp_path_factory.mktemp('clone') / 'here'
    shutil.copytree(ROOT, here, ignore=shutil.ignore_patterns('.git', '.venv*', 'out', '__pycache__', 'shards'))
    shutil.copytree(corpus, here / 'data' / 'shards' / 'text')
    python = here / '.venv' / 'bin' / 'python'
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    hashes = subprocess.run(['sha256sum', 'requirements.txt', 'tests/requirements.txt'], cwd=here, text=True,
                            capture_output=True, check=True).stdout
    (here / '.venv' / 'launch.stamp').write_text(f'{here}, Python {sys.version_info[0]}.{sys.version_info[1]}\n{hashes}')

    (here / 'books').mkdir()
    library = Path(os.__file__).parent
    for name in ('argparse', 'ast', 'cmd', 'copy', 'csv', 'enum', 'glob', 'gzip', 'heapq', 'hmac', 'imaplib', 'inspect'):
        shutil.copy(library / f'{name}.py', here / 'books' / f'{name}.txt')
    shutil.copy(ROOT / 'README.md', here / 'notes.md')
    make_foreign_shards(here)
    make_pictures(here)
    make_model(here)
    return here


def make_pictures(here):
    """flowers/ and imagenet/, and the image shards that train_vit.py makes by default."""
    rng = np.random.default_rng(0)
    for folder, n in (('flowers', 12), ('imagenet/train', 6), ('imagenet/val', 2)):
        for name in ('rose', 'tulip'):
            (here / folder / name).mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(256, size=(30, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(here / folder / name / f'{i}.jpg')
    grey = ((pixels[:28, :28, :1], k % 10) for k in range(20))
    entries = [images.write_shard(str(here / 'data/shards/images'), split, 0, (28, 28, 1), grey if split == 'train' else
                                  [(pixels[:28, :28, 1:2], k) for k in range(10)]) for split in ('train', 'val')]
    images.write_manifest(str(here / 'data/shards/images'), dict(
        format=1, kind='images', image=[28, 28, 1], classes=list('abcdefghij'), mean=[.5], std=[.3], resize='none',
        shards=entries, source={}))


def make_model(here):
    """MODEL: what one downloads from HuggingFace, with the tokenizer that was made."""
    import transformers
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=50257, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16)).save_pretrained(here / 'MODEL')
    shutil.copy(here / 'tokenizer.json', here / 'MODEL')


def make_foreign_shards(here):
    """FOLDER and tokenizer.json: shards as llm.c writes them, with ids of GPT-2's kind of tokenizer."""
    import tokenizers
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = tokenizers.decoders.ByteLevel()
    t.train_from_iterator([README], tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    t.add_special_tokens(['<|endoftext|>'])
    made = json.loads(t.to_str())
    made['added_tokens'][0]['id'] = made['model']['vocab']['<|endoftext|>'] = 50256  # README's number, GPT-2's
    (here / 'tokenizer.json').write_text(json.dumps(made))
    (here / 'FOLDER').mkdir()
    for split, documents in (('train', 30), ('val', 4)):
        ids = [i for _ in range(documents) for i in [50256, *t.encode(README[:1000]).ids]]
        header = np.zeros(256, '<i4')
        header[:3] = 20240520, 1, len(ids)
        (here / 'FOLDER' / f'fineweb_{split}_000001.bin').write_bytes(header.tobytes() + np.array(ids, '<u2').tobytes())


def launch(checkout, *args, code=0):
    env = {k: v for k, v in os.environ.items() if k not in ('CPU_NUM_DEVICES', 'PJRT_DEVICE')}
    env['XDG_CACHE_HOME'] = str(checkout / 'cache')
    done = subprocess.run(['bash', 'launch.sh', *map(str, args)], cwd=checkout, env=env, text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=300)
    print(*args, done.returncode, done.stdout[-3000:], done.stderr[-3000:], sep='\n')
    assert done.returncode == code
    return done


def test_commands_are_found():
    assert len(COMMANDS) >= 10 and [] in COMMANDS and ['test'] in COMMANDS
    files = re.findall(r'`((?:data|launch|nano|tests)/[\w./]*|[\w]+\.(?:py|sh|txt))`', README)
    made = {'log.txt', 'broken.txt', 'data/shards/text'}
    assert len(files) > 15 and all((ROOT / name).exists() for name in set(files) - made)


def test_the_commands(checkout):
    """Those that make data first. The options of a small model come last and win."""
    done = []
    for args in sorted(COMMANDS, key=lambda args: ('hf/flowers' in args and '--init_from' in args, '--export' in args,
                                                   not ' '.join(args).startswith('data/'))):
        if args[:1] == ['test']:  # pytest within pytest: that these tests are found is enough
            found = launch(checkout, *args, '--collect-only', '-q', *([] if args[1:] else ['tests/test_config.py']))
            assert re.search(r'tests? collected|/[0-9]+ tests collected', found.stdout)
        elif '--help' in args:
            found = launch(checkout, *args)
            assert '--seq_len int' in found.stdout and '124m' in found.stdout
        elif '--export' in args:
            found = launch(checkout, *args)
            assert f'wrote {args[-1]}' in found.stdout
        elif '--plan' in args:  # up to where it would be compiled, which takes minutes: tests/test_plan.py does that
            found = launch(checkout, *args, *SMALL, '--seq_len', 128, '--global_batch', 15, code=2)
            assert '--global_batch 15: must be a multiple of 16' in found.stderr
        elif '--preset' in args and not runtime.tpu_chips():  # wants a TPU: its options and data are accepted before
            found = launch(checkout, *args, '--device', 'tpu', code=2)
            assert 'error: no TPU on this machine' in found.stderr
        elif args[:1] == ['train_vit.py']:
            small = SMALL_VIT[SMALL_VIT.index('--global_batch'):] if '--init_from' in args else SMALL_VIT
            found = launch(checkout, *args, *small, '--steps', 2)
            assert 'step 2: validation loss' in found.stdout and 'step 2: wrote' in found.stdout
        elif args[:1] == ['train_gpt.py']:
            small = SMALL[SMALL.index('--seq_len'):] if '--init_from' in args else SMALL
            found = launch(checkout, *args, *small, '--steps', 2)
            assert 'step 2: validation loss' in found.stdout and 'step 2: wrote' in found.stdout
        elif args:  # the bare command follows below
            found = launch(checkout, *args)
            assert 'val' in found.stdout
        done.append(args[:1])
    assert ['data/text.py'] in done and ['data/manifest.py'] in done
    for name in ('mine', 'fineweb'):
        assert (checkout / 'out' / name / 'ckpt' / 'step_00000002' / 'meta.json').exists(), name
    for folder in ('data/shards/mine', 'FOLDER'):
        manifest = shards.load_manifest(str(checkout / folder))
        assert {s['split'] for s in manifest['shards']} == {'train', 'val'} and manifest['separator'] is not None


def test_the_bare_command_over_many_steps_keeps_its_memory(checkout):
    """`bash launch.sh` without options, its defaults made small in the copy: the sample reads like the corpus, and what
    a process holds does not grow with its steps, epochs, evaluations and checkpoints."""
    script = checkout / 'train_gpt.py'
    text = script.read_text()
    smaller = dict(zip((o[2:] for o in SMALL[::2]), SMALL[1::2]), width=64, steps=600, save_every=50, eval_every=50,
                   out='out/many')
    for name, value in smaller.items():
        text, n = re.subn(rf"^    {name}: (\w+) = [^ ]+ ", lambda m: f'    {name}: {m[1]} = {value!r} ' if m[1] == 'str'
                          else f'    {name}: {m[1]} = {value} ', text, flags=re.M)
        assert n == 1, name
    script.write_text(text)
    try:
        found = launch(checkout)
    finally:
        shutil.copy(ROOT / 'train_gpt.py', script)
    lines = [json.loads(x) for x in (checkout / 'out/many/metrics.jsonl').read_text().splitlines()]
    steps = [x for x in lines if 'loss' in x]
    assert steps[-1]['step'] == 600 and steps[-1]['compiles'] == steps[0]['compiles'] == 4
    assert steps[-1]['loss'] < steps[0]['loss'] - 1.5
    rss = {x['step']: x['rss_gb'] for x in steps}
    assert rss[600] < rss[200] + 0.02, rss
    kept = sorted(p.name for p in (checkout / 'out/many/ckpt').iterdir())
    assert kept == ['step_00000550', 'step_00000600']  # --keep 2
    assert (checkout / 'out/many/samples/step_00000600.txt').read_text() in found.stdout


def test_the_lines_of_python(checkout):
    """What loads an export, as it stands there, with the export that the commands before made."""
    code, = re.findall(r'```python\n(.*?)```', README, re.S)
    done = subprocess.run([sys.executable, '-c', code.replace('max_new_tokens=100', 'max_new_tokens=5')], cwd=checkout,
                          text=True, capture_output=True)
    assert done.returncode == 0 and 'The king' in done.stdout, done.stderr
