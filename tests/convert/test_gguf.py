"""GGUF files: their models and tokenizers equal those of Hugging Face."""

import json
import pathlib
import re

import gguf
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tokenizers import pre_tokenizers

import mod_jax
from mod_jax.convert import gguf as convert_gguf
from mod_jax.convert import lm as convert_lm
from mod_jax.data.tokenizers import make
from mod_jax.errors import UserError
from mod_jax.layers.rope import RopeScaling

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'lm'
NAMES = {
  'model.embed_tokens': 'token_embd',
  'model.norm': 'output_norm',
  'lm_head': 'output',
  'input_layernorm': 'attn_norm',
  'post_attention_layernorm': 'ffn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.q_norm': 'attn_q_norm',
  'self_attn.k_norm': 'attn_k_norm',
  'self_attn.o_proj': 'attn_output',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}
TEXT = "It's 12345 o'clock.\n\n  def f(x):\n\treturn x**2  # ümläut 你好 🎉 "


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setattr(convert_gguf, '_CACHE', str(tmp_path / 'cache'))


def gguf_name(name):
  module, _, suffix = name.rpartition('.')
  layer = re.match(r'model\.layers\.(\d+)\.(.*)', module)
  if layer:
    return f'blk.{layer[1]}.{NAMES[layer[2]]}.{suffix}'
  return f'{NAMES[module]}.{suffix}'


def byte_tokens(count):
  """Returns as many tokens: bytes as byte-level tokenizers write them."""
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  return [*('<s>', '</s>'), *letters][:count]


def write(path, family, *, change=None):
  """Writes a golden model as llama.cpp's converter does."""
  config = json.loads((GOLDEN / family / 'config.json').read_text())
  arch = 'llama' if config['model_type'] == 'mistral' else config['model_type']
  writer = gguf.GGUFWriter(path, arch)
  heads = config['num_attention_heads'], config['num_key_value_heads']
  writer.add_block_count(config['num_hidden_layers'])
  writer.add_embedding_length(config['hidden_size'])
  writer.add_feed_forward_length(config['intermediate_size'])
  writer.add_head_count(heads[0])
  writer.add_head_count_kv(heads[1])
  writer.add_context_length(config['max_position_embeddings'])
  writer.add_layer_norm_rms_eps(config['rms_norm_eps'])
  if config.get('head_dim'):
    writer.add_key_length(config['head_dim'])
  if config.get('sliding_window') and config['model_type'] == 'mistral':
    writer.add_sliding_window(config['sliding_window'])
  parameters = config['rope_parameters']
  writer.add_rope_freq_base(parameters['rope_theta'])
  if parameters['rope_type'] == 'linear':
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(parameters['factor'])
  tokens = byte_tokens(config['vocab_size'])
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre('gpt-2')
  writer.add_token_list(tokens)
  writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
  writer.add_token_merges([])
  writer.add_bos_token_id(0)
  writer.add_eos_token_id(1)
  if change is not None:
    change(writer)
  stored = safetensors.numpy.load_file(GOLDEN / family / 'model.safetensors')
  for name, array in stored.items():
    kind = re.search(r'\.([qk])_proj\.', name)
    if arch == 'llama' and kind:
      # https://github.com/ggml-org/llama.cpp, LlamaModel.permute
      count = heads['qk'.index(kind[1])]
      halves = array.reshape(count, 2, -1, *array.shape[1:])
      array = halves.swapaxes(1, 2).reshape(array.shape)
    writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.parametrize(
  'family', ['llama', 'llama_linear', 'mistral', 'qwen2', 'qwen3']
)
def test_a_file_equals_the_folder(tmp_path, family):
  run = mod_jax.load(write(tmp_path / 'model.gguf', family))
  expected = np.load(GOLDEN / 'expected.npz')
  logits = run.apply(expected['tokens']).logits_BLV
  np.testing.assert_allclose(logits, expected[family], atol=1e-4)
  assert run.foreign
  assert run.tokenizer.eos_id == 1


@pytest.mark.parametrize('factor', [8.0, 32.0])
@pytest.mark.parametrize('theta', [1e9, 4.25e5])  # Long, and between.
def test_llama_3s_positions_are_known_by_their_factors(tmp_path, factor, theta):
  """Meta's rule: long wavelengths are stretched, short ones are not."""
  wavelength_C = 2 * np.pi * theta ** (np.arange(0, 4, 2) / 4)
  smooth_C = np.clip((8192 / wavelength_C - 1) / (4 - 1), 0, 1)
  factor_C = 1 / ((1 - smooth_C) / factor + smooth_C)

  def change(factor_C, linear=1.0):
    def add(writer):
      writer.kv_data[0]['llama.rope.freq_base'].value = theta
      writer.add_rope_scaling_factor(linear)
      writer.add_tensor('rope_freqs.weight', factor_C.astype(np.float32))

    return add

  path = tmp_path / 'model.gguf'
  config = mod_jax.load(write(path, 'llama', change=change(factor_C))).config
  assert config.rope_scaling == RopeScaling(kind='llama3', factor=factor)
  for other in (change(3 * factor_C), change(factor_C, linear=2.0)):
    with pytest.raises(UserError, match=r'not that of Llama 3\.1'):
      mod_jax.load(write(path, 'llama', change=other))


def test_heads_share_no_keys_where_nothing_is_said(tmp_path):
  def change(writer):
    del writer.kv_data[0]['qwen2.attention.head_count_kv']

  path = write(tmp_path / 'model.gguf', 'qwen2', change=change)
  config = convert_lm.derive(convert_gguf.unpack(path))
  assert config.num_kv_heads == config.num_heads


@pytest.mark.parametrize('name', ['rope.scale_linear', 'rope.scaling.factor'])
def test_older_files_have_the_factor_of_positions_alone(tmp_path, name):
  path = write(
    tmp_path / 'model.gguf',
    'llama',
    change=lambda writer: writer.add_float32(f'llama.{name}', 4),
  )
  config = json.loads((convert_gguf.unpack(path) / 'config.json').read_text())
  assert config['rope_scaling'] == {'rope_type': 'linear', 'factor': 4}


def test_quantised_weights_are_decoded(tmp_path):
  rng = np.random.default_rng(0)
  array = rng.normal(size=(8, 64)).astype(np.float32)
  data = gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0)
  writer = gguf.GGUFWriter(tmp_path / 'x.gguf', 'qwen2')
  kind = gguf.GGMLQuantizationType.Q8_0
  writer.add_tensor('blk.3.ffn_up.weight', data, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  (name, found), *_ = convert_gguf.stored(tmp_path / 'x.gguf').items()
  assert name == 'model.layers.3.mlp.up_proj.weight'
  assert found.shape == (8, 64)
  np.testing.assert_allclose(np.asarray(found), array, atol=0.02)


def test_it_can_be_exported_and_chats(tmp_path):
  template = '{% for m in messages %}{{ m.content }}{% endfor %}'
  path = write(
    tmp_path / 'model.gguf',
    'qwen2',
    change=lambda writer: writer.add_chat_template(template),
  )
  run = mod_jax.load(path)
  messages = [{'role': 'user', 'content': '!!'}]
  answer = run.chat(messages, max_new_tokens=3)
  mod_jax.export(run, tmp_path / 'out', 'huggingface')
  fields = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert (fields['bos_token_id'], fields['eos_token_id']) == (0, 1)
  again = mod_jax.load(tmp_path / 'out')
  assert again.config == run.config
  assert again.chat(messages, max_new_tokens=3) == answer


@pytest.mark.parametrize('named', [False, True])
def test_texts_end_with_their_turn_as_in_llama_cpp(tmp_path, named):
  def change(writer):
    if named:
      told = writer.kv_data[0]
      told['tokenizer.ggml.tokens'].value[0] = '<|im_end|>'
    else:
      writer.add_eot_token_id(0)

  run = mod_jax.load(write(tmp_path / 'model.gguf', 'qwen2', change=change))
  # Without an end, token 0 follows time and again.
  (found,) = run.predict(['!!'], max_new_tokens=3)
  assert not found.tokens.size
  assert run.tokenizer.end_ids == (1, 0)
  mod_jax.export(run, tmp_path / 'out', 'huggingface')
  fields = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert fields['eos_token_id'] == [1, 0]


def words():
  """A byte-level tokenizer with merges, as it would be in tokenizer.json."""
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  merges = [('d', 'e'), ('de', 'f'), ('Ġ', 'Ġ'), ('1', '2'), ('t', 'u')]
  tokens = ['<s>', '</s>', *letters, *map(''.join, merges)]
  return tokens, merges


@pytest.mark.parametrize(
  ('pre', 'expected'),
  [
    ('gpt-2', '12345'),
    ('smollm', '1 2 3 4 5'),
    ('llama-bpe', '123 45'),
    ('llama3', '123 45'),
    ('falcon3', '123 45'),
    ('smaug-bpe', '123 45'),
    ('qwen2', '1 2 3 4 5'),
    ('deepseek-r1-qwen', '1 2 3 4 5'),
    ('minerva-7b', '1 2 3 4 5'),
    ('mellum', '12345'),
  ],
)
def test_texts_are_split_and_joined_again(tmp_path, pre, expected):
  tokens, merges = words()

  def change(writer):
    for key, add, value in (
      ('tokens', writer.add_token_list, tokens),
      ('token_type', writer.add_token_types, [3, 3] + [1] * len(tokens[2:])),
      ('merges', writer.add_token_merges, [' '.join(m) for m in merges]),
      ('pre', writer.add_tokenizer_pre, pre),
    ):
      writer.kv_data[0].pop(f'tokenizer.ggml.{key}', None)
      add(value)

  folder = convert_gguf.unpack(
    write(tmp_path / 'model.gguf', 'llama', change=change)
  )
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  digits = tokenizer.pre_tokenizer.pre_tokenize_str('12345')
  assert ' '.join(text for text, _ in digits) == expected
  ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
  assert tokenizer.decode(ids) == TEXT
  assert tokens.index('def') in ids


def sentence_pieces(tokens, scores, kinds):
  """Returns a tokenizer of pieces, which come after the special tokens."""
  metadata = {
    'tokenizer.ggml.model': 'llama',
    'tokenizer.ggml.tokens': ['<unk>', '<s>', '</s>', *tokens],
    'tokenizer.ggml.scores': [0.0] * 3 + scores,
    'tokenizer.ggml.token_type': [2, 3, 3] + kinds,
    'tokenizer.ggml.bos_token_id': 1,
    'tokenizer.ggml.eos_token_id': 2,
  }
  return convert_gguf._tokenizer('x', metadata)


def test_sentence_pieces_merge_as_their_scores_say():
  """Against the merges that a converter of tokenizers would be given."""
  pieces = [*'▁abc', 'ab', 'bc', '▁a', '▁ab', '▁abc']
  tokenizer, beside = sentence_pieces(
    [*(f'<0x{i:02X}>' for i in range(256)), *pieces],
    [0.0] * 256 + [-9, -9, -9, -9, -2, -1, -3, -4, -5],
    [6] * 256 + [1] * len(pieces),
  )
  assert beside == {'bos_token': '<s>', 'eos_token': '</s>'}
  # `bc` is the best pair, and leaves `▁a`; that joins with it at last.
  assert tokenizer.encode('abc').tokens == ['<s>', '▁abc']
  assert tokenizer.encode('ab é').tokens == [
    *('<s>', '▁ab', '▁', '<0xC3>', '<0xA9>')
  ]
  ids = tokenizer.encode('ab abc é<unk>').ids
  assert tokenizer.decode(ids) == 'ab abc é'


def test_text_that_spells_a_special_token_is_not_merged_into_it():
  pieces = [*'▁abs<>/', 's>', '</', 'ab']
  tokenizer, _ = sentence_pieces(
    pieces, [-9] * 8 + [-1, -2, -3], [1] * len(pieces)
  )
  tokenizer.encode_special_tokens = True
  assert tokenizer.encode('ab<s></s>').tokens == [
    *('<s>', '▁', 'ab', '<', 's>', '</', 's>')
  ]


@pytest.mark.parametrize(
  ('pre', 'says', 'begins'),
  [
    ('llama-bpe', None, True),  # As in llama.cpp, for Llama 3.
    ('llama-v3', None, True),
    ('pixtral', None, True),
    ('smaug-bpe', None, False),
    ('llama-bpe', False, False),
    ('qwen2', None, False),
    ('qwen2', True, True),
  ],
)
def test_prompts_begin_as_in_llama_cpp(tmp_path, pre, says, begins):
  def change(writer):
    writer.kv_data[0]['tokenizer.ggml.pre'].value = pre
    if says is not None:
      writer.add_add_bos_token(says)

  path = write(tmp_path / 'model.gguf', 'llama', change=change)
  tokenizer = make('huggingface', str(convert_gguf.unpack(path)))
  assert tokenizer.encode_prompt('!!') == [0] * begins + [2, 2]


def key(name, value):
  def change(writer):
    writer.kv_data[0][name].value = value

  return change


def headless(writer):
  del writer.kv_data[0]['qwen2.attention.head_count']


def nameless(writer):
  del writer.kv_data[0]['tokenizer.ggml.pre']


def empty(writer):
  writer.add_tensor = lambda *args, **kwargs: None


@pytest.mark.parametrize(
  ('change', 'named'),
  [
    (key('general.architecture', 'gemma'), "'gemma'.*expected llama"),
    (key('tokenizer.ggml.pre', 'tekken'), "'tekken'; expected one of gpt-2"),
    (nameless, "'default'; expected one of gpt-2"),
    (lambda writer: writer.add_causal_attention(False), 'is_causal=False'),
    (
      key('tokenizer.ggml.eos_token_id', 10**6),
      'bad.gguf: its metadata make no tokenizer',
    ),
    (headless, 'num_attention_heads'),
    (empty, 'bad.gguf holds no embeddings'),
    (
      lambda writer: writer.add_uint16('split.count', 2),
      'bad.gguf is one of several parts',
    ),
  ],
)
def test_refusals(tmp_path, change, named):
  path = write(tmp_path / 'bad.gguf', 'qwen2', change=change)
  with pytest.raises(UserError, match=named):
    mod_jax.load(path)


# Within the metadata, within the table of arrays, within the arrays.
@pytest.mark.parametrize('part', [0.1, 0.5, 0.95])
def test_a_file_that_was_cut_short(tmp_path, part):
  path = write(tmp_path / 'cut.gguf', 'qwen2')
  data = path.read_bytes()
  path.write_bytes(data[: int(part * len(data))])
  with pytest.raises(UserError, match='cut.gguf is damaged'):
    mod_jax.load(path)


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
  path = tmp_path / 'model.gguf'
  first = mod_jax.load(write(path, 'qwen2'))
  second = mod_jax.load(write(path, 'qwen3'))
  assert first.config != second.config
  assert second.config.qk_norm
