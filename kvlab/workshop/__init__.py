"""The embedded model: its documents, its training, its checkpoint."""
