"""The tokenizer files for transformers: AutoTokenizer gives the ids of ours, or there are no files and a reason."""
import io
import json
import os
import random

import pytest
import sentencepiece

from nano.tokenizer import load_tokenizer, write_huggingface

transformers = pytest.importorskip('transformers')
tokenizers = pytest.importorskip('tokenizers')

CODE = ''.join(open(f'{os.path.dirname(os.__file__)}/{name}.py').read() for name in ('argparse', 'ast', 'calendar'))
ODD = ['\t', '\n', '\r\n', ' ', '  ', ' ' * 7, '\u2581', '\ufeff', '\u200b', 'e\u0301', '👩\u200d👩', '中文，', '\0', '\x7f',
       'aaaa', '====', '<0x0A>', '<0x', '\u00a0', '\u3000', '\U0010ffff', '\ufffd', '\u2585 \u2047', '11', '<u>',
       '<u', 'a b', 'مرحبا', 'ﬁ ①', '🇺🇦']


def texts(rng, n):
    for _ in range(n):
        yield rng.choice([
            lambda: CODE[(i := rng.randrange(len(CODE))):i + rng.randint(0, 400)],
            lambda: rng.randbytes(rng.randint(0, 40)).decode(errors='replace'),
            lambda: ''.join(map(chr, rng.choices(range(0xd800), k=5) + rng.choices(range(0xe000, 0x110000), k=5))),
            lambda: ''.join(rng.choice(' a=\n') * rng.randint(1, 70) for _ in range(4)),
            lambda: ''.join(rng.choice(ODD) if rng.random() < .6 else CODE[(i := rng.randrange(len(CODE))):i + 5]
                            for _ in range(rng.randint(0, 25)))])()
    yield from ODD
    yield CODE[:20_000]


def train(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CODE.splitlines() + ['中文 naïve e\u0301 👩\u200d👩 \ufeff\u00a0'] * 3), model_writer=model,
        minloglevel=2, **{'model_type': 'bpe', 'vocab_size': 900, 'normalization_rule_name': 'identity',
                          'byte_fallback': True, 'remove_extra_whitespaces': False, 'character_coverage': .9995,
                          'allow_whitespace_only_pieces': True, **options})
    path.write_bytes(model.getvalue())
    return str(path)


def export(path, folder, model_type='llama'):
    """AutoTokenizer's and our tokenizer, after a model's config.json came beside the files."""
    folder.mkdir()
    assert write_huggingface(path, str(folder)) == ''
    (folder / 'config.json').write_text(json.dumps({'model_type': model_type}))
    return transformers.AutoTokenizer.from_pretrained(str(folder)), load_tokenizer(path)


def compare(theirs, ours, rng, n=1000, lossless=True):
    assert len(theirs) == ours.vocab_size and theirs.eos_token_id == ours.separator
    for text in texts(rng, n):
        ids = ours.encode(text)
        assert theirs(text)['input_ids'] == theirs.encode(text) == ids, repr(text)
        if lossless:
            assert theirs.decode(ids) == ours.decode(ids) == text.replace('\u2581', ' '), repr(text)


def test_our_own(corpus, tmp_path, seed, caplog, capfd):
    theirs, ours = export(os.path.join(corpus, 'tokenizer.model'), tmp_path / 'out')
    compare(theirs, ours, random.Random(seed))
    assert sorted(os.listdir(tmp_path / 'out')) == [
        'config.json', 'tokenizer.json', 'tokenizer.model', 'tokenizer_config.json']
    assert (theirs.unk_token, theirs.bos_token, theirs.eos_token) == ('<unk>', '</s>', '</s>')
    # The custom that the function tells of, and the way around it.
    assert theirs.encode('a</s>b')[1:2] == [theirs.eos_token_id] and theirs.decode([2], skip_special_tokens=True) == ''
    assert theirs.encode('a</s>b<unk>', split_special_tokens=True) == ours.encode('a</s>b<unk>')
    # What is saved again is the same tokenizer.
    theirs.save_pretrained(tmp_path / 'again')
    compare(transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'again')), ours, random.Random(seed), 200)
    assert 'regex' not in caplog.text + ''.join(capfd.readouterr()), 'transformers wants to repair it'


@pytest.mark.parametrize('model_type', ['mistral', 'qwen3'])
def test_llama_style(tmp_path, seed, model_type):
    theirs, ours = export(train(tmp_path / 'x.model', add_dummy_prefix=True), tmp_path / 'out', model_type)
    compare(theirs, ours, random.Random(seed), 500)


@pytest.mark.parametrize('options, lossless', [
    ({'user_defined_symbols': ['<u>', '<u', '\n', 'aaaa', 'a b', ' ' * 4, '\u2581' * 3], 'control_symbols': ['<c>'],
      'pad_id': 3}, True),
    ({'bos_id': -1, 'eos_id': -1, 'user_defined_symbols': ['<|endoftext|>']}, True),
    ({'bos_id': -1, 'eos_id': -1}, True),
    ({'split_by_whitespace': False, 'split_by_unicode_script': False}, True),
    ({'byte_fallback': False, 'character_coverage': .98}, False)])
def test_other_models(tmp_path, seed, options, lossless):
    theirs, ours = export(train(tmp_path / 'x.model', add_dummy_prefix=False, **options), tmp_path / 'out')
    compare(theirs, ours, random.Random(seed), 500, lossless)
    assert theirs.pad_token_id == options.get('pad_id')


def test_tokenizer_json(tmp_path, seed):
    """A copy; without the part that adds a begin id if there is one."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.train_from_iterator([CODE], tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=['<s>', '<|endoftext|>'], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    for name, processor in (('plain', tokenizers.processors.ByteLevel()), (
            'adds', tokenizers.processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 0)]))):
        model.post_processor = processor
        model.save(str(tmp_path / f'{name}.json'))
        theirs, ours = export(str(tmp_path / f'{name}.json'), tmp_path / name)
        assert (theirs.bos_token, theirs.eos_token) == ('<|endoftext|>', '<|endoftext|>')
        same = (tmp_path / name / 'tokenizer.json').read_bytes() == (tmp_path / f'{name}.json').read_bytes()
        assert same == (name == 'plain')
        for text in texts(random.Random(seed), 300):
            assert theirs.encode(text) == ours.encode(text) and theirs.decode(ours.encode(text)) == text


@pytest.mark.parametrize('options, why', [
    ({'model_type': 'unigram'}, 'no BPE'), ({'normalization_rule_name': 'nmt_nfkc'}, 'changes the text'),
    ({'remove_extra_whitespaces': True}, 'changes the text'),
    ({'treat_whitespace_as_suffix': True}, 'changes the text'),
    ({'user_defined_symbols': ['<u>']}, 'user-defined symbols')])
def test_no_such_tokenizer_json(tmp_path, options, why):
    (tmp_path / 'out').mkdir()
    note = write_huggingface(train(tmp_path / 'x.model', **options), str(tmp_path / 'out'))
    assert 'x.model: written without a tokenizer.json' in note and why in note
    assert os.listdir(tmp_path / 'out') == ['tokenizer.model']


def test_no_such_merges(tmp_path):
    """Models that no trainer makes, but other tools do."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto
    path = train(tmp_path / 'x.model')

    def tie(model):  # the two pieces that are merged first
        model.pieces[260].score = model.pieces[259].score

    def unused(model):
        model.pieces[300].type = model.SentencePiece.UNUSED

    def no_character(model):
        model.pieces.add(piece='q\u1234', score=-10_000)

    for change, why in ((tie, 'same score'), (unused, 'unused'), (no_character, 'character that is no piece')):
        model = ModelProto.FromString(open(path, 'rb').read())
        change(model)
        (tmp_path / 'y.model').write_bytes(model.SerializeToString())
        (tmp_path / change.__name__).mkdir()
        assert why in write_huggingface(str(tmp_path / 'y.model'), str(tmp_path / change.__name__))
        assert os.listdir(tmp_path / change.__name__) == ['tokenizer.model']
