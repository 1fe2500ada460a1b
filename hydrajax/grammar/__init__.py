"""Structured output: JSON schemas, regular expressions, choices and Lark grammars (docs/structured_output.md)."""
