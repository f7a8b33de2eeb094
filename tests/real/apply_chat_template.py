"""Runs in SGLang's Python: token ids of conversations by transformers' own `apply_chat_template`, JSON in and out."""

import json
import sys

from transformers import AutoTokenizer

answers = []
tokenizers = {}
for folder, conversation in json.load(sys.stdin):
    tokenizer = tokenizers.get(folder) or AutoTokenizer.from_pretrained(folder)
    tokenizers[folder] = tokenizer
    answers.append(
        tokenizer.apply_chat_template(
            conversation["messages"],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **conversation.get("chat_template_kwargs", {}),
        )
    )
json.dump(answers, sys.stdout)
