"""data/text.py and nano/tokenizer.py against plain sentencepiece calls and brute-force splitting."""
import gzip
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import sentencepiece

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, 'data')]
import bpe  # noqa: E402
import sources  # noqa: E402
import text as script  # noqa: E402
from nano.shards import DataError, load_manifest, verify  # noqa: E402
from nano.tokenizer import load_tokenizer  # noqa: E402

SCRIPT = os.path.join(ROOT, 'data', 'text.py')
NASTY = ['a  b   c', ' lead', 'trail ', '\n\n\nx\n', 'x\r\n\r\ny', '\tif x:\t\ty', '\ufeffbom', 'nul\0nul',
         'e\u0301 é ﬁ ①', '👩\u200d👩\u200d👧 🇺🇦', '<s>', '</s>', '<unk>', '<0x0A>', '<pad> <|endoftext|>',
         '中文，没有空格。', '\u2585 \u2047',
         '\x1b[0m', '1234567890', ' ', '\n', 'a', '\u200b\u00a0\u3000', 'مرحبا', '\U0010ffff', ' \n \n  \n', 'x' * 5000]


def words(rng, n):
    syllables = 'ka lo mi ru ten sha vor el in os ap qua zi'.split()
    return ''.join(rng.choice([' ', ' ', ' ', '\n', '. ', ',  ', '\n\n', '\r\n'])
                   + ''.join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(n))


def run(*args, code=0):
    done = subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    if code == 2:
        assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp('model') / 'tokenizer.model'
    text = words(random.Random(0), 30000)
    bpe.train_tokenizer([text[i:i + 2000] for i in range(0, len(text), 2000)] + NASTY, 700, str(path))
    return str(path)


def tokens_of(folder, split):
    """The split's ids, read without nano.shards."""
    m = json.load(open(os.path.join(folder, 'manifest.json')))
    parts = [np.fromfile(os.path.join(folder, s['file']), m['dtype'], offset=1024)
             for s in m['shards'] if s['split'] == split]
    return np.concatenate(parts).tolist() if parts else []


def documents_of(folder):
    """{split: [text, ...]}, decoded by sentencepiece itself; checks the manifest's counts on the way."""
    m = load_manifest(str(folder))
    verify(str(folder), m, sorted({s['split'] for s in m['shards']}), log=lambda *a: None)
    sp = sentencepiece.SentencePieceProcessor(model_file=os.path.join(folder, 'tokenizer.model'))
    found = {}
    for split in ('train', 'val'):
        texts, ids = [], []
        for i in tokens_of(folder, split):
            if i == m['separator']:
                texts.append(sp.decode(ids))
                ids = []
            else:
                assert not sp.is_control(i)
                ids.append(i)
        assert not ids, 'a separator follows each document'
        entries = [s for s in m['shards'] if s['split'] == split]
        assert sum(s['documents'] for s in entries) == len(texts)
        assert sum(s['bytes'] for s in entries) == len(''.join(texts).encode())
        found[split] = texts
    return found


def test_lossless_on_nasty_text(model, seed):
    tokenizer, rng = load_tokenizer(model), random.Random(seed)
    for text in NASTY + [''.join(rng.choices(NASTY, k=5)) for _ in range(300)]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {0, 1, 2} & set(ids), 'text became a control id'
    assert tokenizer.separator == 2 and tokenizer.vocab_size == 700
    assert tokenizer.decode(tokenizer.encode('\u2581')) == ' '  # the one exception
    assert tokenizer.decode(tokenizer.encode('🎉')[:2]) in ('\ufffd', '\ufffd\ufffd') and tokenizer.decode([2]) == ''
    with pytest.raises(ValueError):
        tokenizer.decode([700])


def test_pieces_are_the_whole(model, seed):
    """Unit by unit, and cut at any CUT, the ids are those that sentencepiece gives for the whole text."""
    sp, rng = sentencepiece.SentencePieceProcessor(model_file=model), random.Random(seed)
    encoder = bpe.Encoder(model)
    assert encoder.by_unit
    alphabet = list('ab .,\n\n  \t\r\u2581é\u0301中\ufeff\0<>/0') + NASTY + [' ka', 'lo', '\n\n**']
    for unit in (bpe.UNIT, bpe.WORD) if encoder.unit is bpe.WORD else (bpe.UNIT,):
        encoder.unit, encoder.ids = unit, {}
        for _ in range(400):
            text = ''.join(rng.choices(alphabet, k=rng.randrange(60)))
            whole, raw = sp.encode(text), text.encode()
            assert np.frombuffer(encoder(text), np.uint16).tolist() == whole
            for found in bpe.CUT.finditer(raw):
                left, right = raw[:found.start()].decode(), raw[found.start():].decode()
                assert sp.encode(left) + sp.encode(right) == whole
    text = words(rng, 40000)  # longer than the encoder takes at once
    assert np.frombuffer(encoder(text), np.uint16).tolist() == sp.encode(text)
    assert np.frombuffer(encoder('q' * 70000), np.uint16).tolist() == sp.encode('q' * 70000)


@pytest.mark.parametrize('changed', [{'add_dummy_prefix': True}, {'remove_extra_whitespaces': True},
                                     {'normalization_rule_name': 'nmt_nfkc'}, {'model_type': 'unigram'},
                                     {'byte_fallback': False}, {'split_by_whitespace': False, 'vocab_size': 900}])
def test_foreign_models_get_whole_documents(tmp_path, changed):
    options = dict(model_type='bpe', vocab_size=330, normalization_rule_name='identity', byte_fallback=True,
                   add_dummy_prefix=False, remove_extra_whitespaces=False, allow_whitespace_only_pieces=True)
    options |= changed
    if not options['byte_fallback']:
        options['vocab_size'] = 90
    out = io.BytesIO()
    text = words(random.Random(1), 3000).replace('\n', ' ')
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter([text]), model_writer=out, minloglevel=2,
                                             max_sentence_length=1 << 20, **options)
    path = tmp_path / 'x.model'
    path.write_bytes(out.getvalue())
    encoder = bpe.Encoder(str(path))
    assert not encoder.by_unit
    text = '  Hello  ka lo\n\nmi '
    assert np.frombuffer(encoder(text), np.uint16).tolist() == \
        sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(text)


def test_training_is_deterministic_and_capped(tmp_path):
    rng = random.Random(3)
    pieces = [words(rng, 200) for _ in range(50)]
    for name in ('a', 'b'):
        bpe.train_tokenizer(pieces, 500, str(tmp_path / name))
    assert (tmp_path / 'a').read_bytes() == (tmp_path / 'b').read_bytes()
    with pytest.raises(DataError, match=r'--vocab_size 60000: too high for this text, which gives at most \d+'):
        bpe.train_tokenizer(pieces, 60000, str(tmp_path / 'c.model'))
    for text in ('a', '\n', '\0', '\u2585', ' ', '中' * 9000, ''.join(map(chr, range(0x4e00, 0x7e00)))):
        bpe.train_tokenizer([text], None, str(tmp_path / 'c.model'))
        tokenizer = load_tokenizer(str(tmp_path / 'c.model'))
        assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.vocab_size <= 4096
        bpe.train_tokenizer([text], 260, str(tmp_path / 'c.model'))


def test_sample_is_the_smallest_hashes_in_any_order(seed):
    rng = random.Random(seed)
    for _ in range(200):
        pieces = {rng.randrange(1000): 'x' * rng.randint(1, 40) for _ in range(rng.randrange(60))}
        budget, kept, size = rng.randint(1, 400), [], 0
        for h in sorted(pieces):  # the longest prefix that fits
            size += len(pieces[h])
            if size > budget:
                break
            kept.append(pieces[h])
        order = list(pieces) * 2
        rng.shuffle(order)
        sample = bpe.Sample(budget)
        for h in order:
            sample.add(h, pieces[h])
        assert sample.pieces() == kept


def test_spans_are_the_stream(seed, monkeypatch):
    """Against bytes.split: with documents from empty to many batches, any bytes, whole or in parts."""
    rng = random.Random(seed)
    monkeypatch.setattr(sources, 'BATCH', 1 << 17)
    for case in range(60):
        sep = rng.choice([None, b'|', b'<|end|>', b'\n\n'])
        junk = bytes(rng.choices(b'ab \n\xe2\x96\x81\x80', k=rng.randint(1, 4000)))
        documents = [rng.choice([b'', b'x', b'ab c\n', junk]) * rng.choice([1, 1, 1, 100])
                     for _ in range(rng.randint(1, 12))]
        raw = (sep or b'').join(documents)
        whole = rng.random() < .3
        got, open_, end = [], b'', 0
        for kind, offset, payload in sources.spans(io.BytesIO(raw), sep, whole):
            assert raw[offset:offset + len(payload)] == payload and offset >= end
            end = offset + len(payload)
            if kind == 'docs':
                got += payload.split(sep) if sep else [payload]
                assert whole or len(payload) <= 3 * sources.BATCH
            else:
                assert not whole and len(payload) <= 3 * sources.BATCH
                open_ += payload
                if kind == 'last':
                    got.append(open_)
                    open_ = b''
        expected = raw.split(sep) if sep else [raw]
        if sep and raw and not expected[-1]:
            expected.pop()  # what ends with a separator has no empty document after it
        if got and sep and raw.endswith(sep) and got[-1] == b'' and len(got) == len(expected) + 1:
            got.pop()
        assert got == expected, (case, sep, whole)


@pytest.mark.parametrize('n', [1, 2, 1023])
def test_pipeline(tmp_path, n, seed):
    """Any number of documents, some of one byte, one longer than a shard: all there once, in order, split by hash."""
    rng = random.Random(seed)
    texts = [rng.choice([str(i), words(rng, 40), words(rng, 3) + NASTY[i % len(NASTY)]]) for i in range(n)]
    texts[n // 2] = words(rng, 3000)
    with gzip.open(tmp_path / 'x.jsonl.gz', 'wt') as f:
        f.writelines(json.dumps({'body': t}) + '\n' for t in texts)
    out = tmp_path / 'out'
    shown = run(tmp_path / 'x.jsonl.gz', '--field', 'body', '--out', out, '--shard_tokens', 1000, '--val_fraction', .1)
    key = {t: int.from_bytes(hashlib.blake2b(t.encode(), digest_size=8, key=b'0').digest(), 'big') for t in texts}
    val = {t for t in texts if key[t] < .1 * 2**64} or {min(texts, key=key.get)}
    if n == 1:
        val = set()
        assert '--split_on' in shown
    elif len(val) == n:
        val = set(texts) - {max(texts, key=key.get)}
    got = documents_of(out)
    assert got['train'] == [t for t in texts if t not in val] and got['val'] == [t for t in texts if t in val]
    assert f'{n:,} documents' in shown and 'bytes per token' in shown


def test_a_val_split_far_from_what_was_asked_is_told(tmp_path, model, capsys):
    """One line, for a split with less or more text than asked, or so little that its loss says nothing."""
    total = [1_600_000, 38, 5_000_000]
    for tokens, bytes_, text in ((160_000, 494_363, ''),  # the plays
                                 (9000, 30_000, 'val has 4 of 38 documents, 0.60% of the bytes (--val_fraction asks'),
                                 (900_000, 2_800_000, '56.00% of the bytes'),
                                 (4000, 500_000, '4,000 tokens: the loss')):
        script.check_val([tokens, 4, bytes_], total, .15)
        shown = capsys.readouterr().out
        assert text in shown and shown.count('\n') == bool(text) == shown.startswith('warning: ')
        assert ('--split_on' in shown) == ('%' in text)
    for i in range(2):  # two documents: half or so is val
        (tmp_path / f'{i}.txt').write_text(words(random.Random(i), 6000))
    args = [tmp_path, '--tokenizer', model, '--out', tmp_path / 'out']
    shown = run(*args)
    assert 'warning: val has 1 of 2 documents, ' in shown and '--split_on' in shown
    assert 'warning' not in run(*args, '--force', '--split_on', 'ka', '--val_fraction', .2)
    assert 'warning' not in run(*args, '--force', '--val_fraction', 0)


def test_kinds_of_input_and_what_is_skipped(tmp_path):
    pa = pytest.importorskip('pyarrow')
    pq, zstandard = pytest.importorskip('pyarrow.parquet'), pytest.importorskip('zstandard')
    folder = tmp_path / 'in'
    (folder / 'sub').mkdir(parents=True)
    (folder / 'b.txt').write_bytes(b'b \xff\xfe bad\xe2\x82')
    (folder / 'a.md').write_bytes(b'\xef\xbb\xbfa\r\nb')
    (folder / 'empty.py').write_bytes(b'')
    (folder / 'ignored.bin').write_bytes(b'x')
    (folder / 'sub' / 'c.jsonl').write_bytes(
        b'\xef\xbb\xbf{"text": "c0"}\r\n\n{broken\n{"other": 1}\n{"text": null}\n[1]\n'
        b'{"text": "c1 \\ud83d"}\n{"text": ""}\n{"text": "c2"}')
    rows = pa.table({'text': ['d0', None, 'd1'], 'other': [1, 2, 3]})
    pq.write_table(rows, folder / 'sub' / 'd.parquet')
    (folder / 'sub' / 'e.jsonl.zst').write_bytes(
        zstandard.compress(b'{"text": "e0"}\n') + zstandard.compress(b'{"text": "e1"}'))
    out = tmp_path / 'out'
    shown = run(folder, '--out', out, '--val_fraction', 0)
    assert documents_of(out)['train'] == [
        '\ufeffa\r\nb', 'b \ufffd\ufffd bad\ufffd', 'c0', 'c1 \ufffd', 'c2', 'd0', 'd1', 'e0', 'e1']
    for line in (f'not UTF-8, replaced by U+FFFD: 3 (first: {folder}/b.txt, byte 2)',
                 f'empty documents, skipped: 2 (first: {folder}/empty.py, byte 0)',
                 f'lines that are not JSON, skipped: 1 (first: {folder}/sub/c.jsonl, byte 20)',
                 "rows or lines without text in 'text' (see --field), skipped: 4 "
                 f'(first: {folder}/sub/c.jsonl, byte 28)',
                 'documents with lone surrogates, replaced by U+FFFD: 1'):
        assert line in shown, shown
    assert load_manifest(str(out))['source']['notes']
    assert 'there are: text (' in run(folder / 'sub' / 'd.parquet', '--field', 'nope', '--out', tmp_path / 'n', code=2)


def test_one_huge_document_and_any_number_of_workers(tmp_path, model, seed):
    rng = random.Random(seed)
    text = words(rng, 60000) * 4 + 'z' * 100000 + words(rng, 10) + NASTY[9] + '|one more|' + words(rng, 100000)
    (tmp_path / 'x.txt').write_bytes(text.encode())
    ids = []
    for workers in (1, 3):
        out = tmp_path / f'out{workers}'
        run(tmp_path / 'x.txt', '--out', out, '--split_on', '|', '--tokenizer', model, '--workers', workers,
            '--shard_tokens', 300_000, '--val_fraction', 0)
        ids.append(tokens_of(out, 'train'))
    assert len(text) > 4 * sources.BATCH
    sp = sentencepiece.SentencePieceProcessor(model_file=model)
    assert ids[0] == ids[1] == [i for t in text.split('|') for i in sp.encode(t) + [2]]


def test_vocabularies_either_side_of_65536(tmp_path, model):
    """Adds unused pieces to a model: a protocol buffer's repeated field may simply be appended to."""
    raw = open(model, 'rb').read()
    for size, dtype in ((65536, 'uint16'), (65537, 'uint32')):
        path = tmp_path / f'{size}.model'
        pieces = [f'zq{i}'.encode() for i in range(701, size)] + ['🦀'.encode()]
        path.write_bytes(raw + b''.join(b'\n' + bytes([len(p) + 2]) + b'\n' + bytes([len(p)]) + p for p in pieces))
        (tmp_path / 'x.txt').write_text('ka lo 🦀')
        run(tmp_path / 'x.txt', '--out', tmp_path / f'{size}', '--tokenizer', path)
        m = load_manifest(str(tmp_path / f'{size}'))
        assert (m['dtype'], m['vocab_size']) == (dtype, size)
        assert size - 1 in tokens_of(tmp_path / f'{size}', 'train')


def test_tokenizer_json(tmp_path):
    tokenizers = pytest.importorskip('tokenizers')
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = tokenizers.decoders.ByteLevel()
    t.train_from_iterator([words(random.Random(1), 500)], tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=['<|endoftext|>'], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    t.save(str(tmp_path / 'tokenizer.json'))
    ours = load_tokenizer(str(tmp_path / 'tokenizer.json'))
    assert (ours.separator, ours.vocab_size) == (0, 400)
    for text in [*NASTY, '\u2581']:
        assert 0 not in ours.encode(text) and ours.decode(ours.encode(text)) == text
    texts = [words(random.Random(2), 50), 'x<|endoftext|>y']
    (tmp_path / 'x.jsonl').write_text(''.join(json.dumps({'text': x}) + '\n' for x in texts))
    run(tmp_path / 'x.jsonl', '--tokenizer', ours.path, '--out', tmp_path / 'out', '--val_fraction', 0)
    assert tokens_of(tmp_path / 'out', 'train') == [i for x in texts for i in ours.encode(x) + [0]]
    (tmp_path / 'bad.json').write_text('{}')
    (tmp_path / 'bad.model').write_bytes(b'junk')
    for name in ('bad.json', 'bad.model', 'missing.model', 'x.jsonl'):
        with pytest.raises(DataError, match=name):
            load_tokenizer(str(tmp_path / name))


def test_bad_options_and_inputs(tmp_path, monkeypatch, capsys):
    (tmp_path / 'empty.txt').write_text('')
    (tmp_path / 'a.txt').write_text('a')
    (tmp_path / 'a.log').write_text('a')
    (tmp_path / 'none').mkdir()
    (tmp_path / 'broken').mkdir()
    os.symlink('nowhere', tmp_path / 'broken' / 'x.txt')
    a, out = str(tmp_path / 'a.txt'), str(tmp_path / 'out')
    for args, words_ in ((['--nope'], '--nope'), ([a, '--vocab_size', '12'], 'at least 260'),
                         ([a, '--val_fraction', '1'], 'below 1'),
                         ([a, '--vocab_size', 'x'], "whole number such as 64, 1e6 or 50_000, not 'x'"),
                         ([a, '--workers', '1e999'], '--workers: expected a whole number'),
                         ([a, '--split_on', ''], '--split_on'),
                         ([a, '--shard_tokens', '0'], '--shard_tokens'), ([a, '--out', a], 'is a file'),
                         ([str(tmp_path / 'gone')], 'no such file'),
                         ([str(tmp_path / 'none')], 'no file in this folder'),
                         ([str(tmp_path / 'a.log')], 'no known kind'), ([str(tmp_path / 'broken')], 'broken link'),
                         ([a, '--out', str(tmp_path)], 'not empty'), ([a, '--tokenizer', a], 'sentencepiece .model')):
        assert script.main([*args] if '--out' in args else [*args, '--out', out]) == 2, args
        error = capsys.readouterr().err
        assert error.startswith('error: ') and words_ in error and error.count('\n') == 1, error
    assert 'no document is left' in run(tmp_path / 'empty.txt', '--out', out, code=2)
    (tmp_path / 'bad.jsonl.gz').write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-20])
    assert 'bad.jsonl.gz: cannot be read' in run(tmp_path / 'bad.jsonl.gz', '--out', out, code=2)
    assert 'too high for this text' in run(a, '--vocab_size', 5000, '--out', out, code=2)
    assert not os.path.exists(out) and not os.path.exists(out + '.tmp')
    monkeypatch.setitem(sys.modules, 'zstandard', None)
    with pytest.raises(DataError, match='package zstandard: .*python.* -m pip install -r .*/data/requirements.txt'):
        sources.need('zstandard', 'x.zst')


def test_again_force_killed_and_two_at_once(tmp_path):
    folder, out = tmp_path / 'in', tmp_path / 'out'
    folder.mkdir()
    rng = random.Random(5)
    for i in range(8):
        (folder / f'{i}.txt').write_text(words(rng, 12000))
    command = [sys.executable, SCRIPT, str(folder), '--out', str(out)]

    first = subprocess.Popen(command, start_new_session=True)  # killed with its workers at work
    while not list(tmp_path.glob('out.tmp/tokenizer.model')):
        assert first.poll() is None
        time.sleep(.01)
    first.send_signal(signal.SIGSTOP)
    below = open(f'/proc/{first.pid}/task/{first.pid}/children').read().split()
    assert 'another process is writing' in run(folder, '--out', out, code=2)
    first.kill()
    first.wait()
    assert not out.exists() and not (tmp_path / 'out.tmp' / 'manifest.json').exists()
    deadline = time.time() + 10
    while any(os.path.exists(f'/proc/{p}') and 'Z' not in open(f'/proc/{p}/stat').read().split()[2] for p in below):
        assert time.time() < deadline, 'a worker outlived the main process'
        time.sleep(.05)

    (tmp_path / 'out.tmp' / 'fetched').rmdir()
    second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob('out.tmp/fetched')):
        time.sleep(.01)
    second.send_signal(signal.SIGINT)
    said = second.communicate(timeout=60)[1]
    assert 'interrupted' in said and 'leaked' not in said and second.returncode == 130
    assert not out.exists() and not (tmp_path / 'out.tmp').exists()

    run(folder, '--out', out)
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.iterdir()}
    assert 'already complete, nothing to do' in run(folder, '--out', out)
    assert before == {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.iterdir()}
    assert 'vocab_size was None, now 300' in run(folder, '--out', out, '--vocab_size', 300, code=2)
    run(folder, '--out', out, '--force')
    assert {n: b for n, (_, b) in before.items()} == {p.name: p.read_bytes() for p in out.iterdir()}
    (folder / '8.txt').write_text('new')
    assert 'the input files have changed' in run(folder, '--out', out, code=2)
    assert f'(from {folder})' in run(folder / '8.txt', '--out', out, code=2)

    both = [subprocess.Popen([*command[:-1], str(tmp_path / 'two')], stderr=subprocess.DEVNULL) for _ in range(2)]
    assert sorted(p.wait() for p in both) in ([0, 0], [0, 2])
    assert len(documents_of(tmp_path / 'two')['train']) + len(documents_of(tmp_path / 'two')['val']) == 9
