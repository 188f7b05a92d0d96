#!/usr/bin/env bash
# llguidance 1.9.1 encodes control tokens that a text spells out, although `parse_special` is false.
#
# Guess: without parse_special, `<|end|>` in a text is encoded as its characters: tokenize_bytes names the option, false by default.
# Seen: it is the control token with either value, for a tokenizer of the tokenizers library. That library has the switch, named
# encode_special_tokens, and llguidance leaves it off.
# Harm: a program that encodes a user's text in this way lets the user end a turn or write as the system.
# latebranch encodes prompts by the tokenizers library, with the switch on. It uses tokenize_bytes for drafts alone.
source "$(dirname "$0")/engines.sh"
engines llguidance
pip install --quiet --disable-pip-version-check --no-compile tokenizers==0.23.3

python - <<'PY'
from engines import check, done
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
end = tokenizer.token_to_id("<|end|>")
found = LLTokenizer(tokenizer.to_str())
for parses in (False, True):
    ids = found.tokenize_bytes(b"a<|end|>", parse_special=parses)
    check(f"parse_special={parses}: the control token", ids[-1] == end, ids)
tokenizer.encode_special_tokens = True
check("the tokenizers library can encode its characters", end not in tokenizer.encode("a<|end|>").ids)
done()
PY
