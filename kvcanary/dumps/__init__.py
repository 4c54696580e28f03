"""Dumps: what a recorder kept, as one self-describing file that needs neither the model nor pickle.

A zip of JSON lines and safetensors. Token ids, salts and the seed do not leave: ids are replaced by a secret bijection,
drawn anew for every dump and kept nowhere, and chains are computed again under it and under keys of the dump's own.
"""
