"""Write docs/families.md."""

import torch

from .models import FAMILIES
from .table import FILE, find, page, refusals

if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text(page({name: find(name) for name in FAMILIES}, refusals()), encoding="utf-8")
