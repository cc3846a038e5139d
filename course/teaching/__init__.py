"""Teaching: what the notebooks import: the lesson's frame, traces of a cache, checks."""

from kvlab.extras import needs

needs("matplotlib", "PIL")
