"""The mixture of experts: three files, each of which ``--overlay`` can replace.

The server loads them through ``fairtrial.reference.mount``, which hashes the bytes that it compiles.
"""
