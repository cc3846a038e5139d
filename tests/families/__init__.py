"""Every family with every method, against the model's own attention and cache."""
