"""Text to token ids and back, for a sentencepiece .model or a HuggingFace tokenizer.json.

Text is data here, never a command: "</s>" in it becomes the ids of its characters, no control id, and no begin or end
id is added. Our own models (data/text.py) are lossless but for a literal U+2581, which sentencepiece reads as a space.
"""
import json
import os
import shutil
from typing import Sequence

from nano.shards import DataError, file_sha256

# How models without a declared end id call their end of document, the most specific first.
SEPARATORS = ('<|endoftext|>', '<|end_of_text|>', '<|eot|>', '</s>', '<eos>', '<|eos|>')


class SentencePiece:
    """A .model file. `separator` is the id that ends a document, None if the model has none."""

    def __init__(self, path: str):
        from sentencepiece import SentencePieceProcessor
        try:
            with open(path, 'rb') as f:
                self._model = SentencePieceProcessor(model_proto=f.read())
            self.vocab_size: int = self._model.vocab_size()
        except (OSError, RuntimeError) as e:
            raise DataError(f'{path}: cannot be read as a sentencepiece model ({e})') from e
        self.path = path
        self.separator: int | None = self._model.eos_id()
        if self.separator < 0:
            ids = [self._model.piece_to_id(s) for s in SEPARATORS]
            self.separator = next((i for i in ids if i != self._model.unk_id()), None)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD; control ids become nothing. ValueError: an id of no piece."""
        ids = [int(i) for i in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f'token ids from {min(ids)} to {max(ids)}, {self.path} has {self.vocab_size}')
        return self._model.decode(ids)

    def pieces(self) -> list[str]:
        return [self._model.id_to_piece(i) for i in range(self.vocab_size)]


class HuggingFace:
    """A tokenizer.json file. `separator` is the id that ends a document, None if it has none of the usual names."""

    def __init__(self, path: str):
        try:
            from tokenizers import Tokenizer as Model
        except ImportError as e:
            raise DataError(f'{path}: needs the package tokenizers: '
                            'python -m pip install -r data/requirements.txt') from e
        try:
            self._model = Model.from_file(path)
        except Exception as e:  # the package raises bare Exception
            raise DataError(f'{path}: cannot be read as a tokenizer.json ({e})') from e
        self._model.encode_special_tokens = True  # a special token's name in a text is text
        self._model.no_truncation()
        self._model.no_padding()
        names = self._model.get_vocab(with_added_tokens=True)
        self.path, self.vocab_size = path, max(names.values()) + 1
        self.separator: int | None = next((names[s] for s in SEPARATORS if s in names), None)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD; special ids become nothing. ValueError: an id of no piece."""
        ids = [int(i) for i in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f'token ids from {min(ids)} to {max(ids)}, {self.path} has {self.vocab_size}')
        return self._model.decode(ids, skip_special_tokens=True)


Tokenizer = SentencePiece | HuggingFace


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in `path`, its kind told by the suffix; DataError for what cannot be read."""
    if not os.path.isfile(path):
        raise DataError(f'{path}: no such tokenizer file')
    if path.endswith('.model'):
        return SentencePiece(path)
    if path.endswith('.json'):
        return HuggingFace(path)
    raise DataError(f'{path}: a tokenizer is a sentencepiece .model or a HuggingFace tokenizer.json')


def write_huggingface(tokenizer_path: str, folder: str) -> str:
    """Writes the files from which transformers.AutoTokenizer makes this tokenizer; returns '', or what is missing.

    The ids are those of `encode` here: no begin or end id is added. One thing differs, by custom there: a special
    token's name in a text becomes its id, unless the caller passes split_special_tokens=True. The file is copied, but
    a tokenizer.json loses what adds ids. A .model is also told as a tokenizer.json if that has the same ids for any
    text, else it lies alone: what transformers then makes of it is unproven, and the string returned says why."""
    tokenizer = load_tokenizer(tokenizer_path)
    model, end, told = tokenizer._model, tokenizer.separator, None
    shutil.copyfile(tokenizer_path, os.path.join(folder, 'tokenizer' + os.path.splitext(tokenizer_path)[1]))
    if isinstance(tokenizer, HuggingFace):
        names = {} if end is None else dict.fromkeys(('bos', 'eos'), model.id_to_token(end))
        if model.num_special_tokens_to_add(False):  # transformers heeds no add_bos_token beside a tokenizer.json
            with open(tokenizer_path, encoding='utf-8') as f:
                told = {**json.load(f), 'post_processor': None}
    else:
        ids = {'unk': model.unk_id(), 'pad': model.pad_id(), **({} if end is None else {'bos': end, 'eos': end})}
        names = {k: model.id_to_piece(i) for k, i in ids.items() if i >= 0}
        told = as_tokenizer_json(model.serialized_model_proto(), names['unk'])
    if isinstance(told, str):
        return f'{tokenizer_path}: written without a tokenizer.json, whose ids could differ: {told}'
    if told:
        with open(os.path.join(folder, 'tokenizer.json'), 'w', encoding='utf-8') as f:
            json.dump(told, f, ensure_ascii=False, indent=1)
    with open(os.path.join(folder, 'tokenizer_config.json'), 'w', encoding='utf-8') as f:
        json.dump({'tokenizer_class': 'PreTrainedTokenizerFast', 'add_bos_token': False, 'add_eos_token': False,
                   'clean_up_tokenization_spaces': False, 'source_sha256': file_sha256(tokenizer_path),
                   **{f'{k}_token': v for k, v in names.items()}}, f, indent=1)
    return ''


def as_tokenizer_json(proto: bytes, unk: str) -> dict | str:
    """A sentencepiece model in the terms of a tokenizer.json, or why that would give some texts other ids."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto
    model = ModelProto.FromString(proto)
    spec, normalizer, kinds = model.trainer_spec, model.normalizer_spec, model.SentencePiece
    prefix = normalizer.add_dummy_prefix
    scores = {p.piece: p.score for p in model.pieces if p.type == kinds.NORMAL}
    # User-defined symbols. One with a space is never found: spaces are U+2581 by the time they are looked for.
    own = {p.piece for p in model.pieces if p.type == kinds.USER_DEFINED and ' ' not in p.piece}
    # sentencepiece merges any two neighbours that make a piece, by its score, then from the left; tokenizers merges
    # listed pairs, in the list's order, then from the left. That is the same if no two pieces tie and all that is
    # merged has an id. The order among the pairs that make one piece never mattered in 200,000 random cases.
    merges = [(piece[:i], piece[i:]) for piece in sorted(scores, key=scores.get, reverse=True)
              for i in range(1, len(piece)) if piece[:i] in scores and piece[i:] in scores]
    made = {a + b for a, b in merges}
    for wrong, why in ((spec.model_type != spec.BPE, 'it is no BPE model'),
                       (normalizer.precompiled_charsmap or model.denormalizer_spec.precompiled_charsmap
                        or normalizer.remove_extra_whitespaces or not normalizer.escape_whitespaces
                        or prefix and spec.treat_whitespace_as_suffix, 'it changes the text more than tokenizers can'),
                       (prefix and own, 'it puts a space before the text and has user-defined symbols'),
                       (any(p.type == kinds.UNUSED for p in model.pieces), 'it has unused pieces'),
                       (len({scores[p] for p in made}) < len(made), 'some of its pieces have the same score'),
                       (not set(''.join(scores)) <= {*scores, *own}, 'a piece has a character that is no piece')):
        if wrong:
            return why
    return {
        'added_tokens': [{'id': i, 'content': p.piece, 'special': p.piece not in own, 'normalized': p.piece in own,
                          'single_word': False, 'lstrip': False, 'rstrip': False} for i, p in enumerate(model.pieces)
                         if p.piece in own or p.type in (kinds.UNKNOWN, kinds.CONTROL)],
        'normalizer': {'type': 'Sequence', 'normalizers': [
            *[{'type': 'Prepend', 'prepend': '\u2581'}][:prefix],
            {'type': 'Replace', 'pattern': {'String': ' '}, 'content': '\u2581'}]},
        'decoder': {'type': 'Sequence', 'decoders': [
            {'type': 'Replace', 'pattern': {'String': '\u2581'}, 'content': ' '}, {'type': 'ByteFallback'},
            {'type': 'Fuse'}, *[{'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0}][:prefix]]},
        'model': {'type': 'BPE', 'unk_token': unk, 'fuse_unk': True, 'byte_fallback': spec.byte_fallback,
                  'vocab': {p.piece: i for i, p in enumerate(model.pieces)}, 'merges': merges}}
