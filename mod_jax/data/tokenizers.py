"""Tokenisers with a common interface: bytes, SentencePiece, Hugging Face.

The two subword kinds read local files only; nothing is downloaded.
"""

import abc
from collections.abc import Sequence
import contextlib
import functools
import hashlib
import json
import os
from typing import Any

from etils import epath
import numpy as np
import sentencepiece
import tokenizers

from mod_jax import errors, paths

REPLACEMENT = '\N{REPLACEMENT CHARACTER}'

# Shown instead of white space in figures. All three characters are in
# matplotlib's default font.
_VISIBLE = {
  ' ': '\N{OPEN BOX}',
  '\n': '\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}',
  '\t': '\N{RIGHTWARDS ARROW TO BAR}',
}

# A `tokenizer.json` does not say which special tokens end or begin a text. The
# files in `_DECLARING` do; without them, we look for these customary names.
_CUSTOMARY = {
  'eos_token': '</s> <|endoftext|> <|end_of_text|> <eos> [EOS] [SEP]',
  'bos_token': '<s> <|begin_of_text|> <|startoftext|> <bos> [BOS] [CLS]',
}
_FILES = {'sentencepiece': 'tokenizer.model', 'huggingface': 'tokenizer.json'}
_CONFIG = 'tokenizer_config.json'
# Files in the directory of a `tokenizer.json`; the later one takes precedence.
_DECLARING = ('special_tokens_map.json', _CONFIG)
# Larger ids are refused: memory grows with the largest id, used or not.
_MAX_VOCAB = 2**20
CHAT_TEMPLATE = 'chat_template.jinja'
# A model's settings of generation, in the directory of its tokenizer.
_GENERATION = 'generation_config.json'
# Number of preceding tokens that `decode_after` also decodes: one character
# takes at most 4 bytes of UTF-8, and thus at most 4 tokens.
CONTEXT = 4


def _printable(surface: bytes) -> str:
  text = surface.decode('utf-8', 'backslashreplace')
  return ''.join(
    _VISIBLE.get(c)
    or (c if c.isprintable() else c.encode('unicode_escape').decode())
    for c in text
  )


class Tokenizer(abc.ABC):
  """Converts text to token ids and back.

  Attributes:
    vocab_size: number of ids; every id is in [0, vocab_size).
    eos_id: the id that ends a document, or None.
    bos_id: the id that begins a document, or None.
    end_ids: the ids after which generation stops: `eos_id`, and others, such as
      that of the end of a turn, if the model's settings of generation say so.
    surfaces: the bytes of text that each id stands for; b'' for special tokens.
    fingerprint: changes whenever the same text could get other ids.
    token_bytes: int32 [vocab_size], the number of UTF-8 bytes of text that each
      token stands for (0 for special tokens), to convert nats per token to bits
      per byte.
  """

  def __init__(
    self,
    *,
    surfaces: Sequence[bytes],
    names: dict[int, str],
    eos_id: int | None,
    bos_id: int | None,
    fingerprint: str,
    more_ends: Sequence[int] = (),
  ):
    """`names` has the texts by which figures show ids without bytes.

    `more_ends` are the `end_ids` besides `eos_id`.
    """
    self.surfaces = tuple(surfaces)
    self._names = names
    self.vocab_size = len(self.surfaces)
    self.eos_id = eos_id
    self.bos_id = bos_id
    ends = (eos_id, *more_ends) if eos_id is not None else more_ends
    self.end_ids = tuple(dict.fromkeys(ends))
    self.fingerprint = fingerprint
    self.token_bytes = np.array([len(s) for s in surfaces], np.int32)
    self.token_bytes.flags.writeable = False

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`; no begin or end token is added."""

  def encode_prompt(self, text: str) -> list[int]:
    """Returns the ids of a prompt for a pretrained model to continue."""
    return self.encode(text)

  def encode_after(self, text: str) -> list[int]:
    """Returns the ids of `text` after a special token in the same prompt.

    Unlike `encode`, it adds no space that the tokenizer puts before a whole
    prompt alone.
    """
    return self.encode(text)

  def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of a prompt's texts, from its beginning.

    Between the texts are special tokens, such as the token of a picture.
    """
    return [
      (self.encode_after if i else self.encode)(text)
      for i, text in enumerate(texts)
    ]

  def beginning(self) -> list[int]:
    """Returns the special tokens before a text: BOS, if the tokenizer adds it.

    Only a `tokenizer.json` says whether; other tokenizers add it if it exists.
    """
    return [] if self.bos_id is None else [self.bos_id]

  @abc.abstractmethod
  def _decode(self, ids: list[int]) -> str:
    """Returns the text of ids that are all in the vocabulary."""

  def encode_bytes(self, data: bytes) -> np.ndarray:
    """Returns the ids (int32) of UTF-8 bytes; invalid bytes become U+FFFD."""
    return np.array(self.encode(data.decode('utf-8', 'replace')), np.int32)

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of `ids`; never raises.

    Bytes that are not UTF-8 and ids outside the vocabulary (a model's output
    layer may be padded) become U+FFFD.
    """
    pieces, run = [], []
    for i in np.asarray(ids, np.int64).reshape(-1).tolist():
      if 0 <= i < self.vocab_size:
        run.append(i)
      else:
        pieces += [self._decode(run) if run else '', REPLACEMENT]
        run = []
    return ''.join(pieces) + (self._decode(run) if run else '')

  def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text that `ids` add to the text of the tokens before them.

    Decoded on their own, `ids` may give a different text: SentencePiece drops
    the space before the first word.
    """
    before = [*before][-CONTEXT:]
    # With byte tokens, `before` may begin within a character: drop that part.
    while (text := self.decode(before)).startswith(REPLACEMENT):
      before = before[1:]
    whole = self.decode([*before, *ids])
    # `before` may end within a character that `ids` complete.
    return whole[len(text) :] if whole.startswith(text) else self.decode(ids)

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Returns one printable string per id, white space made visible."""
    out = []
    for i in np.asarray(ids, np.int64).reshape(-1).tolist():
      if not 0 <= i < self.vocab_size:
        out.append(REPLACEMENT)
      elif self.surfaces[i]:
        out.append(_printable(self.surfaces[i]))
      else:
        out.append(self._names.get(i, ''))
    return out

  def spelled(self, id: int) -> str:
    """Returns the text of one token as it is, or its name if it is special.

    Parts of characters are written as in `bytes:\\xe2\\x82`.
    """
    if not 0 <= id < self.vocab_size:
      return ''
    surface = self.surfaces[id]
    try:
      return surface.decode() or self._names.get(id, '')
    except UnicodeDecodeError:
      return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in surface)


class ByteTokenizer(Tokenizer):
  """One token per byte: 256 ids, no special tokens, lossless."""

  def __init__(self):
    super().__init__(
      surfaces=[bytes([i]) for i in range(256)],
      names={},
      eos_id=None,
      bos_id=None,
      fingerprint='bytes-1',
    )

  def encode(self, text: str) -> list[int]:
    """Returns the UTF-8 bytes of `text`; lone surrogates become '?'."""
    return list(text.encode('utf-8', 'replace'))

  def encode_bytes(self, data: bytes) -> np.ndarray:
    """Returns the bytes themselves, valid UTF-8 or not."""
    return np.frombuffer(data, np.uint8).astype(np.int32)

  def _decode(self, ids: list[int]) -> str:
    return bytes(ids).decode('utf-8', 'replace')


class SentencePieceTokenizer(Tokenizer):
  """A SentencePiece model file."""

  def __init__(self, path: str):
    """Loads the model at `path`, or `tokenizer.model` in that directory."""
    file = _find(path, _FILES['sentencepiece'])
    data = _read(file)
    try:
      sp = sentencepiece.SentencePieceProcessor(model_proto=data)
      pieces = [sp.id_to_piece(i) for i in range(sp.get_piece_size())]
      surfaces, names = [], {}
      for i, piece in enumerate(pieces):
        if sp.is_byte(i):
          surface = bytes([int(piece[3:-1], 16)])
        elif sp.is_control(i) or sp.is_unknown(i) or sp.is_unused(i):
          surface, names[i] = b'', piece
        else:
          surface = piece.replace('\u2581', ' ').encode()
        surfaces.append(surface)
    except Exception as e:
      raise _not_a_model(file, 'SentencePiece model', e) from e
    if not surfaces:
      raise _not_a_model(file, 'SentencePiece model', 'it holds no pieces')
    self._sp = sp
    super().__init__(
      surfaces=surfaces,
      names=names,
      eos_id=sp.eos_id() if sp.eos_id() >= 0 else None,
      bos_id=sp.bos_id() if sp.bos_id() >= 0 else None,
      fingerprint='sentencepiece-' + hashlib.sha256(data).hexdigest(),
    )

  def encode(self, text: str) -> list[int]:
    """Returns the model's most likely segmentation of `text`."""
    # The library raises on lone surrogates; replace them with '?'.
    return self._sp.encode(text.encode('utf-8', 'replace').decode())

  def _decode(self, ids: list[int]) -> str:
    return self._sp.decode(ids)


class HuggingFaceTokenizer(Tokenizer):
  """A `tokenizer.json` of the Hugging Face `tokenizers` library."""

  def __init__(self, path: str):
    """Loads the file at `path`, or `tokenizer.json` in that directory."""
    file = _find(path, _FILES['huggingface'])
    data = _read(file)
    try:
      tok = tokenizers.Tokenizer.from_buffer(data)
      vocab = tok.get_vocab(with_added_tokens=True)
      largest = max(vocab.values(), default=-1)
      # Check this before `to_str`, whose time grows with the largest id, too.
      if not 0 <= largest < _MAX_VOCAB:
        why = f'it has the id {largest}; expected less than {_MAX_VOCAB}'
        raise ValueError(why if vocab else 'its vocabulary is empty')
      # Files saved for fine-tuning may truncate texts, for example at 512.
      tok.no_truncation()
      tok.no_padding()
      spec = json.loads(text := tok.to_str())
      # Quotes within the vocabulary are escaped, so this is no part of a token.
      after = text.replace(
        '"prepend_scheme":"first"', '"prepend_scheme":"never"'
      )
      self._after = tok  # Most tokenizers need no second copy in memory.
      if after != text:
        self._after = tokenizers.Tokenizer.from_str(after)
      # Chats need another setting of `encode_special_tokens`. Changing it for
      # each call would not be thread-safe, so keep a second tokeniser.
      self._of_chats = tokenizers.Tokenizer.from_str(tok.to_str())
    except Exception as e:
      raise _not_a_model(file, 'Hugging Face tokenizer.json', e) from e
    # Text that spells a special token must not be encoded as one.
    tok.encode_special_tokens = self._after.encode_special_tokens = True
    self._tok = tok
    added = tok.get_added_tokens_decoder()
    surface_of = _surface_function(spec.get('decoder'))
    surfaces = [b''] * (largest + 1)
    names = {}
    for token, i in vocab.items():
      if i in added:
        names[i] = token
        surfaces[i] = b'' if added[i].special else token.encode()
      else:
        surfaces[i] = surface_of(token)
        if not surfaces[i]:
          names[i] = token
    special = {t.content for t in added.values() if t.special}
    declared = declared_specials(file.parent)
    ids = {}
    for role, customary in _CUSTOMARY.items():
      usual = next((n for n in customary.split() if n in special), None)
      name = declared.get(role, usual)
      ids[role] = tok.token_to_id(name) if name else None
    # As in transformers, this setting replaces the template's special tokens.
    self._begins = paths.read_object(file.parent / _CONFIG).get('add_bos_token')
    digest = hashlib.sha256(data).hexdigest()
    super().__init__(
      surfaces=surfaces,
      names=names,
      eos_id=ids['eos_token'],
      bos_id=ids['bos_token'],
      fingerprint=f'huggingface-{digest}-{ids["eos_token"]}',
      more_ends=[i for i in _told_ends(file.parent) if 0 <= i <= largest],
    )

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text` without the template's special tokens."""
    text = text.encode('utf-8', 'replace').decode()
    return self._tok.encode(text, add_special_tokens=False).ids

  def encode_after(self, text: str) -> list[int]:
    text = text.encode('utf-8', 'replace').decode()
    return self._after.encode(text, add_special_tokens=False).ids

  def encode_prompt(self, text: str) -> list[int]:
    """Returns the ids of a prompt for a pretrained model to continue.

    They begin with the special tokens of the tokeniser's template, such as BOS,
    unless `add_bos_token` in `tokenizer_config.json` says whether with BOS.
    """
    if self._begins is not None:
      begins = self._begins and self.bos_id is not None
      return [*([self.bos_id] if begins else ()), *self.encode(text)]
    text = text.encode('utf-8', 'replace').decode()
    ids = self._tok.encode(text, add_special_tokens=True).ids
    # Some templates also add EOS, after which the model would not continue.
    return ids[:-1] if ids[-1:] == [self.eos_id] else ids

  def beginning(self) -> list[int]:
    ids = self.encode_prompt('a')
    return ids[: len(ids) - len(self.encode('a'))]

  def encode_chat(self, text: str) -> list[int]:
    """Returns the ids of a rendered chat; text may spell special tokens."""
    text = text.encode('utf-8', 'replace').decode()
    return self._of_chats.encode(text, add_special_tokens=False).ids

  def _decode(self, ids: list[int]) -> str:
    return self._tok.decode(ids, skip_special_tokens=True)


def make(kind: str, path: str = '') -> Tokenizer:
  """Returns the tokeniser of a kind: bytes, sentencepiece or huggingface.

  `path` is the local file of the subword kinds, or the directory that holds it.
  """
  if kind == 'bytes':
    return ByteTokenizer()
  if kind == 'sentencepiece':
    return SentencePieceTokenizer(path)
  if kind == 'huggingface':
    return HuggingFaceTokenizer(path)
  raise errors.UserError(
    f'tokenizer={kind!r}: expected bytes, sentencepiece or huggingface'
  )


def files(kind: str, path: str) -> dict[str, bytes]:
  """Returns the contents of a tokenizer's files, by file name.

  `make(kind, directory)` restores the tokenizer from a directory with them.
  """
  if kind == 'bytes':
    return {}
  file = _find(path, _FILES[kind])
  copies = {_FILES[kind]: _read(file)}
  if kind == 'huggingface':
    for name in (*_DECLARING, CHAT_TEMPLATE):
      with contextlib.suppress(OSError):
        copies[name] = (file.parent / name).read_bytes()
    if ends := _told_ends(file.parent):
      copies[_GENERATION] = json.dumps({'eos_token_id': ends}).encode()
  return copies


def copy(kind: str, path: str, directory: str) -> None:
  """Copies a tokenizer's files, so that `make(kind, directory)` restores it."""
  # Check that it is a tokeniser: a config may name any file, even a private
  # one, and the copy may be published.
  make(kind, path)
  for name, data in files(kind, path).items():
    paths.write_bytes(epath.Path(directory) / name, data)


def _find(path: str, name: str) -> epath.Path:
  file = paths.expand(path)
  if file.is_dir():
    file = file / name
  if not file.is_file():
    raise errors.UserError(
      f'tokenizer_path={path!r}: no file {str(file)!r}; give the path of a '
      f'local {name} or of the directory that holds it'
    )
  return file


def _read(file: epath.Path) -> bytes:
  try:
    return file.read_bytes()
  except OSError as e:
    raise errors.UserError(
      f'tokenizer_path={str(file)!r} cannot be read: {e.strerror}; check its '
      'permissions'
    ) from e


def _not_a_model(file, what, why) -> errors.UserError:
  why = ' '.join(str(why).split())[:200]
  return errors.UserError(
    f'tokenizer_path={str(file)!r} is not a readable {what} ({why}); check '
    'that tokenizer= names the right kind'
  )


def declared_specials(directory: os.PathLike) -> dict[str, str]:
  """Returns the special tokens that a directory's files declare, by role.

  Roles are keys such as `bos_token`, which is '' if a file says there is none.
  """
  specials = {}
  for name in _DECLARING:
    fields = paths.read_object(epath.Path(directory) / name)
    for role, value in fields.items():
      if isinstance(value, dict):
        value = value.get('content')
      if role == 'bos_token' and value is None:
        specials.setdefault(role, '')  # The file declares that there is none.
      if role.endswith('_token') and isinstance(value, str):
        specials[role] = value
  return specials


def generation_settings(directory: os.PathLike) -> dict[str, Any]:
  """Returns the settings by which transformers generates."""
  told = paths.read_object(epath.Path(directory) / _GENERATION)
  # Models without that file have these settings in `config.json`.
  return told or paths.read_object(epath.Path(directory) / 'config.json')


def _told_ends(directory: os.PathLike) -> list[int]:
  """Returns the ids after which transformers stops generating."""
  ends = generation_settings(directory).get('eos_token_id')
  ends = ends if isinstance(ends, list) else [ends]
  return [i for i in ends if type(i) is int]


@functools.cache
def _byte_level_table() -> dict[str, int]:
  """Returns the byte that each character of a byte-level BPE stands for.

  Printable Latin-1 characters stand for themselves; the characters from U+0100
  stand for the remaining bytes, in order (Radford et al., 2019).
  """
  table = {
    chr(b): b
    for b in range(256)
    if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174
  }
  rest = sorted(set(range(256)) - set(table.values()))
  return table | {chr(256 + n): b for n, b in enumerate(rest)}


def _surface_function(decoder: dict | None):
  """Returns a function from a vocabulary entry to the bytes it stands for."""
  decoders = [decoder] if decoder else []
  if decoder and decoder.get('type') == 'Sequence':
    decoders = decoder['decoders']
  kinds = {d['type']: d for d in decoders}

  def surface(token: str) -> bytes:
    if 'ByteLevel' in kinds:
      table = _byte_level_table()
      if all(c in table for c in token):
        return bytes(table[c] for c in token)
    if (
      'ByteFallback' in kinds
      and len(token) == 6
      and token.startswith('<0x')
      and token.endswith('>')
    ):
      return bytes([int(token[3:5], 16)])
    for d in decoders:
      if d['type'] == 'Metaspace':
        token = token.replace(d['replacement'], ' ')
      elif d['type'] == 'Replace' and 'String' in d['pattern']:
        token = token.replace(d['pattern']['String'], d['content'])
      elif d['type'] == 'WordPiece':
        joined = token.startswith(d['prefix'])
        token = token[len(d['prefix']) :] if joined else f' {token}'
      elif d['type'] == 'BPEDecoder':
        token = token.replace(d['suffix'], ' ')
    return token.encode('utf-8', 'replace')

  return surface
