"""Write docs/families.md."""

import torch

from .table import families, find
from .test_families import FILE, refusals, whole_page

if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text(whole_page({name: find(name) for name in families()}, refusals()), encoding="utf-8")
