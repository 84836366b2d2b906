"""Runs steps of a model of `transformers` on PyTorch, on request.

Benchmarks with `--torch` run this script under an interpreter that has torch
and transformers, or timm for ViTs. Each input line requests a step; an output
line says that it has been started, and, after the line `wait`, that it is done.
The first argument says what a step is; the others are its sizes. On a GPU
products are in bfloat16, and training steps and ViTs are compiled.
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

  return about_transformers(model), step


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

  return about_transformers(model), step


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
    model(waves[batch])

  return about_transformers(model), step


def vit(image_size, width, layers, heads):
  """Returns timm's ViT."""
  # Not all who have torch and transformers have it.
  import timm

  model = timm.models.VisionTransformer(
    img_size=image_size, embed_dim=width, depth=layers, num_heads=heads
  )
  return model.to(DEVICE), [f'timm {timm.__version__}']


def vit_train(batch, *sizes):
  """A training step of a ViT."""
  model, about = vit(*sizes)
  optimizer = torch.optim.AdamW(
    model.train().parameters(), lr=1e-4, fused=ON_GPU
  )
  images_BCHW = torch.randn(batch, 3, sizes[0], sizes[0], device=DEVICE)
  label_B = torch.randint(0, 1000, (batch,), device=DEVICE)
  forward = torch.compile(model) if ON_GPU else model

  def step(_):
    optimizer.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=ON_GPU):
      logits_BV = forward(images_BCHW)
    torch.nn.functional.cross_entropy(logits_BV.float(), label_B).backward()
    optimizer.step()

  return about, step


def vit_infer(batch, *sizes):
  """A pass of a ViT, on a GPU as one CUDA graph."""
  model, about = vit(*sizes)
  images_BCHW = torch.randn(batch, 3, sizes[0], sizes[0], device=DEVICE)
  model.eval()
  if ON_GPU:
    images_BCHW = images_BCHW.bfloat16()
    model = torch.compile(model.bfloat16(), mode='reduce-overhead')
    about.append('CUDA graph')

  @torch.inference_mode()
  def step(_):
    model(images_BCHW)

  return about, step


def about_transformers(model):
  return [
    f'transformers {transformers.__version__}',
    model.config._attn_implementation,
  ]


def main():
  kind, *sizes = sys.argv[1:]
  torch.manual_seed(0)
  kinds = (train, decode, wav2vec2, vit_train, vit_infer)
  make = {function.__name__: function for function in kinds}[kind]
  (library, *more), step = make(*map(int, sizes))
  about = [f'torch {torch.__version__}', library]
  if ON_GPU:
    about.append(f'{torch.cuda.get_device_name()}, bfloat16')
    about += ['torch.compile'] if kind not in ('decode', 'wav2vec2') else []
  else:
    about.append(f'{torch.get_num_threads()} threads')
  print(', '.join([*about, *more]), flush=True)
  for line in sys.stdin:
    if line.strip() != 'wait':
      step(line)
    elif ON_GPU:
      torch.cuda.synchronize()
    print('done', flush=True)


if __name__ == '__main__':
  main()
