"""Teaching: what the notebooks import: the lesson's frame, traces of a cache, checks."""
