"""Choose the number of drafted tokens while decoding, by measured cost and counted acceptance."""
