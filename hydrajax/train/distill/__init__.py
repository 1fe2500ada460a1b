"""Self-distillation: the base generates the text that its draft heads are trained on (Medusa 2.3.2).

Draft heads predict the base's own output, which its generations match better than its training data does. `seeds` reads
the prompts: conversations to answer, or beginnings of texts to continue. `dialogues` decodes them, `distill_records`
keeps the output. The command is `hydrajax.cli.distill`.
"""
