"""What a whole file that needs Triton imports first: where there is none, it is skipped."""

import pytest
from triton_here import HERE, WHY

if not HERE:
    pytest.skip(WHY, allow_module_level=True)

MARK = pytest.mark.triton
