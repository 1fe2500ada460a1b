"""Speculative speculative decoding: the draft prepares the next round while the base verifies this one (docs/ssd.md).

Base and draft sit on separate devices. While the base verifies round t, the draft guesses what will come of it, drafts
round t + 1 for the likeliest outcomes and keeps these drafts; if the base's verdict is among them, the next draft is
ready. Kumar, Dao and May, "Speculative Speculative Decoding", ICLR 2026, arXiv:2603.03251.
"""
