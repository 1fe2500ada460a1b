"""Certificates of servers: compare an OpenAI-compatible server that speculates with one that does not, or with a base.

Speculative decoding must not change the text. `certify_server` asks both sides the same questions, and tells ties of
two tokens from faults by their log-probabilities.
"""
