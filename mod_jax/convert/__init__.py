"""Reads and writes weights in the formats of other libraries.

* `files`: safetensors, `.npz`, and PyTorch's `.pth` by `torch_files`;
* `arrays`: maps other libraries' names and layouts of arrays to ours;
* `beside`: the JSON files that are stored with the weights;
* `vit`, `clip`, `detr`, `lm`, `llava`, `wav2vec2`: the kinds of models;
* `gguf`: files of llama.cpp;
* `peft`: low-rank adapters.
"""
