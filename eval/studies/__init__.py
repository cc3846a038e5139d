"""Studies: experiments about one technique, each a cell of rows."""
