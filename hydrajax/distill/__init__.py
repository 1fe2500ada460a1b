"""Self-distillation: let the base write the text that its draft heads then learn from (medusa 2.3.2).

Draft heads guess what the base is about to say, so the base's own text is closer to their task than the text that the
base was trained on. `seeds` says what it is given: beginnings to continue, or conversations of which it writes every
answer itself. `talks` decodes them, `records` keeps what was written. The command is `hydrajax.cli.distill`.
"""
