"""Numbers that a cell asks for and does not compute: `check.measured(yours, "name")` compares with these."""

import torch

from course.teaching.check.exercise import NUMBERS

SEEN = torch.ones(8, 13).tril(5).bool()  # of a prompt of six, by eight steps
NUMBERS |= {
    "words_read": sum(range(4, 15)),  # 1: words in, by eleven steps of the loop
    "triangle": SEEN,  # 1: boxes computed in eight steps
    "repeated": 127 / 128,  # 1: of a pass over 128 tokens, what the pass over 127 had done before
    "ten_times": 11,  # 1: new tokens from which on the loop feeds ten times what a cache feeds
    "fed_with_cache": torch.tensor([6] + [1] * 23),  # 2: tokens that each step feeds to write 24
    "fed_in_eight": SEEN.diff(dim=0, prepend=SEEN[:1] & False),  # 2: boxes computed in eight steps
    "at_least": 29_508_608 / 20e9,  # 2: seconds to read the workshop model's weights at 20 GB/s
    "read": 13.147 / 32 + 1.0737,  # 6: GB that an A100 reads for one token of 32 texts
}
