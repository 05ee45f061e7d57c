"""Reading a network: which layers to tap, hooks, pooling, augmented samples,
extraction.
"""
