"""Studies of trained models, run on request by `eval.py --study`.

* `language`, `conversion`, `vision_language`: models of text;
* `images`, `confusion`, `adaptive`: image classifiers;
* `speech`: speech recognisers;
* `devices`: moves a study's arrays to one device.
"""
