"""Characters as labels of CTC, as in Hugging Face's Wav2Vec2CTCTokenizer."""

from collections.abc import Iterable, Sequence
import dataclasses
import json
import os
import pathlib
import re
import unicodedata

from mod_jax import paths
from mod_jax.errors import UserError

VOCABULARY = 'vocab.json'  # The file's name in a model's directory.
_SPACE = '|'
# Spellings of published models, and of models fine-tuned as in most guides.
_BLANKS, _UNKNOWN = ('<pad>', '[PAD]'), ('<unk>', '[UNK]')


@dataclasses.dataclass(frozen=True)
class Characters:
  """A vocabulary of characters and special symbols, in the order of labels.

  The symbol `|` is the space, and the symbol of padding is the blank of CTC.
  """

  symbols: tuple[str, ...]

  @classmethod
  def of_texts(cls, texts: Iterable[str]) -> 'Characters':
    """Returns the lower-case vocabulary of transcripts, without punctuation."""
    seen = {x for text in texts for x in _plain(text).lower()}
    seen = sorted(x for x in seen if not _is_mark(x) and not x.isspace())
    return cls((_BLANKS[0], _SPACE, *seen))

  @classmethod
  def read(cls, path: str | os.PathLike) -> 'Characters':
    """Reads a `vocab.json`, an object from symbols to labels.

    The `tokenizer_config.json` beside it names the space, if it is not `|`, and
    may say that texts are lower-case though the vocabulary is not.
    """
    path = pathlib.Path(path).expanduser()
    if not path.is_file():
      raise paths.missing(path)
    label_of = paths.read_object(path)
    labels = [*label_of.values()]
    whole = all(type(label) is int for label in labels)
    if not labels or not whole or sorted(labels) != [*range(len(labels))]:
      raise UserError(
        f'{path} is no vocabulary: expected an object from characters to 0, 1'
        ' and so on.'
      )
    told, config = (
      paths.read_object(path.parent / file)
      for file in ('tokenizer_config.json', 'config.json')
    )
    space = told.get('word_delimiter_token')
    symbols = sorted(label_of, key=label_of.get)
    if (blank := config.get('pad_token_id')) and not {*_BLANKS} & {*symbols}:
      raise UserError(
        f'{path} has no {_BLANKS[0]!r}, and the config.json beside it says that'
        f' the blank is {blank}: name the symbol of that label so.'
      )
    if told.get('do_lower_case') is True:
      # Labels must differ: keep `A` beside `a`. Names of symbols stay as well.
      symbols = [
        x.lower() if len(x) == 1 and x.lower() not in label_of else x
        for x in symbols
      ]
    return cls(tuple(_SPACE if x == space else x for x in symbols))

  @property
  def blank(self) -> int:
    """Label of the blank; 0 if the vocabulary has no symbol of padding."""
    return self._label(_BLANKS) or 0

  def _label(self, symbols: Iterable[str]) -> int | None:
    found = (i for i, x in enumerate(self.symbols) if x in symbols)
    return next(found, None)

  def to_json(self) -> str:
    """Returns the text of a `vocab.json`."""
    label_of = {symbol: label for label, symbol in enumerate(self.symbols)}
    return json.dumps(label_of, ensure_ascii=False, indent=1)

  def __len__(self) -> int:
    return len(self.symbols)

  def spelled(self, text: str) -> str:
    """Returns a transcript in the spelling of the vocabulary.

    It has the vocabulary's case, composed characters (NFC) and single spaces,
    and lacks punctuation and symbols that are not in the vocabulary.
    """
    text = _plain(text)
    letters = [x for x in self.symbols if len(x) == 1]
    if not any(x.islower() for x in letters):
      text = text.upper()
    elif not any(x.isupper() for x in letters):
      text = text.lower()
    text = ''.join(
      x for x in text if x in self.symbols or x.isspace() or not _is_mark(x)
    )
    return ' '.join(text.split())

  def encode(self, text: str) -> list[int]:
    """Returns the labels of a transcript from `spelled`.

    Raises ValueError if the vocabulary has neither a character nor `<unk>`.
    """
    label_of = {symbol: label for label, symbol in enumerate(self.symbols)}
    unknown = self._label(_UNKNOWN)
    labels = []
    for character in text.replace(' ', _SPACE):
      label = label_of.get(character, unknown)
      if label is None:
        raise ValueError(f'{character!r} is not in the vocabulary')
      labels.append(label)
    return labels

  def decode(self, labels: Sequence[int]) -> str:
    """Returns the text of labels; special symbols are left out."""
    return ' '.join(''.join(map(self.letter, labels)).split())

  def reference(self, labels: Sequence[int]) -> str:
    """Returns the text of a transcript's labels, to compare with what is heard.

    U+FFFD, which no model outputs, replaces each character that the vocabulary
    lacks: without them, a model that cannot hear them would make no mistake.
    """
    unknown = self._label(_UNKNOWN)
    letters = ('\ufffd' if x == unknown else self.letter(x) for x in labels)
    return ' '.join(''.join(letters).split())

  def letter(self, label: int) -> str:
    """Returns a label's character, ' ' for the space, '' for special symbols.

    Also returns '' for outputs of a model beyond the labels of the vocabulary.
    """
    symbol = self.symbols[label] if label < len(self.symbols) else ''
    special = re.fullmatch(r'<.+>|\[.+\]', symbol)
    return '' if special else symbol.replace(_SPACE, ' ')


def _plain(text: str) -> str:
  text = unicodedata.normalize('NFC', text).replace('’', "'")
  return text.replace(_SPACE, ' ')


def _is_mark(character: str) -> bool:
  # The apostrophe is a letter of words, not punctuation.
  return character != "'" and unicodedata.category(character)[0] in 'PSC'
