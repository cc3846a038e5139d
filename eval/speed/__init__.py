"""Speed: prefill and decode times of every method beside today's common caches, in the same run."""
