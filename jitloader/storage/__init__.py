"""Stand-in until the storage room lands."""
import os
import numpy as np
def open_array(path, **k):
    return np.load(os.fspath(path), mmap_mode="r", allow_pickle=False)
