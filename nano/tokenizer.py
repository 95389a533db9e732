"""Text to token ids and back, for a sentencepiece .model or a HuggingFace tokenizer.json.

Text is data here, never a command: "</s>" in it becomes the ids of its characters, no control id, and no begin or end
id is added. Our own models (data/text.py) are lossless but for a literal U+2581, which sentencepiece reads as a space.
"""
import os
from typing import Sequence

from nano.shards import DataError

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
