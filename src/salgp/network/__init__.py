"""Reading a network: which layers to tap, hooks that leave no trace, pooling, augmented samples,
extraction.
"""
