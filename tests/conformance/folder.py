"""A model folder as transformers writes it: tiny random weights under a byte-level tokenizer, to be served by a process."""

from pathlib import Path

from engine.testing import tiny_module
from tests.conformance.served import VOCAB_SIZE
from tests.tokenizers_for_tests import byte_level


def served_folder(folder: Path) -> Path:
    """Write weights and tokenizer; return the folder."""
    module = tiny_module(vocab_size=VOCAB_SIZE)
    tokenizer = byte_level()
    for config in (module.config, module.generation_config):
        config.eos_token_id, config.bos_token_id, config.pad_token_id = tokenizer.eos_token_id, None, None
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
