"""Speculative decoding on TinyMoE: does it change tokens, and how many drafts are accepted."""
