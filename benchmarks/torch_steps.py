"""Runs steps of a model of `transformers` on PyTorch, on request.

Benchmarks with `--torch` run this script under an interpreter that has torch
and transformers. Each input line requests a step; an output line says that it
is done. The first argument says what a step is; the others are its sizes. On a
GPU products are in bfloat16, and training steps are compiled.
"""

import sys

import torch
import transformers

ON_GPU = torch.cuda.is_available()
DEVICE = 'cuda' if ON_GPU else 'cpu'


def llama(vocab, width, layers, heads, hidden, **fields):
  config = transformers.LlamaConfig(
    vocab_size=vocab,
    hidden_size=width,
    intermediate_size=hidden,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    tie_word_embeddings=True,
    **fields,
  )
  return transformers.LlamaForCausalLM(config).to(DEVICE)


def train(batch, length, vocab, *sizes):
  """A training step of a Llama on a batch of this length."""
  model = llama(vocab, *sizes, max_position_embeddings=length, use_cache=False)
  optimizer = torch.optim.AdamW(
    model.train().parameters(), lr=1e-3, fused=ON_GPU
  )
  # The model shifts the targets by itself.
  tokens_BL = torch.randint(0, vocab, (batch, length), device=DEVICE)
  forward = torch.compile(model) if ON_GPU else model

  def step(_):
    optimizer.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=ON_GPU):
      loss = forward(input_ids=tokens_BL, labels=tokens_BL).loss
    loss.backward()
    optimizer.step()
    return loss.item()

  return model, step


def decode(batch, context, vocab, *sizes):
  """A step of a Llama that decodes a token of each row after a context."""
  model = llama(vocab, *sizes, max_position_embeddings=2 * context).eval()
  if ON_GPU:
    model = model.bfloat16()
  prompt_BL = torch.randint(0, vocab, (batch, context), device=DEVICE)
  with torch.inference_mode():
    cache = model(input_ids=prompt_BL, use_cache=True).past_key_values
  token_B1 = prompt_BL[:, -1:]

  @torch.inference_mode()
  def step(_):
    nonlocal token_B1
    output = model(input_ids=token_B1, past_key_values=cache, use_cache=True)
    token_B1 = output.logits[:, -1:].argmax(dim=-1)
    return token_B1[0].item()

  return model, step


def wav2vec2(layers, width, hidden, samples):
  """A pass of Wav2Vec2 over as many recordings as the line says."""
  config = transformers.Wav2Vec2Config(
    num_hidden_layers=layers, hidden_size=width, intermediate_size=hidden
  )
  model, waves = transformers.Wav2Vec2ForCTC(config).eval().to(DEVICE), {}

  @torch.inference_mode()
  def step(line):
    batch = int(line)
    if batch not in waves:
      waves[batch] = torch.randn(batch, samples, device=DEVICE)
    return tuple(model(waves[batch]).logits.shape)

  return model, step


def main():
  kind, *sizes = sys.argv[1:]
  torch.manual_seed(0)
  make = {'train': train, 'decode': decode, 'wav2vec2': wav2vec2}[kind]
  model, step = make(*map(int, sizes))
  about = [f'torch {torch.__version__}']
  about.append(f'transformers {transformers.__version__}')
  if ON_GPU:
    about.append(f'{torch.cuda.get_device_name()}, bfloat16')
    about += ['torch.compile'] if kind == 'train' else []
  else:
    about.append(f'{torch.get_num_threads()} threads')
  print(', '.join([*about, model.config._attn_implementation]), flush=True)
  for line in sys.stdin:
    print(step(line), flush=True)


if __name__ == '__main__':
  main()
