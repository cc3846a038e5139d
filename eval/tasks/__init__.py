"""The local tasks: their texts and rows, and how these are made."""
