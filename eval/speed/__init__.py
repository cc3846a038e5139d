"""Speed: prefill and decode times of every method beside what people use today, in the same run."""
