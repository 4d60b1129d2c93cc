"""The embedded reference server: a small mixture-of-experts transformer behind an OpenAI-compatible API.

It computes for real, in numpy, on one core. ``python -m fairtrial.reference --help`` says how it is started;
``README.md`` beside this file says what is wrong with it. It needs the extra ``demo``.
"""
