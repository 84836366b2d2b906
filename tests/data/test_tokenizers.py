"""Tokenisers: round trips, byte counts, special tokens, bad files."""

import io
import json
import threading

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import sentencepiece
import tokenizers as hf

from mod_jax.data import tokenizers
from mod_jax.serving.text_stream import TextStream

CORPUS = [
  'the cat sat on the mat, and the dog sat on the log.',
  'naïve café — 東京 in the rain',
  'def f(x):\n  return x + 1\n',
] * 20


def train_sentencepiece(folder, **kwargs):
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(CORPUS),
    model_writer=model,
    vocab_size=340,
    byte_fallback=True,
    hard_vocab_limit=False,
    minloglevel=2,
    **kwargs,
  )
  path = folder / 'tokenizer.model'
  path.write_bytes(model.getvalue())
  return path


@pytest.fixture(scope='module')
def sp_path(tmp_path_factory):
  """A SentencePiece model with byte fallback."""
  return train_sentencepiece(
    tmp_path_factory.mktemp('sp'),
    normalization_rule_name='identity',
    remove_extra_whitespaces=False,
    add_dummy_prefix=False,
  )


@pytest.fixture(scope='module')
def hf_path(tmp_path_factory):
  """A byte-level BPE that was saved with truncation and padding."""
  tok = hf.Tokenizer(hf.models.BPE())
  tok.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tok.decoder = hf.decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=['<|endoftext|>', '<fim>'],
    initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tok.train_from_iterator(CORPUS, trainer)
  tok.enable_truncation(4)
  tok.enable_padding(length=4)
  path = tmp_path_factory.mktemp('hf') / 'tokenizer.json'
  tok.save(str(path))
  return path


def all_kinds(sp_path, hf_path):
  return [
    tokenizers.make('bytes'),
    tokenizers.make('sentencepiece', str(sp_path)),
    tokenizers.make('huggingface', str(hf_path)),
  ]


@given(st.text())
def test_bytes_round_trip(text):
  tok = tokenizers.make('bytes')
  ids = tok.encode(text)
  assert tok.decode(ids) == text.encode('utf-8', 'replace').decode()
  assert tok.encode_bytes(text.encode('utf-8', 'replace')).tolist() == ids
  assert tok.encode_bytes(b'\xff\x00').tolist() == [255, 0]  # No UTF-8.
  assert tok.decode([0xE6, 0x9D]) == '\ufffd'


@pytest.mark.parametrize('text', CORPUS[:3] + ['\x01🦊 z\t'])
def test_each_kind_is_lossless_and_counts_every_byte(sp_path, hf_path, text):
  for tok in all_kinds(sp_path, hf_path):
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert tok.token_bytes.shape == (tok.vocab_size,)
    assert tok.token_bytes.dtype == np.int32
    assert tok.token_bytes[ids].sum() == len(text.encode())
    assert max(ids) < tok.vocab_size
    if tok.vocab_size > 256:
      assert len(ids) < len(text.encode()) or '🦊' in text


def test_special_ids(sp_path, hf_path):
  for tok, eos, bos in zip(
    all_kinds(sp_path, hf_path), (None, 2, 0), (None, 1, None), strict=True
  ):
    assert (tok.eos_id, tok.bos_id) == (eos, bos)
    if eos is not None:
      assert tok.token_bytes[eos] == 0


def test_declared_end_token_wins_over_the_customary(hf_path, tmp_path):
  copy = tmp_path / 'tokenizer.json'
  copy.write_bytes(hf_path.read_bytes())
  before = tokenizers.make('huggingface', str(tmp_path))
  (tmp_path / 'tokenizer_config.json').write_text(
    json.dumps({'eos_token': {'content': '<fim>'}})
  )
  after = tokenizers.make('huggingface', str(tmp_path))
  assert (before.eos_id, after.eos_id) == (0, 1)
  assert before.fingerprint != after.fingerprint


def test_a_begin_token_that_is_null_is_none(hf_path, tmp_path):
  tok = hf.Tokenizer.from_file(str(hf_path))
  tok.add_special_tokens(['<s>'])
  tok.save(str(tmp_path / 'tokenizer.json'))
  declared = tmp_path / 'tokenizer_config.json'
  begins = []
  for text in ('{}', '{"bos_token": null}'):
    declared.write_text(text)
    begins.append(tokenizers.make('huggingface', str(tmp_path)).bos_id)
  assert begins == [tok.token_to_id('<s>'), None]


def test_prompts_begin_as_the_config_beside_the_template_says(
  hf_path, tmp_path
):
  tok = hf.Tokenizer.from_file(str(hf_path))
  tok.add_special_tokens(['<s>'])
  (bos,) = tok.encode('<s>').ids[:1]
  declared = tmp_path / 'tokenizer_config.json'
  for template in ('$A', '<s> $A'):
    tok.post_processor = hf.processors.TemplateProcessing(
      single=template, special_tokens=[('<s>', bos)]
    )
    tok.save(str(tmp_path / 'tokenizer.json'))
    for says, begins in (
      (None, '<s>' in template),
      (True, True),
      (False, False),
    ):
      declared.write_text(json.dumps({'add_bos_token': says}))
      made = tokenizers.make('huggingface', str(tmp_path))
      ids = made.encode_prompt('the cat')
      assert ids == [bos] * begins + made.encode('the cat')
  declared.write_text('{"add_bos_token": true, "bos_token": null}')
  made = tokenizers.make('huggingface', str(tmp_path))
  assert made.encode_prompt('the cat') == made.encode('the cat')


def test_a_chat_beside_it_changes_no_text(hf_path):
  tok = tokenizers.make('huggingface', str(hf_path))
  text, done = 'a <|endoftext|> b', threading.Event()
  assert tok.eos_id in tok.encode_chat(text)

  def chat():
    while not done.is_set():
      tok.encode_chat(text)

  thread = threading.Thread(target=chat)
  thread.start()
  try:
    # A tokenizer that they shared would be met in the other's state each time.
    assert not any(tok.eos_id in tok.encode(text) for _ in range(2000))
  finally:
    done.set()
    thread.join()


def test_text_after_a_text(sp_path, hf_path):
  # This one leaves out the space before a text, as those of Llama 2 do.
  rare = [f'<0x{byte:02X}>' for byte in '漢字'.encode()]
  vocab = {'▁the': 0, '▁sat': 1} | {x: i for i, x in enumerate(rare, 2)}
  words = hf.Tokenizer(hf.models.WordLevel(vocab, '▁the'))
  words.add_special_tokens(['<fim>'])
  words.pre_tokenizer = hf.pre_tokenizers.Metaspace()
  words.decoder = hf.decoders.Sequence(
    [hf.decoders.ByteFallback(), hf.decoders.Metaspace()]
  )
  path = hf_path.parent / 'words.json'
  words.save(str(path))
  tok = tokenizers.make('huggingface', str(path))
  assert tok.decode([1]) == tok.decode_after([], [1]) == 'sat'
  assert tok.decode_after([0], [1]) == ' sat'
  # The last four tokens begin within a character.
  ids = [vocab[byte] for byte in rare]
  assert tok.decode_after(ids, ids) == '漢字'
  stream = TextStream(tok, [], ())
  pieces = [stream.add(i) for i in (0, words.token_to_id('<fim>'), 1)]
  assert pieces == ['the', '', ' sat']
  for tok in all_kinds(sp_path, hf_path):
    for before, after in (('the cat', ' sat é'), ('the', ''), ('', 'cat')):
      ids = tok.encode(before), tok.encode(after)
      assert tok.decode_after(*ids) == after
  # By default, SentencePiece leaves out all spaces before the first word.
  path = train_sentencepiece(hf_path.parent)
  tok = tokenizers.make('sentencepiece', str(path))
  ids = {piece: i for i, piece in enumerate(tok.pieces(range(tok.vocab_size)))}
  before, *ids = (ids[piece] for piece in ('␣ca', '␣', '␣d'))
  stream = TextStream(tok, [before], ())
  text = ''.join(map(stream.add, ids))
  assert text == tok.decode_after([before], ids) == '  d'
  # Half a character, which becomes a whole one.
  first, *rest = 'é!'.encode()
  assert tokenizers.make('bytes').decode_after([first], rest) == '\ufffd!'


def test_ids_outside_the_vocabulary_never_raise(sp_path, hf_path):
  for tok in all_kinds(sp_path, hf_path):
    bad = [-1, tok.vocab_size, 2**40]
    good = tok.encode('cat')
    assert tok.decode(good + bad + good) == 'cat' + 3 * '\ufffd' + 'cat'
    assert tok.pieces(bad) == 3 * ['\ufffd']
    assert tok.decode([]) == ''
    assert isinstance(tok.decode(range(tok.vocab_size)), str)


def test_pieces_are_printable(sp_path, hf_path):
  for tok in all_kinds(sp_path, hf_path):
    pieces = tok.pieces(range(tok.vocab_size))
    assert all(p and p.isprintable() for p in pieces)
  pieces = tokenizers.make('bytes').pieces(list(b'a \n\t\x00\xe6'))
  assert pieces == ['a', '␣', '↵', '⇥', '\\x00', '\\xe6']


@pytest.mark.parametrize(
  ('decoder', 'token', 'count'),
  [
    (None, '##é', 4),
    ({'type': 'WordPiece', 'prefix': '##'}, '##é', 2),
    ({'type': 'WordPiece', 'prefix': '##'}, 'é', 3),
    ({'type': 'Metaspace', 'replacement': '▁'}, '▁ab', 3),
    ({'type': 'BPEDecoder', 'suffix': '</w>'}, 'ab</w>', 3),
    ({'type': 'ByteLevel'}, 'ĠÃ', 2),
    (
      {
        'type': 'Sequence',
        'decoders': [
          {'type': 'Replace', 'pattern': {'String': '▁'}, 'content': ' '},
          {'type': 'ByteFallback'},
        ],
      },
      '<0xE6>',
      1,
    ),
  ],
)
def test_bytes_of_a_vocabulary_entry(decoder, token, count):
  assert len(tokenizers._surface_function(decoder)(token)) == count
