"""Speculative speculative decoding (SSD): the draft model drafts the next round while the base verifies this one.

Base and draft are on separate devices. During the verification of round t the draft model predicts the likeliest
verification outcomes and drafts round t + 1 for each of them into a speculation cache. If the actual outcome is in the
cache, the next draft is ready (docs/ssd.md). Kumar, Dao and May, ICLR 2026, arXiv:2603.03251.
"""
