"""How the built-in models were made: rows of training text, training, export, the cards' tables."""
