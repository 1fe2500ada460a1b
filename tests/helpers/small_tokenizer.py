"""A small byte-level tokenizer, trained on demand."""

from __future__ import annotations

# Characters of one to four bytes, which tokens can split.
SAMPLE = ["the tree of the draft, the base of the tree", "naïve café Straße", "日本語のテキスト", "🙂🌳🌲 trees 🌳"]
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"


def byte_level():
    """Return a byte-level BPE tokenizer with <unk>, <s>, </s> = 0, 1, 2; it adds <s> and has a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.BPE(unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator(SAMPLE, trainer)
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=True,  # as in many released tokenizers
        model_max_length=16,  # otherwise transformers warns about longer texts
    )
